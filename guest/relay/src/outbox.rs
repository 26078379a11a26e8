//! Bytes that are to be sent, and are sent in pieces.

/// A longer vector that is empty does not stay, and so many sent bytes are moved out of the way.
const KEPT_BYTES: usize = 256 << 10;

/// Bytes in order.
#[derive(Debug, Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    start: usize,
}

impl Outbox {
    /// What is appended here is sent last.
    pub fn end(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// What is to be sent.
    pub fn rest(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// How much that is.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// So many bytes were sent.
    pub fn sent(&mut self, len: usize) {
        self.start = (self.start + len).min(self.bytes.len());
        if self.start == self.bytes.len() {
            self.clear();
        } else if self.start >= KEPT_BYTES && self.start >= self.bytes.len() / 2 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
    }

    /// Nothing is to be sent.
    pub fn clear(&mut self) {
        self.start = 0;
        if self.bytes.capacity() > KEPT_BYTES {
            self.bytes = Vec::new();
        } else {
            self.bytes.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stays_short_though_it_is_never_empty() {
        let mut outbox = Outbox::default();
        let (mut put, mut got) = (0u8, 0u8);
        outbox.end().extend((0..100_000).map(|n| (n % 251) as u8));
        put = put.wrapping_add((100_000 % 251) as u8);
        for _ in 0..5000 {
            for _ in 0..1000 {
                outbox.end().push(put);
                put = (put + 1) % 251;
            }
            for byte in &outbox.rest()[..1000] {
                assert_eq!(*byte, got);
                got = (got + 1) % 251;
            }
            outbox.sent(1000);
            assert_eq!(outbox.len(), 100_000);
            assert!(outbox.bytes.capacity() <= 4 * KEPT_BYTES);
        }
        outbox.sent(100_000);
        assert!(outbox.is_empty() && outbox.bytes.capacity() <= KEPT_BYTES);
    }
}
