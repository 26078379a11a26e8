//! The expected content of a file or a part of a disk: its length, and the last write of each
//! range.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::pattern::{self, BACKING_FILE};

/// Expected content of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Content {
    /// Zeroes: never written, punched, zeroed or discarded.
    Zero,
    /// The pattern of a write.
    Written {
        /// The file it was written to first.
        file: u8,
        /// The operation that wrote it.
        generation: u32,
        /// From its place here to its place there: not 0 if it was copied since.
        shift: i64,
    },
}

impl Content {
    /// Content in the beginning of a disk with a backing file made by [`crate::backing::fill`].
    pub const BACKING: Self = Self::Written { file: BACKING_FILE, generation: 1, shift: 0 };

    /// Fills a buffer with what is at a place.
    pub fn fill(self, buffer: &mut [u8], at: u64) {
        match self {
            Self::Zero => buffer.fill(0),
            Self::Written { file, generation, shift } => {
                pattern::fill(buffer, file, generation, at.wrapping_add_signed(shift));
            }
        }
    }

    /// The same bytes, counted from a place that lies at an offset.
    #[must_use]
    pub fn seen_from(self, offset: u64) -> Self {
        self.moved(-(offset as i64))
    }

    /// The same bytes at places that lie by so much further on.
    fn moved(self, by: i64) -> Self {
        match self {
            Self::Zero => Self::Zero,
            Self::Written { file, generation, shift } => {
                Self::Written { file, generation, shift: shift - by }
            }
        }
    }
}

/// End of a range, and what it holds.
type Extent = (u64, Content);

/// Expected content of a file or a part of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    len_bytes: u64,
    /// Content of ranges without an extent.
    ground: Content,
    /// By their begin; they do not overlap.
    extents: BTreeMap<u64, Extent>,
}

impl Model {
    /// A model of some length that holds the same everywhere.
    #[must_use]
    pub fn new(len_bytes: u64, ground: Content) -> Self {
        Self { len_bytes, ground, extents: BTreeMap::new() }
    }

    /// The length of the file.
    #[must_use]
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Makes an end of an extent at a place.
    fn split(&mut self, at: u64) {
        let Some((&begin, &(end, content))) = self.extents.range(..at).next_back() else { return };
        if end > at {
            self.extents.insert(begin, (at, content));
            self.extents.insert(at, (end, content));
        }
    }

    fn clear(&mut self, range: Range<u64>) {
        self.split(range.start);
        self.split(range.end);
        let covered: Vec<u64> = self.extents.range(range).map(|(&begin, _)| begin).collect();
        for begin in covered {
            self.extents.remove(&begin);
        }
    }

    /// Says what a range holds now; the file grows to its end.
    pub fn set(&mut self, range: Range<u64>, content: Content) {
        if range.is_empty() {
            return;
        }
        self.clear(range.clone());
        self.len_bytes = self.len_bytes.max(range.end);
        if content != self.ground {
            self.extents.insert(range.start, (range.end, content));
        }
    }

    /// Cuts the file, or lets it grow.
    pub fn resize(&mut self, len_bytes: u64) {
        self.len_bytes = len_bytes;
        self.clear(len_bytes..u64::MAX);
    }

    /// Content of a range, in pieces, in order, without a gap.
    #[must_use]
    pub fn pieces(&self, range: Range<u64>) -> Vec<(Range<u64>, Content)> {
        let mut pieces = Vec::new();
        let before = self.extents.range(..range.start).next_back();
        let mut at = range.start;
        for (&begin, &(end, content)) in before.into_iter().chain(self.extents.range(range.clone()))
        {
            let (begin, end) = (begin.max(range.start), end.min(range.end));
            if begin >= end {
                continue;
            }
            if at < begin {
                pieces.push((at..begin, self.ground));
            }
            pieces.push((begin..end, content));
            at = end;
        }
        if at < range.end {
            pieces.push((at..range.end, self.ground));
        }
        pieces
    }

    /// Fills a buffer with what must be read at a place.
    pub fn fill(&self, buffer: &mut [u8], at: u64) {
        for (range, content) in self.pieces(at..at + buffer.len() as u64) {
            let part = (range.start - at) as usize..(range.end - at) as usize;
            content.fill(&mut buffer[part], range.start);
        }
    }

    /// Says that a range now holds what was elsewhere: pieces of another model or of this one.
    pub fn copy(&mut self, pieces: Vec<(Range<u64>, Content)>, from: u64, to: u64) {
        let by = to as i64 - from as i64;
        for (range, content) in pieces {
            let range = range.start.wrapping_add_signed(by)..range.end.wrapping_add_signed(by);
            self.set(range, content.moved(by));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LEN: usize = 256;

    /// An operation on the model and on plain bytes.
    fn apply(model: &mut Model, bytes: &mut Vec<u8>, step: (u8, usize, usize, usize), number: u32) {
        let (kind, at, len, to) = step;
        let range = at as u64..(at + len) as u64;
        let end = (at + len).max(bytes.len());
        match kind {
            0 => {
                model.set(range, Content::Written { file: 1, generation: number, shift: 0 });
                bytes.resize(end, 0);
                pattern::fill(&mut bytes[at..at + len], 1, number, at as u64);
            }
            1 => {
                model.set(range, Content::Zero);
                bytes.resize(end, 0);
                bytes[at..at + len].fill(0);
            }
            2 => {
                model.resize(at as u64);
                bytes.resize(at, 0);
            }
            _ if at + len <= bytes.len() => {
                model.copy(model.pieces(range), at as u64, to as u64);
                let copied = bytes[at..at + len].to_vec();
                bytes.resize(bytes.len().max(to + len), 0);
                bytes[to..to + len].copy_from_slice(&copied);
            }
            _ => (),
        }
    }

    proptest! {
        #[test]
        fn it_holds_what_plain_bytes_hold(
            steps in prop::collection::vec((0..4u8, 0..LEN, 1..64usize, 0..LEN), 1..60)
        ) {
            let (mut model, mut bytes) = (Model::new(0, Content::Zero), Vec::new());
            for (number, step) in (1..).zip(steps) {
                apply(&mut model, &mut bytes, step, number);
                prop_assert_eq!(model.len_bytes(), bytes.len() as u64);
                let mut got = vec![1; bytes.len()];
                model.fill(&mut got, 0);
                prop_assert_eq!(&got, &bytes);
            }
        }
    }

    #[test]
    fn what_was_not_written_is_of_the_backing_file() {
        let mut model = Model::new(100, Content::BACKING);
        model.set(10..20, Content::Zero);
        let mut got = vec![0; 30];
        model.fill(&mut got, 0);
        let mut want = vec![0; 30];
        pattern::fill(&mut want, BACKING_FILE, 1, 0);
        want[10..20].fill(0);
        assert_eq!(got, want);
    }
}
