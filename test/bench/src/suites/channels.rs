//! Two guests of one host: through shared memory, and through everything else.
//!
//! # Theory of operation
//! Two guests are booted once, with three network cards each: on QEMU's TAP and a bridge, on our
//! switch, and on Open vSwitch with DPDK ([`bed`]). A *way* ([`Route`]) is one of these cards, or
//! the switch's with the channel's modules taking its packets, with this or that setting of theirs,
//! or the client's own loopback. Ways are changed by module parameters and addresses, so all of
//! them are measured by the same programs in the same guests within seconds ([`case`]).
//!
//! A round is each case on each way. Who begins changes from round to round, and the first round is
//! thrown away; rows ([`rows`]) are medians of the rounds' own ratios. After each load the modules'
//! counters must tell that its packets went the way they were to go; a load that did not is an
//! error.
//!
//! What the hook costs those whose packets are not taken is measured beside it ([`others`]): round
//! trips with the host, and a million datagrams that nobody gets, with `millrace_net` loaded and
//! not. [`programs`] are real ones, in place of all this.
//!
//! # Limits
//! - Guests are emulated: copies and instructions cost several times what they cost under KVM, and
//!   an exit or an interrupt less than that in proportion.
//! - Two CPUs for two guests: whoever polls on the host (Open vSwitch) has none for itself. It is
//!   stopped while it is not wanted.

pub mod bed;
pub mod case;
pub(crate) mod command;
pub mod counters;
pub mod others;
pub mod output;
pub mod plot;
pub mod programs;
pub mod rounds;
pub mod route;
pub mod rows;
#[cfg(test)]
mod testing;

use std::path::PathBuf;
use std::time::Duration;

use lab::KernelChoice;
use serde::{Deserialize, Serialize};

use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::repeat::{self, Failure};
use case::{Case, Test};
use programs::jobs::Program;

pub use route::{Route, Sample};

/// Failures of a load after which it is not put on any more: two in each of two rounds.
const GIVEN_UP: usize = 4;

/// Setup of a run.
#[derive(Debug)]
pub struct Setup {
    /// Rounds that count.
    pub rounds: u32,
    /// Length of a load.
    pub length: Duration,
    /// Cases that are measured between the guests.
    pub cases: Vec<Case>,
    /// Over which ways.
    pub ways: Vec<Route>,
    /// Datagrams of a load that tells the hook's cost; 0 for no traffic to others at all.
    pub hook_packets: u32,
    /// Real programs; if there are any, nothing else is measured.
    pub programs: Vec<Program>,
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
    /// Path of Millrace's daemon.
    pub millrace: PathBuf,
    /// Folder of the results.
    pub out: PathBuf,
}

/// A load between the guests.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Counted from 1; 0 is the one thrown away.
    pub round: u32,
    /// Case of the load.
    pub case: Case,
    /// Over which way.
    pub way: Route,
    /// Sample that the load gave.
    pub sample: Sample,
    /// Counters of both guests' modules during the load.
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

/// Round trips between client and host.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct OthersLoad {
    /// Counted from 1; 0 is the one thrown away.
    pub round: u32,
    /// The protocol.
    pub test: Test,
    /// Whether the hook was there.
    pub hook: bool,
    /// Sample that the load gave.
    pub sample: Sample,
}

/// Datagrams to nobody.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HookLoad {
    /// Counted from 1; 0 is the one thrown away.
    pub round: u32,
    /// Whether the hook was there.
    pub hook: bool,
    /// Time of one packet in the guest, ns: the median over thousands.
    pub packet_ns: f64,
}

/// One load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProgramLoad {
    /// Counted from 1; 0 is the one thrown away.
    pub round: u32,
    /// The row's name.
    pub case: String,
    /// Over which way.
    pub way: Route,
    /// Requests per second, or MB/s.
    pub value: f64,
    /// Latency of a request, µs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_us: Option<f64>,
    /// CPU time of QEMU and daemon, µs for a request or a MB.
    pub cpu_us_per_op: f64,
    /// Part of the machine that strangers used.
    pub foreign: f64,
}

impl Measured {
    /// Notes a load that failed for good.
    fn fail(&mut self, case: &str, name: &str, why: String) {
        self.failed.push(Failure::new(case, name, why));
    }
}

/// Runs a load as [`repeat::with_repeats`] does, noted with what was measured.
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
        for way in Route::ALL {
            let json = serde_json::to_value(way).unwrap();
            assert_eq!(json, way.name());
            assert_eq!(way.is_channel(), way.name().starts_with("channel"));
            assert_eq!(way.is_busy(), way.name().ends_with("busy"));
        }
        assert_eq!(Route::ALL.iter().filter(|w| w.server() == Route::Switch.server()).count(), 5);
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
