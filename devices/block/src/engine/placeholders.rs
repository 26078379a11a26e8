//! Placeholder requests of a queue: see [`crate::placeholder`].
//!
//! A request whose first sector is a placeholder is inspected in steps as long as those of a write,
//! and each is charged as one: it costs about as much, and others have their turn in between. The
//! request is offered to the handler when all of it was inspected. From then on it waits with its
//! slot and nothing else, like an operation with the disk. A request that turns out to be ordinary
//! begins at once, and pays like any other; its charge for earlier inspection is lost.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::io::DiskDone;
use guest_abi::pipe::{BLOCK_BYTES, READ_SKEW_BYTES};
use queue::Seg;

use crate::cost;
use crate::in_flight::{InFlight, IssuedOp};
use crate::placeholder::{
    Answers, PlaceholderConfig, PlaceholderHead, PlaceholderOp, PlaceholderRequest,
    are_placeholders,
};
use crate::port_state::PortState;
use crate::request::HEADER_LEN_BYTES;
use crate::slab::{JobKind, Slot};

/// Placeholder requests of one queue; see [`crate::BlockPort::set_placeholder_handler`].
pub(crate) struct PlaceholderQueue {
    config: Arc<PlaceholderConfig>,
    /// Answers to the queue's requests, also from the handler of an earlier `config`.
    answers: Arc<Answers>,
    /// Requests that a handler has taken and not answered.
    parked: usize,
}

impl PlaceholderQueue {
    /// A queue whose placeholder requests are offered to the handler of `config`.
    pub fn new(config: Arc<PlaceholderConfig>, answers: Arc<Answers>) -> Self {
        Self { config, answers, parked: 0 }
    }

    /// Exchanges the handler. Returns the former one.
    pub fn replace_config(&mut self, config: Arc<PlaceholderConfig>) -> Arc<PlaceholderConfig> {
        std::mem::replace(&mut self.config, config)
    }

    /// Descriptor that answers make readable.
    pub fn event_fd(&self) -> RawFd {
        self.answers.event.as_raw_fd()
    }

    /// Number of requests that a handler has taken and not answered.
    #[cfg(test)]
    pub fn parked(&self) -> usize {
        self.parked
    }

    /// Whether the handler expects placeholders. Asked once for each batch, after the batch was
    /// taken from the ring: a tag that the handler knew before the guest wrote it is known then.
    pub fn has_known(&self) -> bool {
        self.config.handler.has_any()
    }

    /// Inspects the first sector of a read or write that begins, and notes its head if it is a
    /// placeholder.
    pub fn inspect_head(&self, in_flight: &mut InFlight, slot: u16) {
        let s = &mut in_flight.slab.slots[usize::from(slot)];
        let range = s.job.range;
        let (segs, skip) = data(s);
        // See "Old memory" and "Two ways to one file".
        let is_fit = match s.job.kind {
            JobKind::Read => {
                let is_whole = range.len.is_multiple_of(BLOCK_BYTES as u64);
                is_whole && begins_in_page(segs) == READ_SKEW_BYTES
            }
            _ => (range.offset | range.len).is_multiple_of(self.config.align_bytes),
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
    pub fn inspect_next_part(
        &mut self,
        in_flight: &mut InFlight,
        port: &PortState,
        slot: u16,
    ) -> Option<IssuedOp> {
        let step_len_bytes = in_flight.step_len_bytes;
        let s = &mut in_flight.slab.slots[usize::from(slot)];
        let longest = cost::max_step_len_bytes(&s.job, &port.demands, step_len_bytes);
        let left = s.job.range.len - s.inspected_bytes;
        let len = left.min(longest);
        let (segs, skip) = data(s);
        let goes_on = are_placeholders(segs, skip, &s.placeholder_head, s.inspected_bytes, len);
        s.inspected_bytes += len;
        if !goes_on || (len == left && !self.offer_to_handler(s, port, slot)) {
            s.job.may_be_placeholder = false;
            return None;
        }
        s.job.may_be_placeholder = len < left;
        let cost = cost::step_charge_bytes(&s.job, len, port.demands.within_call());
        let paid = s.job.paid_bytes.min(cost);
        s.job.paid_bytes -= paid;
        in_flight.slab.ready.pop_front();
        if len < left {
            in_flight.slab.ready.push_back(slot);
        }
        Some(IssuedOp { bytes: len, due: cost - paid })
    }

    /// Offers a request to the handler; true when it was taken.
    fn offer_to_handler(&mut self, s: &mut Slot, port: &PortState, slot: u16) -> bool {
        let range = (s.job.range.offset, s.job.range.len);
        let op = match s.job.kind {
            JobKind::Read => PlaceholderOp::Read,
            _ => PlaceholderOp::Write { sync: !port.writeback.load(Ordering::Relaxed) },
        };
        // A read has nothing to make durable.
        s.is_durable = op != PlaceholderOp::Write { sync: false };
        let target = Arc::clone(&self.config.target);
        let own = (Arc::clone(&self.answers), slot);
        let placed = PlaceholderRequest::new(s.placeholder_head, range, op, target, own);
        match self.config.handler.take(placed) {
            Some(back) if back.is_of(&self.answers, slot) => {
                back.forget();
                false
            }
            // A handler that returns another request has a bug: that request fails when it is
            // dropped.
            _ => {
                s.job.is_parked = true;
                self.parked += 1;
                true
            }
        }
    }

    /// Takes the answers that have come into `done`. Returns their number.
    pub fn reap(&self, done: &mut Vec<DiskDone>) -> usize {
        if self.parked == 0 {
            return 0;
        }
        done.clear();
        self.answers.reap(done);
        done.len()
    }

    /// Takes a request back that the handler has answered. False when it has not got it.
    pub fn take_back(&mut self, s: &mut Slot) -> bool {
        let was_parked = std::mem::take(&mut s.job.is_parked);
        self.parked -= usize::from(was_parked);
        was_parked
    }

    /// Switches the event of answers, before a sleep and after it.
    pub fn set_wakeups(&self, on: bool) {
        self.answers.set_wakeups(on);
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
