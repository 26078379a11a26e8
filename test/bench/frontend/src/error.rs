//! Errors of the front end.

use std::path::PathBuf;

/// Errors of a front end.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// A system call.
    #[error("{what}: {source}")]
    Io {
        /// Operation that failed.
        what: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// The socket.
    #[error("{what} {}: {source}", path.display())]
    Socket {
        /// Operation that failed.
        what: &'static str,
        /// Path of the socket.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// More memory than the region has.
    #[error("guest memory has no {len_bytes} bytes left")]
    NoMemory {
        /// Bytes asked for.
        len_bytes: usize,
    },
    /// The back end does not offer something that was asked for.
    #[error(
        "the back end does not offer {missing:#x} of the features {asked:#x} (it offers {offered:#x})"
    )]
    Features {
        /// Features that are missing.
        missing: u64,
        /// Features that were asked for.
        asked: u64,
        /// Features that the back end offers.
        offered: u64,
    },
    /// The back end refused a message.
    #[error("the back end answered {answer} to {message}")]
    Refused {
        /// The message.
        message: &'static str,
        /// Answer of the back end.
        answer: u64,
    },
    /// The back end said something else than it should.
    #[error("the back end's reply to {message}: {what}")]
    BadReply {
        /// The message.
        message: &'static str,
        /// Fault of the reply.
        what: String,
    },
    /// The back end broke the rules of a ring.
    #[error("the back end broke a rule: {0}")]
    Ring(String),
    /// Content that is not what was sent or written.
    #[error("wrong content: {0}")]
    Content(String),
    /// The back end did nothing for long.
    #[error("nothing came from the back end for {secs} s ({what})")]
    Silent {
        /// How long.
        secs: u64,
        /// Event that was waited for.
        what: &'static str,
    },
    /// An option that makes no sense.
    #[error("{0}")]
    Usage(String),
}

impl FrontendError {
    /// For `map_err`.
    pub fn io<E: Into<std::io::Error>>(what: &'static str) -> impl Fn(E) -> Self {
        move |source| Self::Io { what, source: source.into() }
    }
}
