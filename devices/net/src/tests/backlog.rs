//! Receivers with few buffers behind an uplink that brings bursts.
#![allow(non_snake_case)]

use std::sync::{Arc, Mutex};

use base::counter::DropReason;
use sidecore::{Arm, Settings, Worker};

use super::uplink::wired;
use crate::backlog::Backlogs;
use crate::features as f;
use crate::testing::Model;
use crate::testing::{Lab, MODERN, Spec, frame, mac};
use frame::testing::{make_partial, super_packet, verify};

const OUTSIDE: [u8; 6] = [2, 0, 0, 0, 0, 0x77];
const SECOND_NS: u64 = 1_000_000_000;

/// Guests without offloads, behind an uplink.
fn world(guests: usize) -> (Lab, Arc<Mutex<Model>>) {
    let plain = |_| Spec { features: MODERN & !f::OFFLOADS, ..Spec::default() };
    let mut lab = Lab::new((0..guests).map(plain).collect());
    lab.introduce();
    let wire = lab.set_wire();
    lab.engine.fabric.backlogs = Backlogs::new();
    (lab, wire)
}

fn come(wire: &Mutex<Model>, bytes: Vec<u8>) {
    wire.lock().unwrap().incoming.push_back(bytes);
}

fn lost(lab: &Lab) -> u64 {
    lab.uplink_stats().drops[DropReason::ReceiverStalled as usize].get()
}

/// Eight buffers, as iPXE has them, posted again as they are used.
fn take(lab: &mut Lab, guest: usize, frames: usize) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    while all.len() < frames {
        lab.guests[guest].post_up_to(0, 8, 1600, 1);
        let before = all.len();
        while lab.poll() > 0 {}
        all.extend(lab.guests[guest].recv_all(0));
        assert!(all.len() > before, "{} of {frames} frames came", all.len());
        assert!(all.len() - before <= 8);
    }
    all
}

#[test]
fn N12_a_burst_waits_for_a_receiver_with_few_buffers() {
    let (mut lab, wire) = world(2);
    lab.guests[1].post(0, 4, 1600, 1);
    let burst: Vec<_> = (0..100).map(|n| frame(mac(0), OUTSIDE, 60 + n)).collect();
    burst.iter().for_each(|frame| come(&wire, wired(frame)));
    // Behind the burst: others are not held.
    come(&wire, wired(&frame(mac(1), OUTSIDE, 60)));
    while lab.poll() > 0 {}
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
    assert_eq!(take(&mut lab, 0, 100), burst);
    assert_eq!(lost(&lab), 0);
    assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Idle);
}

/// More segments than the receiver will ever have buffers.
#[test]
fn N12_super_packets_come_in_pieces_to_a_receiver_with_few_buffers() {
    let (mut lab, wire) = world(1);
    let (mut sent, mut pieces) = (Vec::new(), 0);
    for _ in 0..3 {
        let (mut bytes, vnet) = super_packet(false, false, 42_000, 1400);
        let payload = &bytes[usize::from(vnet.hdr_len)..];
        pieces += payload.len().div_ceil(1400);
        sent.extend_from_slice(payload);
        bytes[..6].copy_from_slice(&mac(0));
        bytes[6..12].copy_from_slice(&OUTSIDE);
        make_partial(&mut bytes, &vnet);
        come(&wire, [&vnet.to_bytes(0)[..], &bytes].concat());
    }
    let all = take(&mut lab, 0, pieces);
    assert!(all.iter().all(|frame| frame.len() <= 1514));
    assert_eq!(all.iter().flat_map(|frame| verify(frame)).collect::<Vec<u8>>(), sent);
    assert_eq!(lost(&lab), 0);
}

#[test]
fn abuse_N12_a_dead_receiver_has_a_buffer_for_a_second_and_no_longer() {
    let (mut lab, wire) = world(2);
    (0..10).for_each(|_| come(&wire, wired(&frame(mac(0), OUTSIDE, 60))));
    assert_eq!(lab.poll(), 10);
    let ends_ns = lab.now_ns + SECOND_NS;
    assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Until(ends_ns));
    lab.engine.disarm();
    lab.advance(SECOND_NS);
    let before = lab.rx_drops(0, DropReason::ReceiverStalled);
    lab.poll();
    assert_eq!(lab.rx_drops(0, DropReason::ReceiverStalled), before + 10);
    // No second one before it has taken a frame.
    come(&wire, wired(&frame(mac(0), OUTSIDE, 60)));
    lab.poll();
    assert_eq!((lost(&lab), lab.engine.fabric.backlogs.waiting().len()), (1, 0));
    assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Idle);
    lab.engine.disarm();
    lab.guests[0].post(0, 1, 1600, 1);
    let burst: Vec<_> = (0..3).map(|n| frame(mac(0), OUTSIDE, 60 + n)).collect();
    burst.iter().for_each(|frame| come(&wire, wired(frame)));
    assert_eq!(take(&mut lab, 0, 3), burst);
}

/// One that takes a frame now and then keeps what it has: not all that there is.
#[test]
fn abuse_N12_the_ports_of_a_vm_do_not_take_all_buffers() {
    let (mut lab, wire) = world(10);
    super::credits::open(&mut lab, &[Settings::default()]);
    let vm = lab.port(0).vm;
    (1..9).for_each(|n| lab.port(n).vm = vm);
    for n in 0..10 {
        come(&wire, wired(&frame(mac(n), OUTSIDE, 60)));
    }
    while lab.poll() > 0 {}
    assert_eq!(lab.engine.fabric.backlogs.waiting(), [0, 1, 2, 3, 4, 5, 6, 7, 9]);
    assert_eq!(lost(&lab), 1);
    // It may have more once it has taken what waits.
    take(&mut lab, 0, 1);
    come(&wire, wired(&frame(mac(8), OUTSIDE, 60)));
    while lab.poll() > 0 {}
    assert_eq!(take(&mut lab, 8, 1).len(), 1);
}

/// Each byte of the memory is somebody's for a while, and all of it comes back.
#[test]
fn abuse_N12_what_waits_is_bounded_and_goes_with_its_port() {
    let (mut lab, wire) = world(1);
    for _ in 0..600 {
        come(&wire, wired(&frame(mac(0), OUTSIDE, 1514)));
    }
    while lab.poll() > 0 {}
    let kept = 600 - lost(&lab) as usize;
    assert!((300..400).contains(&kept), "{kept} frames of 1,534 bytes in 512 KiB");
    let all = take(&mut lab, 0, kept);
    assert_eq!(all.len(), kept);
    (0..3).for_each(|_| come(&wire, wired(&frame(mac(0), OUTSIDE, 60))));
    // The last buffer is used, the others wait; then the queue stops.
    lab.poll();
    lab.engine.fabric.ports[0].as_deref_mut().unwrap().rx[0] = None;
    lab.engine.fabric.ports[0].as_deref_mut().unwrap().find_running();
    lab.poll();
    assert!(lab.engine.fabric.backlogs.waiting().is_empty());
}
