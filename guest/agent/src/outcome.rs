//! Outcome of a request, and the answer made of it.

use guest_abi::Reason;
use guest_abi::program::{Answer, MAGIC, VERSION};
use zerocopy::little_endian::{U16, U32, U64};

/// Outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PipeOutcome {
    /// Bytes that arrived.
    pub bytes: u64,
    /// Reason why no more bytes did.
    pub reason: Reason,
    /// Nearest errno, in case no byte was moved.
    pub errno: u32,
}

impl PipeOutcome {
    /// Outcome of a request for which no byte was moved.
    pub fn nothing(reason: Reason) -> Self {
        Self { bytes: 0, reason, errno: reason.errno() }
    }

    /// The answer to the program.
    pub fn answer(self) -> Answer {
        let errno = if self.bytes > 0 { 0 } else { self.errno };
        Answer {
            magic: U32::new(MAGIC),
            version: U16::new(VERSION),
            reason: U16::new(self.reason as u16),
            errno: U32::new(errno),
            min_bytes_kib: U32::ZERO,
            moved_bytes: U64::new(self.bytes),
        }
    }
}
