//! Bytes that are moved for a VM outside of all sidecores.

use std::sync::atomic::Ordering::Relaxed;

use base::random::{Random, Seeded};

use super::sim::{MS, NET, Queue, SECOND, Sim};
use crate::credit::{BYTES_PER_NS, PACE_NS};
use crate::{Accounts, Ledger, Settings, Spent};

/// Runs for a second, in which VM 0 is charged `bytes` outside, in 200 pieces. Returns what both
/// had in all.
fn second(sim: &mut Sim, bytes: u64) -> [u64; 2] {
    let account = sim.accounts.find("vm0").unwrap();
    let mut sum = [0; 2];
    for _ in 0..200 {
        let spent = Spent { bytes: bytes / 200, requests: 10 };
        account.charge(spent, sim.now_ns());
        sum[0] += spent.bytes;
        sim.run(5 * MS).into_iter().zip(&mut sum).for_each(|(had, sum)| *sum += had);
    }
    sum
}

#[test]
fn it_is_kept_back_from_what_the_vm_earns() {
    let queues = [0, 1].map(|vm| Queue::new(vm, NET, 1500));
    let mut sim = Sim::weights(&[100, 100], &queues);
    let [alone, _] = second(&mut sim, 0);
    let [with, other] = second(&mut sim, alone / 20);
    let ratio = with as f64 / other as f64;
    assert!((0.97..1.03).contains(&ratio), "{with} beside {other}");
}

#[test]
fn it_counts_to_the_ceiling() {
    let rate = 100_000_000;
    let ceiling = Settings { ceiling_bytes_per_s: rate, ..Settings::default() };
    let mut sim = Sim::new(&[ceiling, Settings::default()], &[Queue::new(0, NET, 1500)]);
    sim.run(SECOND);
    for bytes in [0, rate / 2, rate * 9 / 10] {
        let [all, _] = second(&mut sim, bytes);
        let off = all as f64 / rate as f64 - 1.0;
        assert!(off.abs() < 0.05, "{all} for {rate} with {bytes} outside");
    }
}

/// Threads that work for the VM for a twentieth of what a sidecore could do.
#[test]
fn cpu_time_is_kept_back_from_what_the_vm_earns_and_no_ceiling_knows_it() {
    let queues = [0, 1].map(|vm| Queue::new(vm, NET, 1500));
    let run = |sim: &mut Sim, ns: u64| {
        let account = sim.accounts.find("vm0").unwrap();
        let mut sum = [ns * BYTES_PER_NS, 0];
        for _ in 0..200 {
            account.charge_time(ns / 200);
            sim.run(5 * MS).into_iter().zip(&mut sum).for_each(|(had, sum)| *sum += had);
        }
        sum
    };
    for weights in [[100, 100], [300, 100]] {
        let mut sim = Sim::weights(&weights, &queues);
        let [alone, _] = run(&mut sim, 0);
        let [with, other] = run(&mut sim, alone / 20 / BYTES_PER_NS);
        let ratio = with as f64 / other as f64 / f64::from(weights[0]) * f64::from(weights[1]);
        assert!((0.97..1.03).contains(&ratio), "{weights:?}: {with} beside {other}");
    }

    let rate = 100_000_000;
    let ceiling = Settings { ceiling_bytes_per_s: rate, ..Settings::default() };
    let mut sim = Sim::new(&[ceiling, Settings::default()], &[Queue::new(0, NET, 1500)]);
    sim.run(SECOND);
    let [all, _] = run(&mut sim, SECOND);
    let moved = (all - SECOND * BYTES_PER_NS) as f64 / rate as f64;
    assert!((0.95..1.05).contains(&moved), "{moved}");
    assert_eq!(sim.accounts.find("vm0").unwrap().stats.thread_ns.load(Relaxed), SECOND);
}

#[test]
fn cpu_time_refuses_no_frames_from_outside() {
    let accounts = Accounts::default();
    let [busy, other] = ["busy", "other"].map(|name| accounts.open(name, Settings::default()));
    let mut ledger = Ledger::default();
    [&busy, &other].into_iter().for_each(|account| ledger.enrol(account.clone()));
    let spent = Spent { bytes: 1 << 30, requests: 1 };
    let mut now_ns = SECOND;
    for _ in 0..20 {
        busy.charge_time(10 * MS);
        // Both want more than there is.
        ledger.charge(other.id(), spent, true, now_ns);
        ledger.charge(busy.id(), Spent { bytes: 512, requests: 1 }, true, now_ns);
        ledger.held_back(other.id(), now_ns);
        assert!(ledger.may_receive(busy.id(), now_ns));
        now_ns += 2 * MS;
        ledger.end_round(now_ns);
    }
    // What it was charged in bytes does.
    for _ in 0..20 {
        busy.charge(Spent { bytes: 64 << 20, requests: 1 }, now_ns);
        ledger.charge(busy.id(), Spent { bytes: 512, requests: 1 }, true, now_ns);
        ledger.held_back(other.id(), now_ns);
        now_ns += 2 * MS;
        ledger.end_round(now_ns);
    }
    assert!(!ledger.may_receive(busy.id(), now_ns));
}

/// A VM at its ceiling, whose queue has always more to do, and something outside that waits until
/// there are bytes again, and for a random time as long as a queue waits beyond that. Together they
/// get what the ceiling allows, and neither starves.
#[test]
fn what_is_asked_for_counts_to_the_ceiling_and_neither_side_starves() {
    let rate = 100_000_000;
    let ceiling = Settings { ceiling_bytes_per_s: rate, ..Settings::default() };
    let mut sim = Sim::new(&[ceiling, Settings::default()], &[Queue::new(0, NET, 1500)]);
    sim.run(SECOND);
    let account = sim.accounts.find("vm0").unwrap();
    let mut random = Seeded::new(7);
    let (mut outside, mut queue, mut due_ns) = (0, 0, 0);
    for _ in 0..20_000 {
        if sim.now_ns() >= due_ns {
            match account.ask(1 << 20, sim.now_ns()) {
                Ok(grant) => {
                    // Of some, less is used.
                    let spent = Spent { bytes: grant.bytes / 2, requests: 1 };
                    outside += spent.bytes;
                    account.pay(grant, spent, sim.now_ns());
                }
                Err(at_ns) => {
                    assert!(at_ns > sim.now_ns());
                    due_ns = at_ns + u64::from(random.below(2 * PACE_NS as u32));
                }
            }
        }
        queue += sim.run(MS / 20)[0];
    }
    let off = (outside + queue) as f64 / rate as f64 - 1.0;
    assert!(off.abs() < 0.05, "{outside} and {queue} of {rate}");
    assert!(outside > rate / 10 && queue > rate / 10, "{outside} {queue}");
}

#[test]
fn a_ceiling_of_requests_holds_for_those_who_ask() {
    let accounts = Accounts::default();
    let ceiling = Settings { ceiling_ops_per_s: 1000, ceiling_burst_ms: 10, ..Settings::default() };
    let account = accounts.open("vm", ceiling);
    let (mut now_ns, mut done) = (SECOND, 0);
    while now_ns < 2 * SECOND {
        match account.ask(4096, now_ns) {
            Ok(grant) => {
                // One that finds nothing to do costs nothing.
                let idle = done % 2 == 0 && now_ns % 3 == 0;
                let requests = u32::from(!idle);
                done += u64::from(requests);
                account.pay(grant, Spent { bytes: 4096, requests }, now_ns);
                now_ns += 1;
            }
            Err(at_ns) => now_ns = at_ns.max(now_ns + 1),
        }
    }
    assert!((1000..=1011).contains(&done), "{done}");
    // Without a ceiling nobody is asked to wait, and all is counted.
    account.set(Settings::default());
    let before = account.stats.charged_bytes.load(Relaxed);
    let grant = account.ask(u64::MAX, now_ns).unwrap();
    assert_eq!(grant.bytes, u64::MAX);
    account.pay(grant, Spent { bytes: 7, requests: 1 }, now_ns);
    assert_eq!(account.stats.charged_bytes.load(Relaxed), before + 7);
}

/// However small it is, and however large the pieces.
#[test]
fn a_small_ceiling_holds_for_large_pieces() {
    for rate in [100u64, 1000, 100_000, 10_000_000] {
        let accounts = Accounts::default();
        let ceiling = Settings { ceiling_bytes_per_s: rate, ..Settings::default() };
        let account = accounts.open("vm", ceiling);
        let (mut now_ns, mut moved) = (SECOND, 0);
        while now_ns < 101 * SECOND {
            match account.ask(1 << 20, now_ns) {
                Ok(grant) => {
                    let spent = Spent { bytes: grant.bytes, requests: 1 };
                    moved += spent.bytes;
                    account.pay(grant, spent, now_ns);
                }
                Err(at_ns) => now_ns = at_ns.max(now_ns + 1),
            }
        }
        let due = 100 * rate;
        assert!(moved >= due - due / 50 && moved <= due + rate, "{moved} of {due}");
    }
}
