//! Super-packets and partial checksums between ports that did and did not negotiate them.

use base::counter::DropReason;

use crate::features as f;
use crate::testing::{Lab, MODERN, Spec, mac};
use frame::testing::{make_partial, super_packet, verify};
use frame::{GSO_ECN, Vnet};

/// Two guests; the second negotiated `features`.
fn lab(features: u64) -> Lab {
    let mut lab = Lab::new(vec![Spec::default(), Spec { features, ..Spec::default() }]);
    lab.introduce();
    lab
}

/// A frame from guest 0 to guest 1 with partial checksum.
fn prepared(v6: bool, udp: bool, len: usize, size: u16) -> (Vec<u8>, Vnet) {
    let (mut bytes, vnet) = super_packet(v6, udp, len, size);
    bytes[..6].copy_from_slice(&mac(1));
    bytes[6..12].copy_from_slice(&mac(0));
    make_partial(&mut bytes, &vnet);
    (bytes, vnet)
}

/// Header that a driver writes before a frame; `hdr_len` is a lie.
fn written(vnet: Vnet) -> [u8; 12] {
    Vnet { hdr_len: 0xffff, ..vnet }.to_bytes(0)
}

const KINDS: [(bool, bool); 4] = [(false, false), (true, false), (false, true), (true, true)];

#[test]
fn super_packets_pass_untouched_between_those_who_negotiated_them() {
    for (v6, udp) in KINDS {
        let mut lab = lab(MODERN);
        let (bytes, vnet) = prepared(v6, udp, 60_000, 1400);
        lab.guests[1].post(0, 50, 1536, 1);
        assert_eq!(lab.judge_with(0, &written(vnet), &bytes), None);
        let (header, got) = lab.guests[1].recv(0).unwrap();
        assert_eq!(got, bytes);
        // The header as checked: with the length we found ourselves.
        let buffers = (12 + bytes.len()).div_ceil(1536) as u16;
        assert_eq!(header, vnet.to_bytes(buffers));
        assert_eq!(lab.stats.software_segmented.get(), 0);
    }
}

#[test]
fn super_packets_are_cut_for_those_who_did_not() {
    let missing = [f::GUEST_TSO4, f::GUEST_TSO6, f::GUEST_USO4, f::GUEST_USO6];
    for ((v6, udp), bit) in KINDS.into_iter().zip(missing) {
        for mergeable in [true, false] {
            let drop_bit = if mergeable { 0 } else { f::MRG_RXBUF };
            let mut lab = lab(MODERN & !bit & !drop_bit);
            let (bytes, vnet) = prepared(v6, udp, 20_000, 1400);
            lab.guests[1].post(0, 100, if mergeable { 512 } else { 1536 }, 1);
            assert_eq!(lab.judge_with(0, &written(vnet), &bytes), None);
            let mut payload = Vec::new();
            let mut count = 0;
            while let Some((header, got)) = lab.guests[1].recv(0) {
                assert_eq!(header[..10], [0; 10]);
                payload.extend(verify(&got));
                count += 1;
            }
            assert_eq!(count, 15);
            assert_eq!(payload, bytes[usize::from(vnet.hdr_len)..]);
            assert_eq!(lab.stats.software_segmented.get(), 1);
            assert!(lab.guests[1].rx[0].interrupted());
            assert!(!lab.guests[1].rx[0].interrupted());
        }
    }
}

#[test]
fn cutting_waits_until_all_segments_fit() {
    let mut lab = lab(MODERN & !f::GUEST_TSO4);
    let (bytes, vnet) = prepared(false, false, 4200, 1400);
    lab.guests[1].post(0, 2, 1536, 1);
    lab.guests[0].send(0, &written(vnet), &bytes, 1);
    assert_eq!(lab.poll(), 0);
    assert!(lab.guests[1].recv(0).is_none());
    lab.guests[1].post(0, 1, 1536, 1);
    assert_eq!(lab.poll(), 1);
    assert_eq!(lab.guests[1].recv_all(0).len(), 3);
}

#[test]
fn ecn_super_packets_need_their_own_feature() {
    let (bytes, mut vnet) = prepared(false, false, 3000, 1400);
    vnet.gso_type |= GSO_ECN;
    for (features, frames) in [(MODERN, 1), (MODERN & !f::GUEST_ECN, 3)] {
        let mut lab = lab(features);
        lab.guests[1].post(0, 8, 1536, 1);
        assert_eq!(lab.judge_with(0, &written(vnet), &bytes), None);
        assert_eq!(lab.guests[1].recv_all(0).len(), frames);
    }
}

#[test]
fn partial_checksums_pass_or_are_completed() {
    for (v6, udp) in KINDS {
        let (bytes, mut vnet) = prepared(v6, udp, 1000, 1);
        (vnet.gso_type, vnet.gso_size, vnet.hdr_len) = (0, 0, 0);
        let mut with = lab(MODERN);
        with.guests[1].post(0, 1, 1536, 1);
        assert_eq!(with.judge_with(0, &written(vnet), &bytes), None);
        let (header, got) = with.guests[1].recv(0).unwrap();
        assert_eq!((header, got), (vnet.to_bytes(1).to_vec(), bytes.clone()));

        let mut without = lab(f::VERSION_1 | f::MRG_RXBUF);
        without.guests[1].post(0, 1, 1536, 1);
        assert_eq!(without.judge_with(0, &written(vnet), &bytes), None);
        let (header, got) = without.guests[1].recv(0).unwrap();
        assert_eq!(header[..10], [0; 10]);
        assert_eq!(verify(&got), bytes[bytes.len() - 1000..]);
        assert_eq!(without.stats.software_checksums.get(), 1);
    }
}

#[test]
fn a_super_packet_of_too_many_segments_is_dropped_where_it_must_be_cut() {
    let mut lab = lab(MODERN & !f::GUEST_TSO4);
    lab.guests[1].post(0, 200, 1536, 1);
    let (bytes, vnet) = prepared(false, false, 60_000, 1);
    assert_eq!(lab.judge_with(0, &written(vnet), &bytes), Some(DropReason::TooBig));
}

/// A card would not get a frame above its MTU; pieces we cut are no different.
#[test]
#[allow(non_snake_case)]
fn abuse_C1_segments_above_the_receivers_mtu_are_dropped() {
    for (v6, udp) in KINDS {
        for (mtu, fits) in [(1500, false), (4100, true)] {
            let receiver = Spec { mtu, features: MODERN & !f::OFFLOADS, ..Spec::default() };
            let mut lab = Lab::new(vec![Spec::default(), receiver]);
            lab.introduce();
            lab.guests[1].post(0, 50, 1536, 1);
            let (bytes, vnet) = prepared(v6, udp, 12_000, 4000);
            let verdict = lab.judge_with(0, &written(vnet), &bytes);
            assert_eq!(verdict, (!fits).then_some(DropReason::TooBig));
            assert_eq!(lab.guests[1].recv_all(0).len(), if fits { 3 } else { 0 });
        }
    }
}

#[test]
fn a_super_packet_whose_type_lies_is_malformed() {
    let mut lab = lab(MODERN);
    lab.guests[1].post(0, 50, 1536, 1);
    let (tcp4, of_tcp4) = prepared(false, false, 3000, 1400);
    let (udp4, of_udp4) = prepared(false, true, 3000, 1400);
    let (tcp6, _) = prepared(true, false, 3000, 1400);
    let malformed = Some(DropReason::Malformed);
    assert_eq!(lab.judge_with(0, &written(of_tcp4), &udp4), malformed);
    assert_eq!(lab.judge_with(0, &written(of_udp4), &tcp4), malformed);
    assert_eq!(lab.judge_with(0, &written(of_tcp4), &tcp6), malformed);
    let moved = Vnet { csum_start: of_tcp4.csum_start + 4, ..of_tcp4 };
    assert_eq!(lab.judge_with(0, &written(moved), &tcp4), malformed);
    let no_size = Vnet { gso_size: 0, ..of_tcp4 };
    assert_eq!(lab.judge_with(0, &written(no_size), &tcp4), malformed);
    // A TCP header that claims to be longer than the frame, or shorter than any.
    for offset in [0xf0, 0x40] {
        let mut odd = tcp4.clone();
        odd[34 + 12] = offset;
        odd.truncate(if offset == 0xf0 { 80 } else { odd.len() });
        assert_eq!(lab.judge_with(0, &written(of_tcp4), &odd), malformed);
    }
    assert_eq!(lab.judge_with(0, &written(of_tcp4), &tcp4), None);
}
