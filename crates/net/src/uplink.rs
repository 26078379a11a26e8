//! The way out of the host, as the switch's thread sees it.

use std::io;
use std::sync::Arc;

use base::counter::{DropReason, QueueStats};
use base::io::{IoSlice, Wire};
use frame::{Body, Frame, GSO_UDP_L4, HEAD_LEN, MAX_SLICES, SegmentPlan, VNET_LEN, Vnet, io_slice};

/// A wire with what the switch keeps beside it.
pub(crate) struct Uplink {
    pub wire: Box<dyn Wire>,
    pub stats: Arc<QueueStats>,
    /// The wire takes UDP super-packets.
    pub uso: bool,
    /// The wire could not get its receive buffers at the last try.
    pub unfilled: bool,
    bufs: Vec<IoSlice>,
    unflushed: bool,
}

// SAFETY: `bufs` holds addresses only between `send_bufs` and the end of the same call; the rest
// is `Send` by itself.
unsafe impl Send for Uplink {}

impl Uplink {
    pub fn new(wire: Box<dyn Wire>, stats: Arc<QueueStats>, uso: bool) -> Self {
        let bufs = Vec::with_capacity(MAX_SLICES);
        Self { wire, stats, uso, unfilled: false, bufs, unflushed: false }
    }

    /// Queues a frame.
    ///
    /// # Safety
    /// The frame's bytes stay valid until [`Uplink::flush`].
    pub unsafe fn send(&mut self, frame: &Frame<'_>) -> Result<(), DropReason> {
        if frame.vnet.gso_kind() == GSO_UDP_L4 && !self.uso {
            return Err(DropReason::TooBig);
        }
        // SAFETY: the caller's promise.
        unsafe { self.queue(frame)? };
        self.stats.requests.add(1);
        self.stats.bytes.add(frame.len() as u64);
        Ok(())
    }

    /// Cuts a super-packet that the wire does not take, from memory of ours, and sends the pieces.
    /// `frame` has no virtio-net header.
    pub fn send_segments(&mut self, frame: &[u8], plan: &SegmentPlan) -> Result<(), DropReason> {
        let mut head = [0; VNET_LEN + HEAD_LEN];
        head[..VNET_LEN].copy_from_slice(&Vnet::default().to_bytes(1));
        for index in 0..plan.count() {
            let n = plan.headers(frame, index, &mut head[VNET_LEN..]);
            let body = Body::Ours(plan.payload(frame, index));
            let piece = Frame { vnet: Vnet::default(), head: &head[..VNET_LEN + n], body };
            // SAFETY: flushed before `head` changes or goes.
            let sent = unsafe { self.send(&piece) };
            self.flush();
            sent?;
        }
        Ok(())
    }

    /// # Safety
    /// As [`Uplink::send`].
    unsafe fn queue(&mut self, frame: &Frame<'_>) -> Result<(), DropReason> {
        self.bufs.clear();
        self.bufs.push(io_slice(frame.head));
        if !frame.body.slices(&mut self.bufs) {
            return Err(DropReason::TooBig);
        }
        // SAFETY: the caller's promise.
        let mut sent = unsafe { self.wire.send(&self.bufs) };
        if matches!(&sent, Err(e) if e.kind() == io::ErrorKind::WouldBlock) {
            self.unflushed = true;
            self.flush();
            // SAFETY: as above.
            sent = unsafe { self.wire.send(&self.bufs) };
        }
        self.unflushed = true;
        sent.map_err(|_| DropReason::WireError)
    }

    /// Sends what is queued; afterwards no frame is in use.
    pub fn flush(&mut self) {
        if !self.unflushed {
            return;
        }
        self.unflushed = false;
        let refused = match self.wire.flush() {
            Ok(refused) => u64::from(refused),
            // Whatever was queued is gone; one count says that something was.
            Err(_) => 1,
        };
        self.stats.drops[DropReason::WireError as usize].add(refused);
    }
}
