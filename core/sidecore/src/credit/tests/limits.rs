//! Floors and ceilings.

use super::sim::{DISK, MS, NET, Queue, SECOND, Sim};
use crate::{Accounts, Ledger, Settings, Spent};

const MB: u64 = 1_000_000;

fn near(what: &str, got: u64, wanted: u64, tolerance: f64) {
    let off = got as f64 / wanted as f64 - 1.0;
    assert!(off.abs() <= tolerance, "{what}: {got} for {wanted}, {off:+.3}");
}

#[test]
fn a_ceiling_of_bytes_holds() {
    for (rate, burst_ms) in [(2 * MB, 100), (100 * MB, 10), (1500 * MB, 1)] {
        for competes in [false, true] {
            let ceiling = Settings {
                ceiling_bytes_per_s: rate,
                ceiling_burst_ms: burst_ms,
                ..Settings::default()
            };
            // Two queues of two kinds: one ceiling.
            let mut queues = vec![Queue::new(0, NET, 1500), Queue::new(0, DISK, 4096)];
            if competes {
                queues.push(Queue::new(1, NET, 1500));
            }
            let mut sim = Sim::new(&[ceiling, Settings::default()], &queues);
            sim.run(200 * MS);
            near("ceiling", sim.run(SECOND)[0], rate, 0.02);
        }
    }
}

#[test]
fn a_ceiling_of_requests_holds_over_several_cores() {
    for rate in [500, 100_000, 1_000_000] {
        let ceiling = Settings { ceiling_ops_per_s: rate, ..Settings::default() };
        let queues = [0, 1, 2].map(|core| Queue { core, ..Queue::new(0, NET, 64) });
        let mut sim = Sim::new(&[ceiling], &queues);
        sim.run(200 * MS);
        let before = sim.requests[0];
        sim.run(SECOND);
        near("ceiling", sim.requests[0] - before, rate, 0.02);
    }
}

#[test]
fn a_pause_gives_a_burst_and_no_more() {
    let ceiling =
        Settings { ceiling_bytes_per_s: 100 * MB, ceiling_burst_ms: 50, ..Settings::default() };
    let queue = Queue { from_ns: SECOND, ..Queue::new(0, NET, 1500) };
    let mut sim = Sim::new(&[ceiling], &[queue]);
    sim.run(SECOND);
    near("burst", sim.run(100 * MS)[0], 15 * MB, 0.02);
    near("then", sim.run(100 * MS)[0], 10 * MB, 0.02);
}

#[test]
fn settings_hold_from_the_moment_they_are_told() {
    let queues = [0, 1].map(|vm| Queue::new(vm, NET, 1500));
    let mut sim = Sim::weights(&[100, 100], &queues);
    sim.run(10 * MS);
    sim.set(0, Settings { weight: 300, ..Settings::default() });
    sim.run(MS);
    let got = sim.run(100 * MS);
    near("weight", got[0], 3 * got[1], 0.05);
    sim.set(0, Settings { ceiling_bytes_per_s: 50 * MB, ..Settings::default() });
    sim.run(100 * MS);
    near("ceiling", sim.run(SECOND)[0], 50 * MB, 0.02);
    sim.set(0, Settings::default());
    sim.run(MS);
    let got = sim.run(100 * MS);
    near("none", got[0], got[1], 0.05);
}

#[test]
fn a_floor_holds_and_is_no_addition_to_the_share() {
    // A weight that is worth next to nothing, and one that is worth more than the floor.
    for (weight, floor, wanted) in [(1, 500 * MB, Some(500 * MB)), (100, 500 * MB, None)] {
        let floor = Settings { weight, floor_bytes_per_s: floor, ..Settings::default() };
        let queues = [0, 1, 2].map(|vm| Queue::new(vm, NET, 1500));
        let mut sim = Sim::new(&[floor, Settings::default(), Settings::default()], &queues);
        sim.run(50 * MS);
        let got = sim.run(SECOND);
        near("floor", got[0], wanted.unwrap_or(got.iter().sum::<u64>() / 3), 0.02);
        near("the others", got[1], got[2], 0.02);
    }
}

#[test]
fn a_floor_holds_over_several_cores() {
    let floor = Settings { weight: 1, floor_bytes_per_s: 800 * MB, ..Settings::default() };
    let heavy = Settings { weight: 10_000, ..Settings::default() };
    let queues: Vec<Queue> =
        (0..4).map(|n| Queue { core: n % 2, ..Queue::new(n / 2, NET, 1500) }).collect();
    let mut sim = Sim::new(&[floor, heavy], &queues);
    sim.run(50 * MS);
    let got = sim.run(SECOND);
    near("floor", got[0], 800 * MB, 0.02);
}

#[test]
fn a_change_of_another_vm_forgives_no_debt() {
    let ceiling = Settings { ceiling_bytes_per_s: MB, ..Settings::default() };
    let accounts = Accounts::default();
    let mut ledger = Ledger::default();
    let account = accounts.open("a", ceiling);
    let vm = account.id();
    ledger.enrol(account);
    let spent = Spent { bytes: 64 * MB, requests: 1 };
    ledger.charge(vm, spent, true, SECOND);
    ledger.end_round(SECOND);
    let mut now_ns = SECOND;
    for n in 0.. {
        if !ledger.allowance(vm, now_ns).is_none() {
            break;
        }
        now_ns = ledger.until_ns(vm, now_ns).expect("a time to wake at");
        ledger.enrol(accounts.open(&format!("b{n}"), Settings::default()));
    }
    near("time", now_ns - SECOND, 64 * SECOND, 0.02);
}

#[test]
fn time_held_back_is_told_while_it_lasts_and_not_when_nobody_waits() {
    let ceiling = Settings { ceiling_bytes_per_s: MB, ..Settings::default() };
    let accounts = Accounts::default();
    let mut ledger = Ledger::default();
    let account = accounts.open("a", ceiling);
    let vm = account.id();
    ledger.enrol(account.clone());
    ledger.charge(vm, Spent { bytes: 64 * MB, requests: 1 }, true, SECOND);
    let told = || account.stats.held_by_ceiling_ns.load(std::sync::atomic::Ordering::Relaxed);
    let mut now_ns = SECOND;
    for _ in 0..10 {
        ledger.held_back(vm, now_ns);
        now_ns += 2 * MS;
        ledger.end_round(now_ns);
    }
    assert_eq!(told(), 20 * MS);
    // Its queue is stopped: nobody says that it waits.
    for _ in 0..10 {
        now_ns += SECOND;
        ledger.end_round(now_ns);
    }
    assert_eq!(told(), 20 * MS);
}

#[test]
fn a_debt_beyond_the_burst_is_paid_at_the_ceilings_rate() {
    let ceiling =
        Settings { ceiling_bytes_per_s: MB, ceiling_burst_ms: 100, ..Settings::default() };
    let accounts = Accounts::default();
    let mut ledger = Ledger::default();
    let account = accounts.open("a", ceiling);
    let vm = account.id();
    ledger.enrol(account);
    let mut now_ns = SECOND;
    // Ten requests of a second and a half each.
    for _ in 0..10 {
        while ledger.allowance(vm, now_ns).is_none() {
            let until_ns = ledger.until_ns(vm, now_ns).expect("a time to wake at");
            assert!(until_ns > now_ns);
            now_ns = until_ns;
        }
        ledger.charge(vm, Spent { bytes: 3 * MB / 2, requests: 1 }, true, now_ns);
        ledger.end_round(now_ns);
    }
    // The first one is free to begin, with a burst in hand, and each goes on with a pace of tokens.
    near("time", now_ns - SECOND, 9 * 3 * SECOND / 2, 0.02);
}
