//! CPU time and run-queue delay of all threads of some processes, as [`host::times`] has them.
//!
//! A back end that polls uses its core whatever it does, so its CPU time says little; the time it
//! was ready to run and did not get its core says whether the machine was ours alone.

use std::collections::BTreeMap;
use std::time::Instant;

use crate::harness::host::{self, Thread, Times};

/// Part of the time that a busy thread waited for its CPU, above which a load is disturbed; see
/// also [`STEAL_LIMIT`](crate::harness::steal_time::STEAL_LIMIT).
pub const DELAY_LIMIT: f64 = 0.03;

/// Counters of all threads of some processes at one moment.
pub struct Snapshot {
    at: Instant,
    threads: BTreeMap<(u32, u32), Times>,
}

/// Usage between two snapshots, per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Usage {
    /// CPU seconds of all threads.
    pub cpu: f64,
    /// Seconds that the busiest thread was ready and did not run.
    pub delay: f64,
}

impl Snapshot {
    /// When it was taken.
    pub fn at(&self) -> Instant {
        self.at
    }

    /// Whether there was no thread to read.
    pub fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }
}

/// Reads the counters of all threads of `pids`. A thread that is gone is left out.
pub fn snapshot(pids: &[u32]) -> Snapshot {
    let mut threads = BTreeMap::new();
    for pid in pids {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
        for task in tasks.into_iter().flatten().flatten() {
            let tid = task.file_name().to_str().and_then(|t| t.parse().ok());
            let Some(tid) = tid else { continue };
            if let Ok(times) = host::times(Thread { pid: *pid, tid }) {
                threads.insert((*pid, tid), times);
            }
        }
    }
    Snapshot { at: Instant::now(), threads }
}

impl Snapshot {
    /// Usage since `earlier`; none when no thread was there both times.
    pub fn since(&self, earlier: &Snapshot) -> Option<Usage> {
        let wall_ns = self.at.duration_since(earlier.at).as_nanos().max(1) as f64;
        let both = self.threads.iter().filter_map(|(id, now)| {
            let then = earlier.threads.get(id)?;
            let less = |a: u64, b: u64| a.saturating_sub(b) as f64;
            Some((less(now.ran_ns, then.ran_ns), less(now.waited_ns, then.waited_ns)))
        });
        let both: Vec<(f64, f64)> = both.collect();
        let busiest = both.iter().max_by(|a, b| a.0.total_cmp(&b.0))?;
        let ran: f64 = both.iter().map(|t| t.0).sum();
        Some(Usage { cpu: ran / wall_ns, delay: busiest.1 / wall_ns })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(at: Instant, threads: &[(u32, u64, u64)]) -> Snapshot {
        let times = |t: &(u32, u64, u64)| ((1, t.0), Times { ran_ns: t.1, waited_ns: t.2 });
        Snapshot { at, threads: threads.iter().map(times).collect() }
    }

    #[test]
    fn cpu_is_of_all_threads_and_delay_of_the_busiest() {
        let t = Instant::now();
        let a = at(t, &[(1, 0, 0), (2, 100, 50), (3, 0, 7)]);
        let b = at(t + Duration::from_nanos(1000), &[(1, 900, 30), (2, 200, 850), (4, 1000, 1000)]);
        let u = b.since(&a).unwrap();
        assert!((u.cpu - 1.0).abs() < 1e-9, "{u:?}");
        assert!((u.delay - 0.03).abs() < 1e-9, "{u:?}");
    }

    #[test]
    fn nothing_is_said_of_processes_that_are_gone() {
        let t = Instant::now();
        assert_eq!(at(t, &[]).since(&at(t, &[(1, 5, 5)])), None);
        assert!(snapshot(&[u32::MAX]).threads.is_empty());
    }

    #[test]
    fn our_own_threads_can_be_read() {
        let us = [std::process::id()];
        let first = snapshot(&us);
        assert!(snapshot(&us).since(&first).is_some());
    }
}
