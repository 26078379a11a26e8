use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
use proptest::prelude::*;

use super::*;
use crate::header::{F_NEEDS_CSUM, GSO_TCPV4, GSO_TCPV6, Vnet};

/// A TCP or UDP super-packet with `len` payload bytes, and its header.
pub(crate) fn super_packet(v6: bool, udp: bool, len: usize, size: u16) -> (Vec<u8>, Vnet) {
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

/// All segments of a super-packet.
fn cut(frame: &[u8], vnet: &Vnet) -> Vec<Vec<u8>> {
    let plan = Plan::new(frame, frame.len(), vnet).unwrap();
    let one = |index| {
        let mut head = [0; HEAD_LEN];
        let n = plan.headers(frame, index, &mut head);
        [&head[..n], plan.payload(frame, index)].concat()
    };
    (0..plan.count()).map(one).collect()
}

/// Checks a finished frame's checksums by an independent reader; returns its payload.
pub(crate) fn verify(frame: &[u8]) -> Vec<u8> {
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
pub(crate) fn make_partial(frame: &mut [u8], vnet: &Vnet) {
    let v6 = vnet.csum_start == 54;
    let (addrs, proto) = if v6 { (22..54, frame[20]) } else { (26..34, frame[23]) };
    let len = (frame.len() - usize::from(vnet.csum_start)) as u64;
    let value = !fold(sum(&frame[addrs], len + u64::from(proto)));
    let at = usize::from(vnet.csum_start + vnet.csum_offset);
    frame[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

#[test]
fn segments_carry_right_headers_and_all_bytes() {
    for (v6, udp) in [(false, false), (true, false), (false, true), (true, true)] {
        for (len, size) in [(1, 1000), (1000, 1000), (1001, 1000), (60_000, 1448), (5000, 536)] {
            let (frame, vnet) = super_packet(v6, udp, len, size);
            let segments = cut(&frame, &vnet);
            assert_eq!(segments.len(), len.div_ceil(usize::from(size)));
            let mut got = Vec::new();
            for (index, segment) in segments.iter().enumerate() {
                check_order(segment, index, segments.len(), size, v6, udp);
                got.extend(verify(segment));
            }
            assert_eq!(got, frame[usize::from(vnet.hdr_len)..]);
        }
    }
}

fn check_order(segment: &[u8], index: usize, count: usize, size: u16, v6: bool, udp: bool) {
    let packet = SlicedPacket::from_ethernet(segment).unwrap();
    if !v6 {
        let id = packet.net.as_ref().unwrap().ipv4_ref().unwrap().header().identification();
        assert_eq!(usize::from(id), index, "IPv4 identification");
    }
    if udp {
        return;
    }
    let Some(TransportSlice::Tcp(tcp)) = packet.transport else { panic!("no TCP") };
    let step = u32::from(size).wrapping_mul(index as u32);
    assert_eq!(tcp.sequence_number(), 0xffff_ff00u32.wrapping_add(step));
    assert_eq!((tcp.fin(), tcp.psh()), (index + 1 == count, index + 1 == count));
    assert_eq!(tcp.cwr(), index == 0);
    assert!(tcp.ack());
}

#[test]
fn partial_checksums_are_completed() {
    for (v6, udp) in [(false, false), (true, false), (false, true), (true, true)] {
        for len in [0, 1, 2, 3, 999, 1400] {
            let (mut frame, mut vnet) = super_packet(v6, udp, len, 1);
            vnet.gso_type = 0;
            make_partial(&mut frame, &vnet);
            complete_checksum(&mut frame, &vnet).unwrap();
            assert_eq!(verify(&frame).len(), len);
        }
    }
}

#[test]
fn too_many_segments_are_refused() {
    let (frame, vnet) = super_packet(false, false, 60_000, 400);
    let plan = Plan::new(&frame, frame.len(), &vnet);
    assert_eq!(plan.unwrap_err(), DropReason::TooBig);
}

#[test]
fn sums_of_odd_and_large_inputs() {
    // RFC 1071, section 3.
    let bytes = [0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7];
    assert_eq!(fold(sum(&bytes, 0)), !0xddf2);
    assert_eq!(fold(sum(&[0xff; 3], 0)), 0x00ff);
    assert_eq!(fold(sum(&vec![0xff; 65_535], 0)), 0x00ff);
}

proptest! {
    #[test]
    fn no_input_makes_it_panic(
        bytes in proptest::collection::vec(any::<u8>(), 14..300),
        ether in prop_oneof![Just([8u8, 0]), Just([0x86, 0xdd]), any::<[u8; 2]>()],
        fields in any::<(u8, u16, u16, u16, u16)>(),
    ) {
        let mut bytes = bytes;
        bytes[12..14].copy_from_slice(&ether);
        let (gso_type, hdr_len, gso_size, csum_start, csum_offset) = fields;
        let flags = F_NEEDS_CSUM;
        let vnet = Vnet { flags, gso_type, hdr_len, gso_size, csum_start, csum_offset };
        if let Ok(plan) = Plan::new(&bytes, bytes.len(), &vnet) {
            let total: usize = (0..plan.count()).map(|i| plan.payload(&bytes, i).len()).sum();
            prop_assert_eq!(total, bytes.len() - plan.hdr_len());
            for index in 0..plan.count() {
                plan.headers(&bytes, index, &mut [0; HEAD_LEN]);
            }
        }
        let _ = complete_checksum(&mut bytes, &vnet);
    }
}
