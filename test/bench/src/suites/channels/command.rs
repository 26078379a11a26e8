//! The command line of `bench channels`.

use std::path::Path;
use std::time::Duration;

use clap::Args;

use crate::harness::error::BenchError;
use crate::harness::options::{VmArgs, seconds, value_or};
use crate::harness::progress::Progress;
use crate::harness::results::Missing;
use crate::harness::runner::{VHOST, vhost_text};
use crate::harness::suite::PageSuite;
use crate::harness::table::Section;
use crate::suites::channels::bed::POLL_US;
use crate::suites::channels::case::{Case, SIZES, Test};
use crate::suites::channels::programs::{self, Program};
use crate::suites::channels::{Measured, Route, Setup, rounds};

/// Seconds to wait for near CPUs, in a run of half an hour.
const PATIENCE_S: u32 = 600;

#[derive(Args)]
pub struct ChannelsArgs {
    /// Rounds that count; one more is run first and thrown away.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=99))]
    rounds: u32,
    /// Seconds of each load (0.2 to 60).
    #[arg(long, default_value = "0.6", value_parser = seconds)]
    secs: Duration,
    /// Only these tests; "others" is traffic to others than guests. All when left out.
    #[arg(long, value_delimiter = ',',
        value_parser = |text: &str| value_or::<Test>("others", text))]
    tests: Vec<Option<Test>>,
    /// Message sizes, bytes (64 to 65536); datagrams have 60000 at most.
    #[arg(long, value_delimiter = ',', default_values_t = SIZES,
        value_parser = clap::value_parser!(u32).range(64..=65_536))]
    sizes: Vec<u32>,
    /// Only these ways between the guests.
    #[arg(long, value_delimiter = ',')]
    ways: Vec<Route>,
    /// Datagrams whose time tells the hook's cost.
    #[arg(long, default_value_t = 1_000_000,
        value_parser = clap::value_parser!(u32).range(1_000..=100_000_000))]
    packets: u32,
    /// Real programs in place of all this; all of them when none is named.
    #[arg(long, value_delimiter = ',', num_args = 0..,
        conflicts_with_all = ["tests", "sizes", "packets", "patience_secs"])]
    programs: Option<Vec<Program>>,
    /// Most microseconds that an idle vCPU polls in channel-poll and channel-busy
    /// (millrace_channel's poll_us, 0 to 10000).
    #[arg(long, default_value_t = POLL_US,
        value_parser = clap::value_parser!(u32).range(0..=10_000))]
    poll_us: u32,
    /// Virtual CPUs of each guest (1 to 8).
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    vcpus: u32,
    /// Give each of the guests' vCPUs a CPU of the host, as far as there are enough.
    #[arg(long)]
    pin: bool,
    /// Seconds that all streams together may wait for the host's CPUs to be near each other; a
    /// share of it for each round, and 0 for none. Where this machine is a VM, its host may move
    /// its CPUs to where they share no cache. When the time is over, streams are measured all the
    /// same (0 to 3600).
    #[arg(long, default_value_t = PATIENCE_S,
        value_parser = clap::value_parser!(u32).range(0..=3600))]
    patience_secs: u32,
    /// One round of 0.2 s: to see that it works, not to measure.
    #[arg(long, conflicts_with_all = ["rounds", "secs", "patience_secs"])]
    quick: bool,
    #[command(flatten)]
    vms: VmArgs,
}

impl PageSuite for ChannelsArgs {
    const SECTION: Section = Section::Channels;
    type Setup = Setup;
    type Measured = Measured;

    fn setup(&self) -> Result<Setup, BenchError> {
        let programs = match &self.programs {
            None => Vec::new(),
            Some(named) if named.is_empty() => Program::ALL.to_vec(),
            Some(named) => named.clone(),
        };
        let known = if programs.is_empty() { &Route::ALL[..] } else { &programs::WAYS };
        let has_vhost = lab::vhost_net().is_ok();
        let wanted = |way: &Route| {
            let is_there = *way != Route::TapVhost || has_vhost;
            is_there && (self.ways.is_empty() || self.ways.contains(way))
        };
        let ways: Vec<Route> = known.iter().copied().filter(wanted).collect();
        if ways.is_empty() {
            return Err(BenchError::lab("--ways", "none of them is measured here"));
        }
        let asked = |test| self.tests.is_empty() || self.tests.contains(&test);
        let tests = Test::ALL.into_iter().filter(|test| asked(Some(*test)));
        let mut cases: Vec<Case> = Vec::new();
        for test in tests.filter(|_| programs.is_empty()) {
            for size in &self.sizes {
                let case = Case::new(test, *size);
                // Two sizes may be the same datagram.
                if !cases.contains(&case) {
                    cases.push(case);
                }
            }
        }
        let (rounds, length) =
            if self.quick { (1, Duration::from_millis(200)) } else { (self.rounds, self.secs) };
        let packets = if self.quick { self.packets.min(50_000) } else { self.packets };
        let others = programs.is_empty() && asked(None);
        Ok(Setup {
            rounds,
            length,
            cases,
            ways,
            hook_packets: if others { packets } else { 0 },
            programs,
            poll_us: self.poll_us,
            vcpus: self.vcpus,
            pinned: self.pin,
            patience: Duration::from_secs(if self.quick { 0 } else { self.patience_secs }.into()),
            kernel: self.vms.kernel()?,
            millrace: self.vms.millrace()?,
            out: self.vms.out.clone(),
        })
    }

    fn measure(setup: &Setup, progress: &mut Progress) -> Result<Measured, BenchError> {
        rounds::run(setup, progress)
    }

    fn text(setup: &Setup) -> Vec<String> {
        let guests = format!(
            "Two guests ({} vCPU each), booted once, with three network cards each: a TAP in a bridge \
             (QEMU’s own virtio-net), Millrace’s switch, Open vSwitch on DPDK. Their vCPUs run on {}.",
            setup.vcpus,
            if setup.pinned { "a CPU each, as far as there are enough" } else { "any CPU" }
        );
        let shipped = if setup.poll_us == POLL_US { " as it is shipped" } else { "" };
        let poll = format!(
            "channel-poll is the channel{shipped}: an idle vCPU polls for up to {} µs (poll_us), TCP packets of \
             4,096 bytes and more pass their pages by reference. channel is the same with poll_us=0, \
             channel-copy that with nothing passed by reference. channel-busy and tap-bridge-busy add \
             socket busy polling of 50 µs in both guests.",
            setup.poll_us
        );
        let fixed = [
            "switch is the same card with millrace_net’s enabled=N. loopback is 127.0.0.1 in the client.",
            "Open vSwitch’s polling thread has no CPU of its own: two guests and it share the machine’s. It \
             is stopped while it is not measured.",
            "After each load the modules’ counters had to tell that its packets went that way, and no other.",
            "An idle-priority loop keeps every host CPU awake all the time; its time is left out.",
            "CPU time is user and system time of both QEMU processes, guests included, and of the daemon or \
             Open vSwitch, in the middle of the load. Under emulation a guest’s share is several times what \
             it is under KVM.",
        ];
        let patience = format!(
            "Streams waited until the host’s CPUs were near each other, {} s in all at most: the bytes of two guests \
             go from one to the other, the loopback’s do not. Rows that end in _near and _far are the rounds in \
             which they were near, and far.",
            setup.patience.as_secs()
        );
        let waits = !setup.patience.is_zero() && setup.cases.iter().any(|case| !case.test.is_rr());
        let rounds = format!(
            "{} rounds of {:.1} s a load, after one thrown away; who begins changes.",
            setup.rounds,
            setup.length.as_secs_f64()
        );
        [guests, poll]
            .into_iter()
            .chain(fixed.map(Into::into))
            .chain(waits.then_some(patience))
            .chain([vhost_text(VHOST, &lab::vhost_net()), rounds])
            .collect()
    }

    fn out(&self) -> &Path {
        &self.vms.out
    }

    /// A peer that is not installed is missing, and no failure.
    fn is_failure(missing: &Missing) -> bool {
        !missing.why.contains("not installed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::options;

    fn setup(words: &[&str]) -> Setup {
        // Any file is a daemon here.
        let daemon = std::env::current_exe().unwrap();
        let words: Vec<&str> =
            words.iter().copied().chain(["--millrace", daemon.to_str().unwrap()]).collect();
        options::parse::<ChannelsArgs>(&words).unwrap().setup().unwrap()
    }

    #[test]
    fn everything_but_programs_is_the_default() {
        let setup = setup(&[]);
        assert_eq!((setup.cases.len(), setup.ways.len(), setup.rounds), (20, 9, 7));
        assert_eq!((setup.hook_packets, setup.programs.len()), (1_000_000, 0));
        assert_eq!(setup.patience.as_secs(), 600);
    }

    #[test]
    fn parts_can_be_chosen() {
        let some = setup(&["--tests", "udp_rr,others", "--sizes", "64,60000,65536", "--quick"]);
        let names: Vec<String> = some.cases.iter().map(Case::name).collect();
        assert_eq!(names, ["udp_rr_64", "udp_rr_60000"]);
        assert_eq!((some.hook_packets, some.rounds, some.patience), (50_000, 1, Duration::ZERO));
        let one = setup(&["--tests", "tcp_rr", "--ways", "channel-busy,tap-bridge"]);
        assert_eq!((one.hook_packets, one.ways.len(), one.cases.len()), (0, 2, 5));
    }

    #[test]
    fn programs_take_the_place_of_all_else() {
        let all = setup(&["--programs"]);
        assert_eq!((all.programs.len(), all.cases.len(), all.hook_packets), (5, 0, 0));
        assert_eq!(all.ways, programs::WAYS);
        assert_eq!(setup(&["--programs", "redis,nfs"]).programs, [Program::Redis, Program::Nfs]);
    }

    #[test]
    fn a_peer_that_is_not_installed_is_no_failure() {
        let is_failure = |why: &str| {
            let (case, name, why) = ("x".into(), "ovs-normal".into(), why.into());
            ChannelsArgs::is_failure(&Missing { case, name, why })
        };
        assert!(!is_failure("Open vSwitch on DPDK: not installed; scripts/peers does it"));
        assert!(is_failure("round 1: it hangs"));
    }
}
