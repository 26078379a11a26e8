//! CPU time by component, as in the paper's figure 4b.
//!
//! Threads are read one by one from `/proc` and told apart by process and name. A thread that began
//! meanwhile counts from zero; one that ended meanwhile is left out: the daemon's and QEMU's
//! workers for slow disk requests come and go, and do little.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::harness::cpu::{self, Accounts};
use crate::harness::error::BenchError;
use crate::harness::host::{self, Thread};

/// Microseconds of CPU time per MB (1,000,000 bytes) that arrived.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    /// The guest: QEMU's thread for its vCPU.
    pub vcpu: f64,
    /// QEMU's main loop and other threads.
    pub qemu: f64,
    /// The daemon's sidecore: switch, disk and vsock.
    pub sidecore: f64,
    /// The daemon's threads that move pipes' bytes; the reference's sender.
    pub pool: f64,
    /// Other threads of the daemon.
    pub daemon: f64,
    /// Threads of the host's kernel for deferred work and packets.
    pub kernel: f64,
    /// The client.
    pub client: f64,
    /// The whole machine but idle time. It says something only where no neighbour is busy.
    pub machine: f64,
}

/// Names of [`Cpu::parts`].
pub const PARTS: [&str; 6] = [
    "guest (vCPU)",
    "QEMU’s other threads",
    "sidecore",
    "pipe threads",
    "daemon’s others",
    "kernel threads",
];

impl Cpu {
    /// The parts of [`Cpu::total`], in the order of [`PARTS`].
    pub fn parts(&self) -> [f64; 6] {
        [self.vcpu, self.qemu, self.sidecore, self.pool, self.daemon, self.kernel]
    }

    /// CPU time of sending: everything but the client.
    pub fn total(&self) -> f64 {
        self.parts().iter().sum()
    }
}

/// Part of [`Cpu`] that a thread belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Vcpu,
    Qemu,
    Sidecore,
    Pool,
    Daemon,
    Kernel,
}

/// Meter of the CPU time of these processes and threads.
#[derive(Debug)]
pub struct Meter {
    /// The server's QEMU.
    pub qemu: u32,
    /// Threads of QEMU for vCPUs.
    pub vcpus: Vec<u32>,
    /// The daemon.
    pub daemon: u32,
    /// The reference's sender.
    pub sender: Thread,
    /// For the whole machine.
    pub accounts: Accounts,
}

/// Counters at one moment.
#[derive(Debug)]
pub struct Snapshot {
    threads: BTreeMap<u32, (Part, u64)>,
    machine: cpu::Snapshot,
    at: std::time::Instant,
}

/// CPU time so far, of one or several transfers.
#[derive(Debug, Default)]
pub struct Sum {
    /// Nanoseconds, in the order of [`PARTS`].
    parts: [f64; 6],
    client: f64,
    machine: f64,
    /// Part of the machine that strangers used, times the time.
    foreign: f64,
    wall: f64,
}

impl Meter {
    /// Reads all counters.
    pub fn snapshot(&self) -> Result<Snapshot, BenchError> {
        let mut threads = BTreeMap::new();
        let mut add = |part, list: Vec<Thread>| {
            for thread in list {
                // A thread that ended a moment ago is left out.
                if let Ok(times) = host::times(thread) {
                    threads.insert(thread.tid, (part, times.ran_ns));
                }
            }
        };
        add(Part::Kernel, kernel_threads());
        add(Part::Qemu, host::named(self.qemu, "")?);
        add(Part::Vcpu, self.vcpus.iter().map(|&tid| Thread { pid: self.qemu, tid }).collect());
        add(Part::Daemon, host::named(self.daemon, "")?);
        add(Part::Sidecore, host::named(self.daemon, "sidecore-")?);
        // There are none before the first pipe.
        add(Part::Pool, host::named(self.daemon, "pipe").unwrap_or_default());
        add(Part::Pool, vec![self.sender]);
        let machine = self.accounts.snapshot()?;
        Ok(Snapshot { threads, machine, at: std::time::Instant::now() })
    }

    /// Adds what happened between two snapshots; `client_ns` is what the client says of itself.
    pub fn add(&self, sum: &mut Sum, before: &Snapshot, after: &Snapshot, client_ns: u64) {
        for (tid, (part, ns)) in &after.threads {
            let then = before.threads.get(tid).map_or(0, |(_, ns)| *ns);
            sum.parts[*part as usize] += ns.saturating_sub(then) as f64;
        }
        let usage = self.accounts.between(&before.machine, &after.machine);
        let wall = (after.at - before.at).as_nanos() as f64;
        sum.machine += usage.machine * wall;
        sum.foreign += usage.foreign * wall;
        sum.wall += wall;
        sum.client += client_ns as f64;
    }
}

impl Sum {
    /// Both.
    pub fn and(&self, other: &Sum) -> Sum {
        Sum {
            parts: std::array::from_fn(|part| self.parts[part] + other.parts[part]),
            client: self.client + other.client,
            machine: self.machine + other.machine,
            foreign: self.foreign + other.foreign,
            wall: self.wall + other.wall,
        }
    }

    /// Part of the machine that strangers used.
    pub fn foreign(&self) -> f64 {
        self.foreign / self.wall.max(1.0)
    }

    /// Per MB.
    pub fn per_mb(&self, bytes: u64) -> Cpu {
        // Nanoseconds per byte times a thousand are microseconds per MB.
        let each = |ns: f64| ns * 1e3 / bytes.max(1) as f64;
        let [vcpu, qemu, sidecore, pool, daemon, kernel] = self.parts.map(each);
        let (client, machine) = (each(self.client), each(self.machine));
        Cpu { vcpu, qemu, sidecore, pool, daemon, kernel, client, machine }
    }
}

/// Threads of the host's kernel that do the work of others: deferred work and received packets.
fn kernel_threads() -> Vec<Thread> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let works = |pid: &u32| {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        comm.starts_with("ksoftirqd/") || comm.starts_with("kworker/")
    };
    pids.filter(works).map(|pid| Thread { pid, tid: pid }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_told_apart_and_new_threads_count_from_zero() {
        let own = Accounts { cores: 1, ..Accounts::default() };
        let (accounts, sender) = (own.clone(), Thread::current());
        let meter = Meter { qemu: 1, vcpus: vec![], daemon: 2, sender, accounts };
        let snapshot = |threads: &[(u32, Part, u64)]| Snapshot {
            threads: threads.iter().map(|&(tid, part, ns)| (tid, (part, ns))).collect(),
            machine: own.snapshot().unwrap(),
            at: std::time::Instant::now(),
        };
        let before = snapshot(&[(1, Part::Vcpu, 5_000), (2, Part::Pool, 100), (9, Part::Qemu, 7)]);
        let after =
            snapshot(&[(1, Part::Vcpu, 9_000), (2, Part::Pool, 300), (3, Part::Kernel, 50)]);
        let mut sum = Sum::default();
        meter.add(&mut sum, &before, &after, 10_000);
        meter.add(&mut sum, &before, &after, 10_000);
        let cpu = sum.per_mb(1_000_000);
        assert_eq!((cpu.vcpu, cpu.pool, cpu.kernel, cpu.qemu), (8.0, 0.4, 0.1, 0.0));
        assert_eq!((cpu.total(), cpu.client), (8.5, 20.0));
        assert_eq!(sum.and(&sum).per_mb(2_000_000), cpu);
        assert_eq!(PARTS.len(), cpu.parts().len());
    }
}
