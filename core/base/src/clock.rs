//! The seam for time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A monotonic clock.
pub trait Clock: Send + Sync {
    /// Nanoseconds since some fixed moment in the past; never goes back.
    fn now_ns(&self) -> u64;
}

/// The clock of the product: `CLOCK_MONOTONIC`, read through the vDSO (no system call).
#[derive(Debug, Default, Clone, Copy)]
pub struct MonotonicClock;

impl Clock for MonotonicClock {
    fn now_ns(&self) -> u64 {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    }
}

/// A clock that moves only when told to: for tests and the simulator.
#[derive(Debug, Default, Clone)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// Moves the clock forward by `step_ns` nanoseconds.
    pub fn advance_ns(&self, step_ns: u64) {
        self.0.fetch_add(step_ns, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now_ns(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monotonic_never_goes_back() {
        let clock = MonotonicClock;
        let mut last_ns = 0;
        for _ in 0..1000 {
            let now_ns = clock.now_ns();
            assert!(now_ns >= last_ns);
            last_ns = now_ns;
        }
    }

    #[test]
    fn manual_moves_only_when_told() {
        let clock = ManualClock::default();
        let twin = clock.clone();
        assert_eq!(clock.now_ns(), 0);
        clock.advance_ns(7);
        assert_eq!(twin.now_ns(), 7);
    }
}
