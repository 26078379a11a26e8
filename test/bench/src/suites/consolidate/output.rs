//! Rows out of rounds, in the published format, with plot and page.

use std::path::{Path, PathBuf};

use super::{Round, Sample};
use crate::harness::error::BenchError;
use crate::harness::output::write_run;
use crate::harness::paired::{About, NONE, judged_row_of};
use crate::harness::report::{self, Context, FOREIGN_LIMIT};
use crate::harness::results::{Results, Row, Stand};
use crate::harness::stats::Better;
use crate::harness::svg;

/// Name of the fleet with vhost-net.
pub const VHOST: &str = "qemu-vhost";

/// One value of a sample.
struct Value {
    name: &'static str,
    unit: &'static str,
    better: Better,
    of: fn(&Sample) -> f64,
    how: &'static str,
}

const fn rate(name: &'static str, of: fn(&Sample) -> f64, how: &'static str) -> Value {
    Value { name, unit: "1/s", better: Better::Higher, of, how }
}

const fn time(name: &'static str, of: fn(&Sample) -> f64, how: &'static str) -> Value {
    Value { name, unit: "µs", better: Better::Lower, of, how }
}

const fn cpu(name: &'static str, of: fn(&Sample) -> f64, how: &'static str) -> Value {
    Value { name, unit: "cores", better: Better::Lower, of, how }
}

const RR: &str = "2 VMs, TCP round trips of 1 byte";
const DISK: &str = "2 VMs, random reads of 4 KiB, O_DIRECT, depth 1";
const IDLE: &str = "2 VMs, a TCP round trip every 20 ms";

const VALUES: [Value; 13] = [
    rate("rr", |s| s.values.rr_per_s, RR),
    time("rr_p50", |s| s.values.rr_p50_us, RR),
    time("rr_p99", |s| s.values.rr_p99_us, RR),
    Value {
        name: "stream",
        unit: "Gbit/s",
        better: Better::Higher,
        of: |s| s.values.stream_gbit_s,
        how: "2 VMs, one TCP stream",
    },
    rate("disk", |s| s.values.disk_per_s, DISK),
    time("disk_p50", |s| s.values.disk_p50_us, DISK),
    time("disk_p99", |s| s.values.disk_p99_us, DISK),
    time("idle_p50", |s| s.values.idle_p50_us, IDLE),
    time("idle_p99", |s| s.values.idle_p99_us, IDLE),
    cpu("cpu_back_end", |s| s.cpu.back_end, "the daemon; QEMU’s main loops and disk threads"),
    cpu(
        "cpu_with_main_loops",
        |s| s.cpu.with_main_loops,
        "the daemon and QEMU’s main loops, which pass interrupts on where there is no KVM; \
         QEMU’s main loops and disk threads",
    ),
    Value {
        name: "cpu_share",
        unit: "of all",
        better: Better::Lower,
        of: |s| s.cpu.back_end / s.cpu.all,
        how: "cpu_back_end over cpu_all: what the guests cannot have",
    },
    cpu("cpu_all", |s| s.cpu.all, "eight QEMU processes with their guests, and the daemon"),
];

/// Medians over the rounds, against each peer; round 0 does not count.
pub fn rows(rounds: &[Round]) -> Result<Vec<Row>, BenchError> {
    let counted = rounds.iter().filter(|r| r.round > 0);
    let peer: Vec<(&Sample, &Sample)> = counted.clone().map(|r| (&r.ours, &r.peer)).collect();
    let vhost: Vec<(&Sample, &Sample)> =
        counted.filter_map(|r| Some((&r.ours, r.vhost.as_ref()?))).collect();
    let mut rows = Vec::new();
    for value in &VALUES {
        rows.push(row(value, "qemu-threads", &peer)?);
        if !vhost.is_empty() {
            rows.push(row(value, VHOST, &vhost)?);
        }
    }
    Ok(rows)
}

/// The row against one peer, by samples of ours and of that.
fn row(value: &Value, peer: &str, rounds: &[(&Sample, &Sample)]) -> Result<Row, BenchError> {
    let side = |sample: &Sample| ((value.of)(sample), None);
    let pairs: Vec<_> = rounds.iter().map(|(ours, peer)| (side(ours), side(peer))).collect();
    let about = About {
        case: value.name.into(),
        ours: "one-sidecore",
        peer,
        unit: value.unit,
        better: value.better,
        goal: NONE,
        mode: value.how.into(),
    };
    judged_row_of(about, &pairs).ok_or_else(|| BenchError::NoRounds { case: value.name.into() })
}

/// Rounds in which strangers used the machine, a sentence each.
pub fn disturbed(rounds: &[Round]) -> Vec<String> {
    let sides = rounds.iter().filter(|r| r.round > 0).flat_map(|r| {
        let vhost = r.vhost.as_ref().map(|vhost| ("vhost-net", r.round, vhost.cpu.foreign));
        let two =
            [("Millrace", r.round, r.ours.cpu.foreign), ("QEMU", r.round, r.peer.cpu.foreign)];
        two.into_iter().chain(vhost)
    });
    sides
        .filter(|(.., foreign)| *foreign > FOREIGN_LIMIT)
        .map(|(side, round, foreign)| {
            format!("round {round}, {side}: strangers used {:.0} % of the machine", foreign * 100.0)
        })
        .collect()
}

/// Writes `bench-consolidate.json` (the published format), `bench-consolidate-rounds.json`, a plot
/// and `bench-consolidate.html` into `folder`, making it if needed. Returns what was written.
pub fn write_all(
    folder: &Path,
    results: &Results,
    rounds: &[Round],
    context: &Context,
) -> Result<Vec<PathBuf>, BenchError> {
    let plot = svg::ratios(results);
    let headline = format!(
        "Eight VMs on one sidecore against QEMU’s main loops and disk threads: ahead in {} of {} \
         values, behind in {}.",
        results.count(Stand::Ahead),
        results.rows.len(),
        results.count(Stand::Behind)
    );
    let mut page = report::head(results, context.took_s, &headline);
    page.push_str(&report::table(results));
    page.push_str(&plot);
    page.push_str(&report::list("How it was measured", &context.setup));
    page.push_str(&report::list("What was disturbed", disturbed(rounds)));
    page.push_str(report::TAIL);
    let texts = [(".svg", plot), (".html", page)];
    write_run(folder, "bench-consolidate", results, &rounds, &texts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::samples;
    use crate::suites::consolidate::Cpu;
    use crate::suites::consolidate::load::Values;

    fn sample(scale: f64, foreign: f64) -> Sample {
        let values = Values {
            rr_per_s: 1000.0 * scale,
            rr_p50_us: 800.0,
            rr_p99_us: 3000.0 / scale,
            stream_gbit_s: 1.5,
            disk_per_s: 4000.0,
            disk_p50_us: 200.0,
            disk_p99_us: 900.0,
            idle_p50_us: 1000.0,
            idle_p99_us: 5000.0,
        };
        let cpu = Cpu { back_end: 0.25, with_main_loops: 0.4, all: 1.9, foreign };
        Sample { values, cpu }
    }

    fn rounds() -> Vec<Round> {
        let round = |round, scale| Round {
            round,
            ours: sample(scale, 0.0),
            peer: sample(1.0, if round == 2 { 0.3 } else { 0.1 }),
            vhost: None,
        };
        vec![round(0, 50.0), round(1, 2.0), round(2, 1.5), round(3, 3.0)]
    }

    fn results(rounds: &[Round]) -> Result<Results, BenchError> {
        Ok(Results { rows: rows(rounds)?, ..samples::results() })
    }

    #[test]
    fn ratios_are_turned_and_the_first_round_is_left_out() {
        let got = results(&rounds()).unwrap();
        assert_eq!(got.rows.len(), VALUES.len());
        let of = |name: &str| got.rows.iter().find(|r| r.case == name).unwrap();
        let rr = of("rr");
        assert_eq!((rr.ratio, rr.ratio_min, rr.ratio_max, rr.rounds), (2.0, 1.5, 3.0, 3));
        assert_eq!((rr.ours.value, rr.peer.value), (2000.0, 1000.0));
        assert_eq!((rr.ratio_interval, rr.stand()), (Some((1.5, 3.0)), Some(Stand::Ahead)));
        let p99 = of("rr_p99");
        assert_eq!((p99.ratio, p99.ours.value, p99.better), (2.0, 1500.0, Better::Lower));
        assert!(results(&rounds()[..1]).is_err(), "no round counts");
    }

    #[test]
    fn a_third_fleet_has_rows_of_its_own() {
        let mut all = rounds();
        for round in &mut all {
            round.vhost = Some(sample(4.0, if round.round == 3 { 0.2 } else { 0.0 }));
        }
        let got = rows(&all).unwrap();
        assert_eq!(got.len(), 2 * VALUES.len());
        let of = |peer: &str| got.iter().find(|r| r.case == "rr" && r.peer.name == peer).unwrap();
        assert_eq!((of("qemu-threads").ratio, of("qemu-vhost").ratio), (2.0, 0.5));
        assert_eq!(of("qemu-vhost").peer.value, 4000.0);
        assert_eq!(disturbed(&all)[1], "round 3, vhost-net: strangers used 20 % of the machine");
    }

    #[test]
    fn strangers_are_told() {
        assert_eq!(disturbed(&rounds()), ["round 2, QEMU: strangers used 30 % of the machine"]);
    }

    #[test]
    fn a_run_leaves_four_files() {
        let dir = tempfile::tempdir().unwrap();
        let got = results(&rounds()).unwrap();
        let written =
            write_all(&dir.path().join("deep"), &got, &rounds(), &Context::default()).unwrap();
        assert_eq!(Results::read(&written[0]).unwrap(), got);
        let read: Vec<Round> =
            serde_json::from_slice(&std::fs::read(&written[1]).unwrap()).unwrap();
        assert_eq!(read, rounds());
        assert!(written.iter().all(|p| std::fs::metadata(p).unwrap().len() > 1));
    }
}
