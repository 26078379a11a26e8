//! The hot path allocates nothing.

use base::alloc_count::{Counting, allocations};
use queue::Layout;
use sidecore::Worker;

use crate::features as f;
use crate::testing::{BROADCAST, HOLD_NS, Lab, MODERN, Spec, frame, mac, no_offload};
use frame::testing::{make_partial, super_packet};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn the_counter_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(1)))), 1);
    assert_eq!(allocations(|| ()), 0);
}

/// Plain frames, floods, drops, holds, super-packets passed and cut, sleeps: none allocates.
#[test]
fn a_busy_switch_allocates_nothing() {
    for layout in [Layout::Split, Layout::Packed] {
        let make = |features| Spec { layout, features, ..Spec::default() };
        let plain = MODERN & !f::OFFLOADS;
        let mut lab = Lab::new(vec![make(MODERN), make(MODERN), make(plain)]);
        lab.introduce();
        super::credits::open(&mut lab, &[sidecore::Settings::default(); 3]);
        let (mut tso, vnet) = super_packet(false, false, 9000, 1400);
        tso[6..12].copy_from_slice(&mac(0));
        make_partial(&mut tso, &vnet);
        for round in 0..200 {
            for n in 1..3 {
                lab.guests[n].post_up_to(0, if round < 20 { 3 } else { 100 }, 1600, 1);
            }
            let guest = &mut lab.guests[0];
            for to in [mac(1), mac(2)] {
                tso[..6].copy_from_slice(&to);
                guest.send(0, &vnet.to_bytes(0), &tso, 3);
                guest.send(0, &no_offload(), &frame(to, mac(0), 1500), 2);
            }
            guest.send(0, &no_offload(), &frame(BROADCAST, mac(0), 60), 1);
            guest.send(0, &no_offload(), &frame(mac(1), mac(9), 60), 1);
            let (now_ns, engine, ledger) = (lab.now_ns, &mut lab.engine, &mut lab.ledger);
            let count = allocations(|| {
                engine.poll(now_ns, ledger);
                engine.poll(now_ns, ledger);
                engine.arm(now_ns, ledger);
                engine.disarm();
                engine.poll(now_ns + HOLD_NS, ledger);
                engine.poll(now_ns + HOLD_NS, ledger);
                ledger.end_round(now_ns + HOLD_NS);
            });
            assert_eq!(count, 0, "{layout:?} round {round}");
            lab.advance(HOLD_NS);
            while lab.guests[0].tx[0].used().is_some() {}
            assert!(lab.guests[1].recv_all(0).len() + lab.guests[2].recv_all(0).len() > 0);
        }
        assert!(lab.stats.software_segmented.get() > 0 && lab.stats.holds.get() > 0);
    }
}
