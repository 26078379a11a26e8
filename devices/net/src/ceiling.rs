//! Most events a second, with a short burst.

/// How much of a second's events may come at once, in nanoseconds.
const BURST_NS: u64 = 100_000_000;

const S_NS: u64 = 1_000_000_000;

/// A ceiling (the generic cell rate algorithm: one number, no timer).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Ceiling {
    /// Nanoseconds that each event takes of its second; 0: no ceiling.
    each_ns: u64,
    /// When all events so far have had their time.
    paid_until_ns: u64,
}

impl Ceiling {
    /// Ceiling of this many events a second; 0: none.
    pub fn per_second(events: u32) -> Self {
        Self { each_ns: S_NS.checked_div(events.into()).unwrap_or(0), paid_until_ns: 0 }
    }

    /// Whether one more event is below the ceiling, which counts it.
    #[inline]
    pub fn take(&mut self, now_ns: u64) -> bool {
        let from_ns = self.paid_until_ns.max(now_ns);
        if self.each_ns != 0 && from_ns - now_ns >= BURST_NS {
            return false;
        }
        self.paid_until_ns = from_ns + self.each_ns;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_the_rate() {
        let mut ceiling = Ceiling::per_second(1000);
        let now = 5 * S_NS;
        assert_eq!((0..1000).filter(|_| ceiling.take(now)).count(), 100);
        let second = (0..10_000u64).filter(|n| ceiling.take(now + n * 100_000)).count();
        assert!((999..=1000).contains(&second), "{second}");
        let mut none = Ceiling::per_second(0);
        assert!((0..100_000).all(|_| none.take(now)));
        let mut slow = Ceiling::per_second(1);
        assert!(slow.take(now) && !slow.take(now + S_NS / 2) && slow.take(now + S_NS));
    }
}
