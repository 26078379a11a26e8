//! Places of a checksum (ABUSE C1, C3): it is written after the frame was judged.
#![allow(non_snake_case)]

use std::net::IpAddr;

use base::counter::DropReason::{self, Malformed};
use etherparse::PacketBuilder;

use crate::allow::Allow;
use crate::binding::BindMode;
use crate::features;
use crate::testing::{BROADCAST, Lab, MODERN, Spec, mac, vnet};
use frame::testing::{make_partial, super_packet, verify};

const OWN: [u8; 4] = [10, 0, 5, 7];

fn own6() -> [u8; 16] {
    [[0xfd; 8], [5; 8]].concat().try_into().unwrap()
}

/// A guest bound to its addresses and a receiver for whom we complete checksums.
fn lab() -> Lab {
    let bound = Spec {
        bind: BindMode::MacAndIp,
        mac: Some(mac(0)),
        addresses: vec![IpAddr::from(OWN), IpAddr::from(own6()), IpAddr::from([10, 0, 0, 1])],
        allow: Allow { tunnel: true, ..Allow::default() },
        ..Spec::default()
    };
    let plain = Spec { features: MODERN & !features::OFFLOADS, ..Spec::default() };
    let mut lab = Lab::new(vec![bound, plain]);
    lab.guests[1].post(0, 100, 1600, 1);
    lab
}

/// The verdict on a partial checksum at `start` + `offset`; nothing arrives when it is bad.
fn judge(lab: &mut Lab, bytes: &[u8], start: u16, offset: u16) -> Option<DropReason> {
    let verdict = lab.judge_with(0, &vnet(1, 0, 0, start, offset), bytes);
    let arrived = lab.guests[1].recv_all(0).len();
    assert_eq!(arrived, usize::from(verdict.is_none()));
    verdict
}

fn udp(payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let step = PacketBuilder::ethernet2(mac(0), BROADCAST).ipv4(OWN, [10, 0, 0, 9], 64);
    step.udp(1000, 2000).write(&mut out, payload).unwrap();
    out
}

fn tagged(bytes: &[u8]) -> Vec<u8> {
    [&bytes[..12], &[0x81, 0, 0, 5], &bytes[12..]].concat()
}

#[test]
fn abuse_C1_checksum_placed_in_an_arp_message() {
    let head: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 2];
    let eth = [&BROADCAST[..], &mac(0), &[8, 6], &head, &mac(0), &OWN, &[0; 28]].concat();
    let mut lab = lab();
    for (start, offset) in [(20, 10), (20, 8), (22, 4), (14, 8), (42, 0)] {
        assert_eq!(judge(&mut lab, &eth, start, offset), Some(Malformed), "{start} {offset}");
        let (tagged, start) = (tagged(&eth), start + 4);
        assert_eq!(judge(&mut lab, &tagged, start, offset), Some(Malformed), "tagged {start}");
    }
}

#[test]
fn abuse_C1_checksum_placed_in_an_address() {
    let mut lab = lab();
    let v4 = udp(&[7; 100]);
    // The halves of the source, the protocol, and everything else in front of UDP's own place.
    for (start, offset) in [(26, 0), (26, 2), (14, 12), (20, 8), (33, 7), (34, 0), (35, 5), (41, 0)]
    {
        assert_eq!(judge(&mut lab, &v4, start, offset), Some(Malformed), "{start} {offset}");
    }
    let mut gre = v4.clone();
    gre[23] = 47;
    for (start, offset) in [(26, 0), (26, 2), (33, 2)] {
        assert_eq!(judge(&mut lab, &gre, start, offset), Some(Malformed), "GRE {start} {offset}");
    }
    let mut later = v4.clone();
    later[20..22].copy_from_slice(&[0x20, 0xb9]);
    assert_eq!(judge(&mut lab, &later, 34, 6), Some(Malformed), "a fragment");
    let (tcp, _) = super_packet(false, false, 500, 1400);
    let tcp = [&BROADCAST[..], &mac(0), &tcp[12..26], &OWN, &tcp[30..]].concat();
    assert_eq!(judge(&mut lab, &tcp, 34, 6), Some(Malformed), "not TCP's place");
    assert_eq!(judge(&mut lab, &tcp, 34, 16), None);
}

/// The sum would be the type of the message: an echo that becomes a redirect.
#[test]
fn abuse_C1_checksum_placed_in_an_icmp_message() {
    let mut lab = lab();
    let mut eth = udp(&[0; 40]);
    eth[23] = 1;
    eth[34] = 8;
    for (start, offset) in [(34, 0), (34, 4), (36, 0), (42, 0)] {
        assert_eq!(judge(&mut lab, &eth, start, offset), Some(Malformed), "{start} {offset}");
    }
    assert_eq!(judge(&mut lab, &eth, 34, 2), None);
}

#[test]
fn abuse_C1_checksum_placed_in_a_neighbour_message() {
    let mut lab = lab();
    let mut eth = [&BROADCAST[..], &mac(0), &[0x86, 0xdd, 0x60, 0, 0, 0, 0, 32, 58, 255]].concat();
    eth.extend([&own6()[..], &[0xff; 16], &[136, 0, 0, 0, 0x60, 0, 0, 0], &own6()].concat());
    eth.extend([&[2, 1][..], &mac(0)].concat());
    for (start, offset) in [(22, 0), (54, 8), (54, 22), (62, 14), (54, 28), (80, 2)] {
        assert_eq!(judge(&mut lab, &eth, start, offset), Some(Malformed), "{start} {offset}");
    }
    assert_eq!(judge(&mut lab, &eth, 54, 2), None);
}

/// Places that Linux uses: at the transport header, also behind tags and IPv6 extension headers,
/// and at the inner one of a tunnel.
#[test]
fn checksums_at_the_transport_header_pass() {
    let mut lab = lab();
    for udp in [false, true] {
        let (mut v6, mut vnet) = super_packet(true, udp, 900, 1);
        v6[..6].copy_from_slice(&mac(1));
        v6[6..12].copy_from_slice(&mac(0));
        v6[22..38].copy_from_slice(&own6());
        (vnet.gso_type, vnet.gso_size, vnet.hdr_len) = (0, 0, 0);
        make_partial(&mut v6, &vnet);
        assert_eq!(lab.judge_with(0, &vnet.to_bytes(0), &v6), None);
        verify(&lab.guests[1].recv(0).unwrap().1);
        let offset = vnet.csum_offset;
        assert_eq!(judge(&mut lab, &tagged(&v6), 58, offset), None);
        // Hop-by-hop options before it.
        let mut behind = v6.clone();
        behind[20] = 0;
        behind.splice(54..54, [v6[20], 0, 1, 4, 0, 0, 0, 0]);
        assert_eq!(judge(&mut lab, &behind, 62, offset), None);
    }
    // VXLAN: the inner Ethernet, IP and UDP headers are 8 + 14 + 20 bytes behind the outer UDP.
    assert_eq!(judge(&mut lab, &udp(&[1; 200]), 42 + 8 + 14 + 20, 6), None);
    let mut gre = udp(&[1; 200]);
    gre[23] = 47;
    assert_eq!(judge(&mut lab, &gre, 34 + 4 + 20, 16), None);
}
