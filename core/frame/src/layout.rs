//! Layout of a frame: headers in memory of ours, the rest perhaps in its sender's.

use base::io::IoSlice;
use queue::Seg;
use queue::seg::{copy_across, copy_in, subrange};

use crate::head::HEAD_LEN;
use crate::vnet::{VNET_LEN, Vnet};

/// Most pieces of a frame that leaves by a wire: what `writev` takes (IOV_MAX).
pub const MAX_SLICES: usize = 1024;

/// Room for the copied part of a frame, virtio-net header first.
pub type HeadBytes = [u8; VNET_LEN + HEAD_LEN];

/// A frame on its way, wherever it lies.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    /// The checked virtio-net header.
    pub vnet: Vnet,
    /// Virtio-net header (12 bytes, one buffer) and the first bytes of the frame.
    pub head: &'a [u8],
    /// The bytes behind `head`.
    pub body: Body<'a>,
}

/// The part of a frame behind our copy.
#[derive(Debug, Clone, Copy)]
pub enum Body<'a> {
    /// In the sender's memory.
    Guest {
        /// The sender's buffers.
        segs: &'a [Seg],
        /// Bytes of them in front of the body.
        offset: usize,
        /// Length of the body in bytes.
        len: usize,
    },
    /// In memory of ours.
    Ours(&'a [u8]),
}

impl<'a> Frame<'a> {
    /// Makes a frame all bytes of which are in `head`, with nothing to be done to it.
    pub fn short(head: &'a [u8]) -> Self {
        Self { vnet: Vnet::default(), head, body: Body::Ours(&[]) }
    }

    /// Length of the whole frame without the virtio-net header.
    #[inline]
    pub fn len(&self) -> usize {
        self.head.len() - VNET_LEN + self.body.len()
    }

    /// Whether it has no bytes but the virtio-net header.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Makes a frame of the first `len` bytes of this one (no more than it has), with the beginning
    /// and the header that are in `head`.
    pub fn shortened<'b>(&self, vnet: Vnet, head: &'b [u8], len: usize) -> Frame<'b>
    where
        Self: 'b,
    {
        let head = &head[..head.len().min(VNET_LEN + len)];
        let rest = len + VNET_LEN - head.len();
        let body = match self.body {
            Body::Guest { segs, offset, .. } => Body::Guest { segs, offset, len: rest },
            Body::Ours(bytes) => Body::Ours(&bytes[..rest]),
        };
        Frame { vnet, head, body }
    }

    /// The copied part of the frame, from the destination address on.
    pub fn eth(&self) -> &[u8] {
        &self.head[VNET_LEN..]
    }
}

impl Body<'_> {
    /// Length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            Body::Guest { len, .. } => *len,
            Body::Ours(bytes) => bytes.len(),
        }
    }

    /// Whether nothing is behind the copied part.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds the pieces that the body lies in to `out`, which has room for [`MAX_SLICES`]. False: it
    /// lies in more, or its sender's memory falls short.
    pub fn slices(&self, out: &mut Vec<IoSlice>) -> bool {
        match *self {
            Body::Guest { len: 0, .. } | Body::Ours([]) => true,
            Body::Guest { segs, offset, len } => subrange(segs, offset, len, out) == len,
            Body::Ours(bytes) => {
                out.push(io_slice(bytes));
                true
            }
        }
    }

    /// Copies `len` bytes, from `from` on, to the receiver's buffers `dst`, from `at` on. Returns
    /// how many were copied.
    #[inline]
    pub fn copy_to(&self, from: usize, len: usize, dst: &[Seg], at: usize) -> usize {
        match *self {
            Body::Guest { segs, offset, .. } => copy_across(segs, offset + from, dst, at, len),
            Body::Ours(bytes) => copy_in(dst, at, &bytes[from..from + len]),
        }
    }
}

/// Bytes that are read where they lie.
pub fn io_slice(bytes: &[u8]) -> IoSlice {
    IoSlice { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
}

#[cfg(test)]
mod tests;
