//! Rows in the published format, one for each case, value and peer.

use crate::harness::paired::{About, row_of};
use crate::harness::results::{Missing, Row};

use super::case::{self, Case, Metric};
use super::front_end::Kind;
use super::rounds::{CaseRuns, Part, Sample};
use super::trial::OURS;

/// All rows, and the comparisons that have none.
pub fn rows(runs: &[CaseRuns], front: Kind) -> (Vec<Row>, Vec<Missing>) {
    let (mut rows, mut missing) = (Vec::new(), Vec::new());
    for run in runs {
        let Some(case) = case::ALL.into_iter().find(|c| c.name() == run.case) else { continue };
        for metric in case.metrics() {
            for peer in run.parts.iter().filter(|p| p.back_end != OURS) {
                rows.extend(
                    row(run, &case, metric, peer).map(|r| Row { front: front.mark(), ..r }),
                );
            }
        }
        missing.extend(run.parts.iter().filter_map(|p| absence(run, p)));
    }
    (rows, missing)
}

/// Why a back end has no row, if it has none.
fn absence(run: &CaseRuns, part: &Part) -> Option<Missing> {
    let failure = || run.failures.iter().rfind(|f| f.back_end == part.back_end);
    let measured = counted(run).any(|r| sample_of(r, &part.back_end).is_some());
    let why = match &part.absent {
        Some(why) => why.clone(),
        None if measured => return None,
        None => format!("failed: {}", failure().map_or("no round", |f| f.why.as_str())),
    };
    Some(Missing { case: run.case.clone(), name: part.back_end.clone(), why })
}

fn counted(run: &CaseRuns) -> impl Iterator<Item = &super::rounds::Round> {
    run.rounds.iter().filter(|r| r.round > 0)
}

fn sample_of<'a>(round: &'a super::rounds::Round, back_end: &str) -> Option<&'a Sample> {
    round.samples.iter().find(|s| s.back_end == back_end)
}

fn row(run: &CaseRuns, case: &Case, metric: &Metric, peer: &Part) -> Option<Row> {
    let side = |round, back_end| {
        let sample = sample_of(round, back_end)?;
        let cpu = sample.cpu_us_per_op.filter(|_| metric.suffix.is_empty());
        Some(((metric.of)(&sample.reading)?, cpu))
    };
    let pairs: Vec<_> =
        counted(run).filter_map(|r| Some((side(r, OURS)?, side(r, &peer.back_end)?))).collect();
    let note = if peer.reference { "; reference: no vhost-user" } else { "" };
    let about = About {
        case: format!("{}{}", run.case, metric.suffix),
        ours: OURS,
        peer: &peer.back_end,
        unit: metric.unit,
        better: metric.better,
        goal: case::goal(case, metric, &peer.back_end, peer.reference),
        mode: format!("{}{note}", case.mode()),
    };
    row_of(about, &pairs)
}

/// Floors that could not be judged though their peer was to take part, and back ends that failed:
/// one sentence each.
pub fn failed(runs: &[CaseRuns], missing: &[Missing]) -> Vec<String> {
    let is_failure = |m: &&Missing| m.why.starts_with("failed: ");
    let mut out: Vec<String> = missing
        .iter()
        .filter(is_failure)
        .map(|m| format!("{} {}: {}", m.case, m.name, m.why))
        .collect();
    // One round lost is told, and the median of the others stands.
    for run in runs.iter().filter(|r| r.failures_of(OURS) == 1) {
        let ours = run.failures.iter().find(|f| f.back_end == OURS);
        out.extend(ours.map(|f| format!("{} {OURS}, round {}: {}", run.case, f.round, f.why)));
    }
    out
}

#[cfg(test)]
mod tests;
