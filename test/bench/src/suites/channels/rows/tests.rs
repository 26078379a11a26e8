use super::*;
use crate::harness::results::CpuPerOp;
use crate::suites::channels::testing::{measured, setup};

fn one<'a>(rows: &'a [Row], case: &str, ours: &str, peer: &str) -> &'a Row {
    let mut found =
        rows.iter().filter(|r| r.case == case && r.ours.name == ours && r.peer.name == peer);
    let row = found.next().unwrap_or_else(|| panic!("no row {case} {ours} {peer}"));
    assert!(found.next().is_none(), "two rows {case} {ours} {peer}");
    row
}

#[test]
fn ratios_are_the_rounds_own_and_above_one_is_better() {
    let rows = measured().rows(&setup());
    let row = one(&rows, "tcp_rr_64", "channel-poll", "tap-bridge");
    // The machine gets faster from round to round; the ratio stays.
    assert_eq!((row.ratio, row.ratio_min, row.ratio_max, row.rounds), (3.0, 3.0, 3.0, 3));
    // Rounds 1 to 3: the first is thrown away.
    assert_eq!((row.ours.value, row.peer.value), (9000.0, 3000.0));
    assert_eq!(row.host_cpu_us_per_op, Some(CpuPerOp { ours: 200.0, peer: 600.0 }));
    let row = one(&rows, "tcp_rr_64_p50", "channel-poll", "tap-bridge");
    assert_eq!((row.ratio, row.better, row.host_cpu_us_per_op), (3.0, Better::Lower, None));
    assert_eq!(one(&rows, "tcp_rr_64_p99", "channel", "tap-bridge").ours.value, 333.33);
    let row = one(&rows, "udp_rr_60000", "channel", "ovs-normal");
    assert_eq!((row.ratio, row.target), (4.0, None));
    assert_eq!(one(&rows, "tcp_stream_4k", "channel", "loopback").ours.unit, "MB/s");
}

#[test]
fn floors_are_the_issues() {
    let rows = measured().rows(&setup());
    let floors: Vec<_> = rows
        .iter()
        .filter_map(|r| {
            Some((r.case.as_str(), r.ours.name.as_str(), r.peer.name.as_str(), r.target?))
        })
        .collect();
    assert_eq!(
        floors,
        [
            ("tcp_rr_64", "channel-poll", "tap-bridge", 2.0),
            ("tcp_rr_64", "channel-busy", "tap-bridge", 2.5),
            ("udp_rr_64", "channel-poll", "tap-bridge", 2.0),
            ("udp_rr_64", "channel-busy", "tap-bridge", 2.5),
            ("tcp_stream_best", "channel-poll", "loopback", 1.0),
            ("udp_stream_best", "channel-poll", "loopback", 1.0),
            ("redis_get_1", "channel-poll", "tap-bridge", 1.5),
        ]
    );
}

#[test]
fn the_best_size_is_our_own() {
    let rows = measured().rows(&setup());
    let row = one(&rows, "tcp_stream_best", "channel", "loopback");
    // 16 KiB carry four times as much as 4 KiB, the largest three times.
    assert_eq!((row.ours.value, row.ratio), (24_000.0, 1.0));
    assert!(row.mode.as_deref().unwrap().starts_with("messages of 16384 bytes, 1 vCPU each"));
}

#[test]
fn what_the_hook_adds_is_told_in_nanoseconds() {
    let measured = measured();
    assert_eq!(hook_ns(&measured), [100.0; 3]);
    let rows = measured.rows(&setup());
    let row = one(&rows, "hook_udp_64", "hook", "no-hook");
    assert_eq!((row.ours.value, row.peer.value, row.better), (5102.0, 5002.0, Better::Lower));
    assert!(row.ratio < 1.0);
    let mode = row.mode.as_deref().unwrap();
    assert_eq!(mode, "one of 1000000 datagrams to nobody; the hook adds 100 ns (100 to 100)");
    assert_eq!(one(&rows, "others_tcp_rr_64", "hook", "no-hook").ratio, 1.0);
}

#[test]
fn programs_have_throughput_and_latency() {
    let rows = measured().rows(&setup());
    let row = one(&rows, "redis_get_1", "channel-poll", "tap-bridge");
    assert_eq!((row.ratio, row.missed()), (3.0, false));
    let row = one(&rows, "redis_get_1_latency", "channel", "tap-bridge");
    assert_eq!((row.ratio, row.ours.value, row.better), (2.0, 500.0, Better::Lower));
    let row = one(&rows, "redis_get_1_own_work", "loopback", "tap-bridge");
    assert_eq!((row.ratio, row.ours.value, row.better), (1.5, 600.0, Better::Lower));
}

#[test]
fn rounds_without_both_sides_do_not_count_and_failures_are_missing() {
    let mut measured = measured();
    let case = Case::new(Test::TcpRr, 64);
    let lost = |l: &Load| l.case == case && l.way == Route::OvsNormal && l.round != 2;
    measured.loads.retain(|l| !lost(l));
    measured.loads.retain(|l| l.way != Route::Switch);
    measured.fail("tcp_rr_64", "ovs-normal", "round 1: gone".into());
    measured.fail("tcp_rr_64", "ovs-normal", "round 3: gone".into());
    measured.fail("tcp_rr_64", "switch", "round 1: slow".into());
    measured.failed[2].repeated = true;
    let rows = measured.rows(&setup());
    assert_eq!(one(&rows, "tcp_rr_64", "channel", "ovs-normal").rounds, 1);
    assert!(rows.iter().all(|r| r.peer.name != "switch"));
    let missing = measured.missing(&rows);
    let told: Vec<_> = missing.iter().map(|m| (m.name.as_str(), m.why.as_str())).collect();
    assert_eq!(told, [("ovs-normal", "round 1: gone")]);
}

#[test]
fn rows_fit_the_schema() {
    let rows = measured().rows(&setup());
    assert!(rows.len() > 200, "{}", rows.len());
    let results = crate::harness::results::Results { rows, ..crate::harness::samples::results() };
    let schema: serde_json::Value =
        serde_json::from_str(include_str!("../../../../schema/results.schema.json")).unwrap();
    let checker = jsonschema::validator_for(&schema).unwrap();
    let value = serde_json::to_value(&results).unwrap();
    assert_eq!(checker.iter_errors(&value).next().map(|e| e.to_string()), None);
}

#[test]
fn rounds_with_near_and_with_far_cpus_have_rows_of_their_own() {
    let mut measured = measured();
    let find = |measured: &Measured, case: &str| {
        let rows = measured.rows(&setup());
        let mut found = rows.into_iter().filter(|r| r.case == format!("udp_stream_best{case}"));
        found.find(|r| r.ours.name == "channel-poll")
    };
    let [near, far] = ["_near", "_far"].map(|end| find(&measured, end).unwrap());
    assert_eq!([near.rounds, far.rounds, find(&measured, "").unwrap().rounds], [2, 1, 3]);
    assert_eq!((near.target, far.target), (None, None));
    assert!(
        near.mode
            .unwrap()
            .contains("the 2 of 3 rounds in which a cache line took no more than 200 ns")
    );
    let mut set = |apart_ns| {
        measured.loads.iter_mut().for_each(|l| l.sample.apart_ns = apart_ns);
        ["_near", "_far"].map(|end| find(&measured, end).map_or(0, |row| row.rounds))
    };
    assert_eq!(set(Some([60.0, 60.0])), [3, 0]);
    assert_eq!(set(Some([300.0, 300.0])), [0, 3]);
    // They were moved meanwhile, or nobody knows.
    assert_eq!(set(Some([60.0, 300.0])), [0, 0]);
    assert_eq!(set(None), [0, 0]);
}
