//! What can go wrong.

use std::path::PathBuf;

/// Errors of a front end.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// A system call.
    #[error("{what}: {source}")]
    Io {
        /// What was done.
        what: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// The socket.
    #[error("{what} {}: {source}", path.display())]
    Socket {
        /// What was done.
        what: &'static str,
        /// Its path.
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
        /// What is missing.
        missing: u64,
        /// What was asked for.
        asked: u64,
        /// What is there.
        offered: u64,
    },
    /// The back end refused a message.
    #[error("the back end answered {answer} to {message}")]
    Refused {
        /// The message.
        message: &'static str,
        /// Its answer.
        answer: u64,
    },
    /// The back end said something else than it should.
    #[error("the back end's reply to {message}: {what}")]
    BadReply {
        /// The message.
        message: &'static str,
        /// What is wrong.
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
        /// What was waited for.
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
