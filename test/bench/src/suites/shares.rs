//! Many VMs on one sidecore: does each get what is due to it, whatever the others do?
//!
//! # Theory of operation
//! A [`case::Case`] starts the daemon with some VMs ([`bed`]), each with two network ports and a
//! memory disk, on one sidecore that does not sleep, and drives all of their ports from one thread
//! on another CPU (`frontend many`). It judges what that thread counted in windows, and says what
//! was found and what was due ([`Finding`]). A round is all cases once; the first round is thrown
//! away and medians over the others are published ([`rows`]). A ratio above 1 is better for us;
//! where a value should be met and not exceeded it is the smaller of the two quotients.
//!
//! Bytes are counted as the daemon charges them: frames with their virtio-net header.
//!
//! # Limits
//! - Two CPUs. One thread drives everything, so a victim's latency has turns of the neighbour's
//!   front end in it, a few microseconds; it has a turn after each of those.
//! - A load in which a busy thread waited for its CPU for more than 3 % of the time is told, as in
//!   `peers`. So is one whose rings ran dry in more than 3 % of the turns: its shares say nothing.

pub mod bed;
pub mod case;
pub(crate) mod command;
pub mod output;
pub mod plot;
pub mod rows;

use serde::Serialize;

use crate::harness::error::BenchError;
use crate::harness::progress::Progress;

use bed::{Bed, Load};
use case::Case;

/// One round's answer to one question.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// Row name.
    pub row: String,
    /// Value that was measured.
    pub value: f64,
    /// Value that was due, or allowed.
    pub due: f64,
    /// Above `Question::target` it is fine.
    pub ratio: f64,
}

/// A round.
#[derive(Debug, Serialize)]
pub struct Round {
    /// From 1; 0 is the one thrown away.
    pub round: u32,
    /// Findings of all cases.
    pub findings: Vec<Finding>,
    /// Loads that something disturbed, a sentence each.
    pub disturbed: Vec<String>,
    /// Shares over time, for the plot.
    pub traces: Vec<Trace>,
}

/// How shares moved in a load.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Trace {
    /// Case name.
    pub case: String,
    /// Length of a step in milliseconds.
    pub step_ms: u64,
    /// VM, what is due to it (0 to 1), and its share in each step.
    pub vms: Vec<(String, f64, Vec<f64>)>,
}

/// Runs all cases in rounds. A case that fails is told, and its round has no finding of it.
pub fn run(
    bed: &Bed,
    cases: &[Case],
    rounds: u32,
    progress: &mut Progress,
) -> (Vec<Round>, Vec<String>) {
    let (mut all, mut failed) = (Vec::new(), Vec::new());
    for number in 0..=rounds {
        let mut round = Round {
            round: number,
            findings: Vec::new(),
            disturbed: Vec::new(),
            traces: Vec::new(),
        };
        for (i, case) in cases.iter().enumerate() {
            progress.bar(i, cases.len(), &case.name());
            if let Err(e) = one(bed, case, &mut round) {
                progress.step(&format!("{}: {e}", case.name()));
                failed.push(format!("{}, round {number}: {e}", case.name()));
            }
        }
        progress.end_bar();
        for f in &round.findings {
            let text = format!("{:.2} of {:.2}, ratio {:.3}", f.value, f.due, f.ratio);
            progress.step(&format!("round {number}, {}: {text}", f.row));
        }
        for text in &round.disturbed {
            progress.step(&format!("round {number}, disturbed: {text}"));
        }
        all.push(round);
    }
    (all, failed)
}

fn one(bed: &Bed, case: &Case, round: &mut Round) -> Result<(), BenchError> {
    let mut loads: Vec<Load> = Vec::new();
    for setting in case.settings() {
        let load = bed.run(&setting)?;
        round.disturbed.extend(load.complaint().map(|c| format!("{}: {c}", case.name())));
        loads.push(load);
    }
    round.traces.extend(case.trace(&loads));
    let found = case.judge(&loads);
    if found.is_empty() {
        return Err(BenchError::NoRounds { case: case.name() });
    }
    round.findings.extend(found);
    Ok(())
}
