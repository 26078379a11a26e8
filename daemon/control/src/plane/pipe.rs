//! Pipes, as they are listed.

use serde::Serialize;

/// A pipe that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PipeStatus {
    /// VM.
    pub vm: String,
    /// Id that its VM gave it: unique among its pipes under way.
    pub id: u64,
    /// Source of the bytes, in a few words: `disk root, 3 extents`.
    pub source: String,
    /// Sink of the bytes: `192.0.2.10:80 to 198.51.100.7:40000`.
    pub sink: String,
    /// Bytes asked for.
    pub len_bytes: u64,
    /// Bytes that arrived.
    pub moved_bytes: u64,
    /// State, in a word.
    pub state: String,
    /// Time since the request for it.
    pub age_ms: u64,
}
