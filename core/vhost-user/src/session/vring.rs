//! Settings of one queue, as the front end gave them.

use base::doorbell::Doorbell;
use queue::{Layout, RingAddrs};

use crate::codec::{VRING_F_LOG, VringAddr, feature};

/// Doorbell on which the driver announces requests.
#[derive(Debug, Default)]
pub(super) enum Kick {
    /// No kick since the last stop: the ring stays stopped.
    #[default]
    Unset,
    /// Set without a descriptor: the ring is polled.
    Polled,
    /// Eventfd that the front end gave.
    Event(Doorbell),
}

/// Addresses that a running queue was started with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RunningRing {
    pub addrs: RingAddrs,
    pub log_used_addr: Option<u64>,
}

/// Settings of one queue, and whether it runs.
#[derive(Debug, Default)]
pub(super) struct VringState {
    pub size: Option<u16>,
    pub addrs: Option<VringAddr>,
    /// Position as in `SET_VRING_BASE`, or where the queue stopped; none before either.
    pub base: Option<u32>,
    pub enabled: Option<bool>,
    pub kick: Kick,
    pub call: Option<Doorbell>,
    pub err: Option<Doorbell>,
    /// Set while the queue is on a sidecore.
    pub running: Option<RunningRing>,
    /// Whether a doorbell changed under the running queue, which must then be started anew.
    pub is_stale: bool,
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

    /// Guest address at which writes to the used ring are logged (`VHOST_VRING_F_LOG`).
    pub fn log_used_addr(&self) -> Option<u64> {
        self.addrs.filter(|a| a.flags & VRING_F_LOG != 0).map(|a| a.log)
    }

    /// Forgets all settings but the call and err doorbells (device reset).
    pub fn forget_ring(&mut self) {
        self.size = None;
        self.addrs = None;
        self.base = None;
        self.enabled = None;
        self.kick = Kick::Unset;
    }
}

/// Ring format that these features ask for.
pub(super) fn layout(features: u64) -> Layout {
    if features & feature::RING_PACKED != 0 { Layout::Packed } else { Layout::Split }
}
