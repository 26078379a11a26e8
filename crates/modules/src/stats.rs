//! What a module did, for whoever asks.

use base::histogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::folder::Counts;

/// Counted by the module's thread.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    pub told: ModuleStats,
    pub latency: Histogram,
}

/// What a module did since its process began.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ModuleStats {
    /// Its name.
    pub name: String,
    /// `running`, or why not.
    pub state: String,
    /// Clients, connected or not.
    pub clients: u64,
    /// Of their connections, those that go by a ring.
    pub rings: u64,
    /// Bells that were rung for clients that slept.
    pub bells: u64,
    /// Requests that it got.
    pub requests: u64,
    /// Requests that were sent again, and answered without it.
    pub again: u64,
    /// Replies that failed in the host.
    pub failed: u64,
    /// Calls of the module; each takes what came meanwhile.
    pub calls: u64,
    /// How long it had to rest, having computed more than its share of a core.
    pub rested_ns: u64,
    /// Instances that were stopped.
    pub stopped: u64,
    /// Connections that were ended for what they sent.
    pub bad: u64,
    /// Connections that were ended, and replies that were refused, for want of room.
    pub crowded: u64,
    /// Starts that failed since one succeeded.
    pub failed_starts: u64,
    /// Bytes of requests, with their headers.
    pub received_bytes: u64,
    /// Bytes of replies.
    pub sent_bytes: u64,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its files.
    pub stored_bytes: u64,
    /// What it did with them.
    pub files: Counts,
    /// From a request's coming to its reply, in nanoseconds: of half of them less than this.
    pub latency_p50_ns: u64,
    /// The same of 99 in a hundred.
    pub latency_p99_ns: u64,
    /// All of them: smallest value of a bucket, and how many are in it (`Snapshot::coarse`).
    pub latency: Vec<(u64, u64)>,
    /// Their sum.
    pub latency_sum_ns: u64,
}
