//! Why an op failed.

use alloc::string::String;

use guest_abi::table::status;
use sdk::Errno;

/// What the reply says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fail {
    /// `guest_abi::table::status`.
    pub status: u16,
    /// What, where, and the limit.
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

impl Fail {
    /// Of a file.
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
