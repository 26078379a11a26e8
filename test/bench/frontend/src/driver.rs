//! A network port as its driver sees it: two queues and their buffers.

use crate::error::FrontendError;
use crate::frame::{Station, write_headers, write_payload};
use crate::memory::Memory;
use crate::port::{Port, Queue, Reach, features_of};
use crate::ring::{Buf, MAX_CHAIN, RingShape};

/// Bytes of the virtio-net header (virtio 1.2, 5.1.6).
pub const VNET_LEN: usize = 12;
/// `VIRTIO_NET_F_MRG_RXBUF`.
const MRG_RXBUF: u64 = 1 << 15;
/// Size of a mergeable receive buffer, and of the pieces of a long frame that is sent.
const PIECE: usize = 4096;
/// Smallest receive buffer that is not mergeable: an Ethernet frame of the usual MTU.
const MIN_RX_LEN: usize = 1536;

/// Receive queue of a port (virtio 1.2, 5.1.2).
pub const RX: usize = 0;
/// Transmit queue of a port.
pub const TX: usize = 1;

/// Request of a driver to its port.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    /// Both queues.
    pub shape: RingShape,
    /// Receive buffers may be smaller than frames.
    pub mergeable: bool,
    /// Length of the frames that the driver sends, with Ethernet header, without virtio-net header.
    pub frame_bytes: usize,
    /// Guest memory of huge pages.
    pub huge: bool,
}

/// One device as a guest's driver sees it.
#[derive(Debug)]
pub struct Driver {
    /// Port with the queues of the driver.
    pub port: Port,
    /// Receive buffers, as many as the queue has descriptors.
    pub rx: Buffers,
    /// Frames to send, ready with their headers.
    pub tx: Buffers,
}

/// The buffers of a queue: chain `k` begins `k * stride` bytes into the memory at `base`.
#[derive(Debug, Clone, Copy)]
pub struct Buffers {
    base: *mut u8,
    guest: u64,
    stride: usize,
    /// Bytes of a chain.
    pub len: usize,
    piece: usize,
    write: bool,
    /// How many there are.
    pub count: usize,
}

impl Buffers {
    fn new(
        memory: &mut Memory,
        count: usize,
        len: usize,
        piece: usize,
        write: bool,
    ) -> Result<Self, FrontendError> {
        // Not a multiple of a page: pages of equal offset would share the same cache sets.
        let stride = len.next_multiple_of(64) + if len > PIECE / 2 { 64 } else { 0 };
        let base = memory.alloc(stride * count, 64)?;
        let guest = memory.guest_addr(base);
        Ok(Self { base, guest, stride, len, piece, write, count })
    }

    /// Buffers of a chain.
    pub fn chain_len(&self) -> usize {
        self.len.div_ceil(self.piece)
    }

    /// The bytes of chain `k`. Only while the device does not own them.
    pub fn bytes(&mut self, k: usize) -> &mut [u8] {
        assert!(k < self.count);
        // SAFETY: the chain lies in the memory that `base` was allocated from, which lives as long
        // as its port; nobody else has a reference, and the device is done with it.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(k * self.stride), self.len) }
    }

    /// Posts chain `k`.
    #[inline]
    pub fn post(&self, k: usize, queue: &mut Queue) {
        let start = self.guest + (k * self.stride) as u64;
        if self.len <= self.piece {
            let buf = Buf { addr: start, len: self.len as u32, write: self.write };
            return queue.ring.post(&[buf], k as u16);
        }
        let mut bufs = [Buf { addr: 0, len: 0, write: self.write }; MAX_CHAIN];
        let count = self.chain_len();
        for (i, buf) in bufs[..count].iter_mut().enumerate() {
            let at = i * self.piece;
            buf.addr = start + at as u64;
            buf.len = self.piece.min(self.len - at) as u32;
        }
        queue.ring.post(&bufs[..count], k as u16);
    }
}

impl Driver {
    /// Connects and starts both queues, with frames from `me` to `peer` ready, and no receive
    /// buffer posted.
    pub fn new(
        reach: Reach<'_>,
        asked: Asked,
        me: Station,
        peer: Station,
    ) -> Result<Self, FrontendError> {
        let mut session = reach.session()?;
        let mergeable = if asked.mergeable { MRG_RXBUF } else { 0 };
        session.negotiate(features_of(asked.shape) | mergeable)?;
        let size = usize::from(asked.shape.size);
        let full = VNET_LEN + asked.frame_bytes;
        let (tx_len, rx_len) =
            (full, if asked.mergeable { PIECE.min(full.max(2048)) } else { full.max(MIN_RX_LEN) });
        let tx_count = (size / full.div_ceil(PIECE)).max(1);
        let tables = if asked.shape.indirect { size * MAX_CHAIN * 16 * 2 } else { 0 };
        let bytes = (tx_len + 128) * tx_count + (rx_len + 128) * size + tables + (1 << 20);
        let mut memory = Memory::new(bytes, asked.huge)?;
        let rx = Buffers::new(&mut memory, size, rx_len, rx_len, true)?;
        let mut tx = Buffers::new(&mut memory, tx_count, tx_len, PIECE, false)?;
        for k in 0..tx_count {
            let frame = &mut tx.bytes(k)[VNET_LEN..];
            write_headers(frame, me, peer);
            write_payload(frame, 0);
        }
        let port = Port::start(session, memory, asked.shape, 2)?;
        Ok(Self { port, rx, tx })
    }

    /// Posts all receive buffers, once.
    pub fn post_all(&mut self) -> Result<(), FrontendError> {
        for k in 0..self.rx.count {
            self.rx.post(k, &mut self.port.queues[RX]);
        }
        self.port.queues[RX].publish()
    }
}
