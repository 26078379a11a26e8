//! First bytes of a frame: copied once from the guest, then checked, then used. What is
//! delivered is this copy, so that nobody can change a header after it was judged.

use base::counter::DropReason;
use queue::seg::copy_out;
use queue::{Chain, ChainFault};

use crate::mac::Mac;
use crate::vnet::{Allowed, GSO_NONE, PLAIN, VNET_LEN, VNET_LEN_LEGACY, Vnet};

/// Bytes of a frame that we copy before looking at it. The longest headers a check reads are two
/// VLAN tags, IPv6 and a full TCP header: 14 + 8 + 40 + 60 = 122.
pub const HEAD_LEN: usize = 128;

/// Length of an Ethernet header without tags.
pub const ETH_LEN: usize = 14;

/// Longest frame: the largest IP packet (65,535) behind an Ethernet header with two VLAN tags.
pub const MAX_FRAME: usize = 65_535 + ETH_LEN + 8;

/// Reason to drop a frame whose chain cannot be served.
#[cold]
fn drop_reason(fault: ChainFault) -> DropReason {
    match fault {
        ChainFault::TooManySegs | ChainFault::TooManyBytes => DropReason::TooBig,
        ChainFault::NotMapped => DropReason::Malformed,
    }
}

/// Copy of a frame's beginning in memory of ours, in the layout it is delivered in.
#[derive(Debug, Clone)]
pub struct Head {
    raw: [u8; VNET_LEN + HEAD_LEN],
    head_len: usize,
    frame_len: usize,
    vnet: Vnet,
}

impl Default for Head {
    fn default() -> Self {
        Self { raw: [0; VNET_LEN + HEAD_LEN], head_len: 0, frame_len: 0, vnet: Vnet::default() }
    }
}

impl Head {
    /// Copies and checks the beginning of a frame that a driver sent. `vnet_len` is the length of
    /// the header the driver uses.
    pub fn load_chain(
        &mut self,
        chain: &Chain<'_>,
        vnet_len: usize,
        ok: Allowed,
    ) -> Result<(), DropReason> {
        if let Some(fault) = chain.fault {
            return Err(drop_reason(fault));
        }
        self.set_len(chain.readable_len as usize, vnet_len)?;
        let end = VNET_LEN + self.head_len;
        let copied = if vnet_len == VNET_LEN {
            copy_out(chain.readable, 0, &mut self.raw[..end])
        } else {
            self.raw[VNET_LEN_LEGACY..VNET_LEN].fill(0);
            copy_out(chain.readable, 0, &mut self.raw[..VNET_LEN_LEGACY])
                + copy_out(chain.readable, vnet_len, &mut self.raw[VNET_LEN..end])
        };
        if copied != vnet_len + self.head_len {
            return Err(DropReason::Malformed);
        }
        self.check(ok)
    }

    /// Copies and checks the beginning of a frame in memory of ours (12-byte header first).
    pub fn load_slice(&mut self, bytes: &[u8], ok: Allowed) -> Result<(), DropReason> {
        self.set_len(bytes.len(), VNET_LEN)?;
        let end = VNET_LEN + self.head_len;
        self.raw[..end].copy_from_slice(&bytes[..end]);
        self.check(ok)
    }

    fn set_len(&mut self, total: usize, vnet_len: usize) -> Result<(), DropReason> {
        if total < vnet_len + ETH_LEN {
            return Err(DropReason::Malformed);
        }
        self.frame_len = total - vnet_len;
        if self.frame_len > MAX_FRAME {
            return Err(DropReason::TooBig);
        }
        self.head_len = self.frame_len.min(HEAD_LEN);
        Ok(())
    }

    #[inline]
    fn check(&mut self, ok: Allowed) -> Result<(), DropReason> {
        // The common case: nothing to be done to the frame.
        if self.raw[0] == 0 && self.raw[1] == GSO_NONE {
            self.vnet = Vnet::default();
            self.raw[..VNET_LEN].copy_from_slice(&PLAIN);
            return Ok(());
        }
        self.check_offload(ok)
    }

    /// [`Head::check`] of a frame that asks for something. Kept out of the short way, as seldom
    /// copies are (`queue::seg`).
    #[inline(never)]
    fn check_offload(&mut self, ok: Allowed) -> Result<(), DropReason> {
        let mut raw = [0; VNET_LEN];
        raw.copy_from_slice(&self.raw[..VNET_LEN]);
        self.vnet = Vnet::check(&raw, self.eth(), self.frame_len, ok)?;
        self.raw[..VNET_LEN].copy_from_slice(&self.vnet.to_bytes(1));
        Ok(())
    }

    /// The checked virtio-net header.
    #[inline]
    pub fn vnet(&self) -> Vnet {
        self.vnet
    }

    /// The copied part of the frame, from the destination address on.
    #[inline]
    pub fn eth(&self) -> &[u8] {
        &self.raw[VNET_LEN..VNET_LEN + self.head_len]
    }

    /// The first `N` bytes of [`Head::eth`], where there are as many.
    #[inline]
    pub fn first<const N: usize>(&self) -> Option<&[u8; N]> {
        if self.head_len < N {
            return None;
        }
        self.raw[VNET_LEN..].first_chunk()
    }

    /// The copied part of the frame, to be changed in place.
    #[inline]
    pub fn eth_mut(&mut self) -> &mut [u8] {
        &mut self.raw[VNET_LEN..VNET_LEN + self.head_len]
    }

    /// Cuts the frame to its first `len` bytes, all of them in our copy, with nothing to be done to
    /// it.
    pub fn cut(&mut self, len: usize) {
        (self.head_len, self.frame_len) = (len.min(self.head_len), len.min(self.head_len));
        self.vnet = Vnet::default();
        self.raw[..VNET_LEN].copy_from_slice(&PLAIN);
    }

    /// Shortens the frame to `len` bytes. The checksum of its TCP header, at `offset`, is then to
    /// be filled in.
    pub fn trim(&mut self, len: usize, offset: usize) {
        (self.head_len, self.frame_len) = (len.min(self.head_len), len.min(self.frame_len));
        self.vnet = self.vnet.trimmed(self.frame_len, offset);
        self.raw[..VNET_LEN].copy_from_slice(&self.vnet.to_bytes(1));
    }

    /// Virtio-net header (one buffer) and [`Head::eth`], as one piece.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.raw[..VNET_LEN + self.head_len]
    }

    /// Length of the whole frame, without the virtio-net header.
    #[inline]
    pub fn frame_len(&self) -> usize {
        self.frame_len
    }

    /// Destination address.
    #[inline]
    pub fn dst(&self) -> Mac {
        Mac::read(&self.raw[VNET_LEN..])
    }

    /// Source address.
    #[inline]
    pub fn src(&self) -> Mac {
        Mac::read(&self.raw[VNET_LEN + 6..])
    }

    /// Whether a VLAN tag follows the addresses.
    #[inline]
    pub fn is_tagged(&self) -> bool {
        let kind = self.first::<14>().map(|eth| u16::from_be_bytes([eth[12], eth[13]]));
        matches!(kind, Some(0x8100 | 0x88a8 | 0x9100))
    }
}
