//! Output of a run: its files.

use super::meter::PARTS;
use super::plot::{self, cpu_of};
use super::{Cache, Measured, Mode, Setup};
use crate::harness::output::{Page, PageSource};
use crate::harness::repeat::Failure;
use crate::harness::report;
use crate::harness::results::Results;
use crate::harness::stats::spread;
use crate::harness::steal_time::STEAL_LIMIT;
use crate::harness::svg;
use crate::harness::table::size_text;

impl PageSource<Setup> for Measured {
    fn stem(&self, _: &Setup) -> &'static str {
        "bench-pipes"
    }

    /// The paper's figures.
    fn plots(&self, setup: &Setup) -> Vec<(String, String)> {
        let mut plots = Vec::new();
        if !setup.busy.is_empty() {
            plots.push(("-throughput.svg".to_owned(), plot::throughput(setup, self)));
        }
        for busy in ends(&setup.busy) {
            plots.push((format!("-cpu-{busy}.svg"), plot::cpu(self, busy)));
        }
        if !setup.servers.is_empty() {
            plots.push(("-servers.svg".to_owned(), plot::servers(setup, self)));
        }
        plots
    }

    fn page(&self, setup: &Setup, results: &Results, plots: &str) -> Page {
        Page {
            headline: "Pipes against sendfile and read-write in the guest",
            above: [&report::table(results), plots, &components(setup, self)].concat(),
            below: svg::ratios(results),
        }
    }

    /// The last sentences tell how much of the servers' bytes were piped.
    fn losses(&self, results: &Results) -> Vec<String> {
        let mut out = report::below_floors(results, |r| format!("{}:", r.case));
        out.extend(self.failed.iter().map(Failure::text));
        out.extend(disturbed(self));
        out.extend(piped(self));
        if !self.threshold.is_empty() {
            out.push(format!("the agent: {}", self.threshold));
        }
        out
    }
}

/// The smallest and the largest.
fn ends(busy: &[usize]) -> Vec<usize> {
    let mut ends: Vec<_> =
        busy.iter().min().into_iter().chain(busy.iter().max()).copied().collect();
    ends.dedup();
    ends
}

/// Figure 4 in numbers, with the client and the whole machine.
fn components(setup: &Setup, measured: &Measured) -> String {
    let heads = ["neighbours", "cache", "mode"].into_iter().chain(PARTS);
    let heads = heads.chain(["sum", "client", "whole machine"]);
    let mut out = report::numbers_head("CPU time by component, µs per MB", heads);
    for &busy in &setup.busy {
        for cache in Cache::ALL {
            for mode in [Mode::ReadWrite, Mode::Sendfile, Mode::Pipe, Mode::HostSendfile] {
                let Some(cpu) = cpu_of(measured, busy, cache, mode) else { continue };
                // A busy neighbour makes the whole machine busy.
                let machine = (busy == 0).then_some(cpu.machine);
                let values = cpu.parts().into_iter().chain([cpu.total(), cpu.client]).map(Some);
                let texts = [&busy.to_string(), cache.name(), mode.name()];
                out.push_str(&report::numbers_row(&texts, values.chain([machine])));
            }
        }
    }
    out + report::NUMBERS_END
}

/// How many loads a hypervisor or strangers disturbed.
fn disturbed(measured: &Measured) -> impl Iterator<Item = String> {
    let files = measured.files.iter().filter(|l| l.round > 0).map(|l| l.sample);
    let servers = measured.servers.iter().filter(|l| l.round > 0).map(|l| l.sample);
    let (stolen, foreign): (Vec<f64>, Vec<f64>) =
        files.chain(servers).map(|s| (s.stolen, s.foreign)).unzip();
    let stolen = report::above_limit(("a hypervisor took", "a CPU"), STEAL_LIMIT, &stolen);
    stolen.into_iter().chain(report::disturbed(&foreign))
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
    use crate::harness::output::{RowSource, write_and_read};
    use crate::harness::samples;
    use crate::suites::pipes::testing::{measured, setup};

    #[test]
    fn a_run_leaves_its_files() {
        let (ends, page) = write_and_read(&setup(), &measured());
        assert_eq!(ends, ["-throughput.svg", "-cpu-0.svg", "-cpu-3.svg", "-servers.svg", ".html"]);
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
        let rows = measured.rows(&setup);
        let told = measured.losses(&Results { rows, ..samples::results() });
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
