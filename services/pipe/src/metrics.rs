//! Counters of a VM's pipes. Written by several threads, so these are atomics; none of them is per
//! packet.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base::histogram::{Histogram, Snapshot};
use base::sync::lock;
use guest_abi::Reason;

/// Counters of a VM's pipes.
#[derive(Debug, Default)]
pub struct PipeStats {
    /// Pipes that agents asked for.
    pub asked: AtomicU64,
    /// Pipes that began to move bytes.
    pub started: AtomicU64,
    /// Bytes that arrived.
    pub moved_bytes: AtomicU64,
    /// Connections whose peers acknowledge copied bytes, at the moment.
    pub detached: AtomicU64,
    /// Agents that were welcomed.
    pub agents: AtomicU64,
    /// Connections whose hello was not an agent's of this VM.
    pub unproved: AtomicU64,
    /// Reads of files by their extents, past the queues of their disks.
    pub reads: AtomicU64,
    /// Bytes of these.
    pub read_bytes: AtomicU64,
    /// Times that a pipe had to wait at the VM's ceiling before it read.
    pub held: AtomicU64,
    /// Pipes that do so at the moment.
    pub held_now: AtomicU64,
    ended: ByReason,
    refused: ByReason,
    times: Mutex<Times>,
}

/// Counts by reason, in the order of [`Reason::ALL`].
#[derive(Debug)]
struct ByReason(Box<[AtomicU64]>);

impl Default for ByReason {
    fn default() -> Self {
        Self(Reason::ALL.iter().map(|_| AtomicU64::default()).collect())
    }
}

impl ByReason {
    fn add(&self, reason: Reason, count: u64) {
        let at = Reason::ALL.iter().position(|&r| r == reason).unwrap_or_default();
        self.0[at].fetch_add(count, Ordering::Relaxed);
    }

    fn all(&self) -> impl Iterator<Item = (Reason, u64)> {
        let counts = self.0.iter().map(|count| count.load(Ordering::Relaxed));
        Reason::ALL.iter().copied().zip(counts)
    }
}

#[derive(Debug, Default)]
struct Times {
    handover: Histogram,
    total: Histogram,
}

impl PipeStats {
    /// Counts a pipe that ended.
    pub fn end(&self, reason: Reason, moved_bytes: u64, took: Duration) {
        self.ended.add(reason, 1);
        self.moved_bytes.fetch_add(moved_bytes, Ordering::Relaxed);
        let times = lock(&self.times);
        times.total.record(took.as_nanos() as u64);
    }

    /// Counts a connection that was taken over; `took` is from knowing its numbers to steering it.
    pub fn hand_over(&self, took: Duration) {
        self.started.fetch_add(1, Ordering::Relaxed);
        let times = lock(&self.times);
        times.handover.record(took.as_nanos() as u64);
    }

    /// Number of pipes that ended, by reason.
    pub fn ended(&self) -> impl Iterator<Item = (Reason, u64)> {
        self.ended.all()
    }

    /// Counts pipes that the guest's agent refused itself.
    pub fn refuse(&self, refusals: &[(Reason, u32)]) {
        refusals.iter().for_each(|&(reason, count)| self.refused.add(reason, count.into()));
    }

    /// Number of pipes that the agent refused, by reason: as the guest says.
    pub fn refused(&self) -> impl Iterator<Item = (Reason, u64)> {
        self.refused.all()
    }

    /// Times of handovers and of whole pipes, in nanoseconds.
    pub fn times(&self) -> (Snapshot, Snapshot) {
        let times = lock(&self.times);
        (times.handover.snapshot(), times.total.snapshot())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_counted_by_reason() {
        let stats = PipeStats::default();
        stats.end(Reason::NoFlow, 0, Duration::ZERO);
        stats.end(Reason::Complete, 10, Duration::from_micros(3));
        stats.end(Reason::Complete, 5, Duration::from_micros(3));
        let counted: Vec<_> = stats.ended().filter(|(_, n)| *n > 0).collect();
        assert_eq!(counted, [(Reason::Complete, 2), (Reason::NoFlow, 1)]);
        stats.refuse(&[(Reason::NoLease, 3), (Reason::Mptcp, u32::MAX)]);
        stats.refuse(&[(Reason::NoLease, 1)]);
        let counted: Vec<_> = stats.refused().filter(|(_, n)| *n > 0).collect();
        assert_eq!(counted, [(Reason::Mptcp, u64::from(u32::MAX)), (Reason::NoLease, 4)]);
        assert_eq!(stats.moved_bytes.load(Ordering::Relaxed), 15);
        assert_eq!(stats.times().1.count(), 3);
    }
}
