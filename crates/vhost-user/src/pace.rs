//! How fast a front end may send messages.
//!
//! Each message is a few system calls, and with a holder some more in that process, which serves all
//! ports. A VMM sends some hundred at a start or a move, and a few when a guest masks an interrupt; one
//! that sends without an end is made to wait. It is not told: its socket fills.

use std::time::{Duration, Instant};

/// Messages in one [`WINDOW`].
const MAX_MESSAGES: u32 = 1000;
/// So 10,000 a second.
const WINDOW: Duration = Duration::from_millis(100);

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Pace {
    since: Instant,
    count: u32,
}

impl Pace {
    pub fn new(now: Instant) -> Self {
        Self { since: now, count: 0 }
    }

    /// A message was served: how long the next one has to wait.
    pub fn note(&mut self, now: Instant) -> Option<Duration> {
        let past = now.duration_since(self.since);
        if past >= WINDOW {
            *self = Self { since: now, count: 0 };
        }
        self.count += 1;
        (self.count >= MAX_MESSAGES).then(|| {
            let left = WINDOW.saturating_sub(past);
            *self = Self { since: now + left, count: 0 };
            left
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(non_snake_case)]
    fn abuse_V6_ten_thousand_messages_a_second_and_no_more() {
        let start = Instant::now();
        let (mut pace, mut now, mut messages) = (Pace::new(start), start, 0);
        while now < start + Duration::from_secs(1) {
            now += Duration::from_micros(1);
            messages += 1;
            now += pace.note(now).unwrap_or_default();
        }
        assert_eq!(messages, 10_000);
        // Whoever is slower never waits.
        for _ in 0..10_000 {
            now += Duration::from_micros(101);
            assert_eq!(pace.note(now), None);
        }
    }
}
