//! Attempts of a hostile guest (ABUSE classes R3, R10, D1, C1, I; C3 is in `binding/tests.rs`).
#![allow(non_snake_case)]

use base::counter::DropReason;
use queue::Layout;

use crate::features;
use crate::testing::{BROADCAST, HOLD_NS, Lab, MODERN, Spec, frame, mac, no_offload, vnet};
use frame::{GSO_TCPV4, MAX_FRAME, VNET_LEN};

const MALFORMED: Option<DropReason> = Some(DropReason::Malformed);

#[test]
fn abuse_R3_chain_shorter_than_its_header() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut lab = Lab::new(vec![Spec { layout, ..Spec::default() }, Spec::default()]);
        lab.introduce();
        lab.guests[1].post(0, 4, 1600, 1);
        for len in [1, 9, 10, 11, 12, 13, 25] {
            assert_eq!(lab.judge_with(0, &vec![0xff; len], &[]), MALFORMED, "{len}");
        }
        // A chain with nothing to read at all.
        let (addr, len) = (lab.guests[0].tx[0].alloc(100), 100);
        lab.guests[0].tx[0].offer(&[], &[(addr, len)]);
        let before = lab.drops(0, DropReason::Malformed);
        lab.poll();
        assert_eq!(lab.drops(0, DropReason::Malformed), before + 1);
        assert_eq!(lab.guests[0].tx[0].used().unwrap().1, 0);
        // The port lives.
        assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 14)), None);
        assert_eq!(lab.guests[1].recv_all(0).len(), 1);
    }
}

#[test]
fn abuse_R3_header_split_over_many_descriptors() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 8, 1600, 1);
    let sent = frame(mac(1), mac(0), 300);
    for pieces in [12, 40, 104, 156] {
        lab.guests[0].send(0, &no_offload(), &sent, pieces);
        lab.poll();
        assert_eq!(lab.guests[1].recv(0).unwrap().1, sent, "{pieces}");
        lab.guests[0].tx[0].used().unwrap();
    }
}

#[test]
fn abuse_R3_receive_buffer_shorter_than_the_header_breaks_only_its_port() {
    let mut lab = Lab::new(vec![Spec::default(), Spec::default(), Spec::default()]);
    lab.introduce();
    lab.guests[1].post(0, 1, 11, 1);
    lab.guests[2].post(0, 4, 1600, 1);
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 60)), Some(DropReason::LinkDown));
    let reason = lab.guests[1].rx[0].health().reason().unwrap();
    assert!(reason.contains("12 bytes"), "{reason}");
    assert!(lab.guests[1].rx[0].err_event().drain());
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 60)), Some(DropReason::LinkDown));
    assert_eq!(lab.judge(0, &frame(mac(2), mac(0), 60)), None);
    assert_eq!(lab.guests[2].recv_all(0).len(), 1);
}

#[test]
fn abuse_R3_receive_chain_with_nothing_to_write_breaks_only_its_port() {
    let mut lab = Lab::pair();
    let (addr, len) = (lab.guests[1].rx[0].alloc(2000), 2000);
    lab.guests[1].rx[0].offer(&[(addr, len)], &[]);
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 60)), Some(DropReason::LinkDown));
    assert!(!lab.guests[1].rx[0].health().is_live());
    assert!(lab.guests[0].tx[0].health().is_live());
}

#[test]
fn abuse_R10_longest_frame_and_one_byte_more() {
    let mut lab = Lab::new(vec![Spec::default(), Spec { mtu: 65_535, ..Spec::default() }]);
    lab.introduce();
    lab.guests[1].post(0, 60, 1600, 1);
    let longest = frame(mac(1), mac(0), MAX_FRAME);
    assert_eq!(lab.judge(0, &longest), None);
    assert_eq!(lab.guests[1].recv(0).unwrap().1, longest);
    let longer = frame(mac(1), mac(0), MAX_FRAME + 1);
    assert_eq!(lab.judge(0, &longer), Some(DropReason::TooBig));
    // Megabytes in one chain are not copied anywhere.
    let huge = (lab.guests[0].tx[0].alloc(16 << 20), 16 << 20);
    lab.guests[0].tx[0].offer(&[huge], &[]);
    lab.poll();
    assert_eq!(lab.drops(0, DropReason::TooBig), 2);
}

#[test]
fn abuse_R10_tiny_receive_buffers_end_in_a_drop_not_in_a_wait_for_ever() {
    let mut lab =
        Lab::new(vec![Spec::default(), Spec { ring: 1024, mtu: 9000, ..Spec::default() }]);
    lab.introduce();
    lab.guests[1].post(0, 600, 16, 1);
    // 256 buffers of 16 bytes hold 4,096 bytes with the header.
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 4085)), Some(DropReason::TooBig));
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 4084)), None);
    assert_eq!(lab.guests[1].recv(0).unwrap().1.len(), 4084);
}

/// Buffers in many pieces are slow to walk: they are walked when there are new ones, not for each
/// frame that does not fit.
#[test]
fn abuse_R10_buffers_at_hand_are_not_walked_again_for_each_frame() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 5, 256, 256);
    let walks = |lab: &Lab| lab.guests[1].rx[0].stats().batches.get();
    let long = frame(mac(1), mac(0), 1514);
    lab.guests[0].send(0, &no_offload(), &long, 1);
    for _ in 0..10 {
        assert_eq!(lab.poll(), 0);
    }
    assert_eq!(walks(&lab), 1);
    lab.advance(HOLD_NS);
    assert_eq!(lab.poll(), 1);
    lab.guests[0].tx[0].used().unwrap();
    for _ in 0..10 {
        assert_eq!(lab.judge(0, &long), Some(DropReason::ReceiverStalled));
    }
    assert_eq!(walks(&lab), 1);
    // A sixth buffer, and it fits.
    lab.guests[1].post(0, 1, 256, 256);
    assert_eq!(lab.judge(0, &long), None);
    assert_eq!(lab.guests[1].recv(0).unwrap().1, long);
}

/// Held are at most 2,048 segments. What needs more does not fit ever, though more buffers are
/// posted: nobody waits for it, and they are not walked again for each such frame.
#[test]
fn abuse_R10_a_frame_beyond_all_segments_is_dropped_not_waited_for() {
    let mut lab = Lab::new(vec![Spec::default(), Spec { mtu: 9000, ..Spec::default() }]);
    lab.introduce();
    lab.guests[1].post(0, 12, 256, 256);
    let long = frame(mac(1), mac(0), 8 * 256 - 12 + 1);
    let walks = |lab: &Lab| lab.guests[1].rx[0].stats().batches.get();
    for _ in 0..5 {
        assert_eq!(lab.judge(0, &long), Some(DropReason::TooBig));
    }
    assert_eq!(walks(&lab), 2);
    assert_eq!(lab.stats.holds.get(), 0);
    let longest = &frame(mac(1), mac(0), 8 * 256 - 12);
    assert_eq!(lab.judge(0, longest), None);
    assert_eq!(lab.guests[1].recv(0).unwrap().1, *longest);
    // Four buffers are left: here more of them do help.
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 4 * 256 - 12)), None);
}

/// Each copy of a flood counts: a round with thousands of copies would hold all others up.
#[test]
fn abuse_R10_a_flood_ends_a_round_by_its_copies() {
    let mut lab = Lab::new((0..5).map(|_| Spec::default()).collect());
    lab.introduce();
    let (whole, receivers) = (1514, 4);
    for _ in 0..64 {
        lab.guests[0].send(0, &no_offload(), &frame(BROADCAST, mac(0), whole), 1);
    }
    let cost = VNET_LEN + whole * receivers;
    assert_eq!(lab.poll(), (256_usize << 10).div_ceil(cost));
    while lab.poll() > 0 {}
    // From outside: all five get it, so four copies are made.
    let wire = lab.set_wire();
    let outside = frame(BROADCAST, [2, 0, 0, 0, 0, 0x77], whole);
    for _ in 0..64 {
        wire.lock().unwrap().incoming.push_back([&no_offload()[..], &outside].concat());
    }
    assert_eq!(lab.poll(), (128_usize << 10).div_ceil(VNET_LEN + whole + whole * receivers));
    // A frame for one receiver costs what it is long, which is known after the first of them.
    while lab.poll() > 0 {}
    while lab.guests[0].tx[0].used().is_some() {}
    lab.guests[1].post(0, 64, 1600, 1);
    for _ in 0..64 {
        lab.guests[0].send(0, &no_offload(), &frame(mac(1), mac(0), whole), 1);
    }
    let first = lab.poll();
    assert!(first > (256 << 10) / cost, "{first}");
    assert_eq!(lab.poll(), 64 - first);
}

/// The header that is delivered is the one that was judged, whatever the guest does meanwhile:
/// the bytes are taken once, so a frame held in the ring is judged anew with its new bytes.
#[test]
fn abuse_D1_a_header_rewritten_while_held_is_judged_again() {
    let mut lab = Lab::pair();
    let good = frame(mac(1), mac(0), 60);
    let driver = &mut lab.guests[0].tx[0];
    let whole = [&no_offload()[..], &good].concat();
    let (addr, len) = driver.buffer(&whole);
    driver.offer(&[(addr, len)], &[]);
    assert_eq!(lab.poll(), 0);
    // Held for want of buffers. Now the guest makes itself somebody else.
    lab.guests[0].tx[0].write(addr + 12 + 6, &mac(7));
    lab.guests[1].post(0, 2, 1600, 1);
    assert_eq!(lab.poll(), 1);
    assert_eq!(lab.drops(0, DropReason::Spoofed), 1);
    assert_eq!(lab.guests[1].recv_all(0).len(), 0);
}

/// Another thread rewrites the header all the time: every frame that arrives carries exactly an
/// address that was judged good, and a virtio-net header that makes sense.
#[test]
fn abuse_D1_headers_changed_while_they_are_read() {
    let mut lab = Lab::pair();
    let whole = [&no_offload()[..], &frame(mac(1), mac(0), 60)].concat();
    let (addr, len) = lab.guests[0].tx[0].buffer(&whole);
    let ram = lab.guests[0].ram.clone();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let stopped = stop.clone();
    let attacker = std::thread::spawn(move || {
        while !stopped.load(std::sync::atomic::Ordering::Relaxed) {
            ram.write(addr, &vnet(1, GSO_TCPV4, 1, 0xffff, 0xffff));
            ram.write(addr + 12 + 6, &mac(7));
            ram.write(addr + 12 + 6, &mac(0));
            ram.write(addr, &no_offload());
        }
    });
    let (mut arrived, mut rounds) = (0, 0);
    // On a busy machine the other thread may stand still with a bad header for long.
    while rounds < 20_000 || (arrived == 0 && rounds < 20_000_000) {
        rounds += 1;
        if rounds > 20_000 {
            std::thread::yield_now();
        }
        lab.guests[1].post_up_to(0, 4, 1600, 1);
        lab.guests[0].tx[0].offer(&[(addr, len)], &[]);
        lab.poll();
        lab.guests[0].tx[0].used().unwrap();
        if let Some((vnet, got)) = lab.guests[1].recv(0) {
            assert_eq!(vnet, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
            assert_eq!(got[6..12], mac(0));
            arrived += 1;
        }
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    attacker.join().unwrap();
    assert!(arrived > 0);
}

#[test]
fn abuse_C1_checksum_and_segmentation_fields_beyond_the_frame() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 16, 1600, 1);
    let plain = frame(mac(1), mac(0), 100);
    let mut bad = |header: Vec<u8>, why: &str| {
        assert_eq!(lab.judge_with(0, &header, &plain), MALFORMED, "{why}");
        assert!(lab.guests[1].recv(0).is_none());
    };
    bad(vnet(1, 0, 0, 100, 0), "sum starts at the end");
    bad(vnet(1, 0, 0, 98, 1), "sum placed across the end");
    bad(vnet(1, 0, 0, 0xffff, 0xffff), "sum beyond everything");
    bad(vnet(1, 0, 0, 0, 0), "sum in the Ethernet header");
    bad(vnet(1, GSO_TCPV4, 100, 34, 16), "segmentation of what is not IP");
    bad(vnet(0, GSO_TCPV4, 100, 34, 16), "segmentation without checksum");
    bad(vnet(1, 3, 100, 34, 6), "fragmentation offload, which is not offered");
    bad(vnet(1, 0x7f, 100, 34, 6), "a type that does not exist");
    bad(vnet(1, 0x80, 100, 34, 6), "ECN without a type");
    bad(vnet(1, 0, 0, 34, 16), "a checksum in what is not IP");
    assert_eq!(lab.judge_with(0, &vnet(0xfe, 0, 0, 0xffff, 0xffff), &plain), None);
    // Flags that nobody defined do not reach the receiver.
    let (header, _) = lab.guests[1].recv(0).unwrap();
    assert_eq!(header[..10], [0; 10]);
}

#[test]
fn abuse_C1_offloads_that_were_not_negotiated() {
    let bare = Spec { features: MODERN & !features::OFFLOADS, ..Spec::default() };
    let mut lab = Lab::new(vec![bare, Spec::default()]);
    lab.introduce();
    lab.guests[1].post(0, 2, 1600, 1);
    let plain = frame(mac(1), mac(0), 100);
    assert_eq!(lab.judge_with(0, &vnet(1, 0, 0, 34, 16), &plain), MALFORMED);
    assert_eq!(lab.judge_with(0, &vnet(1, GSO_TCPV4, 100, 34, 16), &plain), MALFORMED);
    assert_eq!(lab.judge_with(0, &vnet(0, 0, 0, 0, 0), &plain), None);
}

/// The used length is what was written, and what is behind it was not touched: a receiver never
/// sees bytes of ours or of another VM.
#[test]
fn abuse_I_used_length_is_what_was_written() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut lab = Lab::new(vec![Spec::default(), Spec { layout, ..Spec::default() }]);
        lab.introduce();
        for len in [14, 60, 127, 128, 129, 499, 500, 501, 1500] {
            lab.guests[1].post_up_to(0, 8, 512, 1);
            lab.guests[0].send(0, &no_offload(), &frame(mac(1), mac(0), len), 1);
            lab.poll();
            // `raw_recv` and `recv` check the tails; here the sum of the lengths.
            let mut got = 0;
            while let Some((written, bytes)) = lab.guests[1].raw_recv(0) {
                assert!(written <= bytes.len());
                assert!(bytes[written..].iter().all(|b| *b == 0xee), "{layout:?} {len}");
                got += written;
            }
            assert_eq!(got, 12 + len);
        }
    }
}

#[test]
fn abuse_I_a_writable_part_of_a_transmit_chain_stays_untouched() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 1, 1600, 1);
    let driver = &mut lab.guests[0].tx[0];
    let sent = driver.buffer(&[&no_offload()[..], &frame(mac(1), mac(0), 60)].concat());
    let extra = driver.buffer(&[0xee; 64]);
    driver.offer(&[sent], &[extra]);
    lab.poll();
    assert_eq!(lab.guests[0].tx[0].used().unwrap().1, 0);
    assert_eq!(lab.guests[0].tx[0].read(extra.0, 64), [0xee; 64]);
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
}

#[test]
fn abuse_R1_a_looping_transmit_chain_breaks_only_its_port() {
    let mut lab = Lab::new(vec![Spec::default(), Spec::default(), Spec::default()]);
    lab.introduce();
    lab.guests[2].post(0, 1, 1600, 1);
    let driver = &mut lab.guests[0].tx[0];
    let (addr, len) = driver.buffer(&[0; 64]);
    let head = driver.stage(&[(addr, len)], &[]);
    let mut desc = driver.desc(head);
    (desc.flags, desc.tail) = (1, head);
    driver.set_desc(head, desc);
    driver.publish();
    lab.poll();
    assert!(!lab.guests[0].tx[0].health().is_live());
    // Arming a broken port must not keep the sidecore awake.
    use sidecore::Worker;
    assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), sidecore::Arm::Idle);
    lab.engine.disarm();
    assert_eq!(lab.judge(1, &frame(mac(2), mac(1), 60)), None);
    assert_eq!(lab.guests[2].recv_all(0).len(), 1);
}

#[test]
fn abuse_D4_a_frame_with_a_buffer_outside_memory_is_dropped_and_the_ring_goes_on() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 4, 1600, 1);
    let stray = lab.guests[0].tx[0].unmapped_addr();
    let head =
        lab.guests[0].tx[0].buffer(&[&no_offload()[..], &frame(mac(1), mac(0), 60)].concat());
    for chain in [vec![(stray, 100)], vec![head, (stray, 100)]] {
        lab.guests[0].tx[0].offer(&chain, &[]);
    }
    while lab.poll() > 0 {}
    assert_eq!(lab.drops(0, DropReason::Malformed), 2);
    assert_eq!(std::iter::from_fn(|| lab.guests[0].tx[0].used()).count(), 2);
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 60)), None);
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
}

#[test]
fn abuse_B2_frames_in_a_thousand_pieces_pass_and_those_in_too_many_are_dropped() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 8, 1600, 1);
    let sent = frame(mac(1), mac(0), 1500);
    let bytes = [&no_offload()[..], &sent].concat();
    let driver = &mut lab.guests[0].tx[0];
    let whole = driver.buffer(&bytes);
    let pieces: Vec<_> = (0..bytes.len() as u64).map(|at| (whole.0 + at, 1)).collect();
    driver.offer_indirect(&pieces, &[]);
    lab.poll();
    assert_eq!(lab.guests[1].recv(0).unwrap().1, sent);
    let too_many = vec![(whole.0, 1); base::limits::MAX_CHAIN_SEGS + 1];
    lab.guests[0].tx[0].offer_indirect(&too_many, &[]);
    lab.poll();
    assert_eq!(lab.drops(0, DropReason::TooBig), 1);
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 60)), None);
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
}

/// A receive buffer that cannot be filled goes back empty, in its turn; frames wait or are dropped
/// as where there are no buffers.
#[test]
fn abuse_D4_receive_buffers_outside_memory_go_back_empty() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut lab = Lab::new(vec![Spec::default(), Spec { layout, ..Spec::default() }]);
        lab.introduce();
        let stray = (lab.guests[1].rx[0].unmapped_addr(), 1600);
        let long = frame(mac(1), mac(0), 60);
        let mut expected = Vec::new();
        for good in [0, 2, 1] {
            for _ in 0..good {
                let buffer = (lab.guests[1].rx[0].alloc(1600), 1600);
                lab.guests[1].rx[0].offer(&[], &[buffer]);
                expected.push((VNET_LEN + 60) as u32);
            }
            lab.guests[1].rx[0].offer(&[], &[stray]);
            expected.push(0);
        }
        let buffer = (lab.guests[1].rx[0].alloc(1600), 1600);
        lab.guests[1].rx[0].offer(&[], &[buffer]);
        expected.push((VNET_LEN + 60) as u32);
        for _ in 0..4 {
            lab.guests[0].send(0, &no_offload(), &long, 1);
        }
        for _ in 0..16 {
            lab.poll();
        }
        let used: Vec<u32> =
            std::iter::from_fn(|| lab.guests[1].rx[0].used()).map(|(_, len)| len).collect();
        assert_eq!(used, expected, "{layout:?}");
        assert_eq!(lab.rx_drops(1, DropReason::Malformed), 3);
        assert!(lab.guests[1].rx[0].health().is_live());
    }
}

/// While a driver posts nothing else, senders wait no longer than they would for no buffers at all.
#[test]
fn abuse_D4_receive_buffers_outside_memory_hold_nobody_up_for_ever() {
    let mut lab = Lab::pair();
    let stray = (lab.guests[1].rx[0].unmapped_addr(), 1600);
    lab.guests[0].send(0, &no_offload(), &frame(mac(1), mac(0), 60), 1);
    let mut polls = 0;
    while lab.guests[0].tx[0].used().is_none() {
        lab.guests[1].rx[0].offer(&[], &[stray]);
        while lab.guests[1].rx[0].used().is_some() {}
        lab.advance(HOLD_NS / 4);
        lab.poll();
        polls += 1;
        assert!(polls < 100, "the frame is held for ever");
    }
    assert_eq!(lab.drops(0, DropReason::ReceiverStalled), 1);
}

/// Each broadcast is copied to every port: what one VM may cause there has a ceiling.
#[test]
fn abuse_N10_broadcasts_of_a_port_have_a_ceiling() {
    let mut lab = Lab::pair();
    lab.port(0).broadcasts = crate::ceiling::Ceiling::per_second(100);
    let sent = |lab: &mut Lab, dst| {
        (0..50).filter(|_| lab.judge(0, &frame(dst, mac(0), 60)).is_none()).count()
    };
    lab.guests[1].post(0, 200, 1600, 1);
    assert_eq!(sent(&mut lab, BROADCAST), 10, "the burst");
    assert_eq!(lab.drops(0, DropReason::Throttled), 40);
    assert_eq!(sent(&mut lab, [1, 0, 0x5e, 0, 0, 1]), 50, "multicasts have none");
    assert_eq!(sent(&mut lab, mac(1)), 50);
    lab.advance(1_000_000_000);
    assert_eq!(sent(&mut lab, BROADCAST), 10);
    assert_eq!(lab.drops(1, DropReason::Throttled), 0);
}
