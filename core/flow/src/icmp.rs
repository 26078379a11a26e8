//! ICMP errors about segments that a guest sent, or a twin in its place.
//!
//! A router that cannot pass a segment on sends its beginning back: above all where it is too long,
//! for without that word the connection stalls (RFC 2923). A kernel believes it only of a segment
//! that is on its way, by the sequence number (RFC 5927, 4.1), and that is the wire's. Twins count
//! as the wire does. For the guest it is made its own number; so is the acknowledgement, if it is
//! quoted. All else stays as it was.
//!
//! # Limits
//! - Nothing is looked at unless all that is read stands in the first 128 bytes of the frame: ports
//!   and sequence number behind two IP headers. Those that are quoted have no IPv6 extension
//!   headers.
//! - Timestamps and selective acknowledgements that are quoted stay the wire's: nobody reads them.

use crate::flow::Flow;
use crate::segment::{addresses, after, be32, packet_end, pseudo_sum, put_summed};
use crate::table::FlowTable;
use crate::types::FlowKey;
use frame::{
    F_NEEDS_CSUM, Frame, FrameBuffer, IPPROTO_ICMP, IPPROTO_ICMPV6, IPPROTO_TCP, L4, be16, fold,
    sum,
};

/// Destination unreachable, "fragmentation needed" among it; time exceeded; parameter problem (RFC
/// 792).
const ERRORS_V4: [u8; 3] = [3, 11, 12];

/// Destination unreachable, packet too big, time exceeded, parameter problem (RFC 4443).
const ERRORS_V6: [u8; 4] = [1, 2, 3, 4];

/// Bytes of the ICMP header, in front of the quoted packet.
const ICMP_LEN: usize = 8;

/// Bytes of the TCP header that are quoted at least (RFC 792): ports and sequence number.
const MIN_QUOTE: usize = 8;

/// Bytes of it that are looked at, if they are there: up to its options.
const MAX_QUOTE: usize = 20;

/// Receiver of an error: the sender of the segment that it is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IcmpTarget {
    Guest,
    Twin,
    /// No receiver: the error is about no segment that is on its way.
    Nobody,
}

/// A parsed error. Offsets are from the beginning of the Ethernet header.
#[derive(Debug, Clone, Copy)]
struct IcmpError {
    l4: L4,
    /// Behind the message.
    end: usize,
    /// The quoted TCP header.
    tcp: usize,
    /// Bytes of it that are there.
    tcp_len: usize,
    /// The connection; its local end sent the segment.
    key: FlowKey,
    /// The number that it was sent with.
    seq: u32,
}

impl IcmpError {
    /// Reads an untagged, unfragmented error about a TCP segment; `frame_len` is the length of the
    /// whole frame, of which `eth` is the beginning.
    fn parse(eth: &[u8], frame_len: usize) -> Option<Self> {
        let l4 = find(eth)?;
        let kind = eth.get(l4.offset)?;
        let is_error = if l4.v6 { ERRORS_V6.contains(kind) } else { ERRORS_V4.contains(kind) };
        let end = packet_end(eth, l4)?;
        if !is_error || end > frame_len {
            return None;
        }
        let quoted = l4.offset + ICMP_LEN;
        let tcp = quoted + if l4.v6 { v6_len(eth, quoted)? } else { v4_len(eth, quoted)? };
        let there = eth.len().min(end).checked_sub(tcp).filter(|there| *there >= MIN_QUOTE)?;
        let (local, remote) = addresses(eth, quoted, l4.v6);
        // An error goes to who sent what it is about.
        let (_, to) = addresses(eth, l4.ip, l4.v6);
        if to != local {
            return None;
        }
        let (local_port, remote_port) = (be16(eth, tcp)?, be16(eth, tcp + 2)?);
        let key = FlowKey { local, remote, local_port, remote_port };
        let tcp_len = there.min(MAX_QUOTE);
        Some(Self { l4, end, tcp, tcp_len, key, seq: be32(eth, tcp + 4) })
    }

    /// Whether it came as it was sent; `whole` is all of the frame.
    fn is_sum_right(&self, whole: &[u8]) -> bool {
        let message = &whole[self.l4.offset..self.end];
        let before = if self.l4.v6 { pseudo_sum(whole, self.l4, message.len()) } else { 0 };
        fold(sum(message, before)) == 0
    }

    /// Makes the numbers of the quoted segment the guest's. Both checksums stay as right, or as
    /// wrong, as they were.
    fn edit_for_guest(&self, eth: &mut [u8], flow: &Flow) {
        let mut copy = [0; MAX_QUOTE];
        let header = &mut copy[..self.tcp_len & !1];
        header.copy_from_slice(&eth[self.tcp..self.tcp + header.len()]);
        let has_ack = header.len() >= 12;
        let has_sum = header.len() >= 18;
        let mut put = |at: usize, number: u32| {
            let bytes = number.to_be_bytes();
            match has_sum {
                true => put_summed(header, (0, 16), at, &bytes),
                false => header[at..at + bytes.len()].copy_from_slice(&bytes),
            }
        };
        put(4, self.seq.wrapping_sub(flow.shift.send));
        if has_ack {
            let ack = flow.receive.guest_seq(be32(eth, self.tcp + 8));
            put(8, ack.wrapping_sub(flow.shift.receive));
        }
        let start = self.l4.offset;
        put_summed(eth, (start, start + 2), self.tcp, header);
    }
}

/// The ICMP header. Other protocols, UDP above all, are let go after a look at one byte.
#[inline]
fn find(eth: &[u8]) -> Option<L4> {
    let (kind, proto) = match be16(eth, 12)? {
        0x0800 => (IPPROTO_ICMP, *eth.get(23)?),
        0x86dd => (IPPROTO_ICMPV6, *eth.get(20)?),
        _ => return None,
    };
    // Extension headers of IPv6, as in [`L4::find`].
    let may_be = proto == kind || (kind == IPPROTO_ICMPV6 && matches!(proto, 0 | 43 | 44 | 60));
    let l4 = may_be.then(|| L4::find(eth)).flatten()?;
    (l4.proto == kind && !l4.fragment).then_some(l4)
}

/// Length of the IPv4 header of a quoted segment. A later fragment has no TCP header.
fn v4_len(eth: &[u8], at: usize) -> Option<usize> {
    let header = eth.get(at..at + 20)?;
    let len = usize::from(header[0] & 0xf) * 4;
    let is_first = be16(header, 6)? & 0x1fff == 0;
    (header[0] >> 4 == 4 && len >= 20 && header[9] == IPPROTO_TCP && is_first).then_some(len)
}

/// Length of the IPv6 header of a quoted segment.
fn v6_len(eth: &[u8], at: usize) -> Option<usize> {
    let header = eth.get(at..at + 40)?;
    (header[0] >> 4 == 6 && header[6] == IPPROTO_TCP).then_some(header.len())
}

impl Flow {
    /// Sender of the segment that begins at `seq`. Nobody: it is one of long ago, or never was.
    fn sender_of(&self, seq: u32) -> IcmpTarget {
        if after(self.send.guest_from, seq) || after(seq, self.send.end) {
            return IcmpTarget::Nobody;
        }
        match self.send.twin {
            Some(twin) if !after(twin.start, seq) => IcmpTarget::Twin,
            _ => IcmpTarget::Guest,
        }
    }
}

impl FlowTable {
    /// Takes a frame for the guest that is no segment, its beginning in `eth`: changed in place, if
    /// it is an error about a segment that the guest knows by other numbers.
    pub(crate) fn error_comes(
        &mut self,
        frame: &Frame<'_>,
        eth: &mut [u8],
        buffer: &mut FrameBuffer,
    ) -> IcmpTarget {
        let Some(error) = IcmpError::parse(eth, frame.len()) else { return IcmpTarget::Guest };
        let Some(flow) = self.get(&error.key).filter(|flow| flow.is_shifted()) else {
            return IcmpTarget::Guest;
        };
        // Of a damaged one, that number may be wrong as well: its receiver drops it.
        let is_summed = frame.vnet.flags & F_NEEDS_CSUM == 0;
        if !is_summed || !buffer.load(frame) || !error.is_sum_right(buffer.eth()) {
            return IcmpTarget::Guest;
        }
        let target = flow.sender_of(error.seq);
        if target == IcmpTarget::Guest {
            error.edit_for_guest(eth, flow);
        }
        target
    }
}

#[cfg(test)]
mod tests;
