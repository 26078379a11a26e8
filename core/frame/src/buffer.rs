//! A whole frame in memory of ours, where all of it has to be seen or changed.

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
    /// Makes an empty one, with room for the longest frame.
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

    /// The same bytes as [`FrameBuffer::eth`], to be changed.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vnet::F_NEEDS_CSUM;

    #[test]
    fn a_frame_comes_back_whole_with_the_header_asked_for() {
        let mut buffer = FrameBuffer::new();
        assert!(buffer.eth().is_empty());
        let vnet = Vnet { flags: F_NEEDS_CSUM, csum_start: 34, csum_offset: 16, ..Vnet::default() };
        for len in [14, HEAD_LEN, HEAD_LEN + 1, MAX_FRAME] {
            let bytes: Vec<u8> = (0..VNET_LEN + len).map(|n| (n * 7) as u8).collect();
            let (head, rest) = bytes.split_at(VNET_LEN + len.min(60));
            let loaded = Frame { vnet: Vnet::default(), head, body: Body::Ours(rest) };
            assert!(buffer.load(&loaded));
            assert_eq!(buffer.eth(), &bytes[VNET_LEN..]);
            let frame = buffer.frame(vnet);
            assert_eq!((frame.vnet, frame.len()), (vnet, len));
            assert_eq!(frame.head[..VNET_LEN], vnet.to_bytes(1));
            assert_eq!(frame.eth(), &bytes[VNET_LEN..][..len.min(HEAD_LEN)]);
            let Body::Ours(rest) = frame.body else { panic!("{:?}", frame.body) };
            assert_eq!(rest, &bytes[(VNET_LEN + HEAD_LEN).min(bytes.len())..]);
        }
    }

    #[test]
    fn a_sender_without_the_bytes_is_told() {
        let body = Body::Guest { segs: &[], offset: 0, len: 1 };
        let head = &[0; VNET_LEN + 14];
        assert!(!FrameBuffer::new().load(&Frame { vnet: Vnet::default(), head, body }));
    }
}
