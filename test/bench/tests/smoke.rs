//! The whole way from cases to files, with guests that only pretend.

use std::time::Duration;

use bench::harness::cpu::Accounts;
use bench::harness::error::BenchError;
use bench::harness::progress::Progress;
use bench::harness::report::Context;
use bench::harness::results::{Machine, Results};
use bench::harness::runner::{Bed, Plan, Side, compare};
use bench::suites::demo::cases::{self, Modes, Shell};
use bench::suites::demo::output::write_all;

/// Ours is twice the peer, in every program's own words; sequential reads fail on the peer.
struct Pretend;

impl Shell for Pretend {
    fn run(&self, side: Side, script: &str, _: Duration) -> Result<String, BenchError> {
        let speed = if side == Side::Ours { 2000 } else { 1000 };
        if script.contains("--rw=read ") && side == Side::Peer {
            return Err(BenchError::lab("guest d", "Kernel panic - not syncing"));
        }
        Ok(match script.split_whitespace().nth(1) {
            Some("fio") => format!(
                r#"{{"jobs":[{{"error":0,"read":{{"iops":{speed},"bw_bytes":{speed}}},
                   "write":{{"iops":0}}}}]}}"#
            ),
            _ => format!(r#"{{"rate":{speed},"count":10,"sent":20,"lost":10,"mbit_s":{speed}}}"#),
        })
    }
}

impl Bed for Pretend {
    fn accounts(&self, _: Side) -> Accounts {
        Accounts { side: vec![std::process::id()], cores: 1, ..Default::default() }
    }

    fn accelerator(&self) -> lab::Accelerator {
        lab::Accelerator::Kvm
    }

    fn renew(&self, _: Side) -> Result<(), BenchError> {
        Ok(())
    }
}

#[test]
fn all_cases_run_and_the_files_tell_the_same() {
    let modes = Modes {
        vhost: false,
        net: "1 vCPU".into(),
        disk: "raw".into(),
        server: [10, 0, 0, 2].into(),
        disk_path: "/dev/vda".into(),
        disk_len_bytes: 1 << 20,
    };
    let mut all: Vec<_> =
        cases::NAMES.iter().map(|n| cases::make(n, &Pretend, &modes).unwrap()).collect();
    let plan = Plan::fixed(2, Duration::from_millis(1));
    let mut quiet = Progress::to(Box::new(std::io::sink()), false);
    let outcome = compare(&mut all, &Pretend, plan, &mut quiet);

    let dir = tempfile::tempdir().unwrap();
    let machine = Machine { cpu: "c".into(), cores: 1, kernel: "k".into(), guests: None };
    let context = Context::default();
    write_all(dir.path(), machine, "abc".into(), &outcome, &context).unwrap();
    let read = Results::read(&dir.path().join("demo.json")).unwrap();
    let rows: Vec<(&str, f64, u32)> =
        read.rows.iter().map(|r| (r.case.as_str(), r.ratio, r.rounds)).collect();
    let complete = ["tcp_rr", "udp_rr", "tcp_stream", "udp_small", "disk_rand_4k"];
    assert_eq!(rows, complete.map(|name| (name, 2.0, 2)));
    let page = std::fs::read_to_string(dir.path().join("report.html")).unwrap();
    for part in [
        "4 of 4 floors reached; of 5 comparisons 5 ahead of the peer, 0 level with it and 0 \
         behind it. 1 did not complete.",
        "disk_seq_1m failed: guest d: Kernel panic - not syncing",
        "udp_small: packets sent and not received, median: Millrace 50.0 %, peer 50.0 %",
    ] {
        assert!(page.contains(part), "the report lacks {part}");
    }
}
