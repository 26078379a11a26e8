//! Counters of sidecores and workers, and signs of life.

use std::sync::atomic::{AtomicBool, AtomicI32};

use base::counter::Counter;

/// Counters of a sidecore.
#[derive(Debug, Default)]
pub struct SidecoreStats {
    /// Rounds over all workers.
    pub rounds: Counter,
    /// Rounds in which something was done.
    pub busy_rounds: Counter,
    /// Number of sleeps.
    pub sleeps: Counter,
    /// Wake-ups by a watched descriptor or a call, not by a deadline.
    pub wakeups: Counter,
    /// Times that work was found by polling on, which would have had to wake it otherwise.
    pub spin_hits: Counter,
    /// Nanoseconds spent in rounds that did something.
    pub busy_ns: Counter,
    /// Nanoseconds spent in rounds that found nothing.
    pub spin_ns: Counter,
    /// Nanoseconds asleep, falling asleep and waking up included.
    pub asleep_ns: Counter,
    /// Polling time before a sleep now, in nanoseconds (a gauge).
    pub spin_limit_ns: Counter,
    /// Workers on it now.
    pub workers: Counter,
    /// Workers that were taken off because they panicked (a bug of ours).
    pub panics: Counter,
    /// 1 while it takes workers, 0 while it is parked. Written by the [`crate::Placer`], where
    /// there is one.
    pub active: Counter,
    /// Load at the last look of the [`crate::Placer`], in percent (a gauge); 0 without one.
    pub load_percent: Counter,
    /// Times that it neither slept nor finished a round for about a second. Counted by the
    /// [`crate::Watchdog`], where there is one.
    pub stalls: Counter,
}

/// Counters of a worker, written by the sidecore it is on.
#[derive(Debug, Default)]
pub struct WorkerStats {
    /// Nanoseconds spent in its polls that did something; extrapolated from the rounds that are
    /// sampled.
    pub busy_ns: Counter,
    /// Times it was moved to another sidecore.
    pub moves: Counter,
}

/// Signs of life that a [`crate::Watchdog`] reads, besides the counters of rounds and sleeps.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// Number of the thread; 0 before it runs.
    pub(crate) thread: AtomicI32,
    /// The thread sleeps, or has ended as it should: no progress is expected.
    pub(crate) rests: AtomicBool,
    /// The watchdog's verdict.
    pub(crate) stalled: AtomicBool,
}
