//! Users of the host's CPUs during a window.
//!
//! Each side's own time is the user and system time of its processes: the QEMU processes and, on
//! our side, the daemon. Work that the kernel does for a TAP device and the bridge runs in the
//! context of the QEMU thread that wrote the packet, so it is in there; what little falls to kernel
//! threads is in the whole-machine figure. That one is everything except idle time and the
//! spinners. What neither side, nor this program, nor a spinner used is foreign load; a lot of it
//! makes a round worthless, so it is reported.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::harness::error::BenchError;
use crate::harness::host::{self, Thread};

/// Ticks per second in /proc: fixed by the kernel's interface to programs.
pub(crate) const TICKS_PER_S: f64 = 100.0;

/// Processes and threads whose CPU time is read.
#[derive(Debug, Clone, Default)]
pub struct Accounts {
    /// Processes of the side being measured.
    pub side: Vec<u32>,
    /// Processes of the other side; idle, but they have timers.
    pub other: Vec<u32>,
    /// Threads of this process that only keep CPUs awake.
    pub spinners: Vec<Thread>,
    /// CPUs of the machine.
    pub cores: u32,
}

/// Counters at one moment.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot {
    at: Instant,
    side_s: f64,
    other_s: f64,
    own_s: f64,
    spinners_s: f64,
    idle_s: f64,
}

/// Shares of a window.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// CPU seconds per second of the side's processes.
    pub side: f64,
    /// CPU seconds per second of everything but idle and spinners.
    pub machine: f64,
    /// Fraction of the machine used by neither side, nor by this program.
    pub foreign: f64,
}

impl Accounts {
    /// Reads all counters. A process that is gone is an error: its side cannot be measured.
    pub fn snapshot(&self) -> Result<Snapshot, BenchError> {
        let sum = |pids: &[u32]| pids.iter().try_fold(0.0, |s, p| Ok(s + process_s(*p)?));
        let spinners_ns = host::cpu_ns(&self.spinners)?;
        Ok(Snapshot {
            at: Instant::now(),
            side_s: sum(&self.side)?,
            other_s: sum(&self.other)?,
            own_s: process_s(std::process::id())?,
            spinners_s: spinners_ns as f64 / 1e9,
            idle_s: idle_s(&read("/proc/stat")?)?,
        })
    }

    /// Usage between two snapshots.
    pub fn between(&self, a: &Snapshot, b: &Snapshot) -> Usage {
        let wall = b.at.duration_since(a.at).as_secs_f64().max(1e-9);
        let capacity = wall * f64::from(self.cores.max(1));
        let spinners = b.spinners_s - a.spinners_s;
        let busy = (capacity - (b.idle_s - a.idle_s) - spinners).max(0.0);
        // The spinners are threads of this process.
        let own = (b.own_s - a.own_s - spinners).max(0.0);
        let side = b.side_s - a.side_s;
        let known = side + (b.other_s - a.other_s) + own;
        Usage {
            side: side / wall,
            machine: busy / wall,
            foreign: ((busy - known) / capacity).clamp(0.0, 1.0),
        }
    }
}

fn read(path: &str) -> Result<String, BenchError> {
    std::fs::read_to_string(path)
        .map_err(|e| BenchError::Accounting { what: path.into(), why: e.to_string() })
}

fn malformed(what: &str) -> BenchError {
    BenchError::Accounting { what: what.into(), why: "unexpected format".into() }
}

/// User and system time of a process with all its threads, those that ended included.
fn process_s(pid: u32) -> Result<f64, BenchError> {
    let path = format!("/proc/{pid}/stat");
    stat_s(&read(&path)?).ok_or_else(|| malformed(&path))
}

fn stat_s(line: &str) -> Option<f64> {
    // The name may hold spaces and parentheses; the last one closes it.
    let (_, rest) = line.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((user + system) / TICKS_PER_S)
}

/// Idle time of all CPUs, waiting for a disk included.
fn idle_s(stat: &str) -> Result<f64, BenchError> {
    let fields = stat.lines().next().and_then(|l| l.strip_prefix("cpu "));
    let numbers: Option<Vec<f64>> =
        fields.map(|f| f.split_whitespace().map_while(|n| n.parse().ok()).collect());
    match numbers.as_deref() {
        Some([_, _, _, idle, waiting, ..]) => Ok((idle + waiting) / TICKS_PER_S),
        _ => Err(malformed("/proc/stat")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn reads_a_stat_line_whatever_the_name() {
        let line = "42 (a ) b (c) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 1";
        assert_eq!(stat_s(line), Some(3.0));
        assert_eq!(stat_s("42 (x) S 1 2"), None);
    }

    #[test]
    fn idle_is_idle_and_waiting() {
        assert_eq!(idle_s("cpu  10 0 10 300 200 0 0 0 0 0\ncpu0 1\n").unwrap(), 5.0);
        assert!(idle_s("cpu  10 0\n").is_err());
        assert!(idle_s("").is_err());
    }

    /// Usage over some seconds on `cores` CPUs, from what the side, the other one, this program,
    /// its spinners and idling have taken before and after.
    fn usage(cores: u32, seconds: u64, before: [f64; 5], after: [f64; 5]) -> Usage {
        let start = Instant::now();
        let snapshot = |at, [side_s, other_s, own_s, spinners_s, idle_s]: [f64; 5]| Snapshot {
            at,
            side_s,
            other_s,
            own_s,
            spinners_s,
            idle_s,
        };
        let end = start + Duration::from_secs(seconds);
        let accounts = Accounts { cores, ..Default::default() };
        accounts.between(&snapshot(start, before), &snapshot(end, after))
    }

    #[test]
    fn spinners_and_idle_are_no_load_and_the_rest_is_foreign() {
        // Two seconds on two cores: 4 CPU seconds. Spinners 1.5, idle 0.5, side 1.2, other 0.1,
        // this program 1.6 of which 1.5 are the spinners: 0.6 is left for strangers.
        let u = usage(2, 2, [5.0, 1.0, 2.0, 1.0, 7.0], [6.2, 1.1, 3.6, 2.5, 7.5]);
        assert!((u.side - 0.6).abs() < 1e-9, "{u:?}");
        assert!((u.machine - 1.0).abs() < 1e-9, "{u:?}");
        assert!((u.foreign - 0.15).abs() < 1e-9, "{u:?}");
    }

    #[test]
    fn rounding_of_ticks_never_gives_negative_load() {
        let u = usage(1, 1, [0.0; 5], [0.5, 0.0, 0.0, 0.0, 0.51]);
        assert_eq!(u.foreign, 0.0);
    }

    #[test]
    fn a_missing_process_is_named() {
        let accounts = Accounts { side: vec![u32::MAX], ..Default::default() };
        let text = accounts.snapshot().unwrap_err().to_string();
        assert!(text.contains("/proc/4294967295/stat"), "{text}");
    }

    #[test]
    fn our_own_process_can_be_read() {
        let accounts = Accounts { cores: 1, ..Default::default() };
        let a = accounts.snapshot().unwrap();
        let b = accounts.snapshot().unwrap();
        assert!(b.own_s >= a.own_s && b.idle_s >= a.idle_s);
    }
}
