use etherparse::{SlicedPacket, TransportSlice};
use proptest::prelude::*;

use super::*;
use crate::checksum::complete_checksum;
use crate::testing::{make_partial, super_packet, verify};
use crate::vnet::F_NEEDS_CSUM;

/// All segments of a super-packet.
fn cut(frame: &[u8], vnet: &Vnet) -> Vec<Vec<u8>> {
    let plan = SegmentPlan::new(frame, frame.len(), vnet).unwrap();
    let one = |index| {
        let mut head = [0; HEAD_LEN];
        let n = plan.headers(frame, index, &mut head);
        [&head[..n], plan.payload(frame, index)].concat()
    };
    (0..plan.count()).map(one).collect()
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
    let plan = SegmentPlan::new(&frame, frame.len(), &vnet);
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
        if let Ok(plan) = SegmentPlan::new(&bytes, bytes.len(), &vnet) {
            let total: usize = (0..plan.count()).map(|i| plan.payload(&bytes, i).len()).sum();
            prop_assert_eq!(total, bytes.len() - plan.hdr_len());
            for index in 0..plan.count() {
                plan.headers(&bytes, index, &mut [0; HEAD_LEN]);
            }
        }
        let _ = complete_checksum(&mut bytes, &vnet);
    }
}
