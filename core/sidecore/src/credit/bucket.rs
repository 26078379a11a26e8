//! A token bucket that several threads draw from without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

const SECOND_NS: u128 = 1_000_000_000;

/// Token bucket. Its only state is the time at which it was empty: the tokens that came in since
/// then are there, up to the burst.
#[derive(Debug, Default)]
pub struct Bucket {
    /// Tokens per second; 0: no bucket at all.
    per_s: AtomicU64,
    burst_ns: AtomicU64,
    empty_at_ns: AtomicU64,
}

impl Bucket {
    /// Sets rate (0: off) and burst, which is two tokens at least: there would never be one else.
    /// Tokens in the bucket stay.
    pub fn set(&self, per_s: u64, burst_ns: u64) {
        let burst_ns = burst_ns.max(Self::time_ns(2, per_s));
        self.burst_ns.store(burst_ns, Ordering::Relaxed);
        self.per_s.store(per_s, Ordering::Relaxed);
    }

    /// Tokens per second; none when it is off.
    #[inline]
    pub fn rate(&self) -> Option<u64> {
        Some(self.per_s.load(Ordering::Relaxed)).filter(|&rate| rate > 0)
    }

    /// Time in which `tokens` come in, in nanoseconds, rounded up.
    fn time_ns(tokens: u64, per_s: u64) -> u64 {
        let ns = (u128::from(tokens) * SECOND_NS).div_ceil(u128::from(per_s.max(1)));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    fn in_ns(time_ns: u64, per_s: u64) -> u64 {
        let tokens = u128::from(time_ns) * u128::from(per_s) / SECOND_NS;
        u64::try_from(tokens).unwrap_or(u64::MAX)
    }

    /// Tokens that come in within a time, half a burst at most, one at least.
    pub fn pace(&self, time_ns: u64) -> u64 {
        let time_ns = time_ns.min(self.burst_ns.load(Ordering::Relaxed) / 2);
        Self::in_ns(time_ns, self.per_s.load(Ordering::Relaxed)).max(1)
    }

    fn since_ns(&self, empty_at_ns: u64, now_ns: u64) -> u64 {
        empty_at_ns.max(now_ns.saturating_sub(self.burst_ns.load(Ordering::Relaxed)))
    }

    /// Tokens in the bucket.
    pub fn available(&self, now_ns: u64) -> u64 {
        let since_ns = self.since_ns(self.empty_at_ns.load(Ordering::Relaxed), now_ns);
        Self::in_ns(now_ns.saturating_sub(since_ns), self.per_s.load(Ordering::Relaxed))
    }

    /// Takes `wanted` tokens, or as many as there are.
    pub fn take(&self, wanted: u64, now_ns: u64) -> u64 {
        self.draw(0, wanted, now_ns)
    }

    /// Takes tokens if there are any: up to `most` of those that are there, and at least `least`
    /// (`most`, where that is less), of which some are still to come then. Whoever asks next waits
    /// until they have come, so the rate holds. Returns how many it took; 0: the bucket is empty.
    pub fn draw(&self, least: u64, most: u64, now_ns: u64) -> u64 {
        let per_s = self.per_s.load(Ordering::Relaxed);
        let mut empty_at_ns = self.empty_at_ns.load(Ordering::Relaxed);
        loop {
            let since_ns = self.since_ns(empty_at_ns, now_ns);
            let here = Self::in_ns(now_ns.saturating_sub(since_ns), per_s);
            if here == 0 || most == 0 {
                return 0;
            }
            let taken = most.min(here.max(least));
            // Rounded up, it may be a nanosecond in the future.
            let next_ns = since_ns.saturating_add(Self::time_ns(taken, per_s));
            match self.empty_at_ns.compare_exchange_weak(
                empty_at_ns,
                next_ns,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return taken,
                Err(other_ns) => empty_at_ns = other_ns,
            }
        }
    }

    /// Gives tokens back that were taken and not used, rounded down.
    pub fn give_back(&self, tokens: u64) {
        let Some(per_s) = self.rate().filter(|_| tokens > 0) else { return };
        let ns = u128::from(tokens) * SECOND_NS / u128::from(per_s);
        let ns = u64::try_from(ns).unwrap_or(u64::MAX);
        let earlier = |empty_at_ns: u64| Some(empty_at_ns.saturating_sub(ns));
        // The closure always has a value.
        let _ = self.empty_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, earlier);
    }

    /// Takes tokens, also those still to come, of the next second at most: a higher rate that is
    /// set meanwhile counts soon. Returns how many it took.
    pub fn owe(&self, tokens: u64, now_ns: u64) -> u64 {
        let Some(per_s) = self.rate().filter(|_| tokens > 0) else { return 0 };
        let latest_ns = now_ns.saturating_add(SECOND_NS as u64);
        let due_ns = |empty_at_ns| {
            let since_ns = self.since_ns(empty_at_ns, now_ns);
            let due_ns = since_ns.saturating_add(Self::time_ns(tokens, per_s));
            (since_ns, due_ns.min(latest_ns.max(since_ns)))
        };
        let next_ns = |empty_at_ns| Some(due_ns(empty_at_ns).1);
        let update = self.empty_at_ns.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next_ns);
        // The closure always has a value.
        let Ok(before_ns) = update else { return 0 };
        let (since_ns, due_ns) = due_ns(before_ns);
        tokens.min(Self::in_ns(due_ns - since_ns, per_s))
    }

    /// Time at which `tokens` will be there, if none are taken.
    pub fn when_ns(&self, tokens: u64, now_ns: u64) -> u64 {
        let since_ns = self.since_ns(self.empty_at_ns.load(Ordering::Relaxed), now_ns);
        since_ns.saturating_add(Self::time_ns(tokens, self.per_s.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BURST_NS: u64 = 10_000_000;

    fn bucket(per_s: u64) -> Bucket {
        let bucket = Bucket::default();
        bucket.set(per_s, BURST_NS);
        bucket
    }

    #[test]
    fn what_is_owed_comes_first_up_to_a_second() {
        let bucket = bucket(1_000_000);
        let now_ns = 5_000_000_000;
        bucket.owe(12_000, now_ns);
        assert_eq!(bucket.available(now_ns), 0);
        assert_eq!(bucket.when_ns(1_000, now_ns), now_ns + 3_000_000);
        bucket.owe(u64::MAX, now_ns);
        bucket.owe(1, now_ns);
        assert_eq!(bucket.when_ns(1_000, now_ns), now_ns + 1_001_000_000);
        let off = Bucket::default();
        off.owe(5, now_ns);
        assert_eq!(off.rate(), None);
    }

    #[test]
    fn a_burst_is_there_and_no_more() {
        let bucket = bucket(1_000_000);
        let now_ns = 5_000_000_000;
        assert_eq!(bucket.available(now_ns), 10_000);
        assert_eq!(bucket.take(4_000, now_ns), 4_000);
        assert_eq!(bucket.take(u64::MAX, now_ns), 6_000);
        assert_eq!(bucket.take(1, now_ns), 0);
        assert_eq!(bucket.when_ns(500, now_ns), now_ns + 500_000);
        assert_eq!(bucket.take(u64::MAX, now_ns + 500_000), 500);
    }

    #[test]
    fn who_draws_from_a_little_may_borrow_and_the_next_waits_for_it() {
        let bucket = bucket(1_000_000);
        let now_ns = 5_000_000_000;
        assert_eq!(bucket.draw(4_000, 9_999, now_ns), 9_999);
        assert_eq!(bucket.draw(4_000, 9_999, now_ns), 4_000, "1 was there");
        assert_eq!(bucket.draw(4_000, 9_999, now_ns), 0);
        assert_eq!(bucket.when_ns(1, now_ns), now_ns + 4_000_000);
        bucket.give_back(3_000);
        assert_eq!(bucket.when_ns(1, now_ns), now_ns + 1_000_000);
        assert_eq!(bucket.draw(4_000, 500, now_ns + 1_000_000 + 2_000), 500);
        bucket.give_back(u64::MAX);
        assert_eq!(bucket.available(now_ns), 10_000, "no more than a burst");
    }

    /// The burst of 10 ms has not one token of these.
    #[test]
    fn a_rate_of_few_tokens_gives_them_all_the_same() {
        for per_s in [1, 5, 99] {
            let bucket = bucket(per_s);
            let (mut now_ns, mut taken) = (5_000_000_000, 0);
            for _ in 0..100 {
                now_ns = bucket.when_ns(bucket.pace(500_000), now_ns).max(now_ns + 1);
                taken += bucket.take(1, now_ns);
            }
            assert!(taken >= 99, "{taken} at {per_s}");
        }
    }

    #[test]
    fn off_is_empty_and_never_divides_by_zero() {
        let bucket = Bucket::default();
        assert_eq!((bucket.rate(), bucket.take(1, 1 << 40), bucket.pace(1)), (None, 0, 1));
    }

    proptest! {
        /// A bucket never gives more than a burst and what has come in, whatever is asked when.
        #[test]
        fn the_rate_holds(
            per_s in 1u64..1 << 40,
            steps in prop::collection::vec((0u64..3_000_000, 0u64..1 << 20), 1..200),
        ) {
            let bucket = bucket(per_s);
            let start_ns = 1 << 40;
            let (mut now_ns, mut taken) = (start_ns, 0u64);
            for (step_ns, wanted) in steps {
                now_ns += step_ns;
                let got = bucket.take(wanted, now_ns);
                prop_assert!(got <= wanted);
                taken += got;
            }
            let most = Bucket::in_ns(now_ns - start_ns + BURST_NS, per_s);
            prop_assert!(taken <= most + 2, "{taken} > {most}");
        }

        /// A bucket gives a burst, what has come in, and what the last one borrowed, less what
        /// comes back.
        #[test]
        fn the_rate_holds_for_those_who_borrow(
            per_s in 1_000u64..1 << 40,
            least in 1u64..1 << 17,
            steps in prop::collection::vec((0u64..3_000_000, 1u64..1 << 20, 0u64..3), 1..200),
        ) {
            let bucket = bucket(per_s);
            let start_ns = 1 << 40;
            let (mut now_ns, mut used) = (start_ns, 0u64);
            for (step_ns, wanted, part) in steps {
                now_ns += step_ns;
                let got = bucket.draw(least, wanted, now_ns);
                prop_assert!(got <= wanted);
                let back = got * part / 2;
                bucket.give_back(back);
                used += got - back;
            }
            let most = Bucket::in_ns(now_ns - start_ns + BURST_NS, per_s) + least;
            prop_assert!(used <= most + 2, "{used} > {most}");
        }
    }
}
