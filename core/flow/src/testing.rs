//! Segments for tests, made and read without the code under test.

#![allow(clippy::unwrap_used, missing_docs)]

pub mod icmp;

use std::net::IpAddr;

use crate::tracker::Tracker;
use crate::types::FlowKey;

/// Changes that only tests make to a connection.
impl Tracker {
    /// Notes that the peer has been heard, as if it had answered.
    pub fn pretend_heard(&mut self, key: &FlowKey) {
        self.table.get(key).unwrap().is_heard = true;
    }

    /// Whether its numbers are changed; none: it is not known.
    pub fn is_shifted(&mut self, key: &FlowKey) -> Option<bool> {
        self.table.get(key).map(|flow| flow.is_shifted())
    }
}

/// A TCP segment to be made; `key` is its sender's.
#[derive(Debug, Clone)]
pub struct Build {
    pub key: FlowKey,
    /// Destination, source.
    pub macs: [[u8; 6]; 2],
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    /// TCP options; padded to whole words.
    pub options: Vec<u8>,
    /// IPv4 options, or IPv6 extension headers behind `extra_kind`, each with its successor's kind
    /// in its first byte.
    pub extra: Vec<u8>,
    pub extra_kind: u8,
    pub payload: Vec<u8>,
    /// Bytes behind the packet.
    pub padding: usize,
}

/// `10.0.0.1:80` and `10.0.0.2:5000`, or the like of IPv6.
pub fn key(v6: bool) -> FlowKey {
    let address = |n: u8| -> IpAddr {
        match v6 {
            true => [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, n].into(),
            false => [10, 0, 0, n].into(),
        }
    };
    FlowKey { local: address(1), remote: address(2), local_port: 80, remote_port: 5000 }
}

/// The key of the other end.
pub fn mirror(key: &FlowKey) -> FlowKey {
    let FlowKey { local, remote, local_port, remote_port } = *key;
    FlowKey { local: remote, remote: local, local_port: remote_port, remote_port: local_port }
}

/// A timestamps option behind two paddings.
pub fn timestamps(value: u32, echo: u32) -> Vec<u8> {
    [&[1, 1, 8, 10][..], &value.to_be_bytes(), &echo.to_be_bytes()].concat()
}

/// A selective acknowledgement behind two paddings.
pub fn sacks(blocks: &[(u32, u32)]) -> Vec<u8> {
    let mut out = vec![1, 1, 5, 2 + 8 * blocks.len() as u8];
    for (left, right) in blocks {
        out.extend(left.to_be_bytes());
        out.extend(right.to_be_bytes());
    }
    out
}

impl Build {
    pub fn new(key: FlowKey, flags: u8, seq: u32, ack: u32) -> Self {
        Self {
            key,
            macs: [[2; 6], [4; 6]],
            seq,
            ack,
            flags,
            window: 1000,
            options: Vec::new(),
            extra: Vec::new(),
            extra_kind: 0,
            payload: Vec::new(),
            padding: 0,
        }
    }

    fn tcp(&self) -> Vec<u8> {
        let mut options = self.options.clone();
        options.resize(options.len().next_multiple_of(4), 0);
        let mut tcp = Vec::new();
        tcp.extend(self.key.local_port.to_be_bytes());
        tcp.extend(self.key.remote_port.to_be_bytes());
        tcp.extend(self.seq.to_be_bytes());
        tcp.extend(self.ack.to_be_bytes());
        tcp.extend([(5 + options.len() as u8 / 4) << 4, self.flags]);
        tcp.extend(self.window.to_be_bytes());
        tcp.extend([0; 4]);
        tcp.extend(options);
        tcp.extend(&self.payload);
        let check = !words(&[self.pseudo(tcp.len()), tcp.clone()].concat());
        tcp[16..18].copy_from_slice(&check.to_be_bytes());
        tcp
    }

    fn pseudo(&self, len: usize) -> Vec<u8> {
        let mut out = [octets(self.key.local), octets(self.key.remote)].concat();
        out.extend((len as u32).to_be_bytes());
        out.extend([0, 0, 0, 6]);
        out
    }

    /// The frame, with right checksums.
    pub fn frame(&self) -> Vec<u8> {
        let tcp = self.tcp();
        let mut out = self.macs.concat();
        let extra = &self.extra;
        if self.key.local.is_ipv4() {
            let header_len = 20 + extra.len();
            let mut ip = vec![0x40 | (header_len / 4) as u8, 0];
            ip.extend(((header_len + tcp.len()) as u16).to_be_bytes());
            ip.extend([0x12, 0x34, 0x40, 0, 64, 6, 0, 0]);
            ip.extend(octets(self.key.local));
            ip.extend(octets(self.key.remote));
            ip.extend(extra);
            let check = !words(&ip);
            ip[10..12].copy_from_slice(&check.to_be_bytes());
            out.extend([8, 0]);
            out.extend(ip);
        } else {
            let kind = if extra.is_empty() { 6 } else { self.extra_kind };
            out.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            out.extend(((extra.len() + tcp.len()) as u16).to_be_bytes());
            out.extend([kind, 64]);
            out.extend(octets(self.key.local));
            out.extend(octets(self.key.remote));
            out.extend(extra);
        }
        out.extend(tcp);
        out.extend(vec![0x77; self.padding]);
        out
    }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

/// Ones' complement sum, folded.
pub fn words(bytes: &[u8]) -> u16 {
    let pairs =
        bytes.chunks(2).map(|w| u64::from(w[0]) << 8 | w.get(1).map_or(0, |b| u64::from(*b)));
    let total: u64 = pairs.sum();
    // Modulo 0xffff, but not zero for what is not: as folding does.
    if total == 0 { 0 } else { ((total - 1) % 0xffff + 1) as u16 }
}

/// Headers and payload of a frame, as a reader of its own finds them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Read {
    pub seq: u32,
    pub ack: u32,
    pub flags: u8,
    pub window: u16,
    pub timestamps: Option<(u32, u32)>,
    pub sacks: Vec<(u32, u32)>,
    pub payload: Vec<u8>,
    /// How wrong the TCP checksum is; 0: right.
    pub off_by: u16,
}

/// Reads a frame, and checks its IP header.
pub fn read(frame: &[u8]) -> Read {
    use etherparse::{SlicedPacket, TcpOptionElement, TransportSlice};
    let packet = SlicedPacket::from_ethernet(frame).unwrap();
    let net = packet.net.unwrap();
    let pseudo = match (net.ipv4_ref(), net.ipv6_ref()) {
        (Some(ip), _) => {
            let header = ip.header().to_header();
            assert_eq!(header.header_checksum, header.calc_header_checksum(), "IPv4 checksum");
            [ip.header().source(), ip.header().destination()].concat()
        }
        (_, Some(ip)) => [ip.header().source(), ip.header().destination()].concat(),
        _ => panic!("neither IPv4 nor IPv6"),
    };
    let Some(TransportSlice::Tcp(tcp)) = packet.transport else { panic!("no TCP") };
    let all = tcp.slice();
    let rest = [&(all.len() as u32).to_be_bytes()[..], &[0, 0, 0, 6]].concat();
    let sum = words(&[&pseudo, &rest, all].concat());
    let (mut timestamps, mut sacks) = (None, Vec::new());
    for option in tcp.options_iterator() {
        match option {
            Ok(TcpOptionElement::Timestamp(value, echo)) => timestamps = Some((value, echo)),
            Ok(TcpOptionElement::SelectiveAcknowledgement(first, more)) => {
                sacks.push(first);
                sacks.extend(more.into_iter().flatten());
            }
            _ => {}
        }
    }
    Read {
        seq: tcp.sequence_number(),
        ack: tcp.acknowledgment_number(),
        flags: all[13],
        window: tcp.window_size(),
        timestamps,
        sacks,
        payload: tcp.payload().to_vec(),
        off_by: 0xffff - sum,
    }
}

#[cfg(test)]
#[test]
fn what_is_made_can_be_read() {
    for v6 in [false, true] {
        let mut build = Build::new(key(v6), 0x18, 5, 6);
        build.options = [timestamps(7, 8), sacks(&[(1, 2), (3, 4)])].concat();
        build.payload = vec![9; 33];
        build.padding = 5;
        let read = read(&build.frame());
        assert_eq!(
            (read.seq, read.ack, read.flags, read.window, read.off_by),
            (5, 6, 0x18, 1000, 0)
        );
        assert_eq!((read.timestamps, read.sacks), (Some((7, 8)), vec![(1, 2), (3, 4)]));
        assert_eq!(read.payload, [9; 33]);
    }
}
