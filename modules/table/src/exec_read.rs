//! Ops that read entries.

use alloc::vec::Vec;
use core::ops::Bound;

use guest_abi::table::{op_flag, op_flag::KEYS_ONLY};
use sdk::Host;

use crate::catalog::Catalog;
use crate::clients::Cursor;
use crate::deed::CHECK_BYTES;
use crate::fail::{Fail, fail};
use crate::filter::Filter;
use crate::lock::mode;
use crate::log::{Log, proven, unreadable};
use crate::map::{Loc, Merge, Slot};
use crate::run::{Act, Next};
use crate::store::Store;
use crate::tx::{Tx, Where};
use crate::wire::{self, MAX_REPLY_BYTES, OpRef, ROW_BYTES};

/// Two values with at most so many bytes between them are read together.
const GAP_BYTES: u32 = 1024;
/// Most bytes that are read together.
const TOGETHER_BYTES: u32 = 256 << 10;

/// A value that is to be read: where it belongs in the reply, and where it is.
pub type Wanted = (usize, Loc);

/// What a key's value is for a transaction.
pub fn seen<'a>(
    catalog: &'a Catalog,
    tx: &'a Tx,
    place: Where,
    key: &[u8],
    snapshot: u64,
) -> Option<&'a Slot> {
    if let Some(write) = tx.own(place, key) {
        return Some(&write.slot).filter(|slot| slot.is_there());
    }
    catalog.index(place.0, place.1).ok()?.map.get(key)?.at(snapshot)
}

/// Appends a value, or room for it.
fn put_value(
    out: &mut Vec<u8>,
    tx: &Tx,
    slot: &Slot,
    wanted: &mut Vec<Wanted>,
) -> Result<(), Fail> {
    let loc = match slot {
        Slot::Deleted => return Ok(()),
        Slot::Inline(bytes) => {
            out.extend_from_slice(bytes);
            return Ok(());
        }
        Slot::At(loc) => *loc,
        Slot::Own { at, len } => {
            if let Some(bytes) = tx.bytes(*at, *len) {
                out.extend_from_slice(bytes);
                return Ok(());
            }
            let loc = tx.resolve(*at, *len);
            loc.ok_or_else(|| fail!(STORAGE, "a value of the transaction cannot be found"))?
        }
    };
    wanted.push((out.len(), loc));
    out.resize(out.len() + loc.len as usize, 0);
    Ok(())
}

/// Reads what is wanted into the reply, what is close together at once.
pub fn read_all(
    host: &mut dyn Host,
    log: &mut Log,
    out: &mut [u8],
    wanted: &[Wanted],
) -> Result<(), Fail> {
    let mut scratch = Vec::new();
    let mut rest = wanted;
    while let Some((&(_, first), _)) = rest.split_first() {
        let mut end = first.offset + first.len;
        let near = |(_, loc): &&Wanted| {
            let new_end = loc.offset.saturating_add(loc.len);
            let fits = loc.segment == first.segment
                && loc.offset >= end
                && loc.offset - end <= GAP_BYTES
                && new_end - first.offset <= TOGETHER_BYTES;
            if fits {
                end = new_end;
            }
            fits
        };
        let together = 1 + rest[1..].iter().take_while(near).count();
        let len = (end - first.offset) as usize + CHECK_BYTES;
        scratch.resize(len, 0);
        let read = log.books.read(host, first, &mut scratch);
        read.map_err(|errno| unreadable(first, errno))?;
        for (at, loc) in &rest[..together] {
            let from = (loc.offset - first.offset) as usize;
            let value = scratch.get(from..from + loc.len as usize + CHECK_BYTES).unwrap_or(&[]);
            let into = out.get_mut(*at..*at + loc.len as usize).unwrap_or(&mut []);
            if !proven(value) || into.len() + CHECK_BYTES != value.len() {
                return Err(unreadable(*loc, sdk::Errno::BADMSG));
            }
            into.copy_from_slice(&value[..into.len()]);
        }
        rest = &rest[together..];
    }
    Ok(())
}

/// The bytes of an entry's value: a primary key.
pub fn bytes_of(host: &mut dyn Host, log: &mut Log, tx: &Tx, slot: &Slot) -> Result<Vec<u8>, Fail> {
    let (mut bytes, mut wanted) = (Vec::new(), Vec::new());
    put_value(&mut bytes, tx, slot, &mut wanted)?;
    read_all(host, log, &mut bytes, &wanted)?;
    Ok(bytes)
}

/// What an entry's value is for a scan: with FETCH the row, whose key goes to `primary`.
#[expect(clippy::too_many_arguments, reason = "parts of the store, borrowed one by one")]
pub fn resolve<'a>(
    host: &mut dyn Host,
    catalog: &'a Catalog,
    log: &mut Log,
    tx: &'a Tx,
    op: &OpRef<'_>,
    slot: &'a Slot,
    snapshot: u64,
    primary: &mut Vec<u8>,
) -> Result<Option<&'a Slot>, Fail> {
    if !wants_fetch(op) {
        return Ok(Some(slot));
    }
    match slot {
        Slot::Inline(bytes) => primary.extend_from_slice(bytes),
        slot => *primary = bytes_of(host, log, tx, slot)?,
    }
    Ok(seen(catalog, tx, (op.table, 0), primary, snapshot))
}

/// Whether there is more than a scan has answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum More {
    /// No.
    No = 0,
    /// Yes, or there may be: a limit of the answer was reached.
    Yes = 1,
    /// There may be: so many were looked at as the filter allows.
    Examined = 2,
}

/// What a scan may still put into its answer.
pub struct Room {
    rows: u32,
    bytes: u64,
    reply: usize,
}

impl Room {
    /// What its limits and the reply leave.
    pub fn new(op: &OpRef<'_>, cursor: &Cursor, used: usize) -> Self {
        let limit = |part: u64| if part == 0 { u64::from(u32::MAX) } else { part };
        let rows = limit(op.extra & u64::from(u32::MAX)) as u32;
        Self {
            rows: rows.saturating_sub(cursor.rows),
            bytes: limit(op.extra >> 32).saturating_sub(cursor.bytes),
            reply: MAX_REPLY_BYTES.saturating_sub(used),
        }
    }

    /// Whether a row fits; the first one of an answer does if the reply has room at all.
    pub fn take(&mut self, first: bool, bytes: usize) -> Result<bool, Fail> {
        let fits = bytes + ROW_BYTES <= self.reply;
        if first && !fits {
            return Err(fail!(LIMIT, "reply: {bytes} bytes more than its limit of 16 MiB allows"));
        }
        if !first && (!fits || self.rows == 0 || bytes as u64 > self.bytes) {
            return Ok(false);
        }
        self.rows = self.rows.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes as u64);
        self.reply -= bytes + ROW_BYTES;
        Ok(true)
    }
}

/// What became of a key of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It is in the answer, or there is nothing to put there.
    Next,
    /// A lock has to be waited for.
    Wait,
    /// It does not fit into the answer any more.
    Full,
    /// The call's steps are used up; it was passed over.
    Later,
    /// The filter allows no look at it.
    Examined,
    /// There is no other.
    End,
}

/// A row that was found.
pub struct Found<'a> {
    /// Its key in the index.
    pub key: &'a [u8],
    /// Its key in the primary one, if it was fetched.
    pub primary: &'a [u8],
    /// Its value, if it is wanted.
    pub value: Option<&'a Slot>,
}

impl Found<'_> {
    fn bytes(&self) -> usize {
        self.key.len() + self.primary.len() + self.value.map_or(0, Slot::len)
    }

    /// Appends it, with room for a value that is to be read.
    pub fn put(&self, out: &mut Vec<u8>, tx: &Tx, wanted: &mut Vec<Wanted>) -> Result<(), Fail> {
        wire::put_row(out, self.key.len(), self.primary.len(), self.value.map_or(0, Slot::len));
        out.extend_from_slice(self.key);
        out.extend_from_slice(self.primary);
        self.value.map_or(Ok(()), |slot| put_value(out, tx, slot, wanted))
    }
}

/// A bound of a range of a map.
pub fn borrow(bound: &Bound<Vec<u8>>) -> Bound<&[u8]> {
    bound.as_ref().map(|key| &**key)
}

/// Goes on behind a key.
pub fn after(cursor: &mut Cursor, op: &OpRef<'_>, key: &[u8]) {
    if op.has(op_flag::BACKWARD) {
        cursor.range.1 = Bound::Excluded(key.to_vec());
    } else {
        cursor.range.0 = Bound::Excluded(key.to_vec());
    }
}

fn wants_fetch(op: &OpRef<'_>) -> bool {
    op.has(op_flag::FETCH) && op.index != 0
}

impl Store {
    pub(crate) fn cursor(act: &mut Act<'_>, op: &OpRef<'_>) -> Cursor {
        act.run.cursor.take().unwrap_or_else(|| Cursor {
            range: wire::bounds(op),
            answer_at: wire::begin_answer(&mut act.run.out),
            rows: 0,
            bytes: 0,
            examined: 0,
        })
    }

    /// Ends its answer.
    pub(crate) fn end_scan(act: &mut Act<'_>, op: &OpRef<'_>, cursor: &Cursor, more: More) -> Next {
        let run = &mut *act.run;
        let (low, high) = &cursor.range;
        let last = if op.has(op_flag::BACKWARD) { high } else { low };
        if more == More::Examined
            && let Bound::Excluded(key) = last
        {
            run.out.extend_from_slice(key);
        }
        wire::end_answer(&mut run.out, cursor.answer_at, run.op, cursor.rows, more as u32);
        run.answers += 1;
        Next::Op
    }

    /// A scan that failed leaves no answer.
    pub(crate) fn drop_answer<T>(
        act: &mut Act<'_>,
        cursor: &Cursor,
        result: Result<T, Fail>,
    ) -> Result<T, Fail> {
        if result.is_err() {
            act.run.out.truncate(cursor.answer_at);
        }
        result
    }

    /// GET.
    pub(crate) fn get(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
    ) -> Result<Next, Fail> {
        self.catalog.index(op.table, op.index)?;
        let snapshot = if op.locks() {
            if !self.lock_read(host, act, op, op.index, op.key)? {
                return Ok(Next::Wait);
            }
            self.visible
        } else {
            self.snapshot(act.tx)
        };
        let mut cursor = Self::cursor(act, op);
        let result = self.get_row(host, act, op, snapshot, &mut cursor);
        if Self::drop_answer(act, &cursor, result)? == Step::Wait {
            act.run.out.truncate(cursor.answer_at);
            return Ok(Next::Wait);
        }
        Ok(Self::end_scan(act, op, &cursor, More::No))
    }

    fn get_row(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
        snapshot: u64,
        cursor: &mut Cursor,
    ) -> Result<Step, Fail> {
        let place = (op.table, op.index);
        let Some(slot) = seen(&self.catalog, act.tx, place, op.key, snapshot) else {
            return Ok(Step::Next);
        };
        let slot = slot.clone();
        self.put_locked(host, act, op, (op.key, &slot), snapshot, cursor)
    }

    /// Puts an entry that was found, and locked if it is to be, into the answer: with its row, if it is
    /// to be fetched, which is locked then, too.
    pub(crate) fn put_locked(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
        (key, slot): (&[u8], &Slot),
        snapshot: u64,
        cursor: &mut Cursor,
    ) -> Result<Step, Fail> {
        let (mut primary, mut value) = (Vec::new(), Some(slot));
        if wants_fetch(op) {
            primary = bytes_of(host, &mut self.log, act.tx, slot)?;
            if op.locks() && !self.lock_read(host, act, op, 0, &primary)? {
                return Ok(Step::Wait);
            }
            value = seen(&self.catalog, act.tx, (op.table, 0), &primary, snapshot);
        }
        let Some(value) = value else { return Ok(Step::Next) };
        let found = Found { key, primary: &primary, value: (!op.has(KEYS_ONLY)).then_some(value) };
        let bytes = found.bytes();
        if !Room::new(op, cursor, act.run.out.len()).take(cursor.rows == 0, bytes)? {
            return Ok(Step::Full);
        }
        let mut wanted = Vec::new();
        found.put(&mut act.run.out, act.tx, &mut wanted)?;
        read_all(host, &mut self.log, &mut act.run.out, &wanted)?;
        cursor.rows += 1;
        cursor.bytes += bytes as u64;
        self.steps = self.steps.saturating_sub(bytes as u64 / 4096);
        Ok(Step::Next)
    }

    /// Locks a key that is read; false: it waits.
    pub(crate) fn lock_read(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
        index: u8,
        key: &[u8],
    ) -> Result<bool, Fail> {
        let exclusive = op.has(op_flag::EXCLUSIVE);
        let (intend, want) = match exclusive {
            true => (mode::INTEND_EXCLUSIVE, mode::EXCLUSIVE),
            false => (mode::INTEND_SHARED, mode::SHARED),
        };
        Ok(self.lock_table(host, act, op, intend)?
            && self.lock_key(host, act, op, (index, key), want)?)
    }

    /// SCAN of a snapshot.
    pub(crate) fn scan(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
    ) -> Result<Next, Fail> {
        self.catalog.index(op.table, op.index)?;
        let snapshot = self.snapshot(act.tx);
        let mut cursor = Self::cursor(act, op);
        let read = if let Some(filter) = Filter::of(op) {
            self.gather_matches(host, act, op, &filter, snapshot, &mut cursor)
        } else {
            let mut wanted = Vec::new();
            let gathered = self.gather(host, act, op, snapshot, &mut cursor, &mut wanted);
            gathered.and_then(|more| {
                read_all(host, &mut self.log, &mut act.run.out, &wanted)?;
                Ok(more)
            })
        };
        match Self::drop_answer(act, &cursor, read)? {
            Some(more) => Ok(Self::end_scan(act, op, &cursor, more)),
            None => {
                act.run.cursor = Some(cursor);
                Ok(Next::Later)
            }
        }
    }

    /// Puts rows into the answer, with room for the values that are to be read. Whether there are more
    /// than the limits allow; none: the steps are used up.
    fn gather(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
        snapshot: u64,
        cursor: &mut Cursor,
        wanted: &mut Vec<Wanted>,
    ) -> Result<Option<More>, Fail> {
        if wire::is_empty(&cursor.range) {
            return Ok(Some(More::No));
        }
        let Self { catalog, log, steps, .. } = self;
        let (tx, out) = (&*act.tx, &mut act.run.out);
        let (place, keys_only) = ((op.table, op.index), op.has(KEYS_ONLY));
        let mut room = Room::new(op, cursor, out.len());
        let range = (borrow(&cursor.range.0), borrow(&cursor.range.1));
        let index = catalog.index(op.table, op.index)?;
        let own = tx.writes.get(&place);
        let mut merge = Merge::new(index, own, range, op.has(op_flag::BACKWARD), snapshot);
        loop {
            let Some((key, slot)) = merge.step() else { return Ok(Some(More::No)) };
            *steps = steps.saturating_sub(1);
            if let Some(slot) = slot {
                let (mut value, mut primary, bytes): (_, &[u8], Vec<u8>);
                (value, primary) = (Some(slot), &[]);
                if wants_fetch(op) {
                    primary = match slot {
                        Slot::Inline(bytes) => bytes,
                        slot => {
                            bytes = bytes_of(host, log, tx, slot)?;
                            &bytes
                        }
                    };
                    value = seen(catalog, tx, (op.table, 0), primary, snapshot);
                }
                if let Some(slot) = value {
                    let value = (!keys_only).then_some(slot);
                    let found = Found { key, primary, value };
                    let bytes = found.bytes();
                    if !room.take(cursor.rows == 0, bytes)? {
                        return Ok(Some(More::Yes));
                    }
                    found.put(out, tx, wanted)?;
                    cursor.rows += 1;
                    cursor.bytes += bytes as u64;
                    *steps = steps.saturating_sub(1 + bytes as u64 / 4096);
                }
            }
            if *steps == 0 {
                let key = key.to_vec();
                after(cursor, op, &key);
                return Ok(None);
            }
        }
    }
}
