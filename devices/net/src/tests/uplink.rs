//! The uplink, with a wire in memory.
#![allow(non_snake_case)]

use base::counter::DropReason;
use sidecore::{Arm, Worker};

use crate::binding::BindMode;
use crate::features as f;
use crate::forward_cache::HOLDS_NS;
use crate::testing::{BROADCAST, Lab, MAX_MACS, MODERN, Spec, frame, mac, no_offload, vnet};
use frame::testing::{make_partial, super_packet, verify};
use frame::{F_DATA_VALID, Vnet};

const OUTSIDE: [u8; 6] = [2, 0, 0, 0, 0, 0x77];

pub fn wired(bytes: &[u8]) -> Vec<u8> {
    [&no_offload()[..], bytes].concat()
}

#[test]
fn frames_go_out_and_come_in() {
    let mut lab = Lab::pair();
    let wire = lab.set_wire();
    for n in 0..2 {
        lab.guests[n].post(0, 16, 1600, 1);
    }
    // Unknown: to the wire and to the other port.
    let out = frame(OUTSIDE, mac(0), 1000);
    assert_eq!(lab.judge(0, &out), None);
    let mut sent = std::mem::take(&mut wire.lock().unwrap().sent);
    sent[0][10] = 0;
    assert_eq!(sent, [wired(&out)]);
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
    // It answers, and is known from then on.
    let back = frame(mac(0), OUTSIDE, 900);
    wire.lock().unwrap().incoming.push_back(wired(&back));
    assert_eq!(lab.poll(), 1);
    assert_eq!(lab.guests[0].recv_all(0), [back]);
    assert_eq!(lab.judge(0, &out), None);
    assert_eq!(wire.lock().unwrap().sent.len(), 1);
    assert_eq!(lab.guests[1].recv_all(0).len(), 0);
    // A broadcast from outside reaches every port and does not go back.
    wire.lock().unwrap().incoming.push_back(wired(&frame(BROADCAST, OUTSIDE, 60)));
    lab.poll();
    assert_eq!(lab.guests[0].recv_all(0).len(), 1);
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
    assert_eq!(wire.lock().unwrap().sent.len(), 1);
}

#[test]
fn a_batch_is_flushed_together_and_a_full_wire_in_between() {
    let mut lab = Lab::pair();
    let wire = lab.set_wire();
    lab.guests[1].post(0, 64, 1600, 1);
    for n in 0..5 {
        lab.guests[0].send(0, &no_offload(), &frame(OUTSIDE, mac(0), 300 + n), 4);
    }
    assert_eq!(lab.poll(), 5);
    assert_eq!(wire.lock().unwrap().flushes, 1);
    // The model takes eight at once.
    for n in 0..20 {
        lab.guests[0].send(0, &no_offload(), &frame(OUTSIDE, mac(0), 305 + n), 4);
    }
    assert_eq!(lab.poll(), 20);
    let model = wire.lock().unwrap();
    assert_eq!(model.flushes, 4);
    let lens: Vec<_> = model.sent.iter().map(|s| s.len() - 12).collect();
    assert_eq!(lens, (300..325).collect::<Vec<_>>());
}

#[test]
fn refused_frames_are_counted() {
    let mut lab = Lab::pair();
    let wire = lab.set_wire();
    wire.lock().unwrap().refuse = true;
    lab.guests[0].send(0, &no_offload(), &frame(OUTSIDE, mac(0), 100), 1);
    lab.poll();
    assert_eq!(lab.uplink_stats().drops[DropReason::WireError as usize].get(), 1);
}

#[test]
fn abuse_C3_an_outsider_cannot_take_a_bound_address() {
    let mut lab = Lab::pair();
    let wire = lab.set_wire();
    lab.guests[1].post(0, 4, 1600, 1);
    wire.lock().unwrap().incoming.push_back(wired(&frame(mac(1), mac(0), 60)));
    assert_eq!(lab.poll(), 1);
    assert_eq!(lab.guests[1].recv_all(0).len(), 0);
    assert_eq!(lab.uplink_stats().drops[DropReason::Spoofed as usize].get(), 1);
}

/// A VM has the same address at two hosts, and runs at one of them.
#[test]
fn a_vm_is_looked_for_outside_while_it_does_not_run_here() {
    let mut lab = Lab::new(vec![Spec::default(), Spec { mac: Some(mac(1)), ..Spec::default() }]);
    let wire = lab.set_wire();
    lab.guests[0].post(0, 16, 1600, 1);
    lab.guests[1].post(0, 16, 1600, 1);
    let [there, back] = [frame(mac(1), mac(0), 60), frame(mac(0), mac(1), 60)];
    assert_eq!(lab.judge(0, &there), None);
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
    // It goes: its frames come from outside, and those to it go there.
    let rxq = lab.port(1).rx[0].take();
    lab.port(1).find_running();
    lab.now_ns += HOLDS_NS;
    wire.lock().unwrap().incoming.push_back(wired(&back));
    assert_eq!(lab.poll(), 1);
    assert_eq!(lab.guests[0].recv_all(0).as_slice(), std::slice::from_ref(&back));
    assert_eq!(lab.judge(0, &there), None);
    assert_eq!(wire.lock().unwrap().sent.len(), 1);
    // One to it from outside does not go back there.
    wire.lock().unwrap().incoming.push_back(wired(&there));
    lab.poll();
    assert_eq!(wire.lock().unwrap().sent.len(), 1);
    // It comes: nobody outside has its address any more.
    lab.port(1).rx[0] = rxq;
    lab.port(1).find_running();
    lab.now_ns += HOLDS_NS;
    wire.lock().unwrap().incoming.push_back(wired(&back));
    lab.poll();
    assert_eq!(lab.guests[0].recv_all(0).len(), 0);
    assert_eq!(lab.judge(0, &there), None);
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
}

/// Forged sources from outside neither fill the table nor keep a port from binding its address.
#[test]
fn abuse_C3_a_flood_of_addresses_from_outside_leaves_room_for_the_ports() {
    let free = Spec { bind: BindMode::Off, ..Spec::default() };
    let mut lab = Lab::new(vec![Spec::default(), free]);
    let wire = lab.set_wire();
    for n in 0..2 * MAX_MACS as u16 {
        let [a, b] = n.to_be_bytes();
        let forged = frame(mac(1), [2, 0, 0, 1, a, b], 60);
        wire.lock().unwrap().incoming.push_back(wired(&forged));
        lab.poll();
    }
    let known = |lab: &Lab| lab.engine.fabric.tables.macs.list(lab.now_ns).len();
    assert_eq!(known(&lab), MAX_MACS as usize / 2);
    assert_eq!(lab.judge(0, &frame(BROADCAST, mac(0), 60)), None);
    assert_eq!(lab.judge(1, &frame(BROADCAST, mac(1), 60)), None);
    assert_eq!(known(&lab), MAX_MACS as usize / 2 + 2);
}

/// A receiver without buffers loses its own frames; those behind them, for others, do not wait.
#[test]
fn abuse_R10_a_full_receiver_does_not_hold_up_the_uplink() {
    let mut lab = Lab::pair();
    let wire = lab.set_wire();
    lab.guests[0].post(0, 4, 1600, 1);
    for to in [1, 0, 1, 0] {
        wire.lock().unwrap().incoming.push_back(wired(&frame(mac(to), OUTSIDE, 60)));
    }
    assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Busy);
    lab.engine.disarm();
    let before = lab.rx_drops(1, DropReason::ReceiverStalled);
    assert_eq!(lab.poll(), 4);
    assert_eq!(lab.guests[0].recv_all(0).len(), 2);
    assert_eq!(lab.uplink_stats().drops[DropReason::ReceiverStalled as usize].get(), 2);
    assert_eq!(lab.rx_drops(1, DropReason::ReceiverStalled), before + 2);
    // Nothing is waited for, and buffers are used at once.
    assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Idle);
    lab.engine.disarm();
    lab.guests[1].post(0, 1, 1600, 1);
    wire.lock().unwrap().incoming.push_back(wired(&frame(mac(1), OUTSIDE, 60)));
    assert_eq!(lab.poll(), 1);
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
}

/// A wire without receive buffers wakes nobody: the switch must ask again by itself.
#[test]
fn a_wire_that_could_not_refill_is_asked_again() {
    let mut lab = Lab::pair();
    let wire = lab.set_wire();
    for fails in [true, false] {
        wire.lock().unwrap().refill_fails = fails;
        lab.poll();
        let armed = lab.engine.arm(lab.now_ns, &mut lab.ledger);
        assert_eq!(armed, if fails { Arm::Until(lab.now_ns + 1_000_000) } else { Arm::Idle });
        lab.engine.disarm();
    }
}

#[test]
fn super_packets_pass_both_ways_and_are_cut_for_a_plain_receiver() {
    let plain = Spec { features: MODERN & !f::OFFLOADS, ..Spec::default() };
    let mut lab = Lab::new(vec![Spec::default(), plain]);
    lab.introduce();
    let wire = lab.set_wire();
    for n in 0..2 {
        lab.guests[n].post(0, 60, 1600, 1);
    }
    for to in 0..2 {
        let (mut bytes, vnet) = super_packet(false, false, 30_000, 1400);
        bytes[..6].copy_from_slice(&mac(to));
        bytes[6..12].copy_from_slice(&OUTSIDE);
        make_partial(&mut bytes, &vnet);
        let whole = [&vnet.to_bytes(0)[..], &bytes].concat();
        wire.lock().unwrap().incoming.push_back(whole);
        assert_eq!(lab.poll(), 1);
        let got = lab.guests[to].recv_all(0);
        if to == 0 {
            assert_eq!(got, [bytes]);
        } else {
            assert_eq!(got.iter().map(|g| verify(g).len()).sum::<usize>(), 30_000);
        }
    }
    // Out: as it is; UDP is cut when the wire does not take it.
    for uso in [true, false] {
        lab.engine.fabric.uplink.as_mut().unwrap().uso = uso;
        let (mut bytes, vnet) = super_packet(true, true, 10_000, 1000);
        bytes[..6].copy_from_slice(&OUTSIDE);
        bytes[6..12].copy_from_slice(&mac(0));
        make_partial(&mut bytes, &vnet);
        wire.lock().unwrap().sent.clear();
        assert_eq!(lab.judge_with(0, &vnet.to_bytes(0), &bytes), None);
        let sent = std::mem::take(&mut wire.lock().unwrap().sent);
        if uso {
            assert_eq!(sent, [[&vnet.to_bytes(1)[..], &bytes].concat()]);
        } else {
            assert_eq!(sent.len(), 10);
            assert!(sent.iter().all(|s| s[..10] == [0; 10] && verify(&s[12..]).len() == 1000));
        }
    }
}

#[test]
fn the_kernels_verdict_on_checksums_reaches_those_who_can_hear_it() {
    let plain = Spec { features: MODERN & !f::OFFLOADS, ..Spec::default() };
    let mut lab = Lab::new(vec![Spec::default(), plain]);
    lab.introduce();
    let wire = lab.set_wire();
    for (to, flags) in [(0, F_DATA_VALID), (1, 0)] {
        lab.guests[to].post(0, 1, 1600, 1);
        let whole = [&vnet(F_DATA_VALID, 0, 0, 0, 0)[..], &frame(mac(to), OUTSIDE, 200)].concat();
        wire.lock().unwrap().incoming.push_back(whole);
        lab.poll();
        let (header, _) = lab.guests[to].recv(0).unwrap();
        assert_eq!(header, Vnet { flags, ..Vnet::default() }.to_bytes(1));
    }
    // A guest's word on it is not passed on.
    lab.guests[0].send(0, &vnet(F_DATA_VALID, 0, 0, 0, 0), &frame(OUTSIDE, mac(0), 100), 1);
    lab.poll();
    assert_eq!(wire.lock().unwrap().sent[0][0], 0);
}

#[test]
fn flows_from_the_uplink_keep_to_one_queue_and_use_all() {
    let mut lab = Lab::new(vec![Spec { pairs: 4, ..Spec::default() }]);
    lab.introduce();
    let wire = lab.set_wire();
    for q in 0..4 {
        lab.guests[0].post(q, 200, 1600, 1);
    }
    let flow = |port: u16| {
        let mut out = Vec::new();
        etherparse::PacketBuilder::ethernet2(OUTSIDE, mac(0))
            .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .udp(port, 53)
            .write(&mut out, b"x")
            .unwrap();
        out
    };
    for n in 0..128 {
        wire.lock().unwrap().incoming.push_back(wired(&flow(n % 32)));
    }
    while lab.poll() > 0 {}
    let mut used = 0;
    let mut seen = std::collections::HashMap::new();
    for q in 0..4 {
        let frames = lab.guests[0].recv_all(q);
        used += usize::from(!frames.is_empty());
        for f in frames {
            assert_eq!(*seen.entry(f).or_insert(q), q);
        }
    }
    assert_eq!((used, seen.len()), (4, 32));
}
