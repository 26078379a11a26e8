//! Frames between ports: bytes, counters, queues, learning.

use base::counter::DropReason;
use queue::Layout;
use queue::testing::ModelOptions;

use crate::binding::BindMode;
use crate::features;
use crate::testing::{BROADCAST, Lab, MAC_AGE_NS, MODERN, Spec, frame, mac, no_offload};
use frame::Mac;

/// Every kind of ring and buffer a driver may use.
fn kinds() -> Vec<(Layout, bool, bool, bool)> {
    let mut out = Vec::new();
    for layout in [Layout::Split, Layout::Packed] {
        for bits in 0..8 {
            out.push((layout, bits & 1 != 0, bits & 2 != 0, bits & 4 != 0));
        }
    }
    out
}

fn spec(layout: Layout, mergeable: bool, indirect: bool, in_order: bool) -> Spec {
    let options = ModelOptions { indirect, in_order, event_idx: in_order, ..Default::default() };
    let drop_bit = if mergeable { 0 } else { features::MRG_RXBUF };
    Spec { layout, options, features: MODERN & !drop_bit, ..Spec::default() }
}

#[test]
fn frames_cross_in_every_kind_of_ring_and_buffer() {
    for (layout, mergeable, indirect, in_order) in kinds() {
        let make = || spec(layout, mergeable, indirect, in_order);
        let mut lab = Lab::new(vec![make(), make()]);
        lab.introduce();
        let buffer = if mergeable { 256 } else { 1600 };
        for round in 0..20 {
            let lens = [14, 15, 60, 127, 128, 129, 243, 244, 245, 500, 501, 1000, 1514];
            for pieces in [1, 2, 5] {
                lab.guests[1].post_up_to(0, 100, buffer, if indirect { 3 } else { 1 });
                for len in lens {
                    let sent = frame(mac(1), mac(0), len);
                    let pieces = if indirect { pieces } else { 1 };
                    lab.guests[0].send(0, &no_offload(), &sent, pieces);
                }
                assert_eq!(lab.poll(), lens.len());
                for len in lens {
                    let (vnet, got) = lab.guests[1].recv(0).expect("a frame");
                    assert_eq!(got, frame(mac(1), mac(0), len), "{layout:?} round {round}");
                    let buffers = if mergeable { (12 + len).div_ceil(buffer) as u8 } else { 1 };
                    assert_eq!(vnet, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, buffers, 0]);
                    assert_eq!(lab.guests[0].tx[0].used().map(|u| u.1), Some(0));
                }
                assert!(lab.guests[1].recv(0).is_none());
            }
        }
    }
}

#[test]
fn a_driver_without_version_1_gets_the_short_header() {
    let legacy = Spec { features: features::CSUM, ..Spec::default() };
    let mut lab = Lab::new(vec![legacy, Spec::default()]);
    let hello = |lab: &mut Lab, n: usize| {
        let vnet = vec![0; lab.guests[n].vnet_len];
        lab.guests[n].send(0, &vnet, &frame(BROADCAST, mac(n), 60), 1);
        lab.poll();
        lab.guests[n].tx[0].used().unwrap();
    };
    hello(&mut lab, 0);
    hello(&mut lab, 1);
    lab.guests[0].post(0, 1, 1600, 1);
    lab.guests[1].post(0, 1, 1600, 1);
    let there = frame(mac(1), mac(0), 300);
    let back = frame(mac(0), mac(1), 301);
    lab.guests[0].send(0, &[0; 10], &there, 1);
    lab.guests[1].send(0, &no_offload(), &back, 1);
    lab.poll();
    assert_eq!(lab.guests[1].recv(0).unwrap().1, there);
    let (vnet, got) = lab.guests[0].recv(0).unwrap();
    assert_eq!((vnet, got), (vec![0; 10], back));
}

#[test]
fn counters_tell_frames_bytes_and_one_copy() {
    let mut lab = Lab::pair();
    let before = lab.guests[0].tx[0].stats().requests.get();
    lab.guests[1].post(0, 32, 1600, 1);
    for _ in 0..32 {
        lab.guests[0].send(0, &no_offload(), &frame(mac(1), mac(0), 1000), 1);
    }
    lab.poll();
    let (tx, rx) = (lab.guests[0].tx[0].stats(), lab.guests[1].rx[0].stats());
    assert_eq!(tx.requests.get() - before, 32);
    assert_eq!(rx.bytes.get(), 32_000);
    // Every byte is copied once into the receiver; of the sender's, only the header.
    assert_eq!(rx.copied_bytes.get(), 32_000);
    assert_eq!(tx.copied_bytes.get(), 60 + 32 * 128);
    // One batch, one notification, on either side.
    assert_eq!(rx.notifications_sent.get() + rx.notifications_suppressed.get(), 1);
    assert_eq!(tx.notifications_sent.get() + tx.notifications_suppressed.get(), 2);
    assert!(lab.guests[1].rx[0].interrupted());
}

#[test]
fn broadcast_and_unknown_reach_all_others_and_known_only_its_port() {
    let mut lab = Lab::new(vec![Spec::default(), Spec::default(), Spec::default()]);
    lab.introduce();
    for n in 0..3 {
        lab.guests[n].post(0, 8, 1600, 1);
    }
    let stranger = [0x52, 0x54, 9, 9, 9, 9];
    for dst in [BROADCAST, stranger, [0x33, 0x33, 0, 0, 0, 1], mac(2)] {
        lab.guests[0].send(0, &no_offload(), &frame(dst, mac(0), 100), 1);
    }
    lab.poll();
    assert_eq!(lab.guests[0].recv_all(0).len(), 0);
    assert_eq!(lab.guests[1].recv_all(0).len(), 3);
    assert_eq!(lab.guests[2].recv_all(0).len(), 4);
    // To itself and to the next bridge only: nowhere.
    let nowhere = Some(DropReason::NoDestination);
    assert_eq!(lab.judge(0, &frame(mac(0), mac(0), 60)), nowhere);
    assert_eq!(lab.judge(0, &frame([1, 0x80, 0xc2, 0, 0, 0], mac(0), 60)), nowhere);
    assert_eq!(lab.guests[1].recv_all(0).len(), 0);
}

#[test]
fn learned_addresses_age_and_move() {
    let free = || Spec { bind: BindMode::Off, ..Spec::default() };
    let mut lab = Lab::new(vec![free(), free(), free()]);
    lab.introduce();
    for n in 0..3 {
        lab.guests[n].post(0, 16, 1600, 1);
    }
    let to_one = frame(mac(1), mac(0), 80);
    assert_eq!(lab.judge(0, &to_one), None);
    assert_eq!((lab.guests[1].recv_all(0).len(), lab.guests[2].recv_all(0).len()), (1, 0));
    // The address shows up at port 2.
    assert_eq!(lab.judge(2, &frame(BROADCAST, mac(1), 60)), None);
    lab.guests[1].recv_all(0);
    assert_eq!(lab.judge(0, &to_one), None);
    assert_eq!((lab.guests[1].recv_all(0).len(), lab.guests[2].recv_all(0).len()), (0, 1));
    // Unseen for too long: flooded again.
    lab.advance(MAC_AGE_NS + 1);
    assert_eq!(lab.judge(0, &to_one), None);
    assert_eq!((lab.guests[1].recv_all(0).len(), lab.guests[2].recv_all(0).len()), (1, 1));
    let known = lab.engine.fabric.tables.macs.list(lab.now_ns);
    assert_eq!(known.iter().map(|l| l.key).collect::<Vec<_>>(), [Mac::new(mac(0))]);
}

#[test]
fn each_transmit_queue_keeps_to_one_receive_queue() {
    let multi = |pairs| Spec { pairs, ..Spec::default() };
    let mut lab = Lab::new(vec![multi(4), multi(2)]);
    lab.introduce();
    for q in 0..2 {
        lab.guests[1].post(q, 64, 1600, 1);
    }
    for q in 0..4 {
        for n in 0..8 {
            lab.guests[0].send(q, &no_offload(), &frame(mac(1), mac(0), 100 + q * 10 + n), 1);
        }
    }
    assert_eq!(lab.poll(), 32);
    let lens = |guest: &mut crate::testing::Guest, q| -> Vec<usize> {
        let mut lens: Vec<usize> = guest.recv_all(q).iter().map(Vec::len).collect();
        // Each queue's frames come in order; any queue may be the first.
        for from in [0, 10, 20, 30] {
            let of = |len: &&usize| (100 + from..110 + from).contains(*len);
            assert!(lens.iter().filter(of).is_sorted());
        }
        lens.sort_unstable();
        lens
    };
    let expect = |queues: [usize; 2]| -> Vec<usize> {
        queues.iter().flat_map(|q| (0..8).map(move |n| 100 + q * 10 + n)).collect()
    };
    assert_eq!(lens(&mut lab.guests[1], 0), expect([0, 2]));
    assert_eq!(lens(&mut lab.guests[1], 1), expect([1, 3]));
    // With the second pair disabled everything goes to the first.
    lab.port(1).rx[1] = None;
    lab.port(1).find_running();
    for q in 0..4 {
        lab.guests[0].send(q, &no_offload(), &frame(mac(1), mac(0), 70), 1);
    }
    lab.poll();
    assert_eq!(lab.guests[1].recv_all(0).len(), 4);
}

#[test]
fn longer_than_the_receivers_mtu_is_dropped() {
    let mut lab = Lab::new(vec![Spec::default(), Spec { mtu: 1000, ..Spec::default() }]);
    lab.introduce();
    lab.guests[1].post(0, 4, 2000, 1);
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 1022)), None);
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 1023)), Some(DropReason::TooBig));
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
}

#[test]
fn link_down_drops_both_ways() {
    let mut lab = Lab::pair();
    for n in 0..2 {
        lab.guests[n].post(0, 4, 2000, 1);
    }
    lab.port(1).link_up = false;
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 60)), Some(DropReason::LinkDown));
    assert_eq!(lab.judge(1, &frame(mac(0), mac(1), 60)), Some(DropReason::LinkDown));
    lab.port(1).link_up = true;
    assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 60)), None);
    assert_eq!(lab.guests[1].recv_all(0).len(), 1);
    assert_eq!(lab.guests[0].recv_all(0).len(), 0);
}

#[test]
fn unused_buffers_go_back_when_a_queue_stops() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut lab = Lab::new(vec![Spec::default(), Spec { layout, ..Spec::default() }]);
        lab.introduce();
        lab.guests[1].post(0, 10, 1600, 1);
        assert_eq!(lab.judge(0, &frame(mac(1), mac(0), 60)), None);
        let rxq = lab.port(1).rx[0].take().unwrap();
        let vring = rxq.stop();
        let at = vring.queue.position();
        assert_eq!((at.avail, at.used), (1, 1), "{layout:?}");
    }
}

#[test]
fn frames_are_shown_before_a_long_round_is_over() {
    // Two senders and one receiver: it is told once of what is small, and of each long batch.
    for (len, told) in [(60, 1), (1514, 2)] {
        let mut lab = Lab::new(vec![Spec::default(), Spec::default(), Spec::default()]);
        lab.introduce();
        lab.guests[2].post(0, 60, 1600, 1);
        for n in 0..2 {
            for _ in 0..15 {
                lab.guests[n].send(0, &no_offload(), &frame(mac(2), mac(n), len), 1);
            }
        }
        let before = lab.guests[2].rx[0].stats().notifications_sent.get();
        assert_eq!(lab.poll(), 30);
        assert_eq!(lab.guests[2].rx[0].stats().notifications_sent.get() - before, told, "{len}");
        assert_eq!(lab.guests[2].recv_all(0).len(), 30);
    }
}

#[test]
fn no_more_frames_are_taken_from_a_ring_than_may_be_sent() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 64, 70_000, 1);
    for _ in 0..8 {
        lab.guests[0].send(0, &no_offload(), &frame(mac(1), mac(0), 65_000), 1);
    }
    // What they are like is only known after the first.
    assert_eq!(lab.poll(), 5);
    assert_eq!(lab.port(0).tx[0].as_ref().map(|q| q.mean_cost), Some(65_012));
    assert_eq!(lab.poll(), 3);
}

#[test]
fn the_header_is_right_whatever_was_in_the_buffer() {
    let right = frame::PLAIN;
    let mut wrong = right;
    wrong[10] = 2;
    for old in [right, wrong, [0xff; 12]] {
        let mut lab = Lab::pair();
        let driver = &mut lab.guests[1].rx[0];
        let (addr, len) = driver.buffer(&[&old[..], &[0xee; 1600]].concat());
        driver.offer(&[], &[(addr, len)]);
        let sent = frame(mac(1), mac(0), 60);
        lab.guests[0].send(0, &no_offload(), &sent, 1);
        assert_eq!(lab.poll(), 1);
        let driver = &mut lab.guests[1].rx[0];
        assert_eq!(driver.used().map(|(_, written)| written), Some(72));
        assert_eq!(driver.read(addr, 72), [&right[..], &sent[..]].concat());
    }
}

#[test]
fn few_buffers_are_fetched_for_few_frames() {
    let mut lab = Lab::pair();
    lab.guests[1].post(0, 192, 1600, 1);
    let sent = frame(mac(1), mac(0), 60);
    // How often buffers were fetched for `rounds` rounds of `each` frames.
    let fetched = |lab: &mut Lab, rounds: usize, each: usize| {
        let before = lab.guests[1].rx[0].stats().batches.get();
        for _ in 0..rounds {
            for _ in 0..each {
                lab.guests[0].send(0, &no_offload(), &sent, 1);
            }
            assert_eq!(lab.poll(), each);
            while lab.guests[0].tx[0].used().is_some() {}
        }
        lab.guests[1].rx[0].stats().batches.get() - before
    };
    // The first time may be for more: a frame came before there were any.
    assert!((6..=8).contains(&fetched(&mut lab, 64, 1)));
    // It is not known before how many come: 8, 16, 32 and the rest.
    assert!((3..=4).contains(&fetched(&mut lab, 1, 64)));
    assert_eq!(fetched(&mut lab, 1, 64), 1);
}

#[test]
fn frames_do_not_wait_for_the_end_of_anothers_long_turn() {
    let mut lab = Lab::new((0..3).map(|_| Spec::default()).collect());
    lab.introduce();
    // A turn that says nothing of the next one, and one that does.
    for (frames, is_long) in [(4, false), (20, true)] {
        lab.guests[1].post_up_to(0, 100, 1600, 1);
        for _ in 0..frames {
            lab.guests[2].send(0, &no_offload(), &frame(mac(1), mac(2), 1500), 1);
        }
        assert_eq!(lab.poll(), frames);
        lab.guests[1].recv_all(0);
        let fabric = &mut lab.engine.fabric;
        fabric.touched.push((1, 0));
        let port = fabric.publish_before(2, lab.now_ns);
        assert_eq!(fabric.touched.is_empty(), is_long, "what others sent is published before");
        fabric.ports[2] = port;
        // A turn without frames is no long one.
        lab.poll();
        assert_eq!(lab.port(2).turn_bytes, 0);
    }
}
