//! Eight real VMs with uneven load on one sidecore, against QEMU's main loops and disk threads.
//!
//! # Theory of operation
//! Two fleets of the same eight guests run at once, one on a daemon with one sidecore, one on
//! QEMU's devices: virtio-net on TAP and bridge in each QEMU's main loop, virtio-blk in a thread of
//! its own; where the host has vhost-net, a third fleet has its network there. In each round every
//! guest of one fleet puts on its load at the same time as the others, then those of the other
//! fleet; who is first changes from round to round, and the first round is thrown away. [`load`]
//! says who does what; seeds and addresses are fixed, so all fleets do the same.
//!
//! CPU is read from a moment after the start to a moment before the end, thread by thread:
//! `cpu_back_end` is the daemon, or QEMU's main loops and disk threads. Without KVM QEMU's main
//! loop passes on the interrupts of vhost-user devices, which is no work of the daemon and none
//! that a host with KVM has; `cpu_with_main_loops` counts it for us as well, so that both values
//! can be judged. `cpu_all` is the whole fleet, guests included.
//!
//! # Limits
//! - Guests have one vCPU and 128 MB, sixteen of them fit a machine of 4 GB.
//! - With two CPUs for eight guests all loads compete for CPU under emulation: rates tell who
//!   leaves more of it to the guests, not how fast a back end is.
//! - Latencies of a round are percentiles of each program; of two programs the mean is taken.

pub(crate) mod command;
pub mod load;
pub mod output;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use lab::Lab;
use serde::{Deserialize, Serialize};

use crate::harness::cpu::Accounts;
use crate::harness::error::BenchError;
use crate::harness::fleet::{Base, Devices, Fleet, Ground};
use crate::harness::folder::Folder;
use crate::harness::host::{self, Thread};
use crate::harness::options::VmSetup;
use crate::harness::progress::Progress;
use crate::harness::runner::{GRACE, Plan, Side, order};
use load::{LOADS, Values};

/// Time before CPU is read: all programs have started by then.
const SETTLE: Duration = Duration::from_millis(800);

/// Setup of a run.
#[derive(Debug)]
pub struct Setup {
    /// Rounds, and length of each load.
    pub plan: Plan,
    /// Kernel, daemon and folder of the run.
    pub vms: VmSetup,
    /// More lines for the daemon's `[sidecore]` table.
    pub sidecore: String,
    /// Whether the host has vhost-net; if not, the reason.
    pub vhost: Result<(), String>,
}

/// Host CPU seconds per second.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    /// The daemon; or QEMU's main loops and disk threads.
    pub back_end: f64,
    /// The same and QEMU's main loops.
    pub with_main_loops: f64,
    /// All processes of the side.
    pub all: f64,
    /// Part of the machine that strangers used.
    pub foreign: f64,
}

/// One side of one round.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Values that the guests' programs told, by class.
    pub values: Values,
    /// CPU time that the host spent.
    pub cpu: Cpu,
}

/// Both sides of a round; 0 is the one thrown away.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Counted from 1.
    pub round: u32,
    /// Millrace.
    pub ours: Sample,
    /// QEMU.
    pub peer: Sample,
    /// QEMU with vhost-net, where the host has that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost: Option<Sample>,
}

/// A fleet and the threads that serve its devices.
struct Host {
    fleet: Fleet,
    /// QEMU's main loops.
    loops: Vec<Thread>,
    /// QEMU's disk threads, and the kernel's that serve the network; or all threads of the daemon.
    own: Vec<Thread>,
}

impl Host {
    fn boot(base: &Base, side: Side, sidecore: &str) -> Result<Host, BenchError> {
        let (name, devices) = match side {
            Side::Ours => ("our", Devices::Millrace { sidecore: format!("count = 1\n{sidecore}") }),
            Side::Peer => ("peer", Devices::Qemu),
            Side::Vhost => ("vhost", Devices::Vhost),
        };
        let fleet = Fleet::boot(base, name, &devices, &load::disks())?;
        load::SERVERS.iter().try_for_each(|(guest, tool)| fleet.serve(*guest, tool))?;
        let own = match fleet.daemon() {
            Some(daemon) => {
                let threads = daemon.pids().into_iter().map(|pid| host::named(pid, ""));
                threads.collect::<Result<Vec<_>, _>>()?.concat()
            }
            None if side == Side::Vhost => [fleet.disk_threads()?, fleet.vhost_threads()?].concat(),
            None => fleet.disk_threads()?,
        };
        Ok(Host { loops: fleet.main_loops(), own, fleet })
    }
}

/// CPU times of one side at one moment.
struct Moment {
    at: Instant,
    /// Time of each thread of the back end; none of one that has ended.
    own_ns: Vec<u64>,
    loops_ns: u64,
    machine: crate::harness::cpu::Snapshot,
}

impl Moment {
    fn now(host: &Host, accounts: &Accounts) -> Result<Moment, BenchError> {
        Ok(Moment {
            at: Instant::now(),
            // Some threads come and go: the kernel's workers of io_uring, those of requests.
            own_ns: host.own.iter().map(|t| host::times(*t).map_or(0, |t| t.ran_ns)).collect(),
            loops_ns: host::cpu_ns(&host.loops)?,
            machine: accounts.snapshot()?,
        })
    }

    /// CPU time used since `earlier`. The main loops do the back end's work where QEMU serves the
    /// devices.
    fn since(&self, earlier: &Moment, accounts: &Accounts, side: Side) -> Cpu {
        let wall_ns = (self.at - earlier.at).as_nanos().max(1) as f64;
        let own_ns = self.own_ns.iter().zip(&earlier.own_ns);
        let own_ns: u64 = own_ns.map(|(now, before)| now.saturating_sub(*before)).sum();
        let own = own_ns as f64 / wall_ns;
        let both = own + (self.loops_ns - earlier.loops_ns) as f64 / wall_ns;
        let usage = accounts.between(&earlier.machine, &self.machine);
        let back_end = match side {
            Side::Ours => own,
            Side::Peer | Side::Vhost => both,
        };
        Cpu { back_end, with_main_loops: both, all: usage.side, foreign: usage.foreign }
    }
}

/// All loads of one side at once.
fn put_on(
    host: &Host,
    accounts: &Accounts,
    side: Side,
    length: Duration,
) -> Result<Sample, BenchError> {
    let (over, ended) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let start = |l: &'static load::Load| {
            let (over, fleet) = (over.clone(), &host.fleet);
            scope.spawn(move || {
                let answer = fleet.tool(l.guest, &l.script(SETTLE + length), length + GRACE * 2);
                drop(over);
                answer.and_then(|a| l.read(&a))
            })
        };
        let running: Vec<_> = LOADS.iter().map(start).collect();
        drop(over);
        // All programs have ended when this returns early; the counters are the same then.
        let _ = ended.recv_timeout(SETTLE);
        let first = Moment::now(host, accounts)?;
        let _ = ended.recv_timeout(length);
        let cpu = Moment::now(host, accounts)?.since(&first, accounts, side);
        let join = |t: std::thread::ScopedJoinHandle<'_, Result<_, _>>| {
            t.join().map_err(|_| BenchError::lab("put on a load", "its thread panicked"))?
        };
        let read = running.into_iter().map(join).collect::<Result<Vec<_>, _>>()?;
        Ok(Sample { values: Values::of(&read), cpu })
    })
}

/// Boots all fleets and measures; returns every round.
pub fn run(setup: &Setup, progress: &mut Progress) -> Result<Vec<Round>, BenchError> {
    let lab = Lab::new().map_err(|e| BenchError::lab("start the lab", e))?;
    let disks = Folder::new(&setup.vms.out.join("consolidate-disks"))?;
    let ground = Ground { lab: &lab, kernel: setup.vms.kernel, disks: &disks };
    let base = Base { ground, millrace: &setup.vms.millrace };
    progress.step("booting eight guests on Millrace");
    let mut hosts = vec![Host::boot(&base, Side::Ours, &setup.sidecore)?];
    progress.step("booting eight guests on QEMU's devices");
    hosts.push(Host::boot(&base, Side::Peer, "")?);
    if setup.vhost.is_ok() {
        progress.step("booting eight guests on QEMU's devices with vhost-net");
        hosts.push(Host::boot(&base, Side::Vhost, "")?);
    }
    let cores = base::cpu::allowed_cpus().map_or(1, |c| c.len() as u32);
    let load = |side: Side| {
        let this = &hosts[side as usize];
        let others = hosts.iter().enumerate().filter(|(at, _)| *at != side as usize);
        let other = others.flat_map(|(_, host)| host.fleet.pids()).collect();
        let accounts = Accounts { side: this.fleet.pids(), other, spinners: Vec::new(), cores };
        put_on(this, &accounts, side, setup.plan.length)
    };
    let mut rounds = Vec::new();
    for round in 0..=setup.plan.rounds {
        progress.step(&format!("round {round} of {}", setup.plan.rounds));
        let mut samples = [None, None, None];
        for side in order(setup.vhost.is_ok(), round) {
            samples[side as usize] = Some(load(side)?);
        }
        let [Some(ours), Some(peer), vhost] = samples else {
            return Err(BenchError::NoRounds { case: "consolidate".into() });
        };
        rounds.push(Round { round, ours, peer, vhost });
    }
    Ok(rounds)
}
