//! What the front end said of one queue.

use base::doorbell::Doorbell;
use queue::{Layout, RingAddrs};

use crate::codec::{VRING_F_LOG, VringAddr, feature};

/// The driver's doorbell.
#[derive(Debug, Default)]
pub(crate) enum Kick {
    /// Not set since the last stop: the ring stays stopped.
    #[default]
    Unset,
    /// The front end has none: the ring is polled.
    Polled,
    /// An eventfd.
    Event(Doorbell),
}

/// What a running queue was started with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Running {
    pub addrs: RingAddrs,
    pub log_used_addr: Option<u64>,
}

/// One queue.
#[derive(Debug, Default)]
pub(crate) struct VringState {
    pub size: Option<u16>,
    pub addrs: Option<VringAddr>,
    /// As in `SET_VRING_BASE`, or where it stopped; none while nobody said.
    pub base: Option<u32>,
    pub enabled: Option<bool>,
    pub kick: Kick,
    pub call: Option<Doorbell>,
    pub err: Option<Doorbell>,
    /// Set while it is on a sidecore.
    pub running: Option<Running>,
    /// A doorbell changed under the running queue: it must be started anew.
    pub stale: bool,
}

impl VringState {
    /// Whether the front end enabled it. Without protocol features, rings are enabled from the
    /// start.
    pub fn is_enabled(&self, features: u64) -> bool {
        self.enabled.unwrap_or(features & feature::PROTOCOL_FEATURES == 0)
    }

    /// Whether the front end wants it to run.
    pub fn is_wanted(&self, features: u64) -> bool {
        !matches!(self.kick, Kick::Unset) && self.is_enabled(features)
    }

    /// `VHOST_VRING_F_LOG`'s address.
    pub fn log_used_addr(&self) -> Option<u64> {
        self.addrs.filter(|a| a.flags & VRING_F_LOG != 0).map(|a| a.log)
    }

    /// Everything but the doorbells back to the beginning (device reset).
    pub fn forget_ring(&mut self) {
        self.size = None;
        self.addrs = None;
        self.base = None;
        self.enabled = None;
        self.kick = Kick::Unset;
    }
}

/// The ring format that was negotiated.
pub(crate) fn layout(features: u64) -> Layout {
    if features & feature::RING_PACKED != 0 { Layout::Packed } else { Layout::Split }
}
