//! Failures: of an op, and of the start.

use alloc::string::String;

use guest_abi::table::status;
use sdk::Errno;

/// Failure of an op, as its reply has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fail {
    /// Status: `guest_abi::table::status`.
    pub status: u16,
    /// Text: what failed, where, and the limit.
    pub text: String,
}

/// Makes a [`Fail`].
macro_rules! fail {
    ($status:ident, $($text:tt)*) => {
        $crate::fail::Fail {
            status: guest_abi::table::status::$status,
            text: alloc::format!($($text)*),
        }
    };
}
pub(crate) use fail;

/// Reason why the store cannot start.
#[derive(Debug)]
pub struct StartError {
    pub(crate) errno: Errno,
    pub(crate) text: String,
}

impl StartError {
    /// Files that are not as they must be.
    pub(crate) fn damaged(text: String) -> Self {
        Self { errno: Errno::BADMSG, text }
    }
}

impl From<Errno> for StartError {
    fn from(errno: Errno) -> Self {
        Self { errno, text: alloc::format!("{errno}") }
    }
}

impl Fail {
    /// Failure of a file.
    pub fn storage(what: &str, errno: Errno) -> Self {
        match errno {
            Errno::NOSPC => fail!(NO_SPACE, "{what}: the disk is full"),
            _ => fail!(STORAGE, "{what}: {errno}"),
        }
    }

    /// Whether the transaction cannot go on.
    pub fn ends(&self) -> bool {
        matches!(self.status, status::DEADLOCK | status::CONFLICT | status::LOST)
    }
}
