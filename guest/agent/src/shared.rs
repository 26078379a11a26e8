//! State of the agent that all requests share.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use guest_abi::Reason;

use crate::disks::Disks;
use crate::host::Host;
use crate::lease::Leases;
use crate::outcome::PipeOutcome;
use crate::refusals::Refusals;

/// State that all requests share.
#[derive(Debug)]
pub struct Shared {
    /// The daemon.
    pub host: Host,
    /// Disks of the VM.
    pub disks: Disks,
    /// Leases on files.
    pub leases: Leases,
    /// Counts of requests that the agent has refused itself.
    pub refusals: Arc<Refusals>,
    /// Whether the agent stops: pipes end then.
    pub stopping: AtomicBool,
}

impl Shared {
    /// Refuses a request without the daemon.
    pub fn refuse(&self, reason: Reason) -> PipeOutcome {
        self.refusals.count(reason);
        PipeOutcome::nothing(reason)
    }
}
