use super::*;
use crate::suites::peers::reading::Reading;
use crate::suites::peers::rounds::{Failure, Round};

fn sample(back_end: &str, ops_per_s: f64) -> Sample {
    Sample {
        back_end: back_end.into(),
        reading: Reading {
            ops_per_s,
            p50_ns: Some(1e9 / ops_per_s),
            p99_ns: Some(2e9 / ops_per_s),
            ..Reading::default()
        },
        cpu_us_per_op: Some(1e6 / ops_per_s),
        back_delay: Some(0.0),
        front_delay: 0.0,
        stolen: 0.0,
        disturbed: false,
        repeats: 0,
    }
}

fn part(back_end: &str, reference: bool, absent: Option<&str>) -> Part {
    Part { back_end: back_end.into(), reference, absent: absent.map(Into::into) }
}

/// Round 0 would spoil every median; the peer lacks a round.
fn runs(case: &str, peer: &str) -> CaseRuns {
    let round = |round, ours: f64, other: Option<f64>| {
        let mut samples = vec![sample("millrace", ours)];
        samples.extend(other.map(|v| sample(peer, v)));
        Round { round, samples }
    };
    CaseRuns {
        case: case.into(),
        parts: vec![
            part("millrace", false, None),
            part(peer, false, None),
            part("vpp", false, Some("not installed")),
        ],
        rounds: vec![
            round(0, 1.0, Some(1e9)),
            round(1, 20e6, Some(10e6)),
            round(2, 30e6, None),
            round(3, 10e6, Some(10e6)),
            round(4, 12e6, Some(8e6)),
        ],
        failures: Vec::new(),
    }
}

#[test]
fn a_row_is_the_median_of_the_rounds_that_have_both() {
    let (rows, missing) = rows(&[runs("flood64_split", "ovs-normal")], Kind::Ours);
    assert_eq!(rows.len(), 1);
    let r = &rows[0];
    assert_eq!((r.case.as_str(), r.peer.name.as_str()), ("flood64_split", "ovs-normal"));
    assert_eq!((r.ratio, r.ratio_min, r.ratio_max, r.rounds), (1.5, 1.0, 2.0, 3));
    assert_eq!((r.ours.value, r.peer.value, r.ours.unit.as_str()), (12.0, 10.0, "Mpps"));
    assert_eq!(r.target, Some(1.0));
    assert_eq!(r.host_cpu_us_per_op.map(|c| c.peer), Some(0.1));
    let vpp =
        Missing { case: "flood64_split".into(), name: "vpp".into(), why: "not installed".into() };
    assert_eq!(missing, [vpp]);
    assert!(failed(&[runs("flood64_split", "x")], &missing).is_empty(), "absent is no failure");
}

#[test]
fn latencies_are_turned_so_that_above_one_is_better() {
    let (rows, _) = rows(&[runs("rr64_split", "testpmd-io")], Kind::Ours);
    let cases: Vec<(&str, f64)> = rows.iter().map(|r| (r.case.as_str(), r.ratio)).collect();
    assert_eq!(cases, [("rr64_split_p50", 1.5), ("rr64_split_p99", 1.5)]);
    assert_eq!(rows[0].ours.unit, "µs");
    assert!(rows[0].host_cpu_us_per_op.is_none());
}

#[test]
fn a_peer_that_never_answered_has_no_row_and_is_told() {
    let mut run = runs("flood64_split", "ovs-normal");
    for round in &mut run.rounds {
        round.samples.retain(|s| s.back_end == "millrace");
    }
    for round in 0..2 {
        let why = format!("hung {round}");
        run.failures.push(Failure { back_end: "ovs-normal".into(), round, why });
    }
    let (rows, missing) = rows(std::slice::from_ref(&run), Kind::Ours);
    assert!(rows.is_empty());
    assert_eq!(missing[0].why, "failed: hung 1");
    assert_eq!(failed(&[run], &missing), ["flood64_split ovs-normal: failed: hung 1"]);
}

#[test]
fn a_round_that_we_lost_is_told_though_the_row_stands() {
    let mut run = runs("flood64_split", "ovs-normal");
    run.failures.push(Failure { back_end: "millrace".into(), round: 2, why: "died".into() });
    assert_eq!(failed(&[run], &[]), ["flood64_split millrace, round 2: died"]);
}

#[test]
fn rows_of_another_front_end_are_marked() {
    let runs = [runs("flood64_split", "ovs-normal")];
    let front = |kind| rows(&runs, kind).0[0].front.clone();
    assert_eq!(front(Kind::Ours), None);
    assert_eq!(front(Kind::VirtioUser).as_deref(), Some("virtio-user"));
}
