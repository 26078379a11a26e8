//! All back ends of a case in each round, one after the other, each started for its turn.

use serde::{Deserialize, Serialize};

use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::stats::significant;
use crate::harness::steal_time::STEAL_LIMIT;
use crate::harness::table::quantity;

use crate::harness::usage::DELAY_LIMIT;

use super::bed::Bed;
use super::case::Case;
use super::front::{self, Measure};
use super::reading::Reading;
use super::trial::{Backend, Running, Trial};
use super::window::{Plan, Window};
use crate::harness::process::find;

/// Failures of a back end in a case after which it is left out of the rest.
const MAX_FAILURES: usize = 2;
/// How often a load that the hypervisor cut into is run again.
const MAX_REPEATS: usize = 2;
/// Loads of a case for each repeat in it, at least: a long spell must not cost hours.
const LOADS_PER_REPEAT: usize = 2;
/// Significant digits in result files.
const DIGITS: i32 = 5;

/// One back end in one round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Name of the back end.
    pub back_end: String,
    /// Reading of the front end.
    pub reading: Reading,
    /// CPU of the back end's processes, microseconds per operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_us_per_op: Option<f64>,
    /// Part of the time that the back end's busy thread was ready and did not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub back_delay: Option<f64>,
    /// The same of the front end.
    pub front_delay: f64,
    /// Part of the time that a hypervisor took from one of their CPUs.
    #[serde(default)]
    pub stolen: f64,
    /// Whether one of the three is above 3 %.
    pub disturbed: bool,
    /// How often the load was run before, and cut into by the hypervisor; its results were dropped.
    #[serde(default)]
    pub repeats: usize,
}

/// All back ends, once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// From 1; 0 is the one thrown away.
    pub round: u32,
    /// In the order in which they ran.
    pub samples: Vec<Sample>,
}

/// A load that failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// Name of the back end.
    pub back_end: String,
    /// Round.
    pub round: u32,
    /// Why.
    pub why: String,
}

/// Back end's part in a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// Name of the back end.
    pub back_end: String,
    /// Whether it is there for orientation only.
    pub reference: bool,
    /// Why it did not take part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub absent: Option<String>,
}

/// Everything measured for a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CaseRuns {
    /// Name of the case.
    pub case: String,
    /// Back ends that the case concerns, ours first.
    pub parts: Vec<Part>,
    /// All rounds, the thrown-away one included.
    pub rounds: Vec<Round>,
    /// Loads that failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<Failure>,
}

impl CaseRuns {
    /// How often a back end failed.
    pub fn failures_of(&self, back_end: &str) -> usize {
        self.failures.iter().filter(|f| f.back_end == back_end).count()
    }
}

/// Runs all cases on all back ends that they concern. What fails is noted and the rest goes on.
pub fn compare(
    cases: &[Case],
    back_ends: &[&dyn Backend],
    bed: &mut Bed,
    plan: Plan,
    progress: &mut Progress,
) -> Vec<CaseRuns> {
    let mut all = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        progress.bar(i, cases.len(), &case.name());
        bed.prepare(case);
        let mut load = |b: &dyn Backend| once(b, bed, case, plan.window);
        all.push(run_case(case, back_ends, plan, &mut load, progress));
    }
    progress.end_bar();
    all
}

/// Back ends that can take part in a case.
fn parts(case: &Case, back_ends: &[&dyn Backend]) -> Vec<Part> {
    let part = |b: &&dyn Backend| {
        let installed = b.needs().starts_with('/') && std::path::Path::new(b.needs()).is_file()
            || find(b.needs()).is_some();
        let absent = match b.refuses(case) {
            Some("") => return None,
            Some(why) => Some(why.to_string()),
            None if !installed => Some("not installed".into()),
            None => None,
        };
        Some(Part { back_end: b.name().into(), reference: b.is_reference(), absent })
    };
    back_ends.iter().filter_map(part).collect()
}

type Once<'a> = &'a mut dyn FnMut(&dyn Backend) -> Result<Measure, BenchError>;

fn run_case(
    case: &Case,
    back_ends: &[&dyn Backend],
    plan: Plan,
    load: Once,
    progress: &mut Progress,
) -> CaseRuns {
    let parts = parts(case, back_ends);
    let takes_part =
        |b: &&&dyn Backend| parts.iter().any(|p| p.back_end == b.name() && p.absent.is_none());
    let present: Vec<&dyn Backend> = back_ends.iter().filter(takes_part).copied().collect();
    let mut runs = CaseRuns { case: case.name(), parts, rounds: Vec::new(), failures: Vec::new() };
    let mut repeats_left = (plan.rounds as usize * present.len()).div_ceil(LOADS_PER_REPEAT);
    for round in 0..=plan.rounds {
        let mut samples = Vec::new();
        for turn in 0..present.len() {
            let back_end = present[place(round as usize, turn, present.len())];
            if runs.failures_of(back_end.name()) >= MAX_FAILURES {
                continue;
            }
            let may_repeat = if round > 0 { &mut repeats_left } else { &mut 0 };
            match uncut(load, back_end, may_repeat) {
                Ok((measure, repeats)) => {
                    samples.push(Sample { repeats, ..sample(back_end.name(), &measure) });
                }
                Err(e) => {
                    progress.step(&format!("{} {}: {e}", runs.case, back_end.name()));
                    let (back_end, why) = (back_end.name().into(), e.to_string());
                    runs.failures.push(Failure { back_end, round, why });
                }
            }
        }
        let round = Round { round, samples };
        progress.step(&line(case, &round));
        runs.rounds.push(round);
    }
    runs
}

/// Runs a load, and again when the hypervisor cut into it. That alone is the reason, whoever ran
/// and whatever came out: a choice by results would be no measurement. The last one stands.
fn uncut(
    load: Once,
    back_end: &dyn Backend,
    repeats_left: &mut usize,
) -> Result<(Measure, usize), BenchError> {
    let mut repeats = 0;
    loop {
        let measure = load(back_end)?;
        let is_enough = repeats == MAX_REPEATS || *repeats_left == 0;
        // What came back wrong is told, whenever it did.
        if is_enough || measure.stolen <= STEAL_LIMIT || measure.reading.errors > 0.0 {
            return Ok((measure, repeats));
        }
        *repeats_left -= 1;
        repeats += 1;
    }
}

/// Index of the one of `count` that runs in a turn of a round. The first moves on by one each
/// round; after each lap the direction changes, so that nobody always comes after the same one:
/// what a load leaves behind (a warm CPU, a disk's spent credit) is left to each of both
/// neighbours.
fn place(round: usize, turn: usize, count: usize) -> usize {
    let is_back = (round / count) % 2 == 1;
    let step = if is_back { count - turn } else { turn };
    (round + step) % count
}

/// One back end from its start to its end.
fn once(
    back_end: &dyn Backend,
    bed: &Bed,
    case: &Case,
    window: Window,
) -> Result<Measure, BenchError> {
    let folder = bed.folder()?;
    let window = window.of(case);
    let trial = Trial { bed, case, window, folder: &folder };
    let Running { mut processes, load } = back_end.start(&trial)?;
    let cpus = [bed.back_cpu, bed.front_cpu];
    let measure = front::run(load, &mut processes, cpus, window, &folder);
    drop(processes);
    if measure.is_ok() {
        // Logs of failures are kept until the end. The run folder goes then in any case.
        let _ = std::fs::remove_dir_all(&folder);
    }
    measure
}

fn sample(back_end: &str, measure: &Measure) -> Sample {
    let r = measure.reading;
    let front_delay = r.cpu_delay_ns / 1e9 / r.seconds.max(1e-9);
    let back_delay = measure.usage.map(|u| u.delay);
    let digits = |v: f64| significant(v, DIGITS);
    let cpu_us_per_op = measure.usage.map(|u| u.cpu * 1e6 / r.ops_per_s).or(r.cpu_us_per_op);
    Sample {
        back_end: back_end.into(),
        reading: r,
        cpu_us_per_op: cpu_us_per_op.map(digits),
        back_delay: back_delay.map(digits),
        front_delay: digits(front_delay),
        stolen: digits(measure.stolen),
        disturbed: front_delay.max(back_delay.unwrap_or(0.0)) > DELAY_LIMIT
            || measure.stolen > STEAL_LIMIT,
        repeats: 0,
    }
}

/// One line of progress: everybody's first value.
fn line(case: &Case, round: &Round) -> String {
    let what = if round.round == 0 { "warm-up".into() } else { format!("round {}", round.round) };
    let metric = &case.metrics()[0];
    let mut values: Vec<String> = Vec::new();
    for s in &round.samples {
        let value = (metric.of)(&s.reading).map_or("?".into(), |v| quantity(v, metric.unit));
        let mark = if s.disturbed { " (disturbed)" } else { "" };
        values.push(format!("{} {value}{mark}", s.back_end));
    }
    format!("{} {what}: {}", case.name(), values.join(", "))
}

#[cfg(test)]
mod tests;
