//! Queue of bytes that are sent in pieces.

/// Largest empty vector that is kept, and most sent bytes that stay in front.
const KEPT_BYTES: usize = 256 << 10;

/// Bytes to send, in order.
#[derive(Debug, Default)]
pub struct Outbox {
    bytes: Vec<u8>,
    start: usize,
}

impl Outbox {
    /// End of the queue, to append to.
    pub fn end(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Bytes that are not sent yet.
    pub fn rest(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// Number of bytes that are not sent yet.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Whether all bytes are sent.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Notes that `len` bytes were sent.
    pub fn sent(&mut self, len: usize) {
        self.start = (self.start + len).min(self.bytes.len());
        if self.start == self.bytes.len() {
            self.clear();
        } else if self.start >= KEPT_BYTES && self.start >= self.bytes.len() / 2 {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
    }

    /// Drops all bytes.
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
