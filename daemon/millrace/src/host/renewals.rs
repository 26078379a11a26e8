//! Renewals of workers that panicked: how often, and after which waits.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use base::sync::lock;
use control::sample::Metrics;

/// Most renewals of a worker within [`PERIOD`].
pub const MAX_RENEWALS: usize = 5;

/// Time for which a renewal counts.
pub const PERIOD: Duration = Duration::from_secs(60);

/// Wait before the second renewal of a period; before each later one it is twice as long.
const FIRST_WAIT: Duration = Duration::from_millis(100);

/// Renewals of workers that panicked, by their names.
#[derive(Default)]
pub struct Renewals(Mutex<BTreeMap<String, History>>);

#[derive(Default)]
struct History {
    /// Renewals of the last period, the oldest first.
    recent: VecDeque<Instant>,
    renewed: u64,
    given_up: u64,
}

impl History {
    /// Counts a panic. Returns how long to wait before the worker is made anew; none to give it up.
    fn panicked(&mut self, now: Instant) -> Option<Duration> {
        while self.recent.front().is_some_and(|at| now.duration_since(*at) >= PERIOD) {
            self.recent.pop_front();
        }
        let before = self.recent.len();
        if before >= MAX_RENEWALS {
            // Whoever starts it by hand begins with a clean slate.
            self.recent.clear();
            return None;
        }
        self.recent.push_back(now);
        Some(before.checked_sub(1).map_or(Duration::ZERO, |n| FIRST_WAIT * (1 << n)))
    }
}

impl Renewals {
    /// Counts a panic of a worker. Returns the wait before its renewal; none to give it up.
    pub fn panicked(&self, worker: &str) -> Option<Duration> {
        lock(&self.0).entry(worker.into()).or_default().panicked(Instant::now())
    }

    /// Counts a renewal of a worker, or that it was given up.
    pub fn count(&self, worker: &str, is_renewed: bool) {
        let mut all = lock(&self.0);
        let history = all.entry(worker.into()).or_default();
        *if is_renewed { &mut history.renewed } else { &mut history.given_up } += 1;
    }

    /// Counters of each worker that ever panicked.
    pub fn metrics(&self, all: &mut Metrics) {
        for (worker, history) in &*lock(&self.0) {
            let mut add = |name: &str, help, value| {
                let name = format!("millrace_worker_{name}_total");
                all.sample(&name, help, vec![("worker", worker.clone())], value);
            };
            add("renewals", "Times it was made anew after a panic.", history.renewed);
            add("given_up", "Times it was not, after too many panics.", history.given_up);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renewals_wait_longer_and_longer_and_end() {
        let mut history = History::default();
        let begin = Instant::now();
        let mut panicked = |after_s| history.panicked(begin + Duration::from_secs(after_s));
        let waits: Vec<_> = (0..6).map(|n| panicked(n).map(|wait| wait.as_millis())).collect();
        assert_eq!(waits, [Some(0), Some(100), Some(200), Some(400), Some(800), None]);
        // Started by hand.
        assert_eq!(panicked(7), Some(Duration::ZERO));
        assert_eq!(panicked(8), Some(FIRST_WAIT));
        assert_eq!(panicked(67), Some(FIRST_WAIT), "the one before the last is over a minute ago");
        assert_eq!(panicked(200), Some(Duration::ZERO));
    }
}
