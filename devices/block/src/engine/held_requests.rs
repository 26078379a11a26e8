//! Requests that wait for their storage after an error, as the disk's `on_error` says.
//!
//! A held request keeps its slot and is not answered. From time to time one of them, the probe, is
//! tried again, with longer and longer pauses: when it succeeds, all go on. So a full file system
//! costs an operation every few seconds, and only the poll in which it is due. An administrator
//! need not wait: see [`crate::BlockPort::resume`].
//!
//! Flushes are never held (see [`super::flushes`]): writes that a failed one lost cannot be
//! repeated. Nor are requests that a pipe answers: their bytes are the pipe's.
//!
//! When the queue ends, held requests end with an I/O error, since a driver or a migration waits
//! for all of them. Where the session ends and the next one takes requests again from the inflight
//! region, they are left in there.

use std::collections::VecDeque;

use sidecore::Arm;

use crate::limits::{HOLD_MAX_NS, HOLD_MIN_NS};
use crate::metrics::BlockStats;

/// Held requests of a queue. The list never grows beyond the queue's depth.
pub(super) struct HeldRequests {
    /// Slots of the held requests, in the order of their last try.
    slots: VecDeque<u16>,
    /// Slot that is tried again now.
    probe: Option<u16>,
    retry_at_ns: u64,
    pause_ns: u64,
    /// Whether no request has succeeded since one was held.
    is_holding: bool,
    /// Whether the queue ends: no request is held any more.
    is_ending: bool,
    /// Whether held requests stay in the inflight region at the end of the queue.
    stays_inflight: bool,
}

impl HeldRequests {
    /// A list for a queue with up to `depth` requests in flight.
    pub fn new(depth: u16) -> Self {
        Self {
            slots: VecDeque::with_capacity(usize::from(depth)),
            probe: None,
            retry_at_ns: 0,
            pause_ns: HOLD_MIN_NS,
            is_holding: false,
            is_ending: false,
            stays_inflight: false,
        }
    }

    /// Adds a request that failed now. True for the first one since requests were held.
    pub fn add(&mut self, slot: u16, errno: i32, now_ns: u64, stats: &BlockStats) -> bool {
        let mut is_first = false;
        if self.probe.take_if(|probe| *probe == slot).is_some() {
            self.pause_ns = (self.pause_ns * 2).min(HOLD_MAX_NS);
            self.retry_at_ns = now_ns + self.pause_ns;
        } else if !std::mem::replace(&mut self.is_holding, true) {
            self.retry_at_ns = now_ns + self.pause_ns;
            is_first = true;
        }
        self.slots.push_back(slot);
        stats.held_errno.set(errno as u64);
        stats.held_total.add(1);
        self.show_count(stats);
        is_first
    }

    /// Whether the request is the one that is tried again now.
    #[inline]
    pub fn is_probe(&self, slot: u16) -> bool {
        self.probe == Some(slot)
    }

    /// Makes the next held request the probe when it is time. Returns the slot to try again.
    pub fn begin_probe(&mut self, now_ns: u64, stats: &BlockStats) -> Option<u16> {
        if self.probe.is_some() || now_ns < self.retry_at_ns {
            return None;
        }
        self.probe = self.slots.pop_front();
        self.show_count(stats);
        self.probe
    }

    /// Notes that a request is answered. If it is the probe, which did not succeed, the next try is
    /// another's.
    #[inline]
    pub fn forget_probe(&mut self, slot: u16, now_ns: u64, stats: &BlockStats) {
        if self.is_probe(slot) {
            self.end_probe(now_ns);
            self.show_count(stats);
        }
    }

    /// Ends the probe, which did not succeed and is not held again.
    fn end_probe(&mut self, now_ns: u64) {
        self.probe = None;
        self.retry_at_ns = now_ns + self.pause_ns;
        if self.slots.is_empty() {
            (self.is_holding, self.pause_ns) = (false, HOLD_MIN_NS);
        }
    }

    /// Releases all held requests into `ready`. Returns their number, with the probe.
    pub fn release(&mut self, ready: &mut VecDeque<u16>, stats: &BlockStats) -> usize {
        let count = self.total();
        self.probe = None;
        (self.is_holding, self.pause_ns) = (false, HOLD_MIN_NS);
        ready.extend(self.slots.drain(..));
        self.show_count(stats);
        count
    }

    /// Notes that the queue ends. `stays_inflight`: held requests stay in the inflight region.
    pub fn begin_end(&mut self, stays_inflight: bool) {
        (self.is_ending, self.stays_inflight) = (true, stays_inflight);
        self.probe = None;
    }

    /// Takes a held request, at the end of the queue.
    pub fn take(&mut self) -> Option<u16> {
        self.slots.pop_front()
    }

    /// Whether the queue ends: no request is held any more.
    pub fn is_ending(&self) -> bool {
        self.is_ending
    }

    /// Whether held requests stay in the inflight region at the end of the queue.
    pub fn stays_inflight(&self) -> bool {
        self.stays_inflight
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

    /// Sets the counter of held requests.
    pub fn show_count(&self, stats: &BlockStats) {
        stats.held.set(self.total() as u64);
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
