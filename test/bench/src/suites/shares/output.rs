//! Output of a run: its files.

use std::path::{Path, PathBuf};

use crate::harness::error::BenchError;
use crate::harness::output::write_run;
use crate::harness::report::{self, Context};
use crate::harness::results::Results;
use crate::harness::svg;
use crate::harness::table::floor_text;

use super::{Round, plot};

/// Writes `bench-shares.json` (the published format), `bench-shares-rounds.json` (every round), two
/// plots and `bench-shares.html` into `folder`, making it if needed. Returns what was written.
pub fn write_all(
    folder: &Path,
    results: &Results,
    rounds: &[Round],
    failed: &[String],
    context: &Context,
) -> Result<Vec<PathBuf>, BenchError> {
    let traces = rounds.last().map_or(&[][..], |r| &r.traces);
    let mut page = report::head(results, context.took_s, &headline(results));
    page.push_str(&report::table(results));
    page.push_str(&report::list("What was lost", losses(results, rounds, failed)));
    page.push_str(&plot::shares(traces));
    page.push_str(&svg::ratios(results));
    page.push_str(&report::list("How it was measured", &context.setup));
    page.push_str(report::TAIL);
    let texts =
        [("-ratios.svg", svg::ratios(results)), (".svg", plot::shares(traces)), (".html", page)];
    write_run(folder, "bench-shares", results, &rounds, &texts)
}

fn headline(results: &Results) -> String {
    let missed = results.rows.iter().filter(|r| r.missed()).count();
    let all = results.rows.len();
    format!("{} of {all} floors reached.", all - missed)
}

/// Floors missed, cases that failed, and how many loads were disturbed.
pub fn losses(results: &Results, rounds: &[Round], failed: &[String]) -> Vec<String> {
    let missed = results.rows.iter().filter(|r| r.missed()).map(|r| {
        let floor = floor_text(r.target.unwrap_or_default());
        format!("{}: {:.3} of {}, floor {floor}", r.case, r.ratio, r.peer.name)
    });
    let mut out: Vec<String> = missed.chain(failed.iter().cloned()).collect();
    let counted = rounds.iter().filter(|r| r.round > 0);
    let disturbed: usize = counted.map(|r| r.disturbed.len()).sum();
    if disturbed > 0 {
        out.push(format!(
            "{disturbed} loads were disturbed: a busy thread waited for its CPU or a hypervisor had it, \
             or a ring ran dry"
        ));
    }
    out
}
