//! Checkpoints: the indexes in memory, written to a file a piece at a time, so that a start need
//! not read the whole log.
//!
//! While the pieces are written, serving goes on: each shows another moment. Replay of the log from
//! where the checkpoint began makes them one: whatever changed since is in that part of the log.
//! Prepared transactions cannot be repaired so: they are written at once, at the beginning. A
//! transaction that has put ops into the log and is not committed yet moves the place where replay
//! begins back to the first of them.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Bound;

use guest_abi::module_call::log as level;
use guest_abi::table::status;
use sdk::{File, Host, open};

use crate::catalog::Table;
use crate::database::Database;
use crate::entry;
use crate::fail::Fail;
use crate::log::Place;
use crate::map::{Index, IndexId};
use crate::record::{self, kind};
use crate::record_body::{Change, RequestId, TxHead, change};
use crate::reserve::Purpose;

/// Version of the format.
pub const VERSION: u32 = 1;
/// Bytes of a piece, about.
const PIECE_BYTES: usize = 64 << 10;
/// Bytes after which the file is made durable, so that the end has not much left to do.
const SYNC_BYTES: u64 = 4 << 20;
/// Writes of prepared transactions that are written at the beginning: all, unless one is large.
const PREPARED_STEPS: u64 = 4096;
/// Bytes of a record of such writes, about.
const PREPARED_BYTES: usize = 1 << 20;
/// Wait for the next try after a failure.
const PAUSE_MS: u64 = 1000;

/// Checkpoint that is being written.
#[derive(Debug)]
pub struct Checkpoint {
    number: u64,
    file: File,
    /// Place in the log from which on replay will read.
    replay_from: Place,
    /// Bytes appended to the log when it began.
    log_at: u64,
    /// Prepared transactions that are still to be written. If one of them ends before, the
    /// checkpoint is worth nothing.
    prepared: Vec<u64>,
    /// Last write that is there of the prepared transaction in the middle of which the last piece
    /// ended.
    in_prepared: Option<(IndexId, Vec<u8>)>,
    /// Position in the maps: table, index, and the key after which it goes on.
    next: Option<(u32, u8, Vec<u8>)>,
    /// Whether the table's own record is written.
    in_table: bool,
    records: u64,
    len: u64,
    unsynced: u64,
    buffer: Vec<u8>,
}

/// Name of a checkpoint's file.
pub fn name(number: u64) -> String {
    format!("checkpoint-{number:016x}")
}

impl Checkpoint {
    fn begin(&mut self) -> usize {
        record::begin(&mut self.buffer)
    }

    fn seal(&mut self, at: usize, kind: u32) {
        record::seal(&mut self.buffer, at, kind, self.number as u32, 0, self.records);
        self.records += 1;
    }

    fn write(&mut self, host: &mut dyn Host) -> Result<(), Fail> {
        let len = self.buffer.len() as u64;
        let written = host.append(self.file, &self.buffer);
        self.buffer.clear();
        written.map_err(|errno| Fail::storage("the checkpoint", errno))?;
        self.len += len;
        self.unsynced += len;
        if self.unsynced > SYNC_BYTES {
            self.sync(host)?;
        }
        Ok(())
    }

    /// Gives it up.
    fn abandon(&self, host: &mut dyn Host) {
        host.close(self.file);
        let _ = host.remove(&format!("{}.new", name(self.number)));
    }

    fn sync(&mut self, host: &mut dyn Host) -> Result<(), Fail> {
        self.unsynced = 0;
        host.sync(self.file).map_err(|errno| Fail::storage("the checkpoint's sync", errno))
    }

    fn put_head(&mut self, db: &Database, captured: Place) {
        let at = self.begin();
        let (from, out) = (self.replay_from, &mut self.buffer);
        for part in [VERSION, from.segment, from.offset, captured.segment, captured.offset] {
            out.extend_from_slice(&part.to_le_bytes());
        }
        out.extend_from_slice(&db.catalog.next.to_le_bytes());
        out.extend_from_slice(&db.versions.last_commit.to_le_bytes());
        out.extend_from_slice(&db.txs.last.to_le_bytes());
        out.extend_from_slice(&db.log.next_number().to_le_bytes());
        self.seal(at, kind::CHECKPOINT);
    }

    fn put_segments(&mut self, db: &Database) {
        let at = self.begin();
        for (number, segment) in &db.log.usage.segments {
            self.buffer.extend_from_slice(&number.to_le_bytes());
            self.buffer.extend_from_slice(&segment.values.to_le_bytes());
        }
        self.seal(at, kind::SEGMENTS);
    }

    fn put_clients(&mut self, db: &Database) {
        let at = self.begin();
        for (client, done) in &db.remembered.clients {
            self.buffer.extend_from_slice(client);
            for part in [done.highest, done.mask, done.stamp] {
                self.buffer.extend_from_slice(&part.to_le_bytes());
            }
        }
        self.seal(at, kind::CLIENTS);
    }

    /// Writes up to `left` of the writes of prepared transactions, about.
    fn put_prepared(&mut self, db: &Database, mut left: u64) {
        while left > 0
            && let Some(id) = self.prepared.pop()
        {
            let name = db.txs.prepared.iter().find(|(_, tx)| **tx == id).map(|(name, _)| name);
            let (Some(name), Some(tx)) = (name, db.txs.parked.get(&id)) else { continue };
            let head = TxHead { commit: 0, tx: id, request_id: RequestId::default(), name };
            let at = self.begin();
            head.put(&mut self.buffer);
            let (from, after) = self.in_prepared.take().unzip();
            let from = from.unwrap_or((0, 0));
            'writes: for (index, writes) in tx.writes.range(from..) {
                let low = match &after {
                    Some(after) if *index == from => Bound::Excluded(&**after),
                    _ => Bound::Unbounded,
                };
                for (key, write) in writes.range::<[u8], _>((low, Bound::Unbounded)) {
                    let slot = tx.settle(write.slot.clone());
                    self.buffer.extend_from_slice(&index.0.to_le_bytes());
                    self.buffer.push(index.1);
                    entry::put(&mut self.buffer, key, 0, write.locked, &slot);
                    left = left.saturating_sub(1);
                    if left == 0 || self.buffer.len() - at > PREPARED_BYTES {
                        self.in_prepared = Some((*index, key.to_vec()));
                        self.prepared.push(id);
                        break 'writes;
                    }
                }
            }
            self.seal(at, kind::PREPARED);
        }
    }

    fn put_piece(&mut self, db: &Database, next: (u32, u8, Vec<u8>), steps: u64) {
        let (mut number, mut index, mut key) = next;
        let mut left = steps.max(1);
        while left > 0 && self.buffer.len() < PIECE_BYTES {
            left -= 1;
            let Some((found, table)) = db.catalog.tables.range(number..).next() else {
                self.next = None;
                return;
            };
            if *found != number {
                (number, index, self.in_table) = (*found, 0, false);
                key.clear();
            }
            if !self.in_table {
                self.put_table(number, table);
                self.in_table = true;
            }
            let Some(entries) = table.indexes.get(usize::from(index)) else {
                (number, index, self.in_table) = (number.saturating_add(1), 0, false);
                key.clear();
                continue;
            };
            match self.put_entries((number, index), entries, &key, &mut left) {
                Some(last) => key = last,
                None => {
                    index = index.saturating_add(1);
                    key.clear();
                }
            }
        }
        self.next = Some((number, index, key));
    }

    fn put_table(&mut self, number: u32, table: &Table) {
        let at = self.begin();
        let change = Change {
            kind: change::CREATE,
            indexes: table.indexes.len() as u8,
            table: number,
            auto: table.logged_auto,
            request_id: RequestId::default(),
            name: &table.name,
            definition: &table.definition,
        };
        change.put(&mut self.buffer);
        self.seal(at, kind::TABLE);
    }

    /// Writes entries after a key. If there are more, returns the last key.
    fn put_entries(
        &mut self,
        (table, index): IndexId,
        entries: &Index,
        after: &[u8],
        left: &mut u64,
    ) -> Option<Vec<u8>> {
        // The empty key is a key, too: it comes first.
        let low = if after.is_empty() { Bound::Unbounded } else { Bound::Excluded(after) };
        let at = self.begin();
        self.buffer.extend_from_slice(&table.to_le_bytes());
        self.buffer.push(index);
        let mut last: Option<&[u8]> = None;
        let mut full = false;
        for (key, chain) in entries.map.range::<[u8], _>((low, Bound::Unbounded)) {
            if full {
                self.seal(at, kind::ENTRIES);
                return last.map(<[u8]>::to_vec);
            }
            if let Some(version) = chain.head()
                && version.slot.is_there()
            {
                entry::put(&mut self.buffer, key, version.commit, true, &version.slot);
            }
            *left = left.saturating_sub(1);
            last = Some(&**key);
            full = !key.is_empty() && (*left == 0 || self.buffer.len() - at > PIECE_BYTES);
        }
        self.seal(at, kind::ENTRIES);
        None
    }
}

/// Checkpoints: the last one, the one that is being written, and when the next one is due.
#[derive(Debug, Default)]
pub struct Checkpoints {
    /// Checkpoint that is being written.
    pub current: Option<Box<Checkpoint>>,
    /// Number of the last one.
    pub number: u64,
    /// Length of the last one in bytes.
    pub len: u64,
    /// Place in the log at which replay begins, by the last one.
    pub replay_from: Place,
    /// Bytes appended to the log when the last one began.
    log_at: u64,
    /// Whether another one would make segments removable.
    pub is_wanted: bool,
    /// Time before which none is begun, since the last try failed.
    after_ms: u64,
}

impl Checkpoints {
    /// Whether another one is to be begun. `has_applies`: commits are in the log and not in memory.
    pub fn is_due(&self, host: &mut dyn Host, db: &Database, has_applies: bool) -> bool {
        let since = db.log.appended.saturating_sub(self.log_at);
        let many = since >= db.config.checkpoint_bytes.max(2 * self.len);
        (many || self.is_wanted)
            && !has_applies
            && db.log.check_writable().is_ok()
            && host.now_ms() >= self.after_ms
    }

    /// Wants another one if it would free enough.
    pub fn want_if_worth(&mut self, db: &Database) {
        let segments = db.log.usage.segments.values();
        let unused: u64 = segments.filter(|s| s.is_unused()).map(|s| s.len).sum();
        self.is_wanted |= unused >= 2 * db.config.segment_bytes.max(self.len);
    }

    /// Begins one.
    pub fn begin(&mut self, host: &mut dyn Host, db: &mut Database) {
        let number = self.number + 1;
        let file = host.open(&format!("{}.new", name(number)), open::CREATE | open::TRUNCATE);
        let file = match file {
            Ok(file) => file,
            Err(errno) => return self.fail(host, db, &Fail::storage("a checkpoint", errno)),
        };
        let captured = db.log.end();
        let mut checkpoint = Checkpoint {
            number,
            file,
            replay_from: db.replay_would_begin(),
            log_at: db.log.appended,
            prepared: db.txs.prepared.values().copied().collect(),
            in_prepared: None,
            next: Some((0, 0, Vec::new())),
            in_table: false,
            records: 0,
            len: 0,
            unsynced: 0,
            buffer: Vec::new(),
        };
        checkpoint.put_head(db, captured);
        checkpoint.put_segments(db);
        checkpoint.put_clients(db);
        checkpoint.put_prepared(db, PREPARED_STEPS.min(db.config.steps));
        self.is_wanted = false;
        self.current = Some(checkpoint.into());
    }

    /// Gives up a checkpoint that has not all yet of a prepared transaction which ends.
    pub fn end_prepared(&mut self, host: &mut dyn Host, tx: u64) {
        if let Some(checkpoint) = self.current.take_if(|c| c.prepared.contains(&tx)) {
            checkpoint.abandon(host);
            self.is_wanted = true;
        }
    }

    /// Writes one more piece. `compacted`: a segment that is being read stays.
    pub fn go_on(
        &mut self,
        host: &mut dyn Host,
        db: &mut Database,
        compacted: Option<u32>,
        steps: u64,
    ) {
        let Some(mut checkpoint) = self.current.take() else { return };
        let step = match checkpoint.next.clone() {
            _ if !checkpoint.prepared.is_empty() => {
                checkpoint.put_prepared(db, steps);
                checkpoint.write(host).map(|()| false)
            }
            Some(next) => {
                checkpoint.put_piece(db, next, steps);
                checkpoint.write(host).map(|()| false)
            }
            None => self.finish(host, db, &mut checkpoint, compacted).map(|()| true),
        };
        match step {
            Ok(true) => {}
            Ok(false) => self.current = Some(checkpoint),
            Err(fail) => {
                checkpoint.abandon(host);
                self.fail(host, db, &fail);
            }
        }
    }

    fn fail(&mut self, host: &mut dyn Host, db: &mut Database, fail: &Fail) {
        host.log(level::WARN, &format!("no checkpoint was made: {}", fail.text));
        self.after_ms = host.now_ms() + PAUSE_MS;
        if fail.status == status::NO_SPACE {
            self.is_wanted = db.log.reserve.give(host, Purpose::Checkpoint);
            if !self.is_wanted {
                db.log.reserve.take_back();
            }
        }
    }

    fn finish(
        &mut self,
        host: &mut dyn Host,
        db: &mut Database,
        checkpoint: &mut Checkpoint,
        compacted: Option<u32>,
    ) -> Result<(), Fail> {
        let at = checkpoint.begin();
        checkpoint.seal(at, kind::END);
        checkpoint.write(host)?;
        // The checkpoint says where values are: these must be there as surely as it is.
        db.log.sync(host)?;
        checkpoint.sync(host)?;
        let (number, fail) = (checkpoint.number, |errno| Fail::storage("the checkpoint", errno));
        host.rename(&format!("{}.new", name(number)), &name(number)).map_err(fail)?;
        host.close(checkpoint.file);
        if self.number > 0 {
            let _ = host.remove(&name(self.number));
        }
        self.number = number;
        self.len = checkpoint.len;
        self.log_at = checkpoint.log_at;
        self.replay_from = checkpoint.replay_from;
        self.remove_segments(host, db, compacted);
        db.log.reserve.take_back();
        Ok(())
    }

    /// Removes segments that nothing refers to and no replay needs. The log is durable: so is what
    /// made them needless.
    fn remove_segments(&self, host: &mut dyn Host, db: &mut Database, compacted: Option<u32>) {
        let old = db.log.usage.segments.range(..self.replay_from.segment);
        let unused = old.filter(|(_, s)| s.is_unused()).map(|(n, _)| *n);
        for number in unused.collect::<Vec<_>>() {
            if compacted == Some(number) {
                continue;
            }
            if let Err(errno) = db.log.usage.remove(host, number) {
                host.log(level::WARN, &format!("segment {number} cannot be removed: {errno}"));
            }
        }
    }
}
