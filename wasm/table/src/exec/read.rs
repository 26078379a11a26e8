//! GET, and the entry that GET and locking scans put into an answer.

use alloc::vec::Vec;

use guest_abi::table::op_flag::KEYS_ONLY;

use crate::clients::Cursor;
use crate::exec::context::{Execution, OpProgress};
use crate::exec::rows::{
    AnswerRoom, FoundRow, ScanRest, begin_scan, bytes_of, drop_answer_if_failed, end_scan,
    read_values, seen, wants_fetch,
};
use crate::fail::Fail;
use crate::op::OpRef;
use crate::slot::Slot;

/// Result for one key of a get or a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyStep {
    /// The key is in the answer, or there is nothing to put there.
    Next,
    /// A lock has to be waited for.
    Wait,
    /// The row does not fit into the answer any more.
    Full,
    /// The call's steps are used up; the key was passed over.
    Later,
    /// The filter allows no look at the key.
    Examined,
    /// No other key is in the range.
    End,
}

/// GET.
pub fn get(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<OpProgress, Fail> {
    exec.db.catalog.index(op.table, op.index)?;
    let snapshot = if op.locks() {
        if !exec.lock_read(op, op.index, op.key)? {
            return Ok(OpProgress::Wait);
        }
        exec.db.versions.visible
    } else {
        exec.db.versions.snapshot(exec.tx)
    };
    let mut cursor = begin_scan(exec, op);
    let result = get_row(exec, op, snapshot, &mut cursor);
    if drop_answer_if_failed(exec, &cursor, result)? == KeyStep::Wait {
        exec.request.out.truncate(cursor.answer_at);
        return Ok(OpProgress::Wait);
    }
    Ok(end_scan(exec, op, &cursor, ScanRest::None))
}

fn get_row(
    exec: &mut Execution<'_>,
    op: &OpRef<'_>,
    snapshot: u64,
    cursor: &mut Cursor,
) -> Result<KeyStep, Fail> {
    let index = (op.table, op.index);
    let Some(slot) = seen(&exec.db.catalog, exec.tx, index, op.key, snapshot) else {
        return Ok(KeyStep::Next);
    };
    let slot = slot.clone();
    put_locked(exec, op, (op.key, &slot), snapshot, cursor)
}

/// Puts an entry that was found, and locked if it is to be, into the answer: with its row, if it is
/// to be fetched, which is locked then, too.
pub fn put_locked(
    exec: &mut Execution<'_>,
    op: &OpRef<'_>,
    (key, slot): (&[u8], &Slot),
    snapshot: u64,
    cursor: &mut Cursor,
) -> Result<KeyStep, Fail> {
    let (mut primary, mut value) = (Vec::new(), Some(slot));
    if wants_fetch(op) {
        primary = bytes_of(exec.host, &mut exec.db.log, exec.tx, slot)?;
        if op.locks() && !exec.lock_read(op, 0, &primary)? {
            return Ok(KeyStep::Wait);
        }
        value = seen(&exec.db.catalog, exec.tx, (op.table, 0), &primary, snapshot);
    }
    let Some(value) = value else { return Ok(KeyStep::Next) };
    let found = FoundRow { key, primary: &primary, value: (!op.has(KEYS_ONLY)).then_some(value) };
    let bytes = found.bytes();
    if !AnswerRoom::new(op, cursor, exec.request.out.len()).take(cursor.rows == 0, bytes)? {
        return Ok(KeyStep::Full);
    }
    let mut unread = Vec::new();
    found.put(&mut exec.request.out, exec.tx, &mut unread)?;
    read_values(exec.host, &mut exec.db.log, &mut exec.request.out, &unread)?;
    cursor.rows += 1;
    cursor.bytes += bytes as u64;
    exec.db.spend(bytes as u64 / 4096);
    Ok(KeyStep::Next)
}
