//! Errors of a port's socket, its messages, its holder.

use std::io;

use queue::{MemoryError, RingError};
use thiserror::Error;

use crate::device::DeviceError;
use crate::request::MessageName;

/// Reason why a port could not be served, a session ended, or a message was refused. No text shows
/// an address of the front end's own process.
///
/// Remedy: none by settings: the VM monitor broke a rule of vhost-user. Restart the VM; report it
/// to the monitor's makers if it repeats.
#[derive(Debug, Error)]
pub enum VhostUserError {
    /// The operating system refused something.
    ///
    /// Remedy: mend what the cause says: permissions, memory, or limits of open files.
    #[error("{what}: {source}")]
    Io {
        /// Action that failed.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// A socket path that cannot be listened on or dialled.
    ///
    /// Remedy: do as the reason says: another path, folder or owner; docs/operate/install.md has
    /// users and groups.
    #[error("socket {path}: {reason}")]
    Socket {
        /// Path of the socket.
        path: String,
        /// Reason.
        reason: String,
    },
    /// The port's configuration makes no sense.
    ///
    /// Remedy: write a value within the rule that the text names.
    #[error("port {port}: {what} is {value}; {rule}")]
    BadPort {
        /// The port's name.
        port: String,
        /// Part of the configuration.
        what: &'static str,
        /// Value that was given.
        value: String,
        /// Rule that the value breaks.
        rule: String,
    },
    /// The front end closed the connection in the middle of a message.
    ///
    /// Remedy: none is needed: the VM monitor ended or was killed.
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
        /// Message that was refused.
        message: MessageName,
        /// Flags as received.
        flags: u32,
    },
    /// A payload of the wrong size.
    #[error("{message}: payload of {got} bytes; {want} expected")]
    BadSize {
        /// Message that was refused.
        message: MessageName,
        /// Bytes announced.
        got: u32,
        /// Rule that the message breaks.
        want: String,
    },
    /// The wrong number of file descriptors; all of them were closed.
    #[error("{message}: {got} file descriptors; {want} expected")]
    BadFds {
        /// Message that was refused.
        message: MessageName,
        /// Number that came ("more than N" when the kernel cut the control data off).
        got: String,
        /// Rule that the message breaks.
        want: String,
    },
    /// More file descriptors than any message has, on a part of one; all of them were closed.
    #[error("{got} file descriptors on a part of a header; a message has {limit} at most")]
    FdsOnPart {
        /// Number that came.
        got: String,
        /// Most descriptors of a message.
        limit: usize,
    },
    /// A message id that we do not know or do not offer.
    #[error("{message} is not supported")]
    Unsupported {
        /// Message that was refused.
        message: MessageName,
    },
    /// A message that needs a protocol feature which was not negotiated.
    #[error("{message} needs the protocol feature {feature}, which was not negotiated")]
    NotNegotiated {
        /// Message that was refused.
        message: MessageName,
        /// Feature that is missing.
        feature: &'static str,
    },
    /// A message at the wrong moment.
    #[error("{message}: {why}")]
    Misplaced {
        /// Message that was refused.
        message: MessageName,
        /// Reason why the message does not fit the moment.
        why: String,
    },
    /// A field outside its limit.
    #[error("{message}: {field} is {value:#x}; {rule}")]
    BadField {
        /// Message that was refused.
        message: MessageName,
        /// Name of the field.
        field: &'static str,
        /// Value that was given.
        value: u64,
        /// Rule that the value breaks.
        rule: String,
    },
    /// A doorbell that is no eventfd.
    #[error("{message}: port {port}, queue {queue}: {source}")]
    BadDoorbell {
        /// Message that was refused.
        message: MessageName,
        /// The port's name.
        port: String,
        /// Index of the queue.
        queue: usize,
        /// Reason, with the kind of file it is.
        source: io::Error,
    },
    /// The memory table refused a change.
    ///
    /// Remedy: see `MemoryError` of queue.
    #[error("{message}: {source}")]
    Memory {
        /// Message that was refused.
        message: MessageName,
        /// Cause.
        source: MemoryError,
    },
    /// The inflight region was refused.
    ///
    /// Remedy: see `RingError` of queue.
    #[error("{message}: {source}")]
    Ring {
        /// Message that was refused.
        message: MessageName,
        /// Cause.
        source: RingError,
    },
    /// The device refused.
    ///
    /// Remedy: see `DeviceError`.
    #[error("{message}: {source}")]
    Device {
        /// Message that was refused.
        message: MessageName,
        /// Cause.
        source: DeviceError,
    },
    /// A front end comes and goes, and never gets as far as a running queue.
    ///
    /// Remedy: do as the reason says: mostly the VM monitor's command line asks for what the port
    /// does not offer, or for more queues.
    #[error("{count} sessions in a row ended before a queue ran; the last: {reason}")]
    Fruitless {
        /// Number of sessions.
        count: u64,
        /// Likely reason why the last one ended.
        reason: String,
    },
    /// The session panicked: a fault of ours.
    ///
    /// Remedy: report it with the log. The VM monitor may connect again.
    #[error("the session panicked and was dropped (a fault of Millrace): {0}")]
    Panicked(String),
    /// The holder refused, is gone, or gave back nonsense.
    ///
    /// Remedy: start the holder (`systemctl start millrace-holder`). Sessions go on without it; a
    /// restart of the daemon then disconnects the VMs.
    #[error("holder: {0}")]
    Holder(String),
}

impl VhostUserError {
    /// Makes an operating system error with the action that failed.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Self {
        move |e| Self::Io { what, source: e.into() }
    }

    /// Does the same as [`VhostUserError::io`], for `std::io` errors.
    pub(crate) fn std_io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }
}
