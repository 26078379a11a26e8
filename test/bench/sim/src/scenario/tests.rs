//! Tests of what the scenarios are there to show.

use super::*;
use crate::plot;
use crate::setup::Cost;

fn options(seconds: u64) -> Options {
    Options { seed: 7, seconds, cost: Cost::default() }
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let twice = [consolidate(&options(1)), consolidate(&options(1))];
    assert_eq!(twice[0].to_json(), twice[1].to_json());
    assert_eq!(plot::svg(&twice[0]), plot::svg(&twice[1]));
    let other = consolidate(&Options { seed: 8, ..options(1) });
    assert_ne!(twice[0].to_json(), other.to_json());
}

#[test]
fn half_as_many_sidecores_as_threads_lose_no_throughput() {
    let report = consolidate(&options(2));
    let rate = |at: usize| report.runs[at].bytes_per_s;
    let (threads, two, four) = (rate(0), rate(2), rate(3));
    assert!(two >= 0.95 * threads, "{two} of {threads}");
    assert!(four >= 0.98 * threads, "{four} of {threads}");
    assert!(report.runs[1].bytes_per_s < 0.9 * threads, "one is too few for this load");
}

#[test]
fn longer_polling_costs_cpu_and_saves_latency() {
    let report = sleep(&options(1));
    let find = |name: &str| report.runs.iter().find(|r| r.name == name).unwrap();
    let (none, long) = (find("think 15 µs: none"), find("think 15 µs: 200 µs"));
    assert!(none.classes[0].p50_us > 4.5 && long.classes[0].p50_us < 1.0);
    assert!(none.cpus < long.cpus);
    // Where polling never pays, the adaptive one nearly stops it.
    let (fixed, adapts) = (find("think 2 ms: 200 µs"), find("think 2 ms: up to 200 µs"));
    assert!(adapts.cpus < 0.3 * fixed.cpus, "{} and {}", adapts.cpus, fixed.cpus);
    let (fixed, adapts) = (find("think 15 µs: 50 µs"), find("think 15 µs: up to 50 µs"));
    assert!(adapts.classes[0].p50_us < 1.2 * fixed.classes[0].p50_us);
}

#[test]
fn a_thousand_vms_get_the_sidecores_they_need_and_no_more() {
    let follows = simulate("1 to 64", &crowd(&options(15)));
    // Full load until 6 s, then a quarter, then full load from 11 s on.
    let at = |ms: u64| follows.active.iter().rfind(|(from_ms, _)| *from_ms <= ms).unwrap().1;
    let (high, low, again) = (at(5900), at(10_900), at(15_900));
    assert!(high >= 24, "24 CPUs of load on {high}");
    assert!((6..=high / 2).contains(&low) && again >= 24, "{:?}", follows.active);
}

#[test]
fn vms_go_to_their_memorys_node_and_lose_nothing() {
    let report = nodes(&options(4));
    let [unknown, known, one] = &report.runs[..] else { panic!("three runs") };
    assert!(known.bytes_per_s > 0.99 * one.bytes_per_s, "{known:?} {one:?}");
    // Half of the sidecores are asked for 4 % more than they can do.
    assert!(known.bytes_per_s > 1.01 * unknown.bytes_per_s, "{known:?} {unknown:?}");
    assert!(known.classes[0].dropped < unknown.classes[0].dropped / 3);
    assert!(known.moves.iter().map(|(_, n)| n).sum::<u64>() <= 8, "{:?}", known.moves);
}

#[test]
fn shares_are_those_of_weights() {
    let report = shares(&options(1));
    let find = |name: &str| report.runs.iter().find(|r| r.name == name).unwrap();
    for run in report.runs.iter().filter(|r| r.name.contains("1:2:4")) {
        let error = run.classes[0].share_error;
        assert!(error <= 0.05, "{}: {error}", run.name);
    }
    assert!(find("a newcomer's 100 ms").classes[0].share_error <= 0.1);
    let (alone, active) = (find("alone").bytes_per_s, find("one active of 100").bytes_per_s);
    assert!(active > 0.99 * alone, "{active} of {alone}");
    let ceiling = find("ceiling 100 MB/s").classes.iter().find(|c| c.class == "ceiling").unwrap();
    assert!((ceiling.bytes_per_s / 1e8 - 1.0).abs() < 0.02, "{}", ceiling.bytes_per_s);
}
