//! Hook of pipes on a network port: the switch shows it every frame of its guest.
//!
//! The [`Tracker`] knows the connection of a frame. A twin's share of it is queued for the twins'
//! TAP, and frames that twins send leave as the guest's.

use std::os::fd::RawFd;
use std::sync::Arc;

use base::counter::{DropReason, QueueStats};
use base::io::Wire;
use flow::{
    BareSegment, FlowWatch, GuestOutcome, Journal, MAX_RESETS, PeerOutcome, Recipient, Tracker,
};
use frame::{Allowed, Frame, FrameBuffer, Head, HeadBytes};
use net::hook::MAX_OUTBOX;
use net::{FromGuest, Outbox, OutboxTo, Polled, PortHook, Queued, ToGuest};

use crate::twin_queue::TwinQueue;

const _: () = assert!(MAX_RESETS <= MAX_OUTBOX);

/// Pipes' hook on a port: its connections, and the way to their twins.
pub struct PipeHook {
    tracker: Tracker,
    twins: TwinQueue,
}

impl std::fmt::Debug for PipeHook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PipeHook").finish_non_exhaustive()
    }
}

impl PipeHook {
    /// Makes a hook that tracks connections which begin from now on, and shifts those in the
    /// journal as they were. `wire` is the TAP of the VM's twins, `watch` takes the events of all
    /// connections.
    pub fn new(
        watch: Arc<dyn FlowWatch>,
        wire: Box<dyn Wire>,
        stats: Arc<QueueStats>,
        journal: Option<Journal>,
    ) -> Self {
        Self { tracker: Tracker::new(watch, journal), twins: TwinQueue::new(wire, stats) }
    }

    /// Runs `f` with the connections, and has the switch send the segments that it leaves.
    pub(crate) fn with_tracker<R>(
        &mut self,
        outbox: &mut Outbox,
        f: impl FnOnce(&mut Tracker, &mut Vec<BareSegment>) -> R,
    ) -> R {
        let mut notices = Vec::new();
        let answer = f(&mut self.tracker, &mut notices);
        notices.iter().for_each(|notice| push(outbox, notice));
        answer
    }

    /// Kind of frames that wait for a flush.
    fn queued(&self) -> Queued {
        if self.twins.is_lent() {
            Queued::Lent
        } else if self.twins.has_queued() || self.tracker.has_news() {
            Queued::Own
        } else {
            Queued::Nothing
        }
    }
}

impl PortHook for PipeHook {
    fn from_guest(&mut self, head: &mut Head, reply: &mut HeadBytes, now_ns: u64) -> FromGuest {
        match self.tracker.guest_sends(head, reply, now_ns) {
            GuestOutcome::Pass => FromGuest::Pass,
            GuestOutcome::Consume => FromGuest::Consume,
            GuestOutcome::Reply(len) => FromGuest::Reply(len),
            GuestOutcome::ReplyAndPass(len) => FromGuest::ReplyAndPass(len),
        }
    }

    unsafe fn to_guest(
        &mut self,
        frame: &Frame<'_>,
        head: &mut HeadBytes,
        buffer: &mut FrameBuffer,
        now_ns: u64,
    ) -> ToGuest {
        let Self { tracker, twins } = self;
        // SAFETY: the caller's promise, as `queued` says what is lent.
        let push = |share: &Frame<'_>| unsafe { twins.push(share) };
        let PeerOutcome { guest, wants_receipt, may_miss } =
            tracker.peer_sends(frame, head, buffer, now_ns, push);
        if self.tracker.is_full() {
            self.flush();
        }
        ToGuest { guest, wants_receipt, may_miss, queued: self.queued() }
    }

    fn delivered(&mut self, frame: &Frame<'_>) {
        self.tracker.delivered(frame);
    }

    fn poll(&mut self, head: &mut Head) -> Polled<'_> {
        let Some(bytes) = self.twins.receive() else { return Polled::Nothing };
        let loaded = head.load_slice(bytes, Allowed::ALL);
        if let Err(reason) = loaded {
            self.twins.stats().drop_one(reason);
        }
        let start = head.bytes().len();
        // Neighbour messages and whatever else a fresh interface has to say: not the guest's.
        if loaded.is_err() || !self.tracker.twin_sends(head) {
            self.twins.release();
            return Polled::Consumed;
        }
        // The same frame again: it was borrowed only until the tracker was asked.
        match self.twins.receive() {
            Some(bytes) => Polled::Frame(&bytes[start..]),
            None => Polled::Nothing,
        }
    }

    fn polled(&mut self, sent: Result<(), DropReason>, len_bytes: usize) {
        let stats = self.twins.stats();
        match sent {
            Ok(()) => {
                stats.requests.add(1);
                stats.bytes.add(len_bytes as u64);
            }
            Err(reason) => stats.drop_one(reason),
        }
        self.twins.release();
    }

    fn refill(&mut self) -> bool {
        self.twins.refill()
    }

    fn arm(&mut self) -> bool {
        self.twins.receive().is_some()
    }

    fn flush(&mut self) {
        self.twins.flush();
        self.tracker.tell();
    }

    fn notices(&mut self, outbox: &mut Outbox) {
        self.tracker.take_resets().for_each(|notice| push(outbox, &notice));
    }

    fn event_fd(&self) -> Option<RawFd> {
        self.twins.event_fd()
    }
}

/// Has the switch send a segment of the tracker's.
fn push(outbox: &mut Outbox, notice: &BareSegment) {
    let to = match notice.to {
        Recipient::Addressee => OutboxTo::Addressee,
        Recipient::Guest => OutboxTo::Guest,
    };
    outbox.push(notice.bytes(), to);
}

#[cfg(test)]
mod tests;
