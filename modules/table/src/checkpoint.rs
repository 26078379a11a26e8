//! Checkpoints: the index in memory written to a file, a piece at a time, so that a start need not read
//! the whole log.
//!
//! While the pieces are written, serving goes on: each shows another moment. Replay of the log from
//! where the checkpoint began makes them one: whatever changed since is in that part of the log. What
//! cannot be repaired so (prepared transactions) is written at once, at the beginning. A transaction
//! that has put ops into the log and is not committed yet moves the place where replay begins back to
//! the first of them.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Bound;

use guest_abi::module_call::log as level;
use guest_abi::table::status;
use sdk::{File, Host, open};

use crate::clients::Done;
use crate::deed::{Change, Deed, Note, change};
use crate::entry;
use crate::fail::Fail;
use crate::log::Place;
use crate::record::{self, HEAD_BYTES, Reader, Stop, kind, u32_at, u64_at};
use crate::replay::{Broken, Replay, broken};
use crate::reserve::Purpose;
use crate::store::Store;
use crate::tx::Where;

/// Of the format.
const VERSION: u32 = 1;
/// A piece has so many bytes, about.
const PIECE_BYTES: usize = 64 << 10;
/// After so many bytes the file is made durable, so that the end has not much left to do.
const SYNC_BYTES: u64 = 4 << 20;
/// So many writes of prepared transactions are written at the beginning: all, unless one is large.
const PREPARED_STEPS: u64 = 4096;
/// Of these so many bytes are one record.
const PREPARED_BYTES: usize = 1 << 20;
/// After a failure the next try waits.
const PAUSE_MS: u64 = 1000;

/// A checkpoint that is being written.
#[derive(Debug)]
pub struct Checkpoint {
    number: u64,
    file: File,
    replay_from: Place,
    log_at: u64,
    /// Prepared transactions that are still to be written, and the last key of the first that was. If one
    /// of them ends before, the checkpoint is worth nothing.
    prepared: Vec<u64>,
    in_prepared: Option<(Where, Vec<u8>)>,
    /// The next entries: table, index, those after a key.
    next: Option<(u32, u8, Vec<u8>)>,
    /// The table's own record is written.
    in_table: bool,
    records: u64,
    len: u64,
    unsynced: u64,
    buffer: Vec<u8>,
}

fn name(number: u64) -> String {
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

    fn sync(&mut self, host: &mut dyn Host) -> Result<(), Fail> {
        self.unsynced = 0;
        host.sync(self.file).map_err(|errno| Fail::storage("the checkpoint's sync", errno))
    }
}

impl Store {
    /// Whether one is to be begun.
    pub(crate) fn wants_checkpoint(&mut self, host: &mut dyn Host) -> bool {
        let since = self.log.appended.saturating_sub(self.checkpoint_at);
        let many = since >= self.config.checkpoint_bytes.max(2 * self.checkpoint_len);
        (many || self.checkpoint_wanted)
            && self.applies.is_empty()
            && self.log.writable().is_ok()
            && host.now_ms() >= self.checkpoint_after_ms
    }

    /// Begins one.
    pub(crate) fn begin_checkpoint(&mut self, host: &mut dyn Host) {
        let number = self.checkpoint_number + 1;
        let file = host.open(&format!("{}.new", name(number)), open::CREATE | open::TRUNCATE);
        let file = match file {
            Ok(file) => file,
            Err(errno) => {
                return self.checkpoint_failed(host, &Fail::storage("a checkpoint", errno));
            }
        };
        let captured = self.log.end();
        let mut checkpoint = Checkpoint {
            number,
            file,
            replay_from: self.replay_would_begin(),
            log_at: self.log.appended,
            prepared: self.prepared.values().copied().collect(),
            in_prepared: None,
            next: Some((0, 0, Vec::new())),
            in_table: false,
            records: 0,
            len: 0,
            unsynced: 0,
            buffer: Vec::new(),
        };
        self.put_head(&mut checkpoint, captured);
        self.put_segments(&mut checkpoint);
        self.put_clients(&mut checkpoint);
        self.put_prepared(&mut checkpoint, PREPARED_STEPS.min(self.config.steps));
        self.checkpoint_wanted = false;
        self.checkpoint = Some(checkpoint.into());
    }

    /// Where replay would begin after a checkpoint that began now.
    pub(crate) fn replay_would_begin(&self) -> Place {
        let is_prepared = |id: &u64| self.prepared.values().any(|p| p == id);
        let open = self.txs.iter().filter(|(id, _)| !is_prepared(id));
        let first = open.filter_map(|(_, tx)| tx.begun).min();
        first.map_or(self.log.end(), |first| first.min(self.log.end()))
    }

    fn put_head(&self, checkpoint: &mut Checkpoint, captured: Place) {
        let at = checkpoint.begin();
        let (from, out) = (checkpoint.replay_from, &mut checkpoint.buffer);
        for part in [VERSION, from.segment, from.offset, captured.segment, captured.offset] {
            out.extend_from_slice(&part.to_le_bytes());
        }
        out.extend_from_slice(&self.catalog.next.to_le_bytes());
        out.extend_from_slice(&self.last_commit.to_le_bytes());
        out.extend_from_slice(&self.next_tx.to_le_bytes());
        out.extend_from_slice(&self.log.next_number().to_le_bytes());
        checkpoint.seal(at, kind::CHECKPOINT);
    }

    fn put_segments(&self, checkpoint: &mut Checkpoint) {
        let at = checkpoint.begin();
        for (number, segment) in &self.log.books.segments {
            checkpoint.buffer.extend_from_slice(&number.to_le_bytes());
            checkpoint.buffer.extend_from_slice(&segment.values.to_le_bytes());
        }
        checkpoint.seal(at, kind::SEGMENTS);
    }

    fn put_clients(&self, checkpoint: &mut Checkpoint) {
        let at = checkpoint.begin();
        for (client, done) in &self.remembered.clients {
            checkpoint.buffer.extend_from_slice(client);
            for part in [done.highest, done.mask, done.stamp] {
                checkpoint.buffer.extend_from_slice(&part.to_le_bytes());
            }
        }
        checkpoint.seal(at, kind::CLIENTS);
    }

    /// Writes so many of the writes of prepared transactions, about.
    fn put_prepared(&self, checkpoint: &mut Checkpoint, mut left: u64) {
        while left > 0
            && let Some(id) = checkpoint.prepared.pop()
        {
            let name = self.prepared.iter().find(|(_, tx)| **tx == id).map(|(name, _)| name);
            let (Some(name), Some(tx)) = (name, self.txs.get(&id)) else { continue };
            let deed = Deed { commit: 0, tx: id, note: Note::default(), name };
            let at = checkpoint.begin();
            deed.put(&mut checkpoint.buffer);
            let (from, after) = checkpoint.in_prepared.take().unzip();
            let from = from.unwrap_or((0, 0));
            'writes: for (place, writes) in tx.writes.range(from..) {
                let low = match &after {
                    Some(after) if *place == from => Bound::Excluded(&**after),
                    _ => Bound::Unbounded,
                };
                for (key, write) in writes.range::<[u8], _>((low, Bound::Unbounded)) {
                    let slot = tx.settle(write.slot.clone());
                    checkpoint.buffer.extend_from_slice(&place.0.to_le_bytes());
                    checkpoint.buffer.push(place.1);
                    entry::put(&mut checkpoint.buffer, key, 0, write.locked, &slot);
                    left = left.saturating_sub(1);
                    if left == 0 || checkpoint.buffer.len() - at > PREPARED_BYTES {
                        checkpoint.in_prepared = Some((*place, key.to_vec()));
                        checkpoint.prepared.push(id);
                        break 'writes;
                    }
                }
            }
            checkpoint.seal(at, kind::PREPARED);
        }
    }

    /// A prepared transaction ends. A checkpoint that has not all of it yet is given up.
    pub(crate) fn prepared_ends(&mut self, host: &mut dyn Host, id: u64) {
        if let Some(checkpoint) = self.checkpoint.take_if(|c| c.prepared.contains(&id)) {
            host.close(checkpoint.file);
            let _ = host.remove(&format!("{}.new", name(checkpoint.number)));
            self.checkpoint_wanted = true;
        }
    }

    /// Writes one more piece.
    pub(crate) fn go_on_checkpoint(&mut self, host: &mut dyn Host, steps: u64) {
        let Some(mut checkpoint) = self.checkpoint.take() else { return };
        let step = match checkpoint.next.clone() {
            _ if !checkpoint.prepared.is_empty() => {
                self.put_prepared(&mut checkpoint, steps);
                checkpoint.write(host).map(|()| false)
            }
            Some(next) => {
                self.put_piece(&mut checkpoint, next, steps);
                checkpoint.write(host).map(|()| false)
            }
            None => self.end_checkpoint(host, &mut checkpoint).map(|()| true),
        };
        match step {
            Ok(true) => {}
            Ok(false) => self.checkpoint = Some(checkpoint),
            Err(fail) => {
                host.close(checkpoint.file);
                let _ = host.remove(&format!("{}.new", name(checkpoint.number)));
                self.checkpoint_failed(host, &fail);
            }
        }
    }

    fn checkpoint_failed(&mut self, host: &mut dyn Host, fail: &Fail) {
        host.log(level::WARN, &format!("no checkpoint was made: {}", fail.text));
        self.checkpoint_after_ms = host.now_ms() + PAUSE_MS;
        if fail.status == status::NO_SPACE {
            self.checkpoint_wanted = self.log.reserve.give(host, Purpose::Checkpoint);
            if !self.checkpoint_wanted {
                self.log.reserve.take_back();
            }
        }
    }

    fn put_piece(&self, checkpoint: &mut Checkpoint, next: (u32, u8, Vec<u8>), steps: u64) {
        let (mut number, mut index, mut key) = next;
        let mut left = steps.max(1);
        while left > 0 && checkpoint.buffer.len() < PIECE_BYTES {
            left -= 1;
            let Some((found, table)) = self.catalog.tables.range(number..).next() else {
                checkpoint.next = None;
                return;
            };
            if *found != number {
                (number, index, checkpoint.in_table) = (*found, 0, false);
                key.clear();
            }
            if !checkpoint.in_table {
                put_table(checkpoint, number, table);
                checkpoint.in_table = true;
            }
            let Some(entries) = table.indexes.get(usize::from(index)) else {
                (number, index, checkpoint.in_table) = (number.saturating_add(1), 0, false);
                key.clear();
                continue;
            };
            match put_entries(checkpoint, (number, index), entries, &key, &mut left) {
                Some(last) => key = last,
                None => {
                    index = index.saturating_add(1);
                    key.clear();
                }
            }
        }
        checkpoint.next = Some((number, index, key));
    }

    fn end_checkpoint(
        &mut self,
        host: &mut dyn Host,
        checkpoint: &mut Checkpoint,
    ) -> Result<(), Fail> {
        let at = checkpoint.begin();
        checkpoint.seal(at, kind::END);
        checkpoint.write(host)?;
        // It says where values are: these must be there as surely as it is.
        self.log.sync(host)?;
        checkpoint.sync(host)?;
        let (number, fail) = (checkpoint.number, |errno| Fail::storage("the checkpoint", errno));
        host.rename(&format!("{}.new", name(number)), &name(number)).map_err(fail)?;
        host.close(checkpoint.file);
        if self.checkpoint_number > 0 {
            let _ = host.remove(&name(self.checkpoint_number));
        }
        self.checkpoint_number = number;
        self.checkpoint_len = checkpoint.len;
        self.checkpoint_at = checkpoint.log_at;
        self.replay_from = checkpoint.replay_from;
        self.remove_segments(host);
        self.log.reserve.take_back();
        Ok(())
    }

    /// Removes segments that nothing refers to and no replay needs. The log is durable: so is what made
    /// them needless.
    fn remove_segments(&mut self, host: &mut dyn Host) {
        let first = self.replay_from.segment;
        let old = self.log.books.segments.range(..first);
        let dead = old.filter(|(_, s)| s.live == 0 && s.pins == 0).map(|(n, _)| *n);
        for number in dead.collect::<Vec<_>>() {
            if self.compaction.as_ref().is_some_and(|c| c.segment == number) {
                continue;
            }
            if let Err(errno) = self.log.books.remove(host, number) {
                host.log(level::WARN, &format!("segment {number} cannot be removed: {errno}"));
            }
        }
    }
}

fn put_table(checkpoint: &mut Checkpoint, number: u32, table: &crate::catalog::Table) {
    let at = checkpoint.begin();
    let change = Change {
        kind: change::CREATE,
        indexes: table.indexes.len() as u8,
        table: number,
        auto: table.logged_auto,
        note: Note::default(),
        name: &table.name,
        definition: &table.definition,
    };
    change.put(&mut checkpoint.buffer);
    checkpoint.seal(at, kind::TABLE);
}

/// Writes entries after a key; the last of them, if there are more.
fn put_entries(
    checkpoint: &mut Checkpoint,
    (table, index): Where,
    entries: &crate::map::Index,
    after: &[u8],
    left: &mut u64,
) -> Option<Vec<u8>> {
    // The empty key is a key, too: it comes first.
    let low = if after.is_empty() { Bound::Unbounded } else { Bound::Excluded(after) };
    let at = checkpoint.begin();
    checkpoint.buffer.extend_from_slice(&table.to_le_bytes());
    checkpoint.buffer.push(index);
    let mut last: Option<&[u8]> = None;
    let mut full = false;
    for (key, chain) in entries.map.range::<[u8], _>((low, Bound::Unbounded)) {
        if full {
            checkpoint.seal(at, kind::ENTRIES);
            return last.map(<[u8]>::to_vec);
        }
        if let Some(version) = chain.head()
            && version.slot.is_there()
        {
            entry::put(&mut checkpoint.buffer, key, version.commit, true, &version.slot);
        }
        *left = left.saturating_sub(1);
        last = Some(&**key);
        full = !key.is_empty() && (*left == 0 || checkpoint.buffer.len() - at > PIECE_BYTES);
    }
    checkpoint.seal(at, kind::ENTRIES);
    None
}

impl Replay {
    /// Reads a checkpoint.
    pub(crate) fn load(&mut self, host: &mut dyn Host, number: u64) -> Result<(), Broken> {
        let file = host.open(&name(number), 0)?;
        let mut reader = Reader::new(host, file, number as u32, 0)?;
        let wrong = |at: u64, why: &str| broken(format!("{}, byte {at}: {why}", name(number)));
        let (mut count, mut whole) = (0, false);
        loop {
            let at = reader.at;
            let head = match reader.next(host) {
                Ok((head, _)) => head,
                Err(Stop::End) if whole => break,
                Err(Stop::End | Stop::Torn) => return Err(wrong(at, "its end is missing")),
                Err(Stop::Damaged(text)) => return Err(broken(format!("checkpoint: {text}"))),
                Err(Stop::Failed(errno)) => return Err(errno.into()),
            };
            if head.number != count || whole {
                return Err(wrong(at, "a record that does not belong there"));
            }
            self.store.check_start()?;
            count += 1;
            whole = head.kind == kind::END;
            self.piece(head.kind, reader.body()).ok_or_else(|| wrong(at, "a record is wrong"))?;
        }
        host.close(file);
        self.store.checkpoint_number = number;
        self.store.checkpoint_len = reader.file_len();
        Ok(())
    }

    fn piece(&mut self, kind: u32, body: &[u8]) -> Option<()> {
        match kind {
            kind::CHECKPOINT => self.head(body)?,
            kind::SEGMENTS => {
                (0..body.len() / 12).for_each(|i| self.put_segment(body, i * 12));
            }
            kind::CLIENTS => self.clients(body),
            kind::PREPARED => self.prepared(body)?,
            kind::TABLE => {
                let change = Change::read(body)?;
                self.store.catalog.apply(&change);
                let table = self.store.catalog.tables.get_mut(&change.table)?;
                (table.next_auto, table.logged_auto) = (change.auto, change.auto);
            }
            kind::ENTRIES => self.entries(body)?,
            kind::END => {}
            _ => return None,
        }
        Some(())
    }

    fn head(&mut self, body: &[u8]) -> Option<()> {
        let place = |at| Place { segment: u32_at(body, at), offset: u32_at(body, at + 4) };
        if body.len() != 48 || u32_at(body, 0) != VERSION {
            return None;
        }
        self.store.replay_from = place(4);
        self.captured = place(12);
        self.store.catalog.next = u32_at(body, 20);
        self.store.last_commit = u64_at(body, 24);
        self.store.next_tx = u64_at(body, 32);
        self.captured_number = u64_at(body, 40);
        Some(())
    }

    fn clients(&mut self, body: &[u8]) {
        for known in body.chunks_exact(40) {
            let mut client = [0; 16];
            client.copy_from_slice(&known[..16]);
            let (highest, mask, stamp) = (u64_at(known, 16), u64_at(known, 24), u64_at(known, 32));
            self.store.remembered.put(client, Done { highest, mask, stamp });
        }
    }

    fn prepared(&mut self, body: &[u8]) -> Option<()> {
        let (deed, mut at) = Deed::read(body)?;
        self.keep_name(deed.tx, deed.name);
        while at < body.len() {
            let place = (u32_at(body, at), *body.get(at + 4)?);
            let (entry, next) = entry::read(body, at + 5)?;
            let write = crate::map::Write { slot: entry.slot, locked: entry.locked };
            self.keep_prepared(deed.tx, deed.name, place, entry.key.into(), write);
            at = next;
        }
        Some(())
    }

    fn entries(&mut self, body: &[u8]) -> Option<()> {
        let place = (u32_at(body, 0), *body.get(4)?);
        let mut at = 5;
        while at < body.len() {
            let (entry, next) = entry::read(body, at)?;
            let version = crate::map::Version { commit: entry.commit, slot: entry.slot };
            self.put(place, entry.key.into(), version);
            at = next;
        }
        Some(())
    }
}

/// Where a record begins whose body is at a place.
pub fn record_place(body: Place) -> Place {
    Place { offset: body.offset.saturating_sub(HEAD_BYTES as u32), ..body }
}
