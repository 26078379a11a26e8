//! SCAN of a snapshot.

use alloc::vec::Vec;

use guest_abi::table::{op_flag, op_flag::KEYS_ONLY};

use crate::clients::Cursor;
use crate::database::Database;
use crate::exec::context::{Execution, OpProgress};
use crate::exec::rows::{
    AnswerRoom, FoundRow, ScanRest, UnreadValue, begin_scan, borrow, bytes_of,
    drop_answer_if_failed, end_scan, move_behind, read_values, seen, wants_fetch,
};
use crate::exec::scan_filter::gather_matches;
use crate::fail::Fail;
use crate::filter::Filter;
use crate::map::Merge;
use crate::op::OpRef;
use crate::slot::Slot;
use crate::wire;

/// SCAN of a snapshot.
pub fn scan(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<OpProgress, Fail> {
    exec.db.catalog.index(op.table, op.index)?;
    let snapshot = exec.db.versions.snapshot(exec.tx);
    let mut cursor = begin_scan(exec, op);
    let read = if let Some(filter) = Filter::of(op) {
        gather_matches(exec, op, &filter, snapshot, &mut cursor)
    } else {
        let mut unread = Vec::new();
        let gathered = gather(exec, op, snapshot, &mut cursor, &mut unread);
        gathered.and_then(|more| {
            read_values(exec.host, &mut exec.db.log, &mut exec.request.out, &unread)?;
            Ok(more)
        })
    };
    match drop_answer_if_failed(exec, &cursor, read)? {
        Some(more) => Ok(end_scan(exec, op, &cursor, more)),
        None => {
            exec.request.cursor = Some(cursor);
            Ok(OpProgress::Later)
        }
    }
}

/// Puts rows into the answer, with room for the values that are to be read. None: the call's steps
/// are used up, and it goes on later.
fn gather(
    exec: &mut Execution<'_>,
    op: &OpRef<'_>,
    snapshot: u64,
    cursor: &mut Cursor,
    unread: &mut Vec<UnreadValue>,
) -> Result<Option<ScanRest>, Fail> {
    if wire::is_empty(&cursor.range) {
        return Ok(Some(ScanRest::None));
    }
    let Execution { host, db, request, tx } = exec;
    let Database { catalog, log, steps, .. } = &mut **db;
    let (tx, out) = (&**tx, &mut request.out);
    let (index_id, keys_only) = ((op.table, op.index), op.has(KEYS_ONLY));
    let mut room = AnswerRoom::new(op, cursor, out.len());
    let range = (borrow(&cursor.range.0), borrow(&cursor.range.1));
    let index = catalog.index(op.table, op.index)?;
    let own = tx.writes.get(&index_id);
    let mut merge = Merge::new(index, own, range, op.has(op_flag::BACKWARD), snapshot);
    loop {
        let Some((key, slot)) = merge.step() else { return Ok(Some(ScanRest::None)) };
        *steps = steps.saturating_sub(1);
        if let Some(slot) = slot {
            let (mut value, mut primary, bytes): (_, &[u8], Vec<u8>);
            (value, primary) = (Some(slot), &[]);
            if wants_fetch(op) {
                primary = match slot {
                    Slot::Inline(bytes) => bytes,
                    slot => {
                        bytes = bytes_of(&mut **host, log, tx, slot)?;
                        &bytes
                    }
                };
                value = seen(catalog, tx, (op.table, 0), primary, snapshot);
            }
            if let Some(slot) = value {
                let value = (!keys_only).then_some(slot);
                let found = FoundRow { key, primary, value };
                let bytes = found.bytes();
                if !room.take(cursor.rows == 0, bytes)? {
                    return Ok(Some(ScanRest::More));
                }
                found.put(out, tx, unread)?;
                cursor.rows += 1;
                cursor.bytes += bytes as u64;
                *steps = steps.saturating_sub(1 + bytes as u64 / 4096);
            }
        }
        if *steps == 0 {
            let key = key.to_vec();
            move_behind(cursor, op, &key);
            return Ok(None);
        }
    }
}
