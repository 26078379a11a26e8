use super::*;
use crate::suites::modules::testing::{measured, setup};

fn of<'a>(rows: &'a [Row], case: &str, ours: &str, peer: &str) -> &'a Row {
    let wanted = |r: &&Row| r.case == case && r.ours.name == ours && r.peer.name == peer;
    rows.iter().find(wanted).unwrap_or_else(|| panic!("{case} {ours} {peer}"))
}

#[test]
fn medians_of_the_rounds_own_ratios_without_the_first() {
    let rows = measured().rows(&setup());
    let row = of(&rows, "insert_1k_durable", "module-batched", "guest-virtio-blk");
    assert_eq!((row.ours.value, row.peer.value, row.rounds), (2000.0, 4000.0, 2));
    assert_eq!((row.ratio, row.target, row.aim), (2.0, Some(2.0), Some(2.0)));
    assert_eq!(row.better, Better::Lower);
    let cpu = row.host_cpu_us_per_op.unwrap();
    assert_eq!((cpu.ours, cpu.peer), (200.0, 310.0));
    let row = of(&rows, "insert_1k_durable", "module", "guest-virtio-blk");
    assert_eq!((row.ratio, row.target), (0.66667, None));
}

#[test]
fn floors_are_those_of_the_issue_and_nowhere_else() {
    let rows = measured().rows(&setup());
    let floors = |ours| {
        let of = rows.iter().filter(move |r| r.ours.name == ours);
        of.filter_map(|r| Some((r.case.as_str(), r.target?))).collect::<Vec<_>>()
    };
    assert_eq!(floors("module-ring"), floors("module-batched"));
    assert!(floors("module").is_empty());
    let floors = floors("module-batched");
    assert_eq!(
        floors,
        [
            ("insert_1k_durable", 2.0),
            ("insert_16k_durable", 1.4286),
            ("insert_128k_durable", 1.25),
            ("insert_1k_relaxed", 1.0),
            ("insert_16k_relaxed", 1.0),
            ("insert_128k_relaxed", 1.0),
            ("insert_1k_relaxed_rows16", 1.0),
            ("insert_16k_relaxed_rows16", 1.0),
            ("insert_128k_relaxed_rows16", 1.0),
        ]
    );
}

#[test]
fn costs_stand_beside_and_events_are_of_one_round() {
    let rows = measured().rows(&setup());
    let row = |case| of(&rows, case, "module-batched", "guest-ide");
    assert_eq!((row("exits_1k_durable").ratio, row("exits_1k_durable").rounds), (4.0, 1));
    let host = row("host_cpu_128k_relaxed");
    assert_eq!((host.ours.value, host.peer.value), (100.0, 130.0));
    assert_eq!(row("guest_cpu_1k_durable").ratio, 4.0);
    assert_eq!(row("calls_16k_durable").ours.unit, "1/row");
    assert!(!rows.iter().any(|r| r.case == "exits_1k_durable_rows16"));
}

#[test]
fn what_nobody_can_do_is_not_missing_and_what_failed_is() {
    let mut measured = measured();
    let rows = measured.rows(&setup());
    assert!(!rows.iter().any(|r| r.peer.name == "myisam" && r.case.contains("durable")));
    assert!(measured.missing(&rows).is_empty());
    let failure =
        crate::harness::repeat::Failure::new("insert_2k_durable", "aria", "round 1: dead".into());
    measured.failed.push(failure);
    assert_eq!(measured.missing(&rows).len(), 1);
}
