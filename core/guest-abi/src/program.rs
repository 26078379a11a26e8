//! Messages between a program of the guest and the agent.
//!
//! The program connects to [`SOCKET`] (`SOCK_SEQPACKET`) and sends a [`Request`] with two
//! descriptors attached (`SCM_RIGHTS`): the source, then the sink. Possession of them is the
//! permission, as it is for `sendfile(2)`. The [`Answer`] comes when the pipe is over; until then
//! the socket is not readable, so that it can stand in `poll(2)`. Then the next request may follow.
//! A program that closes its end cancels.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Path of the agent's socket; every program may connect.
pub const SOCKET: &str = "/run/millrace/agent.sock";

/// First bytes of a [`Request`] and an [`Answer`]: `MLRP`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"MLRP");

/// Version of these messages.
pub const VERSION: u16 = 1;

/// Operations of a request.
pub mod op {
    /// Moves bytes.
    pub const PIPE: u16 = 1;
    /// Asks whether pipes are available, and from how many bytes on they pay; no descriptors.
    pub const QUERY: u16 = 2;
}

/// Flags of a request.
pub mod flag {
    /// A part of a file to a connection, which the program believes to be sent already: bytes that
    /// no pipe moves the agent sends, and the program may go meanwhile. Without a time.
    pub const BEHIND: u32 = 1;
}

/// Offset that stands for the descriptor's own position, which moves with the bytes.
pub const OWN_POSITION: u64 = u64::MAX;

/// Request for a pipe.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Request {
    /// [`MAGIC`].
    pub magic: U32,
    /// [`VERSION`].
    pub version: U16,
    /// Operation: see [`op`].
    pub op: U16,
    /// Flags: see [`flag`].
    pub flags: U32,
    /// Milliseconds after which it ends with what it has moved; 0: never.
    pub timeout_ms: U32,
    /// Offset at which to read in a file, or [`OWN_POSITION`].
    pub source_offset: U64,
    /// Offset at which to write in a file, or [`OWN_POSITION`].
    pub sink_offset: U64,
    /// Number of bytes.
    pub len_bytes: U64,
}

/// Answer to a request.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Answer {
    /// [`MAGIC`].
    pub magic: U32,
    /// [`VERSION`].
    pub version: U16,
    /// Reason: a number of [`crate::Reason`].
    pub reason: U16,
    /// Nearest errno; 0 when bytes were moved.
    pub errno: U32,
    /// Answer to [`op::QUERY`]: a pipe of fewer KiB does not pay in this guest, by the agent's
    /// measurement; 0: not known. To others zero.
    pub min_bytes_kib: U32,
    /// Bytes moved.
    pub moved_bytes: U64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_c_header() {
        assert_eq!((size_of::<Request>(), size_of::<Answer>()), (40, 24));
    }
}
