#![allow(non_snake_case)]

use std::net::IpAddr;

use base::counter::DropReason::{self, Malformed, NotAllowed, Spoofed};
use etherparse::PacketBuilder;

use crate::allow::Allow;
use crate::binding::{BindMode, Shared, v4_key};
use crate::testing::{BROADCAST, Lab, Spec, frame, mac};
use frame::Mac;

const V4: [u8; 4] = [10, 0, 0, 5];
const OTHER: [u8; 4] = [10, 0, 0, 6];

fn v6(last: u16) -> [u8; 16] {
    let mut out = [0; 16];
    (out[0], out[1]) = (0xfd, 0x01);
    out[14..].copy_from_slice(&last.to_be_bytes());
    out
}

fn link_local(last: u8) -> [u8; 16] {
    let mut out = [0; 16];
    (out[0], out[1], out[15]) = (0xfe, 0x80, last);
    out
}

fn udp(src_mac: [u8; 6], src: [u8; 4]) -> Vec<u8> {
    let mut out = Vec::new();
    PacketBuilder::ethernet2(src_mac, BROADCAST)
        .ipv4(src, [10, 0, 0, 9], 64)
        .udp(1000, 2000)
        .write(&mut out, b"hello")
        .unwrap();
    out
}

fn udp6(src_mac: [u8; 6], src: [u8; 16]) -> Vec<u8> {
    let mut out = Vec::new();
    PacketBuilder::ethernet2(src_mac, BROADCAST)
        .ipv6(src, v6(9), 64)
        .udp(1000, 2000)
        .write(&mut out, b"hello")
        .unwrap();
    out
}

fn arp(eth_src: [u8; 6], sha: [u8; 6], spa: [u8; 4]) -> Vec<u8> {
    let head: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 2];
    [&BROADCAST[..], &eth_src, &[8, 6], &head, &sha, &spa, &[0; 6], &[10, 0, 0, 1]].concat()
}

/// A probe (RFC 5227) for an address.
fn arp_probe(eth_src: [u8; 6], sha: [u8; 6], target: [u8; 4]) -> Vec<u8> {
    let mut out = arp(eth_src, sha, [0; 4]);
    out[21] = 1;
    out[38..42].copy_from_slice(&target);
    out
}

/// An ICMPv6 message of `kind` with a body (from its fifth byte on).
fn icmp6(src: [u8; 16], kind: u8, body: &[u8]) -> Vec<u8> {
    let mut out = [&BROADCAST[..], &mac(0), &[0x86, 0xdd, 0x60, 0, 0, 0]].concat();
    out.extend(((body.len() + 4) as u16).to_be_bytes());
    out.extend([58, 255]);
    out.extend(src);
    out.extend(v6(9));
    out.extend([kind, 0, 0, 0]);
    out.extend(body);
    out
}

fn advert(target: [u8; 16], option_mac: [u8; 6]) -> Vec<u8> {
    [&[0x60, 0, 0, 0][..], &target, &[2, 1], &option_mac].concat()
}

fn tagged(frame: &[u8], tags: &[[u8; 4]]) -> Vec<u8> {
    let mut out = frame[..12].to_vec();
    tags.iter().for_each(|t| out.extend(t));
    out.extend(&frame[12..]);
    out
}

fn bound(addresses: &[IpAddr]) -> Spec {
    Spec {
        bind: BindMode::MacAndIp,
        mac: Some(mac(0)),
        addresses: addresses.to_vec(),
        ..Spec::default()
    }
}

/// A bound port and a listener.
fn configured() -> Lab {
    configured_with(Allow::default())
}

fn configured_with(allow: Allow) -> Lab {
    let addresses = [IpAddr::from(V4), IpAddr::from(v6(5))];
    let mut lab = Lab::new(vec![Spec { allow, ..bound(&addresses) }, Spec::default()]);
    lab.guests[1].post(0, 200, 1600, 1);
    lab
}

fn check(lab: &mut Lab, cases: &[(&str, Vec<u8>, Option<DropReason>)]) {
    for (name, bytes, wanted) in cases {
        assert_eq!(lab.judge(0, bytes), *wanted, "{name}");
        assert_eq!(lab.guests[1].recv_all(0).len(), usize::from(wanted.is_none()), "{name}");
    }
}

#[test]
fn abuse_C3_mac_spoofing() {
    let mut lab = configured();
    check(
        &mut lab,
        &[
            ("own", frame(BROADCAST, mac(0), 60), None),
            ("another's", frame(BROADCAST, mac(1), 60), Some(Spoofed)),
            ("group", frame(BROADCAST, [1, 0, 0, 0, 0, 1], 60), Some(Spoofed)),
            ("zero", frame(BROADCAST, [0; 6], 60), Some(Spoofed)),
        ],
    );
}

#[test]
fn abuse_C3_first_mac_is_bound_and_nobody_elses() {
    let mut lab = Lab::new(vec![Spec::default(), Spec::default()]);
    for guest in &mut lab.guests {
        guest.post(0, 32, 1600, 1);
    }
    assert_eq!(lab.judge(0, &frame(BROADCAST, [1, 0, 0, 0, 0, 1], 60)), Some(Malformed));
    assert_eq!(lab.judge(0, &frame(BROADCAST, mac(0), 60)), None);
    assert_eq!(lab.judge(0, &frame(BROADCAST, mac(5), 60)), Some(Spoofed));
    // Another port cannot take it, and is not bound by the attempt.
    assert_eq!(lab.judge(1, &frame(BROADCAST, mac(0), 60)), Some(Spoofed));
    assert_eq!(lab.judge(1, &frame(BROADCAST, mac(1), 60)), None);
}

/// Without a configured address a port takes the first it uses, but nobody else's: not the
/// gateway's behind the uplink, and not that of a port without a binding.
#[test]
fn abuse_C3_a_live_learned_address_is_not_taken_by_a_first_frame() {
    let free = Spec { bind: BindMode::Off, ..Spec::default() };
    let mut lab = Lab::new(vec![Spec::default(), free]);
    for guest in &mut lab.guests {
        guest.post(0, 32, 1600, 1);
    }
    let wire = lab.set_wire();
    let gateway = [2, 0, 0, 0, 0, 0x77];
    let hello = [&[0; 12][..], &frame(BROADCAST, gateway, 60)].concat();
    wire.lock().unwrap().incoming.push_back(hello.clone());
    lab.poll();
    assert_eq!(lab.judge(1, &frame(BROADCAST, mac(5), 60)), None);
    for taken in [gateway, mac(5)] {
        assert_eq!(lab.judge(0, &frame(BROADCAST, taken, 60)), Some(Spoofed));
    }
    // The gateway is still heard and reached, and the port may be somebody of its own.
    wire.lock().unwrap().incoming.push_back(hello);
    assert_eq!(lab.poll(), 1);
    assert_eq!(lab.uplink_stats().drops[Spoofed as usize].get(), 0);
    assert_eq!(lab.judge(0, &frame(gateway, mac(0), 60)), None);
    // What has not been seen for the ageing time is nobody's.
    let mut lab = Lab::new(vec![Spec::default()]);
    let wire = lab.set_wire();
    let hello = [&[0; 12][..], &frame(BROADCAST, gateway, 60)].concat();
    wire.lock().unwrap().incoming.push_back(hello);
    lab.poll();
    lab.advance(crate::testing::MAC_AGE_NS + 1);
    assert_eq!(lab.judge(0, &frame(BROADCAST, gateway, 60)), None);
}

#[test]
fn abuse_N9_more_addresses_than_a_port_may_have_cost_flooding_not_their_frames() {
    let free = Spec { bind: BindMode::Off, ..Spec::default() };
    let mut lab = Lab::new(vec![free, Spec::default()]);
    lab.guests[1].post(0, 32, 1600, 1);
    for n in 0..4 {
        assert_eq!(lab.judge(0, &frame(BROADCAST, mac(100 + n), 60)), None);
    }
    assert_eq!(lab.judge(0, &frame(BROADCAST, mac(200), 60)), None);
    assert_eq!(lab.stats.unlearned.get(), 1);
    // Answers to it are flooded: they arrive.
    lab.guests[0].post(0, 4, 1600, 1);
    let floods = lab.stats.floods.get();
    assert_eq!(lab.judge(1, &frame(mac(200), mac(1), 60)), None);
    assert_eq!((lab.stats.floods.get(), lab.guests[0].recv_all(0).len()), (floods + 1, 1));
    assert_eq!(lab.judge(0, &frame(BROADCAST, mac(100), 60)), None);
    // Without a binding another's bound address still cannot be taken.
    assert_eq!(lab.judge(1, &frame(BROADCAST, mac(1), 60)), None);
    assert_eq!(lab.judge(0, &frame(BROADCAST, mac(1), 60)), Some(Spoofed));
    // Aged ones make room.
    lab.advance(crate::testing::MAC_AGE_NS + 1);
    assert_eq!(lab.judge(0, &frame(BROADCAST, mac(200), 60)), None);
}

#[test]
fn abuse_N10_an_address_that_flaps_between_ports_is_counted_and_told_of() {
    let free = || Spec { bind: BindMode::Off, ..Spec::default() };
    let mut lab = Lab::new(vec![free(), free(), Spec::default()]);
    lab.guests[2].post(0, 32, 1600, 1);
    for guest in [0, 1, 0, 1, 1] {
        assert_eq!(lab.judge(guest, &frame(BROADCAST, mac(100), 60)), None);
    }
    assert_eq!(lab.stats.mac_moves.get(), 3);
    let wire = lab.set_wire();
    wire.lock()
        .unwrap()
        .incoming
        .push_back([&crate::testing::no_offload()[..], &frame(BROADCAST, mac(100), 60)].concat());
    lab.poll();
    assert_eq!(lab.stats.mac_moves.get(), 4);
    // What has aged is new at its next place.
    lab.advance(crate::testing::MAC_AGE_NS + 1);
    assert_eq!(lab.judge(0, &frame(BROADCAST, mac(100), 60)), None);
    assert_eq!(lab.stats.mac_moves.get(), 4);
}

#[test]
fn abuse_C3_ip_spoofing() {
    let mut lab = configured();
    check(
        &mut lab,
        &[
            ("own v4", udp(mac(0), V4), None),
            ("other v4", udp(mac(0), OTHER), Some(Spoofed)),
            ("no address", udp(mac(0), [0; 4]), Some(Spoofed)),
            ("loopback", udp(mac(0), [127, 0, 0, 1]), Some(Spoofed)),
            ("broadcast", udp(mac(0), [255; 4]), Some(Spoofed)),
            ("own v6", udp6(mac(0), v6(5)), None),
            ("other v6", udp6(mac(0), v6(6)), Some(Spoofed)),
            ("unspecified v6", udp6(mac(0), [0; 16]), Some(Spoofed)),
            ("multicast v6", udp6(mac(0), [0xff; 16]), Some(Spoofed)),
            ("link local v6", udp6(mac(0), link_local(7)), None),
            ("cut short", udp(mac(0), V4)[..30].to_vec(), Some(Malformed)),
            ("not IP", frame(BROADCAST, mac(0), 60), None),
        ],
    );
}

#[test]
fn abuse_C3_vlan_tags_hide_nothing() {
    let mut lab = configured();
    let (q, ad) = ([0x81, 0, 0, 5], [0x88, 0xa8, 0, 7]);
    check(
        &mut lab,
        &[
            ("own", tagged(&udp(mac(0), V4), &[q]), None),
            ("own, two tags", tagged(&udp(mac(0), V4), &[ad, q]), None),
            ("other", tagged(&udp(mac(0), OTHER), &[q]), Some(Spoofed)),
            ("other, two tags", tagged(&udp(mac(0), OTHER), &[ad, q]), Some(Spoofed)),
            ("three tags", tagged(&udp(mac(0), V4), &[ad, q, q]), Some(Malformed)),
            ("ARP", tagged(&arp(mac(0), mac(0), OTHER), &[q]), Some(Spoofed)),
        ],
    );
}

#[test]
fn abuse_C3_arp_poisoning() {
    let mut lab = configured();
    let mut odd = arp(mac(0), mac(0), V4);
    odd[18] = 8;
    check(
        &mut lab,
        &[
            ("own", arp(mac(0), mac(0), V4), None),
            ("probe", arp_probe(mac(0), mac(0), V4), None),
            ("probe for another's", arp_probe(mac(0), mac(0), OTHER), Some(Spoofed)),
            ("probe for nothing", arp_probe(mac(0), mac(0), [0; 4]), Some(Spoofed)),
            ("other address", arp(mac(0), mac(0), OTHER), Some(Spoofed)),
            ("other hardware address", arp(mac(0), mac(1), V4), Some(Spoofed)),
            ("probe from another", arp_probe(mac(0), mac(1), V4), Some(Spoofed)),
            ("odd lengths", odd, Some(Malformed)),
            ("cut short", arp(mac(0), mac(0), V4)[..41].to_vec(), Some(Malformed)),
        ],
    );
}

#[test]
fn abuse_C3_ndp_poisoning() {
    let mut lab = configured();
    let own = v6(5);
    let solicit = |option: [u8; 6]| [&[0; 4][..], &v6(9), &[1, 1], &option].concat();
    let router_solicit = |option: [u8; 6]| [&[0, 0, 0, 0, 1, 1][..], &option].concat();
    let plain = [&[0x60, 0, 0, 0][..], &own].concat();
    check(
        &mut lab,
        &[
            ("own", icmp6(own, 136, &advert(own, mac(0))), None),
            ("own, no option", icmp6(own, 136, &plain), None),
            ("other target", icmp6(own, 136, &advert(v6(6), mac(0))), Some(Spoofed)),
            ("other hardware address", icmp6(own, 136, &advert(own, mac(1))), Some(Spoofed)),
            ("other source", icmp6(v6(6), 136, &advert(own, mac(0))), Some(Spoofed)),
            ("solicitation", icmp6(own, 135, &solicit(mac(0))), None),
            ("solicitation for another", icmp6(own, 135, &solicit(mac(1))), Some(Spoofed)),
            ("duplicate detection", icmp6([0; 16], 135, &[&[0; 4][..], &own].concat()), None),
            ("for another's", icmp6([0; 16], 135, &[&[0; 4][..], &v6(6)].concat()), Some(Spoofed)),
            ("for a group", icmp6([0; 16], 135, &[0xff; 20]), Some(Spoofed)),
            ("for nothing", icmp6([0; 16], 135, &[0; 20]), Some(Spoofed)),
            ("detection cut short", icmp6([0; 16], 135, &[0; 19]), Some(Malformed)),
            ("router solicitation", icmp6([0; 16], 133, &[0; 4]), None),
            ("with its option", icmp6(own, 133, &router_solicit(mac(0))), None),
            ("link local", icmp6(link_local(5), 133, &router_solicit(mac(0))), None),
            ("another's option", icmp6(own, 133, &router_solicit(mac(1))), Some(Spoofed)),
            ("the same from ::", icmp6([0; 16], 133, &router_solicit(mac(1))), Some(Spoofed)),
            ("listener reports", icmp6([0; 16], 143, &[0; 24]), None),
            ("other messages from ::", icmp6([0; 16], 128, b"ping"), Some(Spoofed)),
            ("router advertisement", icmp6(link_local(1), 134, &[0; 12]), Some(NotAllowed)),
            ("redirect", icmp6(own, 137, &[0; 36]), Some(NotAllowed)),
            ("advertisement cut short", icmp6(own, 136, &[0; 10]), Some(Malformed)),
            ("echo", icmp6(own, 128, b"ping"), None),
        ],
    );
    // The same behind an extension header.
    let mut hidden = icmp6(own, 136, &advert(v6(6), mac(0)));
    hidden[20] = 0;
    hidden.splice(54..54, [58, 0, 1, 4, 0, 0, 0, 0]);
    check(&mut lab, &[("behind hop-by-hop options", hidden, Some(Spoofed))]);
    // And behind more than we look at.
    let mut long = icmp6(own, 136, &advert(v6(6), mac(0)));
    long[20] = 60;
    long.splice(54..54, [&[58, 11][..], &[0; 94]].concat());
    check(&mut lab, &[("behind 96 bytes of options", long, Some(Malformed))]);
}

#[test]
fn abuse_C3_snap_hides_nothing() {
    let mut lab = configured_with(Allow { llc: true, ..Allow::default() });
    let llc = |sap: u8, kind: [u8; 2], inner: &[u8]| {
        let len = (inner.len() + 8) as u16;
        let head = [&BROADCAST[..], &mac(0), &len.to_be_bytes()].concat();
        [&head[..], &[sap, sap, 3, 0, 0, 0], &kind, inner].concat()
    };
    let other = udp(mac(0), OTHER);
    check(
        &mut lab,
        &[
            ("IP", llc(0xaa, [8, 0], &other[14..]), Some(Spoofed)),
            ("IP, group SAP", llc(0xab, [8, 0], &other[14..]), Some(Spoofed)),
            ("ARP", llc(0xaa, [8, 6], &arp(mac(0), mac(0), OTHER)[14..]), Some(Spoofed)),
            ("IPv6", llc(0xaa, [0x86, 0xdd], &[0; 60]), Some(Spoofed)),
            ("a tag", llc(0xaa, [0x81, 0], &[0; 60]), Some(Spoofed)),
            ("tagged", tagged(&llc(0xaa, [8, 0], &other[14..]), &[[0x81, 0, 0, 5]]), Some(Spoofed)),
            ("AppleTalk", llc(0xaa, [0x80, 0x9b], &[0; 60]), None),
            ("spanning tree", llc(0x42, [8, 0], &[0; 60]), None),
        ],
    );
}

/// A Linux guest that configures itself: each address is probed for and then used, IPv4 by DHCP,
/// IPv6 with a link-local, a stable and a temporary address in each of five prefixes.
#[test]
fn a_guest_that_learns_its_addresses_may_probe_for_them() {
    let learn = || Spec { bind: BindMode::MacAndIp, ..Spec::default() };
    let mut lab = Lab::new(vec![learn(), learn()]);
    lab.guests[1].post(0, 100, 1600, 1);
    let dad = |target: [u8; 16]| icmp6([0; 16], 135, &[&[0; 4][..], &target].concat());
    let mut pass = |name: &str, bytes: &[u8]| {
        assert_eq!(lab.judge(0, bytes), None, "{name}");
        assert_eq!(lab.guests[1].recv_all(0).len(), 1, "{name}");
        lab.guests[1].post(0, 1, 1600, 1);
    };
    pass("link local", &dad(link_local(5)));
    pass("groups", &icmp6([0; 16], 143, &[0; 24]));
    pass("routers", &icmp6(link_local(5), 133, &[&[0, 0, 0, 0, 1, 1][..], &mac(0)].concat()));
    for n in 0..10 {
        pass("probe", &dad(v6(n)));
        pass("announcement", &icmp6(v6(n), 136, &advert(v6(n), mac(0))));
        pass("use", &udp6(mac(0), v6(n)));
    }
    let mut dhcp = udp(mac(0), [0; 4]);
    dhcp[34..38].copy_from_slice(&[0, 68, 0, 67]);
    pass("DHCP", &dhcp);
    pass("probe", &arp_probe(mac(0), mac(0), V4));
    pass("announcement", &arp(mac(0), mac(0), V4));
    pass("use", &udp(mac(0), V4));
    // The other one can neither take them nor talk their owner out of them.
    let as_other = |mut bytes: Vec<u8>| {
        bytes[6..12].copy_from_slice(&mac(1));
        bytes
    };
    assert_eq!(lab.judge(1, &arp_probe(mac(1), mac(1), V4)), Some(Spoofed));
    assert_eq!(lab.judge(1, &as_other(dad(v6(3)))), Some(Spoofed));
    assert_eq!(lab.judge(1, &as_other(dad(link_local(5)))), Some(Spoofed));
    assert_eq!(lab.judge(1, &as_other(dad(link_local(6)))), None);
}

#[test]
fn abuse_C3_fragments_pass_by_their_source() {
    let mut lab = configured();
    let fragment = |src, offset: u16| {
        let mut out = udp(mac(0), src);
        out[20..22].copy_from_slice(&offset.to_be_bytes());
        out
    };
    let fragment6 = |src| {
        let mut out = udp6(mac(0), src);
        out[20] = 44;
        out.splice(54..54, [17, 0, 0, 0xb9, 0, 0, 0, 1]);
        out[19] += 8;
        out
    };
    check(
        &mut lab,
        &[
            ("first", fragment(V4, 0x2000), None),
            ("later", fragment(V4, 0x20b9), None),
            ("of another", fragment(OTHER, 0x20b9), Some(Spoofed)),
            ("v6", fragment6(v6(5)), None),
            ("v6 of another", fragment6(v6(6)), Some(Spoofed)),
        ],
    );
}

#[test]
fn dhcp_and_igmp_need_no_address() {
    let mut lab = configured();
    let mut dhcp = udp(mac(0), [0; 4]);
    dhcp[34..38].copy_from_slice(&[0, 68, 0, 67]);
    let mut igmp = udp(mac(0), [0; 4]);
    igmp[23] = 2;
    check(&mut lab, &[("DHCP", dhcp, None), ("IGMP", igmp, None)]);
}

#[test]
fn abuse_C3_learned_addresses_belong_to_the_first() {
    let learn = || Spec { bind: BindMode::MacAndIp, ..Spec::default() };
    let mut lab = Lab::new(vec![learn(), learn()]);
    for guest in &mut lab.guests {
        guest.post(0, 100, 1600, 1);
    }
    assert_eq!(lab.judge(0, &arp(mac(0), mac(0), V4)), None);
    assert_eq!(lab.judge(0, &udp(mac(0), V4)), None);
    assert_eq!(lab.judge(1, &udp(mac(1), V4)), Some(Spoofed));
    assert_eq!(lab.judge(1, &arp(mac(1), mac(1), V4)), Some(Spoofed));
    assert_eq!(lab.judge(1, &udp(mac(1), OTHER)), None);
    // No more than the limit.
    for n in 1..16 {
        assert_eq!(lab.judge(0, &udp(mac(0), [10, 1, 0, n])), None);
    }
    assert_eq!(lab.judge(0, &udp(mac(0), [10, 1, 0, 16])), Some(Spoofed));
    assert_eq!(lab.judge(0, &udp(mac(0), V4)), None);
}

/// Moves a virtual IP and VRRP's MAC address as keepalived does, while the old holder still lives.
#[test]
fn abuse_N8_shared_addresses_move_between_the_ports_that_name_them() {
    const VRRP: [u8; 6] = [0, 0, 0x5e, 0, 1, 7];
    const VIRTUAL: [u8; 4] = [10, 0, 0, 100];
    let shared = Shared { macs: vec![Mac::new(VRRP)], ips: vec![v4_key(VIRTUAL)] };
    let router = |n: usize| Spec {
        bind: BindMode::MacAndIp,
        mac: Some(mac(n)),
        addresses: vec![[10, 0, 0, n as u8 + 1].into()],
        shared: shared.clone(),
        ..Spec::default()
    };
    let learns = |bind| Spec { bind, ..Spec::default() };
    let mut lab =
        Lab::new(vec![router(0), router(1), learns(BindMode::MacAndIp), learns(BindMode::Off)]);
    lab.guests[2].post(0, 64, 1600, 1);
    let owner = |lab: &Lab| lab.engine.fabric.tables.macs.owner(Mac::new(VRRP), lab.now_ns);
    for n in [0, 1, 0, 1] {
        assert_eq!(lab.judge(n, &udp(VRRP, VIRTUAL)), None, "{n}");
        assert_eq!(owner(&lab), Some(n as u16));
        assert_eq!(lab.judge(n, &udp(mac(n), VIRTUAL)), None, "from its own card too");
        assert_eq!(lab.judge(n, &udp(mac(n), [10, 0, 0, n as u8 + 1])), None);
        assert_eq!(lab.judge(n, &udp(mac(1 - n), VIRTUAL)), Some(Spoofed), "only what is named");
    }
    assert_eq!(lab.stats.mac_moves.get(), 3);
    // Nobody else: neither by the first use, nor without a binding, nor while it is free.
    lab.advance(crate::testing::MAC_AGE_NS + 1);
    for n in [2, 3] {
        assert_eq!(lab.judge(n, &udp(VRRP, VIRTUAL)), Some(Spoofed), "{n}");
    }
    assert_eq!(lab.judge(2, &udp(mac(2), VIRTUAL)), Some(Spoofed));
    assert_eq!(owner(&lab), None);
    assert_eq!(lab.judge(0, &udp(VRRP, VIRTUAL)), None);
}

/// An active-backup bond has one address on both of its cards.
#[test]
fn abuse_N8_a_bond_fails_over_between_two_ports_of_a_vm() {
    const BOND: [u8; 6] = [2, 0, 0, 0, 0xbb, 1];
    let shared = Shared { macs: vec![Mac::new(BOND)], ..Shared::default() };
    let shared = Shared { ips: vec![v4_key(V4)], ..shared };
    let bind = BindMode::MacAndIp;
    let card = || Spec { bind, shared: shared.clone(), ..Spec::default() };
    let mut lab = Lab::new(vec![card(), card(), Spec::default()]);
    for active in [0, 1, 0] {
        lab.guests[2].post(0, 1, 1600, 1);
        assert_eq!(lab.judge(active, &udp(BOND, V4)), None);
        lab.guests[active].post(0, 1, 1600, 1);
        assert_eq!(lab.judge(2, &frame(BOND, mac(2), 60)), None);
        assert_eq!(lab.guests[active].recv_all(0).len(), 1, "{active}");
    }
}

/// IPv4 or IPv6 with a payload of our choice.
fn ip(v4: bool, proto: u8, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let builder = PacketBuilder::ethernet2(mac(0), BROADCAST);
    let proto = proto.into();
    match v4 {
        true => builder.ipv4(V4, [10, 0, 0, 9], 64).write(&mut out, proto, payload).unwrap(),
        false => builder.ipv6(v6(5), v6(9), 64).write(&mut out, proto, payload).unwrap(),
    }
    out
}

fn of_type(kind: u16, payload: &[u8]) -> Vec<u8> {
    [&BROADCAST[..], &mac(0), &kind.to_be_bytes(), payload].concat()
}

#[test]
fn abuse_N11_a_bound_port_sends_what_it_is_allowed_to() {
    let ports =
        |from: u16, to: u16| [&from.to_be_bytes()[..], &to.to_be_bytes(), &[0; 20]].concat();
    let rarp = |of: [u8; 6]| {
        let head: [u8; 8] = [0, 1, 8, 0, 6, 4, 0, 3];
        [&head[..], &mac(0), &[0; 4], &of, &[0; 4]].concat()
    };
    // Behind options that reach beyond our copy.
    let mut far = ip(false, 60, &[&[17, 9][..], &[0; 78], &ports(547, 546)].concat());
    far.extend([0; 32]);
    // What, whether a host may, and who else may.
    let role = |set: fn(&mut Allow)| {
        let mut allow = Allow::default();
        set(&mut allow);
        Some(allow)
    };
    let [dhcp, router, tunnel] =
        [role(|a| a.dhcp_server = true), role(|a| a.router = true), role(|a| a.tunnel = true)];
    let mpls = role(|a| a.ether_types = vec![0x8847]);
    let cases = [
        ("DHCP client", ip(true, 17, &ports(68, 67)), None),
        ("DHCP server", ip(true, 17, &ports(67, 68)), dhcp.clone()),
        ("DHCPv6 server", ip(false, 17, &ports(547, 546)), dhcp.clone()),
        ("from another port", ip(true, 17, &ports(1067, 68)), dhcp.clone()),
        ("DHCPv6, the same", ip(false, 17, &ports(1067, 546)), dhcp.clone()),
        ("DHCPv6 client", ip(false, 17, &ports(546, 547)), None),
        ("tagged", tagged(&ip(true, 17, &ports(67, 68)), &[[0x81, 0, 0, 5]]), dhcp),
        ("TCP from 67", ip(true, 6, &ports(67, 68)), None),
        ("echo", ip(true, 1, &[8, 0, 0, 0]), None),
        ("redirect", ip(true, 1, &[5, 0, 0, 0]), router.clone()),
        ("advertisement", ip(true, 1, &[9, 0, 0, 0]), router.clone()),
        ("of IPv6", icmp6(link_local(1), 134, &[0; 12]), router),
        ("IPv6 in IPv4", ip(true, 41, &[0x60; 48]), tunnel.clone()),
        ("IPv4 in IPv6", ip(false, 4, &[0x45; 48]), tunnel.clone()),
        ("GRE", ip(true, 47, &[0; 48]), tunnel),
        ("ESP", ip(true, 50, &[0; 48]), None),
        ("MPLS", of_type(0x8847, &[0; 60]), mpls.clone()),
        ("MPLS, tagged", tagged(&of_type(0x8847, &[0; 60]), &[[0x81, 0, 0, 5]]), mpls),
        ("PPPoE", of_type(0x8864, &[0; 60]), role(|a| a.any_ether_type = true)),
        ("a foreign tag", of_type(0x9200, &[0; 60]), role(|a| a.ether_types = vec![0x9200])),
        ("length", of_type(46, &[0x42; 46]), role(|a| a.llc = true)),
        ("channels' marks", of_type(0x88b5, &[0; 60]), None),
        ("own announcement", of_type(0x8035, &rarp(mac(0))), None),
    ];
    for (name, bytes, who) in cases {
        let wanted = who.as_ref().map(|_| NotAllowed);
        check(&mut configured(), &[(name, bytes.clone(), wanted)]);
        if let Some(allow) = who {
            check(&mut configured_with(allow), &[(name, bytes, None)]);
        }
    }
    check(
        &mut configured_with(Allow { any_ether_type: true, ..Allow::default() }),
        &[
            ("another's RARP", of_type(0x8035, &rarp(mac(1))), Some(Spoofed)),
            ("ports beyond our copy", far, Some(Malformed)),
        ],
    );
    let mut far = Lab::new(vec![Spec { bind: BindMode::Mac, ..Spec::default() }, Spec::default()]);
    far.guests[1].post(0, 8, 1600, 1);
    assert_eq!(far.judge(0, &of_type(0x8847, &[0; 60])), None, "bound to its MAC address only");
}

/// Bytes behind its end are padding: the ports come with the second fragment, whatever stands
/// there.
#[test]
fn abuse_N11_a_first_fragment_holds_its_headers() {
    let options = [17, 0, 1, 4, 0, 0, 0, 0];
    let of = |payload_len: u8| {
        let first =
            [&[60, 0, 0, 1, 0, 0, 0, 1][..], &options, &[3, 232, 7, 208], &[0; 44]].concat();
        let mut bytes = ip(false, 44, &first);
        bytes[18..20].copy_from_slice(&[0, payload_len]);
        bytes
    };
    let mut in_it = of(16);
    in_it[62] = 44;
    in_it[70..78].copy_from_slice(&[17, 0, 0, 0x10, 0, 0, 0, 2]);
    check(
        &mut configured(),
        &[
            ("whole", of(64), None),
            ("just the ports", of(24), None),
            ("options only", of(16), Some(Malformed)),
            ("nothing", of(0), Some(Malformed)),
            ("a later one in it", in_it, Some(Malformed)),
        ],
    );
}
