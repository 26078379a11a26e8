//! What can go wrong with a port's socket, its messages, its holder.

use std::io;

use queue::{MemoryError, RingError};
use thiserror::Error;

use crate::device::DeviceError;

/// Why a port could not be served, a session ended, or a message was refused. No text shows an
/// address of the front end's own process.
#[derive(Debug, Error)]
pub enum VhostUserError {
    /// The operating system refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A socket path that cannot be listened on or dialled.
    #[error("socket {path}: {reason}")]
    Socket {
        /// The path.
        path: String,
        /// Why not.
        reason: String,
    },
    /// The port's configuration makes no sense.
    #[error("port {port}: {what} is {value}; {rule}")]
    BadPort {
        /// The port's name.
        port: String,
        /// Which part.
        what: &'static str,
        /// Given.
        value: String,
        /// What is allowed.
        rule: String,
    },
    /// The front end closed the connection in the middle of a message.
    #[error("the connection ended inside a message, after {got} of {want} bytes")]
    Cut {
        /// Bytes that came.
        got: usize,
        /// Bytes announced.
        want: usize,
    },
    /// Header flags that are not version 1, or a reply where a request belongs.
    #[error("{message}: header flags {flags:#x}; version 1 and no reply bit expected")]
    BadFlags {
        /// The message.
        message: MessageName,
        /// Flags as received.
        flags: u32,
    },
    /// A payload of the wrong size.
    #[error("{message}: payload of {got} bytes; {want} expected")]
    BadSize {
        /// The message.
        message: MessageName,
        /// Bytes announced.
        got: u32,
        /// The rule.
        want: String,
    },
    /// The wrong number of file descriptors; all of them were closed.
    #[error("{message}: {got} file descriptors; {want} expected")]
    BadFds {
        /// The message.
        message: MessageName,
        /// How many came ("more than N" when the kernel cut the control data off).
        got: String,
        /// The rule.
        want: String,
    },
    /// More file descriptors than any message has, on a part of one; all of them were closed.
    #[error("{got} file descriptors on a part of a header; a message has {limit} at most")]
    FdsOnPart {
        /// How many came.
        got: String,
        /// Most of a message.
        limit: usize,
    },
    /// A message id that we do not know or do not offer.
    #[error("{message} is not supported")]
    Unsupported {
        /// The message.
        message: MessageName,
    },
    /// A message that needs a protocol feature which was not negotiated.
    #[error("{message} needs the protocol feature {feature}, which was not negotiated")]
    NotNegotiated {
        /// The message.
        message: MessageName,
        /// The feature.
        feature: &'static str,
    },
    /// A message at the wrong moment.
    #[error("{message}: {why}")]
    Misplaced {
        /// The message.
        message: MessageName,
        /// What is wrong with the moment.
        why: String,
    },
    /// A field outside its limit.
    #[error("{message}: {field} is {value:#x}; {rule}")]
    BadField {
        /// The message.
        message: MessageName,
        /// Which field.
        field: &'static str,
        /// Given.
        value: u64,
        /// What is allowed.
        rule: String,
    },
    /// A doorbell that is no eventfd.
    #[error("{message}: port {port}, queue {queue}: {source}")]
    BadDoorbell {
        /// The message.
        message: MessageName,
        /// The port's name.
        port: String,
        /// Which queue.
        queue: usize,
        /// What it is instead.
        source: io::Error,
    },
    /// The memory table refused a change.
    #[error("{message}: {source}")]
    Memory {
        /// The message.
        message: MessageName,
        /// The cause.
        source: MemoryError,
    },
    /// The inflight region was refused.
    #[error("{message}: {source}")]
    Ring {
        /// The message.
        message: MessageName,
        /// The cause.
        source: RingError,
    },
    /// The device refused.
    #[error("{message}: {source}")]
    Device {
        /// The message.
        message: MessageName,
        /// The cause.
        source: DeviceError,
    },
    /// A front end comes and goes, and never gets as far as a running queue.
    #[error("{count} sessions in a row ended before a queue ran; the last: {reason}")]
    Fruitless {
        /// Sessions.
        count: u64,
        /// Why the last one ended, as far as can be said.
        reason: String,
    },
    /// A fault of ours.
    #[error("the session panicked and was dropped (a fault of Millrace): {0}")]
    Panicked(String),
    /// The holder refused, is gone, or gave back nonsense.
    #[error("holder: {0}")]
    Holder(String),
}

impl VhostUserError {
    /// An operating system error with its place.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |e| Self::Io { what, source: e.into() }
    }

    /// As [`VhostUserError::io`], for `std::io` errors.
    pub(crate) fn std_io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}

/// A message's number, shown with its name in the specification.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageName(pub u32);

impl std::fmt::Display for MessageName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match crate::codec::Request::from_id(self.0) {
            Some(request) => write!(f, "{}", request.name()),
            None => write!(f, "message {}", self.0),
        }
    }
}
