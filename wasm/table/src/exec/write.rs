//! Ops that write entries.

use guest_abi::table::{op, op_flag};

use crate::database::Database;
use crate::exec::context::{Execution, OpProgress};
use crate::fail::{Fail, fail};
use crate::lock::mode;
use crate::log::Place;
use crate::map::{ENTRY_BYTES, IndexId};
use crate::memory::SPARE_BYTES;
use crate::op::OpRef;
use crate::record::{HEAD_BYTES, kind};
use crate::reserve::Purpose;
use crate::tx::Tx;

/// Executes INSERT, PUT, UPDATE, or DELETE.
pub fn write(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<OpProgress, Fail> {
    exec.db.log.check_writable()?;
    if op.kind != op::DELETE {
        exec.db.log.reserve.check(Purpose::Change)?;
    }
    exec.db.catalog.index(op.table, op.index)?;
    let more = (op.key.len() + op.value.len()) as u64 + ENTRY_BYTES;
    let spare = if op.kind == op::DELETE { 0 } else { SPARE_BYTES };
    exec.db.check_memory(more + spare)?;
    if !exec.lock_table(op, mode::INTEND_EXCLUSIVE)? {
        return Ok(OpProgress::Wait);
    }
    let locked = !op.has(op_flag::NO_LOCK);
    if locked && !exec.lock_key(op, (op.index, op.key), mode::EXCLUSIVE)? {
        return Ok(OpProgress::Wait);
    }
    let (i, index) = (exec.request.op, (op.table, op.index));
    match (op.kind, is_there(exec.db, exec.tx, index, op.key)) {
        (op::INSERT, true) => {
            return Err(fail!(EXISTS, "op {i}: table {}, index {}", op.table, op.index));
        }
        (op::UPDATE | op::DELETE, false) => {
            return Err(fail!(NOT_FOUND, "op {i}: table {}, index {}", op.table, op.index));
        }
        _ => {}
    }
    let more = op.key.len() + op.value.len() + HEAD_BYTES;
    if !exec.tx.ops.is_empty() && exec.tx.ops.len() + more > exec.db.config.spill_bytes {
        spill(exec)?;
    }
    let value = (op.kind != op::DELETE).then_some(op.value);
    exec.tx.put(index, op.key, value, locked, &mut exec.db.log.usage);
    exec.db.spend(op.value.len() as u64 / 2048);
    Ok(OpProgress::Done)
}

fn is_there(db: &Database, tx: &Tx, index: IndexId, key: &[u8]) -> bool {
    if let Some(write) = tx.write_of(index, key) {
        return write.slot.is_there();
    }
    let entries = db.catalog.index(index.0, index.1);
    let chain = entries.ok().and_then(|entries| entries.map.get(key));
    chain.is_some_and(|chain| chain.at(db.versions.visible).is_some())
}

/// Puts the transaction's ops into the log before its commit.
fn spill(exec: &mut Execution<'_>) -> Result<(), Fail> {
    let Execution { host, db, tx, .. } = exec;
    db.append_staged(*host);
    let id = tx.id;
    let place = db.log.write(*host, kind::SPILL, tx.purpose(), |out| {
        out.extend_from_slice(&id.to_le_bytes());
        out.extend_from_slice(&tx.ops);
    })?;
    tx.begun.get_or_insert(place_of_record(place));
    let ops = Place { offset: place.offset + 8, ..place };
    tx.move_ops_to_log(ops, &mut db.log.usage);
    Ok(())
}

/// Place at which a record begins whose body is at a place.
fn place_of_record(body: Place) -> Place {
    Place { offset: body.offset.saturating_sub(HEAD_BYTES as u32), ..body }
}
