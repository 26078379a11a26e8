//! Error of a pipe that moved nothing.

use guest_abi::Reason;

/// Errno without an agent, as in the C library: `EOPNOTSUPP`.
const NOT_SUPPORTED: i32 = 95;
/// `EIO`.
const IO: i32 = 5;

/// Error of a pipe that moved nothing, with its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not piped: {}", reason.text())]
pub struct Error {
    /// Reason why nothing was moved.
    pub reason: Reason,
    /// Nearest errno, never 0.
    pub errno: i32,
}

impl Error {
    pub(crate) fn new(reason: Reason, errno: i32) -> Self {
        Self { reason, errno: if errno > 0 { errno } else { IO } }
    }

    pub(crate) fn of(reason: Reason) -> Self {
        Self::new(reason, reason.errno() as i32)
    }

    pub(crate) fn no_agent() -> Self {
        Self::new(Reason::NoAgent, NOT_SUPPORTED)
    }

    /// True when the ordinary system calls may be tried instead. Not after a timeout, and not when
    /// the number of bytes that arrived is unknown ([`Reason::Lost`]): close the connection then.
    pub fn may_fall_back(&self) -> bool {
        !matches!(self.reason, Reason::Lost | Reason::Cancelled | Reason::TimedOut)
    }
}

impl From<Error> for std::io::Error {
    /// Makes an error of the errno's kind, with the reason's text.
    fn from(error: Error) -> Self {
        Self::new(Self::from_raw_os_error(error.errno).kind(), error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_may_be_done_next() {
        for &reason in Reason::ALL {
            let last = ["lost", "cancelled", "timed_out"].contains(&reason.key());
            assert_eq!(Error::of(reason).may_fall_back(), !last, "{reason:?}");
        }
        let error = std::io::Error::from(Error::of(Reason::TimedOut));
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("the time given was over"));
        assert_eq!(Error::of(Reason::EndOfFile).errno, IO);
    }
}
