//! The outcome of one attempt to move bytes.

use std::io;
use std::time::Instant;

/// Outcome of one attempt to move bytes from a source to a sink.
pub(crate) enum Transfer {
    /// Some bytes went: how many.
    Bytes(usize),
    /// The source has given all that it will ever give.
    End,
    /// The source has nothing at the moment.
    Empty,
    /// The sink takes nothing at the moment.
    Full,
    /// The VM is at its ceiling: look again then.
    Held(Instant),
    /// The source or the sink does not work.
    Failed(io::Error),
}

impl From<io::Error> for Transfer {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock => Self::Full,
            io::ErrorKind::Interrupted => Self::Bytes(0),
            _ => Self::Failed(error),
        }
    }
}
