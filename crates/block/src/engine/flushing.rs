//! A queue's flushes: one at a time in the disk, shared by all requests that wait for one.
//!
//! The kernel reports a write-back error once to each opening of a file. Of two flushes at the same
//! time one would get it and the other succeed, and the first answer decides what the guest
//! believes. So a queue has one flush in the disk. Requests that come meanwhile wait, and share the
//! next one: it begins after all writes that they cover. (Kernels merge the flushes of a device in
//! the same way.) Queues do not share openings: see `raw.rs`.
//!
//! Once one failed, all fail: see [`PortState::flush_failure`](crate::port_state::PortState).

use std::sync::atomic::Ordering;

use super::QueueEngine;
use crate::error_log::ErrorLog;
use crate::request::Status;
use crate::slab::JobKind;

/// Slots that wait for a flush. The lists never grow beyond the queue's depth.
pub(super) struct Flushes {
    /// Slot whose flush is in the disk.
    leader: Option<u16>,
    /// Other slots that share this flush.
    shared: Vec<u16>,
    /// Slots that came while it was in the disk: they share the next one.
    next: Vec<u16>,
}

impl Flushes {
    /// Lists for a queue with up to `depth` requests in flight.
    pub fn new(depth: u16) -> Self {
        let list = || Vec::with_capacity(usize::from(depth));
        Self { leader: None, shared: list(), next: list() }
    }

    /// Notes that the disk has a flush for this slot: all that wait share it.
    pub fn lead(&mut self, slot: u16) {
        self.leader = Some(slot);
        self.shared.append(&mut self.next);
    }

    /// Whether another slot's flush is in the disk.
    fn is_led_by_other(&self, slot: u16) -> bool {
        self.leader.is_some_and(|leader| leader != slot)
    }
}

impl QueueEngine {
    /// Whether a request needs a flush, which cannot succeed any more.
    #[inline]
    pub(super) fn needs_failed_flush(&self, slot: u16) -> bool {
        if self.port.flush_failure().is_none() {
            return false;
        }
        match self.in_flight.slab.slots[usize::from(slot)].job.kind {
            JobKind::Flush => true,
            JobKind::Read => false,
            _ => !self.port.writeback.load(Ordering::Relaxed),
        }
    }

    /// Ends a request that needs a flush with an error. The log has the failure already.
    #[cold]
    pub(super) fn fail_for_flush(&mut self, slot: u16) {
        self.stats.io_errors.add(1);
        self.finish(slot, Status::IoErr);
    }

    /// Lets a request wait for another's flush, or fail after a failed one. False when the disk
    /// must be given a flush for it.
    pub(super) fn join_flush(&mut self, slot: u16) -> bool {
        if self.flushes.is_led_by_other(slot) {
            self.flushes.next.push(slot);
            return true;
        }
        let is_lost = self.port.flush_failure().is_some();
        if is_lost {
            self.end_flush(slot, None);
        }
        is_lost
    }

    /// Ends the leader's flush: answers all that share it, and lets the next one begin.
    pub(super) fn end_flush(&mut self, slot: u16, errno: Option<i32>) {
        if let Some(errno) = errno {
            let parts = &self.vring.parts;
            if self.port.fail_flushes(errno) {
                ErrorLog::flush_failed(parts.health.name(), Some(parts.index), errno);
            }
        }
        self.flushes.leader = None;
        let is_lost = self.port.flush_failure().is_some();
        if is_lost {
            let Flushes { shared, next, .. } = &mut self.flushes;
            shared.append(next);
        }
        let mut ended = Some(slot);
        while let Some(slot) = ended {
            match is_lost {
                true => self.fail_for_flush(slot),
                false => self.finish(slot, Status::Ok),
            }
            ended = self.flushes.shared.pop();
        }
        if let Some(next) = self.flushes.next.pop() {
            self.in_flight.slab.ready.push_front(next);
        }
    }
}
