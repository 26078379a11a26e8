//! Output of a run: its files.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use super::meter::PARTS;
use super::plot::{self, cpu_of};
use super::{Cache, Measured, Mode, Setup};
use crate::harness::error::BenchError;
use crate::harness::output::write_run;
use crate::harness::repeat::Failure;
use crate::harness::report::{self, Context, FOREIGN_LIMIT};
use crate::harness::results::Results;
use crate::harness::stats::spread;
use crate::harness::steal_time::STEAL_LIMIT;
use crate::harness::svg;
use crate::harness::table::{floor_text, number, size_text};

/// Writes `bench-pipes.json` (the published format), `bench-pipes-rounds.json` (every load), the
/// paper's figures and `bench-pipes.html` into `folder`, making it if needed. Returns what was
/// written.
pub fn write_all(
    folder: &Path,
    setup: &Setup,
    results: &Results,
    measured: &Measured,
    context: &Context,
) -> Result<Vec<PathBuf>, BenchError> {
    let mut plots = Vec::new();
    if !setup.busy.is_empty() {
        plots.push(("-throughput.svg".to_owned(), plot::throughput(setup, measured)));
    }
    for busy in ends(&setup.busy) {
        plots.push((format!("-cpu-{busy}.svg"), plot::cpu(measured, busy)));
    }
    if !setup.servers.is_empty() {
        plots.push(("-servers.svg".to_owned(), plot::servers(setup, measured)));
    }
    let page = page(setup, results, measured, context, &plots);
    plots.push((".html".into(), page));
    write_run(folder, "bench-pipes", results, measured, &plots)
}

/// The smallest and the largest.
fn ends(busy: &[usize]) -> Vec<usize> {
    let mut ends: Vec<_> =
        busy.iter().min().into_iter().chain(busy.iter().max()).copied().collect();
    ends.dedup();
    ends
}

fn page(
    setup: &Setup,
    results: &Results,
    measured: &Measured,
    context: &Context,
    plots: &[(String, String)],
) -> String {
    let floors = results.rows.iter().filter(|r| r.target.is_some()).count();
    let missed = results.rows.iter().filter(|r| r.missed()).count();
    let headline = format!(
        "Pipes against sendfile and read-write in the guest: {} of {floors} floors reached.",
        floors - missed
    );
    let mut page = report::head(results, context.took_s, &headline);
    page.push_str(&report::table(results));
    plots.iter().for_each(|(_, plot)| page.push_str(plot));
    page.push_str(&components(setup, measured));
    page.push_str(&report::list("What was lost", losses(results, measured)));
    page.push_str(&svg::ratios(results));
    page.push_str(&report::list("How it was measured", &context.setup));
    page.push_str(report::TAIL);
    page
}

/// Figure 4 in numbers, with the client and the whole machine.
fn components(setup: &Setup, measured: &Measured) -> String {
    let mut out = String::from(
        "<h2>CPU time by component, µs per MB</h2>\n<div class=\"scroll\"><table><tr>",
    );
    let heads = ["neighbours", "cache", "mode"].into_iter().chain(PARTS);
    for head in heads.chain(["sum", "client", "whole machine"]) {
        let _ = write!(out, "<th>{}</th>", svg::escape(head));
    }
    out.push_str("</tr>\n");
    let all = [Mode::ReadWrite, Mode::Sendfile, Mode::Pipe, Mode::HostSendfile];
    for &busy in &setup.busy {
        for cache in Cache::ALL {
            for mode in all {
                let Some(cpu) = cpu_of(measured, busy, cache, mode) else { continue };
                let _ = write!(
                    out,
                    "<tr><td>{busy}</td><td>{}</td><td>{}</td>",
                    cache.name(),
                    mode.name()
                );
                // A busy neighbour makes the whole machine busy.
                let machine = (busy == 0).then_some(cpu.machine);
                let values = cpu.parts().into_iter().chain([cpu.total(), cpu.client]).map(Some);
                for value in values.chain([machine]) {
                    let text = value.map_or("–".into(), number);
                    let _ = write!(out, "<td class=\"n\">{text}</td>");
                }
                out.push_str("</tr>\n");
            }
        }
    }
    out.push_str("</table></div>\n");
    out
}

/// Floors missed, loads that failed or were disturbed, and how much of the servers' bytes were
/// piped.
pub fn losses(results: &Results, measured: &Measured) -> Vec<String> {
    let missed = results.rows.iter().filter(|r| r.missed()).map(|r| {
        let floor = floor_text(r.target.unwrap_or_default());
        format!("{}: {:.2}× of {}, floor {floor}", r.case, r.ratio, r.peer.name)
    });
    let mut out: Vec<String> = missed.collect();
    out.extend(measured.failed.iter().map(Failure::text));
    out.extend(disturbed(measured));
    out.extend(piped(measured));
    if !measured.threshold.is_empty() {
        out.push(format!("the agent: {}", measured.threshold));
    }
    out
}

/// How many loads a hypervisor or strangers disturbed.
fn disturbed(measured: &Measured) -> Vec<String> {
    let files = measured.files.iter().filter(|l| l.round > 0).map(|l| l.sample);
    let servers = measured.servers.iter().filter(|l| l.round > 0).map(|l| l.sample);
    let all: Vec<_> = files.chain(servers).collect();
    let causes = [
        (
            "a hypervisor took",
            "a CPU",
            STEAL_LIMIT,
            all.iter().filter(|s| s.stolen > STEAL_LIMIT).count(),
        ),
        (
            "strangers used",
            "the machine",
            FOREIGN_LIMIT,
            all.iter().filter(|s| s.foreign > FOREIGN_LIMIT).count(),
        ),
    ];
    let told = causes.into_iter().filter(|(.., count)| *count > 0);
    told.map(|(who, what, limit, count)| {
        format!(
            "{who} more than {:.0} % of {what} in {count} of {} loads",
            limit * 100.0,
            all.len()
        )
    })
    .collect()
}

/// A sentence for each server, with the smallest median over its files that were piped at all.
fn piped(measured: &Measured) -> Vec<String> {
    let mut out = Vec::new();
    let with_shim = || measured.servers.iter().filter(|l| l.round > 0 && l.shim);
    let mut cases: Vec<_> = with_shim().map(|l| (l.server, l.size_bytes)).collect();
    cases.sort_unstable_by_key(|(server, size_bytes)| (server.name(), *size_bytes));
    cases.dedup();
    for case in cases {
        let shares = with_shim().filter(|l| (l.server, l.size_bytes) == case).map(|l| l.piped);
        let Some(share) = spread(&shares.collect::<Vec<_>>()) else { continue };
        if share.min < 0.999 {
            let (name, size) = (case.0.name(), size_text(case.1));
            out.push(format!(
                "{name}, files of {size}: pipes moved {:.0} % of the bytes (least {:.0} %)",
                share.median * 100.0,
                share.min * 100.0
            ));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::samples;
    use crate::suites::pipes::rows;
    use crate::suites::pipes::testing::{measured, setup};

    #[test]
    fn a_run_leaves_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let (setup, measured) = (setup(), measured());
        let rows = rows::rows(&setup, &measured);
        let results = Results { rows, ..samples::results() };
        let folder = dir.path().join("deep");
        let written = write_all(&folder, &setup, &results, &measured, &Context::default()).unwrap();
        let names: Vec<_> =
            written.iter().map(|p| p.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(
            names,
            [
                "bench-pipes.json",
                "bench-pipes-rounds.json",
                "bench-pipes-throughput.svg",
                "bench-pipes-cpu-0.svg",
                "bench-pipes-cpu-3.svg",
                "bench-pipes-servers.svg",
                "bench-pipes.html",
            ]
        );
        assert_eq!(Results::read(&written[0]).unwrap(), results);
        let read: Measured = serde_json::from_slice(&std::fs::read(&written[1]).unwrap()).unwrap();
        assert_eq!(read, measured);
        let page = std::fs::read_to_string(&written[6]).unwrap();
        assert!(page.contains("7 of 7 floors reached") && page.contains("<td>host-sendfile</td>"));
    }

    #[test]
    fn what_was_lost_is_told() {
        let (setup, mut measured) = (setup(), measured());
        for load in measured.files.iter_mut().filter(|l| l.mode == Mode::Pipe && l.busy == 3) {
            load.sample.mb_per_s = 300.0;
            load.sample.stolen = 0.5;
        }
        for load in measured.servers.iter_mut().filter(|l| l.size_bytes == 4096) {
            load.piped = 0.0;
        }
        let rows = rows::rows(&setup, &measured);
        let told = losses(&Results { rows, ..samples::results() }, &measured);
        assert_eq!(
            told,
            [
                "file_cold_3: 1.50× of sendfile, floor 3.0×",
                "a hypervisor took more than 3 % of a CPU in 4 of 62 loads",
                "nginx, files of 4k: pipes moved 0 % of the bytes (least 0 %)",
            ]
        );
    }
}
