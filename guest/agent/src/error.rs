//! Errors that end the agent. Those of one request are a [`guest_abi::Reason`] instead.

use std::io;

/// Error for which the agent cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// Step that failed, and its object.
        what: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// Another agent answers on the socket.
    #[error("another agent serves {0}: stop it, or name another socket with --socket")]
    Served(String),
    /// Wrong arguments.
    #[error("{0}; see millrace-agent --help")]
    Usage(String),
}

impl AgentError {
    /// Makes an error of a failed step, for `map_err`.
    pub(crate) fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { what: what.into(), source: source.into() }
    }
}
