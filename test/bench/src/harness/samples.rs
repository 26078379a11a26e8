//! Made-up results for this crate's own tests.

use crate::harness::results::{CpuPerOp, Machine, Measured, Results, Row};
use crate::harness::stats::Better;

fn row(case: &str, values: (f64, f64), ratio: (f64, f64, f64), cpu: (f64, f64)) -> Row {
    let side = |name: &str, value| Measured { name: name.into(), value, unit: "1/s".into() };
    Row {
        case: case.into(),
        ours: side("switch", values.0),
        peer: side("tap-bridge", values.1),
        better: Better::Higher,
        ratio: ratio.0,
        ratio_min: ratio.1,
        ratio_max: ratio.2,
        ratio_interval: None,
        rounds: 5,
        host_cpu_us_per_op: Some(CpuPerOp { ours: cpu.0, peer: cpu.1 }),
        target: Some(1.0),
        aim: Some(1.3),
        front: None,
        mode: Some("1 vCPU each".into()),
    }
}

/// Four rows: one well above its floor, one just, one below, one without.
pub fn results() -> Results {
    let mut rows = vec![
        row("tcp_rr", (2600.0, 1450.0), (1.79, 1.4, 2.2), (310.0, 560.0)),
        row("udp_rr", (3010.0, 2990.0), (1.01, 0.92, 1.11), (260.0, 255.0)),
        row("tcp_stream", (1.1, 1.2), (0.92, 0.85, 0.99), (910.0, 820.0)),
        row("udp_small", (51234.0, 40000.0), (1.28, 1.2, 1.33), (17.2, 22.4)),
    ];
    rows[2].ours.unit = "Gbit/s".into();
    rows[2].peer.unit = "Gbit/s".into();
    rows[2].target = Some(1.2);
    rows[3].target = None;
    rows[3].aim = None;
    rows[3].mode = None;
    Results {
        machine: Machine {
            cpu: "Test <CPU> & Co".into(),
            cores: 2,
            kernel: "6.1.0".into(),
            guests: None,
        },
        commit: "0123abc".into(),
        rows,
        missing: Vec::new(),
    }
}

/// The same rows with intervals: ahead, level, behind, ahead.
pub fn with_intervals() -> Results {
    let mut results = results();
    let intervals = [(1.6, 1.9), (0.95, 1.08), (0.88, 0.97), (1.2, 1.3)];
    for (row, interval) in results.rows.iter_mut().zip(intervals) {
        row.ratio_interval = Some(interval);
    }
    results
}
