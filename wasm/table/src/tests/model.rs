//! Several clients against a model that does one thing after the other: maps that are copied.

use std::collections::BTreeMap;

use guest_abi::table::{limits, op, op_flag, part, status, test};
use proptest::prelude::*;

use crate::Config;
use crate::testing::{Batch, BatchReply, Term, TestStore, filter, small};

type Map = BTreeMap<Vec<u8>, Vec<u8>>;
/// Writes; none: a deletion.
type Own = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

#[derive(Debug, Clone)]
enum Do {
    Write {
        kind: u8,
        key: Vec<u8>,
        len: usize,
    },
    Get {
        key: Vec<u8>,
        lock: bool,
    },
    Scan {
        low: Vec<u8>,
        high: Vec<u8>,
        flags: u16,
        rows: u32,
        bytes: u32,
        sieve: Option<Sieve>,
    },
    Fetch {
        flags: u16,
        sieve: Option<Sieve>,
    },
    /// A savepoint with the number of that one, if there is one.
    Save(usize),
    BackTo(usize),
    Release(usize),
    End {
        commit: bool,
    },
    Wake,
    Restart,
}

/// A filter, and how many entries it looks at.
#[derive(Debug, Clone)]
struct Sieve {
    terms: Vec<Term>,
    examine: u32,
}

impl Sieve {
    fn takes(&self, key: &[u8], value: &[u8]) -> bool {
        self.terms.iter().all(|(of, how, offset, len, operand)| {
            let whole = if *of == part::KEY { key } else { value };
            let piece = whole.iter().skip(*offset as usize).take(*len as usize);
            let piece: Vec<u8> = piece.copied().collect();
            match *how {
                test::BELOW => piece < *operand,
                test::AT_MOST => piece <= *operand,
                test::EQUAL => piece == *operand,
                test::AT_LEAST => piece >= *operand,
                test::ABOVE => piece > *operand,
                _ => piece != *operand,
            }
        })
    }
}

fn sieve() -> impl Strategy<Value = Option<Sieve>> {
    let digits = prop::collection::vec(b'0'..=b'9', 0..3);
    let of_value = (1_u8..=6, 0_u32..4, prop_oneof![Just(u32::MAX), 0_u32..3], digits)
        .prop_map(|(how, offset, len, operand)| (part::VALUE, how, offset, len, operand));
    let of_key = (1_u8..=6, 0_u32..4, prop_oneof![Just(u32::MAX), 0_u32..3], key())
        .prop_map(|(how, offset, len, operand)| (part::KEY, how, offset, len, operand));
    let terms = prop::collection::vec(prop_oneof![of_value, of_key], 0..3);
    prop::option::of((terms, 0_u32..6).prop_map(|(terms, examine)| Sieve { terms, examine }))
}

fn key() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![Just(b'a'), Just(b'b'), Just(0xFF), Just(0)];
    prop::collection::vec(byte, 0..4)
}

fn act() -> impl Strategy<Value = Do> {
    use op::{DELETE, INSERT, PUT, UPDATE};
    let kinds = prop::sample::select(vec![INSERT, PUT, PUT, UPDATE, DELETE]);
    let lens = prop::sample::select(vec![0_usize, 5, 64, 65, 300, 900]);
    let bounds = op_flag::LOW_OPEN | op_flag::HIGH_OPEN | op_flag::NO_HIGH | op_flag::HIGH_PREFIX;
    let flags = bounds | op_flag::BACKWARD | op_flag::KEYS_ONLY | op_flag::SHARED;
    prop_oneof![
        8 => (kinds, key(), lens).prop_map(|(kind, key, len)| Do::Write { kind, key, len }),
        2 => (key(), any::<bool>()).prop_map(|(key, lock)| Do::Get { key, lock }),
        4 => (key(), key(), any::<u16>(), 0_u32..4, prop_oneof![Just(0_u32), 1_u32..500], sieve())
            .prop_map(move |(low, high, f, rows, bytes, sieve)| {
                Do::Scan { low, high, flags: f & flags, rows, bytes, sieve }
            }),
        1 => (any::<u16>(), sieve())
            .prop_map(|(f, sieve)| Do::Fetch { flags: f & op_flag::BACKWARD, sieve }),
        1 => (0_usize..6).prop_map(Do::Save),
        1 => (0_usize..4).prop_map(Do::BackTo),
        1 => (0_usize..4).prop_map(Do::Release),
        2 => any::<bool>().prop_map(|commit| Do::End { commit }),
        1 => Just(Do::Wake),
        1 => prop::bool::weighted(0.2).prop_map(|b| if b { Do::Restart } else { Do::Wake }),
    ]
}

/// A client's transaction in the model.
struct Open {
    number: u64,
    /// Rows that its reads see, but for its own writes; taken at the first read.
    snapshot: Option<Map>,
    own: Own,
    saves: Vec<(u64, Own)>,
}

struct Model {
    world: TestStore,
    table: u32,
    committed: Map,
    open: BTreeMap<u32, Open>,
    /// Clients that have locked each key: exclusive or not.
    locks: BTreeMap<Vec<u8>, Vec<(u32, bool)>>,
    count: u64,
}

/// Key and value in a map.
type Entry<'a> = (&'a Vec<u8>, &'a Vec<u8>);

/// Entries in the range of a scan, in its order.
fn entries_in_range<'a>(map: &'a Map, low: &[u8], high: &[u8], flags: u16) -> Vec<Entry<'a>> {
    let above = |key: &[u8]| match key.cmp(low) {
        std::cmp::Ordering::Greater => true,
        std::cmp::Ordering::Equal => low.is_empty() || flags & op_flag::LOW_OPEN == 0,
        std::cmp::Ordering::Less => false,
    };
    let below = |key: &[u8]| {
        flags & op_flag::NO_HIGH != 0
            || key < high
            || (flags & op_flag::HIGH_PREFIX != 0 && key.starts_with(high))
            || (flags & (op_flag::HIGH_OPEN | op_flag::HIGH_PREFIX) == 0 && key == high)
    };
    let within: Vec<_> = map.iter().filter(|(k, _)| above(k) && below(k)).collect();
    match flags & op_flag::BACKWARD != 0 {
        true => within.into_iter().rev().collect(),
        false => within,
    }
}

/// Entries of a scan up to the key where its filter stopped; all without such a key.
fn passed_entries<'a>(ordered: &[Entry<'a>], stop: Option<&[u8]>, flags: u16) -> Vec<Entry<'a>> {
    let backward = flags & op_flag::BACKWARD != 0;
    let is_passed = |key: &[u8]| match stop {
        Some(stop) if backward => key >= stop,
        Some(stop) => key <= stop,
        None => true,
    };
    ordered.iter().filter(|(key, _)| is_passed(key)).copied().collect()
}

fn over(base: &Map, own: &Own) -> Map {
    let mut map = base.clone();
    for (key, value) in own {
        match value {
            Some(value) => drop(map.insert(key.clone(), value.clone())),
            None => drop(map.remove(key)),
        }
    }
    map
}

impl Model {
    fn new(config: Config) -> Self {
        let mut world = TestStore::with(1, config);
        let table = world.create("t", 2);
        let (committed, open, locks) = (Map::new(), BTreeMap::new(), BTreeMap::new());
        Self { world, table, committed, open, locks, count: 0 }
    }

    /// Locks a key in the model; false: the store must say so, too.
    fn lock(&mut self, client: u32, key: &[u8], exclusive: bool) -> bool {
        let holders = self.locks.entry(key.to_vec()).or_default();
        if holders.iter().any(|(c, x)| *c != client && (exclusive || *x)) {
            return false;
        }
        match holders.iter_mut().find(|(c, _)| *c == client) {
            Some((_, x)) => *x |= exclusive,
            None => holders.push((client, exclusive)),
        }
        true
    }

    fn ask(&mut self, client: u32) -> Batch {
        self.count += 1;
        if let Some(open) = self.open.get(&client) {
            return Batch::new(open.number);
        }
        let number = self.count;
        let (own, saves) = (BTreeMap::new(), Vec::new());
        self.open.insert(client, Open { number, snapshot: None, own, saves });
        Batch::begin(number)
    }

    /// Rows that the client sees without a lock.
    fn seen(&mut self, client: u32) -> Map {
        let open = self.open.get_mut(&client).unwrap();
        let snapshot = open.snapshot.get_or_insert_with(|| self.committed.clone());
        over(snapshot, &open.own)
    }

    fn newest(&self, client: u32) -> Map {
        over(&self.committed, &self.open[&client].own)
    }

    fn write(&mut self, client: u32, kind: u8, key: &[u8], len: usize) {
        let t = self.table;
        let value = format!("{}-{}", self.count, "x".repeat(len)).into_bytes();
        let sent: &[u8] = if kind == op::DELETE { &[] } else { &value };
        let ask = self.ask(client).op(kind, (t, 0), 0, key, sent, 0);
        let said = self.world.call(client, &ask);
        if !self.lock(client, key, true) {
            said.is(status::TIMEOUT);
            return;
        }
        let there = self.newest(client).contains_key(key);
        match (kind, there) {
            (op::INSERT, true) => drop(said.is(status::EXISTS)),
            (op::UPDATE | op::DELETE, false) => drop(said.is(status::NOT_FOUND)),
            _ => {
                said.ok();
                // The entry of the secondary index, too: the same key, with the primary key as its
                // value.
                let entry = [b"s", key].concat();
                let flags = op_flag::NO_LOCK;
                let ask = match kind {
                    op::DELETE => self.ask(client).op(op::DELETE, (t, 1), flags, entry, "", 0),
                    _ => self.ask(client).op(op::PUT, (t, 1), flags, entry, key, 0),
                };
                self.world.call(client, &ask).ok();
                let value = (kind != op::DELETE).then_some(value);
                self.open.get_mut(&client).unwrap().own.insert(key.to_vec(), value);
            }
        }
    }

    fn scan(&mut self, client: u32, act: &Do) {
        let Do::Scan { low, high, flags, rows, bytes, sieve } = act else { return };
        let t = self.table;
        let (mut all_flags, mut value) = (*flags, high.clone());
        if let Some(sieve) = sieve {
            all_flags |= op_flag::FILTER;
            value = filter(high, sieve.examine, &sieve.terms);
        }
        let ask =
            self.ask(client).op(op::SCAN, (t, 0), all_flags, low, value, limits(*rows, *bytes));
        let locks = flags & op_flag::SHARED != 0;
        let map = if locks { self.newest(client) } else { self.seen(client) };
        let mut expected = Vec::new();
        let (mut used, mut more) = (0, false);
        let ordered = entries_in_range(&map, low, high, *flags);
        let mut blocked = false;
        let (mut examined, mut last, mut stopped) = (0, None, None);
        for (key, value) in ordered.iter().copied() {
            if let Some(sieve) = sieve
                && (*rows == 0 || expected.len() < *rows as usize)
            {
                if sieve.examine > 0 && examined == sieve.examine {
                    stopped = last;
                    break;
                }
                examined += 1;
                last = Some(key.clone());
                if !sieve.takes(key, value) {
                    continue;
                }
            }
            let value = if flags & op_flag::KEYS_ONLY != 0 { Vec::new() } else { value.clone() };
            let len = key.len() + value.len();
            let full = *rows != 0 && expected.len() == *rows as usize;
            if full {
                more = true;
                break;
            }
            if locks && !self.lock(client, key, false) {
                blocked = true;
                break;
            }
            if !expected.is_empty() && *bytes != 0 && used + len > *bytes as usize {
                more = true;
                break;
            }
            used += len;
            expected.push((key.clone(), Vec::new(), value));
        }
        let said = self.world.call(client, &ask);
        if blocked {
            said.is(status::TIMEOUT);
            return;
        }
        let told = said.ok().answers.swap_remove(0);
        assert_eq!(told.rows, expected);
        if (told.more, &told.stopped) == (more, &stopped) {
            return;
        }
        // A filter may have looked at more than the limit of rows needs, and where it stops is told
        // by any key before the next entry: what it has looked at is in the answer, if it matches.
        let sieve = sieve.as_ref().unwrap();
        assert!(!told.more && (stopped.is_some() || more), "{told:?} {act:?} of {ordered:?}");
        let passed = passed_entries(&ordered, told.stopped.as_deref(), *flags);
        assert!(told.stopped.is_none() || passed.len() == sieve.examine as usize);
        assert_eq!(passed.iter().filter(|(k, v)| sieve.takes(k, v)).count(), expected.len());
    }

    /// A scan through the secondary index.
    fn fetch(&mut self, client: u32, flags: u16, sieve: Option<&Sieve>) {
        let (mut flags, mut value) = (flags | op_flag::FETCH | op_flag::NO_HIGH, Vec::new());
        if let Some(sieve) = sieve {
            flags |= op_flag::FILTER;
            value = filter("", 0, &sieve.terms);
        }
        let ask = self.ask(client).op(op::SCAN, (self.table, 1), flags, "", value, 0);
        let said = self.world.call(client, &ask).ok();
        let row = |(k, v): (Vec<u8>, Vec<u8>)| ([b"s", &*k].concat(), k, v);
        let mut expected: Vec<_> = self.seen(client).into_iter().map(row).collect();
        expected.retain(|(entry, _, value)| sieve.is_none_or(|s| s.takes(entry, value)));
        if flags & op_flag::BACKWARD != 0 {
            expected.reverse();
        }
        assert_eq!(said.answers[0].rows, expected);
    }

    fn act(&mut self, client: u32, act: &Do) {
        let t = self.table;
        match act {
            Do::Write { kind, key, len } => self.write(client, *kind, key, *len),
            Do::Get { key, lock } => {
                let flags = if *lock { op_flag::SHARED } else { 0 };
                let ask = self.ask(client).get_for(t, key, flags);
                let said = self.world.call(client, &ask);
                if *lock && !self.lock(client, key, false) {
                    said.is(status::TIMEOUT);
                    return;
                }
                let map = if *lock { self.newest(client) } else { self.seen(client) };
                let value = said.ok().answers[0].rows.first().map(|row| row.2.clone());
                assert_eq!(value.as_ref(), map.get(key));
            }
            Do::Scan { .. } => self.scan(client, act),
            Do::Fetch { flags, sieve } => self.fetch(client, *flags, sieve.as_ref()),
            Do::Save(which) => {
                let mut number = self.count + 1;
                if let Some(open) = self.open.get_mut(&client)
                    && *which < open.saves.len()
                {
                    number = open.saves.remove(*which).0;
                }
                let ask = self.ask(client).save(number);
                self.world.call(client, &ask).ok();
                let open = self.open.get_mut(&client).unwrap();
                open.saves.push((number, open.own.clone()));
            }
            Do::Release(which) => {
                let Some(open) = self.open.get_mut(&client) else { return };
                let Some((number, _)) = open.saves.get(*which).cloned() else { return };
                open.saves.truncate(*which);
                let ask = Batch::new(open.number).op(op::RELEASE, (0, 0), 0, "", "", number);
                self.world.call(client, &ask).ok();
            }
            Do::BackTo(which) => {
                let Some(open) = self.open.get_mut(&client) else { return };
                let Some((number, own)) = open.saves.get(*which).cloned() else { return };
                open.saves.truncate(which + 1);
                open.own = own;
                let ask = Batch::new(open.number).back_to(number);
                self.world.call(client, &ask).ok();
            }
            Do::End { commit } => self.end(client, *commit),
            Do::Wake => self.world.serve(&sdk::testing::EventBytes::new().wake()),
            Do::Restart => {
                self.world.restart();
                for (client, open) in std::mem::take(&mut self.open) {
                    let said: BatchReply =
                        self.world.call(client, &Batch::new(open.number).commit());
                    said.is(status::LOST);
                }
                self.locks.clear();
            }
        }
    }

    fn end(&mut self, client: u32, commit: bool) {
        let Some(open) = self.open.remove(&client) else { return };
        let ask = Batch::new(open.number);
        let ask = if commit { ask.commit() } else { ask.rollback() };
        self.world.call(client, &ask).ok();
        if commit {
            self.committed = over(&self.committed, &open.own);
        }
        self.locks.values_mut().for_each(|holders| holders.retain(|(c, _)| *c != client));
    }

    fn finish(mut self) {
        for client in 0..4 {
            self.end(client, client % 2 == 0);
        }
        self.world.idle();
        for _ in 0..2 {
            let rows = self.world.call(0, &Batch::new(0).scan(self.table)).ok();
            let seen: Map =
                rows.answers[0].rows.iter().map(|r| (r.0.clone(), r.2.clone())).collect();
            assert_eq!(seen, self.committed);
            self.check_books();
            let memory = self.world.store.db.memory();
            self.world.restart();
            assert_eq!(self.world.store.db.memory(), memory);
        }
    }

    /// Nothing is left over, and the counts are right.
    fn check_books(&mut self) {
        let store = &self.world.store;
        assert!(store.db.txs.parked.is_empty() && store.db.versions.snapshots.is_empty());
        assert_eq!(store.db.locks.len(), 0);
        let index = store.db.catalog.index(self.table, 0).unwrap();
        assert_eq!(index.map.len(), self.committed.len());
        assert_eq!(index.entries as usize, self.committed.len());
        let bytes: usize = self.committed.values().map(Vec::len).sum();
        assert_eq!(index.value_bytes as usize, bytes);
        let large = self.committed.values().map(Vec::len).filter(|len| *len > 64).sum::<usize>();
        let live: u64 = store.db.log.usage.segments.values().map(|s| s.live).sum();
        assert_eq!(live as usize, large);
        for (number, segment) in &store.db.log.usage.segments {
            assert!(segment.live <= segment.values, "{number}: {segment:?}");
            assert_eq!(segment.pins, 0, "{number}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 150,
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn clients_see_what_the_model_says(acts in prop::collection::vec((0_u32..4, act()), 1..200)) {
        let mut model = Model::new(small());
        for (client, act) in &acts {
            model.act(*client, act);
        }
        model.finish();
    }

    #[test]
    fn calls_that_may_do_little_at_a_time_come_to_the_same(
        acts in prop::collection::vec((0_u32..4, act()), 1..100)
    ) {
        let mut model = Model::new(Config { steps: 3, ..small() });
        for (client, act) in &acts {
            model.act(*client, act);
        }
        model.finish();
    }
}
