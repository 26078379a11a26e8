//! Count of sessions in a row that ended before a queue ran.
//!
//! A front end that cannot use its port comes again at once, and for ever: QEMU does so when it was
//! given more queue pairs than the port has. Then a line a minute tells as much as a line a
//! session, and the port need not answer as fast as it can.

use std::time::{Duration, Instant};

/// Number of failed sessions that are logged one by one, and answered at once.
const PATIENCE: u64 = 3;
/// Time between two log lines about further failed sessions.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Pause before the next connection is taken: a hundred a second cost little.
const PAUSE: Duration = Duration::from_millis(10);

/// Count of failed sessions in a row, and when they were logged.
#[derive(Debug, Default)]
pub(crate) struct FailedSessions {
    count: u64,
    logged_at: Option<Instant>,
}

impl FailedSessions {
    /// Whether there are so few that each session is logged.
    pub fn is_few(&self) -> bool {
        self.count < PATIENCE
    }

    /// Number of failed sessions since a queue ran.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Counts a session that ended. Returns whether a log line about all failed ones is due.
    pub fn note(&mut self, has_served: bool, now: Instant) -> bool {
        if has_served {
            *self = Self::default();
            return false;
        }
        self.count += 1;
        let is_due = self.logged_at.is_none_or(|at| now.duration_since(at) >= LOG_INTERVAL);
        if self.is_few() || !is_due {
            return false;
        }
        self.logged_at = Some(now);
        true
    }

    /// Pause before the next connection is taken.
    pub fn pause(&self) -> Duration {
        if self.is_few() { Duration::ZERO } else { PAUSE }
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use super::*;

    #[test]
    fn abuse_N1_an_endless_reconnect_is_a_line_a_minute() {
        let mut failed = FailedSessions::default();
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        assert!(!failed.note(false, at(0)));
        assert!(!failed.note(false, at(0)));
        assert!(failed.is_few() && failed.pause().is_zero());
        assert!(failed.note(false, at(0)));
        for s in 0..60 {
            assert!(!failed.note(false, at(s)), "second {s}");
            assert!(!failed.is_few() && !failed.pause().is_zero());
        }
        assert!(failed.note(false, at(60)));
        assert_eq!(failed.count(), 64);
        assert!(!failed.note(true, at(61)));
        assert!(failed.is_few() && failed.pause().is_zero());
        assert!(!failed.note(false, at(62)));
    }
}
