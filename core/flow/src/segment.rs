//! A TCP segment in our copy of a frame's beginning: what it says, and changes to it that keep its
//! checksum as right, or as wrong, as it was.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use frame::{IPPROTO_TCP, L4, be16, fold, sum};

use crate::FlowKey;

/// TCP flag that ends the sender's bytes.
pub(crate) const FIN: u8 = 1;
/// TCP flag that begins a connection.
pub(crate) const SYN: u8 = 2;
/// TCP flag that resets a connection.
pub(crate) const RST: u8 = 4;
/// TCP flag that asks to hand bytes on.
pub(crate) const PSH: u8 = 8;
/// TCP flag that makes the acknowledgement number valid.
pub(crate) const ACK: u8 = 16;
/// TCP flag that makes the urgent pointer valid.
pub(crate) const URG: u8 = 32;
/// TCP flag that tells of congestion.
pub(crate) const ECE: u8 = 64;

/// Options, by kind (RFC 7323, RFC 2018).
const END_OF_OPTIONS: u8 = 0;
const NO_OPERATION: u8 = 1;
const WINDOW_SCALE: u8 = 3;
const SACK: u8 = 5;
const TIMESTAMPS: u8 = 8;

/// Largest window scale (RFC 7323, 2.3).
const MAX_SCALE: u8 = 14;

/// Whether `a` comes after `b` in sequence space.
#[inline]
pub(crate) fn after(a: u32, b: u32) -> bool {
    a.wrapping_sub(b) as i32 > 0
}

/// The later of two sequence numbers.
#[inline]
pub(crate) fn later(a: u32, b: u32) -> u32 {
    if after(a, b) { a } else { b }
}

/// A parsed segment. Offsets are from the beginning of the Ethernet header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    l4: L4,
    header_len: usize,
    /// Sequence number of the first byte.
    pub seq: u32,
    /// Acknowledgement number; means something with [`ACK`] only.
    pub ack: u32,
    /// Flag bits.
    pub flags: u8,
    /// Window as it stands in the header, not scaled.
    pub window: u16,
    /// Payload bytes.
    pub payload_len: usize,
    /// How far windows are to be shifted; a SYN says it.
    pub scale: u8,
    /// Offset of the timestamps: the sender's, then the echo.
    timestamps: Option<usize>,
    /// First byte of the selective acknowledgements, and how many there are.
    sack: Option<(usize, usize)>,
}

impl Segment {
    /// Reads an untagged, unfragmented TCP segment whose headers are all in `eth`; `frame_len` is
    /// the length of the whole frame.
    #[inline]
    pub fn parse(eth: &[u8], frame_len: usize) -> Option<Self> {
        Self::parse_any(eth, frame_len).filter(|segment| !segment.l4.fragment)
    }

    /// The same of the first fragment of one: its payload goes on in others.
    pub fn parse_first(eth: &[u8], frame_len: usize) -> Option<Self> {
        Self::parse_any(eth, frame_len).filter(|segment| segment.l4.fragment)
    }

    #[inline]
    fn parse_any(eth: &[u8], frame_len: usize) -> Option<Self> {
        // Tagged frames belong to other networks, where the same addresses may mean others.
        let l4 = match be16(eth, 12)? {
            0x0800 | 0x86dd => L4::find(eth)?,
            _ => return None,
        };
        if l4.proto != IPPROTO_TCP || l4.later {
            return None;
        }
        let header_len = usize::from(*eth.get(l4.offset + 12)? >> 4) * 4;
        let end = l4.offset + header_len;
        let packet_end = packet_end(eth, l4)?;
        if header_len < 20 || end > eth.len() || packet_end < end || packet_end > frame_len {
            return None;
        }
        let mut segment = Self {
            l4,
            header_len,
            seq: be32(eth, l4.offset + 4),
            ack: be32(eth, l4.offset + 8),
            flags: eth[l4.offset + 13],
            window: be16(eth, l4.offset + 14)?,
            payload_len: packet_end - end,
            scale: 0,
            timestamps: None,
            sack: None,
        };
        segment.find_options(eth);
        Some(segment)
    }

    fn find_options(&mut self, eth: &[u8]) {
        let (mut at, end) = (self.l4.offset + 20, self.l4.offset + self.header_len);
        while at < end {
            let len = match eth[at] {
                END_OF_OPTIONS => return,
                NO_OPERATION => {
                    at += 1;
                    continue;
                }
                _ if at + 1 < end => usize::from(eth[at + 1]),
                _ => return,
            };
            if len < 2 || at + len > end {
                return;
            }
            match (eth[at], len) {
                (WINDOW_SCALE, 3) => self.scale = eth[at + 2].min(MAX_SCALE),
                (TIMESTAMPS, 10) => self.timestamps = Some(at + 2),
                (SACK, 10 | 18 | 26 | 34) => self.sack = Some((at + 2, (len - 2) / 8)),
                _ => {}
            }
            at += len;
        }
    }

    /// Sequence number behind its last byte; SYN and FIN count.
    #[inline]
    pub fn end(&self) -> u32 {
        let marks = u32::from(self.has(SYN)) + u32::from(self.has(FIN));
        self.seq.wrapping_add(self.payload_len as u32).wrapping_add(marks)
    }

    /// Whether any of these flags is set.
    #[inline]
    pub fn has(&self, flags: u8) -> bool {
        self.flags & flags != 0
    }

    /// Bytes of the frame up to the payload.
    #[inline]
    pub fn headers_len(&self) -> usize {
        self.l4.offset + self.header_len
    }

    /// Whether it acknowledges selectively.
    pub fn has_sacks(&self) -> bool {
        self.sack.is_some()
    }

    /// The flow of a segment that its local end sends.
    #[inline]
    pub fn key_of_sender(&self, eth: &[u8]) -> FlowKey {
        let (source, destination) = addresses(eth, self.l4.ip, self.l4.v6);
        let (from, to) = self.ports(eth);
        FlowKey { local: source, remote: destination, local_port: from, remote_port: to }
    }

    /// The flow of a segment that its local end receives.
    #[inline]
    pub fn key_of_receiver(&self, eth: &[u8]) -> FlowKey {
        let FlowKey { local, remote, local_port, remote_port } = self.key_of_sender(eth);
        FlowKey { local: remote, remote: local, local_port: remote_port, remote_port: local_port }
    }

    fn ports(&self, eth: &[u8]) -> (u16, u16) {
        let word = |at: usize| u16::from_be_bytes([eth[at], eth[at + 1]]);
        (word(self.l4.offset), word(self.l4.offset + 2))
    }

    /// The timestamps: the sender's clock, and the echo.
    #[inline]
    pub fn timestamps(&self, eth: &[u8]) -> Option<(u32, u32)> {
        let at = self.timestamps?;
        Some((be32(eth, at), be32(eth, at + 4)))
    }
}

/// Big-endian 32 bits at `at`, which are there.
#[inline]
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Source and destination of the IP header at `ip`, all of which is there.
#[inline]
pub(crate) fn addresses(bytes: &[u8], ip: usize, v6: bool) -> (IpAddr, IpAddr) {
    if v6 {
        let read = |at: usize| {
            let mut address = [0; 16];
            address.copy_from_slice(&bytes[at..at + 16]);
            IpAddr::V6(Ipv6Addr::from(address))
        };
        return (read(ip + 8), read(ip + 24));
    }
    let read = |at: usize| IpAddr::V4(Ipv4Addr::from(be32(bytes, at)));
    (read(ip + 12), read(ip + 16))
}

/// End of the IP packet, as its header says: what is behind that is padding.
#[inline]
pub(crate) fn packet_end(eth: &[u8], l4: L4) -> Option<usize> {
    Some(match l4.v6 {
        false => l4.ip + usize::from(be16(eth, l4.ip + 2)?),
        true => l4.ip + 40 + usize::from(be16(eth, l4.ip + 4)?),
    })
}

/// Writes up to 64 bytes, and what they change into the checksum at `place`, which is not among
/// them. Its words begin at `start`.
#[inline]
pub(crate) fn put_summed(bytes: &mut [u8], (start, place): (usize, usize), at: usize, new: &[u8]) {
    // The words that hold these bytes; headers are whole words long.
    let first = at - (at - start) % 2;
    let last = first + (at + new.len() - first).next_multiple_of(2);
    let old_sum = sum16(&bytes[first..last]);
    bytes[at..at + new.len()].copy_from_slice(new);
    let new_sum = sum16(&bytes[first..last]);
    let check = u16::from_be_bytes([bytes[place], bytes[place + 1]]);
    // RFC 1624, equation 3.
    let total = u64::from(!check) + (0xffff * 32 - u64::from(old_sum)) + u64::from(new_sum);
    bytes[place..place + 2].copy_from_slice(&fold(total).to_be_bytes());
}

/// Changes a segment in place.
pub(crate) struct Editor<'a> {
    eth: &'a mut [u8],
    segment: &'a Segment,
    /// The checksum covers the segment; else it is yet to be filled in, and has the pseudo header's
    /// sum, which nothing here changes.
    summed: bool,
}

impl<'a> Editor<'a> {
    /// `summed`: see the field.
    pub fn new(eth: &'a mut [u8], segment: &'a Segment, summed: bool) -> Self {
        Self { eth, segment, summed }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        if !self.summed {
            self.eth[at..at + bytes.len()].copy_from_slice(bytes);
            return;
        }
        let start = self.segment.l4.offset;
        put_summed(self.eth, (start, start + 16), at, bytes);
    }

    fn put32(&mut self, at: usize, value: u32) {
        if be32(self.eth, at) != value {
            self.put(at, &value.to_be_bytes());
        }
    }

    /// The sequence number.
    pub fn set_seq(&mut self, seq: u32) {
        self.put32(self.segment.l4.offset + 4, seq);
    }

    /// The acknowledgement number.
    pub fn set_ack(&mut self, ack: u32) {
        self.put32(self.segment.l4.offset + 8, ack);
    }

    /// The window, not scaled.
    pub fn set_window(&mut self, window: u16) {
        self.put(self.segment.l4.offset + 14, &window.to_be_bytes());
    }

    /// All flags.
    pub fn set_flags(&mut self, flags: u8) {
        self.put(self.segment.l4.offset + 13, &[flags]);
    }

    /// Takes flags away.
    pub fn clear_flags(&mut self, flags: u8) {
        let at = self.segment.l4.offset + 13;
        let old = self.eth[at];
        if old & flags != 0 {
            self.put(at, &[old & !flags]);
        }
    }

    /// The timestamps, if there are any.
    pub fn set_timestamps(&mut self, value: u32, echo: u32) {
        if let Some(at) = self.segment.timestamps {
            self.put32(at, value);
            self.put32(at + 4, echo);
        }
    }

    /// Changes both edges of each selective acknowledgement; where `change` gives none, the whole
    /// option becomes padding: the blocks that are left may be told again, wrong ones may not.
    pub fn map_sacks(&mut self, change: impl Fn(u32, u32) -> Option<(u32, u32)>) {
        let Some((first, count)) = self.segment.sack else { return };
        for at in (first..first + 8 * count).step_by(8) {
            match change(be32(self.eth, at), be32(self.eth, at + 4)) {
                Some((left, right)) => {
                    self.put32(at, left);
                    self.put32(at + 4, right);
                }
                None => return self.put(first - 2, &[NO_OPERATION; 34][..2 + 8 * count]),
            }
        }
    }

    /// Makes it a segment without payload, with a checksum of its own. Returns the frame's new
    /// length, all of which is in our copy.
    pub fn strip(&mut self) -> usize {
        self.clear_flags(FIN | PSH | URG);
        let Segment { l4, header_len, .. } = *self.segment;
        let len = l4.offset + header_len;
        self.set_len(len);
        self.set_sum(0);
        let sum = sum(&self.eth[l4.offset..len], pseudo_sum(self.eth, l4, header_len));
        self.set_sum(fold(sum));
        len
    }

    /// Leaves it so many payload bytes, no more than it has, and no end. Its checksum is then to be
    /// filled in. Returns the frame's new length.
    pub fn trim(&mut self, payload_len: usize) -> usize {
        self.clear_flags(FIN | PSH | URG);
        let Segment { l4, header_len, .. } = *self.segment;
        let len = l4.offset + header_len + payload_len;
        self.set_len(len);
        self.set_sum(!fold(pseudo_sum(self.eth, l4, header_len + payload_len)));
        len
    }

    fn set_sum(&mut self, value: u16) {
        let at = self.segment.l4.offset + 16;
        self.eth[at..at + 2].copy_from_slice(&value.to_be_bytes());
    }

    /// The IP packet's length, for a frame of that length.
    fn set_len(&mut self, len: usize) {
        let l4 = self.segment.l4;
        if l4.v6 {
            let payload = (len - l4.ip - 40) as u16;
            self.eth[l4.ip + 4..l4.ip + 6].copy_from_slice(&payload.to_be_bytes());
            return;
        }
        self.eth[l4.ip + 2..l4.ip + 4].copy_from_slice(&((len - l4.ip) as u16).to_be_bytes());
        self.eth[l4.ip + 10..l4.ip + 12].fill(0);
        let check = fold(sum(&self.eth[l4.ip..l4.offset], 0));
        self.eth[l4.ip + 10..l4.ip + 12].copy_from_slice(&check.to_be_bytes());
    }
}

fn sum16(words: &[u8]) -> u32 {
    words.chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum()
}

/// The pseudo header's sum for a transport part of `len` bytes.
pub(crate) fn pseudo_sum(eth: &[u8], l4: L4, len: usize) -> u64 {
    let addresses = if l4.v6 { l4.ip + 8..l4.ip + 40 } else { l4.ip + 12..l4.ip + 20 };
    sum(&eth[addresses], len as u64 + u64::from(l4.proto))
}

impl Answer {
    /// One that says only these; `numbers`: sequence and acknowledgement.
    pub fn plain(flags: u8, (seq, ack): (u32, u32)) -> Self {
        Self { flags, seq, ack, window: 0, timestamps: None }
    }
}

impl Segment {
    /// Whether the checksum over headers and payload is right.
    pub fn is_sum_right(&self, eth: &[u8], payload: &[u8]) -> bool {
        let Self { l4, header_len, .. } = *self;
        let len = header_len + payload.len();
        let head = sum(&eth[l4.offset..l4.offset + header_len], pseudo_sum(eth, l4, len));
        // The header is a multiple of four bytes long, so the sum can go on from it.
        fold(sum(payload, head)) == 0
    }

    /// Turns a segment that the local end sent into an answer of its peer's, without payload. `eth`
    /// is changed up to the length that is returned.
    pub fn answer(&self, eth: &mut [u8], with: &Answer) -> usize {
        let (l4, ports) = (self.l4, self.l4.offset);
        for at in 0..6 {
            eth.swap(at, at + 6);
        }
        let (first, len) = if l4.v6 { (l4.ip + 8, 16) } else { (l4.ip + 12, 4) };
        for at in first..first + len {
            eth.swap(at, at + len);
        }
        eth.swap(ports, ports + 2);
        eth.swap(ports + 1, ports + 3);
        let mut editor = Editor::new(eth, self, false);
        editor.set_seq(with.seq);
        editor.set_ack(with.ack);
        editor.set_window(with.window);
        editor.eth[ports + 13] = with.flags;
        editor.map_sacks(|_, _| None);
        if let Some((value, echo)) = with.timestamps {
            editor.set_timestamps(value, echo);
        }
        editor.strip()
    }

    /// Offset of the TCP header.
    #[inline]
    pub fn offset(&self) -> usize {
        self.l4.offset
    }
}

/// Headers of a segment that is made here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Answer {
    pub flags: u8,
    pub seq: u32,
    pub ack: u32,
    /// Window as it stands in the header.
    pub window: u16,
    /// The sender's clock, and the echo.
    pub timestamps: Option<(u32, u32)>,
}

#[cfg(test)]
mod tests;
