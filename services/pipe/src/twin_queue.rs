//! Segments for the twins of a port, queued for the TAP that leads to them.

use std::os::fd::RawFd;
use std::sync::Arc;

use base::counter::{DropReason, QueueStats};
use base::io::{IoSlice, Wire};
use base::wire_queue::WireQueue;
use frame::{Body, Frame, MAX_SLICES};

/// Segments that wait for the TAP's next flush. With more the first are handed on earlier.
const SLOTS: usize = 64;

/// Bytes of a segment that are copied, so that it can wait until others are flushed with it: an
/// Ethernet frame with its virtio-net header. Copying these costs a tenth of the system call that
/// it saves. Longer ones, and those in guests' memory, are lent for as long as their sender is busy
/// with its batch.
const SLOT_LEN: usize = 1536;

/// Queue of segments for the twins of a port, with their TAP.
pub(crate) struct TwinQueue {
    queue: WireQueue,
    /// Copies that the wire reads from until it is flushed.
    slots: Box<[[u8; SLOT_LEN]]>,
    used: usize,
    /// A queued frame lies in memory of others.
    is_lent: bool,
}

impl TwinQueue {
    pub fn new(wire: Box<dyn Wire>, stats: Arc<QueueStats>) -> Self {
        let slots = vec![[0; SLOT_LEN]; SLOTS].into_boxed_slice();
        let queue = WireQueue::new(wire, stats, MAX_SLICES);
        Self { queue, slots, used: 0, is_lent: false }
    }

    /// Counters of the TAP.
    pub fn stats(&self) -> &Arc<QueueStats> {
        &self.queue.stats
    }

    /// Whether frames wait.
    pub fn has_queued(&self) -> bool {
        self.used > 0
    }

    /// Whether one of them lies in memory of others.
    pub fn is_lent(&self) -> bool {
        self.is_lent
    }

    /// Queues a frame for the twin.
    ///
    /// # Safety
    /// Its body stays valid until [`Self::flush`] when [`Self::is_lent`] afterwards.
    pub unsafe fn push(&mut self, frame: &Frame<'_>) {
        if self.used == SLOTS {
            self.flush();
        }
        let slot = &mut self.slots[self.used];
        let mut len = frame.head.len();
        slot[..len].copy_from_slice(frame.head);
        let copied = match frame.body {
            Body::Ours(bytes) if len + bytes.len() <= SLOT_LEN => {
                slot[len..len + bytes.len()].copy_from_slice(bytes);
                len += bytes.len();
                true
            }
            _ => frame.body.is_empty(),
        };
        let pieces = self.queue.pieces();
        pieces.push(IoSlice { iov_base: slot.as_mut_ptr().cast(), iov_len: len });
        if !copied {
            if !frame.body.slices(pieces) {
                return self.queue.stats.drop_one(DropReason::Malformed);
            }
            self.is_lent = true;
        }
        self.used += 1;
        // SAFETY: the slot is not used again before `flush`, and stays where it is: it is boxed.
        // The rest is the caller's promise.
        if let Err(reason) = unsafe { self.queue.send() } {
            self.queue.stats.drop_one(reason);
        }
    }

    /// Hands everything to the twins, in at most one system call.
    pub fn flush(&mut self) {
        self.is_lent = false;
        self.used = 0;
        self.queue.flush();
    }

    /// Returns the oldest frame of a twin's; it stays until [`Self::release`].
    pub fn receive(&mut self) -> Option<&[u8]> {
        self.queue.wire.receive()
    }

    /// Gives that frame's buffer back.
    pub fn release(&mut self) {
        self.queue.wire.release();
    }

    /// Lets the TAP have its receive buffers back. False: it could not take them.
    pub fn refill(&mut self) -> bool {
        self.queue.wire.refill().is_ok()
    }

    /// The TAP's descriptor.
    pub fn event_fd(&self) -> Option<RawFd> {
        self.queue.wire.event_fd()
    }
}
