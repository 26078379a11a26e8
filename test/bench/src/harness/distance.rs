//! How far two CPUs of this machine are from each other: how long a cache line takes there and
//! back.
//!
//! Guests that exchange bytes through memory pay for it with every line, a guest's own loopback on
//! one CPU never. A measuring machine may be a VM itself, whose host moves its CPUs: here 60 ns
//! become 300 ns from one minute to the next, and a stream between two guests falls to half, while
//! the loopback stays what it was. A median over both says little of either. What `/sys` tells of
//! shared caches is not true then, so it is measured.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Above it two CPUs share no cache, as far as their distance tells: those of this kind of machine
/// have 55 to 90 ns or 270 to 360 ns.
pub const FAR_NS: f64 = 200.0;
/// Between two looks. Nobody tells when a host moves CPUs.
const LOOK: Duration = Duration::from_millis(250);
/// The fastest batch tells: somebody else may run in the others.
const BATCHES: u32 = 10;
/// Round trips of a batch: 10 to 100 µs.
const ROUND_TRIPS: u32 = 200;
/// For everything: whoever waits for a CPU gets it within some milliseconds.
const LONGEST: Duration = Duration::from_millis(200);

/// Whether a distance is more than [`FAR_NS`].
pub fn is_far(ns: f64) -> bool {
    ns > FAR_NS
}

/// Nanoseconds of a round trip between two CPUs. None where either was busy all the time, or is not
/// ours.
pub fn line_ns([here, there]: [usize; 2]) -> Option<f64> {
    let (line, end) = (Line::default(), Instant::now() + LONGEST);
    let batch = std::thread::scope(|scope| {
        let thread = || std::thread::Builder::new().name("apart".into());
        let answer = || base::cpu::pin_current_thread(there).map(|()| line.answer(end));
        thread().spawn_scoped(scope, answer).ok()?;
        let ask = || {
            base::cpu::pin_current_thread(here).ok()?;
            (0..BATCHES).filter_map(|batch| line.ask(batch, end)).min()
        };
        thread().spawn_scoped(scope, ask).ok()?.join().ok()?
    })?;
    Some(batch.as_secs_f64() * 1e9 / f64::from(ROUND_TRIPS))
}

/// Waits until CPUs are near each other, no longer than it was given time for.
#[derive(Debug, Default)]
pub struct Patience {
    left: Duration,
}

impl Patience {
    /// More time.
    pub fn add(&mut self, time: Duration) {
        self.left += time;
    }

    /// How long it would wait.
    pub fn left(&self) -> Duration {
        self.left
    }

    /// Waits while `distance_ns` [`is_far`]; how long.
    pub fn wait(&mut self, distance_ns: impl Fn() -> Option<f64>) -> Duration {
        let start = Instant::now();
        while start.elapsed() < self.left && distance_ns().is_some_and(is_far) {
            std::thread::sleep(LOOK.min(self.left.saturating_sub(start.elapsed())));
        }
        let waited = start.elapsed();
        self.left = self.left.saturating_sub(waited);
        waited
    }
}

/// Counts steps: those of the asker make it odd, those of the other one even. Alone on its line.
#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU32);

impl Line {
    /// False: the time is over. Without a hint to the CPU that this is a loop: on some it takes
    /// longer than a line does.
    fn wait_for(&self, step: u32, end: Instant) -> bool {
        let mut spins = 0_u32;
        while self.0.load(Ordering::Acquire) != step {
            spins = spins.wrapping_add(1);
            // Reading the clock each time would be measured as well.
            if spins.is_multiple_of(1024) && Instant::now() >= end {
                return false;
            }
        }
        true
    }

    /// How long a batch took; none if the time is over.
    fn ask(&self, batch: u32, end: Instant) -> Option<Duration> {
        let first = batch * ROUND_TRIPS;
        let start = Instant::now();
        for trip in first..first + ROUND_TRIPS {
            self.0.store(2 * trip + 1, Ordering::Release);
            if !self.wait_for(2 * trip + 2, end) {
                return None;
            }
        }
        Some(start.elapsed())
    }

    fn answer(&self, end: Instant) {
        for trip in 0..BATCHES * ROUND_TRIPS {
            if !self.wait_for(2 * trip + 1, end) {
                return;
            }
            self.0.store(2 * trip + 2, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_line_needs_some_time_between_two_cpus() {
        let cpus = base::cpu::allowed_cpus().unwrap();
        if let [here, there, ..] = *cpus {
            // Both may be busy all the time.
            let ns = line_ns([here, there]);
            let possible = 1.0..LONGEST.as_nanos() as f64;
            assert!(ns.is_none_or(|ns| possible.contains(&ns)), "{ns:?}");
        }
        assert_eq!(line_ns([cpus[0], usize::MAX]), None, "no such CPU");
    }

    #[test]
    fn patience_ends() {
        let seen = Cell::new(0);
        let distance = |near_at: u32| {
            let seen = &seen;
            move || {
                seen.set(seen.get() + 1);
                Some(if seen.get() == near_at { FAR_NS } else { FAR_NS + 1.0 })
            }
        };
        let mut patience = Patience::default();
        assert!(patience.wait(distance(0)) < LOOK, "no time at all");
        assert_eq!(seen.get(), 0);
        patience.add(LOOK * 2);
        // Near at the second look: what is left is for the next time, and then it ends.
        assert!((LOOK..LOOK * 2).contains(&patience.wait(distance(2))));
        assert_eq!(seen.get(), 2);
        patience.wait(distance(0));
        assert_eq!(patience.left(), Duration::ZERO);
        // What cannot be told is not waited for.
        patience.add(LOOK);
        assert!(patience.wait(|| None) < LOOK);
    }

    #[test]
    fn nobody_waits_for_one_that_does_not_come() {
        let (line, end) = (Line::default(), Instant::now());
        assert_eq!(line.ask(0, end), None);
        line.0.store(0, Ordering::Relaxed);
        line.answer(end);
        assert_eq!(line.0.load(Ordering::Relaxed), 0);
    }
}
