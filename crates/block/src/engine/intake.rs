//! Intake of a queue: requests from its ring, operations to its disk, and their charges.

use sidecore::{Ledger, Spent, least_charge_bytes};

use super::QueueEngine;
use crate::in_flight::IssueOutcome;
use crate::limits::{MIN_CHARGE_BYTES, POLL_BUDGET_BYTES};
use crate::request::Status;

impl QueueEngine {
    /// Begins next steps of requests and takes new requests. The two go first in turns, so that a
    /// request behind a large one waits for a step and not for all of it. Returns the work done.
    pub(super) fn take_and_issue(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        self.in_flight.choose_step(ledger.is_crowded());
        let mut budget = POLL_BUDGET_BYTES;
        let goes_on = !self.in_flight.slab.ready.is_empty();
        let new_first = goes_on && self.takes_new_first;
        let mut work = 0;
        if goes_on && !new_first {
            work = self.issue_steps(&mut budget, now_ns, ledger);
            self.takes_new_first = work > 0;
        }
        if budget > 0 {
            let waiting = self.in_flight.slab.ready.len();
            let taken = self.take(budget, now_ns, ledger);
            if taken > 0 {
                self.takes_new_first &= !new_first;
                self.in_flight.slab.ready.rotate_left(waiting);
                work += taken + self.issue(&mut budget, 0, now_ns, ledger);
            }
        }
        if new_first {
            work += self.issue_steps(&mut budget, now_ns, ledger);
        }
        work
    }

    /// Begins further steps of requests, as far as there is credit. Each step needs credit anew:
    /// else the steps of all queues would run beside the VM's turn.
    fn issue_steps(&mut self, budget: &mut u64, now_ns: u64, ledger: &mut Ledger) -> usize {
        let allowance = ledger.allowance(self.port.vm, now_ns);
        let below = self.pass.credit(ledger, now_ns);
        let is_held = allowance.is_none() || below.is_none();
        let credit = if is_held { 0 } else { allowance.bytes.min(below.bytes) };
        // A queue that ends does so soon, at a ceiling too: a step in each poll, which is owed.
        let ends = self.drain_notice.is_some();
        let work = self.issue(budget, credit.max(ends.into()), now_ns, ledger);
        if is_held && !ends && !self.in_flight.slab.ready.is_empty() {
            self.wait(now_ns, ledger, allowance.is_none());
        }
        work
    }

    /// Takes requests from the ring whose first steps fit into `budget`; the last one may exceed
    /// it.
    fn take(&mut self, budget: u64, now_ns: u64, ledger: &mut Ledger) -> usize {
        let free = self.in_flight.slab.free.len().min(self.batch_max);
        if free == 0 || self.drain_notice.is_some() {
            return 0;
        }
        let vm = self.port.vm;
        let mut allowance = ledger.allowance(vm, now_ns);
        let below = self.pass.allowance(ledger, now_ns);
        if allowance.is_none() || below.is_none() {
            if self.vring.has_work() {
                self.wait(now_ns, ledger, allowance.is_none());
            }
            return 0;
        }
        allowance.bytes = allowance.bytes.min(budget);
        let by_thread = allowance.batch(self.mean_cost, free);
        let most = below.batch(self.mean_cost, by_thread);
        let bytes = allowance.bytes.min(below.bytes);
        let popped = self.vring.pop(&mut self.batch, most);
        self.is_waiting_for_list = false;
        self.may_have_placeholders = popped > 0 && self.has_known_placeholders();
        for index in 0..popped {
            queue::seg::prefetch_head(self.batch.get(index).readable);
        }
        let mut spent = Spent::default();
        while (spent.requests as usize) < popped && spent.bytes < bytes {
            let index = spent.requests as usize;
            if !self.in_flight.slab.has_room(&self.batch, index) {
                self.is_waiting_for_list = true;
                break;
            }
            // Read before the request may end: its segments were walked in any case.
            let segs = self.batch.get(index).segs();
            let least = least_charge_bytes(MIN_CHARGE_BYTES, segs);
            spent.add(self.start(index, now_ns), least);
        }
        let taken = spent.requests as usize;
        if taken < popped {
            self.vring.unpop(&mut self.batch, popped - taken);
        }
        if taken > 0 {
            self.batch.clear();
            // A queue that waits for the device does not wait for this thread.
            ledger.charge(vm, spent, popped == by_thread || taken < popped, now_ns);
            self.pass.charge(ledger, spent, popped == most, now_ns);
            self.mean_cost = spent.bytes / u64::from(spent.requests.max(1));
            let outstanding = self.outstanding();
            self.pace.note_batch(now_ns, taken, outstanding);
        }
        taken
    }

    /// Tells the ledger that requests wait for the thread, or for the device.
    fn wait(&mut self, now_ns: u64, ledger: &mut Ledger, by_thread: bool) {
        self.is_waiting = true;
        match by_thread {
            true => ledger.held_back(self.port.vm, now_ns),
            false => self.pass.wait(ledger, now_ns),
        }
    }

    /// Gives waiting requests to the disk until it is full, a bounce buffer is missing, this poll's
    /// share is used up, or a step would have to be paid beyond `credit` (but for the last one).
    fn issue(&mut self, budget: &mut u64, credit: u64, now_ns: u64, ledger: &mut Ledger) -> usize {
        let (mut issued, mut due) = (0, Spent::default());
        while *budget > 0 {
            let Some(&slot) = self.in_flight.slab.ready.front() else { break };
            if due.bytes >= credit && !self.in_flight.is_paid(slot) {
                break;
            }
            let may_be_placeholder =
                self.in_flight.slab.slots[usize::from(slot)].job.may_be_placeholder;
            if may_be_placeholder && let Some(looked) = self.inspect_next_part(slot) {
                *budget = budget.saturating_sub(looked.bytes);
                due.bytes += looked.due;
                issued += 1;
                continue;
            }
            let is_flush = self.in_flight.is_flush(slot);
            if is_flush && self.join_flush(slot) {
                self.in_flight.slab.ready.pop_front();
                issued += 1;
                continue;
            }
            match self.in_flight.issue(slot, &self.port) {
                IssueOutcome::Sent(sent) => {
                    if is_flush {
                        self.flushes.lead(slot);
                    }
                    *budget = budget.saturating_sub(sent.bytes);
                    due.bytes += sent.due;
                    self.stats.disk_ops.add(1);
                }
                IssueOutcome::Blocked => break,
                IssueOutcome::StageRefused => {
                    self.stats.stage_refused.add(1);
                    self.finish(slot, Status::IoErr);
                }
                IssueOutcome::Failed(errno) if is_flush => self.end_flush(slot, Some(errno)),
                IssueOutcome::Failed(errno) => self.fail(slot, errno),
            }
            self.in_flight.slab.ready.pop_front();
            issued += 1;
        }
        if due.bytes > 0 {
            let more = !self.in_flight.slab.ready.is_empty() || self.vring.has_work();
            ledger.charge(self.port.vm, due, more, now_ns);
            self.pass.charge(ledger, due, more, now_ns);
        }
        issued
    }
}
