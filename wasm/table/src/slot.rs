//! Values in memory: a small one itself, for a large one its place in the log.

use alloc::boxed::Box;

/// Length of the longest value that stays in memory.
pub const INLINE_BYTES: usize = 64;

/// Place of a value in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loc {
    /// Number of the segment.
    pub segment: u32,
    /// Byte of the segment at which the value begins.
    pub offset: u32,
    /// Length of the value in bytes.
    pub len: u32,
}

/// Value of a key, or where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slot {
    /// No value: the key was deleted.
    Deleted,
    /// Small value, in memory.
    Inline(Box<[u8]>),
    /// Value in the log.
    At(Loc),
    /// Value among the ops of a transaction that is not committed.
    Own {
        /// First byte of the value, counted over all ops of the transaction.
        at: u64,
        /// Length of the value in bytes.
        len: u32,
    },
}

impl Slot {
    /// Length of the value in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Deleted => 0,
            Self::Inline(bytes) => bytes.len(),
            Self::At(Loc { len, .. }) | Self::Own { len, .. } => *len as usize,
        }
    }

    /// Whether there is a value.
    pub fn is_there(&self) -> bool {
        !matches!(self, Self::Deleted)
    }
}
