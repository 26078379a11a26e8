//! Checks of images under way: how many at a time, and who waits for them.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use base::sync::lock;
use block::CheckProgress;
use config::{DiskFormat, PortConfig};

/// Most checks at a time: more of them would only share the storage, and each takes a byte of
/// memory for a cluster of its image.
pub const MAX_CHECKS: usize = 4;

/// The progress of the check that a port's image needs; none if it needs none.
pub fn needed(config: &PortConfig) -> Option<CheckProgress> {
    let PortConfig::Disk(disk) = config else { return None };
    let DiskFormat::Qcow2 { path, .. } = &disk.format else { return None };
    let needs_check = !disk.read_only && block::qcow2::needs_check(path);
    needs_check.then(CheckProgress::default)
}

/// Checks under way.
#[derive(Default)]
pub struct Checks {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
pub struct State {
    running: usize,
    /// Ports of the daemon's start whose check is not over.
    pub left_of_start: usize,
    is_stopped: bool,
}

impl State {
    fn is_starting(&mut self) -> bool {
        self.left_of_start > 0 && !self.is_stopped
    }
}

/// Permit for one of [`MAX_CHECKS`] checks.
pub struct Permit<'a>(&'a Checks);

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.0.change(|state| state.running -= 1);
    }
}

impl Checks {
    pub fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut lock(&self.state));
        self.changed.notify_all();
    }

    /// Waits for a permit; at the end of the daemon for nothing.
    pub fn permit(&self) -> Permit<'_> {
        let is_full = |state: &mut State| state.running >= MAX_CHECKS && !state.is_stopped;
        let state = self.changed.wait_while(lock(&self.state), is_full);
        state.unwrap_or_else(PoisonError::into_inner).running += 1;
        Permit(self)
    }

    /// Waits for the ports of the start, for `limit` at most.
    pub fn wait_for_start_until(&self, limit: Duration) {
        // Whether they came in time is seen in the list.
        let _ = self.changed.wait_timeout_while(lock(&self.state), limit, State::is_starting);
    }

    /// Waits for the ports of the start. False at the end of the daemon.
    pub fn wait_for_start(&self) -> bool {
        let state = self.changed.wait_while(lock(&self.state), State::is_starting);
        !state.unwrap_or_else(PoisonError::into_inner).is_stopped
    }

    /// Ends all waits at the end of the daemon.
    pub fn stop(&self) {
        self.change(|state| state.is_stopped = true);
    }
}
