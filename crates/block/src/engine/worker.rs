//! A queue's turns on its sidecore, and its sleep.

use std::os::fd::RawFd;

use sidecore::{Arm, Ledger, Worker};

use super::{GATHERING, LOOK_AGAIN_NS, QueueEngine, gather_within};

impl Worker for QueueEngine {
    fn poll(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        self.log.now_ns = now_ns;
        self.latencies.record(now_ns, &self.stats.latency_ns);
        self.is_waiting = false;
        let tried = if self.holding.count() > 0 { self.retry_held(now_ns) } else { 0 };
        let mut work = tried + self.take_and_issue(now_ns, ledger);
        work += self.collect();
        if work > 0 {
            self.publish();
        }
        self.notify(now_ns);
        work
    }

    fn arm(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm {
        self.log.now_ns = now_ns;
        let arm = self.until_next(now_ns, ledger);
        self.holding.bound(arm)
    }

    fn disarm(&mut self) {
        self.set_wakeups(false);
        self.vring.disarm();
    }

    fn fired(&mut self, fd: RawFd) {
        if self.vring.kick_fd() == Some(fd) {
            self.vring.count_kick();
        }
    }
}

impl QueueEngine {
    /// Longest sleep of the queue, held requests aside.
    fn until_next(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm {
        self.set_wakeups(true);
        // Operations that finished before the disk was told to ring.
        if self.collect() > 0 {
            self.publish();
            self.notify(now_ns);
            return Arm::Busy;
        }
        if !self.in_flight.slab.ready.is_empty() && self.in_flight.in_disk == 0 && !self.is_waiting
        {
            return Arm::Busy;
        }
        let slack_ns = self.slack_ns(now_ns);
        if slack_ns > 0 {
            let due_ns = self.vring.notify_due_ns(gather_within(slack_ns));
            // The timer finds what finishes meanwhile.
            self.set_wakeups(false);
            let look_ns = now_ns + slack_ns / 2;
            return Arm::Until(due_ns.map_or(look_ns, |due_ns| due_ns.clamp(now_ns, look_ns)));
        }
        let due_ns = self.vring.notify_due_ns(GATHERING);
        if self.in_flight.disk.has_former() {
            let look_ns = now_ns + LOOK_AGAIN_NS;
            return Arm::Until(due_ns.map_or(look_ns, |due_ns| due_ns.min(look_ns)));
        }
        // With every slot taken the next event is a completion, not a kick, or credit.
        let is_full = self.in_flight.slab.free.is_empty() || self.is_waiting_for_list;
        if (is_full && !self.is_waiting) || self.drain_notice.is_some() {
            return due_ns.map_or(Arm::Idle, Arm::Until);
        }
        if let Some(until_ns) = ledger.until_ns(self.port.vm, now_ns) {
            return Arm::Until(due_ns.map_or(until_ns, |due_ns| due_ns.min(until_ns)));
        }
        if self.is_busy() || self.is_waiting {
            let look_ns = now_ns + LOOK_AGAIN_NS;
            return Arm::Until(due_ns.map_or(look_ns, |due_ns| due_ns.min(look_ns)));
        }
        // The slack may have ended since the poll, which left completions to a later one.
        self.vring.notify();
        if self.vring.arm() { Arm::Busy } else { Arm::Idle }
    }
}
