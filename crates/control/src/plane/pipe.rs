//! Pipes, as they are listed.

use serde::Serialize;

/// One pipe that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PipeStatus {
    /// VM.
    pub vm: String,
    /// What its VM calls it: unique among its pipes of now.
    pub id: u64,
    /// Where the bytes come from, in a few words: `disk root, 3 extents`.
    pub source: String,
    /// Where they go: `192.0.2.10:80 to 198.51.100.7:40000`.
    pub sink: String,
    /// Bytes asked for.
    pub len_bytes: u64,
    /// Bytes that arrived.
    pub moved_bytes: u64,
    /// What it is at, in a word.
    pub state: String,
    /// Time since it was asked for.
    pub age_ms: u64,
}
