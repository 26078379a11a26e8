//! Outcomes for frames: sent, dropped, or to be held for a receiver without buffers.

use base::counter::DropReason;

use crate::fdb::PortId;

/// Receive queue that a sender waits for.
pub(crate) type Awaited = (PortId, u16);

/// Fate of a frame at a receiver without buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WhenFull {
    /// The frame may wait: see [`crate::backpressure`].
    Hold,
    /// The frame is dropped, and counted at the receiver too.
    Drop,
    /// The frame is kept by its sender: see [`crate::backlog`].
    Keep,
}

/// Outcome for a frame that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Sent, to one receiver at least, or kept for it.
    Sent,
    /// Ended by a hook.
    Consumed,
    /// The receiver has no buffers: keep the frame.
    Hold(Awaited),
    /// The frame was not sent.
    Dropped(DropReason),
}
