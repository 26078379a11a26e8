//! A pipe as listings show it.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::job::Job;
use crate::message::End;

/// A pipe that is under way.
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
    /// `starting`, `settling`, `moving`, `held` (at the VM's ceiling) or `draining`.
    pub state: &'static str,
    /// Time since it began.
    pub age: Duration,
}

impl PipeInfo {
    /// Name of an end.
    pub(crate) fn name(end: &End) -> String {
        let End::Socket(socket) = end else { return "file".into() };
        let key = &socket.key;
        let (local, remote) = ((key.local, key.local_port), (key.remote, key.remote_port));
        format!("{} to {}", SocketAddr::from(local), SocketAddr::from(remote))
    }

    /// A pipe as it is now.
    pub(crate) fn of(job: &Job) -> Self {
        let [source, sink] = job.ends.clone();
        Self {
            id: job.token,
            source,
            sink,
            len_bytes: job.len_bytes,
            moved_bytes: job.moved_bytes.load(Ordering::Relaxed),
            // A step is running: it moves.
            state: job.state().unwrap_or("moving"),
            age: job.age(),
        }
    }
}
