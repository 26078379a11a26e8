//! Scans that lock: one key after the other, as each is when its lock is there.

use alloc::vec::Vec;

use guest_abi::table::{op_flag, status};
use sdk::Host;

use crate::clients::Cursor;
use crate::exec_read::{More, Step, after, borrow};
use crate::fail::Fail;
use crate::filter::Filter;
use crate::map::{Merge, Slot};
use crate::run::{Act, Next};
use crate::store::Store;
use crate::wire::{self, OpRef};

/// A key that a scan may want. Without a value: the call's steps are used up.
type Candidate = (Vec<u8>, Option<Slot>);

impl Store {
    /// SCAN with SHARED or EXCLUSIVE.
    pub(crate) fn scan_locking(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
    ) -> Result<Next, Fail> {
        self.catalog.index(op.table, op.index)?;
        let mut cursor = Self::cursor(act, op);
        loop {
            let step = self.lock_next(host, act, op, &mut cursor);
            let next = match Self::drop_answer(act, &cursor, step)? {
                Step::End => return Ok(Self::end_scan(act, op, &cursor, More::No)),
                Step::Full => return Ok(Self::end_scan(act, op, &cursor, More::Yes)),
                Step::Examined => return Ok(Self::end_scan(act, op, &cursor, More::Examined)),
                Step::Next if self.steps > 0 => continue,
                Step::Next | Step::Later => Next::Later,
                Step::Wait => Next::Wait,
            };
            act.run.cursor = Some(cursor);
            return Ok(next);
        }
    }

    fn lock_next(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
        cursor: &mut Cursor,
    ) -> Result<Step, Fail> {
        let Some((key, slot)) = self.find_next(act, op, cursor)? else { return Ok(Step::End) };
        let Some(slot) = slot else {
            after(cursor, op, &key);
            return Ok(Step::Later);
        };
        // What is not in the answer is not locked for it.
        let rows = op.extra as u32;
        if rows != 0 && cursor.rows >= rows {
            return Ok(Step::Full);
        }
        if let Some(filter) = Filter::of(op) {
            if cursor.examined >= filter.examine {
                return Ok(Step::Examined);
            }
            // What it says of the value is right until the call ends, so also once the lock is there.
            if !self.is_match(host, act, op, &filter, (&key, &slot))? {
                cursor.examined += 1;
                after(cursor, op, &key);
                return Ok(Step::Next);
            }
        }
        let mut op = *op;
        if op.has(op_flag::SKIP_LOCKED) {
            op.flags |= op_flag::NO_WAIT;
        }
        let step = match self.lock_read(host, act, &op, op.index, &key) {
            Ok(true) => self.put_locked(host, act, &op, (&key, &slot), self.visible, cursor),
            Ok(false) => Ok(Step::Wait),
            Err(fail) => Err(fail),
        };
        let step = match step {
            Err(fail) if op.has(op_flag::SKIP_LOCKED) && fail.status == status::TIMEOUT => {
                Step::Next
            }
            step => step?,
        };
        if step == Step::Next {
            cursor.examined = cursor.examined.saturating_add(1);
            after(cursor, &op, &key);
        }
        Ok(step)
    }

    /// The next key that has a value, as it was committed last.
    fn find_next(
        &mut self,
        act: &Act<'_>,
        op: &OpRef<'_>,
        cursor: &Cursor,
    ) -> Result<Option<Candidate>, Fail> {
        if wire::is_empty(&cursor.range) {
            return Ok(None);
        }
        let index = self.catalog.index(op.table, op.index)?;
        let own = act.tx.writes.get(&(op.table, op.index));
        let range = (borrow(&cursor.range.0), borrow(&cursor.range.1));
        let mut merge = Merge::new(index, own, range, op.has(op_flag::BACKWARD), self.visible);
        while let Some((key, slot)) = merge.step() {
            self.steps = self.steps.saturating_sub(1);
            if slot.is_some() || self.steps == 0 {
                return Ok(Some((key.to_vec(), slot.cloned())));
            }
        }
        Ok(None)
    }
}
