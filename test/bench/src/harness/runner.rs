//! Runs cases in interleaved rounds and makes rows of them.
//!
//! A round is both sides within seconds of each other: ours first in even rounds, the peer first in
//! odd ones, so that a machine that gets slower or faster favours nobody. The first round of a case
//! is thrown away: it fills caches, translates guest code and lets TCP windows grow. CPU time is
//! read only in the middle of a load, so that neither its start nor its end counts.

use std::sync::mpsc;
use std::time::Duration;

use lab::Accelerator;
use serde::{Deserialize, Serialize};

use crate::harness::cpu::{Accounts, Usage};
use crate::harness::error::BenchError;
use crate::harness::host::Thread;
use crate::harness::paired::{About, DIGITS, Goal, judged_row_of};
use crate::harness::progress::Progress;
use crate::harness::repeat::order_for_round;
use crate::harness::results::Row;
use crate::harness::spinner::Spinners;
use crate::harness::stats::{Better, ratio, significant};
use crate::harness::table::quantity;

/// Time a guest program may take beyond its load: starting under emulation, and the report.
pub const GRACE: Duration = Duration::from_secs(30);

/// How many times longer than the others the round is that is thrown away: emulated guests got
/// faster for six seconds of round trips, and not both sides alike.
const WARM_UP_TIMES: u32 = 6;
/// The same under KVM, where no code is translated: caches fill and TCP windows grow.
const WARM_UP_TIMES_KVM: u32 = 2;

/// How many loads of a case may be put on again after they failed: an emulated guest that loses an
/// interrupt must not end the comparison, one that fails again and again must. Each is told.
const MAX_REPEATS: usize = 2;

/// How far from 1, and from its floor, the interval of a row lies whose case may end early.
///
/// An interval is looked at after every round then, and chance has as many tries: a twentieth
/// leaves it few.
const CLEAR_BY: f64 = 1.05;

/// Side that is being measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Millrace.
    Ours,
    /// Peer that Millrace is compared with.
    Peer,
    /// The same peer with its network in the host's kernel, where the host has vhost-net.
    Vhost,
}

/// Name in results of the peer whose network the host's kernel serves.
pub const VHOST: &str = "tap-vhost";

/// Sentence of a report on that peer, under its name there, or on why there is none.
pub fn vhost_text(name: &str, vhost: &Result<(), String>) -> String {
    match vhost {
        Ok(()) => format!(
            "Peer {name}: QEMU’s virtio-net on TAP, served by the host’s kernel (vhost-net), on a \
             bridge of its own. It has rows of its own and no floor; its threads’ CPU time is the \
             side’s."
        ),
        Err(reason) => {
            format!("Not compared: vhost-net, which this host does not have ({reason}).")
        }
    }
}

impl Side {
    /// For messages.
    pub fn name(self) -> &'static str {
        match self {
            Side::Ours => "ours",
            Side::Peer => "peer",
            Side::Vhost => VHOST,
        }
    }
}

/// Description of a case.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Case name in results.
    pub name: &'static str,
    /// Unit of the measured value.
    pub unit: &'static str,
    /// Name of one operation, for CPU per operation.
    pub operation: &'static str,
    /// Direction of the value.
    pub better: Better,
    /// Floor.
    pub target: Option<f64>,
    /// Aim.
    pub aim: Option<f64>,
    /// Name of Millrace's side in results.
    pub ours: &'static str,
    /// The peer's name in results.
    pub peer: &'static str,
    /// Whether [`Side::Vhost`] takes part.
    pub vhost: bool,
    /// How both sides are set up.
    pub mode: String,
    /// Whether host CPUs must be kept awake.
    pub latency: bool,
    /// From the start of the guest's program until its load is steady.
    pub settle: Duration,
}

/// How long one load runs.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// From the start until CPU time counts, as the case's [`Spec`] says.
    pub settle: Duration,
    /// How long it counts.
    pub length: Duration,
}

/// Report of a load.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// The value of the row, in its unit.
    pub value: f64,
    /// Operations per second.
    pub ops_per_s: f64,
    /// Fraction of what was sent that did not arrive, where the case can lose something.
    pub lost: Option<f64>,
}

/// One comparison. `run` puts the load on one side for `settle` + `length`.
pub trait Case {
    /// Description of the case.
    fn spec(&self) -> &Spec;
    /// Runs the load once.
    fn run(&mut self, side: Side, window: Window) -> Result<Rate, BenchError>;
}

/// Test bed in which both sides live.
pub trait Bed {
    /// Processes whose CPU time belongs to `side`.
    fn accounts(&self, side: Side) -> Accounts;
    /// Accelerator of all guests.
    fn accelerator(&self) -> Accelerator;
    /// Replaces the guests of `side`, whatever state they are in.
    fn renew(&self, side: Side) -> Result<(), BenchError>;
}

/// How much to measure.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Rounds that count, at most; one more is run first and thrown away.
    pub rounds: u32,
    /// Rounds that count, at least: a case whose rows are clear then has no more.
    pub least_rounds: u32,
    /// How long each load counts.
    pub length: Duration,
}

impl Plan {
    /// The same number of rounds for each case, whatever they show.
    pub fn fixed(rounds: u32, length: Duration) -> Plan {
        Plan { rounds, least_rounds: rounds, length }
    }
}

/// One side of one round, as measured.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// In the case's unit.
    pub value: f64,
    /// CPU of the side's processes, microseconds per operation.
    pub cpu_us_per_op: f64,
    /// CPU of the whole machine but idle time and spinners, microseconds per operation.
    pub machine_cpu_us_per_op: f64,
    /// Fraction of the machine that strangers used.
    pub foreign: f64,
    /// Fraction lost, where the case can lose something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<f64>,
}

/// Both sides of one round.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// From 1; 0 is the one thrown away.
    pub round: u32,
    /// Millrace.
    pub ours: Sample,
    /// The peer.
    pub peer: Sample,
    /// The peer with vhost-net, where it took part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost: Option<Sample>,
}

impl Round {
    /// The sample of a row's peer.
    pub fn of_peer(&self, name: &str) -> Option<&Sample> {
        if name == VHOST { self.vhost.as_ref() } else { Some(&self.peer) }
    }

    /// Largest fraction of the machine that strangers used.
    pub fn foreign(&self) -> f64 {
        let vhost = self.vhost.map_or(0.0, |vhost| vhost.foreign);
        self.ours.foreign.max(self.peer.foreign).max(vhost)
    }
}

/// Everything measured for a case, for those who doubt the row.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CaseRounds {
    /// Case name.
    pub case: String,
    /// Name of one operation.
    pub operation: String,
    /// All rounds, the thrown-away one included.
    pub rounds: Vec<Round>,
    /// Loads that failed and were put on again: which, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub repeated: Vec<String>,
    /// Why the case has no row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

/// Rows and what they were made of.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outcome {
    /// Rows of the cases that completed: one for each peer.
    pub rows: Vec<Row>,
    /// One entry per case.
    pub rounds: Vec<CaseRounds>,
}

impl Outcome {
    /// Names of cases below their floor.
    pub fn missed(&self) -> Vec<&str> {
        self.rows.iter().filter(|r| r.missed()).map(|r| r.case.as_str()).collect()
    }

    /// Cases that did not complete, with the reason.
    pub fn failed(&self) -> Vec<(&str, &str)> {
        self.rounds.iter().filter_map(|c| Some((c.case.as_str(), c.failed.as_deref()?))).collect()
    }
}

/// Runs all cases. A case that fails is noted and the others go on.
pub fn compare(
    cases: &mut [Box<dyn Case + '_>],
    bed: &dyn Bed,
    plan: Plan,
    progress: &mut Progress,
) -> Outcome {
    let mut outcome = Outcome::default();
    let most_loads = |spec: &Spec| order(spec.vhost, 0).len() * (plan.rounds as usize + 1);
    let loads = cases.iter().map(|case| most_loads(case.spec())).sum();
    let (mut done, mut end) = (0, 0);
    for case in cases {
        let spec = case.spec().clone();
        end += most_loads(&spec);
        let (mut rounds, mut repeated) = (Vec::new(), Vec::new());
        let mut watch = |event: Event| match event {
            Event::Load { round, side } => {
                progress.bar(done, loads, &format!("{} round {round} {}", spec.name, side.name()));
                done += 1;
            }
            Event::Again(why) => {
                progress.step(&format!("{} again: {why}", spec.name));
                // The rest is the guest's console.
                repeated.extend(why.lines().next().map(Into::into));
            }
            Event::Round(round) => progress.step(&round_line(&spec, round)),
        };
        let ran = run_case(case.as_mut(), bed, plan, &mut rounds, &mut watch);
        // Also where it had fewer rounds.
        done = end;
        let made = ran.and_then(|()| rows(&spec, &rounds));
        let failed = match made {
            Ok(rows) => {
                outcome.rows.extend(rows);
                None
            }
            Err(e) => {
                progress.step(&format!("{} failed: {e}", spec.name));
                Some(e.to_string())
            }
        };
        outcome.rounds.push(CaseRounds {
            case: spec.name.into(),
            operation: spec.operation.into(),
            rounds,
            repeated,
            failed,
        });
    }
    progress.end_bar();
    outcome
}

fn round_line(spec: &Spec, r: &Round) -> String {
    let ratio = ratio(r.ours.value, r.peer.value, spec.better).unwrap_or(f64::NAN);
    let what = if r.round == 0 { "warm-up".into() } else { format!("round {}", r.round) };
    let vhost = r.vhost.map(|vhost| format!("; {VHOST} {}", quantity(vhost.value, spec.unit)));
    format!(
        "{} {what}: {} against {}, {ratio:.2}×{}",
        spec.name,
        quantity(r.ours.value, spec.unit),
        quantity(r.peer.value, spec.unit),
        vhost.unwrap_or_default()
    )
}

/// Event while a case runs.
enum Event<'a> {
    /// A load begins.
    Load { round: u32, side: Side },
    /// Load that failed, for this reason, and begins again.
    Again(String),
    /// A round is complete.
    Round(&'a Round),
}

fn run_case(
    case: &mut dyn Case,
    bed: &dyn Bed,
    plan: Plan,
    rounds: &mut Vec<Round>,
    watch: &mut dyn FnMut(Event),
) -> Result<(), BenchError> {
    let spec = case.spec().clone();
    let spinners = spec.latency.then(Spinners::start).transpose()?;
    let tids = spinners.as_ref().map(|s| s.tids().to_vec()).unwrap_or_default();
    let mut loads = Loads { case, bed, plan, spec, tids, repeats: 0, watch };
    for round in 0..=plan.rounds {
        let mut samples = [None; 3];
        for side in order(loads.spec.vhost, round) {
            samples[side as usize] = Some(loads.load(round, side)?);
        }
        let [Some(ours), Some(peer), vhost] = samples else {
            return Err(BenchError::NoRounds { case: loads.spec.name.into() });
        };
        let round = Round { round, ours, peer, vhost };
        (loads.watch)(Event::Round(&round));
        rounds.push(round);
        if round.round >= plan.least_rounds && rows(&loads.spec, rounds)?.iter().all(is_clear) {
            break;
        }
    }
    Ok(())
}

/// Whether more rounds would hardly change what a row says.
fn is_clear(row: &Row) -> bool {
    let is_far = |line: f64| {
        let far = |(low, high)| low > line * CLEAR_BY || high < line / CLEAR_BY;
        row.ratio_interval.is_some_and(far)
    };
    is_far(1.0) && row.target.is_none_or(is_far)
}

/// Sides of a round, in their order. Of two the other one begins in each round; of three each one
/// begins, and comes after each other one.
pub fn order(vhost: bool, round: u32) -> Vec<Side> {
    match (vhost, round.is_multiple_of(2)) {
        (true, _) => order_for_round(&[Side::Ours, Side::Peer, Side::Vhost], round),
        (_, true) => vec![Side::Ours, Side::Peer],
        (_, false) => vec![Side::Peer, Side::Ours],
    }
}

/// The loads of one case.
struct Loads<'a> {
    case: &'a mut dyn Case,
    bed: &'a dyn Bed,
    plan: Plan,
    spec: Spec,
    /// Threads that keep CPUs awake.
    tids: Vec<Thread>,
    /// How many loads were put on again.
    repeats: usize,
    watch: &'a mut dyn FnMut(Event),
}

impl Loads<'_> {
    /// One side of one round; put on again, on new guests, where it fails.
    fn load(&mut self, round: u32, side: Side) -> Result<Sample, BenchError> {
        (self.watch)(Event::Load { round, side });
        loop {
            match self.once(round, side) {
                Err(e) if self.repeats < MAX_REPEATS => {
                    self.repeats += 1;
                    (self.watch)(Event::Again(format!("round {round}, {}: {e}", side.name())));
                    self.bed.renew(side)?;
                    // New guests are as cold as in the first round. A failure shows again below.
                    let _ = self.case.run(side, self.window(0));
                }
                done => return done,
            }
        }
    }

    fn once(&mut self, round: u32, side: Side) -> Result<Sample, BenchError> {
        let (bed, window) = (self.bed, self.window(round));
        let accounts = Accounts { spinners: self.tids.clone(), ..bed.accounts(side) };
        let (rate, usage) = metered(window, &accounts, || self.case.run(side, window))?;
        sample(&self.spec, round, side, rate, usage)
    }

    fn window(&self, round: u32) -> Window {
        let times = match (round, self.bed.accelerator()) {
            (0, Accelerator::Tcg) => WARM_UP_TIMES,
            (0, Accelerator::Kvm) => WARM_UP_TIMES_KVM,
            _ => 1,
        };
        Window { settle: self.spec.settle, length: self.plan.length * times }
    }
}

/// Runs a load and reads CPU time from `settle` after its start for `length`, or to its end if
/// that comes first.
pub(crate) fn metered<T>(
    window: Window,
    accounts: &Accounts,
    load: impl FnOnce() -> Result<T, BenchError>,
) -> Result<(T, Usage), BenchError> {
    let (over, ended) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let meter = scope.spawn(move || -> Result<Usage, BenchError> {
            // Either way the answer is the same: take the counters now.
            let _ = ended.recv_timeout(window.settle);
            let first = accounts.snapshot()?;
            let _ = ended.recv_timeout(window.length);
            Ok(accounts.between(&first, &accounts.snapshot()?))
        });
        let done = load();
        drop(over);
        let usage = meter.join().map_err(|_| BenchError::lab("CPU meter", "it panicked"))?;
        // A load that failed says more than counters of a process that is gone.
        Ok((done?, usage?))
    })
}

fn sample(
    spec: &Spec,
    round: u32,
    side: Side,
    rate: Rate,
    usage: Usage,
) -> Result<Sample, BenchError> {
    for value in [rate.value, rate.ops_per_s] {
        if !value.is_finite() || value <= 0.0 {
            let (case, side) = (spec.name.to_string(), side.name());
            return Err(BenchError::Value { case, round, side, value });
        }
    }
    let per_op = |share: f64| significant(share * 1e6 / rate.ops_per_s, DIGITS);
    Ok(Sample {
        value: significant(rate.value, DIGITS),
        cpu_us_per_op: per_op(usage.side),
        machine_cpu_us_per_op: per_op(usage.machine),
        foreign: significant(usage.foreign, 3),
        lost: rate.lost.map(|l| significant(l, 3)),
    })
}

/// Makes the rows of a case from its rounds, one for each peer; round 0 does not count. Floor and
/// aim are those against the peer without vhost-net.
pub fn rows(spec: &Spec, rounds: &[Round]) -> Result<Vec<Row>, BenchError> {
    let mut rows = vec![row(spec, spec.peer, rounds)?];
    if spec.vhost {
        rows.push(Row { target: None, aim: None, ..row(spec, VHOST, rounds)? });
    }
    Ok(rows)
}

/// The row against one peer.
fn row(spec: &Spec, peer: &'static str, rounds: &[Round]) -> Result<Row, BenchError> {
    let side = |sample: &Sample| (sample.value, Some(sample.cpu_us_per_op));
    let counted = rounds.iter().filter(|r| r.round > 0);
    let pairs: Vec<_> =
        counted.filter_map(|r| Some((side(&r.ours), side(r.of_peer(peer)?)))).collect();
    let about = About {
        case: spec.name.into(),
        ours: spec.ours,
        peer,
        unit: spec.unit,
        better: spec.better,
        goal: Goal { target: spec.target, aim: spec.aim },
        mode: spec.mode.clone(),
    };
    judged_row_of(about, &pairs).ok_or_else(|| BenchError::NoRounds { case: spec.name.into() })
}

#[cfg(test)]
mod tests;
