//! Events per request, as vRIO's table has them: what one round trip and one disk read cost in
//! exits, interrupts, wake-ups, system calls and copies.
//!
//! # Theory of operation
//! Three pairs of guests run at once: on QEMU's own devices, and on Millrace's with a sidecore that
//! sleeps as soon as it has nothing to do, and with one that polls on. The first guest of each pair
//! makes round trips with the second, then reads its disk, one request at a time, in rounds that
//! take turns. Nobody is asked for its own opinion:
//! - *exits* and *guest interrupts* are counted by the guests' kernels ([`guest`]), by the same
//!   means on all devices: a probe on the function that writes the doorbell, and
//!   `/proc/interrupts`;
//! - *wake-ups* of the threads that do I/O are their voluntary context switches, *system calls*
//!   come from the kernel's tracepoint ([`crate::harness::host`]);
//! - *host interrupts* are the whole machine's, without local timers;
//! - *copies* of the payload by the CPU are known from the code, not counted ([`Load::copies`]).
//!
//! Beside them stand the daemon's own counters of kicks and notifications, as a check.
//!
//! Two events belong to the emulator and not to the devices, so they are told apart and are in no
//! sum. Without KVM, QEMU's main loop takes the interrupts of vhost-user devices (and of disks with
//! a thread of their own) from an eventfd, where KVM injects them itself. And a card without MSI-X,
//! as QEMU 7.2 needs it under emulation, has the guest read a register to acknowledge each
//! interrupt, which is one more exit.
//!
//! # Limits
//! - A load of at least 0.2 s; the few events of starting it are counted with its requests.
//! - Interrupts of the host include those of strangers: on a busy machine they say nothing.

pub(crate) mod command;
pub mod guest;
pub mod output;

use std::time::Duration;

use lab::Lab;
use serde::{Deserialize, Serialize};

use crate::harness::error::BenchError;
use crate::harness::fleet::{Base, Devices, Fleet, Ground, address};
use crate::harness::folder::Folder;
use crate::harness::host::{self, Calls, SystemCalls, Thread};
use crate::harness::options::VmSetup;
use crate::harness::progress::Progress;
use crate::harness::runner::{GRACE, Plan};
use guest::Seen;

/// Setup of a run.
#[derive(Debug)]
pub struct Setup {
    /// Rounds, and length of each load.
    pub plan: Plan,
    /// Kernel, daemon and folder of the run.
    pub vms: VmSetup,
}

/// A load, one request at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Load {
    /// One byte there and back over TCP.
    RoundTrip,
    /// 4 KiB from the disk, O_DIRECT.
    DiskRead,
}

/// Back end that serves the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BackEnd {
    /// QEMU's own.
    Qemu,
    /// Millrace's, sleeping when idle.
    MillraceSleeping,
    /// Millrace's, polling on.
    MillraceSpinning,
}

/// All loads, in order.
pub const LOADS: [Load; 2] = [Load::RoundTrip, Load::DiskRead];
/// All back ends, in order.
pub const BACK_ENDS: [BackEnd; 3] =
    [BackEnd::Qemu, BackEnd::MillraceSleeping, BackEnd::MillraceSpinning];

/// Events of one load, each per request.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Counts {
    /// Requests per second, for orientation.
    pub requests_per_s: f64,
    /// Doorbells written by the guests.
    pub exits: f64,
    /// Interrupts that the guests took.
    pub guest_interrupts: f64,
    /// Times that a thread doing I/O was woken.
    pub io_wakeups: f64,
    /// System calls of these threads, without the next.
    pub io_system_calls: f64,
    /// Times that a polling thread let others run (`sched_yield`).
    pub io_yields: f64,
    /// Interrupts of the host's CPUs, without local timers.
    pub host_interrupts: f64,
    /// Copies of the payload by the CPU of the host.
    pub copies: f64,
    /// Exits to acknowledge an interrupt; only under emulation.
    pub emulation_exits: f64,
    /// Wake-ups of QEMU's main loop where it does no I/O; only under emulation.
    pub emulation_wakeups: f64,
    /// Kicks that the daemon counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daemon_kicks: Option<f64>,
    /// Notifications that the daemon sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daemon_notifications: Option<f64>,
}

/// One load of one round.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Counted from 1; 0 was thrown away.
    pub round: u32,
    /// The load.
    pub load: Load,
    /// The devices.
    pub back_end: BackEnd,
    /// Events that were counted.
    pub counts: Counts,
}

impl Load {
    fn script(self, length: Duration) -> String {
        let secs = length.as_secs_f64();
        match self {
            Load::RoundTrip => format!("agent rr tcp {} {secs:.2} 1", address(1)),
            Load::DiskRead => format!("agent disk-read /dev/vda {secs:.2} 4096 1"),
        }
    }

    /// Guests that take part.
    fn guests(self) -> usize {
        match self {
            Load::RoundTrip => 2,
            Load::DiskRead => 1,
        }
    }

    /// Copies of one request's payload by the CPU, from the code. A frame through TAP is copied
    /// into the kernel's buffer, out of it into QEMU's, and from there into the guest; a round trip
    /// is two frames. Millrace copies it once. Disks with O_DIRECT copy nothing.
    pub fn copies(self, back_end: BackEnd) -> f64 {
        match (self, back_end) {
            (Load::RoundTrip, BackEnd::Qemu) => 6.0,
            (Load::RoundTrip, _) => 2.0,
            (Load::DiskRead, _) => 0.0,
        }
    }
}

impl BackEnd {
    fn name(self) -> &'static str {
        match self {
            BackEnd::Qemu => "qemu",
            BackEnd::MillraceSleeping => "sleep",
            BackEnd::MillraceSpinning => "spin",
        }
    }

    fn devices(self) -> Devices {
        match self {
            BackEnd::Qemu => Devices::Qemu,
            BackEnd::MillraceSleeping => Devices::Millrace { sidecore: sidecore(0) },
            // Longer than any request takes: it sleeps between loads only.
            BackEnd::MillraceSpinning => Devices::Millrace { sidecore: sidecore(10_000) },
        }
    }
}

fn sidecore(spin_us: u32) -> String {
    format!("count = 1\nspin_us = {spin_us}")
}

/// Threads of a pair during a load.
struct Threads {
    /// Threads that do the I/O.
    io: Vec<Thread>,
    /// QEMU's main loops, where they only pass interrupts on.
    passing: Vec<Thread>,
}

fn threads(fleet: &Fleet, load: Load, back_end: BackEnd) -> Result<Threads, BenchError> {
    let loops = fleet.main_loops();
    let taking_part = loops.iter().copied().take(load.guests()).collect();
    Ok(match (back_end, load) {
        (BackEnd::Qemu, Load::RoundTrip) => Threads { io: taking_part, passing: Vec::new() },
        (BackEnd::Qemu, Load::DiskRead) => {
            Threads { io: fleet.disk_threads()?, passing: taking_part }
        }
        _ => Threads { io: fleet.sidecores()?, passing: taking_part },
    })
}

/// The host's counters at one moment.
struct Moment {
    io_wakeups: u64,
    passing_wakeups: u64,
    interrupts: u64,
    daemon: Option<(f64, f64)>,
}

impl Moment {
    fn now(fleet: &Fleet, threads: &Threads) -> Result<Moment, BenchError> {
        let metric = |name| match fleet.daemon() {
            Some(d) => d.metric_sum(name, &[]).map(Some),
            None => Ok(None),
        };
        let metric = |name| metric(name).map_err(|e| BenchError::lab("ask the daemon", e));
        let kicks = metric("millrace_queue_kicks_total")?;
        let notified = metric("millrace_queue_notifications_sent_total")?;
        Ok(Moment {
            io_wakeups: host::sleeps(&threads.io)?,
            passing_wakeups: host::sleeps(&threads.passing)?,
            interrupts: host::interrupts()?,
            daemon: kicks.zip(notified),
        })
    }
}

/// One load on one pair.
fn measure(
    fleet: &Fleet,
    load: Load,
    back_end: BackEnd,
    length: Duration,
) -> Result<Counts, BenchError> {
    let threads = threads(fleet, load, back_end)?;
    let (client, server) = (fleet.guest(0)?, fleet.guest(1)?);
    let server_before = guest::read(server)?;
    let before = Moment::now(fleet, &threads)?;
    let calls = SystemCalls::start(&threads.io)?;
    let (answer, mut seen) = guest::around(client, &load.script(length), length + GRACE)?;
    let calls = calls.count()?;
    let after = Moment::now(fleet, &threads)?;
    if load.guests() > 1 {
        seen = seen.and(&guest::read(server)?.since(&server_before));
    }
    let number = |field: &str| answer[field].as_f64().filter(|n| *n > 0.0);
    let (Some(requests), Some(rate)) = (number("count"), number("rate")) else {
        return Err(BenchError::lab(load.script(length), format!("it answered {answer}")));
    };
    let io = Io { calls, copies: load.copies(back_end), requests, rate };
    Ok(counts(&before, &after, &seen, &io))
}

/// Figures of a load beside its events: system calls, copies, requests.
struct Io {
    calls: Calls,
    copies: f64,
    requests: f64,
    rate: f64,
}

fn counts(before: &Moment, after: &Moment, seen: &Seen, io: &Io) -> Counts {
    let per = |n: u64| n as f64 / io.requests;
    let grown = |a: u64, b: u64| per(b.saturating_sub(a));
    let daemon = before.daemon.zip(after.daemon);
    Counts {
        requests_per_s: io.rate,
        exits: per(seen.kicks),
        guest_interrupts: per(seen.interrupts),
        io_wakeups: grown(before.io_wakeups, after.io_wakeups),
        io_system_calls: per(io.calls.work),
        io_yields: per(io.calls.yields),
        host_interrupts: grown(before.interrupts, after.interrupts),
        copies: io.copies,
        emulation_exits: per(seen.acknowledged),
        emulation_wakeups: grown(before.passing_wakeups, after.passing_wakeups),
        daemon_kicks: daemon.map(|(a, b)| (b.0 - a.0) / io.requests),
        daemon_notifications: daemon.map(|(a, b)| (b.1 - a.1) / io.requests),
    }
}

/// Boots all pairs and measures; returns every round.
pub fn run(setup: &Setup, progress: &mut Progress) -> Result<Vec<Sample>, BenchError> {
    let lab = Lab::new().map_err(|e| BenchError::lab("start the lab", e))?;
    let disks = Folder::new(&setup.vms.out.join("events-disks"))?;
    let ground = Ground { lab: &lab, kernel: setup.vms.kernel, disks: &disks };
    let base = Base { ground, millrace: &setup.vms.millrace };
    let mut pairs = Vec::new();
    for back_end in BACK_ENDS {
        progress.step(&format!("booting two guests: {}", back_end.name()));
        let fleet = Fleet::boot(&base, back_end.name(), &back_end.devices(), &[true, false])?;
        fleet.serve(1, "agent rr-server")?;
        fleet.guests().iter().try_for_each(guest::prepare)?;
        pairs.push((back_end, fleet));
    }
    let mut samples = Vec::new();
    for round in 0..=setup.plan.rounds {
        progress.step(&format!("round {round} of {}", setup.plan.rounds));
        for load in LOADS {
            for (back_end, fleet) in &pairs {
                let counts = measure(fleet, load, *back_end, setup.plan.length)?;
                samples.push(Sample { round, load, back_end: *back_end, counts });
            }
        }
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_become_events_per_request() {
        let moment = |n: u64, daemon| Moment {
            io_wakeups: n,
            passing_wakeups: 2 * n,
            interrupts: 3 * n,
            daemon,
        };
        let seen = Seen { kicks: 40, interrupts: 20, acknowledged: 10 };
        let calls = Calls { work: 60, yields: 30 };
        let io = Io { calls, copies: 2.0, requests: 10.0, rate: 500.0 };
        let got =
            counts(&moment(100, Some((5.0, 7.0))), &moment(120, Some((25.0, 17.0))), &seen, &io);
        assert_eq!((got.exits, got.guest_interrupts, got.emulation_exits), (4.0, 2.0, 1.0));
        assert_eq!((got.io_wakeups, got.emulation_wakeups, got.host_interrupts), (2.0, 4.0, 6.0));
        assert_eq!(got.io_yields, 3.0);
        assert_eq!((got.io_system_calls, got.copies, got.requests_per_s), (6.0, 2.0, 500.0));
        assert_eq!((got.daemon_kicks, got.daemon_notifications), (Some(2.0), Some(1.0)));
        let without = counts(&moment(9, None), &moment(9, None), &seen, &io);
        assert_eq!((without.io_wakeups, without.daemon_kicks), (0.0, None));
    }

    #[test]
    fn scripts_name_time_and_place() {
        let length = Duration::from_millis(1500);
        assert_eq!(Load::RoundTrip.script(length), "agent rr tcp 10.0.0.2 1.50 1");
        assert_eq!(Load::DiskRead.script(length), "agent disk-read /dev/vda 1.50 4096 1");
    }
}
