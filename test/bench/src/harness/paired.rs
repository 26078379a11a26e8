//! Rows from rounds in which both sides were measured: medians over the rounds.

use crate::harness::results::{CpuPerOp, Measured, Row};
use crate::harness::stats::{Better, interval, ratio, significant, spread};

/// Significant digits in result files: measurements are not better than that.
pub(crate) const DIGITS: i32 = 5;

/// Goal of a ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Goal {
    pub target: Option<f64>,
    pub aim: Option<f64>,
}

/// Nothing is wanted.
pub(crate) const NONE: Goal = Goal { target: None, aim: None };

/// One row's texts, and how it reads.
pub(crate) struct About<'a> {
    pub case: String,
    pub ours: &'a str,
    pub peer: &'a str,
    pub unit: &'a str,
    pub better: Better,
    pub goal: Goal,
    /// How both sides are set up; empty where there is nothing to say.
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
    row_of(about, &(1..=rounds).filter_map(of).collect::<Vec<_>>())
}

/// The row over these rounds; none without any, or with a value that is no number above zero.
pub(crate) fn row_of(about: About, pairs: &[(Side, Side)]) -> Option<Row> {
    let middle =
        |of: &dyn Fn(&(Side, Side)) -> f64| spread(&pairs.iter().map(of).collect::<Vec<f64>>());
    let digits = |v: f64| significant(v, DIGITS);
    let ratios = spread(&ratios(about.better, pairs))?;
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
        mode: (!about.mode.is_empty()).then_some(about.mode),
    })
}

/// The row over these rounds with the interval of its ratio, by which it is judged.
pub(crate) fn judged_row_of(about: About, pairs: &[(Side, Side)]) -> Option<Row> {
    let (low, high) = interval(&ratios(about.better, pairs))?;
    let bounds = (significant(low, DIGITS), significant(high, DIGITS));
    Some(Row { ratio_interval: Some(bounds), ..row_of(about, pairs)? })
}

/// The rounds' own ratios; one that there is not is no number.
fn ratios(better: Better, pairs: &[(Side, Side)]) -> Vec<f64> {
    pairs.iter().map(|(o, p)| ratio(o.0, p.0, better).unwrap_or(f64::NAN)).collect()
}
