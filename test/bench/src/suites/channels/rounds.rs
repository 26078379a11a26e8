//! Rounds: each case over each way, in turns.

use std::time::Duration;

use super::bed::Bed;
use super::case::{Case, SETTLE};
use super::counters::{self, Counters};
use super::route::{Route, Sample};
use super::{Load, Measured, Setup, others, programs, with_repeat};
use crate::harness::distance::{Patience, is_far};
use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::repeat::order_for_round;
use crate::harness::runner::{GRACE, Window, metered};
use crate::harness::spinner::Spinners;

/// Boots the guests and measures.
pub fn run(setup: &Setup, progress: &mut Progress) -> Result<Measured, BenchError> {
    // All the time: round trips over a CPU that sleeps in between measure its sleep.
    let spinners = Spinners::start()?;
    let bed = Bed::boot(setup, spinners.tids().to_vec(), progress)?;
    let mut measured = Measured::default();
    if let Some(why) = bed.no_ovs() {
        progress.step(&format!("without {}: {why}", Route::OvsNormal.name()));
        for case in &setup.cases {
            measured.fail(&case.name(), Route::OvsNormal.name(), why.to_owned());
        }
    }
    let ways: Vec<Route> = setup.ways.iter().copied().filter(|way| bed.has(*way)).collect();
    let mut patience = Patience::default();
    for round in 0..=setup.rounds {
        progress.step(&format!("round {round} of {}", setup.rounds));
        if !setup.programs.is_empty() {
            programs::round(&bed, setup, (round, &ways), &mut measured, progress)?;
            continue;
        }
        if round > 0 {
            patience.add(setup.patience / setup.rounds.max(1));
        }
        for case in &setup.cases {
            if setup.wants_near(*case) {
                measured.waited_s += wait_near(&bed, &mut patience, progress)?.as_secs_f64();
            }
            cell(&bed, setup, (round, *case, &ways), &mut measured, progress);
        }
        if setup.hook_packets > 0 {
            others::round(&bed, setup, round, &mut measured, progress)?;
        }
    }
    bed.is_sound()?;
    Ok(measured)
}

impl Setup {
    /// Whether the channel is compared with the loopback, whose bytes stay on one CPU.
    fn wants_near(&self, case: Case) -> bool {
        let ways = &self.ways;
        !case.test.is_rr() && ways.contains(&Route::Loopback) && ways.iter().any(|w| w.is_channel())
    }
}

/// Waits until the guests' CPUs are near each other; how long.
fn wait_near(
    bed: &Bed,
    patience: &mut Patience,
    progress: &mut Progress,
) -> Result<Duration, BenchError> {
    let left = patience.left();
    let Some(ns) = bed.apart_ns().filter(|ns| is_far(*ns) && !left.is_zero()) else {
        return Ok(Duration::ZERO);
    };
    progress.step(&format!(
        "a cache line takes {ns:.0} ns between the host's CPUs and back: waiting for nearer ones, {:.0} s at \
         most",
        left.as_secs_f64()
    ));
    // Open vSwitch's thread would keep a CPU busy meanwhile.
    bed.take(Route::Loopback)?;
    Ok(patience.wait(|| bed.apart_ns()))
}

/// One case over all ways.
fn cell(
    bed: &Bed,
    setup: &Setup,
    (round, case, ways): (u32, Case, &[Route]),
    measured: &mut Measured,
    progress: &mut Progress,
) {
    let name = case.name();
    let mut told = Vec::new();
    let ways: Vec<Route> = ways.iter().copied().filter(|way| case.runs_over(*way)).collect();
    for way in order_for_round(&ways, round) {
        let load = || put_load(bed, (case, way), setup.length);
        let done = with_repeat((&name, way.name()), round, measured, progress, load);
        let Some((sample, counted)) = done else { continue };
        told.push(format!("{} {:.0}", way.name(), sample.value));
        measured.loads.push(Load { round, case, way, sample, counted });
    }
    progress.step(&format!("{name} ({}): {}", case.test.unit(), told.join(", ")));
}

/// Puts a load on; with what the modules counted. A load whose packets went another way is an
/// error.
fn put_load(
    bed: &Bed,
    (case, way): (Case, Route),
    length: Duration,
) -> Result<(Sample, Counters), BenchError> {
    let before = bed.take(way)?;
    let (script, window) = (case.script(way, SETTLE + length), Window { settle: SETTLE, length });
    let load = || bed.tool(&script, SETTLE + length + GRACE);
    let apart_before = bed.apart_ns();
    let (answer, usage) = metered(window, &bed.accounts(way), load)?;
    let apart_after = bed.apart_ns();
    let after = bed.counters()?;
    let read = case.read(&answer).ok_or_else(|| {
        BenchError::lab(&script, format!("the program's answer is not as expected: {answer}"))
    });
    let (mut sample, ops_per_s, packets) = read?;
    sample.cpu_us_per_op = usage.side * 1e6 / ops_per_s;
    sample.foreign = usage.foreign;
    sample.apart_ns = apart_before.zip(apart_after).map(Into::into);
    let [client, server] = [0, 1].map(|guest| after[guest].since(&before[guest]));
    counters::check(&client, way.is_channel(), packets)?;
    // Nobody answers a stream of datagrams.
    let answers = if case.test.is_rr() { packets } else { 0 };
    if !(way.is_channel() && answers == 0) {
        counters::check(&server, way.is_channel(), answers)?;
    }
    let counted = client.and(&server);
    if way == Route::ChannelCopy && counted.referred > 0 {
        let why = format!("{} messages were passed by reference", counted.referred);
        return Err(BenchError::lab("the load went the wrong way", why));
    }
    Ok((sample, counted))
}
