//! What a queue takes from its ring and gives to its disk, and what that is charged.

use sidecore::{Ledger, Spent};

use super::Engine;
use crate::flight::Issue;
use crate::limits::MIN_CHARGE_BYTES;
use crate::request::Status;

impl Engine {
    /// Takes what fits from the ring.
    pub(super) fn take(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        let free = self.flight.slab.free.len().min(self.batch_max);
        if free == 0 || self.drained.is_some() {
            return 0;
        }
        let vm = self.port.vm;
        let allowance = ledger.allowance(vm, now_ns);
        let by_thread = allowance.batch(self.mean_cost, free);
        let below = self.pass.allowance(ledger, now_ns);
        let most = below.batch(self.mean_cost, by_thread);
        if allowance.is_none() || below.is_none() {
            self.wait(now_ns, ledger, allowance.is_none());
            return 0;
        }
        let bytes = allowance.bytes.min(below.bytes);
        let popped = self.vring.pop(&mut self.batch, most);
        for index in 0..popped {
            queue::seg::prefetch_head(self.batch.get(index).readable);
        }
        let mut spent = Spent::default();
        while (spent.requests as usize) < popped && spent.bytes < bytes {
            let index = spent.requests as usize;
            spent.add(self.start(index, now_ns), MIN_CHARGE_BYTES);
        }
        let taken = spent.requests as usize;
        if taken < popped {
            self.vring.unpop(&mut self.batch, popped - taken);
        }
        if taken > 0 {
            self.batch.clear();
            // Who waits for the device does not wait for this thread.
            ledger.charge(vm, spent, popped == by_thread || taken < popped, now_ns);
            self.pass.charge(ledger, spent, popped == most, now_ns);
            self.mean_cost = spent.bytes / u64::from(spent.requests.max(1));
            let outstanding = self.outstanding();
            self.pace.took(now_ns, taken, outstanding);
        }
        taken
    }

    /// Nothing may be taken: says so, if anything waits.
    fn wait(&mut self, now_ns: u64, ledger: &mut Ledger, by_thread: bool) {
        self.waits = self.vring.has_work();
        match by_thread {
            _ if !self.waits => {}
            true => ledger.held_back(self.port.vm, now_ns),
            false => self.pass.wait(ledger, now_ns),
        }
    }

    /// Gives waiting requests to the disk until it is full, a bounce buffer is missing, or this
    /// poll's share is used up. Steps that were not paid when their requests were taken are charged.
    pub(super) fn issue(&mut self, budget: &mut u64, now_ns: u64, ledger: &mut Ledger) -> usize {
        let (mut issued, mut due) = (0, Spent::default());
        while *budget > 0 {
            let Some(&slot) = self.flight.slab.ready.front() else { break };
            match self.flight.issue(slot, &self.port) {
                Issue::Sent(sent) => {
                    *budget = budget.saturating_sub(sent.bytes);
                    due.bytes += sent.due;
                    self.stats.disk_ops.add(1);
                }
                Issue::Blocked => break,
                Issue::StageRefused => {
                    self.stats.stage_refused.add(1);
                    self.finish(slot, Status::IoErr);
                }
                Issue::Failed(errno) => self.fail(slot, errno),
            }
            self.flight.slab.ready.pop_front();
            issued += 1;
        }
        if due.bytes > 0 {
            let more = !self.flight.slab.ready.is_empty() || self.vring.has_work();
            ledger.charge(self.port.vm, due, more, now_ns);
            self.pass.charge(ledger, due, more, now_ns);
        }
        issued
    }
}
