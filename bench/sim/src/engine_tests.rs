//! The engine against what can be worked out by hand.

use super::*;

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
    }
}

fn recorded(all: &[(u64, u32, Kind)]) -> Vm {
    Vm { class: "t", source: Source::Recorded(all.to_vec()), kind: Kind::Net, len_bytes: 0 }
}

#[test]
fn one_request_costs_what_the_model_says() {
    let vm = recorded(&[(1_000_000, 1024, Kind::Net)]);
    let out = run(&setup(vec![vm.clone()]), &mut NoCredits);
    assert_eq!((out.busy_ns, out.waking_ns, out.spin_ns, out.wakeups), (110, 5000, 0, 1));
    let p50 = out.vms[0].latency_ns.percentile(50.0) as f64;
    assert!((p50 / 5110.0 - 1.0).abs() < 0.07, "{p50}");
    let polling = Setup { spin_ns: 2_000_000, ..setup(vec![vm]) };
    let out = run(&polling, &mut NoCredits);
    // 1 ms before it, 2 ms after it, then asleep.
    assert_eq!((out.busy_ns, out.waking_ns, out.spin_ns), (110, 0, 3_000_000));
}

#[test]
fn a_full_queue_drops_and_every_request_is_counted_once() {
    let all: Vec<(u64, u32, Kind)> = (0..3000).map(|_| (5, 0, Kind::Disk)).collect();
    let out = run(&setup(vec![recorded(&all)]), &mut NoCredits);
    assert_eq!((out.vms[0].requests, out.vms[0].dropped), (1024, 3000 - 1024));
    assert_eq!(out.busy_ns, 1024 * 200);
}

#[test]
fn a_closed_source_has_its_window_in_flight() {
    let source = Source::Closed { window: 4, think_ns: 0.0 };
    let vm = Vm { class: "t", source, kind: Kind::Disk, len_bytes: 4096 };
    let out = run(&setup(vec![vm]), &mut NoCredits);
    // Always busy: 200 ns each.
    assert!((out.vms[0].requests as i64 - 5_000_000).abs() < 50, "{}", out.vms[0].requests);
    let p99 = out.vms[0].latency_ns.percentile(99.0);
    assert!(p99 < 900, "{p99}");
}

#[test]
fn vms_spread_when_one_sidecore_is_too_few() {
    let source = Source::Poisson { rate: 120_000.0 };
    let vm = Vm { class: "t", source, kind: Kind::Net, len_bytes: 65_536 };
    let few = Setup { length_ns: 3_000_000_000, ..setup(vec![vm; 8]) };
    let wide = Setup { cores: 4, limits: Some(Limits::new(1, 4)), ..few.clone() };
    let sum = |out: &Outcome| out.vms.iter().map(|v| v.requests).sum::<u64>() as f64 / 3.0;
    let (few, wide) = (run(&few, &mut NoCredits), run(&wide, &mut NoCredits));
    assert!(sum(&few) < 510_000.0, "one sidecore serves 500,000 a second of these");
    assert!(sum(&wide) > 800_000.0, "{}", sum(&wide));
    assert!(wide.active.last().is_some_and(|(_, n)| *n >= 3), "{:?}", wide.active);
    assert!(wide.moves.iter().sum::<u64>() < 30, "{:?}", wide.moves);
}

/// Serves the first VM only every millisecond.
struct Slow(u64);

impl Credits for Slow {
    fn grant(&mut self, vm: usize, now_ns: u64) -> usize {
        if vm == 0 && now_ns < self.0 { 0 } else { BATCH }
    }
    fn charge(&mut self, vm: usize, now_ns: u64, _bytes: u64, _requests: u64) {
        if vm == 0 {
            self.0 = now_ns + 1_000_000;
        }
    }
    fn retry_ns(&self, _now_ns: u64) -> u64 {
        self.0
    }
}

#[test]
fn who_has_no_credits_waits_and_holds_up_nobody() {
    let source = Source::Closed { window: 64, think_ns: 1000.0 };
    let vm = Vm { class: "t", source, kind: Kind::Disk, len_bytes: 4096 };
    let out = run(&setup(vec![vm.clone(), vm]), &mut Slow(0));
    assert!((900 * 32..=1001 * 32).contains(&out.vms[0].requests), "{}", out.vms[0].requests);
    assert!(out.vms[1].requests > 1_000_000);
}
