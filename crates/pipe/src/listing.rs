//! Pipes as listings show them.

use std::time::Duration;

use std::sync::atomic::Ordering;

use crate::job::Job;

/// One pipe that is under way.
#[derive(Debug, Clone)]
pub struct PipeInfo {
    /// Unique in this daemon.
    pub id: u64,
    /// `file`, or the connection that is read.
    pub source: String,
    /// `file`, or the connection that is written.
    pub sink: String,
    /// Bytes asked for.
    pub len_bytes: u64,
    /// Bytes moved so far.
    pub moved_bytes: u64,
    /// `settling`, `moving` or `draining`.
    pub state: &'static str,
    /// How long it has been there.
    pub age: Duration,
}

impl PipeInfo {
    pub(crate) fn of(job: &Job) -> Self {
        let key = job.key();
        let end = |address: std::net::IpAddr, port| std::net::SocketAddr::from((address, port));
        Self {
            id: job.token,
            source: "file".into(),
            sink: format!(
                "{} to {}",
                end(key.local, key.local_port),
                end(key.remote, key.remote_port)
            ),
            len_bytes: job.len_bytes,
            moved_bytes: job.moved_bytes.load(Ordering::Relaxed),
            // A step is running: it moves.
            state: job.state().unwrap_or("moving"),
            age: job.age(),
        }
    }
}
