//! Execution of ops: which function does which op.

mod admin;
mod context;
mod read;
mod rows;
mod scan;
mod scan_filter;
mod scan_locking;
mod write;

use guest_abi::table::op;

use crate::fail::{Fail, fail};
use crate::op::OpRef;

pub use context::{Execution, OpProgress};

/// Executes an op, or a part of it. Not those that end a transaction.
pub fn execute(exec: &mut Execution<'_>, op: &OpRef<'_>) -> Result<OpProgress, Fail> {
    match op.kind {
        op::INSERT | op::PUT | op::UPDATE | op::DELETE => write::write(exec, op),
        op::GET => read::get(exec, op),
        op::SCAN if op.locks() => scan_locking::scan_locking(exec, op),
        op::SCAN => scan::scan(exec, op),
        op::ESTIMATE => admin::estimate(exec, op),
        op::LOCK => exec.lock_whole_table(op),
        op::SAVEPOINT => {
            exec.db.check_memory(64)?;
            exec.tx.save(op.extra, &mut exec.db.steps, &mut exec.db.log.usage);
            Ok(OpProgress::Done)
        }
        op::RELEASE => {
            let (steps, usage) = (&mut exec.db.steps, &mut exec.db.log.usage);
            let released = exec.tx.release(op.extra, steps, usage);
            let fail = || fail!(BAD_REQUEST, "there is no savepoint {}", op.extra);
            released.then_some(OpProgress::Done).ok_or_else(fail)
        }
        op::ROLLBACK_TO => match exec.tx.roll_back_to(op.extra, &mut exec.db.steps) {
            None => Err(fail!(BAD_REQUEST, "there is no savepoint {}", op.extra)),
            Some(true) => Ok(OpProgress::Done),
            Some(false) => Ok(OpProgress::Later),
        },
        _ => admin::execute(exec, op),
    }
}
