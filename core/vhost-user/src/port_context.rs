//! State that all sessions of a port share: its device, health, store and stop event.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use base::counter::QueueStats;
use base::event::Event;
use queue::health::PortHealth;

use crate::device::Device;
use crate::session_store::SessionStore;
use crate::share::VmShare;
use crate::wire;

/// A port as its sessions see it; they come one after the other.
pub(crate) struct PortContext {
    pub name: String,
    pub device: Arc<dyn Device>,
    pub stats: Vec<Arc<QueueStats>>,
    pub session_store: Arc<dyn SessionStore>,
    pub health: Arc<PortHealth>,
    /// Budgets shared with the other ports of the VM. They outlive a session: a front end that
    /// connects again gets no fresh ones.
    pub share: VmShare,
    /// Rung when the port breaks.
    pub alarm: Event,
    /// Readable once the port shall stop.
    pub stop: Event,
    /// Set before `stop` is rung, so that a flood of messages cannot hide it.
    pub stopping: AtomicBool,
    /// Number of times that a front end was made to wait.
    pub slowed: AtomicU64,
}

impl PortContext {
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Waits if the VM's front ends are over their budget, at most until the stop. Called after a
    /// message with `fds` descriptors, or after as much work.
    pub fn keep_pace(&self, fds: usize) {
        let Some(wait) = self.share.pace.note(fds) else { return };
        self.slowed.fetch_add(1, Ordering::Relaxed);
        // A poll that fails waits less.
        let _ = wire::wait_for(&[self.stop.as_fd()], Some(wait));
    }
}
