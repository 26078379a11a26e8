//! Weights: who gets how much of a core, of a device, of several cores.

use proptest::prelude::*;

use super::sim::{DISK, Kind, MS, NET, Queue, SECOND, SLOW, Sim};

/// Checks that `got` is in the proportion of `weights`.
fn assert_shares(what: &str, got: &[u64], weights: &[u32], tolerance: f64) {
    let total: u64 = got.iter().sum();
    let all: u32 = weights.iter().sum();
    for (n, (&bytes, &weight)) in got.iter().zip(weights).enumerate() {
        let share = bytes as f64 / total as f64;
        let due = f64::from(weight) / f64::from(all);
        let off = share / due - 1.0;
        let some = &got[..got.len().min(12)];
        assert!(off.abs() <= tolerance, "{what}: VM {n} has {off:+.3} of its share: {some:?}");
    }
}

const WEIGHTS: [u32; 3] = [100, 200, 400];

fn each(kind: Kind, len_bytes: u64, ring: u32, lag_ns: u64) -> Vec<Queue> {
    let queue = |vm| Queue { ring, lag_ns, ..Queue::new(vm, kind, len_bytes) };
    (0..3).map(queue).collect()
}

#[test]
fn weights_hold_whatever_the_load() {
    for (what, kind, len_bytes, ring, lag_ns) in [
        ("small frames", NET, 64, 256, 0),
        ("small frames, late drivers", NET, 64, 256, 10_000),
        ("small frames, very late drivers", NET, 64, 256, 25_000),
        ("frames", NET, 1500, 256, 10_000),
        ("super-packets", NET, 65_000, 256, 20_000),
        ("small requests", DISK, 4096, 128, 10_000),
        ("large requests", DISK, 1 << 20, 32, 20_000),
        ("small requests to a device", SLOW, 4096, 256, 20_000),
        ("larger requests to a device", SLOW, 64 << 10, 256, 20_000),
    ] {
        let mut sim = Sim::weights(&WEIGHTS, &each(kind, len_bytes, ring, lag_ns));
        // A device takes its time; a core shows in less that it is fair.
        let time_ns = if kind.device.is_some() { SECOND } else { SECOND / 8 };
        for second in 0..2 {
            let got = sim.run(time_ns);
            println!("{what}: {got:?}, {} of {} rounds wasted", sim.wasted(), sim.rounds());
            assert_shares(&format!("{what}, second {second}"), &got, &WEIGHTS, 0.05);
        }
    }
}

#[test]
fn network_and_disk_are_one_account() {
    // VM 0 uses both, VM 1 the network, VM 2 its disk, each as much as it gets.
    let mut queues = each(NET, 1500, 256, 10_000);
    queues[2].kind = DISK;
    queues.push(Queue::new(0, DISK, 16 << 10));
    let mut sim = Sim::weights(&WEIGHTS, &queues);
    for _ in 0..2 {
        assert_shares("mixed", &sim.run(SECOND / 8), &WEIGHTS, 0.05);
    }
    // All use both.
    let mut queues = each(NET, 64, 256, 10_000);
    queues.extend(each(DISK, 4096, 128, 10_000));
    let mut sim = Sim::weights(&WEIGHTS, &queues);
    assert_shares("both", &sim.run(SECOND / 8), &WEIGHTS, 0.05);
}

#[test]
fn who_waits_for_a_device_may_use_the_network() {
    // Both want all of a slow disk; one has a network port besides.
    let queues =
        [Queue::new(0, SLOW, 16 << 10), Queue::new(1, SLOW, 16 << 10), Queue::new(0, NET, 1500)];
    let mut sim = Sim::weights(&[100, 400], &queues);
    sim.run(20 * MS);
    let before = [0, 1].map(|at| sim.on_queue(0, at));
    let got = sim.run(SECOND);
    let disks = [0, 1].map(|at| sim.on_queue(0, at) - before[at]);
    assert_shares("disks", &disks, &[100, 400], 0.05);
    let net = got[0] - disks[0];
    assert!(net as f64 > 0.9 * uncontrolled(&queues[2..], SECOND) as f64, "{net}");
}

#[test]
fn more_queues_are_not_a_larger_share() {
    let mut queues = each(NET, 64, 256, 10_000);
    queues.extend(vec![queues[0].clone(); 7]);
    let mut sim = Sim::weights(&[100; 3], &queues);
    assert_shares("queues", &sim.run(SECOND / 8), &[100; 3], 0.05);
}

#[test]
fn a_newcomer_has_its_share_at_once() {
    for (what, kind, len_bytes) in
        [("net", NET, 64), ("net", NET, 65_000), ("disk", DISK, 4096), ("device", SLOW, 16 << 10)]
    {
        for weights in [[100, 200, 400], [400, 200, 100], [1, 100, 10_000], [10_000, 10_000, 1]] {
            let mut queues = each(kind, len_bytes, 256, 10_000);
            queues[2].from_ns = 20 * MS;
            let mut sim = Sim::weights(&weights, &queues);
            sim.run(20 * MS);
            let got = sim.run(100 * MS);
            let due = f64::from(weights[2]) / f64::from(weights.iter().sum::<u32>());
            let share = got[2] as f64 / got.iter().sum::<u64>() as f64;
            assert!(share > 0.9 * due, "{what} {weights:?}: {share:.3} of {due:.3}: {got:?}");
        }
    }
}

/// Bytes that `queues` get without any credit.
fn uncontrolled(queues: &[Queue], time_ns: u64) -> u64 {
    let vms = queues.len();
    let mut sim = Sim::weights(&vec![100; vms], queues);
    sim.ids = vec![crate::VmId::NONE; vms];
    sim.run(time_ns).iter().sum()
}

#[test]
fn who_is_alone_gets_everything_and_no_round_is_wasted() {
    for (kind, len_bytes) in [(NET, 64), (NET, 65_000), (DISK, 1 << 20), (SLOW, 4096)] {
        for weight in [1, 100, 10_000] {
            for count in [1, 4] {
                let queues = vec![Queue::new(0, kind, len_bytes); count];
                let mut sim = Sim::weights(&[weight, 10_000], &queues);
                let got = sim.run(50 * MS)[0] as f64 / uncontrolled(&queues, 50 * MS) as f64;
                assert!(got > 0.99, "{kind:?} {len_bytes} {weight}: {got}");
                assert_eq!(sim.wasted(), 0);
            }
        }
    }
}

#[test]
fn what_others_do_not_use_is_shared_out() {
    // The heavy one sends a little, now and then: the others have the rest.
    let mut queues = each(NET, 1500, 256, 10_000);
    (queues[2].ring, queues[2].lag_ns) = (4, 400_000);
    let mut sim = Sim::weights(&[100, 300, 10_000], &queues);
    let got = sim.run(SECOND / 8);
    assert!(got[2] < got[0] / 10);
    assert_shares("the rest", &got[..2], &[100, 300], 0.05);
    let busy = sim.run(SECOND / 8).iter().sum::<u64>() as f64;
    let all = uncontrolled(&queues[..2], SECOND / 8) as f64;
    // Their batches are smaller for it.
    assert!(busy > 0.97 * all, "{}", busy / all);
}

#[test]
fn nobody_saves_up_more_than_a_burst() {
    let mut queues = each(NET, 1500, 256, 5_000);
    queues[2].from_ns = SECOND / 4;
    let mut sim = Sim::weights(&[100; 3], &queues);
    sim.run(SECOND / 4);
    let got = sim.run(10 * MS);
    assert!(got[2] < got[0] + 2 * super::super::BURST_BYTES as u64, "{got:?}");
}

#[test]
fn a_thousand_vms() {
    // Three of them at work.
    let mut queues: Vec<Queue> = (0..1000).map(|vm| Queue::new(vm, NET, 1500)).collect();
    queues.iter_mut().skip(3).for_each(|q| q.from_ns = u64::MAX);
    let weights: Vec<u32> = (0..1000).map(|vm| 100 << (vm % 3)).collect();
    let mut sim = Sim::weights(&weights, &queues);
    assert_shares("three of 1,000", &sim.run(SECOND / 8)[..3], &WEIGHTS, 0.05);
    // All of them.
    queues.iter_mut().for_each(|q| (q.from_ns, q.ring, q.lag_ns) = (0, 64, 100_000));
    let mut sim = Sim::weights(&weights, &queues);
    sim.run(SECOND / 4);
    assert_shares("all of 1,000", &sim.run(SECOND), &weights, 0.05);
    assert_eq!(sim.wasted(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The cores do what they do without credits, and saturating VMs have their shares, whatever
    /// the load.
    #[test]
    fn any_weights_and_lengths(
        vms in prop::collection::vec((1u32..400, 64u64..66_000, 1usize..4, 0..2u8), 2..12),
    ) {
        let mut queues = Vec::new();
        for (vm, &(_, len_bytes, count, kind)) in vms.iter().enumerate() {
            let kind = if kind == 0 { NET } else { DISK };
            queues.extend(vec![Queue { lag_ns: 5_000, ..Queue::new(vm, kind, len_bytes) }; count]);
        }
        let weights: Vec<u32> = vms.iter().map(|v| v.0).collect();
        let mut sim = Sim::weights(&weights, &queues);
        sim.run(50 * MS);
        assert_shares("any", &sim.run(300 * MS), &weights, 0.05);
        // One at most, when somebody is no longer alone.
        prop_assert!(sim.wasted() < vms.len() as u64, "{} wasted", sim.wasted());
    }
}

/// Per VM, which cores it uses.
fn spread(uses: &[&[usize]]) -> Vec<Queue> {
    let queue = |vm| move |&core: &usize| Queue { core, ..Queue::new(vm, NET, 1500) };
    uses.iter().enumerate().flat_map(|(vm, cores)| cores.iter().map(queue(vm))).collect()
}

fn over_cores(uses: &[&[usize]], weights: &[u32]) -> Vec<u64> {
    let mut sim = Sim::weights(weights, &spread(uses));
    sim.run(100 * MS);
    let got = sim.run(500 * MS);
    println!("{uses:?} {weights:?}: {got:?}, {} of {} wasted", sim.wasted(), sim.rounds());
    // One for each look at the others.
    assert!(sim.wasted() < 4 * 700, "{}", sim.wasted());
    got
}

#[test]
fn one_account_over_several_cores() {
    // Everybody everywhere.
    let both: &[usize] = &[0, 1];
    assert_shares("both", &over_cores(&[both; 3], &WEIGHTS), &WEIGHTS, 0.05);
    // One has a core to itself besides: it leaves the shared one to the other, up to the part that
    // nobody loses.
    let got = over_cores(&[&[0, 1], &[0]], &[100; 2]);
    assert_shares("one of two", &got, &[100; 2], 0.08);
    // In a ring, and across.
    let got = over_cores(&[&[0, 1], &[1, 2], &[2, 0]], &WEIGHTS);
    assert!(got[0] < got[1] && got[1] < got[2], "{got:?}");
    let got = over_cores(&[&[0, 1], &[0], &[1]], &[100; 3]);
    assert_shares("three on two", &got, &[100; 3], 0.05);
    let got = over_cores(&[&[0, 1, 2, 3], &[0, 1], &[2, 3], &[0, 2]], &[100; 4]);
    assert_shares("four on four", &got, &[100; 4], 0.08);
}

#[test]
fn work_elsewhere_starves_no_queue() {
    // The second core is much faster than what the VM gets of the first.
    let mut queues = spread(&[&[0, 1], &[0]]);
    let slow = Kind { request_ns: 20_000, ..DISK };
    (queues[0].kind, queues[2].kind) = (slow, slow);
    let mut sim = Sim::weights(&[100; 2], &queues);
    sim.run(100 * MS);
    let before = sim.on_queue(0, 0);
    let got = sim.run(SECOND);
    let slow = sim.on_queue(0, 0) - before;
    let part = slow as f64 / (slow + got[1]) as f64;
    assert!((0.04..0.1).contains(&part), "{part}");
}

#[test]
fn a_device_knows_those_who_use_it_and_is_forgotten_with_them() {
    let accounts = crate::Accounts::default();
    let mut ledger = crate::Ledger::default();
    let open = |ledger: &mut crate::Ledger, n: usize| {
        let account = accounts.open(&format!("vm{n}"), crate::Settings::default());
        let id = account.id();
        ledger.enrol(account);
        id
    };
    let ids: Vec<_> = (0..100).map(|n| open(&mut ledger, n)).collect();
    let spent = crate::Spent { bytes: 4096, requests: 1 };
    for (n, &vm) in ids.iter().enumerate() {
        ledger.device(n as u64, vm).charge(vm, spent, false, 0);
    }
    assert_eq!(ledger.devices.len(), 100);
    assert!(!ledger.device(7, ids[7]).knows(ids[8]));
    // Idle for two looks: passed over, and gone when the next worker goes.
    for round in 1..4 {
        ledger.end_round(round * 2 * MS);
    }
    ledger.device(7, ids[7]).charge(ids[7], spent, false, 6 * MS);
    ledger.worker_left(6 * MS);
    assert_eq!(ledger.devices.len(), 1);
    ledger.expel(ids[7]);
    assert_eq!(ledger.devices.len(), 0);
}
