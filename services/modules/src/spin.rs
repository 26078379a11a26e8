//! Spinning: how long a thread looks at rings before it sleeps. As in KVM's halt polling, that is
//! longer where it would have caught what woke the thread, shorter where it looked in vain, and
//! nothing where others want the CPU.

use std::time::Duration;

/// Below this part of the longest time it does not look at all.
const LEAST_PART: u32 = 8;

/// Giving the CPU away takes less where nobody wants it: a system call, and what of the kernel's
/// comes between.
const HICCUP: Duration = Duration::from_micros(20);

/// Others want the CPU when they had it for longer than this, and for more than half of the time:
/// an interrupt is shorter, another thread's work is not.
const CROWDED: Duration = Duration::from_micros(100);

/// The time of one thread.
#[derive(Debug)]
pub(crate) struct Spin {
    most: Duration,
    now: Duration,
    /// CPU time that others had meanwhile.
    given: Duration,
}

impl Spin {
    /// Begins with a limit; zero: it never spins.
    pub fn new(most: Duration) -> Self {
        Self { most, now: Duration::ZERO, given: Duration::ZERO }
    }

    /// Time for which looking is worth while.
    pub fn time(&self) -> Duration {
        self.now
    }

    /// Begins to spin: there is nothing more to do.
    pub fn begin(&mut self) {
        self.given = Duration::ZERO;
    }

    /// Notes that the thread gave the CPU away for `took`, a time after it had nothing more to do.
    /// Where others want the CPU, it looks no more before a bell comes soon again.
    pub fn gave_way(&mut self, took: Duration, waited: Duration) {
        if took > HICCUP {
            self.given += took;
        }
        if self.given > CROWDED.max(waited / 2) {
            self.now = Duration::ZERO;
        }
    }

    /// Notes that the thread slept, and was rung a time after it had nothing more to do.
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
        // Interrupts are no reason.
        spin.begin();
        (1..=20).for_each(|n| spin.gave_way(US(30), US(100 * n)));
        assert_eq!(spin.time(), US(80));
        spin.begin();
        spin.gave_way(US(101), US(110));
        assert_eq!(spin.time(), US(0));
        spin.slept(US(3));
        spin.begin();
        spin.gave_way(US(90), US(95));
        assert_eq!(spin.time(), US(80));
        spin.gave_way(US(90), US(190));
        assert_eq!(spin.time(), US(0));
    }

    #[test]
    fn whoever_must_not_does_not() {
        let mut spin = Spin::new(US(0));
        spin.slept(US(1));
        assert_eq!(spin.time(), US(0));
    }
}
