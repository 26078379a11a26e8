//! A byte stream that both ends can make by themselves, and its hash.
//!
//! The receiver compares every byte with its own copy of the stream, so a failure names the first
//! wrong byte; the hash lets the two ends (and a reader of their output) agree as well.

use xxhash_rust::xxh3::Xxh3;

use crate::AgentError;

/// SplitMix64 (Steele, Lea, Flood 2014) as little-endian words, starting at a seed.
pub struct Stream {
    state: u64,
    word: [u8; 8],
    used: usize,
}

impl Stream {
    /// The stream of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed, word: [0; 8], used: 8 }
    }

    fn next_word(&mut self) -> [u8; 8] {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)).to_le_bytes()
    }

    /// Fills a buffer with the next bytes.
    pub fn fill(&mut self, buffer: &mut [u8]) {
        let left = 8 - self.used;
        let (head, rest) = buffer.split_at_mut(left.min(buffer.len()));
        head.copy_from_slice(&self.word[self.used..self.used + head.len()]);
        self.used += head.len();
        let mut words = rest.chunks_exact_mut(8);
        for chunk in &mut words {
            chunk.copy_from_slice(&self.next_word());
        }
        let tail = words.into_remainder();
        if !tail.is_empty() {
            self.word = self.next_word();
            tail.copy_from_slice(&self.word[..tail.len()]);
            self.used = tail.len();
        }
    }
}

/// Checks received bytes against the stream and hashes them.
pub struct Check {
    stream: Stream,
    hash: Xxh3,
    expected: Vec<u8>,
    received: u64,
}

impl Check {
    /// A check from the stream's start.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { stream: Stream::new(seed), hash: Xxh3::new(), expected: Vec::new(), received: 0 }
    }

    /// Takes the next received bytes.
    ///
    /// # Errors
    /// [`AgentError::Mismatch`] with the offset of the first wrong byte.
    pub fn take(&mut self, bytes: &[u8]) -> Result<(), AgentError> {
        self.expected.resize(bytes.len(), 0);
        self.stream.fill(&mut self.expected);
        if let Some(at) = bytes.iter().zip(&self.expected).position(|(got, want)| got != want) {
            return Err(AgentError::Mismatch(format!(
                "byte {} is {:#04x}, sent was {:#04x}",
                self.received + at as u64,
                bytes[at],
                self.expected[at]
            )));
        }
        self.hash.update(bytes);
        self.received += bytes.len() as u64;
        Ok(())
    }

    /// Bytes taken so far.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.received
    }

    /// XXH3-128 of the bytes so far.
    #[must_use]
    pub fn hash(&self) -> u128 {
        self.hash.digest128()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_does_not_depend_on_how_it_is_cut() {
        let mut whole = vec![0; 1000];
        Stream::new(42).fill(&mut whole);
        let mut parts = vec![0; 1000];
        let mut stream = Stream::new(42);
        let mut at = 0;
        for len in [1, 7, 8, 3, 0, 64, 13, 904] {
            stream.fill(&mut parts[at..at + len]);
            at += len;
        }
        assert_eq!(at, 1000);
        assert!(whole == parts);
        let mut other = vec![0; 1000];
        Stream::new(43).fill(&mut other);
        assert!(whole != other);
    }

    #[test]
    fn the_first_wrong_byte_is_named() {
        let mut bytes = vec![0; 100];
        Stream::new(1).fill(&mut bytes);
        let mut check = Check::new(1);
        check.take(&bytes[..60]).unwrap();
        bytes[77] ^= 1;
        let error = check.take(&bytes[60..]).unwrap_err();
        assert!(error.to_string().contains("byte 77"), "{error}");
    }
}
