//! Frames and buffers in many pieces (ABUSE class R10): each piece takes time, so it is charged.
#![allow(non_snake_case)]

use sidecore::{SEG_CHARGE_BYTES, Settings};

use super::credits::open;
use super::uplink::wired;
use crate::features;
use crate::port::MIN_CHARGE_BYTES;
use crate::testing::{BROADCAST, Lab, MODERN, Spec, frame, mac, no_offload};

/// Charge for a frame of guest 0's last batch.
fn mean_cost(lab: &mut Lab) -> u64 {
    lab.port(0).tx[0].as_ref().unwrap().mean_cost
}

/// A turn is 40 KiB for all queues together, of which each frame here takes 8,192.
#[test]
fn abuse_R10_frames_in_many_pieces_end_a_turn() {
    let mut lab = Lab::new(vec![Spec { pairs: 16, ..Spec::default() }, Spec::default()]);
    lab.introduce();
    open(&mut lab, &[Settings::default(); 2]);
    // From now on two VMs do something.
    for n in 0..2 {
        lab.guests[n].send(0, &no_offload(), &frame(BROADCAST, mac(n), 60), 1);
    }
    lab.poll();
    lab.ledger.end_round(lab.now_ns);
    for queue in 0..16 {
        for _ in 0..5 {
            lab.guests[0].send(queue, &no_offload(), &frame(BROADCAST, mac(0), 244), 256);
        }
    }
    assert_eq!(lab.poll(), 5);
    let costs = lab.port(0).tx.iter().flatten().map(|q| q.mean_cost);
    assert_eq!(costs.max(), Some(256 * SEG_CHARGE_BYTES));
}

/// Segments that the device may write are none of a frame's, and are walked all the same.
#[test]
fn abuse_R10_segments_to_write_in_a_transmit_chain_are_charged() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 1, 1600, 1);
    let driver = &mut lab.guests[0].tx[0];
    let sent = driver.buffer(&[&no_offload()[..], &frame(mac(1), mac(0), 60)].concat());
    let piece = driver.buffer(&[0xee]);
    driver.offer_indirect(&[sent], &[piece; 255]);
    assert_eq!(lab.poll(), 1);
    assert_eq!(mean_cost(&mut lab), 256 * SEG_CHARGE_BYTES);
}

/// Buffers of one byte each: 1,600 segments for a frame, and 400 that are at hand are walked again
/// to find the rest. The sender's round ends by that, the uplink's too.
#[test]
fn abuse_R10_receive_buffers_in_many_pieces_end_a_round() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 200, 200, 200);
    let long = frame(mac(1), mac(0), 1514);
    for _ in 0..20 {
        lab.guests[0].send(0, &no_offload(), &long, 1);
    }
    // The first finds nothing at hand that would be walked again.
    let (first, next) = (12 + 1600 * SEG_CHARGE_BYTES, 12 + 2000 * SEG_CHARGE_BYTES);
    assert_eq!(lab.poll() as u64, 1 + ((256 << 10) - first).div_ceil(next));
    let outside = wired(&frame(mac(1), [2, 0, 0, 0, 0, 0x77], 1514));
    while lab.poll() > 0 {}
    lab.guests[1].recv_all(0);
    lab.guests[1].post(0, 40, 200, 200);
    let wire = lab.set_wire();
    wire.lock().unwrap().incoming.extend(std::iter::repeat_n(outside, 5));
    assert_eq!(lab.poll() as u64, (128_u64 << 10).div_ceil(next));
}

/// Buffers as drivers use them cost nothing beyond bytes and frames: 64 KiB sent in 19 pieces,
/// received in mergeable buffers of 1,526 bytes or in 19 pieces, and small frames in such buffers.
#[test]
fn usual_drivers_are_not_charged_for_pieces() {
    let whole = Spec { features: MODERN & !features::MRG_RXBUF, ..Spec::default() };
    for (receiver, len, pieces) in [(Spec::default(), 1526, 1), (whole, 65_562, 19)] {
        let mut lab = Lab::new(vec![Spec::default(), Spec { mtu: 65_535, ..receiver }]);
        lab.introduce();
        lab.guests[1].post_up_to(0, 200, len, pieces);
        for (frame_len, pieces) in [(65_000, 19), (60, 2), (60, 16), (9000, 19), (65_000, 19)] {
            let sent = frame(mac(1), mac(0), frame_len);
            lab.guests[0].send(0, &no_offload(), &sent, pieces);
            assert_eq!(lab.poll(), 1);
            assert_eq!(lab.guests[1].recv(0).unwrap().1, sent);
            let usual = MIN_CHARGE_BYTES.max(12 + frame_len as u64);
            assert_eq!(mean_cost(&mut lab), usual, "{frame_len} in {pieces}");
        }
    }
}
