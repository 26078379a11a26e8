use proptest::prelude::*;

use super::*;
use crate::testing::{Build, key, mirror, read, sacks, timestamps, words};
use frame::HEAD_LEN;

/// Options at any alignment: paddings before and between.
fn options() -> impl Strategy<Value = Vec<u8>> {
    let blocks = prop::collection::vec(any::<(u32, u32)>(), 0..4);
    let stamps = prop::option::of(any::<(u32, u32)>());
    (0..4_usize, 0..3_usize, stamps, blocks, any::<bool>()).prop_map(
        |(first, between, stamps, blocks, swap)| {
            let stamps = stamps.map(|(v, e)| timestamps(v, e)[2..].to_vec()).unwrap_or_default();
            // Both, and all paddings, are to fit into 40 bytes.
            let most = (40 - 3 - 2 - stamps.len() - 2) / 8;
            let blocks = &blocks[..blocks.len().min(most)];
            let sacks = if blocks.is_empty() { Vec::new() } else { sacks(blocks)[2..].to_vec() };
            let (a, b) = if swap { (stamps, sacks) } else { (sacks, stamps) };
            [vec![1; first], a, vec![1; between], b].concat()
        },
    )
}

/// IPv4 options or IPv6 extension headers.
fn extra(v6: bool) -> BoxedStrategy<(u8, Vec<u8>)> {
    if !v6 {
        let words = 0..4_usize;
        return words.prop_map(|words| (0, vec![1; 4 * words])).boxed();
    }
    let hop = vec![6, 0, 1, 4, 0, 0, 0, 0];
    let atomic = vec![6, 0, 0, 0, 1, 2, 3, 4];
    let mut both = [hop.clone(), atomic.clone()].concat();
    both[0] = 44;
    let long = vec![6, 1, 1, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    prop_oneof![
        Just((0, Vec::new())),
        Just((0, hop)),
        Just((44, atomic)),
        Just((0, both)),
        Just((60, long))
    ]
    .boxed()
}

fn segments() -> impl Strategy<Value = Build> {
    let body = (prop::collection::vec(any::<u8>(), 0..200), 0..7_usize);
    let head = (any::<u32>(), any::<u32>(), any::<u8>(), any::<u16>(), options());
    let net = any::<bool>().prop_flat_map(|v6| (Just(v6), extra(v6)));
    (net, head, body).prop_map(|((v6, (extra_kind, extra)), head, (payload, padding))| {
        let (seq, ack, flags, window, options) = head;
        let new = Build::new(key(v6), flags, seq, ack);
        Build { window, options, extra, extra_kind, payload, padding, ..new }
    })
}

fn parse(frame: &[u8]) -> Segment {
    Segment::parse(&frame[..frame.len().min(HEAD_LEN)], frame.len()).unwrap()
}

/// Change that an edit may make.
#[derive(Debug, Clone)]
struct Edits {
    seq: u32,
    ack: u32,
    window: u16,
    clear: u8,
    stamps: (u32, u32),
    by: u32,
    drop_sacks: bool,
}

fn edits() -> impl Strategy<Value = Edits> {
    let numbers = (any::<u32>(), any::<u32>(), any::<u16>(), any::<u8>());
    (numbers, any::<(u32, u32)>(), any::<u32>(), any::<bool>()).prop_map(
        |((seq, ack, window, clear), stamps, by, drop_sacks)| Edits {
            seq,
            ack,
            window,
            clear,
            stamps,
            by,
            drop_sacks,
        },
    )
}

fn apply(editor: &mut Editor<'_>, e: &Edits) {
    editor.set_seq(e.seq);
    editor.set_ack(e.ack);
    editor.set_window(e.window);
    editor.clear_flags(e.clear);
    editor.set_timestamps(e.stamps.0, e.stamps.1);
    let change = |l: u32, r: u32| Some((l.wrapping_add(e.by), r.wrapping_add(e.by)));
    editor.map_sacks(|l, r| if e.drop_sacks { None } else { change(l, r) });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn what_was_written_is_read(build in segments()) {
        let frame = build.frame();
        let segment = parse(&frame);
        let other = read(&frame);
        prop_assert_eq!(segment.seq, build.seq);
        prop_assert_eq!(segment.ack, build.ack);
        prop_assert_eq!(segment.flags, build.flags);
        prop_assert_eq!(segment.window, build.window);
        prop_assert_eq!(segment.payload_len, build.payload.len());
        prop_assert_eq!(segment.timestamps(&frame), other.timestamps);
        prop_assert_eq!(segment.key_of_sender(&frame), build.key);
        prop_assert_eq!(segment.key_of_receiver(&frame), mirror(&build.key));
        prop_assert_eq!(segment.headers_len(), frame.len() - build.padding - build.payload.len());
    }

    /// A right checksum stays right, a wrong one as wrong as it was, and nothing else changes.
    #[test]
    fn edits_keep_what_the_checksum_says(
        build in segments(),
        e in edits(),
        damage in any::<u16>(),
    ) {
        let mut frame = build.frame();
        let segment = parse(&frame);
        let at = segment.offset() + 16;
        let check = u16::from_be_bytes([frame[at], frame[at + 1]]);
        frame[at..at + 2].copy_from_slice(&(check ^ damage).to_be_bytes());
        let before = read(&frame);
        let head_len = frame.len().min(HEAD_LEN);
        apply(&mut Editor::new(&mut frame[..head_len], &segment, true), &e);
        let after = read(&frame);
        // All ones and zero are the same number here.
        prop_assert_eq!(after.off_by % 0xffff, before.off_by % 0xffff);
        if damage == 0 {
            prop_assert_eq!(after.off_by, 0);
        }
        prop_assert_eq!((after.seq, after.ack, after.window), (e.seq, e.ack, e.window));
        prop_assert_eq!(after.flags, build.flags & !e.clear);
        prop_assert_eq!(after.timestamps, before.timestamps.map(|_| e.stamps));
        let moved = |(l, r): &(u32, u32)| (l.wrapping_add(e.by), r.wrapping_add(e.by));
        let expected: Vec<_> = before.sacks.iter().filter(|_| !e.drop_sacks).map(moved).collect();
        prop_assert_eq!(after.sacks, expected);
        prop_assert_eq!(after.payload, before.payload);
    }

    /// With a checksum that is yet to be filled in, its place is not touched.
    #[test]
    fn edits_leave_a_partial_checksum_alone(build in segments(), e in edits()) {
        let mut frame = build.frame();
        let segment = parse(&frame);
        let at = segment.offset() + 16;
        let before = frame[at..at + 2].to_vec();
        apply(&mut Editor::new(&mut frame, &segment, false), &e);
        prop_assert_eq!(&frame[at..at + 2], &before[..]);
        prop_assert_eq!(read(&frame).seq, e.seq);
    }

    #[test]
    fn a_stripped_segment_is_whole(build in segments(), summed in any::<bool>()) {
        let mut frame = build.frame();
        let segment = parse(&frame);
        let head_len = frame.len().min(HEAD_LEN);
        let len = Editor::new(&mut frame[..head_len], &segment, summed).strip();
        let after = read(&frame[..len]);
        let expected = Build { payload: vec![], padding: 0, ..build.clone() };
        let expected = Build { flags: build.flags & !(FIN | PSH | URG), ..expected };
        prop_assert_eq!(after.off_by, 0);
        prop_assert_eq!(&frame[..len], &expected.frame()[..]);
    }

    /// A trimmed segment has a sum to be filled in as a driver leaves it.
    #[test]
    fn a_trimmed_segment_has_a_partial_checksum(build in segments(), summed in any::<bool>()) {
        prop_assume!(build.payload.len() > 1);
        let mut frame = build.frame();
        let segment = parse(&frame);
        let keep = build.payload.len() / 2;
        let head_len = frame.len().min(HEAD_LEN);
        let len = Editor::new(&mut frame[..head_len], &segment, summed).trim(keep);
        frame.truncate(len);
        let check = !words(&frame[segment.offset()..]);
        let at = segment.offset() + 16;
        frame[at..at + 2].copy_from_slice(&check.to_be_bytes());
        let payload = build.payload[..keep].to_vec();
        let flags = build.flags & !(FIN | PSH | URG);
        let expected = Build { payload, flags, padding: 0, ..build };
        prop_assert_eq!(frame, expected.frame());
    }

    #[test]
    fn sums_are_judged(build in segments(), at in any::<prop::sample::Index>(), bit in 0..8_u8) {
        let mut frame = build.frame();
        let segment = parse(&frame);
        let (first, end) = (segment.headers_len(), frame.len() - build.padding);
        prop_assert!(segment.is_sum_right(&frame, &frame[first..end]));
        // No single flipped bit goes unseen; those of the header's length would be other segments.
        let at = segment.offset() + at.index(end - segment.offset());
        prop_assume!(at != segment.offset() + 12);
        frame[at] ^= 1 << bit;
        prop_assert!(!segment.is_sum_right(&frame, &frame[first..end]));
    }

    #[test]
    fn an_answer_comes_from_the_other_end(
        build in segments(),
        numbers in any::<(u32, u32, u16)>(),
        stamps in prop::option::of(any::<(u32, u32)>()),
    ) {
        let mut frame = build.frame();
        let segment = parse(&frame);
        let (seq, ack, window) = numbers;
        let with = Answer { flags: ACK, seq, ack, window, timestamps: stamps };
        let len = segment.answer(&mut frame, &with);
        let answer = read(&frame[..len]);
        prop_assert_eq!((answer.seq, answer.ack, answer.window), (seq, ack, window));
        prop_assert_eq!((answer.off_by, answer.flags), (0, ACK));
        prop_assert!(answer.payload.is_empty() && answer.sacks.is_empty());
        prop_assert_eq!(parse(&frame[..len]).key_of_sender(&frame), mirror(&build.key));
        prop_assert_eq!([&frame[6..12], &frame[..6]], [&build.macs[0][..], &build.macs[1]]);
    }

    /// Any bytes: no panic, and what is found lies within them.
    #[test]
    fn anything_can_be_parsed(
        mut bytes in prop::collection::vec(any::<u8>(), 0..160),
        kind in 0..4_u8,
        len in 0..400_usize,
        e in edits(),
    ) {
        // Make it likely that more than the first test is reached.
        if bytes.len() > 40 && kind > 0 {
            let v6 = kind == 2;
            bytes[12..14].copy_from_slice(if v6 { &[0x86, 0xdd] } else { &[8, 0] });
            bytes[14] = if v6 { 0x60 } else { 0x40 | (bytes[14] & 7) };
            bytes[if v6 { 20 } else { 23 }] = if kind == 3 { bytes[20] & 63 } else { 6 };
            bytes[if v6 { 18 } else { 16 }] = 0;
            bytes[20] = if v6 { bytes[20] } else { 0x40 };
            bytes[21] = if v6 { bytes[21] } else { 0 };
        }
        touch_everything(&mut bytes, len, &e);
    }

    /// A frame with a few bytes wrong, or cut: the same.
    #[test]
    fn a_damaged_frame_can_be_parsed(
        build in segments(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
        extra in -300..300_isize,
        e in edits(),
    ) {
        let mut frame = build.frame();
        for (at, byte) in damage {
            let at = 12 + at.index(frame.len() - 12);
            frame[at] = byte;
        }
        let len = frame.len().saturating_add_signed(extra);
        frame.truncate((14 + cut.index(frame.len())).min(HEAD_LEN));
        touch_everything(&mut frame, len, &e);
    }
}

fn touch_everything(bytes: &mut [u8], frame_len: usize, e: &Edits) {
    let Some(segment) = Segment::parse(bytes, frame_len) else { return };
    assert!(segment.headers_len() <= bytes.len());
    assert!(segment.headers_len() + segment.payload_len <= frame_len);
    let _ = (segment.key_of_sender(bytes), segment.timestamps(bytes), segment.end());
    segment.is_sum_right(bytes, &[]);
    apply(&mut Editor::new(bytes, &segment, true), e);
    let mut copy = bytes.to_vec();
    assert_eq!(Editor::new(&mut copy, &segment, true).strip(), segment.headers_len());
    let with = Answer { flags: ACK, seq: 1, ack: 2, window: 3, timestamps: Some((4, 5)) };
    assert_eq!(segment.answer(bytes, &with), segment.headers_len());
}

#[test]
fn others_are_not_parsed() {
    let good = Build { payload: vec![1; 20], ..Build::new(key(false), ACK, 1, 2) }.frame();
    assert!(Segment::parse(&good, good.len()).is_some());
    let refused = |why: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let mut frame = good.clone();
        change(&mut frame);
        assert!(Segment::parse(&frame, frame.len()).is_none(), "{why}");
    };
    refused("tagged", &|f| drop(f.splice(12..12, [0x81, 0, 0, 5])));
    refused("UDP", &|f| f[23] = 17);
    refused("a fragment", &|f| f[20] = 0x20);
    refused("a later fragment", &|f| f[21] = 5);
    refused("ARP", &|f| f[13] = 6);
    refused("a short TCP header", &|f| f[14 + 20 + 12] = 0x40);
    refused("a TCP header beyond the packet", &|f| f[14 + 20 + 12] = 0xf0);
    refused("a packet beyond the frame", &|f| f[17] += 1);
    assert!(Segment::parse(&good[..53], good.len()).is_none(), "headers beyond the copy");
}

/// Scales beyond what is allowed count as the largest (RFC 7323, 2.3).
#[test]
fn the_window_scale_is_read() {
    for (says, counts) in [(0, 0), (7, 7), (14, 14), (15, 14), (255, 14)] {
        let options = vec![2, 4, 5, 0xb4, 1, 3, 3, says];
        let frame = Build { options, ..Build::new(key(true), SYN, 1, 0) }.frame();
        assert_eq!(parse(&frame).scale, counts);
    }
}
