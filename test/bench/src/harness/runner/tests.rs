use std::sync::{Arc, Mutex};

use super::*;

type Log = Arc<Mutex<Vec<String>>>;

/// A case whose values are written down beforehand: ours, then the peer's, then that with vhost-net
/// where it takes part, round after round, whichever is run first.
struct Fake {
    spec: Spec,
    values: Vec<f64>,
    /// How often each side ran.
    runs: [usize; 3],
    log: Log,
}

impl Case for Fake {
    fn spec(&self) -> &Spec {
        &self.spec
    }

    fn run(&mut self, side: Side, _: Window) -> Result<Rate, BenchError> {
        self.log.lock().unwrap().push(format!("{} {}", self.spec.name, side.name()));
        let runs = &mut self.runs[side as usize];
        let sides = order(self.spec.vhost, 0).len();
        let value = self.values.get(*runs * sides + side as usize).copied();
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
        vhost: false,
        mode: String::new(),
        latency: false,
        settle: Duration::from_millis(1),
    }
}

fn plan(rounds: u32) -> Plan {
    Plan::fixed(rounds, Duration::from_millis(1))
}

fn run(cases: Vec<(Spec, Vec<f64>)>, rounds: u32) -> (Outcome, Vec<String>) {
    run_plan(cases, plan(rounds))
}

fn run_plan(cases: Vec<(Spec, Vec<f64>)>, plan: Plan) -> (Outcome, Vec<String>) {
    let log = Log::default();
    let fake = |(spec, values): (Spec, Vec<f64>)| -> Box<dyn Case> {
        Box::new(Fake { spec, values, runs: [0; 3], log: log.clone() })
    };
    let mut cases: Vec<Box<dyn Case>> = cases.into_iter().map(fake).collect();
    let mut quiet = Progress::to(Box::new(std::io::sink()), false);
    let outcome = compare(&mut cases, &NoBed, plan, &mut quiet);
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
fn a_third_side_takes_turns_and_has_a_row_of_its_own_without_a_floor() {
    let spec = Spec { vhost: true, ..spec("x", Better::Higher, Some(1.5)) };
    let values = [[9.0, 9.0, 9.0], [200.0, 100.0, 250.0], [300.0, 150.0, 300.0]];
    let (outcome, log) = run(vec![(spec.clone(), values.concat())], 2);
    let rounds: Vec<_> = log.chunks(3).collect();
    assert_eq!(rounds[0], ["x ours", "x peer", "x tap-vhost"]);
    assert_eq!(rounds[1], ["x peer", "x tap-vhost", "x ours"]);
    assert_eq!(rounds[2], ["x tap-vhost", "x ours", "x peer"]);
    let [tap, vhost] = &outcome.rows[..] else { panic!("two rows: {:?}", outcome.rows) };
    assert_eq!((tap.peer.name.as_str(), tap.ratio, tap.target), ("tap-bridge", 2.0, Some(1.5)));
    assert_eq!((vhost.peer.name.as_str(), vhost.target, vhost.aim), (VHOST, None, None));
    assert_eq!((vhost.case.as_str(), vhost.peer.value, vhost.ratio), ("x", 275.0, 0.9));
    assert!(!vhost.missed() && vhost.ratio_interval.is_some());
    let kept = outcome.rounds[0].rounds[1];
    assert_eq!(kept.vhost.map(|vhost| vhost.value), Some(250.0));
}

#[test]
fn a_case_ends_early_where_its_rows_are_clear() {
    let case =
        |name, target, ours: f64| (spec(name, Better::Higher, target), [ours, 100.0].repeat(6));
    let cases = vec![
        case("ahead", None, 110.0),
        case("behind", Some(1.0), 90.0),
        case("near", None, 104.0),
        case("near its floor", Some(1.1), 112.0),
    ];
    let (outcome, _) = run_plan(cases, Plan { least_rounds: 2, ..plan(5) });
    let rounds: Vec<u32> = outcome.rows.iter().map(|row| row.rounds).collect();
    assert_eq!(rounds, [2, 2, 5, 5]);
    let vhost = Spec { vhost: true, ..spec("x", Better::Higher, None) };
    let near = [200.0, 100.0, 199.0].repeat(6);
    let (outcome, _) = run_plan(vec![(vhost, near)], Plan { least_rounds: 2, ..plan(5) });
    assert_eq!(outcome.rows[0].rounds, 5, "each row must be clear");
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
    let only_first = [Round { round: 0, ours: sample, peer: sample, vhost: None }];
    let e = rows(&spec("x", Better::Higher, None), &only_first).unwrap_err();
    assert_eq!(e.to_string(), "x: no complete round");
}

#[test]
fn a_host_without_vhost_net_is_told_in_one_sentence() {
    let text = vhost_text(VHOST, &Err("open /dev/vhost-net: No such file".into()));
    assert_eq!(
        text,
        "Not compared: vhost-net, which this host does not have (open /dev/vhost-net: No such file)."
    );
    assert!(vhost_text(VHOST, &Ok(())).starts_with("Peer tap-vhost: QEMU’s virtio-net"));
}
