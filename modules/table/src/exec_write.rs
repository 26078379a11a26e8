//! Ops that write entries.

use guest_abi::table::{op, op_flag};
use sdk::Host;

use crate::checkpoint::record_place;
use crate::fail::{Fail, fail};
use crate::lock::mode;
use crate::map::ENTRY_BYTES;
use crate::memory::SPARE_BYTES;
use crate::record::{HEAD_BYTES, kind};
use crate::reserve::Purpose;
use crate::run::{Act, Next};
use crate::store::Store;
use crate::tx::{Tx, Where};
use crate::wire::OpRef;

impl Store {
    /// INSERT, PUT, UPDATE, DELETE.
    pub(crate) fn write(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
    ) -> Result<Next, Fail> {
        self.log.writable()?;
        if op.kind != op::DELETE {
            self.log.reserve.check(Purpose::Change)?;
        }
        self.catalog.index(op.table, op.index)?;
        let more = (op.key.len() + op.value.len()) as u64 + ENTRY_BYTES;
        let spare = if op.kind == op::DELETE { 0 } else { SPARE_BYTES };
        self.check_memory(more + spare)?;
        if !self.lock_table(host, act, op, mode::INTEND_EXCLUSIVE)? {
            return Ok(Next::Wait);
        }
        let locked = !op.has(op_flag::NO_LOCK);
        if locked && !self.lock_key(host, act, op, (op.index, op.key), mode::EXCLUSIVE)? {
            return Ok(Next::Wait);
        }
        let (i, place) = (act.run.op, (op.table, op.index));
        match (op.kind, self.is_there(act.tx, place, op.key)) {
            (op::INSERT, true) => {
                return Err(fail!(EXISTS, "op {i}: table {}, index {}", op.table, op.index));
            }
            (op::UPDATE | op::DELETE, false) => {
                return Err(fail!(NOT_FOUND, "op {i}: table {}, index {}", op.table, op.index));
            }
            _ => {}
        }
        let more = op.key.len() + op.value.len() + HEAD_BYTES;
        if !act.tx.ops.is_empty() && act.tx.ops.len() + more > self.config.spill_bytes {
            self.spill(host, act.tx)?;
        }
        let value = (op.kind != op::DELETE).then_some(op.value);
        act.tx.put(place, op.key, value, locked, &mut self.log.books);
        self.steps = self.steps.saturating_sub(op.value.len() as u64 / 2048);
        Ok(Next::Op)
    }

    fn is_there(&self, tx: &Tx, place: Where, key: &[u8]) -> bool {
        if let Some(write) = tx.own(place, key) {
            return write.slot.is_there();
        }
        let index = self.catalog.index(place.0, place.1);
        let chain = index.ok().and_then(|index| index.map.get(key));
        chain.is_some_and(|chain| chain.at(self.visible).is_some())
    }

    /// Puts a transaction's ops into the log before its commit.
    fn spill(&mut self, host: &mut dyn Host, tx: &mut Tx) -> Result<(), Fail> {
        self.flush(host);
        let id = tx.id;
        let place = self.log.write(host, kind::SPILL, tx.purpose(), |out| {
            out.extend_from_slice(&id.to_le_bytes());
            out.extend_from_slice(&tx.ops);
        })?;
        tx.begun.get_or_insert(record_place(place));
        let ops = crate::log::Place { offset: place.offset + 8, ..place };
        tx.spilled(ops, &mut self.log.books);
        Ok(())
    }
}
