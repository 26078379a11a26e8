//! Sessions in a row that ended before a queue ran.
//!
//! A front end that cannot use its port comes again at once, and for ever: QEMU does so when it was
//! given more queue pairs than the port has. Then a line a minute tells as much as a line a session,
//! and the port need not answer as fast as it can.

use std::time::{Duration, Instant};

/// Sessions that are logged one by one, and answered at once.
const PATIENCE: u64 = 3;
/// Between two lines about the others.
const TELL_EVERY: Duration = Duration::from_secs(60);
/// Before the next connection is taken: a hundred a second cost little.
const PAUSE: Duration = Duration::from_millis(10);

/// See the module's text.
#[derive(Debug, Default)]
pub(crate) struct Fruitless {
    count: u64,
    told: Option<Instant>,
}

impl Fruitless {
    /// Whether each session is worth its lines in the log.
    pub fn are_few(&self) -> bool {
        self.count < PATIENCE
    }

    /// How many there were since a queue ran.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// A session ended. Returns whether a line is due about those before and this one.
    pub fn note(&mut self, has_served: bool, now: Instant) -> bool {
        if has_served {
            *self = Self::default();
            return false;
        }
        self.count += 1;
        let is_due = self.told.is_none_or(|told| now.duration_since(told) >= TELL_EVERY);
        if self.are_few() || !is_due {
            return false;
        }
        self.told = Some(now);
        true
    }

    /// How long the next connection waits.
    pub fn pause(&self) -> Duration {
        if self.are_few() { Duration::ZERO } else { PAUSE }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn abuse_N1_an_endless_reconnect_is_a_line_a_minute() {
        let mut fruitless = Fruitless::default();
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        assert!(!fruitless.note(false, at(0)));
        assert!(!fruitless.note(false, at(0)));
        assert!(fruitless.are_few() && fruitless.pause().is_zero());
        assert!(fruitless.note(false, at(0)));
        for s in 0..60 {
            assert!(!fruitless.note(false, at(s)), "second {s}");
            assert!(!fruitless.are_few() && !fruitless.pause().is_zero());
        }
        assert!(fruitless.note(false, at(60)));
        assert_eq!(fruitless.count(), 64);
        assert!(!fruitless.note(true, at(61)));
        assert!(fruitless.are_few() && fruitless.pause().is_zero());
        assert!(!fruitless.note(false, at(62)));
    }
}
