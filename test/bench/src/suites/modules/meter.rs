//! CPU time by component, as in the paper's figure 5: that of the guest and that of the host.
//!
//! Whole processes are read by their CPU clocks, which know of threads that have ended: QEMU's
//! workers for its disks come and go.

use serde::{Deserialize, Serialize};

use crate::harness::cpu::{self, Accounts};
use crate::harness::error::BenchError;
use crate::harness::host::{self, Calls, SystemCalls, Thread};

/// Microseconds of CPU time for a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Cpu {
    /// The guest: QEMU's thread for its CPU. Emulates IDE as well.
    pub guest: f64,
    /// QEMU's other threads: its disks.
    pub qemu: f64,
    /// The daemon: vsock and Millrace's disk.
    pub daemon: f64,
    /// The process with the table store.
    pub module: f64,
    /// Threads of the host's kernel that do the work of others: deferred work, the file system's
    /// journal.
    pub kernel: f64,
}

/// Names of [`Cpu::parts`].
pub const PARTS: [&str; 5] =
    ["guest", "QEMU’s other threads", "daemon", "module’s process", "kernel threads"];

impl Cpu {
    /// In the order of [`PARTS`].
    pub fn parts(&self) -> [f64; 5] {
        [self.guest, self.qemu, self.daemon, self.module, self.kernel]
    }

    /// From parts in that order.
    pub fn from_parts([guest, qemu, daemon, module, kernel]: [f64; 5]) -> Cpu {
        Cpu { guest, qemu, daemon, module, kernel }
    }

    /// All but the guest's.
    pub fn host(&self) -> f64 {
        self.parts()[1..].iter().sum()
    }

    /// All.
    pub fn total(&self) -> f64 {
        self.parts().iter().sum()
    }
}

/// Meter of the CPU time of these processes and threads.
#[derive(Debug)]
pub struct Meter {
    /// QEMU.
    pub qemu: u32,
    /// Threads of QEMU for the guest's CPUs.
    pub vcpus: Vec<u32>,
    /// The daemon.
    pub daemon: u32,
    /// The process with the table store.
    pub module: u32,
    /// For the whole machine.
    pub accounts: Accounts,
}

/// Counters at one moment.
#[derive(Debug)]
pub struct Snapshot {
    parts_ns: [u64; 5],
    machine: cpu::Snapshot,
}

impl Meter {
    /// Reads all counters.
    pub fn snapshot(&self) -> Result<Snapshot, BenchError> {
        let vcpus: Vec<Thread> =
            self.vcpus.iter().map(|&tid| Thread { pid: self.qemu, tid }).collect();
        let guest = host::cpu_ns(&vcpus)?;
        let qemu = process_ns(self.qemu)?.saturating_sub(guest);
        let (daemon, module) = (process_ns(self.daemon)?, process_ns(self.module)?);
        let parts_ns = [guest, qemu, daemon, module, kernel_ns()];
        Ok(Snapshot { parts_ns, machine: self.accounts.snapshot()? })
    }

    /// CPU time of a row, and the part of the machine that strangers used.
    pub fn between(&self, before: &Snapshot, after: &Snapshot, rows: u32) -> (Cpu, f64) {
        let each = |part: usize| {
            let ns = after.parts_ns[part].saturating_sub(before.parts_ns[part]);
            ns as f64 / 1e3 / f64::from(rows.max(1))
        };
        let cpu = Cpu::from_parts(std::array::from_fn(each));
        (cpu, self.accounts.between(&before.machine, &after.machine).foreign)
    }

    /// Begins to count the system calls of all threads but the guest's CPUs; none where the kernel
    /// does not let us.
    pub fn calls(&self) -> Option<SystemCalls> {
        let mut threads = Vec::new();
        for pid in [self.qemu, self.daemon, self.module] {
            threads.extend(host::named(pid, "").ok()?);
        }
        threads.retain(|thread| !self.vcpus.contains(&thread.tid));
        SystemCalls::start(&threads).ok()
    }
}

/// All of them, for each of some rows.
pub fn per_row(calls: Calls, rows: u32) -> f64 {
    (calls.work + calls.yields) as f64 / f64::from(rows.max(1))
}

/// CPU time of a process, nanoseconds, with threads that have ended.
fn process_ns(pid: u32) -> Result<u64, BenchError> {
    let failed = |why: std::io::Error| BenchError::Accounting {
        what: format!("the CPU clock of process {pid}"),
        why: why.to_string(),
    };
    let mut clock: libc::clockid_t = 0;
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes a number into `clock`, which lives across it.
    let errno = unsafe { libc::clock_getcpuclockid(pid as libc::pid_t, &raw mut clock) };
    if errno != 0 {
        return Err(failed(std::io::Error::from_raw_os_error(errno)));
    }
    // SAFETY: the call writes a `timespec` into `time`, which lives across it.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(failed(std::io::Error::last_os_error()));
    }
    Ok(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// CPU time of those threads of the host's kernel that I/O keeps busy.
fn kernel_ns() -> u64 {
    let Ok(entries) = std::fs::read_dir("/proc") else { return 0 };
    let pids = entries.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
    let works = |pid: &u32| {
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        ["ksoftirqd/", "kworker/", "jbd2/"].iter().any(|name| comm.starts_with(name))
    };
    // One that ended meanwhile counts no more.
    let ran = |pid| host::times(Thread { pid, tid: pid }).map_or(0, |t| t.ran_ns);
    pids.filter(works).map(ran).sum()
}

/// The child of a process that runs modules.
pub fn module_process(daemon: u32) -> Option<u32> {
    let runs = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|b| *b == 0).any(|word| word == b"module-process")
    };
    lab::process::children(daemon).into_iter().find(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_that_of_a_row_and_of_its_part() {
        let accounts = Accounts { cores: 1, ..Accounts::default() };
        let machine = accounts.snapshot().unwrap();
        let meter = Meter { qemu: 1, vcpus: vec![], daemon: 1, module: 1, accounts };
        let at = |parts_ns| Snapshot { parts_ns, machine };
        let (cpu, _) = meter.between(&at([0, 5, 0, 0, 9]), &at([4_000, 5, 2_000, 6_000, 3]), 2);
        assert_eq!(cpu.parts(), [2.0, 0.0, 1.0, 3.0, 0.0]);
        assert_eq!((cpu.host(), cpu.total()), (4.0, 6.0));
        assert_eq!(PARTS.len(), cpu.parts().len());
    }

    #[test]
    fn our_own_clock_runs_and_that_of_nobody_is_an_error() {
        let before = process_ns(std::process::id()).unwrap();
        (0..200_000u64).for_each(|n| drop(std::hint::black_box(n.to_string())));
        assert!(process_ns(std::process::id()).unwrap() > before);
        // No process has a larger number than the kernel's PID_MAX_LIMIT, which this is.
        assert!(process_ns(1 << 22).is_err());
        assert_eq!(module_process(std::process::id()), None);
    }
}
