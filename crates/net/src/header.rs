//! The first bytes of a frame: copied once from the guest, then checked, then used. What is
//! delivered is this copy, so that nobody can change a header after it was judged.

use base::counter::DropReason;
use queue::seg::copy_out;
use queue::{Chain, ChainFault};

/// Length of `struct virtio_net_hdr_v1` (virtio 1.2, 5.1.6): what every frame starts with here.
pub const VNET_LEN: usize = 12;

/// Length of the legacy header of drivers that negotiated neither VERSION_1 nor MRG_RXBUF.
pub const VNET_LEN_LEGACY: usize = 10;

/// Bytes of a frame that we copy before looking at it. The longest headers a check reads are two
/// VLAN tags, IPv6 and a full TCP header: 14 + 8 + 40 + 60 = 122.
pub const HEAD_LEN: usize = 128;

/// Length of an Ethernet header without tags.
pub const ETH_LEN: usize = 14;

/// Longest frame: the largest IP packet (65,535) behind an Ethernet header with two VLAN tags.
pub const MAX_FRAME: usize = 65_535 + ETH_LEN + 8;

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

const IPPROTO_ICMP: u8 = 1;
const IPPROTO_TCP: u8 = 6;
const IPPROTO_UDP: u8 = 17;
const IPPROTO_ICMPV6: u8 = 58;

/// The header of a frame to which nothing is to be done, in one buffer.
pub const PLAIN: [u8; VNET_LEN] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// A checked virtio-net header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Vnet {
    /// `F_*` bits.
    pub flags: u8,
    /// `GSO_*`, perhaps with [`GSO_ECN`].
    pub gso_type: u8,
    /// Bytes of headers in front of the payload, when segmented.
    pub hdr_len: u16,
    /// Payload bytes per segment.
    pub gso_size: u16,
    /// Where the checksum starts.
    pub csum_start: u16,
    /// Where it goes, from `csum_start`.
    pub csum_offset: u16,
}

/// Which header features a sender may use: virtio feature bits of its side.
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

    /// True when there is nothing to be done to the frame.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.flags == 0 && self.gso_type == GSO_NONE
    }

    /// True when the frame is to be cut into segments.
    pub fn is_gso(&self) -> bool {
        self.gso_type != GSO_NONE
    }

    /// The type without the ECN flag.
    pub fn gso_kind(&self) -> u8 {
        self.gso_type & !GSO_ECN
    }

    /// The header of the first `frame_len` bytes of a TCP frame, whose checksum, of the header at
    /// `offset`, is to be filled in then.
    pub(crate) fn trimmed(mut self, frame_len: usize, offset: usize) -> Self {
        // One segment is left: no super-packet.
        if self.is_gso() && frame_len <= usize::from(self.hdr_len) + usize::from(self.gso_size) {
            self = Self::default();
        }
        Self { flags: F_NEEDS_CSUM, csum_start: offset as u16, csum_offset: 16, ..self }
    }

    /// Checks a header against the frame and what its sender may use. Unknown flag bits are
    /// cleared, as the specification asks (5.1.6.2.1).
    fn check(
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

    /// Checks a super-packet with a checksum to fill in; returns the length of its headers. The sender's own `hdr_len` is
    /// never used: it is a hint, and a wrong one has hurt others (CVE-2024-11614).
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

/// Why a frame is dropped whose chain cannot be served.
#[cold]
fn drop_reason(fault: ChainFault) -> DropReason {
    match fault {
        ChainFault::TooManySegs | ChainFault::TooManyBytes => DropReason::TooBig,
        ChainFault::NotMapped => DropReason::Malformed,
    }
}

/// Our copy of a frame's beginning, in the layout it is delivered in.
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

    /// [`Head::check`] of a frame that asks for something. Apart from the short way, as the seldom copies
    /// are (`queue::seg`).
    #[inline(never)]
    fn check_offload(&mut self, ok: Allowed) -> Result<(), DropReason> {
        let mut raw = [0; VNET_LEN];
        raw.copy_from_slice(&self.raw[..VNET_LEN]);
        self.vnet = Vnet::check(&raw, self.eth(), self.frame_len, ok)?;
        self.raw[..VNET_LEN].copy_from_slice(&self.vnet.to_bytes(1));
        Ok(())
    }

    /// The checked virtio-net header.
    pub fn vnet(&self) -> Vnet {
        self.vnet
    }

    /// The copied part of the frame, from the destination address on.
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

    /// As [`Head::eth`], for stages.
    pub fn eth_mut(&mut self) -> &mut [u8] {
        &mut self.raw[VNET_LEN..VNET_LEN + self.head_len]
    }

    /// Makes it a whole frame of `len` bytes, all of them in our copy, with nothing to be done to it.
    pub(crate) fn cut(&mut self, len: usize) {
        (self.head_len, self.frame_len) = (len.min(self.head_len), len.min(self.head_len));
        self.vnet = Vnet::default();
        self.raw[..VNET_LEN].copy_from_slice(&PLAIN);
    }

    /// Shortens the frame to `len` bytes. The checksum of its TCP header, at `offset`, is then to be
    /// filled in.
    pub(crate) fn trim(&mut self, len: usize, offset: usize) {
        (self.head_len, self.frame_len) = (len.min(self.head_len), len.min(self.frame_len));
        self.vnet = self.vnet.trimmed(self.frame_len, offset);
        self.raw[..VNET_LEN].copy_from_slice(&self.vnet.to_bytes(1));
    }

    /// Virtio-net header (one buffer) and [`Head::eth`], as one piece.
    pub fn wire(&self) -> &[u8] {
        &self.raw[..VNET_LEN + self.head_len]
    }

    /// Length of the whole frame, without the virtio-net header.
    pub fn frame_len(&self) -> usize {
        self.frame_len
    }

    /// Destination address.
    pub fn dst(&self) -> Mac {
        Mac::read(&self.raw[VNET_LEN..])
    }

    /// Source address.
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

/// An Ethernet address in the low 48 bits, first byte highest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Mac(u64);

impl Mac {
    /// From its six bytes.
    pub fn new(bytes: [u8; 6]) -> Self {
        Self::read(&bytes)
    }

    /// From the first six bytes of `bytes` (which has them).
    #[inline]
    pub(crate) fn read(bytes: &[u8]) -> Self {
        let mut word = [0; 8];
        word[2..].copy_from_slice(&bytes[..6]);
        Self(u64::from_be_bytes(word))
    }

    /// Its six bytes.
    pub fn bytes(self) -> [u8; 6] {
        let b = self.0.to_be_bytes();
        [b[2], b[3], b[4], b[5], b[6], b[7]]
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    /// Multicast or broadcast.
    #[inline]
    pub fn is_group(self) -> bool {
        self.0 & (1 << 40) != 0
    }

    /// ff:ff:ff:ff:ff:ff.
    #[inline]
    pub fn is_broadcast(self) -> bool {
        self.0 == (1 << 48) - 1
    }

    /// All zeroes.
    pub fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// 01-80-C2-00-00-0x: for the next bridge only, never forwarded (IEEE 802.1Q, table 8-1).
    #[inline]
    pub fn is_link_local_group(self) -> bool {
        self.0 & !0xf == 0x0180_c200_0000
    }
}

impl std::fmt::Display for Mac {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let b = self.bytes();
        write!(f, "{:02x}:{:02x}:{:02x}:{:02x}:{:02x}:{:02x}", b[0], b[1], b[2], b[3], b[4], b[5])
    }
}

/// Type of the packet and where it starts, behind up to two VLAN tags; none when the frame is too
/// short or has more tags.
pub fn ether_type(head: &[u8]) -> Option<(u16, usize)> {
    let mut at = 12;
    for _ in 0..3 {
        let kind = be16(head, at)?;
        at += 2;
        if !matches!(kind, 0x8100 | 0x88a8 | 0x9100) {
            return Some((kind, at));
        }
        at += 2;
    }
    None
}

/// Big-endian 16 bits at `at`.
pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// The transport header of an IP packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct L4 {
    /// Where the IP header starts.
    pub ip: usize,
    /// Where the transport header starts.
    pub offset: usize,
    /// IP protocol number.
    pub proto: u8,
    /// IPv6.
    pub v6: bool,
    /// A fragment: the transport header may be elsewhere.
    pub fragment: bool,
    /// Not the first of them: the transport header is elsewhere.
    pub later: bool,
}

impl L4 {
    /// Finds it; none when this is not IP or the headers go beyond what we copied.
    pub fn find(head: &[u8]) -> Option<Self> {
        match ether_type(head)? {
            (0x0800, ip) => Self::find_v4(head, ip),
            (0x86dd, ip) => Self::find_v6(head, ip),
            _ => None,
        }
    }

    fn find_v4(head: &[u8], ip: usize) -> Option<Self> {
        let ihl = usize::from(head.get(ip)? & 0xf) * 4;
        if head[ip] >> 4 != 4 || ihl < 20 || head.len() < ip + ihl {
            return None;
        }
        let place = be16(head, ip + 6)?;
        let (fragment, later) = (place & 0x3fff != 0, place & 0x1fff != 0);
        Some(Self { ip, offset: ip + ihl, proto: head[ip + 9], v6: false, fragment, later })
    }

    /// Walks at most four extension headers (RFC 8200 lists four that may precede a payload).
    fn find_v6(head: &[u8], ip: usize) -> Option<Self> {
        if head.len() < ip + 40 || head[ip] >> 4 != 6 {
            return None;
        }
        let (mut proto, mut offset, mut fragment) = (head[ip + 6], ip + 40, false);
        for _ in 0..5 {
            let len = match proto {
                0 | 43 | 60 => (usize::from(*head.get(offset + 1)?) + 1) * 8,
                // One in another: no receiver takes it, and each could be judged as what it is not.
                44 if fragment => return None,
                44 => {
                    fragment = be16(head, offset + 2)? & 0xfff9 != 0;
                    8
                }
                _ => return Some(Self { ip, offset, proto, v6: true, fragment, later: false }),
            };
            // Behind the border of a later fragment there is payload, not a header.
            if proto == 44 && be16(head, offset + 2)? & 0xfff8 != 0 {
                let proto = *head.get(offset)?;
                let offset = offset + len;
                return Some(Self { ip, offset, proto, v6: true, fragment, later: true });
            }
            proto = *head.get(offset)?;
            offset += len;
        }
        None
    }
}

/// A number that is equal for all frames of one flow: picks the receive queue of frames from the
/// uplink, so that a flow stays in order.
pub fn flow_hash(head: &[u8]) -> u64 {
    let mut hash = Mac::read(head).bits() ^ Mac::read(&head[6..]).bits().rotate_left(17);
    if let Some(l4) = L4::find(head) {
        let addrs = if l4.v6 { l4.ip + 8..l4.ip + 40 } else { l4.ip + 12..l4.ip + 20 };
        for word in head[addrs].chunks_exact(4) {
            hash = (hash ^ u64::from(u32::from_le_bytes([word[0], word[1], word[2], word[3]])))
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        if !l4.fragment && matches!(l4.proto, IPPROTO_TCP | IPPROTO_UDP) {
            let ports = u64::from(be16(head, l4.offset).unwrap_or(0)) << 16
                | u64::from(be16(head, l4.offset + 2).unwrap_or(0));
            hash = (hash ^ ports).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }
    hash >> 32
}
