//! Modules of VMs, as they are listed.

use serde::Serialize;

use super::LatencyStatus;

/// A module of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ModuleStatus {
    /// VM.
    pub vm: String,
    /// Module.
    pub module: String,
    /// How it stands.
    pub state: ModuleState,
    /// Why not well.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What it did. While it does not answer: what it said last.
    #[serde(flatten)]
    pub counts: ModuleCounts,
    /// How long requests took, from their coming to their replies; left out if it never said so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencyStatus>,
}

/// How a module stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ModuleState {
    /// Its code is compiled, its process begins, or its instance is being replaced.
    Starting,
    /// It serves.
    Running,
    /// It is in a call, or its files are made durable, for longer than counters are waited for.
    Busy,
    /// Its process does not answer.
    Silent,
    /// It cannot serve.
    Failed,
    /// It was ended, until it is resumed.
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

/// Writes a copy of a module's files. How it went stands in what it writes.
pub type CopyWork = Box<dyn FnOnce(&mut dyn std::io::Write) + Send>;

/// A copy that was put in place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Restored {
    /// VM.
    pub vm: String,
    /// Module.
    pub module: String,
    /// Which VM it was taken of.
    pub of_vm: String,
    /// SHA-256 of the WebAssembly that served the files then.
    pub sha256: String,
    /// When it was begun, in seconds since 1970.
    pub begun_s: u64,
    /// Files.
    pub files: u64,
    /// Their lengths together.
    pub files_bytes: u64,
}

/// What a module did since its process began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct ModuleCounts {
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
    /// Bytes written to them.
    pub written_bytes: u64,
    /// Bytes read of them.
    pub read_bytes: u64,
    /// Times that they were made durable.
    pub syncs: u64,
    /// From a request's coming to its reply: half of them were faster.
    pub latency_p50_ns: u64,
    /// 99 of 100 were faster.
    pub latency_p99_ns: u64,
}
