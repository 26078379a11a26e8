//! Counters of a module.

use base::histogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::folder::Counts;

/// Counters as the module's thread keeps them.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    pub stats: ModuleStats,
    pub latency: Histogram,
}

/// Counters of a module since its process began.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ModuleStats {
    /// Name of the module.
    pub name: String,
    /// State: `running`, or why not.
    pub state: String,
    /// Number of clients, connected or not.
    pub clients: u64,
    /// Number of connections that go by a ring.
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
    /// Time that it had to rest, having computed more than its share of a core.
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
    /// Bytes of its memory.
    pub memory_bytes: u64,
    /// Bytes of its files.
    pub stored_bytes: u64,
    /// Counters of its files.
    pub files: Counts,
    /// Median of the time from a request's coming to its reply.
    pub latency_p50_ns: u64,
    /// 99th percentile of that time.
    pub latency_p99_ns: u64,
    /// Histogram of that time: smallest value of a bucket, and count (`Snapshot::coarse`).
    pub latency: Vec<(u64, u64)>,
    /// Sum of that time.
    pub latency_sum_ns: u64,
}
