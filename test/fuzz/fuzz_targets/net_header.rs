//! The beginning of a frame with the header of its driver: what is taken for sane can be finished
//! in software, into segments that are again sane, as long together as the whole, with checksums
//! that a plain sum finds right.

#![cfg_attr(fuzzing, no_main)]

use frame::{
    Allowed, F_NEEDS_CSUM, HEAD_LEN, Head, L4, MAX_SEGMENTS, SegmentPlan, VNET_LEN,
    complete_checksum, ether_type, flow_hash, fold, sum,
};
use harness::{Input, fuzz_target};

fn allowed(bits: u8) -> Allowed {
    let has = |bit: u8| bits >> bit & 1 == 0;
    Allowed {
        csum: has(0),
        tso4: has(1),
        tso6: has(2),
        ecn: has(3),
        uso: has(4),
        data_valid: has(5),
    }
}

/// The sum over a segment and its pseudo header; 0 if its checksum is right.
fn pseudo_sum(frame: &[u8]) -> u16 {
    let l4 = L4::find(frame).expect("a segment");
    let addresses = if l4.v6 { l4.ip + 8..l4.ip + 40 } else { l4.ip + 12..l4.ip + 20 };
    let pseudo = (frame.len() - l4.offset) as u64 + u64::from(l4.proto);
    fold(sum(&frame[l4.offset..], sum(&frame[addresses], pseudo)))
}

/// Cuts a super-packet.
fn cut(head: &Head, frame: &[u8]) {
    let vnet = head.vnet();
    let Ok(plan) = SegmentPlan::new(head.eth(), frame.len(), &vnet) else { return };
    assert!((1..=MAX_SEGMENTS).contains(&plan.count()));
    let (mut room, mut payload_len) = ([0; HEAD_LEN], 0);
    for index in 0..plan.count() {
        let len = plan.headers(frame, index, &mut room);
        let payload = plan.payload(frame, index);
        assert!(!payload.is_empty() && len + payload.len() <= plan.longest());
        payload_len += payload.len();
        let segment = [&[0; VNET_LEN][..], &room[..len], payload].concat();
        let mut again = Head::default();
        assert_eq!(again.load_slice(&segment, Allowed::ALL), Ok(()));
        assert!(!again.vnet().is_gso());
        assert_eq!(pseudo_sum(&segment[VNET_LEN..]), 0, "a sum that is not right");
    }
    assert_eq!(plan.hdr_len() + payload_len, frame.len());
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let (bits, more) = (input.u8(), usize::from(input.u16()) % 9000);
    let mut whole = input.0.to_vec();
    if bits & 0x80 != 0 && whole.len() >= VNET_LEN + 14 {
        // Super-packets are longer than inputs.
        whole.resize(whole.len() + more, 0x5a);
    }
    let mut head = Head::default();
    if head.load_slice(&whole, allowed(bits)).is_err() {
        return;
    }
    let frame = &whole[VNET_LEN..];
    assert_eq!((head.frame_len(), head.eth()), (frame.len(), &frame[..frame.len().min(HEAD_LEN)]));
    let _ = flow_hash(head.eth());
    if let Some((_, at)) = ether_type(head.eth()) {
        assert!(at <= head.eth().len());
    }
    let l4 = L4::find(head.eth());
    let vnet = head.vnet();
    assert!(vnet.flags & F_NEEDS_CSUM == 0 || l4.is_some());
    if vnet.is_gso() {
        cut(&head, frame);
    } else if vnet.flags & F_NEEDS_CSUM != 0 {
        let mut done = frame.to_vec();
        assert_eq!(complete_checksum(&mut done, &vnet), Ok(()));
        let start = usize::from(vnet.csum_start);
        let at = start + usize::from(vnet.csum_offset);
        let left = u64::from(u16::from_be_bytes([frame[at], frame[at + 1]]));
        // What was in its place was the pseudo header's sum: with it the sum is all ones. An odd
        // place is summed with its bytes the other way round.
        if vnet.csum_offset % 2 == 0 {
            assert_eq!(fold(sum(&done[start..], left)), 0, "a sum that is not right");
        }
        assert_eq!(done[..at], frame[..at]);
        assert_eq!(done[at + 2..], frame[at + 2..]);
    }
});
