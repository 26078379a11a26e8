//! How long a thread looks at rings before it sleeps, as KVM halts: longer where that would have caught what woke it,
//! shorter where it waited in vain, and not at all where others want the CPU.

use std::time::Duration;

/// Below this part of the longest time it does not look at all.
const LEAST_PART: u32 = 8;

/// The time of one thread.
#[derive(Debug)]
pub(crate) struct Spin {
    most: Duration,
    now: Duration,
}

impl Spin {
    /// At most so long; zero: never.
    pub fn new(most: Duration) -> Self {
        Self { most, now: Duration::ZERO }
    }

    /// How long it is worth while.
    pub fn time(&self) -> Duration {
        self.now
    }

    /// Others wanted the CPU: not before a bell comes soon again.
    pub fn crowded(&mut self) {
        self.now = Duration::ZERO;
    }

    /// It slept, and was rung this long after it had nothing more to do.
    pub fn slept(&mut self, waited: Duration) {
        self.now = if waited <= self.most {
            self.most
        } else if self.now > self.most / LEAST_PART {
            self.now / 2
        } else {
            Duration::ZERO
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: fn(u64) -> Duration = Duration::from_micros;

    #[test]
    fn it_looks_while_that_catches_something() {
        let mut spin = Spin::new(US(80));
        assert_eq!(spin.time(), US(0));
        spin.slept(US(81));
        assert_eq!(spin.time(), US(0));
        spin.slept(US(80));
        assert_eq!(spin.time(), US(80));
        for time in [40, 20, 10, 0, 0] {
            spin.slept(US(1000));
            assert_eq!(spin.time(), US(time));
        }
        spin.slept(US(3));
        assert_eq!(spin.time(), US(80));
        spin.crowded();
        assert_eq!(spin.time(), US(0));
    }

    #[test]
    fn whoever_must_not_does_not() {
        let mut spin = Spin::new(US(0));
        spin.slept(US(1));
        assert_eq!(spin.time(), US(0));
    }
}
