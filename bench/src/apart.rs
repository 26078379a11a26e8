//! How far two CPUs of this machine are from each other: how long a cache line takes there and back.
//!
//! Guests that exchange bytes through memory pay for it with every line, a guest's own loopback never.
//! A measuring machine may be a VM itself, whose host moves its CPUs: here 60 ns became 300 ns from one
//! minute to the next (another cache), and a stream between two guests fell from 1.2 to 0.6 times the
//! loopback, which stayed what it was. A median over both says little of either.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// CPUs that are farther from each other share no cache. Those that do have 30 to 70 ns here, those of one
/// core less; others have 280 to 320 ns.
pub const FAR_NS: f64 = 150.0;
/// Between two looks. Nobody tells when a host moves CPUs.
const LOOK: Duration = Duration::from_millis(250);
/// The fastest batch tells: somebody else may run in the others.
const BATCHES: u32 = 10;
/// Of a batch: some 100 µs.
const ROUND_TRIPS: u32 = 200;
/// For everything: whoever waits for a CPU gets it within some milliseconds.
const LONGEST: Duration = Duration::from_millis(200);

/// Nanoseconds of a round trip between the first two CPUs that this process may use. None where there is
/// one, or where both were busy all the time.
pub fn line_ns() -> Option<f64> {
    let cpus = base::cpu::allowed_cpus().ok()?;
    let [here, there] = *cpus.first_chunk()?;
    let (line, end) = (Line::default(), Instant::now() + LONGEST);
    std::thread::scope(|scope| {
        scope.spawn(|| base::cpu::pin_current_thread(there).map(|()| line.answer(end)));
        let asker = scope.spawn(|| {
            base::cpu::pin_current_thread(here).ok()?;
            let batches = (0..BATCHES).filter_map(|batch| line.ask(batch, end));
            batches.min()
        });
        asker.join().ok().flatten()
    })
    .map(|batch| batch.as_secs_f64() * 1e9 / f64::from(ROUND_TRIPS))
}

/// Waits until CPUs are near each other, for so long in all.
#[derive(Debug)]
pub struct Patience {
    left: Duration,
}

impl Patience {
    /// `most` may be nothing.
    pub fn new(most: Duration) -> Patience {
        Patience { left: most }
    }

    /// Waits; how long. At the end they may be far all the same.
    pub fn wait_near(&mut self) -> Duration {
        self.wait(LOOK, line_ns)
    }

    fn wait(&mut self, look: Duration, distance_ns: impl Fn() -> Option<f64>) -> Duration {
        let mut waited = Duration::ZERO;
        while waited < self.left && distance_ns().is_some_and(|ns| ns > FAR_NS) {
            std::thread::sleep(look);
            waited += look;
        }
        self.left = self.left.saturating_sub(waited);
        waited
    }
}

/// Counts steps: those of the asker make it odd, those of the other one even. Alone on its line.
#[derive(Default)]
#[repr(align(128))]
struct Line(AtomicU32);

impl Line {
    /// False: the time is over.
    fn wait_for(&self, step: u32, end: Instant) -> bool {
        let mut spins = 0_u32;
        while self.0.load(Ordering::Acquire) != step {
            std::hint::spin_loop();
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
    use super::*;

    #[test]
    fn a_line_needs_some_time_between_two_cpus() {
        let cpus = base::cpu::allowed_cpus().unwrap();
        let ns = line_ns();
        // Both may have been busy all the time.
        assert!(cpus.len() > 1 || ns.is_none());
        assert!(ns.is_none_or(|ns| (1.0..LONGEST.as_nanos() as f64).contains(&ns)), "{ns:?}");
    }

    #[test]
    fn patience_ends() {
        let (look, seen) = (Duration::from_micros(1), std::cell::Cell::new(0));
        // Far five times, then near, then far for ever.
        let distance = || {
            seen.set(seen.get() + 1);
            Some(if seen.get() == 6 { FAR_NS } else { FAR_NS + 1.0 })
        };
        let mut patience = Patience::new(look * 8);
        assert_eq!(patience.wait(look, distance), look * 5);
        assert_eq!(patience.wait(look, distance), look * 3);
        assert_eq!(patience.wait(look, distance), Duration::ZERO);
        // What cannot be told is not waited for.
        assert_eq!(Patience::new(look).wait(look, || None), Duration::ZERO);
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
