//! SCAN that locks: one key after the other, as each is when its lock is there.

use alloc::vec::Vec;

use guest_abi::table::{op_flag, status};

use crate::clients::Cursor;
use crate::database::Database;
use crate::exec::context::{Execution, OpProgress};
use crate::exec::read::{KeyStep, put_locked};
use crate::exec::rows::{
    ScanRest, begin_scan, borrow, drop_answer_if_failed, end_scan, move_behind,
};
use crate::exec::scan_filter::is_match;
use crate::fail::Fail;
use crate::filter::Filter;
use crate::map::Merge;
use crate::op::OpRef;
use crate::slot::Slot;
use crate::wire;

/// Key that a scan may want. Without a value: the call's steps are used up.
type Candidate = (Vec<u8>, Option<Slot>);

/// Executes a SCAN with SHARED or EXCLUSIVE.
pub fn scan_locking(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<OpProgress, Fail> {
    exec.db.catalog.index(op.table, op.index)?;
    let mut cursor = begin_scan(exec, op);
    loop {
        let step = lock_next(exec, op, &mut cursor);
        let next = match drop_answer_if_failed(exec, &cursor, step)? {
            KeyStep::End => return Ok(end_scan(exec, op, &cursor, ScanRest::None)),
            KeyStep::Full => return Ok(end_scan(exec, op, &cursor, ScanRest::More)),
            KeyStep::Examined => return Ok(end_scan(exec, op, &cursor, ScanRest::Examined)),
            KeyStep::Next if exec.db.steps > 0 => continue,
            KeyStep::Next | KeyStep::Later => OpProgress::Later,
            KeyStep::Wait => OpProgress::Wait,
        };
        exec.request.cursor = Some(cursor);
        return Ok(next);
    }
}

fn lock_next(
    exec: &mut Execution<'_>,
    op: &OpRef<'_>,
    cursor: &mut Cursor,
) -> Result<KeyStep, Fail> {
    let Some((key, slot)) = find_next(exec, op, cursor)? else { return Ok(KeyStep::End) };
    let Some(slot) = slot else {
        move_behind(cursor, op, &key);
        return Ok(KeyStep::Later);
    };
    // What is not in the answer is not locked for it.
    let rows = op.extra as u32;
    if rows != 0 && cursor.rows >= rows {
        return Ok(KeyStep::Full);
    }
    if let Some(filter) = Filter::of(op) {
        if cursor.examined >= filter.examine {
            return Ok(KeyStep::Examined);
        }
        // What it says of the value is right until the call ends, so also once the lock is there.
        if !is_match(exec, op, &filter, (&key, &slot))? {
            cursor.examined += 1;
            move_behind(cursor, op, &key);
            return Ok(KeyStep::Next);
        }
    }
    let mut op = *op;
    if op.has(op_flag::SKIP_LOCKED) {
        op.flags |= op_flag::NO_WAIT;
    }
    let step = match exec.lock_read(&op, op.index, &key) {
        Ok(true) => put_locked(exec, &op, (&key, &slot), exec.db.versions.visible, cursor),
        Ok(false) => Ok(KeyStep::Wait),
        Err(fail) => Err(fail),
    };
    let step = match step {
        Err(fail) if op.has(op_flag::SKIP_LOCKED) && fail.status == status::TIMEOUT => {
            KeyStep::Next
        }
        step => step?,
    };
    if step == KeyStep::Next {
        cursor.examined = cursor.examined.saturating_add(1);
        move_behind(cursor, &op, &key);
    }
    Ok(step)
}

/// Finds the next key that has a value, as it was committed last.
fn find_next(
    exec: &mut Execution<'_>,
    op: &OpRef<'_>,
    cursor: &Cursor,
) -> Result<Option<Candidate>, Fail> {
    if wire::is_empty(&cursor.range) {
        return Ok(None);
    }
    let Database { catalog, versions, steps, .. } = &mut *exec.db;
    let index = catalog.index(op.table, op.index)?;
    let own = exec.tx.writes.get(&(op.table, op.index));
    let range = (borrow(&cursor.range.0), borrow(&cursor.range.1));
    let mut merge = Merge::new(index, own, range, op.has(op_flag::BACKWARD), versions.visible);
    while let Some((key, slot)) = merge.step() {
        *steps = steps.saturating_sub(1);
        if slot.is_some() || *steps == 0 {
            return Ok(Some((key.to_vec(), slot.cloned())));
        }
    }
    Ok(None)
}
