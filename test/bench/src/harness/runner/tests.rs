use std::sync::{Arc, Mutex};

use super::*;

type Log = Arc<Mutex<Vec<String>>>;

/// A case whose values are written down beforehand: ours, then the peer's, round after round,
/// whichever is run first.
struct Fake {
    spec: Spec,
    values: Vec<f64>,
    /// How often each side ran.
    runs: [usize; 2],
    log: Log,
}

impl Case for Fake {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn run(&mut self, side: Side, _: Window) -> Result<Rate, BenchError> {
        self.log.lock().unwrap().push(format!("{} {}", self.spec.name, side.name()));
        let runs = &mut self.runs[side as usize];
        let value = self.values.get(*runs * 2 + side as usize).copied();
        let value = value.ok_or_else(|| BenchError::lab("guest a", "panicked"))?;
        *runs += 1;
        Ok(Rate { value, ops_per_s: value * 2.0, lost: None })
    }
}

struct NoBed;

impl Bed for NoBed {
    fn accounts(&self, _: Side) -> Accounts {
        Accounts { side: vec![std::process::id()], cores: 1, ..Default::default() }
    }

    fn accelerator(&self) -> Accelerator {
        Accelerator::Kvm
    }

    fn renew(&self, _: Side) -> Result<(), BenchError> {
        Ok(())
    }
}

pub(crate) fn spec(name: &'static str, better: Better, target: Option<f64>) -> Spec {
    Spec {
        name,
        unit: "1/s",
        operation: "round trip",
        better,
        target,
        aim: None,
        ours: "switch",
        peer: "tap-bridge",
        mode: String::new(),
        latency: false,
        settle: Duration::from_millis(1),
    }
}

fn plan(rounds: u32) -> Plan {
    Plan { rounds, length: Duration::from_millis(1) }
}

fn run(cases: Vec<(Spec, Vec<f64>)>, rounds: u32) -> (Outcome, Vec<String>) {
    let log = Log::default();
    let fake = |(spec, values): (Spec, Vec<f64>)| -> Box<dyn Case> {
        Box::new(Fake { spec, values, runs: [0; 2], log: log.clone() })
    };
    let mut cases: Vec<Box<dyn Case>> = cases.into_iter().map(fake).collect();
    let mut quiet = Progress::to(Box::new(std::io::sink()), false);
    let outcome = compare(&mut cases, &NoBed, plan(rounds), &mut quiet);
    let log = log.lock().unwrap().clone();
    (outcome, log)
}

#[test]
fn rounds_alternate_and_the_first_is_thrown_away() {
    let values = vec![1000.0, 1.0, 200.0, 100.0, 300.0, 100.0, 120.0, 60.0];
    let (outcome, log) = run(vec![(spec("x", Better::Higher, Some(3.5)), values)], 3);
    assert_eq!(log, ["x ours", "x peer", "x peer", "x ours"].repeat(2));
    let row = &outcome.rows[0];
    assert_eq!((row.ratio, row.ratio_min, row.ratio_max, row.rounds), (2.0, 2.0, 3.0, 3));
    // Seven of 27 samples of three draws have the largest in their middle: it is within.
    assert_eq!(row.ratio_interval, Some((2.0, 3.0)));
    assert_eq!((row.ours.value, row.peer.value), (200.0, 100.0));
    assert_eq!(outcome.rounds[0].rounds.len(), 4, "the first is kept in the details");
    assert_eq!(outcome.missed(), ["x"]);
}

#[test]
fn lower_is_better_turns_the_ratio() {
    let values = vec![1.0, 1.0, 10.0, 20.0];
    let (outcome, _) = run(vec![(spec("t", Better::Lower, Some(1.9)), values)], 1);
    assert_eq!(outcome.rows[0].ratio, 2.0);
    assert!(outcome.missed().is_empty());
}

#[test]
fn a_case_that_breaks_does_not_end_the_others() {
    // The peer's every second value from the second on is that of the new guests' warm-up.
    const ZERO: [f64; 12] = [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0];
    let broken = (spec("broken", Better::Higher, None), vec![1.0, 1.0, 1.0]);
    let zero = (spec("zero", Better::Higher, None), ZERO.to_vec());
    let fine = (spec("fine", Better::Higher, None), vec![1.0, 1.0, 1.0, 1.0]);
    let (outcome, _) = run(vec![broken, zero, fine], 1);
    let rows: Vec<&str> = outcome.rows.iter().map(|r| r.case.as_str()).collect();
    assert_eq!(rows, ["fine"]);
    let failed = outcome.failed();
    assert_eq!(failed[0], ("broken", "guest a: panicked"));
    assert_eq!(failed[1].0, "zero");
    assert!(failed[1].1.contains("round 1, peer: measured 0"), "{failed:?}");
    let repeated = |case: usize| outcome.rounds[case].repeated.len();
    assert_eq!((repeated(0), repeated(1), repeated(2)), (MAX_REPEATS, MAX_REPEATS, 0));
}

#[test]
fn a_load_that_fails_once_is_put_on_again_and_told() {
    // The third value of ours is that of the new guests' warm-up.
    let values = vec![1.0, 1.0, 0.0, 1.0, 9.0, 1.0, 3.0, 1.0];
    let (outcome, log) = run(vec![(spec("x", Better::Higher, None), values)], 1);
    assert_eq!(log, ["x ours", "x peer", "x peer", "x ours", "x ours", "x ours"]);
    assert_eq!((outcome.rows[0].ratio, outcome.failed().len()), (3.0, 0));
    let told = &outcome.rounds[0].repeated;
    assert!(told[0].starts_with("round 1, ours: ") && told[0].contains("measured 0"), "{told:?}");
}

#[test]
fn cpu_per_operation_is_time_over_rate() {
    let usage = Usage { side: 0.5, machine: 0.75, foreign: 0.1 };
    let rate = Rate { value: 1.0, ops_per_s: 1000.0, lost: Some(0.25) };
    let s = sample(&spec("x", Better::Higher, None), 1, Side::Ours, rate, usage).unwrap();
    assert_eq!((s.cpu_us_per_op, s.machine_cpu_us_per_op), (500.0, 750.0));
    assert_eq!((s.foreign, s.lost), (0.1, Some(0.25)));
}

#[test]
fn no_counted_round_is_no_row() {
    let sample = Sample {
        value: 1.0,
        cpu_us_per_op: 1.0,
        machine_cpu_us_per_op: 1.0,
        foreign: 0.0,
        lost: None,
    };
    let only_first = [Round { round: 0, ours: sample, peer: sample }];
    let e = row(&spec("x", Better::Higher, None), &only_first).unwrap_err();
    assert_eq!(e.to_string(), "x: no complete round");
}
