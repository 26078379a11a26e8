//! Outcomes for frames: sent, dropped, or to be held for a receiver without buffers.

use base::counter::DropReason;

use crate::fdb::PortId;

/// Receive queue that a sender waits for.
pub(crate) type Awaited = (PortId, u16);

/// Name of a sender: a port, and one of its transmit queues, or [`HOOK_LANE`].
pub(crate) type SenderId = (PortId, u16);

/// Stands for a port's hook among its transmit queues.
pub(crate) const HOOK_LANE: u16 = u16::MAX;

/// The sender that has its turn, and how long it may wait.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sender {
    pub id: SenderId,
    /// Number of the round.
    pub round: u64,
    /// Time of the round.
    pub now_ns: u64,
    /// How long a receiver is waited for in all; 0: not at all.
    pub hold_ns: u64,
}

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
