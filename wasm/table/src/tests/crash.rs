//! Power cuts and kills at any moment: what was acknowledged is there, nothing is half there, and
//! what is sent again is done once. Each seed is another workload, with crashes in it.

use std::collections::BTreeMap;

use guest_abi::table::{op, reply_flag, status};
use sdk::Errno;
use sdk::testing::{Call, EventBytes, Rng};

use crate::Config;
use crate::testing::{Batch, BatchReply, TestStore, small};

type Map = BTreeMap<(u32, String), String>;
type Writes = Vec<(u32, String, Option<String>)>;

/// Content of the log for a request.
#[derive(Debug, Clone)]
enum TxHead {
    Commit(Writes),
    Prepare(String, Writes),
    CommitPrepared(String),
    RollbackPrepared(String),
    Truncate(u32),
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct State {
    map: Map,
    prepared: BTreeMap<String, Writes>,
}

impl State {
    fn write(&mut self, writes: &Writes) {
        for (table, key, value) in writes {
            match value {
                Some(value) => drop(self.map.insert((*table, key.clone()), value.clone())),
                None => drop(self.map.remove(&(*table, key.clone()))),
            }
        }
    }

    fn apply(&mut self, deed: &TxHead) {
        match deed {
            TxHead::Commit(writes) => self.write(writes),
            TxHead::Prepare(name, writes) => {
                drop(self.prepared.insert(name.clone(), writes.clone()))
            }
            TxHead::CommitPrepared(name) => {
                let writes = self.prepared.remove(name).unwrap();
                self.write(&writes);
            }
            TxHead::RollbackPrepared(name) => drop(self.prepared.remove(name)),
            TxHead::Truncate(table) => self.map.retain(|(t, _), _| t != table),
        }
    }
}

#[derive(Debug, Clone)]
struct Sent {
    client: u32,
    seq: u64,
    ask: Batch,
    deed: TxHead,
    acknowledged: bool,
    own: bool,
}

#[derive(Default)]
struct Open {
    tx: u64,
    writes: Writes,
    saved: Option<(u64, usize)>,
}

struct Driver {
    rng: Rng,
    world: TestStore,
    tables: Vec<u32>,
    /// State that is certain.
    base: State,
    /// Requests after that state, in the log's order.
    sent: Vec<Sent>,
    open: BTreeMap<u32, Open>,
    count: u64,
    crashes: u64,
    log: Vec<String>,
}

impl Driver {
    fn new(seed: u64) -> Self {
        let steps = [500, 5, 40][seed as usize % 3];
        let mut world = TestStore::with(seed, Config { steps, ..small() });
        let tables = vec![world.create("a", 1), world.create("b", 2)];
        Self {
            rng: Rng::new(seed),
            world,
            tables,
            base: State::default(),
            sent: Vec::new(),
            open: BTreeMap::new(),
            count: 0,
            crashes: 0,
            log: Vec::new(),
        }
    }

    fn write(&mut self) -> (u32, String, Option<String>) {
        self.count += 1;
        let table = self.tables[self.rng.below(2) as usize];
        let key = format!("key{:02}", self.rng.below(40));
        let len = [0, 10, 64, 65, 100, 400, 1500][self.rng.below(7) as usize];
        let value = format!("{}-{}", self.count, "v".repeat(len));
        (table, key, (self.rng.below(5) > 0).then_some(value))
    }

    fn ask(ask: Batch, (table, key, value): &(u32, String, Option<String>)) -> Batch {
        match value {
            Some(value) => ask.put(*table, key, value),
            // A deletion that never fails.
            None => ask.put(*table, key, "").delete(*table, key),
        }
    }

    /// Sends something that is to be logged. If it fails it is forgotten.
    fn deed(&mut self, client: u32, ask: Batch, deed: TxHead, own: bool) -> bool {
        self.log.push(format!("{client}: {deed:?}").replace("vv", ""));
        let seq = self.world.send(client, &ask);
        self.log.push(format!("   seq {seq}"));
        let held = self.world.host.held().iter().any(|r| (r.client, r.seq) == (client, seq));
        if held || self.world.host.is_dead() {
            self.sent.push(Sent { client, seq, ask, deed, acknowledged: false, own });
            return true;
        }
        // It failed, or waits for a call that goes on with it.
        for _ in 0..1000 {
            if let Some(said) = self.world.take_reply(client, seq) {
                assert_ne!(said.status, status::OK, "a commit that is not held: {said:?}");
                return false;
            }
            self.world.host.advance(1);
            self.world.serve(&EventBytes::new().wake());
            let held = self.world.host.held().iter().any(|r| (r.client, r.seq) == (client, seq));
            if held || self.world.host.is_dead() {
                self.sent.push(Sent { client, seq, ask, deed, acknowledged: false, own });
                return true;
            }
        }
        panic!("no answer");
    }

    fn call(&mut self, client: u32, ask: &Batch) -> Option<BatchReply> {
        let seq = self.world.send(client, ask);
        for _ in 0..1000 {
            if let Some(said) = self.world.take_reply(client, seq) {
                return Some(said);
            }
            if self.world.host.is_dead() {
                return None;
            }
            self.world.host.advance(1);
            self.world.serve(&EventBytes::new().wake());
        }
        panic!("no answer");
    }

    fn step(&mut self) {
        let client = self.rng.below(4) as u32;
        match self.rng.below(20) {
            0 if self.world.config.steps > 100 => self.burst(),
            0..=5 => self.single(client),
            6..=12 => self.in_transaction(client),
            13 => self.end_prepared(),
            14 => self.release(),
            15 if self.rng.below(10) == 0 && self.open.is_empty() => {
                let table = self.tables[0];
                let ask = Batch::new(0).op(op::TRUNCATE, (table, 0), 0, "", "", 0);
                self.deed(client, ask, TxHead::Truncate(table), true);
            }
            _ => {
                for _ in 0..self.rng.below(8) {
                    self.world.host.advance(1);
                    self.world.serve(&EventBytes::new().wake());
                }
            }
        }
    }

    fn single(&mut self, client: u32) {
        if self.open.contains_key(&client) {
            return;
        }
        let mut writes: Writes = (0..1 + self.rng.below(4)).map(|_| self.write()).collect();
        // Something that can be seen.
        writes.push((self.tables[1], format!("of{client}"), Some(self.count.to_string())));
        let ask = writes.iter().fold(Batch::new(0), Self::ask).commit();
        self.deed(client, ask, TxHead::Commit(writes), true);
    }

    /// Commits of several clients in one call.
    fn burst(&mut self) {
        let idle = (0..4).filter(|client| !self.open.contains_key(client)).collect::<Vec<u32>>();
        let mut events = EventBytes::new();
        let mut asked = Vec::new();
        for client in idle {
            let mut writes = vec![self.write()];
            writes.push((self.tables[1], format!("of{client}"), Some(self.count.to_string())));
            let ask = writes.iter().fold(Batch::new(0), Self::ask).commit();
            let seq = self.world.next_seq(client);
            events = events.request(client, seq, 0, &ask.bytes());
            asked.push(Sent {
                client,
                seq,
                ask,
                deed: TxHead::Commit(writes),
                acknowledged: false,
                own: true,
            });
        }
        self.world.serve(&events);
        for sent in asked {
            let (client, seq) = (sent.client, sent.seq);
            self.log.push(format!("burst {client} {seq}: {:?}", sent.deed).replace("vv", ""));
            let held = self.world.host.held().iter().any(|r| (r.client, r.seq) == (client, seq));
            if held || self.world.host.is_dead() {
                self.sent.push(sent);
            } else {
                assert_ne!(self.world.take_reply(client, seq).unwrap().status, status::OK);
            }
        }
    }

    fn in_transaction(&mut self, client: u32) {
        let Some(open) = self.open.get(&client) else {
            self.count += 1;
            let tx = self.count + 1000;
            self.open.insert(client, Open { tx, ..Open::default() });
            let said = self.call(client, &Batch::begin(tx));
            assert!(said.is_none_or(|s| s.status == status::OK));
            return;
        };
        let (tx, any, saved) = (open.tx, !open.writes.is_empty(), open.saved);
        match self.rng.below(12) {
            0 if any => self.conclude(client, tx),
            1 if any => {
                self.count += 1;
                let name = format!("xid{}", self.count);
                let writes = self.open.remove(&client).unwrap().writes;
                let ask = Batch::new(tx).named(op::PREPARE, &name);
                if !self.deed(client, ask, TxHead::Prepare(name, writes), false) {
                    self.call(client, &Batch::new(tx).rollback());
                }
            }
            2 => {
                self.open.remove(&client);
                self.call(client, &Batch::new(tx).rollback());
            }
            3 => {
                self.count += 1;
                let number = self.count;
                self.call(client, &Batch::new(tx).save(number));
                let open = self.open.get_mut(&client).unwrap();
                open.saved = Some((number, open.writes.len()));
            }
            4 if saved.is_some() => {
                let (number, len) = saved.unwrap();
                self.call(client, &Batch::new(tx).back_to(number));
                self.open.get_mut(&client).unwrap().writes.truncate(len);
            }
            _ => {
                let mut write = self.write();
                let Some(said) = self.call(client, &Self::ask(Batch::new(tx), &write)) else {
                    return;
                };
                if said.status != status::OK && said.done == 1 {
                    // What is to be deleted was put there, and then the disk was full.
                    write.2 = Some(String::new());
                } else if said.status != status::OK {
                    return;
                }
                self.open.get_mut(&client).unwrap().writes.push(write);
            }
        }
    }

    fn conclude(&mut self, client: u32, tx: u64) {
        let writes = self.open.remove(&client).unwrap().writes;
        if !self.deed(client, Batch::new(tx).commit(), TxHead::Commit(writes), false) {
            // The disk is full, or fails: it is still there.
            self.call(client, &Batch::new(tx).rollback());
        }
    }

    /// The newest state.
    fn now(&self) -> State {
        let mut state = self.base.clone();
        self.sent.iter().for_each(|sent| state.apply(&sent.deed));
        state
    }

    fn end_prepared(&mut self) {
        let names: Vec<_> = self.now().prepared.into_keys().collect();
        if names.is_empty() {
            return;
        }
        let name = names[self.rng.below(names.len() as u64) as usize].clone();
        let (kind, deed) = match self.rng.below(3) {
            0 => (op::ROLLBACK_PREPARED, TxHead::RollbackPrepared(name.clone())),
            _ => (op::COMMIT_PREPARED, TxHead::CommitPrepared(name.clone())),
        };
        self.deed(4, Batch::new(0).named(kind, name), deed, true);
    }

    fn release(&mut self) {
        if self.world.host.is_dead() {
            return;
        }
        self.world.release();
        for i in 0..self.sent.len() {
            let (client, seq) = (self.sent[i].client, self.sent[i].seq);
            let said = self.world.take_reply(client, seq);
            if let Some(said) = said {
                said.ok();
                self.sent[i].acknowledged = true;
            }
        }
        let certain = self.sent.iter().rposition(|s| s.acknowledged).map_or(0, |i| i + 1);
        for sent in self.sent.drain(..certain) {
            self.base.apply(&sent.deed);
        }
    }

    fn observe(&mut self) -> State {
        let mut map = Map::new();
        for table in self.tables.clone() {
            for (key, value) in self.world.all(table) {
                map.insert((table, key), value);
            }
        }
        let list = self.world.call(5, &Batch::new(0).named(op::LIST_PREPARED, "")).ok();
        let names = list.rows(0).into_iter().map(|(name, _)| (name, Vec::new()));
        State { map, prepared: names.collect() }
    }

    fn crash(&mut self) {
        self.crashes += 1;
        let kill = self.rng.below(3) == 0;
        self.log.push(format!("crash, kill {kill}"));
        if kill {
            self.world.host.kill()
        } else {
            self.world.host.crash()
        }
        self.open.clear();
        let started = self.world.start();
        assert!(started.is_ok(), "{:?}", self.world.host.lines);
        let seen = self.observe();
        let mut state = self.base.clone();
        let mut found = None;
        for i in 0..=self.sent.len() {
            let names = |s: &State| s.prepared.keys().cloned().collect::<Vec<_>>();
            if state.map == seen.map && names(&state) == names(&seen) {
                found = Some((i, state.clone()));
            }
            if let Some(sent) = self.sent.get(i) {
                state.apply(&sent.deed);
            }
        }
        let Some((kept, mut state)) = found else {
            panic!("{}\n{}", self.log.join("\n"), self.differences(&seen));
        };
        self.log.push(format!("kept {kept} of {}", self.sent.len()));
        // All that was not acknowledged is sent again.
        for (i, sent) in std::mem::take(&mut self.sent).into_iter().enumerate() {
            let said = self.world.again(sent.client, sent.seq, &sent.ask);
            let replayed = said.flags & reply_flag::REPLAYED != 0;
            if !sent.own && !replayed {
                said.is(status::LOST);
                continue;
            }
            if replayed {
                // Deletions of what is not there leave no trace, so more may be kept than is seen.
                assert!(said.status == status::OK);
                if i >= kept {
                    state.apply(&sent.deed);
                }
            } else if said.status == status::OK {
                let seen = !matches!(sent.deed, TxHead::Truncate(_));
                assert!(
                    i >= kept || !seen,
                    "done twice: {sent:?} of {kept}\n{}",
                    self.log.join("\n")
                );
                state.apply(&sent.deed);
            } else {
                // A lock of a prepared transaction, or one that was never prepared.
                let fine = [status::TIMEOUT, status::NOT_FOUND, status::BUSY, status::NO_SPACE];
                assert!(fine.contains(&said.status), "{said:?} {:?}", self.world.host.lines);
            }
        }
        self.base = state;
        let seen = self.observe();
        assert_eq!(seen.map, self.base.map, "{}", self.log.join("\n"));
    }

    /// For each moment that might have been kept: what is not as it was then.
    fn differences(&self, seen: &State) -> String {
        let mut state = self.base.clone();
        let mut text = String::new();
        for i in 0..=self.sent.len() {
            text +=
                &format!("{i}: prepared {:?} {:?}", seen.prepared.keys(), state.prepared.keys());
            let keys = seen.map.keys().chain(state.map.keys());
            for key in keys.filter(|k| seen.map.get(k) != state.map.get(k)) {
                let short = |v: Option<&String>| v.map(|v| v.chars().take(6).collect::<String>());
                let (seen, model) = (short(seen.map.get(key)), short(state.map.get(key)));
                text += &format!(" {key:?}: {seen:?}, not {model:?};");
            }
            text += "\n";
            if let Some(sent) = self.sent.get(i) {
                state.apply(&sent.deed);
            }
        }
        text
    }

    fn run(&mut self, crashes: u64) {
        while self.crashes < crashes {
            if self.rng.below(30) == 0 {
                let calls = self.rng.below(60);
                self.world.host.die_after(calls);
            }
            match self.rng.below(20) {
                0 => {
                    self.world.host.capacity_bytes =
                        self.world.host.used_bytes() + self.rng.below(5000)
                }
                1 => {
                    let call =
                        [None, Some(Call::Append), Some(Call::Sync)][self.rng.below(3) as usize];
                    let after = self.rng.below(50);
                    self.world.host.fail(call, after, 1, Errno::IO);
                }
                2..=4 => self.world.host.capacity_bytes = u64::MAX,
                _ => {}
            }
            for _ in 0..self.rng.below(60) {
                self.step();
                if self.world.host.is_dead() {
                    break;
                }
            }
            if self.rng.below(3) == 0 || self.world.host.is_dead() {
                self.crash();
            }
        }
    }
}

fn seeds() -> std::ops::Range<u64> {
    let count = std::env::var("SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(60);
    let first = std::env::var("SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(0);
    first..first + count
}

#[test]
fn nothing_acknowledged_is_lost_or_half_or_done_twice() {
    let (mut checkpoints, mut compactions) = (0, 0);
    for seed in seeds() {
        println!("seed {seed}");
        let mut driver = Driver::new(seed);
        driver.run(6);
        checkpoints += driver.world.host.calls.get("rename").copied().unwrap_or(0);
        compactions += driver.world.host.calls.get("remove").copied().unwrap_or(0);
    }
    assert!(checkpoints > 20 && compactions > 20, "{checkpoints} {compactions}");
}
