//! Fixed buffer of a connection: bytes that a guest sent and the other end does not take yet.

use queue::Seg;
use queue::seg::copy_out;

use crate::limits::SPARE_BUFFERS;

/// Byte ring. Only bytes that were pushed ever come out: a buffer that served another connection
/// before shows nothing of it.
#[derive(Debug)]
pub(crate) struct ByteRing {
    bytes: Box<[u8]>,
    head: usize,
    len: usize,
}

impl ByteRing {
    /// Makes an empty ring. Large ones come zeroed from the kernel and cost no memory until used.
    pub fn new(capacity_bytes: usize) -> Self {
        Self { bytes: vec![0; capacity_bytes].into_boxed_slice(), head: 0, len: 0 }
    }

    pub fn capacity(&self) -> usize {
        self.bytes.len()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn clear(&mut self) {
        self.head = 0;
        self.len = 0;
    }

    /// Copies `len` bytes of a guest, from `offset` in `src`, behind those that are there. Returns
    /// how many fitted.
    pub fn push(&mut self, src: &[Seg], offset: usize, len: usize) -> usize {
        let len = len.min(self.capacity() - self.len);
        let start = (self.head + self.len) % self.capacity();
        let first = len.min(self.capacity() - start);
        let mut done = copy_out(src, offset, &mut self.bytes[start..start + first]);
        if done == first && first < len {
            done += copy_out(src, offset + first, &mut self.bytes[..len - first]);
        }
        self.len += done;
        done
    }

    /// Returns the oldest bytes, up to `max`, in two pieces.
    pub fn front(&self, max: usize) -> (&[u8], &[u8]) {
        let len = self.len.min(max);
        let first = len.min(self.capacity() - self.head);
        (&self.bytes[self.head..self.head + first], &self.bytes[..len - first])
    }

    /// Forgets the oldest `len` bytes.
    pub fn consume(&mut self, len: usize) {
        let len = len.min(self.len);
        self.len -= len;
        self.head = if self.len == 0 { 0 } else { (self.head + len) % self.capacity() };
    }
}

/// Memory of a domain for the buffers of its connections.
#[derive(Debug)]
pub(crate) struct BufferPool {
    /// Most bytes of all buffers in use.
    pub max_bytes: u64,
    /// Bytes of all buffers in use.
    pub used_bytes: u64,
    /// Freed buffers for the next connections.
    pub spare: Vec<ByteRing>,
}

impl BufferPool {
    pub fn new(max_bytes: u64) -> Self {
        Self { max_bytes, used_bytes: 0, spare: Vec::with_capacity(SPARE_BUFFERS) }
    }

    /// Takes an empty buffer: a spare one of this size, or a new one.
    pub fn take(&mut self, len_bytes: u64) -> ByteRing {
        let spare = self.spare.pop().filter(|r| r.capacity() as u64 == len_bytes);
        self.used_bytes += len_bytes;
        spare.unwrap_or_else(|| ByteRing::new(len_bytes as usize))
    }

    /// Gives a buffer back.
    pub fn give_back(&mut self, mut ring: ByteRing) {
        self.used_bytes -= ring.capacity() as u64;
        if self.spare.len() < SPARE_BUFFERS {
            ring.clear();
            self.spare.push(ring);
        }
    }
}
