//! A whole frame in memory of ours, for what has to see or change all of it.

use queue::seg::copy_out;

use crate::head::{HEAD_LEN, MAX_FRAME};
use crate::layout::{Body, Frame};
use crate::vnet::{VNET_LEN, Vnet};

/// Room for one frame, virtio-net header first. Allocated once, used for one frame after the other.
pub struct FrameBuffer {
    bytes: Box<[u8]>,
    len: usize,
}

impl std::fmt::Debug for FrameBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FrameBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Default for FrameBuffer {
    fn default() -> Self {
        Self::new()
    }
}

impl FrameBuffer {
    /// An empty one, with room for the longest frame.
    pub fn new() -> Self {
        Self { bytes: vec![0; VNET_LEN + MAX_FRAME].into_boxed_slice(), len: VNET_LEN }
    }

    /// Copies a whole frame here. False when its sender's memory fell short.
    pub fn load(&mut self, frame: &Frame<'_>) -> bool {
        let (head, total) = (frame.head.len(), VNET_LEN + frame.len());
        self.bytes[..head].copy_from_slice(frame.head);
        self.len = total;
        let rest = &mut self.bytes[head..total];
        match frame.body {
            Body::Guest { segs, offset, .. } => copy_out(segs, offset, rest) == rest.len(),
            Body::Ours(bytes) => {
                rest.copy_from_slice(bytes);
                true
            }
        }
    }

    /// The frame without virtio-net header.
    pub fn eth(&self) -> &[u8] {
        &self.bytes[VNET_LEN..self.len]
    }

    /// As [`FrameBuffer::eth`], to be changed.
    pub fn eth_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[VNET_LEN..self.len]
    }

    /// The frame, with this virtio-net header.
    pub fn frame(&mut self, vnet: Vnet) -> Frame<'_> {
        self.bytes[..VNET_LEN].copy_from_slice(&vnet.to_bytes(1));
        let split = self.len.min(VNET_LEN + HEAD_LEN);
        let (head, rest) = self.bytes[..self.len].split_at(split);
        Frame { vnet, head, body: Body::Ours(rest) }
    }
}
