//! Modules of VMs, as they are listed.

use serde::Serialize;

use super::latency::LatencyStatus;

/// A module of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ModuleStatus {
    /// VM.
    pub vm: String,
    /// Module.
    pub module: String,
    /// State of the module.
    pub state: ModuleState,
    /// Reason of a state that is not well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Counters of the module; while it does not answer, the last ones that it sent.
    #[serde(flatten)]
    pub counts: ModuleCounts,
    /// Times of requests, from arrival to reply; left out if the module never sent them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencyStatus>,
}

/// State of a module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ModuleState {
    /// The code is compiled, the process begins, or the instance is being replaced.
    Starting,
    /// The module serves.
    Running,
    /// A call, or a sync of the files, takes longer than the daemon waits for counters.
    Busy,
    /// The process does not answer.
    Silent,
    /// The module cannot serve.
    Failed,
    /// The module was ended, until it is resumed.
    Drained,
}

impl ModuleState {
    /// The name in listings.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Busy => "busy",
            Self::Silent => "silent",
            Self::Failed => "failed",
            Self::Drained => "drained",
        }
    }
}

/// Writes a copy of a module's files. The end of the copy says whether it is whole.
pub type CopyWork = Box<dyn FnOnce(&mut dyn std::io::Write) + Send>;

/// A copy that was put in place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Restored {
    /// VM.
    pub vm: String,
    /// Module.
    pub module: String,
    /// VM that the copy was taken of.
    pub of_vm: String,
    /// SHA-256 of the WebAssembly that served the files when the copy was taken.
    pub sha256: String,
    /// Time at which the copy was begun, in seconds since 1970.
    pub begun_s: u64,
    /// Number of files.
    pub files: u64,
    /// Sum of the lengths of the files.
    pub files_bytes: u64,
}

/// Counters of a module since its process began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ModuleCounts {
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
    /// Bytes written to its files.
    pub written_bytes: u64,
    /// Bytes read from its files.
    pub read_bytes: u64,
    /// Syncs of its files.
    pub syncs: u64,
    /// Median of the time from a request's arrival to its reply.
    pub latency_p50_ns: u64,
    /// 99th percentile of that time.
    pub latency_p99_ns: u64,
}
