//! Outcomes for frames: sent, dropped, or to be held for a receiver without buffers.

use base::counter::DropReason;

use crate::fdb::PortId;

/// Receive queue that a sender waits for.
pub(crate) type Awaited = (PortId, u16);

/// The receiver that a sender is held for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    pub on: Awaited,
    /// Time since when it waits for the receiver's window; none: it waits for buffers.
    pub window_since_ns: Option<u64>,
}

/// The sender that has its turn, and how long it may wait.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sender {
    pub port: PortId,
    /// Number of the round.
    pub round: u64,
    /// Time of the round.
    pub now_ns: u64,
    /// How long a receiver is waited for in all; 0: not at all.
    pub hold_ns: u64,
    /// The sender has waited for a window for so long that its first frame waits no more.
    pub is_late: bool,
}

impl Sender {
    /// Whether it waits for windows.
    #[inline]
    pub fn may_wait(&self) -> bool {
        self.hold_ns > 0 && !self.is_late
    }
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
    Hold(Held),
    /// The frame was not sent.
    Dropped(DropReason),
}
