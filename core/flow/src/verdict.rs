//! Verdicts about a segment: what becomes of it, who gets how much of it, what it is good for.

use crate::segment::{Editor, Segment};

/// Fate of a segment that the guest sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GuestVerdict {
    /// The segment goes on, changed or not.
    Pass,
    /// The segment goes on without its payload; length of the frame.
    Bare(usize),
    /// The part that was sent before goes on; length of the frame, whose checksum is to be filled
    /// in.
    Trimmed(usize),
    /// The segment ends here: the guest will send it again.
    Drop,
    /// The segment ends here: it is answered in the peer's place.
    Answer,
}

/// Part of a segment of the peer's that guest or twin gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Share {
    Nothing,
    Whole,
    /// Headers, without payload and FIN.
    Bare,
    /// The first bytes of its payload, this many, without FIN.
    First(usize),
}

impl Share {
    /// Length of the frame that is left of one of `frame_len` bytes.
    pub fn frame_len(self, segment: &Segment, frame_len: usize) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Whole => frame_len,
            Self::Bare => segment.headers_len(),
            Self::First(len) => segment.headers_len() + len,
        }
    }

    /// Cuts the copied part of a segment to this share.
    pub fn cut(self, editor: &mut Editor<'_>) {
        match self {
            Self::Nothing | Self::Whole => {}
            Self::Bare => {
                editor.strip();
            }
            Self::First(len) => {
                editor.trim(len);
            }
        }
    }
}

/// Shares of guest and twin in a segment of the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shares {
    pub guest: Share,
    pub twin: Share,
}

impl Shares {
    pub const NOBODY: Self = Self { guest: Share::Nothing, twin: Share::Nothing };
    pub const GUEST: Self = Self { guest: Share::Whole, twin: Share::Nothing };
}

/// Use of a segment of the peer's: how much of what it says has been taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// Nothing: the guest would not accept it.
    Nothing,
    /// How far the peer has sent: nobody has looked at its checksum.
    Length,
    /// The segment acknowledges what was never sent.
    Nonsense,
    All,
}

/// Knowledge of a segment's checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checksum {
    Right,
    Wrong,
    /// Parts of it nobody has looked at.
    Unknown,
}
