//! The way out of the host, as the switch's thread sees it.

use std::sync::Arc;

use base::counter::{DropReason, QueueStats};
use base::io::Wire;
use base::wire_queue::WireQueue;
use frame::{Body, Frame, GSO_UDP_L4, HEAD_LEN, MAX_SLICES, SegmentPlan, VNET_LEN, Vnet, io_slice};

/// A wire with what the switch keeps beside it.
pub(crate) struct Uplink {
    pub queue: WireQueue,
    /// The wire takes UDP super-packets.
    pub uso: bool,
    /// The wire could not get its receive buffers at the last try.
    pub unfilled: bool,
}

impl Uplink {
    pub fn new(wire: Box<dyn Wire>, stats: Arc<QueueStats>, uso: bool) -> Self {
        Self { queue: WireQueue::new(wire, stats, MAX_SLICES), uso, unfilled: false }
    }

    /// Queues a frame.
    ///
    /// # Safety
    /// The frame's bytes stay valid until [`Uplink::flush`].
    pub unsafe fn send(&mut self, frame: &Frame<'_>) -> Result<(), DropReason> {
        if frame.vnet.gso_kind() == GSO_UDP_L4 && !self.uso {
            return Err(DropReason::TooBig);
        }
        let pieces = self.queue.pieces();
        pieces.push(io_slice(frame.head));
        if !frame.body.slices(pieces) {
            return Err(DropReason::TooBig);
        }
        // SAFETY: the caller's promise.
        unsafe { self.queue.send()? };
        self.queue.stats.requests.add(1);
        self.queue.stats.bytes.add(frame.len() as u64);
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

    /// Sends what is queued; afterwards no frame is in use.
    pub fn flush(&mut self) {
        self.queue.flush();
    }
}
