//! A queue's flushes: one at a time in the disk, shared by all requests that wait for one.
//!
//! The kernel tells an opening of a file of a write-back error once. Of two flushes at the same time
//! one would hear of it and the other succeed, and whichever is answered first decides what the guest
//! believes. So a queue has one flush in the disk. Requests that come meanwhile wait, and share the
//! next one: it begins after all that they want to be durable. (Kernels merge the flushes of a device
//! in the same way.) Queues do not share openings: see `raw.rs`.
//!
//! Once one failed, all fail: see [`PortState::flush_failure`](crate::port_state::PortState).

use std::sync::atomic::Ordering;

use super::QueueEngine;
use crate::error_log::ErrorLog;
use crate::request::Status;
use crate::slab::JobKind;

/// Who waits for which flush. Lists never grow beyond the queue's depth.
pub(super) struct Flushes {
    /// The slot whose flush is in the disk.
    leader: Option<u16>,
    /// Slots that this flush is for as well.
    shared: Vec<u16>,
    /// Slots that came while it was in the disk: for the next one.
    next: Vec<u16>,
}

impl Flushes {
    /// For a queue with up to `depth` requests in flight.
    pub fn new(depth: u16) -> Self {
        let list = || Vec::with_capacity(usize::from(depth));
        Self { leader: None, shared: list(), next: list() }
    }

    /// The disk has been given a flush for this slot: it is for all that wait.
    pub fn lead(&mut self, slot: u16) {
        self.leader = Some(slot);
        self.shared.append(&mut self.next);
    }

    /// Another slot's flush is in the disk.
    fn is_led_by_other(&self, slot: u16) -> bool {
        self.leader.is_some_and(|leader| leader != slot)
    }
}

impl QueueEngine {
    /// Whether a request needs a flush to succeed that cannot.
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

    /// Answers such a request. The log has told of it.
    #[cold]
    pub(super) fn fail_for_flush(&mut self, slot: u16) {
        self.stats.io_errors.add(1);
        self.finish(slot, Status::IoErr);
    }

    /// A request is to be flushed now: true when the disk need not be asked for it, since it shares
    /// another's flush or has failed.
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

    /// The leader's flush has ended: answers all that it was for, and has the next one begin.
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
