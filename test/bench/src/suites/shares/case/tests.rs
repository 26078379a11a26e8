use frontend::many::ManyReport;
use frontend::many::tally::{LatencyReport, LoadReport};

use super::*;

/// A load with these operations of 1,000 charged bytes in each window.
fn load(windows: &[Vec<u64>]) -> Load {
    let one = |ops: &Vec<u64>| LoadReport { window_ops: ops.clone(), ..LoadReport::default() };
    let report = ManyReport {
        window_ms: WINDOW_MS,
        latency_window_ms: LATENCY_WINDOW_MS,
        seconds: 1.0,
        cpu_delay_ns: 0,
        loads: windows.iter().map(one).collect(),
    };
    let count = windows.len();
    let (op_bytes, saturates) = (vec![1000; count], vec![true; count]);
    Load { report, op_bytes, back_delay: None, stolen: 0.0, saturates }
}

fn steady(rates: &[u64]) -> Load {
    load(&rates.iter().map(|r| vec![*r; 130]).collect::<Vec<_>>())
}

fn tails(us: &[u64]) -> Load {
    let mut load = load(&[vec![]]);
    let window = |us: &u64| LatencyReport { count: 5, p99_ns: us * 1000, ..Default::default() };
    load.report.loads[0].window_latency = us.iter().map(window).collect();
    load
}

#[test]
fn shares_are_of_all_devices_of_a_vm() {
    let found = Case::Weights(Medium::Both).judge(&[steady(&[5, 5, 15, 5, 20, 20])]);
    let values: Vec<(&str, f64)> = found.iter().map(|f| (f.row.as_str(), f.value)).collect();
    let close = |a: f64, b: f64| (a - b).abs() < 1e-9;
    assert_eq!(values[0].0, "weights_both_1");
    assert!(close(values[0].1, 100.0 / 7.0) && close(values[2].1, 400.0 / 7.0), "{values:?}");
    assert!(found.iter().all(|f| close(f.ratio, 1.0)));
    // Too much is as wrong as too little.
    let found = Case::Weights(Medium::Net).judge(&[steady(&[2, 2, 4])]);
    assert!(found[0].ratio < 0.6 && found[1].ratio < 0.9 && found[2].ratio < 0.9, "{found:?}");
    assert!(Case::Weights(Medium::Net).judge(&[steady(&[0, 0, 0])]).is_empty());
}

#[test]
fn a_newcomer_is_timed_to_the_end_of_its_first_good_window() {
    let come = |from: usize| -> Vec<u64> { (0..100).map(|w| u64::from(w >= from) * 20).collect() };
    let at = |from| {
        let load = load(&[vec![10; 100], vec![10; 100], come(from)]);
        Case::Newcomer(Medium::Net).judge(&[load])[0].clone()
    };
    assert_eq!((at(50).value, at(50).ratio), (20.0, 5.0));
    assert_eq!(at(58).value, 100.0);
    assert_eq!((at(200).value, at(200).ratio), (500.0, 0.2));
}

#[test]
fn a_tail_may_move_by_a_fifth_or_by_fifty_microseconds() {
    let judge = |alone: u64, beside: u64| {
        let nine = |us| tails(&[[1000; 3].to_vec(), vec![us; 9]].concat());
        Case::Victim(Medium::Net, Behaviour::Stall).judge(&[nine(alone), nine(beside)])[0].clone()
    };
    assert_eq!((judge(10, 60).due, judge(10, 60).ratio), (60.0, 1.0));
    assert_eq!(judge(1000, 1200).ratio, 1.0);
    assert!(judge(1000, 1300).ratio < 1.0);
    let victim = Case::Victim(Medium::Net, Behaviour::Stall);
    assert!(victim.judge(&[tails(&[1; 8]), tails(&[1; 8])]).is_empty(), "nine windows or none");
}

#[test]
fn ceilings_are_met_and_floors_may_be_exceeded() {
    let per_window = (RATE / 1000.0 / 100.0) as u64;
    let found = Case::Floor.judge(&[steady(&[2 * per_window, 1])]);
    assert!(found[0].ratio > 1.9, "{found:?}");
    let mut load = steady(&[2 * per_window, 500, 9]);
    load.op_bytes[1] = 4096;
    let found = Case::Ceiling.judge(&[load]);
    assert!(found[0].ratio < 0.51 && found[1].ratio == 1.0, "{found:?}");
}

#[test]
fn names_are_different_and_a_trace_has_every_vm() {
    let mut names: Vec<String> = all().iter().map(Case::name).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), all().len());
    let trace = Case::Weights(Medium::Net).trace(&[steady(&[1, 2, 4])]).unwrap();
    assert_eq!((trace.vms.len(), trace.vms[0].2.len(), trace.step_ms), (3, 65, 20));
    assert!((trace.vms[2].2[7] - 4.0 / 7.0).abs() < 1e-9);
}
