//! Receivers without buffers.

use base::counter::DropReason;
use queue::Layout;
use sidecore::{Arm, Worker};

use crate::engine::TX_TELL;
use crate::features;
use crate::testing::{BROADCAST, HOLD_NS, Lab, Spec, frame, mac, no_offload};

fn lens(lab: &mut Lab, guest: usize) -> Vec<usize> {
    lab.guests[guest].recv_all(0).iter().map(Vec::len).collect()
}

fn send(lab: &mut Lab, from: usize, to: usize, len: usize) {
    lab.guests[from].send(0, &no_offload(), &frame(mac(to), mac(from), len), 1);
}

#[test]
fn a_frame_waits_for_buffers_and_order_is_kept() {
    for layout in [Layout::Split, Layout::Packed] {
        let make = || Spec { layout, ..Spec::default() };
        let mut lab = Lab::new(vec![make(), make(), make()]);
        lab.introduce();
        lab.guests[1].post(0, 2, 1600, 1);
        lab.guests[2].post(0, 4, 1600, 1);
        for n in 0..5 {
            send(&mut lab, 0, 1, 100 + n);
        }
        send(&mut lab, 0, 2, 200);
        assert_eq!(lab.poll(), 2);
        assert_eq!(lens(&mut lab, 1), [100, 101]);
        // What is behind the held frame waits too.
        assert_eq!((lab.poll(), lab.poll()), (0, 0));
        assert_eq!(lens(&mut lab, 2), [0; 0]);
        assert_eq!(lab.stats.holds.get(), 1);
        lab.guests[1].post(0, 1, 1600, 1);
        assert_eq!(lab.poll(), 1);
        lab.advance(HOLD_NS - 1);
        assert_eq!(lab.poll(), 0);
        // New buffers start a new hold time.
        lab.guests[1].post(0, 8, 1600, 1);
        assert_eq!(lab.stats.held_ns.get(), 0);
        assert_eq!(lab.poll(), 3);
        assert_eq!((lab.stats.holds.get(), lab.stats.held_ns.get()), (2, HOLD_NS - 1));
        assert_eq!(lens(&mut lab, 1), [102, 103, 104]);
        assert_eq!(lens(&mut lab, 2), [200]);
        assert_eq!(lab.drops(0, DropReason::ReceiverStalled), 0);
        assert_eq!(lab.stats.stalls.get(), 0);
    }
}

#[test]
fn a_stalled_receiver_costs_one_hold_and_comes_back_with_buffers() {
    let mut lab = Lab::pair();
    send(&mut lab, 0, 1, 100);
    send(&mut lab, 0, 1, 101);
    assert_eq!(lab.poll(), 0);
    lab.advance(HOLD_NS);
    assert_eq!(lab.poll(), 2);
    assert_eq!(lab.drops(0, DropReason::ReceiverStalled), 2);
    assert_eq!(lab.stats.stalls.get(), 1);
    // Still stalled: no second hold.
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 102)), Some(DropReason::ReceiverStalled));
    lab.guests[1].post(0, 1, 1600, 1);
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 103)), None);
    assert_eq!(lens(&mut lab, 1), [103]);
    // It may be waited for again after some time, not at once.
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 104)), Some(DropReason::ReceiverStalled));
    lab.advance(2 * HOLD_NS);
    send(&mut lab, 0, 1, 105);
    assert_eq!(lab.poll(), 0);
    assert_eq!(lab.stats.stalls.get(), 1);
}

/// A receiver that is slower than its sender, but at work, slows it down and loses nothing.
#[test]
fn a_busy_receiver_is_waited_for_as_long_as_it_goes_on() {
    let mut lab = Lab::pair();
    let mut sent = 0;
    for _ in 0..5000 {
        while lab.guests[0].tx[0].used().is_some() {}
        while lab.guests[0].tx[0].free_descriptors() > 250 {
            send(&mut lab, 0, 1, 100);
            sent += 1;
        }
        assert_eq!(lab.poll(), 0);
        lab.advance(40_000);
        lab.guests[1].post(0, 1, 1600, 1);
        assert_eq!(lab.poll(), 1);
        assert_eq!(lens(&mut lab, 1), [100]);
    }
    assert!(sent > 5000);
    assert_eq!(lab.drops(0, DropReason::ReceiverStalled), 0);
}

/// A receiver that posts one buffer in a hold time costs a sender an eighth of its time, not all
/// of it.
#[test]
#[allow(non_snake_case)]
fn abuse_R10_a_buffer_now_and_then_does_not_hold_a_sender_up() {
    let mut lab = Lab::new(vec![Spec::default(), Spec::default(), Spec::default()]);
    lab.introduce();
    const STEPS: u64 = 2000;
    let step_ns = HOLD_NS / 20;
    let mut waited = 0;
    for step in 0..STEPS {
        if step % 19 == 0 {
            lab.guests[1].post(0, 1, 1600, 1);
        }
        lab.guests[2].post_up_to(0, 16, 1600, 1);
        if lab.guests[0].tx[0].free_descriptors() > 200 {
            send(&mut lab, 0, 1, 100);
            send(&mut lab, 0, 2, 200);
        }
        waited += u64::from(lab.poll() == 0);
        while lab.guests[0].tx[0].used().is_some() {}
        lab.guests[1].recv_all(0);
        lab.guests[2].recv_all(0);
        lab.advance(step_ns);
    }
    // The first budget, an eighth of the time, and what taken frames give back.
    assert!(waited > 0 && waited * 100 < STEPS * 17, "waited in {waited} of {STEPS} polls");
    assert!(lab.stats.stalls.get() > 1);
}

/// Buffers of 13 bytes make a frame wait for many postings: each of them is no new hold time.
#[test]
#[allow(non_snake_case)]
fn abuse_R10_tiny_buffers_do_not_prolong_a_hold() {
    let mut lab = Lab::pair();
    send(&mut lab, 0, 1, 1000);
    let mut polls = 0;
    while lab.poll() == 0 {
        lab.advance(HOLD_NS / 4);
        lab.guests[1].post(0, 1, 13, 1);
        polls += 1;
    }
    assert!(polls <= 4, "held for {polls} quarters of a hold time");
    assert_eq!(lab.drops(0, DropReason::ReceiverStalled), 1);
}

#[test]
fn a_frame_that_needs_several_buffers_waits_for_all_of_them() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 2, 256, 1);
    send(&mut lab, 0, 1, 1000);
    assert_eq!(lab.poll(), 0);
    lab.guests[1].post(0, 1, 256, 1);
    assert_eq!(lab.poll(), 0);
    lab.guests[1].post(0, 1, 256, 1);
    assert_eq!(lab.poll(), 1);
    assert_eq!(lens(&mut lab, 1), [1000]);
}

#[test]
fn without_mergeable_buffers_a_frame_that_does_not_fit_is_dropped() {
    let plain = Spec { features: features::VERSION_1, ..Spec::default() };
    let mut lab = Lab::new(vec![Spec::default(), plain]);
    lab.introduce();
    lab.guests[1].post(0, 2, 500, 1);
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 489)), Some(DropReason::TooBig));
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 488)), None);
    assert_eq!(lens(&mut lab, 1), [488]);
}

#[test]
fn a_flood_is_never_held() {
    let mut lab = Lab::new(vec![Spec::default(), Spec::default(), Spec::default()]);
    lab.introduce();
    lab.guests[2].post(0, 4, 1600, 1);
    let before = lab.rx_drops(1, DropReason::ReceiverStalled);
    assert_eq!(lab.judge(0, &frame(BROADCAST, mac(0), 60)), None);
    assert_eq!(lens(&mut lab, 2), [60]);
    assert_eq!(lab.rx_drops(1, DropReason::ReceiverStalled), before + 1);
}

#[test]
fn sleeping_waits_for_kicks_and_for_the_end_of_a_hold() {
    for layout in [Layout::Split, Layout::Packed] {
        let make = || Spec { layout, ..Spec::default() };
        let mut lab = Lab::new(vec![make(), make()]);
        lab.introduce();
        // Idle: no timer at all.
        assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Idle);
        send(&mut lab, 0, 1, 100);
        assert!(lab.guests[0].tx[0].kick_event().drain(), "the kick was wanted");
        assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Busy);
        lab.engine.disarm();
        // Awake: no kicks.
        send(&mut lab, 0, 1, 101);
        assert!(!lab.guests[0].tx[0].kick_event().drain());
        assert_eq!(lab.poll(), 0);
        let start_ns = lab.now_ns;
        assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Until(start_ns + HOLD_NS));
        // Buffers posted while asleep ring the receive queue's kick.
        lab.guests[1].post(0, 4, 1600, 1);
        assert!(lab.guests[1].rx[0].kick_event().drain());
        lab.engine.disarm();
        assert_eq!(lab.poll(), 2);
        assert_eq!(lens(&mut lab, 1), [100, 101]);
        lab.tell();
        assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Idle);
    }
}

/// A sender is told of its frames when it is told of received ones anyway, or after a while: not
/// with an interrupt for each.
#[test]
fn transmit_completions_are_told_together() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 32, 1600, 1);
    let told = |lab: &Lab| {
        let stats = lab.guests[0].tx[0].stats();
        stats.notifications_sent.get() + stats.notifications_suppressed.get()
    };
    let before = told(&lab);
    let max_pending = u64::from(TX_TELL.max_pending);
    for sent in 1..max_pending {
        send(&mut lab, 0, 1, 100);
        lab.poll();
        assert_eq!(told(&lab), before, "after {sent} frames");
    }
    // It sleeps no longer than until the first of them is due.
    let due_ns = lab.now_ns + TX_TELL.max_wait_ns;
    assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Until(due_ns));
    lab.engine.disarm();
    send(&mut lab, 0, 1, 100);
    lab.poll();
    assert_eq!(told(&lab), before + 1, "enough of them");
    send(&mut lab, 0, 1, 100);
    lab.poll();
    lab.advance(TX_TELL.max_wait_ns);
    lab.poll();
    assert_eq!(told(&lab), before + 2, "after a while");
}

#[test]
#[allow(non_snake_case)]
fn abuse_P10_no_kick_is_lost_between_the_last_poll_and_sleep() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 64, 1600, 1);
    for n in 0..50 {
        assert_eq!(lab.poll(), 0);
        // The driver sees kicks off, so it does not kick; arming must find the frame.
        send(&mut lab, 0, 1, 60 + n);
        assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Busy);
        lab.engine.disarm();
        assert_eq!(lab.poll(), 1);
        assert_eq!(lens(&mut lab, 1), [60 + n]);
    }
}

#[test]
fn a_receiver_that_goes_away_frees_its_waiters() {
    let mut lab = Lab::pair();
    send(&mut lab, 0, 1, 100);
    assert_eq!(lab.poll(), 0);
    lab.port(1).rx[0] = None;
    lab.port(1).find_running();
    assert_eq!(lab.engine.arm(lab.now_ns, &mut lab.ledger), Arm::Busy);
    lab.engine.disarm();
    assert_eq!(lab.poll(), 1);
    assert_eq!(lab.drops(0, DropReason::LinkDown), 1);
}
