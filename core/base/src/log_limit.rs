//! Log lines that a peer can cause.
//!
//! A front end that is refused in a loop could fill a disk with lines: 100,000 a second were seen.
//! So each port has a limit: some lines at once, then a few a minute. The next line says how many
//! were left out.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::sync::lock;

/// Lines at once: enough for the story of a session that fails.
const BURST: u32 = 20;
/// Time in which one more line may be written after a burst.
const EVERY: Duration = Duration::from_secs(6);

/// A limit of log lines. May be asked from several threads.
#[derive(Debug, Default)]
pub struct LogLimit {
    state: Mutex<State>,
    left_out: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Lines written that count against the burst.
    used: u32,
    /// Time since which one of them comes back in each [`EVERY`].
    since: Option<Instant>,
    left_out: u64,
}

impl LogLimit {
    /// Whether a line may be written now, and how many were left out before it.
    pub fn admit(&self) -> Option<u64> {
        self.admit_at(Instant::now())
    }

    /// Lines left out since the beginning.
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    fn admit_at(&self, now: Instant) -> Option<u64> {
        let mut state = lock(&self.state);
        let since = *state.since.get_or_insert(now);
        let earned = (now.duration_since(since).as_nanos() / EVERY.as_nanos()) as u32;
        if earned > 0 {
            state.used = state.used.saturating_sub(earned);
            state.since = Some(since + EVERY * earned);
        }
        if state.used >= BURST {
            state.left_out += 1;
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        if state.used == 0 {
            state.since = Some(now);
        }
        state.used += 1;
        Some(std::mem::take(&mut state.left_out))
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn abuse_V6_lines_are_few_and_say_how_many_were_left_out() {
        let limit = LogLimit::default();
        let start = Instant::now();
        let lines = |at: Instant| (0..1000).filter(|_| limit.admit_at(at).is_some()).count();
        assert_eq!(lines(start), 20);
        assert_eq!(lines(start + EVERY / 2), 0);
        assert_eq!(limit.admit_at(start + EVERY), Some(1980));
        assert_eq!(lines(start + EVERY), 0);
        assert_eq!(lines(start + EVERY * 60), 20);
        assert_eq!(limit.left_out(), 1980 + 1000 + 980);
    }
}
