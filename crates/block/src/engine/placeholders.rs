//! Placeholder requests of a queue: see [`crate::placeholder`].
//!
//! A request whose first sector is a placeholder is inspected in steps as long as those of a write,
//! and each is charged as one: it costs about as much, and others have their turn in between. The
//! request is offered to the handler when all of it was inspected. From then on it waits with its
//! slot and nothing else, like an operation with the disk. A request that turns out to be ordinary
//! begins at once, and pays like any other; its charge for earlier inspection is lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidecore::Watcher;

use guest_abi::pipe::{BLOCK_BYTES, READ_SKEW_BYTES};
use queue::Seg;

use super::QueueEngine;
use crate::cost;
use crate::in_flight::IssuedOp;
use crate::placeholder::{
    Answers, PlaceholderConfig, PlaceholderHead, PlaceholderOp, PlaceholderRequest,
    are_placeholders,
};
use crate::request::{HEADER_LEN_BYTES, Status};
use crate::slab::{JobKind, Slot};

/// Placeholder requests of one queue; see [`crate::BlockPort::set_placeholder_handler`].
pub(crate) struct PlaceholderQueue {
    pub config: Arc<PlaceholderConfig>,
    /// Answers to the queue's requests, also from the handler of an earlier `config`.
    pub answers: Arc<Answers>,
    /// Requests that a handler has taken and not answered.
    pub parked: usize,
}

impl QueueEngine {
    /// Offers placeholder requests to a handler from now on. Returns the former config and the
    /// answers that are not needed, to be dropped outside of the sidecore.
    pub fn set_placeholders(
        &mut self,
        config: Arc<PlaceholderConfig>,
        answers: Arc<Answers>,
        watcher: Option<&Watcher<'_>>,
    ) -> std::io::Result<Option<(Arc<PlaceholderConfig>, Arc<Answers>)>> {
        if let Some(queue) = &mut self.placeholders {
            return Ok(Some((std::mem::replace(&mut queue.config, config), answers)));
        }
        if let Some(watcher) = watcher {
            watcher.watch(std::os::fd::AsRawFd::as_raw_fd(&answers.event))?;
        }
        self.placeholders = Some(PlaceholderQueue { config, answers, parked: 0 });
        Ok(None)
    }

    /// Whether the handler expects placeholders. Asked once for each batch, after the batch was
    /// taken from the ring: a tag that the handler knew before the guest wrote it is known then.
    pub(super) fn has_known_placeholders(&self) -> bool {
        self.placeholders.as_ref().is_some_and(|p| p.config.handler.has_any())
    }

    /// Inspects the first sector of a read or write that begins, and notes its head if it is a
    /// placeholder.
    pub(super) fn inspect_head(&mut self, slot: u16) {
        let Some(queue) = &self.placeholders else { return };
        let s = &mut self.in_flight.slab.slots[usize::from(slot)];
        let range = s.job.range;
        let (segs, skip) = data(s);
        // See "Old memory" and "Two ways to one file".
        let is_fit = match s.job.kind {
            JobKind::Read => {
                let is_whole = range.len.is_multiple_of(BLOCK_BYTES as u64);
                is_whole && begins_in_page(segs) == READ_SKEW_BYTES
            }
            _ => (range.offset | range.len).is_multiple_of(queue.config.align_bytes),
        };
        if !is_fit {
            return;
        }
        let head = PlaceholderHead::read_first(segs, skip, range.len);
        if let Some(head) = head {
            (s.placeholder_head, s.inspected_bytes) = (head, 0);
            s.job.may_be_placeholder = true;
        }
    }

    /// Inspects the next part of a request. `None`: it is an ordinary one. Else it has gone from
    /// the front of the requests that wait for the disk: to their end, or to the handler.
    pub(super) fn inspect_next_part(&mut self, slot: u16) -> Option<IssuedOp> {
        let longest = {
            let job = &self.in_flight.slab.slots[usize::from(slot)].job;
            cost::max_step_len_bytes(job, &self.port.demands, self.in_flight.step_len_bytes)
        };
        let s = &mut self.in_flight.slab.slots[usize::from(slot)];
        let left = s.job.range.len - s.inspected_bytes;
        let len = left.min(longest);
        let (segs, skip) = data(s);
        let goes_on = are_placeholders(segs, skip, &s.placeholder_head, s.inspected_bytes, len);
        s.inspected_bytes += len;
        if !goes_on || (len == left && !self.offer_to_handler(slot)) {
            self.in_flight.slab.slots[usize::from(slot)].job.may_be_placeholder = false;
            return None;
        }
        self.in_flight.slab.ready.pop_front();
        if len < left {
            self.in_flight.slab.ready.push_back(slot);
        }
        let job = &mut self.in_flight.slab.slots[usize::from(slot)].job;
        job.may_be_placeholder = len < left;
        let cost = cost::step_charge_bytes(job, len, self.port.demands.within_call());
        let paid = job.paid_bytes.min(cost);
        job.paid_bytes -= paid;
        Some(IssuedOp { bytes: len, due: cost - paid })
    }

    /// Offers a request to the handler; true when it was taken.
    fn offer_to_handler(&mut self, slot: u16) -> bool {
        let Some(queue) = &mut self.placeholders else { return false };
        let s = &mut self.in_flight.slab.slots[usize::from(slot)];
        let range = (s.job.range.offset, s.job.range.len);
        let op = match s.job.kind {
            JobKind::Read => PlaceholderOp::Read,
            _ => PlaceholderOp::Write { sync: !self.port.writeback.load(Ordering::Relaxed) },
        };
        // A read has nothing to make durable.
        s.is_durable = op != PlaceholderOp::Write { sync: false };
        let target = Arc::clone(&queue.config.target);
        let own = (Arc::clone(&queue.answers), slot);
        let placed = PlaceholderRequest::new(s.placeholder_head, range, op, target, own);
        match queue.config.handler.take(placed) {
            Some(back) if back.is_of(&queue.answers, slot) => {
                back.forget();
                false
            }
            // A handler that returns another request has a bug: that request fails when it is
            // dropped.
            _ => {
                s.job.is_parked = true;
                queue.parked += 1;
                true
            }
        }
    }

    /// Takes in the answers that have come. Returns their number.
    pub(super) fn collect_answers(&mut self) -> usize {
        let Some(queue) = self.placeholders.as_ref().filter(|p| p.parked > 0) else { return 0 };
        self.done.clear();
        queue.answers.reap(&mut self.done);
        for k in 0..self.done.len() {
            let done = self.done[k];
            self.end_placeholder(done.token as u16, done.result.err());
        }
        self.done.len()
    }

    fn end_placeholder(&mut self, slot: u16, errno: Option<i32>) {
        let s = &mut self.in_flight.slab.slots[usize::from(slot)];
        if !std::mem::take(&mut s.job.is_parked) {
            return;
        }
        let is_durable = s.is_durable;
        if let Some(queue) = &mut self.placeholders {
            queue.parked -= 1;
        }
        if let Some(errno) = errno {
            return self.report(slot, errno);
        }
        if self.needs_failed_flush(slot) {
            return self.fail_for_flush(slot);
        }
        self.stats.placeholders.add(1);
        if !is_durable && !self.port.writeback.load(Ordering::Relaxed) {
            // The cache was switched off meanwhile: flush, as after a write of the disk.
            self.in_flight.slab.slots[usize::from(slot)].job.is_flushing = true;
            return self.in_flight.slab.ready.push_front(slot);
        }
        self.finish(slot, Status::Ok);
    }

    /// Switches the events of the disk and of answers, before a sleep and after it.
    pub(super) fn set_wakeups(&mut self, on: bool) {
        self.in_flight.disk.set_wakeups(on);
        if let Some(queue) = &self.placeholders {
            queue.answers.set_wakeups(on);
        }
    }
}

/// Segments with a request's data, and the number of bytes in front of it.
fn data(slot: &Slot) -> (&[Seg], usize) {
    match slot.job.kind {
        JobKind::Read => (slot.chain.chain().writable, 0),
        _ => (slot.chain.chain().readable, HEADER_LEN_BYTES),
    }
}

/// Offset of the first byte in its page of the guest. Regions of its memory are mapped by pages.
fn begins_in_page(segs: &[Seg]) -> usize {
    queue::seg::as_iovecs(segs).first().map_or(0, |first| first.iov_base as usize % BLOCK_BYTES)
}
