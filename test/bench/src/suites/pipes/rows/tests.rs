use super::*;
use crate::suites::pipes::testing::{measured, setup};

fn of<'a>(rows: &'a [Row], case: &str, peer: &str) -> &'a Row {
    rows.iter().find(|r| r.case == case && r.peer.name == peer).unwrap()
}

#[test]
fn medians_of_the_rounds_own_ratios_without_the_first() {
    let rows = measured().rows(&setup());
    let row = of(&rows, "file_cold_3", "sendfile");
    assert_eq!((row.ours.value, row.peer.value, row.rounds), (800.0, 200.0, 2));
    assert_eq!((row.ratio, row.target, row.aim), (4.0, Some(3.0), Some(4.0)));
    let cpu = of(&rows, "cpu_cold_0", "sendfile");
    assert_eq!((cpu.better, cpu.ratio), (Better::Lower, 4.0));
    assert_eq!((cpu.target, cpu.host_cpu_us_per_op), (Some(1.6667), None));
    assert_eq!(row.host_cpu_us_per_op.unwrap().peer, 4.0 * row.host_cpu_us_per_op.unwrap().ours);
}

#[test]
fn floors_are_those_of_the_issue_and_nowhere_else() {
    let rows = measured().rows(&setup());
    let floors: Vec<_> = rows.iter().filter_map(|r| Some((r.case.as_str(), r.target?))).collect();
    assert_eq!(
        floors,
        [
            ("file_cold_0", 1.0),
            ("file_cold_3", 3.0),
            ("cpu_cold_0", 1.6667),
            ("cpu_cold_3", 1.6667),
            ("nginx_64k_0", 0.95),
            ("nginx_64m_0", 0.95),
            ("nginx_64m_3", 3.0),
        ]
    );
    let reference = of(&rows, "file_warm_0", "host-sendfile");
    assert_eq!((reference.target, reference.aim), (None, Some(0.9)));
}

#[test]
fn cpu_of_a_request_is_that_of_its_bytes() {
    let rows = measured().rows(&setup());
    let row = of(&rows, "nginx_64k_0", "sendfile");
    let cpu = row.host_cpu_us_per_op.unwrap();
    // 6 parts of 100 µs/MB.
    assert!((cpu.ours - 600.0 * 0.065536).abs() < 1e-2, "{cpu:?}");
    assert_eq!(row.unit_and_mode(), ("1/s", "64k a file, 4 connections, 0 busy neighbours"));
}

#[test]
fn what_failed_for_good_is_missing_once() {
    let mut measured = measured();
    let failure = |case: &str, name: &str, repeated| crate::suites::pipes::Failure {
        case: case.into(),
        name: name.into(),
        why: "round 1: dead".into(),
        repeated,
    };
    measured.failed = vec![
        failure("file_cold_0", "pipe", false),
        failure("file_cold_9", "pipe", false),
        failure("file_cold_9", "pipe", false),
        failure("file_cold_8", "pipe", true),
    ];
    let missing = measured.missing(&measured.rows(&setup()));
    assert_eq!(missing.len(), 1, "{missing:?}");
    assert_eq!(
        (missing[0].case.as_str(), missing[0].why.as_str()),
        ("file_cold_9", "round 1: dead")
    );
}

impl Row {
    fn unit_and_mode(&self) -> (&str, &str) {
        (&self.ours.unit, self.mode.as_deref().unwrap_or_default())
    }
}
