//! The bytes that are written. Each aligned word of 8 names the file, the place and the write it is
//! of, so that a wrong word tells whether it is stale, foreign or no word of ours.

use std::fmt;

/// Bytes of one word.
pub const WORD_BYTES: u64 = 8;
/// Most bytes of a file or disk: places are counted in words of 28 bits.
pub const MAX_LEN_BYTES: u64 = WORD_BYTES << 28;
/// Highest number of a write, 28 bits.
pub const MAX_GENERATION: u32 = (1 << 28) - 1;
/// The file number of what a disk holds before the first write: its backing file.
pub const BACKING_FILE: u8 = u8::MAX;

const INDEX_BITS: u32 = 28;
const GENERATION_BITS: u32 = 28;
/// Two odd factors; between them the halves are mixed.
const FACTORS: [u64; 2] = [0xbf58_476d_1ce4_e5b9, 0x94d0_49bb_1331_11eb];
const INVERSES: [u64; 2] = [inverse(FACTORS[0]), inverse(FACTORS[1])];

/// The inverse of an odd number modulo 2^64, by Newton's method: each step doubles the right bits.
const fn inverse(odd: u64) -> u64 {
    let mut x = odd;
    let mut step = 0;
    while step < 6 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
        step += 1;
    }
    x
}

/// Origin of a word: file, operation and place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Number of the file, [`BACKING_FILE`] for the backing file.
    pub file: u8,
    /// Number of the operation that wrote it.
    pub generation: u32,
    /// Offset at which it was written.
    pub at: u64,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.file {
            BACKING_FILE => write!(f, "offset {:#x} of the backing file", self.at),
            file => write!(f, "operation {} at {:#x} of file {file}", self.generation, self.at),
        }
    }
}

impl Origin {
    /// The word: a permutation of its three numbers, so that neighbours share no byte but by
    /// chance.
    #[must_use]
    pub fn word(self) -> u64 {
        let index = self.at / WORD_BYTES;
        let mut word = u64::from(self.file) << (GENERATION_BITS + INDEX_BITS)
            | u64::from(self.generation) << INDEX_BITS
            | index;
        for factor in FACTORS {
            word = (word ^ word >> 32).wrapping_mul(factor);
        }
        word ^ word >> 32
    }

    /// The origin of a word. Any 8 bytes give one, so it must be plausible to mean something.
    #[must_use]
    pub fn of_word(word: u64) -> Self {
        let mut word = word ^ word >> 32;
        for inverse in INVERSES.into_iter().rev() {
            word = word.wrapping_mul(inverse);
            word ^= word >> 32;
        }
        Self {
            file: (word >> (GENERATION_BITS + INDEX_BITS)) as u8,
            generation: (word >> INDEX_BITS) as u32 & MAX_GENERATION,
            at: (word & ((1 << INDEX_BITS) - 1)) * WORD_BYTES,
        }
    }
}

/// Fills a buffer with the bytes that a write puts at a place.
pub fn fill(buffer: &mut [u8], file: u8, generation: u32, at: u64) {
    let mut at = at;
    let mut rest = buffer;
    while !rest.is_empty() {
        let skip = (at % WORD_BYTES) as usize;
        let word = Origin { file, generation, at: at - skip as u64 }.word().to_le_bytes();
        let len = rest.len().min(word.len() - skip);
        let (part, more) = rest.split_at_mut(len);
        part.copy_from_slice(&word[skip..skip + len]);
        (at, rest) = (at + len as u64, more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_word_tells_what_it_is_of(
            file: u8, generation in 0..=MAX_GENERATION, index in 0..1u64 << INDEX_BITS
        ) {
            let origin = Origin { file, generation, at: index * WORD_BYTES };
            prop_assert_eq!(Origin::of_word(origin.word()), origin);
        }

        #[test]
        fn bytes_do_not_depend_on_how_they_are_cut(at in 0..1000u64, cut in 0..100usize) {
            let mut whole = vec![0; 100];
            fill(&mut whole, 3, 7, at);
            let mut parts = vec![0; 100];
            let (first, second) = parts.split_at_mut(cut);
            fill(first, 3, 7, at);
            fill(second, 3, 7, at + cut as u64);
            prop_assert_eq!(whole, parts);
        }
    }
}
