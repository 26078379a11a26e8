//! Conditions that the store checks for its client: a part of [`super`], the protocol of the table
//! store.
//!
//! A scan with [`super::op_flag::FILTER`] answers only with entries of which all terms are true.
//! Its value is a [`Filter`], the high bound, and the [`Term`]s, each with its operand behind it:
//! at most [`MAX_TERMS`], and [`MAX_FILTER_BYTES`] with their operands. A term compares a piece of
//! the key, or of the value, with the operand, as `memcmp` does, a prefix first. The piece begins
//! at [`Term::offset`] and has [`Term::len_bytes`], or fewer if the entry ends before: it may be
//! empty. The value is the row with [`super::op_flag::FETCH`]; it counts also where it is not sent
//! ([`super::op_flag::KEYS_ONLY`]). The store knows nothing of columns: only the client knows what
//! is always at the same place, and whether its bytes are in order. (Numbers in keys are; in rows
//! they may be little-endian, which is good for equality only.)
//!
//! What does not match is passed over: it counts for no limit and, in a scan that locks, is not
//! locked. A scan looks at [`Filter::examine`] entries at most. If there may be more,
//! [`super::Answer::more`] is 2 then, and a key follows the rows, up to the answer's end: the next
//! scan goes on behind it ([`super::op_flag::LOW_OPEN`], or [`super::op_flag::HIGH_OPEN`]
//! backward). When a limit of rows or bytes is reached, `more` is 1 if there is another entry,
//! whether it matches or not, unless the store has seen already that none does.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Most terms of a filter.
pub const MAX_TERMS: u32 = 16;

/// Most bytes of a filter's terms, with their operands.
pub const MAX_FILTER_BYTES: usize = 64 << 10;

/// Header in front of a scan's high bound and the [`Term`]s behind that.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Filter {
    /// Bytes of the high bound.
    pub high_bytes: U32,
    /// Number of terms, at most [`MAX_TERMS`].
    pub terms: U32,
    /// Most entries that are looked at; 0: all.
    pub examine: U32,
    /// Zero.
    pub reserved: U32,
}

/// Condition; its operand follows.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct Term {
    /// Part of the entry: see [`part`].
    pub part: u8,
    /// Test: see [`test`].
    pub test: u8,
    /// Zero.
    pub reserved: U16,
    /// Offset of the piece.
    pub offset: U32,
    /// Most bytes of the piece; `u32::MAX`: to the end.
    pub len_bytes: U32,
    /// Bytes of the operand.
    pub operand_bytes: U32,
}

/// Parts of an entry that a [`Term`] can compare.
pub mod part {
    /// Key of the entry.
    pub const KEY: u8 = 0;
    /// Value of the entry.
    pub const VALUE: u8 = 1;
}

/// Tests of a [`Term`], on its piece and its operand.
pub mod test {
    /// Piece below operand.
    pub const BELOW: u8 = 1;
    /// Piece below operand, or the same.
    pub const AT_MOST: u8 = 2;
    /// Piece and operand the same.
    pub const EQUAL: u8 = 3;
    /// Piece above operand, or the same.
    pub const AT_LEAST: u8 = 4;
    /// Piece above operand.
    pub const ABOVE: u8 = 5;
    /// Piece and operand not the same.
    pub const NOT_EQUAL: u8 = 6;
}
