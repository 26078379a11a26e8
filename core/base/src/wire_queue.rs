//! Frames on their way to a wire: queued, flushed together, and counted where it refuses them.

use std::io;
use std::sync::Arc;

use crate::counter::{DropReason, QueueStats};
use crate::io::{IoSlice, Wire};

/// Queue of frames for a wire.
pub struct WireQueue {
    /// The wire; frames for it go through [`WireQueue::send`].
    pub wire: Box<dyn Wire>,
    /// Counters: [`DropReason::WireError`] for frames that the wire refuses at a flush.
    pub stats: Arc<QueueStats>,
    pieces: Vec<IoSlice>,
    is_unflushed: bool,
}

// SAFETY: addresses in `pieces` are used by the `send` that follows, and not later; the rest is
// `Send` by itself.
unsafe impl Send for WireQueue {}

impl std::fmt::Debug for WireQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WireQueue")
            .field("is_unflushed", &self.is_unflushed)
            .finish_non_exhaustive()
    }
}

impl WireQueue {
    /// An empty queue, for frames of up to `max_pieces`.
    pub fn new(wire: Box<dyn Wire>, stats: Arc<QueueStats>, max_pieces: usize) -> Self {
        Self { wire, stats, pieces: Vec::with_capacity(max_pieces), is_unflushed: false }
    }

    /// Room for the pieces of the next frame, empty.
    #[inline]
    pub fn pieces(&mut self) -> &mut Vec<IoSlice> {
        self.pieces.clear();
        &mut self.pieces
    }

    /// Queues the frame that lies in [`WireQueue::pieces`]; a full wire is flushed first.
    ///
    /// # Safety
    /// The pieces stay valid until [`WireQueue::flush`].
    #[inline]
    pub unsafe fn send(&mut self) -> Result<(), DropReason> {
        self.is_unflushed = true;
        // SAFETY: the caller's promise.
        let mut sent = unsafe { self.wire.send(&self.pieces) };
        if matches!(&sent, Err(e) if e.kind() == io::ErrorKind::WouldBlock) {
            self.flush();
            self.is_unflushed = true;
            // SAFETY: as above.
            sent = unsafe { self.wire.send(&self.pieces) };
        }
        sent.map_err(|_| DropReason::WireError)
    }

    /// Sends what is queued, in at most one system call; afterwards no frame is in use.
    #[inline]
    pub fn flush(&mut self) {
        if !std::mem::take(&mut self.is_unflushed) {
            return;
        }
        let refused = match self.wire.flush() {
            Ok(refused) => u64::from(refused),
            // Whatever was queued is gone; one count says that something was.
            Err(_) => 1,
        };
        self.stats.drops[DropReason::WireError as usize].add(refused);
    }
}
