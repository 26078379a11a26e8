//! Receivers whose kernel has not taken what it was given.

use base::counter::DropReason;
use queue::Layout;
use queue::testing::ModelOptions;
use sidecore::{Arm, Worker};

use crate::BindMode;
use crate::testing::{HOLD_NS, Lab, Spec, frame, mac, no_offload};
use crate::window::WINDOW;

/// Guests whose drivers ask for an interrupt when they have taken everything.
fn lab(layout: Layout, guests: usize) -> Lab {
    lab_with(layout, guests, true, BindMode::MacAndIp)
}

/// The second guest receives; its driver asks for interrupts, or not.
fn lab_with(layout: Layout, guests: usize, interrupts: bool, bind: BindMode) -> Lab {
    let options = ModelOptions { event_idx: true, ..ModelOptions::default() };
    let spec = || Spec { layout, options, ..Spec::default() };
    let mut specs: Vec<_> = (0..guests).map(|_| spec()).collect();
    specs[1].bind = bind;
    let mut lab = Lab::new(specs);
    lab.introduce();
    lab.guests[1].post(0, 250, 1600, 1);
    lab.guests[1].rx[0].set_interrupts(interrupts);
    // The first frame of a queue is told of in any case; with the second the wish is known.
    for _ in 0..2 {
        send(&mut lab, 0, 1);
        assert_eq!((lab.poll(), lens(&mut lab).len()), (1, 1));
    }
    lab
}

fn send(lab: &mut Lab, from: usize, count: usize) {
    for n in 0..count {
        lab.guests[from].send(0, &no_offload(), &frame(mac(1), mac(from), 100 + n), 1);
    }
}

fn lens(lab: &mut Lab) -> Vec<usize> {
    lab.guests[1].recv_all(0).iter().map(Vec::len).collect()
}

#[test]
fn datagrams_wait_until_the_kernel_has_taken_a_window_and_tcp_does_not() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut lab = lab(layout, 3);
        send(&mut lab, 0, WINDOW + 20);
        assert_eq!((lab.poll(), lab.poll()), (WINDOW, 0));
        lab.advance(1_000_000);
        assert_eq!(lab.poll(), 0);
        lab.guests[2].send(0, &no_offload(), &tcp(2), 1);
        assert_eq!(lab.poll(), 1);
        assert_eq!(lens(&mut lab).len(), WINDOW + 1);
        lab.advance(1_000_000);
        assert_eq!(lab.poll(), 20);
        assert_eq!(lens(&mut lab), (0..20).map(|n| 100 + WINDOW + n).collect::<Vec<_>>());
        assert_eq!((lab.stats.holds.get(), lab.stats.stalls.get()), (1, 0));
        assert_eq!(lab.stats.held_ns.get(), 2_000_000);
        assert_eq!(lab.drops(0, DropReason::ReceiverStalled), 0);
    }
}

fn tcp(from: usize) -> Vec<u8> {
    let mut tcp = frame(mac(1), mac(from), 80);
    tcp[12..15].copy_from_slice(&[8, 0, 0x45]);
    tcp[23] = 6;
    tcp
}

#[test]
fn tcp_meets_full_windows_without_waiting_and_spends_no_budget() {
    let mut lab = lab(Layout::Split, 2);
    send(&mut lab, 0, WINDOW);
    assert_eq!(lab.poll(), WINDOW);
    for _ in 0..3 {
        lab.guests[0].send(0, &no_offload(), &tcp(0), 1);
        lab.advance(HOLD_NS / 4);
        assert_eq!(lab.poll(), 1);
    }
    assert_eq!(lab.stats.holds.get(), 0);
    // A datagram waits until the window is a hold time old.
    send(&mut lab, 0, 1);
    assert_eq!(lab.poll(), 0);
    lab.advance(HOLD_NS / 4 - 1);
    assert_eq!(lab.poll(), 0);
    lab.advance(1);
    assert_eq!(lab.poll(), 1);
}

/// A window opens also when others' frames are published: then nobody waits any more.
#[test]
fn a_wait_ends_with_a_window_that_opens_by_itself() {
    let mut lab = lab(Layout::Split, 3);
    send(&mut lab, 0, WINDOW + 1);
    assert_eq!((lab.poll(), lab.poll()), (WINDOW, 0));
    let is_waiting = |lab: &mut Lab| {
        let rxq = lab.port(1).rx[0].as_ref().unwrap();
        rxq.hold_ends_ns(HOLD_NS).is_some() || rxq.look_ns().is_some()
    };
    assert!(is_waiting(&mut lab));
    lab.advance(1_000_000);
    assert_eq!(lab.poll(), 0);
    assert_eq!(lens(&mut lab).len(), WINDOW);
    // Too early for a look, but the frame of another meets a driver that waits.
    lab.guests[2].send(0, &no_offload(), &tcp(2), 1);
    assert_eq!(lab.poll(), 1);
    assert!(!is_waiting(&mut lab));
    assert_eq!(lab.poll(), 1);
    assert_eq!(lens(&mut lab).len(), 2);
}

#[test]
fn tcp_fills_no_window() {
    let mut lab = lab(Layout::Split, 2);
    for _ in 0..2 * WINDOW {
        lab.guests[0].send(0, &no_offload(), &tcp(0), 1);
    }
    send(&mut lab, 0, 2);
    assert_eq!([lab.poll(), lab.poll(), lab.poll()], [WINDOW, WINDOW, 2]);
    assert_eq!(lab.stats.holds.get(), 0);
}

#[test]
fn few_datagrams_at_a_time_wait_for_nobody() {
    let mut lab = lab(Layout::Split, 2);
    for _ in 0..10 {
        send(&mut lab, 0, WINDOW - 1);
        assert_eq!(lab.poll(), WINDOW - 1);
        assert_eq!(lens(&mut lab).len(), WINDOW - 1);
        lab.guests[1].post_up_to(0, 250, 1600, 1);
        while lab.guests[0].tx[0].used().is_some() {}
    }
    assert_eq!(lab.stats.holds.get(), 0);
}

#[test]
fn a_driver_that_asks_for_no_interrupts_is_not_waited_for() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut lab = lab_with(layout, 2, false, BindMode::MacAndIp);
        send(&mut lab, 0, 3 * WINDOW);
        assert_eq!([lab.poll(), lab.poll(), lab.poll()], [WINDOW; 3]);
        assert_eq!(lab.stats.holds.get(), 0);
    }
}

#[test]
fn a_guest_that_may_be_a_router_is_not_waited_for() {
    for bind in [BindMode::Mac, BindMode::Off] {
        let mut lab = lab_with(Layout::Split, 2, true, bind);
        send(&mut lab, 0, 3 * WINDOW);
        assert_eq!([lab.poll(), lab.poll(), lab.poll()], [WINDOW; 3]);
        assert_eq!(lab.stats.holds.get(), 0);
    }
}

#[test]
fn a_switch_that_waits_for_a_window_sleeps_until_the_next_look() {
    let mut lab = lab(Layout::Split, 2);
    send(&mut lab, 0, WINDOW + 1);
    assert_eq!((lab.poll(), lab.poll()), (WINDOW, 0));
    for _ in 0..5 {
        let Arm::Until(at_ns) = lab.engine.arm(lab.now_ns, &mut lab.ledger) else {
            panic!("no time to wake at");
        };
        assert!(at_ns > lab.now_ns);
        lab.engine.disarm();
        lab.now_ns = at_ns;
        assert_eq!(lab.poll(), 0);
    }
    lens(&mut lab);
    lab.advance(1_000_000);
    assert_eq!(lab.poll(), 1);
}

/// A receiver that takes frames and does not say so costs its senders a hold time, not every one.
#[test]
#[allow(non_snake_case)]
fn abuse_N7_a_kernel_that_does_not_say_that_it_has_taken_frames_has_no_window() {
    let mut lab = lab(Layout::Split, 2);
    send(&mut lab, 0, 3 * WINDOW);
    assert_eq!((lab.poll(), lab.poll()), (WINDOW, 0));
    lab.guests[1].rx[0].set_interrupts(false);
    lens(&mut lab);
    lab.advance(HOLD_NS - 1);
    assert_eq!(lab.poll(), 0);
    lab.advance(1);
    assert_eq!((lab.poll(), lab.poll()), (WINDOW, WINDOW));
    assert_eq!((lab.stats.holds.get(), lab.stats.stalls.get()), (1, 0));
}

/// One that says so now and then is waited for as one is that posts buffers now and then.
#[test]
#[allow(non_snake_case)]
fn abuse_N7_waiting_for_windows_spends_the_budget_of_waiting() {
    const STEPS: u64 = 1_200;
    let step_ns = HOLD_NS / 40;
    let mut lab = lab(Layout::Split, 2);
    let (mut waited_ns, mut taken) = (0, 0);
    for step in 0..STEPS {
        while lab.guests[0].tx[0].used().is_some() {}
        let count = lab.guests[0].tx[0].free_descriptors().saturating_sub(WINDOW);
        send(&mut lab, 0, count);
        waited_ns += if lab.poll() == 0 { step_ns } else { 0 };
        lab.guests[1].rx[0].set_interrupts(step % 60 == 0);
        taken += lens(&mut lab).len() as u64;
        lab.guests[1].post_up_to(0, 250, 320, 1);
        lab.advance(step_ns);
    }
    let most_ns = HOLD_NS + taken * 50_000 + STEPS * step_ns / 8;
    assert!(waited_ns > 0 && waited_ns < most_ns, "{waited_ns} of {most_ns}");
    assert_eq!(lab.drops(0, DropReason::ReceiverStalled), 0);
}

/// A kernel that others keep at work for ever, here with TCP, is not waited for longer than a hold
/// time, though it takes frames all the while.
#[test]
#[allow(non_snake_case)]
fn abuse_N7_datagrams_do_not_wait_for_a_kernel_that_others_keep_busy() {
    let mut lab = lab(Layout::Split, 3);
    send(&mut lab, 0, WINDOW + 1);
    assert_eq!((lab.poll(), lab.poll()), (WINDOW, 0));
    lab.guests[1].rx[0].set_interrupts(false);
    let step_ns = HOLD_NS / 20;
    let datagrams = |lab: &mut Lab| {
        let frames = lab.guests[1].recv_all(0);
        frames.iter().filter(|frame| frame[11] == mac(0)[5]).count()
    };
    assert_eq!(datagrams(&mut lab), WINDOW);
    for step in 1..60 {
        lab.advance(step_ns);
        while lab.guests[2].tx[0].used().is_some() {}
        for _ in 0..WINDOW {
            lab.guests[2].send(0, &no_offload(), &tcp(2), 1);
        }
        lab.poll();
        lab.guests[1].post_up_to(0, 250, 1600, 1);
        if datagrams(&mut lab) == 1 {
            return assert_eq!(step, 20);
        }
    }
    panic!("it waits still");
}

/// Floods for one receiver: each sender has its part, wherever its port is and however many polls
/// come between two windows. What waits holds up all else that its sender sends.
#[test]
#[allow(non_snake_case)]
fn abuse_N7_senders_have_windows_in_turns() {
    const WINDOWS: usize = 240;
    for (guests, polls) in (3..8).flat_map(|guests| (1..6).map(move |polls| (guests, polls))) {
        let mut lab = lab(Layout::Split, guests);
        let senders: Vec<usize> = (0..guests).filter(|n| *n != 1).collect();
        let mut counts = vec![0; guests];
        for _ in 0..WINDOWS {
            for &from in &senders {
                while lab.guests[from].tx[0].used().is_some() {}
                let count = lab.guests[from].tx[0].free_descriptors().min(WINDOW);
                send(&mut lab, from, count);
            }
            for _ in 0..polls {
                lab.poll();
            }
            for frame in lab.guests[1].recv_all(0) {
                counts[usize::from(frame[11]) - 1] += 1;
            }
            lab.guests[1].post_up_to(0, 250, 320, 1);
            lab.advance(1_000_000);
        }
        let least = counts.iter().sum::<usize>() / senders.len() / 2;
        let all = senders.iter().all(|&from| counts[from] >= least);
        assert!(all, "{guests} guests, {polls} polls: {counts:?}");
    }
}

/// A guest with many queues has the turns of one.
#[test]
#[allow(non_snake_case)]
fn abuse_N7_many_queues_have_one_turn() {
    const QUEUES: u16 = 16;
    for polls in 1..6 {
        let options = ModelOptions { event_idx: true, ..ModelOptions::default() };
        let pairs = [QUEUES, 1, 1];
        let spec = |pairs| Spec { options, pairs, ring: 128, ..Spec::default() };
        let mut specs = pairs.map(spec);
        (specs[1].bind, specs[1].ring) = (BindMode::MacAndIp, 256);
        let mut lab = Lab::new(specs.into());
        lab.introduce();
        lab.guests[1].rx[0].set_interrupts(true);
        let mut counts = [0; 3];
        for _ in 0..200 {
            for (from, queue) in (0..QUEUES).map(|queue| (0, queue)).chain([(2, 0)]) {
                let queue = usize::from(queue);
                while lab.guests[from].tx[queue].used().is_some() {}
                for _ in 0..lab.guests[from].tx[queue].free_descriptors().min(WINDOW) {
                    let frame = frame(mac(1), mac(from), 100);
                    lab.guests[from].send(queue, &no_offload(), &frame, 1);
                }
            }
            lab.guests[1].post_up_to(0, 250, 320, 1);
            for _ in 0..polls {
                lab.poll();
            }
            for frame in lab.guests[1].recv_all(0) {
                counts[usize::from(frame[11]) - 1] += 1;
            }
            lab.advance(1_000_000);
        }
        assert!(counts[2] * 3 > counts[0], "{polls} polls: {counts:?}");
    }
}

/// Multicasts do not wait, and fill the window as soon as it opens: then it is open for those who
/// do.
#[test]
#[allow(non_snake_case)]
fn abuse_N7_multicasts_keep_no_window_from_those_who_wait() {
    let mut lab = lab(Layout::Split, 3);
    let all = frame([0x33, 0x33, 0, 0, 0, 1], mac(2), 100);
    let mut count = 0;
    for _ in 0..100 {
        while lab.guests[0].tx[0].used().is_some() {}
        let free = lab.guests[0].tx[0].free_descriptors();
        send(&mut lab, 0, free.min(WINDOW));
        lab.advance(1_000_000);
        // The kernel is at work at each look, and through before the next multicasts.
        lab.poll();
        let mut frames = lab.guests[1].recv_all(0);
        while lab.guests[2].tx[0].used().is_some() {}
        for _ in 0..WINDOW {
            lab.guests[2].send(0, &no_offload(), &all, 1);
        }
        lab.poll();
        lab.poll();
        frames.extend(lab.guests[1].recv_all(0));
        lab.guests[1].post_up_to(0, 250, 320, 1);
        count += frames.iter().filter(|frame| frame[11] == mac(0)[5]).count();
    }
    assert!(count > 50 * WINDOW, "{count}");
}
