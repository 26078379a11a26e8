//! The start: memory is made anew from the last checkpoint and the log behind it.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use guest_abi::module_call::log as level;
use sdk::{Errno, Host};

use crate::catalog::text;
use crate::deed::{Change, Deed, LogOp, Note, log_op, op_at};
use crate::lock::{Asked, Resource, mode};
use crate::log::Place;
use crate::map::{ENTRY_BYTES, INLINE_BYTES, Loc, Slot, Version, Write};
use crate::record::{Head, Reader, Stop, kind, u32_at, u64_at};
use crate::segment::name;
use crate::store::{Config, Store};
use crate::tx::{Spill, Tx, Where};

/// An op of a transaction whose end has not been read yet.
#[derive(Debug)]
struct Op {
    place: Where,
    key: Box<[u8]>,
    write: Write,
}

/// Why the store cannot start.
#[derive(Debug)]
pub struct Broken {
    pub(crate) errno: Errno,
    pub(crate) text: String,
}

impl From<Errno> for Broken {
    fn from(errno: Errno) -> Self {
        Self { errno, text: format!("{errno}") }
    }
}

/// What is not as it must be.
pub(crate) fn broken(text: String) -> Broken {
    Broken { errno: Errno::BADMSG, text }
}

/// A replay.
pub(crate) struct Replay {
    pub(crate) store: Store,
    /// Ops of transactions without an end, by the store's number.
    open: BTreeMap<u64, Vec<Op>>,
    /// Segments that these ops are in.
    homes: BTreeMap<u64, Vec<u32>>,
    /// When the checkpoint began: what is before is in its statistics.
    pub(crate) captured: Place,
    /// That is over.
    passed: bool,
    /// Of the first record behind that.
    pub(crate) captured_number: u64,
    /// Of the next record.
    number: Option<u64>,
}

impl Store {
    /// Starts with what the files say.
    pub fn start_with(host: &mut dyn Host, config: Config) -> Result<Self, Errno> {
        let mut store = Self { config, ..Self::default() };
        store.log.segment_bytes = config.segment_bytes;
        let mut replay = Replay {
            store,
            open: BTreeMap::new(),
            homes: BTreeMap::new(),
            captured: Place::default(),
            passed: false,
            captured_number: 0,
            number: None,
        };
        match replay.all(host) {
            Ok(()) => Ok(replay.store),
            Err(broken) => {
                host.log(level::ERROR, &format!("the table store cannot start: {}", broken.text));
                Err(broken.errno)
            }
        }
    }
}

fn number_of(name: &str, prefix: &str) -> Option<u64> {
    let digits = name.strip_prefix(prefix)?;
    let is_digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    let fine = digits.len() == 16 && digits.bytes().all(is_digit);
    fine.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
}

fn is_deed(kind: u32) -> bool {
    matches!(kind, kind::COMMIT | kind::PREPARE)
}

impl Replay {
    fn all(&mut self, host: &mut dyn Host) -> Result<(), Broken> {
        let names = host.list()?;
        let checkpoints: Vec<u64> =
            names.iter().filter_map(|n| number_of(n, "checkpoint-")).collect();
        let segments = names.iter().filter_map(|n| number_of(n, "log-"));
        let segments: Vec<u32> = segments.filter_map(|n| u32::try_from(n).ok()).collect();
        for segment in &segments {
            self.store.log.books.segments.entry(*segment).or_default();
        }
        let newest = checkpoints.iter().max().copied();
        if let Some(number) = newest {
            self.load(host, number)?;
        }
        let first = match newest {
            Some(_) => self.store.replay_from.segment,
            None => segments.iter().min().copied().unwrap_or(1),
        };
        if newest.is_none() && first != 1 {
            return Err(broken(format!(
                "the log begins with {}, without a checkpoint",
                name(first)
            )));
        }
        self.segments(host, first, &segments)?;
        self.finish(host)?;
        for old in names.iter().filter(|n| {
            n.ends_with(".new") || number_of(n, "checkpoint-").is_some_and(|n| Some(n) != newest)
        }) {
            host.remove(old)?;
        }
        Ok(())
    }

    /// Reads all segments from the first on.
    fn segments(
        &mut self,
        host: &mut dyn Host,
        first: u32,
        segments: &[u32],
    ) -> Result<(), Broken> {
        let Some(mut last) = segments.iter().max().copied().filter(|last| *last >= first) else {
            if self.store.replay_from != Place::default() {
                return Err(broken(format!("{} is missing", name(first))));
            }
            return Ok(());
        };
        // The last ones may have been made and not synced: they do not even begin.
        while last > first && self.is_unborn(host, last)? {
            self.store.log.books.remove(host, last)?;
            last -= 1;
        }
        for segment in first..=last {
            if !segments.contains(&segment) {
                return Err(broken(format!("{} is missing", name(segment))));
            }
            self.segment(host, segment, segment == last)?;
        }
        Ok(())
    }

    fn is_unborn(&mut self, host: &mut dyn Host, segment: u32) -> Result<bool, Broken> {
        let file = self.store.log.books.file(host, segment)?;
        let mut reader = Reader::new(host, file, segment, 0)?;
        let stop = match reader.next(host) {
            Ok(_) => return Ok(false),
            Err(stop) => stop,
        };
        match stop {
            Stop::End => Ok(true),
            Stop::Torn => Ok(!reader.was_durable(host)?),
            Stop::Damaged(text) => Err(broken(text)),
            Stop::Failed(errno) => Err(errno.into()),
        }
    }

    fn segment(&mut self, host: &mut dyn Host, segment: u32, last: bool) -> Result<(), Broken> {
        let file = self.store.log.books.file(host, segment)?;
        let from = self.store.replay_from;
        let at = if segment == from.segment { u64::from(from.offset) } else { 0 };
        let mut reader = Reader::new(host, file, segment, at)?;
        if at > reader.file_len() {
            let text =
                format!("{} ends before byte {at}, where the checkpoint began", name(segment));
            return Err(broken(text));
        }
        loop {
            let at = reader.at;
            match reader.next(host) {
                Ok((head, body_at)) => {
                    self.store.check_start()?;
                    let place = Place { segment, offset: body_at as u32 };
                    self.record(head, place, reader.body())
                        .map_err(|text| broken(format!("{}, byte {at}: {text}", name(segment))))?;
                }
                Err(Stop::End) => break,
                Err(Stop::Torn) if last && !reader.was_durable(host)? => {
                    self.cut(host, segment, at, reader.file_len())?;
                    break;
                }
                Err(Stop::Torn) => {
                    let text = format!("{}, byte {at}: what was durable is gone", name(segment));
                    return Err(broken(text));
                }
                Err(Stop::Damaged(text)) => return Err(broken(text)),
                Err(Stop::Failed(errno)) => return Err(errno.into()),
            }
        }
        let len = reader.at;
        self.store.log.appended += len - at;
        self.store.log.books.segments.entry(segment).or_default().len = len;
        // What the kernel has, and the disk perhaps not: nobody is told of it before it is durable.
        if last {
            host.sync(file)?;
        }
        let number = self.number.unwrap_or(self.captured_number);
        self.store.log.resume(segment, len, number);
        Ok(())
    }

    fn cut(&mut self, host: &mut dyn Host, segment: u32, at: u64, len: u64) -> Result<(), Broken> {
        let file = self.store.log.books.file(host, segment)?;
        let cut = len - at;
        let text = format!("{}: {cut} bytes that were not synced are cut off", name(segment));
        host.log(level::WARN, &text);
        host.truncate(file, at)?;
        Ok(host.sync(file)?)
    }

    fn record(&mut self, head: Head, place: Place, body: &[u8]) -> Result<(), String> {
        if !self.passed && place >= self.captured {
            self.passed = true;
            self.number = Some(self.captured_number);
        }
        if let Some(number) = self.number.filter(|number| *number != head.number) {
            return Err(format!("record {} instead of {number}", head.number));
        }
        self.number = Some(head.number + 1);
        if place < self.captured && head.kind != kind::SPILL {
            // The checkpoint knows it. Only ops of transactions that were still open then are not there.
            if let Some((deed, _)) = Deed::read(body).filter(|_| is_deed(head.kind)) {
                self.open.remove(&deed.tx);
                self.homes.remove(&deed.tx);
            }
            return Ok(());
        }
        let done = match head.kind {
            kind::SEGMENT => Some(()),
            kind::SPILL => self.spill(place, body),
            kind::COMMIT => self.commit(place, body),
            kind::PREPARE => self.prepare(place, body),
            kind::COMMIT_PREPARED | kind::ROLLBACK_PREPARED => {
                return self.end_prepared(head.kind, body);
            }
            kind::CATALOG => self.change(body),
            kind::MOVED => self.moved(place, body),
            kind => return Err(format!("record of kind {kind}")),
        };
        done.ok_or_else(|| format!("record of kind {} is not as it must be", head.kind))
    }

    /// The value of an op, wherever it is.
    fn slot(&mut self, op: &LogOp<'_>, place: Place) -> Slot {
        if op.kind == log_op::DELETE {
            return Slot::Deleted;
        }
        if op.value.len() <= INLINE_BYTES {
            return Slot::Inline(op.value.into());
        }
        let offset = place.offset.saturating_add(op.value_at as u32);
        if place >= self.captured {
            let segment = self.store.log.books.segments.entry(place.segment).or_default();
            segment.values += op.value.len() as u64;
        }
        Slot::At(Loc { segment: place.segment, offset, len: op.value.len() as u32 })
    }

    fn gather(&mut self, tx: u64, place: Place, body: &[u8], mut at: usize) -> Option<()> {
        let mut ops = self.open.remove(&tx).unwrap_or_default();
        let homes = self.homes.entry(tx).or_default();
        if homes.last() != Some(&place.segment) {
            homes.push(place.segment);
        }
        while at < body.len() {
            let (op, next) = op_at(body, at)?;
            match op.kind {
                log_op::UNDO => ops.truncate(op.table as usize),
                _ => {
                    let write = Write { slot: self.slot(&op, place), locked: op.flags != 0 };
                    ops.push(Op { place: (op.table, op.index), key: op.key.into(), write });
                }
            }
            at = next;
        }
        self.open.insert(tx, ops);
        Some(())
    }

    fn spill(&mut self, place: Place, body: &[u8]) -> Option<()> {
        let tx = u64_at(body, 0);
        self.store.next_tx = self.store.next_tx.max(tx);
        self.gather(tx, place, body, 8)
    }

    fn noted(&mut self, deed: &Deed<'_>) {
        self.store.next_tx = self.store.next_tx.max(deed.tx);
        self.store.last_commit = self.store.last_commit.max(deed.commit);
        self.store.remembered.add(deed.note);
    }

    fn commit(&mut self, place: Place, body: &[u8]) -> Option<()> {
        let (deed, at) = Deed::read(body)?;
        self.noted(&deed);
        self.gather(deed.tx, place, body, at)?;
        self.homes.remove(&deed.tx);
        for op in self.open.remove(&deed.tx)? {
            self.put(op.place, op.key, Version { commit: deed.commit, slot: op.write.slot });
        }
        Some(())
    }

    /// Puts a version in, unless a newer one is there already.
    pub(crate) fn put(&mut self, place: Where, key: Box<[u8]>, version: Version) {
        let Some(index) = self.store.catalog.index_mut(place.0, place.1) else { return };
        let head = index.map.get(&key).and_then(|chain| chain.head());
        if head.is_none_or(|head| head.commit <= version.commit) {
            let oldest = version.commit;
            index.install(key, version, oldest, &mut self.store.log.books);
        }
    }

    fn prepare(&mut self, place: Place, body: &[u8]) -> Option<()> {
        let (deed, at) = Deed::read(body)?;
        self.noted(&deed);
        self.gather(deed.tx, place, body, at)?;
        for op in self.open.remove(&deed.tx)? {
            self.keep_prepared(deed.tx, deed.name, op.place, op.key, op.write);
        }
        self.keep_name(deed.tx, deed.name);
        Some(())
    }

    /// A prepared transaction is there, if only with its name.
    pub(crate) fn keep_name(&mut self, tx: u64, name: &[u8]) -> &mut Tx {
        self.store.prepared.insert(name.into(), tx);
        let new = || Box::new(Tx::new(tx, 0));
        self.store.txs.entry(tx).or_insert_with(new)
    }

    /// It has one more write.
    pub(crate) fn keep_prepared(
        &mut self,
        tx: u64,
        name: &[u8],
        place: Where,
        key: Box<[u8]>,
        write: Write,
    ) {
        let cost = ENTRY_BYTES + key.len() as u64;
        self.store.log.books.memory += cost;
        let tx = self.keep_name(tx, name);
        tx.memory += cost;
        tx.writes.entry(place).or_default().insert(key, write);
    }

    fn end_prepared(&mut self, kind: u32, body: &[u8]) -> Result<(), String> {
        let Some((deed, _)) = Deed::read(body) else { return Err("no deed".into()) };
        self.noted(&deed);
        if self.store.prepared.get(deed.name) == Some(&deed.tx) {
            self.store.prepared.remove(deed.name);
        }
        self.homes.remove(&deed.tx);
        let Some(tx) = self.store.txs.remove(&deed.tx) else {
            return Err(format!("there is no prepared transaction {:?}", text(deed.name)));
        };
        self.store.log.books.memory = self.store.log.books.memory.saturating_sub(tx.memory);
        if kind == kind::COMMIT_PREPARED {
            for (place, writes) in tx.writes {
                for (key, write) in writes {
                    self.put(place, key, Version { commit: deed.commit, slot: write.slot });
                }
            }
        }
        Ok(())
    }

    fn change(&mut self, body: &[u8]) -> Option<()> {
        let change = Change::read(body)?;
        self.store.catalog.apply(&change);
        if change.note != Note::default() && change.kind != crate::deed::change::AUTO {
            self.store.remembered.add(change.note);
        }
        Some(())
    }

    fn moved(&mut self, place: Place, body: &[u8]) -> Option<()> {
        let mut at = 0;
        while at < body.len() {
            let commit = u64_at(body.get(at..)?, 0);
            let (op, next) = op_at(body, at + 8)?;
            let slot = self.slot(&op, place);
            if let Some(index) = self.store.catalog.index_mut(op.table, op.index)
                && let Some(chain) = index.map.get_mut(op.key)
                && let Some(version) = chain.versions_mut().iter_mut().find(|v| v.commit == commit)
            {
                self.store.log.books.forget(&version.slot);
                self.store.log.books.keep(&slot);
                version.slot = slot;
            }
            at = next;
        }
        Some(())
    }

    /// What is left to do once all records are read.
    fn finish(&mut self, host: &mut dyn Host) -> Result<(), Broken> {
        let store = &mut self.store;
        store.visible = store.last_commit;
        store.proven_bytes = 0;
        store.catalog.name_all();
        let tables = store.catalog.tables.keys();
        store.log.books.memory += tables.map(|table| store.catalog.weight(*table)).sum::<u64>();
        store.catalog.next = store.catalog.next.max(1);
        while !store.catalog.graves.is_empty() {
            store.steps = u64::MAX;
            store.bury();
        }
        self.take_up_prepared();
        self.check_segments(host)
    }

    /// Prepared transactions have their locks again, and what they refer to stays where it is.
    fn take_up_prepared(&mut self) {
        let Store { prepared, txs, locks, log, .. } = &mut self.store;
        for id in prepared.values() {
            let Some(tx) = txs.get_mut(id) else { continue };
            let mut homes = self.homes.remove(id).unwrap_or_default();
            let (mut wanted, mut values) = (Vec::new(), Vec::new());
            for ((table, index), writes) in &tx.writes {
                wanted.push((Resource::Table(*table), mode::INTEND_EXCLUSIVE));
                for (key, write) in writes {
                    let resource = Resource::key(*table, *index, key);
                    wanted.extend(write.locked.then_some((resource, mode::EXCLUSIVE)));
                    values.push(&write.slot);
                }
            }
            homes.extend(values.into_iter().filter_map(|slot| match slot {
                Slot::At(loc) => Some(loc.segment),
                _ => None,
            }));
            for (resource, want) in wanted {
                if locks.ask(*id, resource, want) == Asked::New {
                    tx.held.push(resource);
                }
            }
            homes.sort_unstable();
            homes.dedup();
            for segment in homes {
                log.books.pin(segment);
                tx.spills.push(Spill { at: 0, place: Place { segment, offset: 0 } });
            }
        }
    }

    /// Every segment that is referred to must be there.
    fn check_segments(&mut self, host: &mut dyn Host) -> Result<(), Broken> {
        let here = host.list()?;
        let books = &mut self.store.log.books;
        let mut missing = Vec::new();
        for (number, segment) in &mut books.segments {
            if !here.contains(&name(*number)) {
                missing.push(*number);
                if segment.live > 0 || segment.pins > 0 {
                    return Err(broken(format!("{} is missing, which has values", name(*number))));
                }
            }
        }
        for number in missing {
            books.segments.remove(&number);
        }
        let unknown = books.segments.iter().filter(|(_, s)| s.len == 0).map(|(n, _)| *n);
        for number in unknown.collect::<Vec<_>>() {
            let file = books.file(host, number)?;
            let len = host.len(file)?;
            books.segments.entry(number).or_default().len = len;
        }
        Ok(())
    }

    pub(crate) fn put_segment(&mut self, body: &[u8], at: usize) {
        let number = u32_at(body, at);
        let segment = self.store.log.books.segments.entry(number).or_default();
        segment.values = u64_at(body, at + 4);
    }
}
