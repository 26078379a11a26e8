//! Rows in answers: values found, read from the log, and put into the reply.

use alloc::vec::Vec;
use core::ops::Bound;

use guest_abi::table::op_flag;
use sdk::Host;

use crate::catalog::Catalog;
use crate::clients::Cursor;
use crate::exec::context::{Execution, OpProgress};
use crate::fail::{Fail, fail};
use crate::log::{Log, is_intact, unreadable};
use crate::map::IndexId;
use crate::op::OpRef;
use crate::record_body::CHECK_BYTES;
use crate::slot::{Loc, Slot};
use crate::tx::Tx;
use crate::wire::{self, MAX_REPLY_BYTES, ROW_BYTES};

/// Limit of bytes between two values that are read together.
const GAP_BYTES: u32 = 1024;
/// Limit of bytes that are read together.
const TOGETHER_BYTES: u32 = 256 << 10;

/// Value that is to be read: its offset in the reply, and its place in the log.
pub type UnreadValue = (usize, Loc);

/// Value of a key as a transaction sees it.
pub fn seen<'a>(
    catalog: &'a Catalog,
    tx: &'a Tx,
    index: IndexId,
    key: &[u8],
    snapshot: u64,
) -> Option<&'a Slot> {
    if let Some(write) = tx.write_of(index, key) {
        return Some(&write.slot).filter(|slot| slot.is_there());
    }
    catalog.index(index.0, index.1).ok()?.map.get(key)?.at(snapshot)
}

/// Appends a value, or room for one that is to be read.
fn put_value(
    out: &mut Vec<u8>,
    tx: &Tx,
    slot: &Slot,
    unread: &mut Vec<UnreadValue>,
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
    unread.push((out.len(), loc));
    out.resize(out.len() + loc.len as usize, 0);
    Ok(())
}

/// Reads values into the reply, those that are close together at once.
pub fn read_values(
    host: &mut dyn Host,
    log: &mut Log,
    out: &mut [u8],
    unread: &[UnreadValue],
) -> Result<(), Fail> {
    let mut scratch = Vec::new();
    let mut rest = unread;
    while let Some((&(_, first), _)) = rest.split_first() {
        let mut end = first.offset + first.len;
        let near = |(_, loc): &&UnreadValue| {
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
        let read = log.usage.read(host, first, &mut scratch);
        read.map_err(|errno| unreadable(first, errno))?;
        for (at, loc) in &rest[..together] {
            let from = (loc.offset - first.offset) as usize;
            let value = scratch.get(from..from + loc.len as usize + CHECK_BYTES).unwrap_or(&[]);
            let into = out.get_mut(*at..*at + loc.len as usize).unwrap_or(&mut []);
            if !is_intact(value) || into.len() + CHECK_BYTES != value.len() {
                return Err(unreadable(*loc, sdk::Errno::BADMSG));
            }
            into.copy_from_slice(&value[..into.len()]);
        }
        rest = &rest[together..];
    }
    Ok(())
}

/// Bytes of an entry's value: a primary key, say.
pub fn bytes_of(host: &mut dyn Host, log: &mut Log, tx: &Tx, slot: &Slot) -> Result<Vec<u8>, Fail> {
    let (mut bytes, mut unread) = (Vec::new(), Vec::new());
    put_value(&mut bytes, tx, slot, &mut unread)?;
    read_values(host, log, &mut bytes, &unread)?;
    Ok(bytes)
}

/// Value of an entry for a scan: with FETCH that of its row, whose key goes to `primary`.
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

/// Rest of a scan, behind its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScanRest {
    /// No more rows.
    None = 0,
    /// Perhaps more rows: a limit of the answer was reached.
    More = 1,
    /// Perhaps more rows: as many entries were looked at as the filter allows.
    Examined = 2,
}

/// Room that is left in the answer of a scan.
pub struct AnswerRoom {
    rows: u32,
    bytes: u64,
    reply: usize,
}

impl AnswerRoom {
    /// Room that the op's limits and the reply leave.
    pub fn new(op: &OpRef<'_>, cursor: &Cursor, used: usize) -> Self {
        let limit = |part: u64| if part == 0 { u64::from(u32::MAX) } else { part };
        let rows = limit(op.extra & u64::from(u32::MAX)) as u32;
        Self {
            rows: rows.saturating_sub(cursor.rows),
            bytes: limit(op.extra >> 32).saturating_sub(cursor.bytes),
            reply: MAX_REPLY_BYTES.saturating_sub(used),
        }
    }

    /// Takes room for a row. False: it does not fit. The first row of an answer fits if the reply
    /// has room at all.
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

/// Row that was found.
pub struct FoundRow<'a> {
    /// Key in the index.
    pub key: &'a [u8],
    /// Key in the primary index, if the row was fetched.
    pub primary: &'a [u8],
    /// Value, if it is wanted.
    pub value: Option<&'a Slot>,
}

impl FoundRow<'_> {
    /// Bytes of its keys and value.
    pub fn bytes(&self) -> usize {
        self.key.len() + self.primary.len() + self.value.map_or(0, Slot::len)
    }

    /// Appends it, with room for a value that is to be read.
    pub fn put(
        &self,
        out: &mut Vec<u8>,
        tx: &Tx,
        unread: &mut Vec<UnreadValue>,
    ) -> Result<(), Fail> {
        wire::put_row(out, self.key.len(), self.primary.len(), self.value.map_or(0, Slot::len));
        out.extend_from_slice(self.key);
        out.extend_from_slice(self.primary);
        self.value.map_or(Ok(()), |slot| put_value(out, tx, slot, unread))
    }
}

/// Borrows a bound, as maps want it.
pub fn borrow(bound: &Bound<Vec<u8>>) -> Bound<&[u8]> {
    bound.as_ref().map(|key| &**key)
}

/// Moves a scan behind a key.
pub fn move_behind(cursor: &mut Cursor, op: &OpRef<'_>, key: &[u8]) {
    if op.has(op_flag::BACKWARD) {
        cursor.range.1 = Bound::Excluded(key.to_vec());
    } else {
        cursor.range.0 = Bound::Excluded(key.to_vec());
    }
}

/// Whether an op wants rows with the entries of a secondary index.
pub fn wants_fetch(op: &OpRef<'_>) -> bool {
    op.has(op_flag::FETCH) && op.index != 0
}

/// Takes the position of a scan that goes on, or begins it with its answer.
pub fn begin_scan(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Cursor {
    exec.request.cursor.take().unwrap_or_else(|| Cursor {
        range: wire::bounds(op),
        answer_at: wire::begin_answer(&mut exec.request.out),
        rows: 0,
        bytes: 0,
        examined: 0,
    })
}

/// Ends the answer of a scan.
pub fn end_scan(
    exec: &mut Execution<'_>,
    op: &OpRef<'_>,
    cursor: &Cursor,
    rest: ScanRest,
) -> OpProgress {
    let request = &mut *exec.request;
    let (low, high) = &cursor.range;
    let last = if op.has(op_flag::BACKWARD) { high } else { low };
    if rest == ScanRest::Examined
        && let Bound::Excluded(key) = last
    {
        request.out.extend_from_slice(key);
    }
    wire::end_answer(&mut request.out, cursor.answer_at, request.op, cursor.rows, rest as u32);
    request.answers += 1;
    OpProgress::Done
}

/// Takes the answer of a scan back if it failed.
pub fn drop_answer_if_failed<T>(
    exec: &mut Execution<'_>,
    cursor: &Cursor,
    result: Result<T, Fail>,
) -> Result<T, Fail> {
    if result.is_err() {
        exec.request.out.truncate(cursor.answer_at);
    }
    result
}
