//! Headers of a frame: packet type, IP and transport header, a hash of its flow.

use crate::mac::Mac;

/// IP protocol number of ICMP.
pub const IPPROTO_ICMP: u8 = 1;
/// IP protocol number of TCP.
pub const IPPROTO_TCP: u8 = 6;
/// IP protocol number of UDP.
pub const IPPROTO_UDP: u8 = 17;
/// IP protocol number of ICMPv6.
pub const IPPROTO_ICMPV6: u8 = 58;

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
pub fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// The transport header of an IP packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct L4 {
    /// Offset of the IP header.
    pub ip: usize,
    /// Offset of the transport header.
    pub offset: usize,
    /// IP protocol number.
    pub proto: u8,
    /// IPv6.
    pub v6: bool,
    /// A fragment: the transport header may be elsewhere.
    pub fragment: bool,
    /// A fragment that is not the first: the transport header is elsewhere.
    pub later: bool,
}

impl L4 {
    /// Finds the transport header; none when this is not IP or the headers go beyond what we
    /// copied.
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
