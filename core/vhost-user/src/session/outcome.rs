//! Results of messages and sessions: replies, refusals, ends.

use std::os::fd::OwnedFd;

use crate::codec::Request;
use crate::error::VhostUserError;

/// Why a session ended.
#[derive(Debug)]
pub(crate) enum End {
    /// The front end hung up.
    Closed,
    /// The port is to stop; the next daemon may take the session over.
    Stopped,
    /// The front end broke the protocol, or a system call failed.
    Failed(VhostUserError),
    /// The session panicked, with this message: a fault of ours.
    Panicked(String),
}

/// Why a message was not obeyed.
#[derive(Debug)]
pub(super) enum Fault {
    /// The front end is told (when it asked) and the session goes on.
    Refused(VhostUserError),
    /// The front end is told (when it asked) and the session ends.
    Fatal(VhostUserError),
}

impl From<VhostUserError> for Fault {
    fn from(error: VhostUserError) -> Self {
        Self::Fatal(error)
    }
}

/// Answer to a message that was obeyed.
pub(super) enum Reply {
    /// Zero, when the front end asked for an acknowledgement.
    Done,
    /// Body.
    Body(Vec<u8>),
    /// Body with a descriptor.
    BodyWithFd(Vec<u8>, OwnedFd),
}

impl Reply {
    pub fn u64(value: u64) -> Self {
        Self::Body(value.to_ne_bytes().to_vec())
    }
}

/// Makes the error of a message that comes at the wrong moment.
pub(super) fn misplaced(request: Request, why: impl Into<String>) -> VhostUserError {
    VhostUserError::Misplaced { message: request.message(), why: why.into() }
}
