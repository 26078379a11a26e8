//! Errors of the agent and its tools.

use std::io;
use std::path::PathBuf;

/// An error of the guest agent, its protocol or its network tools.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The other side closed the port or the connection.
    #[error("{what}: the other side closed the connection")]
    Closed {
        /// Subject that was being read.
        what: &'static str,
    },
    /// A frame's length field is above the limit.
    #[error("frame of {got} bytes; the limit is {limit} bytes")]
    FrameTooLong {
        /// Bytes that the frame claims.
        got: usize,
        /// [`crate::proto::MAX_BODY_BYTES`] plus the fixed fields.
        limit: usize,
    },
    /// A frame does not decode.
    #[error("frame kind {kind}: {what}")]
    BadFrame {
        /// The kind byte.
        kind: u8,
        /// Fault of it.
        what: &'static str,
    },
    /// The two sides speak different versions of the protocol.
    #[error("protocol version {theirs} at the other side, {ours} here: rebuild the image")]
    Version {
        /// The version the other side sent.
        theirs: u32,
        /// [`crate::proto::VERSION`].
        ours: u32,
    },
    /// A file operation failed.
    #[error("{what} {path}: {source}", path = path.display())]
    File {
        /// The operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A system call or socket operation failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation.
        what: String,
        /// The operating system's answer.
        source: io::Error,
    },
    /// Bytes of a transfer are not those sent.
    #[error("{0}")]
    Mismatch(String),
    /// A tool was called with arguments it does not take.
    #[error("usage: {0}")]
    Usage(String),
    /// A request the agent cannot serve.
    #[error("{0}")]
    Refused(String),
}

impl AgentError {
    /// Wraps an I/O error with what was being done.
    pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    /// Wraps an I/O error with the operation and the file.
    pub fn file(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }
}
