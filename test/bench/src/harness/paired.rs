//! Rows from rounds in which both sides were measured: medians over the rounds.

use crate::harness::results::{CpuPerOp, Measured, Row};
use crate::harness::stats::{Better, ratio, significant, spread};

/// Significant digits in result files.
const DIGITS: i32 = 5;

/// Goal of a ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Goal {
    pub target: Option<f64>,
    pub aim: Option<f64>,
}

/// Nothing is wanted.
pub(crate) const NONE: Goal = Goal { target: None, aim: None };

/// One row's texts, and how it reads.
pub(crate) struct About {
    pub case: String,
    pub ours: &'static str,
    pub peer: &'static str,
    pub unit: &'static str,
    pub better: Better,
    pub goal: Goal,
    pub mode: String,
}

/// One side of one round: the value, and CPU time of one operation where it is to be shown.
pub(crate) type Side = (f64, Option<f64>);

/// The row over those of `rounds` rounds that have both sides, ours first; none without any.
pub(crate) fn row(
    about: About,
    rounds: u32,
    of: impl FnMut(u32) -> Option<(Side, Side)>,
) -> Option<Row> {
    let pairs: Vec<(Side, Side)> = (1..=rounds).filter_map(of).collect();
    let middle =
        |of: &dyn Fn(&(Side, Side)) -> f64| spread(&pairs.iter().map(of).collect::<Vec<f64>>());
    let digits = |v: f64| significant(v, DIGITS);
    let ratios = middle(&|(o, p)| ratio(o.0, p.0, about.better).unwrap_or(f64::NAN))?;
    let value = |name: &str, value: f64| Measured {
        name: name.into(),
        value: digits(value),
        unit: about.unit.into(),
    };
    let cpu = |of: &dyn Fn(&(Side, Side)) -> Option<f64>| {
        Some(digits(middle(&|pair| of(pair).unwrap_or(f64::NAN))?.median))
    };
    let cpus = cpu(&|(o, _)| o.1).zip(cpu(&|(_, p)| p.1));
    Some(Row {
        ours: value(about.ours, middle(&|(o, _)| o.0)?.median),
        peer: value(about.peer, middle(&|(_, p)| p.0)?.median),
        case: about.case,
        better: about.better,
        ratio: digits(ratios.median),
        ratio_min: digits(ratios.min),
        ratio_max: digits(ratios.max),
        ratio_interval: None,
        rounds: pairs.len() as u32,
        host_cpu_us_per_op: cpus.map(|(ours, peer)| CpuPerOp { ours, peer }),
        target: about.goal.target,
        aim: about.goal.aim,
        front: None,
        mode: Some(about.mode),
    })
}
