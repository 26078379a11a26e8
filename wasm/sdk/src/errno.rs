//! Linux' numbers of errors, as the host returns them.

/// Error number: why a call failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// No such file.
    pub const NOENT: Self = Self(2);
    /// The storage failed.
    pub const IO: Self = Self(5);
    /// A handle that is not open.
    pub const BADF: Self = Self(9);
    /// No memory.
    pub const NOMEM: Self = Self(12);
    /// File exists.
    pub const EXIST: Self = Self(17);
    /// A wrong argument.
    pub const INVAL: Self = Self(22);
    /// Too many open files.
    pub const MFILE: Self = Self(24);
    /// The disk is full.
    pub const NOSPC: Self = Self(28);
    /// Stored bytes are not what was written.
    pub const BADMSG: Self = Self(74);

    /// Makes one from the value that an import returned.
    pub fn check(returned: i64) -> Result<u64, Self> {
        match returned {
            0.. => Ok(returned as u64),
            _ => Err(Self(i32::try_from(returned.wrapping_neg()).unwrap_or(Self::IO.0))),
        }
    }
}

impl core::fmt::Display for Errno {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "errno {}", self.0)
    }
}
