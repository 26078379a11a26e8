//! Super-packets for tests, and an independent reader that checks what became of them.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};

use crate::checksum::{fold, sum};
use crate::vnet::{F_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, GSO_UDP_L4, Vnet};

/// A TCP or UDP super-packet with `len` payload bytes, and its header.
pub fn super_packet(v6: bool, udp: bool, len: usize, size: u16) -> (Vec<u8>, Vnet) {
    let payload: Vec<u8> = (0..len).map(|i| (i * 31 + 7) as u8).collect();
    let eth = PacketBuilder::ethernet2([0x52, 0x54, 0, 0, 0, 1], [0x52, 0x54, 0, 0, 0, 2]);
    let mut out = Vec::new();
    let (v4_src, v4_dst) = ([10, 0, 0, 1], [10, 0, 0, 2]);
    let (v6_src, v6_dst) = ([0xfd; 16], [0xfe; 16]);
    match (v6, udp) {
        (false, false) => tcp(eth.ipv4(v4_src, v4_dst, 64), &mut out, &payload),
        (true, false) => tcp(eth.ipv6(v6_src, v6_dst, 64), &mut out, &payload),
        (false, true) => {
            eth.ipv4(v4_src, v4_dst, 64).udp(5, 6).write(&mut out, &payload).unwrap();
        }
        (true, true) => {
            eth.ipv6(v6_src, v6_dst, 64).udp(5, 6).write(&mut out, &payload).unwrap();
        }
    }
    let csum_start = if v6 { 54 } else { 34 };
    let csum_offset = if udp { 6 } else { 16 };
    let gso_type = match (v6, udp) {
        (_, true) => GSO_UDP_L4,
        (false, _) => GSO_TCPV4,
        (true, _) => GSO_TCPV6,
    };
    let hdr_len = csum_start + if udp { 8 } else { 32 };
    let flags = F_NEEDS_CSUM;
    (out, Vnet { flags, gso_type, hdr_len, gso_size: size, csum_start, csum_offset })
}

fn tcp(
    ip: etherparse::PacketBuilderStep<etherparse::IpHeaders>,
    out: &mut Vec<u8>,
    payload: &[u8],
) {
    use etherparse::TcpOptionElement::{Noop, Timestamp};
    ip.tcp(1000, 2000, 0xffff_ff00, 4096)
        .ack(77)
        .fin()
        .psh()
        .cwr()
        .options(&[Noop, Noop, Timestamp(1, 2)])
        .unwrap()
        .write(out, payload)
        .unwrap();
}

/// Checks a finished frame's checksums by an independent reader; returns its payload.
pub fn verify(frame: &[u8]) -> Vec<u8> {
    let packet = SlicedPacket::from_ethernet(frame).unwrap();
    let net = packet.net.unwrap();
    let (v4, v6) = (net.ipv4_ref(), net.ipv6_ref());
    if let Some(ip) = v4 {
        let header = ip.header().to_header();
        assert_eq!(header.header_checksum, header.calc_header_checksum(), "IPv4 header checksum");
        assert_eq!(usize::from(header.total_len), frame.len() - 14);
    }
    if let Some(ip) = v6 {
        assert_eq!(usize::from(ip.header().payload_length()), frame.len() - 54);
    }
    match packet.transport.unwrap() {
        TransportSlice::Tcp(tcp) => {
            let want = match (v4, v6) {
                (Some(ip), _) => {
                    let h = ip.header();
                    tcp.calc_checksum_ipv4(h.source(), h.destination()).unwrap()
                }
                (_, Some(ip)) => {
                    let h = ip.header();
                    tcp.calc_checksum_ipv6(h.source(), h.destination()).unwrap()
                }
                _ => panic!("neither IPv4 nor IPv6"),
            };
            assert_eq!(tcp.checksum(), want, "TCP checksum");
            tcp.payload().to_vec()
        }
        TransportSlice::Udp(udp) => {
            let header = udp.to_header();
            let want = match (v4, v6) {
                (Some(ip), _) => {
                    header.calc_checksum_ipv4(&ip.header().to_header(), udp.payload()).unwrap()
                }
                (_, Some(ip)) => {
                    header.calc_checksum_ipv6(&ip.header().to_header(), udp.payload()).unwrap()
                }
                _ => panic!("neither IPv4 nor IPv6"),
            };
            assert_eq!(udp.checksum(), want, "UDP checksum");
            assert_eq!(usize::from(udp.length()), 8 + udp.payload().len());
            udp.payload().to_vec()
        }
        _ => panic!("neither TCP nor UDP"),
    }
}

/// Puts the pseudo header's sum where the sender would, as for a partial checksum.
pub fn make_partial(frame: &mut [u8], vnet: &Vnet) {
    let v6 = vnet.csum_start == 54;
    let (addrs, proto) = if v6 { (22..54, frame[20]) } else { (26..34, frame[23]) };
    let len = (frame.len() - usize::from(vnet.csum_start)) as u64;
    let value = !fold(sum(&frame[addrs], len + u64::from(proto)));
    let at = usize::from(vnet.csum_start + vnet.csum_offset);
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
}
