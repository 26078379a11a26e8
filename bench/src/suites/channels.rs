//! Two guests of one host: through shared memory, and through everything else.
//!
//! # Theory of operation
//! Two guests are booted once, with three network cards each: on QEMU's TAP and a bridge, on our
//! switch, and on Open vSwitch with DPDK ([`world`]). A *way* ([`Way`]) is one of these cards, or the
//! switch's with the channel's modules taking its packets, with this or that setting of theirs, or the
//! client's own loopback. Ways are changed by module parameters and addresses, so all of them are
//! measured by the same programs in the same guests within seconds ([`case`]).
//!
//! A round is each case on each way. Who begins changes from round to round, and the first round is
//! thrown away; rows ([`rows`]) are medians of the rounds' own ratios. After each load the modules'
//! counters must tell that its packets went the way they were to go; a load that did not is an error.
//!
//! What the hook costs those whose packets are not taken is measured beside it ([`others`]): round
//! trips with the host, and a million datagrams that nobody gets, with `millrace_net` loaded and not.
//! [`programs`] are real ones, in place of all this.
//!
//! # Limits
//! - Guests are emulated: copies and instructions cost several times what they cost under KVM, and an
//!   exit or an interrupt less than that in proportion.
//! - Two CPUs for two guests: whoever polls on the host (Open vSwitch) has none for itself. It is
//!   stopped while it is not wanted.

pub mod case;
pub(crate) mod command;
pub mod counters;
pub mod others;
pub mod output;
pub mod plot;
pub mod programs;
pub mod rows;
#[cfg(test)]
mod testing;
pub mod world;

use std::path::PathBuf;
use std::time::Duration;

use lab::KernelChoice;
use serde::{Deserialize, Serialize};

use crate::harness::distance::{Patience, is_far};
use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::repeat::turned;
use crate::harness::repeat::{self, Failure};
use crate::harness::spinner::Spinners;
use case::Case;
use others::{HookLoad, OthersLoad};
use programs::ProgramLoad;
use world::World;

/// Failures of a load after which it is not put on any more: two in each of two rounds.
const GIVEN_UP: usize = 4;

/// What was asked for.
#[derive(Debug)]
pub struct Setup {
    /// Rounds that count.
    pub rounds: u32,
    /// Length of a load.
    pub length: Duration,
    /// What is measured between the guests.
    pub cases: Vec<Case>,
    /// Over which ways.
    pub ways: Vec<Way>,
    /// Datagrams of a load that tells the hook's cost; 0 for no traffic to others at all.
    pub hook_packets: u32,
    /// Real programs; if there are any, nothing else is measured.
    pub programs: Vec<programs::Program>,
    /// Most microseconds that an idle CPU polls, on those ways of the channel that poll.
    pub poll_us: u32,
    /// Virtual CPUs of each guest.
    pub vcpus: u32,
    /// Whether each has a CPU of the host.
    pub pinned: bool,
    /// How long all streams may wait for the host's CPUs to be near each other.
    pub patience: Duration,
    /// Kernel of both guests.
    pub kernel: KernelChoice,
    /// Our daemon.
    pub millrace: PathBuf,
    /// Where the results are.
    pub out: PathBuf,
}

/// A way between the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// QEMU's card on a TAP in a bridge.
    TapBridge,
    /// The same, with the sockets polling the card for 50 µs.
    TapBridgeBusy,
    /// Our switch, with the modules told to take nothing.
    Switch,
    /// Open vSwitch on DPDK, action "normal".
    OvsNormal,
    /// The channel, which copies everything.
    ChannelCopy,
    /// The channel without polling.
    Channel,
    /// The channel as it is shipped: an idle CPU polls for a while.
    ChannelPoll,
    /// The same, with the sockets polling as well, for 50 µs.
    ChannelBusy,
    /// The client's own 127.0.0.1.
    Loopback,
}

impl Way {
    /// All, in the order of results.
    pub const ALL: [Way; 9] = [
        Way::ChannelPoll,
        Way::TapBridge,
        Way::Switch,
        Way::OvsNormal,
        Way::Loopback,
        Way::Channel,
        Way::ChannelCopy,
        Way::ChannelBusy,
        Way::TapBridgeBusy,
    ];

    /// As in results.
    pub fn name(self) -> &'static str {
        match self {
            Way::TapBridge => "tap-bridge",
            Way::TapBridgeBusy => "tap-bridge-busy",
            Way::Switch => "switch",
            Way::OvsNormal => "ovs-normal",
            Way::ChannelCopy => "channel-copy",
            Way::Channel => "channel",
            Way::ChannelPoll => "channel-poll",
            Way::ChannelBusy => "channel-busy",
            Way::Loopback => "loopback",
        }
    }

    /// Whether the channel's modules take its packets.
    pub fn is_channel(self) -> bool {
        matches!(self, Way::ChannelCopy | Way::Channel | Way::ChannelPoll | Way::ChannelBusy)
    }

    /// Whether sockets poll.
    pub fn is_busy(self) -> bool {
        matches!(self, Way::TapBridgeBusy | Way::ChannelBusy)
    }

    /// The server's address.
    pub fn server(self) -> &'static str {
        match self {
            Way::TapBridge | Way::TapBridgeBusy => "10.0.0.2",
            Way::OvsNormal => "10.0.2.2",
            Way::Loopback => "127.0.0.1",
            _ => "10.0.1.2",
        }
    }
}

/// What every load gives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Round trips per second, or MB received per second.
    pub value: f64,
    /// Mean of round trips, µs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_us: Option<f64>,
    /// Median.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<f64>,
    /// 99th percentile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
    /// Of what was sent, the part that did not arrive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<f64>,
    /// CPU time of the QEMU processes and of who is between them, µs for a round trip or a MB.
    pub cpu_us_per_op: f64,
    /// Part of the machine that strangers used; the kernel's threads are among them.
    pub foreign: f64,
    /// How far the guests' CPUs were from each other before and after it, ns ([`crate::harness::distance`]); left out
    /// where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apart_ns: Option<[f64; 2]>,
}

/// A load between the guests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Counted from 1; 0 is the one thrown away.
    pub round: u32,
    /// What was done.
    pub case: Case,
    /// Over which way.
    pub way: Way,
    /// What it gave.
    pub sample: Sample,
    /// What both guests' modules counted meanwhile.
    pub counted: counters::Counters,
}

/// Everything that was measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Between the guests.
    pub loads: Vec<Load>,
    /// With the host.
    pub others: Vec<OthersLoad>,
    /// To nobody.
    pub hook: Vec<HookLoad>,
    /// Real programs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<ProgramLoad>,
    /// How long streams waited for the host's CPUs to be near each other, s.
    #[serde(default)]
    pub waited_s: f64,
    /// Loads that failed.
    pub failed: Vec<Failure>,
}

/// Boots the guests and measures.
pub fn run(setup: &Setup, progress: &mut Progress) -> Result<Measured, BenchError> {
    // All the time: round trips over a CPU that sleeps in between measure its sleep.
    let spinners = Spinners::start()?;
    let world = World::boot(setup, spinners.tids().to_vec(), progress)?;
    let mut measured = Measured::default();
    if let Some(why) = world.no_ovs() {
        progress.step(&format!("without {}: {why}", Way::OvsNormal.name()));
        for case in &setup.cases {
            measured.fail(&case.name(), Way::OvsNormal.name(), why.to_owned());
        }
    }
    let ways: Vec<Way> = setup.ways.iter().copied().filter(|way| world.has(*way)).collect();
    let mut patience = Patience::default();
    for round in 0..=setup.rounds {
        progress.step(&format!("round {round} of {}", setup.rounds));
        if !setup.programs.is_empty() {
            programs::round(&world, setup, (round, &ways), &mut measured, progress)?;
            continue;
        }
        if round > 0 {
            patience.add(setup.patience / setup.rounds.max(1));
        }
        for case in &setup.cases {
            if setup.wants_near(*case) {
                measured.waited_s += wait_near(&world, &mut patience, progress)?.as_secs_f64();
            }
            cell(&world, setup, (round, *case, &ways), &mut measured, progress);
        }
        if setup.hook_packets > 0 {
            others::round(&world, setup, round, &mut measured, progress)?;
        }
    }
    world.is_sound()?;
    Ok(measured)
}

impl Setup {
    /// Whether the channel is compared with the loopback, whose bytes stay on one CPU.
    fn wants_near(&self, case: Case) -> bool {
        let ways = &self.ways;
        !case.test.is_rr() && ways.contains(&Way::Loopback) && ways.iter().any(|w| w.is_channel())
    }
}

/// Waits until the guests' CPUs are near each other; how long.
fn wait_near(
    world: &World,
    patience: &mut Patience,
    progress: &mut Progress,
) -> Result<Duration, BenchError> {
    let left = patience.left();
    let Some(ns) = world.apart_ns().filter(|ns| is_far(*ns) && !left.is_zero()) else {
        return Ok(Duration::ZERO);
    };
    progress.step(&format!(
        "a cache line takes {ns:.0} ns between the host's CPUs and back: waiting for nearer ones, {:.0} s at \
         most",
        left.as_secs_f64()
    ));
    // Open vSwitch's thread would keep a CPU busy meanwhile.
    world.take(Way::Loopback)?;
    Ok(patience.wait(|| world.apart_ns()))
}

/// One case over all ways.
fn cell(
    world: &World,
    setup: &Setup,
    (round, case, ways): (u32, Case, &[Way]),
    measured: &mut Measured,
    progress: &mut Progress,
) {
    let name = case.name();
    let mut told = Vec::new();
    let ways: Vec<Way> = ways.iter().copied().filter(|way| case.runs_over(*way)).collect();
    for way in turned(&ways, round) {
        let load = || case::run(world, (case, way), setup.length);
        let done = with_repeat((&name, way.name()), round, measured, progress, load);
        let Some((sample, counted)) = done else { continue };
        told.push(format!("{} {:.0}", way.name(), sample.value));
        measured.loads.push(Load { round, case, way, sample, counted });
    }
    progress.step(&format!("{name} ({}): {}", case.test.unit(), told.join(", ")));
}

impl Measured {
    /// Notes a load that failed for good.
    fn fail(&mut self, case: &str, name: &str, why: String) {
        self.failed.push(Failure::new(case, name, why));
    }
}

/// As [`repeat::with_repeats`], noted with what was measured.
fn with_repeat<T>(
    name: (&str, &str),
    round: u32,
    measured: &mut Measured,
    progress: &mut Progress,
    mut load: impl FnMut() -> Result<T, BenchError>,
) -> Option<T> {
    repeat::with_repeats(GIVEN_UP, name, round, &mut measured.failed, progress, |_| load())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_have_their_names_and_addresses() {
        for way in Way::ALL {
            let json = serde_json::to_value(way).unwrap();
            assert_eq!(json, way.name());
            assert_eq!(way.is_channel(), way.name().starts_with("channel"));
            assert_eq!(way.is_busy(), way.name().ends_with("busy"));
        }
        assert_eq!(Way::ALL.iter().filter(|w| w.server() == Way::Switch.server()).count(), 5);
    }

    #[test]
    fn a_load_that_fails_is_put_on_again_and_noted() {
        let mut quiet = Progress::to(Box::new(std::io::sink()), false);
        let mut measured = Measured::default();
        let mut go = |fails: u32, measured: &mut Measured| {
            let mut times = 0;
            with_repeat(("tcp_rr_64", "channel"), 2, measured, &mut quiet, || {
                times += 1;
                let bad = times <= fails;
                if bad { Err(BenchError::lab("x", "y\nconsole")) } else { Ok(times) }
            })
        };
        assert_eq!(go(0, &mut measured), Some(1));
        assert_eq!(go(1, &mut measured), Some(2));
        assert_eq!(go(9, &mut measured), None);
        let told: Vec<_> = measured.failed.iter().map(|f| (f.why.as_str(), f.repeated)).collect();
        let why = "round 2: x: y";
        assert_eq!(told, [(why, true), (why, false), (why, false)]);
        assert_eq!(go(0, &mut measured), Some(1), "another round");
        assert_eq!(go(9, &mut measured), None);
        assert_eq!(go(0, &mut measured), None, "given up");
    }
}
