//! The virtio-net header (virtio 1.2, 5.1.6): checked once, in front of every frame.

use base::counter::DropReason;

use crate::l4::{IPPROTO_ICMP, IPPROTO_ICMPV6, IPPROTO_TCP, IPPROTO_UDP, L4};

/// Length of `struct virtio_net_hdr_v1` (virtio 1.2, 5.1.6): what every frame starts with here.
pub const VNET_LEN: usize = 12;

/// Length of the legacy header of drivers that negotiated neither VERSION_1 nor MRG_RXBUF.
pub const VNET_LEN_LEGACY: usize = 10;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`: the checksum is still to be filled in.
pub const F_NEEDS_CSUM: u8 = 1;
/// `VIRTIO_NET_HDR_F_DATA_VALID`: somebody has checked the checksum.
pub const F_DATA_VALID: u8 = 2;
/// No segmentation.
pub const GSO_NONE: u8 = 0;
/// TCP over IPv4.
pub const GSO_TCPV4: u8 = 1;
/// TCP over IPv6.
pub const GSO_TCPV6: u8 = 4;
/// UDP over IPv4 or IPv6, cut at datagram borders.
pub const GSO_UDP_L4: u8 = 5;
/// The TCP flow uses ECN (a flag on top of the type).
pub const GSO_ECN: u8 = 0x80;

/// The header of a frame to which nothing is to be done, in one buffer.
pub const PLAIN: [u8; VNET_LEN] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// A checked virtio-net header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Vnet {
    /// Flags: `F_*` bits.
    pub flags: u8,
    /// `GSO_*`, perhaps with [`GSO_ECN`].
    pub gso_type: u8,
    /// Bytes of headers in front of the payload, when segmented.
    pub hdr_len: u16,
    /// Payload bytes per segment.
    pub gso_size: u16,
    /// First byte that the checksum covers.
    pub csum_start: u16,
    /// Place of the checksum, from `csum_start`.
    pub csum_offset: u16,
}

/// Header features that a sender may use: virtio feature bits of its side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowed {
    /// NEEDS_CSUM.
    pub csum: bool,
    /// TCP segmentation over IPv4.
    pub tso4: bool,
    /// TCP segmentation over IPv6.
    pub tso6: bool,
    /// The ECN flag.
    pub ecn: bool,
    /// UDP segmentation.
    pub uso: bool,
    /// DATA_VALID is believed: only from the host's kernel.
    pub data_valid: bool,
}

impl Allowed {
    /// Everything: frames from the host's kernel.
    pub const ALL: Self =
        Self { csum: true, tso4: true, tso6: true, ecn: true, uso: true, data_valid: true };
}

impl Vnet {
    /// The bytes that go before a frame, with the number of buffers it takes at the receiver.
    pub fn to_bytes(self, num_buffers: u16) -> [u8; VNET_LEN] {
        let mut out = [0; VNET_LEN];
        out[0] = self.flags;
        out[1] = self.gso_type;
        out[2..4].copy_from_slice(&self.hdr_len.to_le_bytes());
        out[4..6].copy_from_slice(&self.gso_size.to_le_bytes());
        out[6..8].copy_from_slice(&self.csum_start.to_le_bytes());
        out[8..10].copy_from_slice(&self.csum_offset.to_le_bytes());
        out[10..12].copy_from_slice(&num_buffers.to_le_bytes());
        out
    }

    /// Whether nothing is to be done to the frame.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.flags == 0 && self.gso_type == GSO_NONE
    }

    /// Whether the frame is to be cut into segments.
    #[inline]
    pub fn is_gso(&self) -> bool {
        self.gso_type != GSO_NONE
    }

    /// The type without the ECN flag.
    #[inline]
    pub fn gso_kind(&self) -> u8 {
        self.gso_type & !GSO_ECN
    }

    /// The header for the first `frame_len` bytes of a TCP frame. The checksum of its TCP header,
    /// at `offset`, is then to be filled in.
    pub fn trimmed(mut self, frame_len: usize, offset: usize) -> Self {
        // One segment is left: no super-packet.
        if self.is_gso() && frame_len <= usize::from(self.hdr_len) + usize::from(self.gso_size) {
            self = Self::default();
        }
        Self { flags: F_NEEDS_CSUM, csum_start: offset as u16, csum_offset: 16, ..self }
    }

    /// Checks a header against the frame and what its sender may use. Unknown flag bits are
    /// cleared, as the specification asks (5.1.6.2.1).
    pub(crate) fn check(
        raw: &[u8; VNET_LEN],
        head: &[u8],
        frame_len: usize,
        ok: Allowed,
    ) -> Result<Self, DropReason> {
        let word = |at: usize| u16::from_le_bytes([raw[at], raw[at + 1]]);
        let mut vnet = Self::default();
        let mut l4 = None;
        if raw[0] & F_NEEDS_CSUM != 0 {
            l4 = L4::find(head);
            (vnet.csum_start, vnet.csum_offset) = (word(6), word(8));
            if !ok.csum || !l4.is_some_and(|l4| vnet.sum_is_behind_headers(l4, frame_len)) {
                return Err(DropReason::Malformed);
            }
            vnet.flags = F_NEEDS_CSUM;
        } else if raw[0] & F_DATA_VALID != 0 && ok.data_valid {
            vnet.flags = F_DATA_VALID;
        }
        if raw[1] != GSO_NONE {
            vnet.gso_type = raw[1];
            vnet.gso_size = word(4);
            let l4 = l4.ok_or(DropReason::Malformed)?;
            vnet.hdr_len = vnet.check_gso(head, l4, frame_len, ok)?;
        }
        Ok(vnet)
    }

    /// Whether the checksum goes where it can change nothing that was judged. Whoever completes
    /// it (we, the host's kernel, a network card) writes 16 bits that the sender chooses by its
    /// payload: in the IP header or a neighbour message they would be another's address. Behind
    /// UDP, GRE and the like it may be that of a packet in a tunnel. A fragment has no sum.
    #[inline]
    fn sum_is_behind_headers(&self, l4: L4, frame_len: usize) -> bool {
        let (start, offset) = (usize::from(self.csum_start), self.csum_offset);
        let place_ok = match l4.proto {
            IPPROTO_TCP => start == l4.offset && offset == 16,
            IPPROTO_UDP => (start == l4.offset && offset == 6) || start >= l4.offset + 8,
            IPPROTO_ICMP | IPPROTO_ICMPV6 => start == l4.offset && offset == 2,
            _ => start >= l4.offset,
        };
        place_ok && !l4.fragment && start + usize::from(offset) + 2 <= frame_len
    }

    /// Checks a super-packet with a checksum to fill in; returns the length of its headers. The
    /// sender's own `hdr_len` is never used: it is a hint, and a wrong one has hurt others
    /// (CVE-2024-11614).
    fn check_gso(
        &self,
        head: &[u8],
        l4: L4,
        frame_len: usize,
        ok: Allowed,
    ) -> Result<u16, DropReason> {
        let (allowed, proto, v6_right) = match self.gso_kind() {
            GSO_TCPV4 => (ok.tso4, IPPROTO_TCP, !l4.v6),
            GSO_TCPV6 => (ok.tso6, IPPROTO_TCP, l4.v6),
            GSO_UDP_L4 => (ok.uso, IPPROTO_UDP, true),
            _ => return Err(DropReason::Malformed),
        };
        let ecn_ok = self.gso_type & GSO_ECN == 0 || (ok.ecn && proto == IPPROTO_TCP);
        // The rest of the checksum's place was judged: see `sum_is_behind_headers`.
        let sum_ok = usize::from(self.csum_start) == l4.offset;
        let fits = allowed && ecn_ok && sum_ok && v6_right;
        if !fits || l4.proto != proto || self.gso_size == 0 {
            return Err(DropReason::Malformed);
        }
        let l4_len = match proto {
            IPPROTO_TCP => {
                let offset = head.get(l4.offset + 12).ok_or(DropReason::Malformed)?;
                usize::from(offset >> 4) * 4
            }
            _ => 8,
        };
        let min = if proto == IPPROTO_TCP { 20 } else { 8 };
        let hdr_len = l4.offset + l4_len;
        if l4_len < min || hdr_len > head.len() || hdr_len >= frame_len {
            return Err(DropReason::Malformed);
        }
        Ok(hdr_len as u16)
    }
}
