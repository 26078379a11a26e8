//! Replay at the start: memory is made anew from the last checkpoint and the log behind it.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use guest_abi::module_call::log as level;
use sdk::Host;

use crate::catalog::text;
use crate::checkpoint::Checkpoints;
use crate::config::Config;
use crate::database::Database;
use crate::fail::StartError;
use crate::load::load;
use crate::lock::{Asked, Resource, mode};
use crate::log::Place;
use crate::map::{IndexId, Version, Write};
use crate::memory::MemoryLimit;
use crate::record::{Head, Reader, Stop, kind, u64_at};
use crate::record_body::{Change, LogOp, RequestId, TxHead, log_op, op_at};
use crate::restored::Restored;
use crate::segment::name;
use crate::slot::{INLINE_BYTES, Loc, Slot};
use crate::tx::Spill;

/// Op of a transaction whose end has not been read yet.
#[derive(Debug)]
struct Op {
    index: IndexId,
    key: Box<[u8]>,
    write: Write,
}

/// Replay of the log.
struct Replay {
    restored: Restored,
    /// Ops of transactions without an end, by the store's number of the transaction.
    open: BTreeMap<u64, Vec<Op>>,
    /// Segments that these ops are in, by the store's number of the transaction.
    homes: BTreeMap<u64, Vec<u32>>,
    /// Whether the place is passed at which the checkpoint began.
    passed: bool,
    /// Number of the next record.
    number: Option<u64>,
}

/// Starts with what the files say.
pub fn start(host: &mut dyn Host, config: Config) -> Result<(Database, Checkpoints), StartError> {
    let mut replay = Replay {
        restored: Restored::new(config),
        open: BTreeMap::new(),
        homes: BTreeMap::new(),
        passed: false,
        number: None,
    };
    replay.read_all(host)?;
    Ok((replay.restored.db, replay.restored.checkpoints))
}

fn number_of(name: &str, prefix: &str) -> Option<u64> {
    let digits = name.strip_prefix(prefix)?;
    let is_digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    let fine = digits.len() == 16 && digits.bytes().all(is_digit);
    fine.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
}

fn has_ops(kind: u32) -> bool {
    matches!(kind, kind::COMMIT | kind::PREPARE)
}

impl Replay {
    fn read_all(&mut self, host: &mut dyn Host) -> Result<(), StartError> {
        let names = host.list()?;
        let checkpoints: Vec<u64> =
            names.iter().filter_map(|n| number_of(n, "checkpoint-")).collect();
        let segments = names.iter().filter_map(|n| number_of(n, "log-"));
        let segments: Vec<u32> = segments.filter_map(|n| u32::try_from(n).ok()).collect();
        for segment in &segments {
            self.restored.db.log.usage.segments.entry(*segment).or_default();
        }
        let newest = checkpoints.iter().max().copied();
        if let Some(number) = newest {
            load(&mut self.restored, host, number)?;
        }
        let first = match newest {
            Some(_) => self.restored.checkpoints.replay_from.segment,
            None => segments.iter().min().copied().unwrap_or(1),
        };
        if newest.is_none() && first != 1 {
            return Err(StartError::damaged(format!(
                "the log begins with {}, without a checkpoint",
                name(first)
            )));
        }
        self.read_segments(host, first, &segments)?;
        self.finish(host)?;
        for old in names.iter().filter(|n| {
            n.ends_with(".new") || number_of(n, "checkpoint-").is_some_and(|n| Some(n) != newest)
        }) {
            host.remove(old)?;
        }
        Ok(())
    }

    /// Reads all segments from the first on.
    fn read_segments(
        &mut self,
        host: &mut dyn Host,
        first: u32,
        segments: &[u32],
    ) -> Result<(), StartError> {
        let Some(mut last) = segments.iter().max().copied().filter(|last| *last >= first) else {
            if self.restored.checkpoints.replay_from != Place::default() {
                return Err(StartError::damaged(format!("{} is missing", name(first))));
            }
            return Ok(());
        };
        // The last ones may have been made and not synced: they do not even begin.
        while last > first && self.is_unborn(host, last)? {
            self.restored.db.log.usage.remove(host, last)?;
            last -= 1;
        }
        for segment in first..=last {
            if !segments.contains(&segment) {
                return Err(StartError::damaged(format!("{} is missing", name(segment))));
            }
            self.read_segment(host, segment, segment == last)?;
        }
        Ok(())
    }

    fn is_unborn(&mut self, host: &mut dyn Host, segment: u32) -> Result<bool, StartError> {
        let file = self.restored.db.log.usage.file(host, segment)?;
        let mut reader = Reader::new(host, file, segment, 0)?;
        let stop = match reader.next(host) {
            Ok(_) => return Ok(false),
            Err(stop) => stop,
        };
        match stop {
            Stop::End => Ok(true),
            Stop::Torn => Ok(!reader.was_durable(host)?),
            Stop::Damaged(text) => Err(StartError::damaged(text)),
            Stop::Failed(errno) => Err(errno.into()),
        }
    }

    fn read_segment(
        &mut self,
        host: &mut dyn Host,
        segment: u32,
        last: bool,
    ) -> Result<(), StartError> {
        let file = self.restored.db.log.usage.file(host, segment)?;
        let from = self.restored.checkpoints.replay_from;
        let at = if segment == from.segment { u64::from(from.offset) } else { 0 };
        let mut reader = Reader::new(host, file, segment, at)?;
        if at > reader.file_len() {
            let text =
                format!("{} ends before byte {at}, where the checkpoint began", name(segment));
            return Err(StartError::damaged(text));
        }
        loop {
            let at = reader.at;
            match reader.next(host) {
                Ok((head, body_at)) => {
                    self.restored.check_memory()?;
                    let place = Place { segment, offset: body_at as u32 };
                    self.apply(head, place, reader.body()).map_err(|text| {
                        StartError::damaged(format!("{}, byte {at}: {text}", name(segment)))
                    })?;
                }
                Err(Stop::End) => break,
                Err(Stop::Torn) if last && !reader.was_durable(host)? => {
                    self.cut_tail(host, segment, at, reader.file_len())?;
                    break;
                }
                Err(Stop::Torn) => {
                    let text = format!("{}, byte {at}: what was durable is gone", name(segment));
                    return Err(StartError::damaged(text));
                }
                Err(Stop::Damaged(text)) => return Err(StartError::damaged(text)),
                Err(Stop::Failed(errno)) => return Err(errno.into()),
            }
        }
        let len = reader.at;
        self.restored.db.log.appended += len - at;
        self.restored.db.log.usage.segments.entry(segment).or_default().len = len;
        // What the kernel has, and the disk perhaps not: nobody is told of it before it is durable.
        if last {
            host.sync(file)?;
        }
        let number = self.number.unwrap_or(self.restored.captured_number);
        self.restored.db.log.resume(segment, len, number);
        Ok(())
    }

    fn cut_tail(
        &mut self,
        host: &mut dyn Host,
        segment: u32,
        at: u64,
        len: u64,
    ) -> Result<(), StartError> {
        let file = self.restored.db.log.usage.file(host, segment)?;
        let cut = len - at;
        let text = format!("{}: {cut} bytes that were not synced are cut off", name(segment));
        host.log(level::WARN, &text);
        host.truncate(file, at)?;
        Ok(host.sync(file)?)
    }

    fn apply(&mut self, head: Head, place: Place, body: &[u8]) -> Result<(), String> {
        if !self.passed && place >= self.restored.captured {
            self.passed = true;
            self.number = Some(self.restored.captured_number);
        }
        if let Some(number) = self.number.filter(|number| *number != head.number) {
            return Err(format!("record {} instead of {number}", head.number));
        }
        self.number = Some(head.number + 1);
        if place < self.restored.captured && head.kind != kind::SPILL {
            // The checkpoint knows it. Only ops of transactions that were still open then are not
            // there.
            if let Some((tx_head, _)) = TxHead::read(body).filter(|_| has_ops(head.kind)) {
                self.open.remove(&tx_head.tx);
                self.homes.remove(&tx_head.tx);
            }
            return Ok(());
        }
        let done = match head.kind {
            kind::SEGMENT => Some(()),
            kind::SPILL => self.apply_spill(place, body),
            kind::COMMIT => self.apply_commit(place, body),
            kind::PREPARE => self.apply_prepare(place, body),
            kind::COMMIT_PREPARED | kind::ROLLBACK_PREPARED => {
                return self.apply_end_of_prepared(head.kind, body);
            }
            kind::CATALOG => self.apply_change(body),
            kind::MOVED => self.apply_moved(place, body),
            kind => return Err(format!("record of kind {kind}")),
        };
        done.ok_or_else(|| format!("record of kind {} is not as it must be", head.kind))
    }

    /// Value of an op, in memory or in the log.
    fn slot_of(&mut self, op: &LogOp<'_>, place: Place) -> Slot {
        if op.kind == log_op::DELETE {
            return Slot::Deleted;
        }
        if op.value.len() <= INLINE_BYTES {
            return Slot::Inline(op.value.into());
        }
        let offset = place.offset.saturating_add(op.value_at as u32);
        if place >= self.restored.captured {
            let segment = self.restored.db.log.usage.segments.entry(place.segment).or_default();
            segment.values += op.value.len() as u64;
        }
        Slot::At(Loc { segment: place.segment, offset, len: op.value.len() as u32 })
    }

    fn add_ops(&mut self, tx: u64, place: Place, body: &[u8], mut at: usize) -> Option<()> {
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
                    let write = Write { slot: self.slot_of(&op, place), locked: op.flags != 0 };
                    ops.push(Op { index: (op.table, op.index), key: op.key.into(), write });
                }
            }
            at = next;
        }
        self.open.insert(tx, ops);
        Some(())
    }

    fn apply_spill(&mut self, place: Place, body: &[u8]) -> Option<()> {
        let tx = u64_at(body, 0);
        self.restored.db.txs.last = self.restored.db.txs.last.max(tx);
        self.add_ops(tx, place, body, 8)
    }

    fn note_tx(&mut self, tx_head: &TxHead<'_>) {
        self.restored.db.txs.last = self.restored.db.txs.last.max(tx_head.tx);
        self.restored.db.versions.last_commit =
            self.restored.db.versions.last_commit.max(tx_head.commit);
        self.restored.db.remembered.add(tx_head.request_id);
    }

    fn apply_commit(&mut self, place: Place, body: &[u8]) -> Option<()> {
        let (tx_head, at) = TxHead::read(body)?;
        self.note_tx(&tx_head);
        self.add_ops(tx_head.tx, place, body, at)?;
        self.homes.remove(&tx_head.tx);
        for op in self.open.remove(&tx_head.tx)? {
            self.restored.put(
                op.index,
                op.key,
                Version { commit: tx_head.commit, slot: op.write.slot },
            );
        }
        Some(())
    }

    fn apply_prepare(&mut self, place: Place, body: &[u8]) -> Option<()> {
        let (tx_head, at) = TxHead::read(body)?;
        self.note_tx(&tx_head);
        self.add_ops(tx_head.tx, place, body, at)?;
        for op in self.open.remove(&tx_head.tx)? {
            self.restored.put_prepared_write(
                (tx_head.tx, tx_head.name),
                op.index,
                op.key,
                op.write,
            );
        }
        self.restored.put_prepared(tx_head.tx, tx_head.name);
        Some(())
    }

    fn apply_end_of_prepared(&mut self, kind: u32, body: &[u8]) -> Result<(), String> {
        let Some((tx_head, _)) = TxHead::read(body) else { return Err("no head".into()) };
        self.note_tx(&tx_head);
        if self.restored.db.txs.prepared.get(tx_head.name) == Some(&tx_head.tx) {
            self.restored.db.txs.prepared.remove(tx_head.name);
        }
        self.homes.remove(&tx_head.tx);
        let Some(tx) = self.restored.db.txs.parked.remove(&tx_head.tx) else {
            return Err(format!("there is no prepared transaction {:?}", text(tx_head.name)));
        };
        self.restored.db.log.usage.memory =
            self.restored.db.log.usage.memory.saturating_sub(tx.memory);
        if kind == kind::COMMIT_PREPARED {
            for (index, writes) in tx.writes {
                for (key, write) in writes {
                    self.restored.put(
                        index,
                        key,
                        Version { commit: tx_head.commit, slot: write.slot },
                    );
                }
            }
        }
        Ok(())
    }

    fn apply_change(&mut self, body: &[u8]) -> Option<()> {
        let change = Change::read(body)?;
        self.restored.db.catalog.apply(&change);
        if change.request_id != RequestId::default()
            && change.kind != crate::record_body::change::AUTO
        {
            self.restored.db.remembered.add(change.request_id);
        }
        Some(())
    }

    fn apply_moved(&mut self, place: Place, body: &[u8]) -> Option<()> {
        let mut at = 0;
        while at < body.len() {
            let commit = u64_at(body.get(at..)?, 0);
            let (op, next) = op_at(body, at + 8)?;
            let slot = self.slot_of(&op, place);
            if let Some(index) = self.restored.db.catalog.index_mut(op.table, op.index)
                && let Some(chain) = index.map.get_mut(op.key)
                && let Some(version) = chain.versions_mut().iter_mut().find(|v| v.commit == commit)
            {
                self.restored.db.log.usage.forget(&version.slot);
                self.restored.db.log.usage.keep(&slot);
                version.slot = slot;
            }
            at = next;
        }
        Some(())
    }

    /// Does what is left to do once all records are read.
    fn finish(&mut self, host: &mut dyn Host) -> Result<(), StartError> {
        let db = &mut self.restored.db;
        db.versions.visible = db.versions.last_commit;
        db.memory_limit = MemoryLimit::default();
        db.catalog.rebuild_names();
        let tables = db.catalog.tables.keys();
        db.log.usage.memory += tables.map(|table| db.catalog.memory_of(*table)).sum::<u64>();
        db.catalog.next = db.catalog.next.max(1);
        while !db.catalog.dropped_indexes.is_empty() {
            db.steps = u64::MAX;
            db.free_dropped();
        }
        self.lock_prepared();
        self.check_segments(host)
    }

    /// Gives prepared transactions their locks again, and keeps the segments that they refer to.
    fn lock_prepared(&mut self) {
        let Database { txs, locks, log, .. } = &mut self.restored.db;
        for id in txs.prepared.values() {
            let Some(tx) = txs.parked.get_mut(id) else { continue };
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
                log.usage.pin(segment);
                tx.spills.push(Spill { at: 0, place: Place { segment, offset: 0 } });
            }
        }
    }

    /// Fails if a segment is missing that is referred to.
    fn check_segments(&mut self, host: &mut dyn Host) -> Result<(), StartError> {
        let here = host.list()?;
        let usage = &mut self.restored.db.log.usage;
        let mut missing = Vec::new();
        for (number, segment) in &mut usage.segments {
            if !here.contains(&name(*number)) {
                missing.push(*number);
                if segment.live > 0 || segment.pins > 0 {
                    return Err(StartError::damaged(format!(
                        "{} is missing, which has values",
                        name(*number)
                    )));
                }
            }
        }
        for number in missing {
            usage.segments.remove(&number);
        }
        let unknown = usage.segments.iter().filter(|(_, s)| s.len == 0).map(|(n, _)| *n);
        for number in unknown.collect::<Vec<_>>() {
            let file = usage.file(host, number)?;
            let len = host.len(file)?;
            usage.segments.entry(number).or_default().len = len;
        }
        Ok(())
    }
}
