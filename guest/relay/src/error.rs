//! Errors between a program and a module.

use std::fmt;
use std::io;
use std::time::Duration;

use guest_abi::module::{MAX_NAME_BYTES, failure};

/// Failure that the host reports for a request or at the end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Code of [`failure`].
    pub code: u32,
    /// Reason in words.
    pub text: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.code {
            failure::BAD_FRAME => "bad frame",
            failure::VERSION => "no version in common",
            failure::NO_MODULE => "no such module",
            failure::LIMIT => "limit reached",
            failure::STOPPED => "module stopped",
            failure::BROKEN => "module cannot be started",
            failure::REPLACED => "the same client connected once more",
            failure::STORAGE => "storage failed",
            failure::ENDING => "service ends",
            failure::OUT_OF_ORDER => "out of order",
            other => return write!(f, "code {other}: {}", self.text),
        };
        match self.text.as_str() {
            "" => f.write_str(name),
            text => write!(f, "{name}: {text}"),
        }
    }
}

/// Bytes of the host that break the protocol of `guest_abi::module`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Frame that is too long.
    #[error("a body of {len} bytes in a frame of kind {kind}; the limit is {limit}")]
    TooLong {
        /// Kind of the frame.
        kind: u16,
        /// Length of the body.
        len: u32,
        /// Longest allowed length.
        limit: u32,
    },
    /// Frame whose hash is wrong.
    #[error("the check of frame {seq}, kind {kind}, is wrong")]
    Check {
        /// Kind of the frame.
        kind: u16,
        /// Number of the frame.
        seq: u64,
    },
    /// Frame that may not come now.
    #[error("frame {seq} of kind {kind} with {len} bytes may not come here")]
    Unexpected {
        /// Kind of the frame.
        kind: u16,
        /// Number of the frame.
        seq: u64,
        /// Bytes of the body.
        len: usize,
    },
    /// Wrong answer of the host to the hello.
    #[error("the host's welcome makes no sense: {0}")]
    Welcome(&'static str),
}

/// Error of the relay or a client.
#[derive(Debug, thiserror::Error)]
pub enum RelayError {
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// Step that failed, and its object.
        what: String,
        /// Error of the system call.
        source: io::Error,
    },
    /// Malformed address.
    #[error("address {0:?}: vsock:CID:PORT or unix:/PATH is wanted")]
    Address(String),
    /// Malformed address to listen at.
    #[error("address {0:?}: unix:/PATH or tcp:IP:PORT is wanted")]
    Listen(String),
    /// Malformed name of a module.
    #[error("module {0:?}: 1 to {MAX_NAME_BYTES} of a-z 0-9 - _ are wanted")]
    Name(String),
    /// Another process listens there already.
    #[error("another program listens at {0}: stop it, or use another address")]
    Taken(String),
    /// The host broke the protocol.
    #[error("the host does not keep to the protocol: {0}")]
    Wire(#[from] WireError),
    /// The host ended the connection.
    #[error("the host ended the connection: {0}")]
    Goodbye(Failure),
    /// The host, not the module, failed a request.
    #[error("the host failed request {seq}: {failure}")]
    Failed {
        /// Number of the request.
        seq: u64,
        /// Failure that the host reported.
        failure: Failure,
    },
    /// The module has lost its memory, or the host has forgotten the client.
    #[error("the module was replaced, and has forgotten the stream")]
    Forgotten,
    /// Too many requests without a reply.
    #[error("{0} requests have no reply yet: that is the limit")]
    Full(u32),
    /// A request that is too long.
    #[error("a body of {len} bytes; the limit is {limit}")]
    TooLong {
        /// Length of the request.
        len: usize,
        /// Longest allowed length.
        limit: usize,
    },
    /// No such request.
    #[error("request {0} is none that has no reply")]
    Unknown(u64),
    /// No answer came in time.
    #[error("the host did not answer in {0:?}")]
    Timeout(Duration),
    /// The connection broke and could not be made again.
    #[error("no connection to the host, tried for {patience:?}: {source}")]
    Gone {
        /// Time for which it was tried.
        patience: Duration,
        /// Last failure.
        source: io::Error,
    },
}

impl RelayError {
    /// Makes an error of a failed step, for `map_err`.
    pub(crate) fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { what: what.into(), source: source.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_name_the_cause() {
        let told = |code, text: &str| Failure { code, text: text.into() }.to_string();
        assert_eq!(told(failure::LIMIT, "8 clients"), "limit reached: 8 clients");
        assert_eq!(told(failure::ENDING, ""), "service ends");
        assert_eq!(told(77, "x"), "code 77: x");
    }
}
