//! Payload that its sender rewrites while the switch works on it (D2). Where the switch computes
//! something from the payload, it works on a copy of its own, and that copy is delivered.
#![allow(non_snake_case)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::features as f;
use crate::testing::{Lab, MODERN, Spec, mac};
use frame::Vnet;
use frame::testing::{make_partial, super_packet, verify};

/// Rounds that are played at least, and at most while the other thread has not run yet.
const ROUNDS: std::ops::Range<usize> = 1_000..20_000_000;

/// Guest 0 sends one frame again and again, while another thread rewrites its payload. Guest 1
/// negotiated `features`, so the switch has to finish the frame. An independent reader checks
/// every checksum that arrives.
fn play(features: u64, frame: &[u8], vnet: Vnet, payload_len: usize) -> Lab {
    let mut lab = Lab::new(vec![Spec::default(), Spec { features, ..Spec::default() }]);
    lab.introduce();
    let whole = [&Vnet { hdr_len: 0xffff, ..vnet }.to_bytes(0)[..], frame].concat();
    let (addr, len) = lab.guests[0].tx[0].buffer(&whole);
    let first = addr + u64::from(len) - payload_len as u64;
    let ram = Arc::clone(&lab.guests[0].ram);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let attacker = std::thread::spawn(move || {
        let mut byte = 0_u8;
        while !stopped.load(Ordering::Relaxed) {
            byte = byte.wrapping_add(1);
            ram.write(first, &vec![byte; payload_len]);
        }
    });
    let (mut last, mut rewritten) = (Vec::new(), 0);
    for round in 0..ROUNDS.end {
        if round >= ROUNDS.start {
            if rewritten > 100 {
                break;
            }
            std::thread::yield_now();
        }
        lab.guests[1].post_up_to(0, 16, 1600, 1);
        lab.guests[0].tx[0].offer(&[(addr, len)], &[]);
        lab.poll();
        lab.guests[0].tx[0].used().unwrap();
        let arrived = lab.guests[1].recv_all(0);
        assert!(!arrived.is_empty());
        let payload: Vec<u8> = arrived.iter().flat_map(|frame| verify(frame)).collect();
        assert_eq!(payload.len(), payload_len);
        rewritten += usize::from(payload != last);
        last = payload;
    }
    stop.store(true, Ordering::Relaxed);
    attacker.join().unwrap();
    assert!(rewritten > 100, "the payload was seen to change {rewritten} times");
    lab
}

fn prepared(v6: bool, udp: bool, payload_len: usize, size: u16) -> (Vec<u8>, Vnet) {
    let (mut frame, vnet) = super_packet(v6, udp, payload_len, size);
    frame[..6].copy_from_slice(&mac(1));
    frame[6..12].copy_from_slice(&mac(0));
    make_partial(&mut frame, &vnet);
    (frame, vnet)
}

#[test]
fn abuse_D2_a_checksum_that_is_filled_in_is_that_of_the_bytes_delivered() {
    for (v6, udp) in [(false, false), (true, true)] {
        let (frame, vnet) = prepared(v6, udp, 1400, 1400);
        let vnet = Vnet { gso_type: 0, gso_size: 0, ..vnet };
        let lab = play(MODERN & !f::OFFLOADS, &frame, vnet, 1400);
        assert!(lab.stats.software_checksums.get() >= ROUNDS.start as u64);
    }
}

#[test]
fn abuse_D2_segments_of_a_super_packet_carry_the_checksums_of_their_bytes() {
    for (v6, udp) in [(false, false), (true, true)] {
        let (frame, vnet) = prepared(v6, udp, 7000, 1400);
        let lab = play(MODERN & !f::OFFLOADS, &frame, vnet, 7000);
        assert!(lab.stats.software_segmented.get() >= ROUNDS.start as u64);
    }
}
