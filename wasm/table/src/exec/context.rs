//! Context of an op that is executed, and how it locks keys and tables.

use guest_abi::table::{batch_flag, op_flag};
use sdk::Host;

use crate::clients::ActiveRequest;
use crate::database::Database;
use crate::fail::{Fail, fail};
use crate::lock::{Asked, Resource, mode};
use crate::memory::LOCK_BYTES;
use crate::op::OpRef;
use crate::tx::Tx;

/// Progress of an op, or of a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpProgress {
    /// Done: the next op follows.
    Done,
    /// Executed again, once a lock is there.
    Wait,
    /// Continued in another call.
    Later,
}

/// State that an op works on.
pub struct Execution<'a> {
    /// Host.
    pub host: &'a mut dyn Host,
    /// Database.
    pub db: &'a mut Database,
    /// Request with the op.
    pub request: &'a mut ActiveRequest,
    /// Transaction of the request.
    pub tx: &'a mut Tx,
}

impl Execution<'_> {
    /// LOCK.
    pub fn lock_whole_table(&mut self, op: &OpRef<'_>) -> Result<OpProgress, Fail> {
        self.db.catalog.table(op.table)?;
        let exclusive = op.has(op_flag::EXCLUSIVE);
        let want = if exclusive { mode::EXCLUSIVE } else { mode::SHARED };
        let got = self.lock_table(op, want)?;
        Ok(if got { OpProgress::Done } else { OpProgress::Wait })
    }

    /// Locks the op's table; false: it waits.
    pub fn lock_table(&mut self, op: &OpRef<'_>, want: u8) -> Result<bool, Fail> {
        if self.tx.has_table(op.table, want) {
            return Ok(true);
        }
        let got = self.lock(op, Resource::Table(op.table), want)?;
        if got {
            self.tx.add_table_lock(op.table, want);
        }
        Ok(got)
    }

    /// Locks a key, and checks that it was not changed if the batch is strict; false: it waits.
    pub fn lock_key(
        &mut self,
        op: &OpRef<'_>,
        (index, key): (u8, &[u8]),
        want: u8,
    ) -> Result<bool, Fail> {
        if !self.tx.has_table(op.table, want)
            && !self.lock(op, Resource::key(op.table, index, key), want)?
        {
            return Ok(false);
        }
        if self.request.head.has(batch_flag::STRICT) {
            let (catalog, versions) = (&self.db.catalog, &self.db.versions);
            versions.check_unchanged(catalog, self.tx, (op.table, index), key)?;
        }
        Ok(true)
    }

    /// Locks a key that is read; false: it waits.
    pub fn lock_read(&mut self, op: &OpRef<'_>, index: u8, key: &[u8]) -> Result<bool, Fail> {
        let exclusive = op.has(op_flag::EXCLUSIVE);
        let (intend, want) = match exclusive {
            true => (mode::INTEND_EXCLUSIVE, mode::EXCLUSIVE),
            false => (mode::INTEND_SHARED, mode::SHARED),
        };
        Ok(self.lock_table(op, intend)? && self.lock_key(op, (index, key), want)?)
    }

    fn lock(&mut self, op: &OpRef<'_>, resource: Resource, want: u8) -> Result<bool, Fail> {
        self.db.check_memory(LOCK_BYTES)?;
        let (request, tx, locks) = (&mut *self.request, &mut *self.tx, &mut self.db.locks);
        match locks.ask(tx.id, resource, want) {
            Asked::Held => return Ok(true),
            Asked::New => {
                tx.held.push(resource);
                return Ok(true);
            }
            Asked::Busy => {}
        }
        let (i, table) = (request.op, op.table);
        if request.cancelled {
            return Err(fail!(CANCELLED, "op {i}: cancelled while it waited in table {table}"));
        }
        let wait_ms = request.head.wait_ms;
        if request.timed_out || wait_ms == 0 || op.has(op_flag::NO_WAIT) {
            let ms = if op.has(op_flag::NO_WAIT) { 0 } else { wait_ms };
            return Err(fail!(TIMEOUT, "op {i}: a lock in table {table} was not free in {ms} ms"));
        }
        if !locks.wait(tx.id, resource, want) {
            return Err(fail!(DEADLOCK, "op {i}: a lock in table {table} would never be free"));
        }
        let until_ms = self.host.now_ms().saturating_add(u64::from(wait_ms));
        request.deadline_ms.get_or_insert(until_ms);
        Ok(false)
    }
}
