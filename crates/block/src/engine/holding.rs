//! Requests that wait for their storage after an error, as the disk's `on_error` says.
//!
//! A held request keeps its slot and is not answered. From time to time one of them, the probe, is
//! tried again, with longer and longer pauses: when it succeeds, all go on. So a full file system
//! costs an operation every few seconds, and only the poll in which it is due. An administrator
//! need not wait: see [`crate::BlockPort::resume`].
//!
//! Flushes are never held (see [`super::flushing`]): writes that a failed one lost cannot be
//! repeated. Nor are requests that a pipe answers: their bytes are the pipe's.
//!
//! When the queue ends, held requests end with an I/O error, since a driver or a migration waits
//! for all of them. Where the session ends and the next one takes requests again from the inflight
//! region, they are left in there.

use std::collections::VecDeque;
use std::collections::vec_deque::Drain;

use sidecore::Arm;

use super::QueueEngine;
use crate::in_flight::OpOutcome;
use crate::limits::{HOLD_MAX_NS, HOLD_MIN_NS};
use crate::request::Status;

/// Held requests of a queue. The list never grows beyond the queue's depth.
pub(super) struct Holding {
    /// Slots of the held requests, in the order of their last try.
    slots: VecDeque<u16>,
    /// Slot that is tried again now.
    probe: Option<u16>,
    retry_at_ns: u64,
    pause_ns: u64,
    /// Whether no request has succeeded since one was held.
    is_holding: bool,
    /// Whether held requests stay in the inflight region at the end of the queue.
    stays_inflight: bool,
}

impl Holding {
    /// A list for a queue with up to `depth` requests in flight.
    pub fn new(depth: u16) -> Self {
        Self {
            slots: VecDeque::with_capacity(usize::from(depth)),
            probe: None,
            retry_at_ns: 0,
            pause_ns: HOLD_MIN_NS,
            is_holding: false,
            stays_inflight: false,
        }
    }

    /// Adds a request that failed now. True for the first one since requests were held.
    fn add(&mut self, slot: u16, now_ns: u64) -> bool {
        let mut is_first = false;
        if self.probe.take_if(|probe| *probe == slot).is_some() {
            self.pause_ns = (self.pause_ns * 2).min(HOLD_MAX_NS);
            self.retry_at_ns = now_ns + self.pause_ns;
        } else if !std::mem::replace(&mut self.is_holding, true) {
            self.retry_at_ns = now_ns + self.pause_ns;
            is_first = true;
        }
        self.slots.push_back(slot);
        is_first
    }

    /// Whether the request is the one that is tried again now.
    #[inline]
    fn is_probe(&self, slot: u16) -> bool {
        self.probe == Some(slot)
    }

    /// Makes the next held request the probe, if it is time.
    fn begin_probe(&mut self, now_ns: u64) -> bool {
        if self.probe.is_some() || now_ns < self.retry_at_ns {
            return false;
        }
        self.probe = self.slots.pop_front();
        true
    }

    /// Ends the probe, which did not succeed and is not held again.
    fn end_probe(&mut self, now_ns: u64) {
        self.probe = None;
        self.retry_at_ns = now_ns + self.pause_ns;
        if self.slots.is_empty() {
            (self.is_holding, self.pause_ns) = (false, HOLD_MIN_NS);
        }
    }

    /// Releases all held requests. Returns their number, with the probe, and the slots without it.
    fn release(&mut self) -> (usize, Drain<'_, u16>) {
        let count = self.total();
        self.probe = None;
        (self.is_holding, self.pause_ns) = (false, HOLD_MIN_NS);
        (count, self.slots.drain(..))
    }

    /// Number of held requests, with the probe.
    fn total(&self) -> usize {
        self.slots.len() + usize::from(self.probe.is_some())
    }

    /// Number of held requests, without the probe.
    #[inline]
    pub fn count(&self) -> usize {
        self.slots.len()
    }

    /// Shortens a sleep to the time of the next try.
    pub fn bound(&self, arm: Arm) -> Arm {
        if self.slots.is_empty() || self.probe.is_some() {
            return arm;
        }
        match arm {
            Arm::Busy => Arm::Busy,
            Arm::Idle => Arm::Until(self.retry_at_ns),
            Arm::Until(at_ns) => Arm::Until(at_ns.min(self.retry_at_ns)),
        }
    }
}

impl QueueEngine {
    /// Takes in a failure of the disk: the request is held, or the guest sees an I/O error.
    pub(super) fn fail(&mut self, slot: u16, errno: i32) {
        let work = self.in_flight.slab.slots[usize::from(slot)].job.kind;
        if !self.port.on_error.holds(work, errno) {
            return self.report(slot, errno);
        }
        match self.drain_notice {
            None => self.hold(slot, errno),
            Some(_) => self.end_held(slot, errno),
        }
    }

    fn hold(&mut self, slot: u16, errno: i32) {
        let now_ns = self.log.now_ns;
        self.in_flight.rewind(slot);
        if self.holding.add(slot, now_ns) {
            let job = &self.in_flight.slab.slots[usize::from(slot)].job;
            self.log.held(self.vring.parts.health.name(), self.vring.parts.index, job, errno);
        }
        self.stats.held_errno.set(errno as u64);
        self.stats.held_total.add(1);
        self.show_held_count();
    }

    /// Notes that a request is answered. If it is the probe, which did not succeed, the next try is
    /// another's.
    #[inline]
    pub(super) fn forget_probe(&mut self, slot: u16) {
        if self.holding.is_probe(slot) {
            self.holding.end_probe(self.log.now_ns);
            self.show_held_count();
        }
    }

    /// Tries one of the held requests again when it is time. Returns the number of tries.
    #[cold]
    pub(super) fn retry_held(&mut self, now_ns: u64) -> usize {
        if !self.holding.begin_probe(now_ns) {
            return 0;
        }
        self.in_flight.slab.ready.extend(self.holding.probe);
        self.show_held_count();
        1
    }

    /// Notes the progress of a request: when the probe succeeds, all held requests go on.
    #[inline]
    pub(super) fn note_progress(&mut self, slot: u16, next: &OpOutcome) {
        if self.holding.is_probe(slot) {
            let is_done = match next {
                OpOutcome::NextStep | OpOutcome::Finished => true,
                // The data is there, or the same step goes on.
                OpOutcome::Again => self.in_flight.is_flush(slot),
                OpOutcome::StageRefused | OpOutcome::Failed(_) => false,
            };
            if is_done {
                self.resume_held();
            }
        }
    }

    /// Lets all held requests go on. Returns their number.
    #[cold]
    pub fn resume_held(&mut self) -> usize {
        let (count, slots) = self.holding.release();
        self.in_flight.slab.ready.extend(slots);
        if count > 0 {
            self.log.resumed(self.vring.parts.health.name(), self.vring.parts.index, count);
        }
        self.show_held_count();
        count
    }

    /// Ends all held requests, at the end of the queue. `stays_inflight`: the next session takes
    /// them again from the inflight region.
    pub(super) fn end_all_held(&mut self, stays_inflight: bool) {
        self.holding.stays_inflight = stays_inflight && self.vring.parts.inflight.is_some();
        self.holding.probe = None;
        if self.holding.slots.is_empty() {
            return self.show_held_count();
        }
        let errno = self.stats.held_errno.get() as i32;
        while let Some(slot) = self.holding.slots.pop_front() {
            self.end_held(slot, errno);
        }
        self.show_held_count();
        self.publish();
        self.vring.notify();
    }

    fn end_held(&mut self, slot: u16, errno: i32) {
        match self.holding.stays_inflight {
            true => self.in_flight.release(slot),
            false => self.report(slot, errno),
        }
    }

    fn show_held_count(&self) {
        self.stats.held.set(self.holding.total() as u64);
    }

    /// Ends a request with an I/O error, and logs the cause.
    pub(super) fn report(&mut self, slot: u16, errno: i32) {
        self.stats.io_errors.add(1);
        if errno == libc::ENOSPC || errno == libc::EDQUOT {
            self.stats.no_space.add(1);
        }
        let job = self.in_flight.slab.slots[usize::from(slot)].job;
        self.log.failed(self.vring.parts.health.name(), self.vring.parts.index, &job, errno);
        self.finish(slot, Status::IoErr);
    }
}
