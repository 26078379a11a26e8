//! Cutting TCP and UDP super-packets, for receivers that did not negotiate them. The slow path; it
//! works on frames in memory of ours.

use base::counter::DropReason;

use crate::checksum::{fold, sum};
use crate::head::HEAD_LEN;
use crate::l4::L4;
use crate::vnet::{GSO_UDP_L4, Vnet};

/// Most segments of one super-packet: 64 KiB at the smallest MSS in use (536) is 122.
pub const MAX_SEGMENTS: usize = 128;

/// How a super-packet is cut.
#[derive(Debug, Clone, Copy)]
pub struct SegmentPlan {
    l4: L4,
    hdr_len: usize,
    payload_len: usize,
    size: usize,
    udp: bool,
}

impl SegmentPlan {
    /// Reads the headers of a checked super-packet: `head` its first bytes (at most
    /// [`HEAD_LEN`] are looked at), `frame_len` the length of the whole.
    pub fn new(head: &[u8], frame_len: usize, vnet: &Vnet) -> Result<Self, DropReason> {
        let head = &head[..head.len().min(HEAD_LEN)];
        let l4 = L4::find(head).ok_or(DropReason::Malformed)?;
        let hdr_len = usize::from(vnet.hdr_len);
        let size = usize::from(vnet.gso_size);
        let udp = vnet.gso_kind() == GSO_UDP_L4;
        let shortest = l4.offset + if udp { 8 } else { 20 };
        if size == 0 || hdr_len < shortest || hdr_len > head.len() || hdr_len >= frame_len {
            return Err(DropReason::Malformed);
        }
        let plan = Self { l4, hdr_len, payload_len: frame_len - hdr_len, size, udp };
        if plan.count() > MAX_SEGMENTS {
            return Err(DropReason::TooBig);
        }
        Ok(plan)
    }

    /// Number of segments.
    pub fn count(&self) -> usize {
        self.payload_len.div_ceil(self.size)
    }

    /// Frame length of every segment but the last, which may be shorter.
    pub fn longest(&self) -> usize {
        self.hdr_len + self.size.min(self.payload_len)
    }

    /// Bytes of headers of each segment.
    pub fn hdr_len(&self) -> usize {
        self.hdr_len
    }

    /// The payload of segment `index`, within the frame.
    pub fn payload<'f>(&self, frame: &'f [u8], index: usize) -> &'f [u8] {
        let from = self.hdr_len + index * self.size;
        &frame[from..frame.len().min(from + self.size)]
    }

    /// Writes the headers of segment `index` (below [`SegmentPlan::count`]) into `out` (at least
    /// [`SegmentPlan::hdr_len`] bytes), checksums done; returns their length.
    pub fn headers(&self, frame: &[u8], index: usize, out: &mut [u8]) -> usize {
        let head = &mut out[..self.hdr_len];
        head.copy_from_slice(&frame[..self.hdr_len]);
        let payload = self.payload(frame, index);
        let l4_len = self.hdr_len - self.l4.offset + payload.len();
        self.patch_ip(head, index, l4_len);
        let at = self.l4.offset;
        if self.udp {
            head[at + 4..at + 6].copy_from_slice(&(l4_len as u16).to_be_bytes());
            head[at + 6..at + 8].fill(0);
        } else {
            self.patch_tcp(head, index);
        }
        let value = fold(sum(payload, self.header_sum(head, l4_len)));
        let value = if value == 0 && self.udp { 0xffff } else { value };
        let place = at + if self.udp { 6 } else { 16 };
        head[place..place + 2].copy_from_slice(&value.to_be_bytes());
        self.hdr_len
    }

    /// Lengths, the IPv4 identification (one more per segment) and the IPv4 header checksum.
    fn patch_ip(&self, head: &mut [u8], index: usize, l4_len: usize) {
        let ip = self.l4.ip;
        if self.l4.v6 {
            let len = (self.l4.offset - ip - 40 + l4_len) as u16;
            head[ip + 4..ip + 6].copy_from_slice(&len.to_be_bytes());
            return;
        }
        let len = (self.l4.offset - ip + l4_len) as u16;
        head[ip + 2..ip + 4].copy_from_slice(&len.to_be_bytes());
        let id = u16::from_be_bytes([head[ip + 4], head[ip + 5]]).wrapping_add(index as u16);
        head[ip + 4..ip + 6].copy_from_slice(&id.to_be_bytes());
        head[ip + 10..ip + 12].fill(0);
        let value = fold(sum(&head[ip..self.l4.offset], 0));
        head[ip + 10..ip + 12].copy_from_slice(&value.to_be_bytes());
    }

    /// Sequence number; FIN and PSH on the last segment only, CWR on the first only (RFC 3168).
    fn patch_tcp(&self, head: &mut [u8], index: usize) {
        let at = self.l4.offset;
        let seq = u32::from_be_bytes([head[at + 4], head[at + 5], head[at + 6], head[at + 7]])
            .wrapping_add((index * self.size) as u32);
        head[at + 4..at + 8].copy_from_slice(&seq.to_be_bytes());
        if index + 1 < self.count() {
            head[at + 13] &= !0x09;
        }
        if index > 0 {
            head[at + 13] &= !0x80;
        }
        head[at + 16..at + 18].fill(0);
    }

    /// Sum of the pseudo header and the transport header. The transport header is a multiple of
    /// four bytes long, so the payload's sum can go on from it.
    fn header_sum(&self, head: &[u8], l4_len: usize) -> u64 {
        let ip = self.l4.ip;
        let addrs = if self.l4.v6 { ip + 8..ip + 40 } else { ip + 12..ip + 20 };
        let pseudo = l4_len as u64 + u64::from(self.l4.proto);
        sum(&head[self.l4.offset..], sum(&head[addrs], pseudo))
    }
}

#[cfg(test)]
mod tests;
