//! The engine against what can be worked out by hand.

use super::*;
use crate::setup::Cost;

fn setup(vms: Vec<Vm>) -> Setup {
    Setup {
        vms,
        cores: 1,
        begin_on: 1,
        limits: None,
        spin_ns: 0,
        adapts: false,
        cost: Cost::default(),
        seed: 1,
        warm_up_ns: 0,
        length_ns: 1_000_000_000,
        factors: Vec::new(),
        nodes: None,
    }
}

fn recorded(all: &[(u64, u32, Kind)]) -> Vm {
    Vm::new("t", Kind::Net, 0, Source::Recorded(all.to_vec()))
}

#[test]
fn one_request_costs_what_the_model_says() {
    let vm = recorded(&[(1_000_000, 1024, Kind::Net)]);
    let out = run(&setup(vec![vm.clone()]));
    assert_eq!((out.busy_ns, out.waking_ns, out.spin_ns, out.wakeups), (110, 5000, 0, 1));
    let p50 = out.vms[0].latency_ns.snapshot().quantile(0.5) as f64;
    assert!((p50 / 5110.0 - 1.0).abs() < 1.0 / 32.0, "{p50}");
    let polling = Setup { spin_ns: 2_000_000, ..setup(vec![vm]) };
    let out = run(&polling);
    // 1 ms before it, 2 ms after it, then asleep.
    assert_eq!((out.busy_ns, out.waking_ns, out.spin_ns), (110, 0, 3_000_000));
}

#[test]
fn a_full_queue_drops_and_every_request_is_counted_once() {
    let all: Vec<(u64, u32, Kind)> = (0..3000).map(|_| (5, 0, Kind::Disk)).collect();
    let out = run(&setup(vec![recorded(&all)]));
    assert_eq!((out.vms[0].requests, out.vms[0].dropped), (1024, 3000 - 1024));
    assert_eq!(out.busy_ns, 1024 * 200);
}

#[test]
fn a_closed_source_has_its_window_in_flight() {
    let source = Source::Closed { window: 4, think_ns: 0.0 };
    let vm = Vm::new("t", Kind::Disk, 4096, source);
    let out = run(&setup(vec![vm]));
    // Always busy: 200 ns each.
    assert!((out.vms[0].requests as i64 - 5_000_000).abs() < 50, "{}", out.vms[0].requests);
    let p99 = out.vms[0].latency_ns.snapshot().quantile(0.99);
    assert!(p99 < 900, "{p99}");
}

#[test]
fn vms_spread_when_one_sidecore_is_too_few() {
    let source = Source::Poisson { rate: 120_000.0 };
    let vm = Vm::new("t", Kind::Net, 65_536, source);
    let few = Setup { length_ns: 3_000_000_000, ..setup(vec![vm; 8]) };
    let wide = Setup { cores: 4, limits: Some(Limits::new(1, 4)), ..few.clone() };
    let sum = |out: &Outcome| out.vms.iter().map(|v| v.requests).sum::<u64>() as f64 / 3.0;
    let (few, wide) = (run(&few), run(&wide));
    assert!(sum(&few) < 510_000.0, "one sidecore serves 500,000 a second of these");
    assert!(sum(&wide) > 800_000.0, "{}", sum(&wide));
    assert!(wide.active.last().is_some_and(|(_, n)| *n >= 3), "{:?}", wide.active);
    assert!(wide.moves.iter().sum::<u64>() < 30, "{:?}", wide.moves);
}

#[test]
fn who_is_at_a_ceiling_waits_and_holds_up_nobody() {
    let source = Source::Closed { window: 64, think_ns: 1000.0 };
    let other = Vm::new("t", Kind::Disk, 4096, source);
    let mut slow = other.clone();
    slow.grant.ceiling_ops_per_s = 20_000;
    slow.grant.ceiling_burst_ms = 1;
    let out = run(&setup(vec![slow.clone(), other]));
    assert!((19_900..20_300).contains(&out.vms[0].requests), "{}", out.vms[0].requests);
    assert!(out.vms[1].requests > 4_500_000, "{}", out.vms[1].requests);
    // Alone, it lets the sidecore sleep.
    let out = run(&setup(vec![slow]));
    assert!((19_900..20_300).contains(&out.vms[0].requests), "{}", out.vms[0].requests);
    assert!(out.wakeups > 500, "{}", out.wakeups);
}

#[test]
fn a_ceiling_holds_where_vms_move() {
    let source = Source::Closed { window: 64, think_ns: 20_000.0 };
    let vm = Vm::new("t", Kind::Net, 65_536, source);
    let mut vms = vec![vm; 6];
    vms[0].grant.ceiling_bytes_per_s = 500_000_000;
    vms[0].grant.ceiling_burst_ms = 1;
    let wide =
        Setup { cores: 4, limits: Some(Limits::new(1, 4)), length_ns: 2_000_000_000, ..setup(vms) };
    let out = run(&wide);
    assert!(out.moves.iter().sum::<u64>() > 0);
    let rate = out.vms[0].bytes as f64 / 2.0;
    assert!((rate / 5e8 - 1.0).abs() < 0.03, "{rate}");
}
