//! Share of a core: what a module's thread may compute, as a bucket that fills with time. The start
//! of an instance is not counted: a store that reads its files has its own limit for that.

use std::time::{Duration, Instant};

/// CPU time that may be used at once after a pause: a few calls, and no more than a person notices.
const BURST: Duration = Duration::from_millis(100);

/// Bucket of one thread's CPU time.
#[derive(Debug)]
pub(crate) struct CpuShare {
    percent: u32,
    /// Nanoseconds of CPU that are left; below zero they are owed.
    left_ns: i64,
    at: Instant,
    /// The thread's CPU time then.
    used: Duration,
}

impl CpuShare {
    /// Makes a bucket; none: the module may have all of a core, which one thread cannot exceed.
    pub fn new(percent: u32) -> Option<Self> {
        let (at, used) = (Instant::now(), Duration::ZERO);
        let left_ns = BURST.as_nanos() as i64;
        (percent < 100).then_some(Self { percent: percent.max(1), left_ns, at, used })
    }

    /// Leaves out what was computed up to now.
    pub fn skip(&mut self, used: Duration) {
        self.used = used;
    }

    /// Counts what was computed up to now; how long the thread has to rest for it.
    pub fn rest(&mut self, now: Instant, used: Duration) -> Option<Duration> {
        let ns = |time: Duration| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX / 200);
        let (percent, burst) = (i64::from(self.percent), ns(BURST));
        let came = ns(now.saturating_duration_since(self.at)).min(burst * 100) * percent / 100;
        let went = ns(used.saturating_sub(self.used));
        (self.at, self.used) = (now, used);
        self.left_ns = (self.left_ns.saturating_add(came)).min(burst).saturating_sub(went);
        let owed = u64::try_from(self.left_ns.saturating_neg()).ok().filter(|owed| *owed > 0)?;
        Some(Duration::from_nanos(owed.saturating_mul(100) / u64::from(self.percent)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_has_all_of_a_core_is_not_counted() {
        assert!(CpuShare::new(100).is_none());
    }

    #[test]
    fn over_time_no_more_is_computed_than_the_share() {
        for percent in [1, 10, 33, 99] {
            let mut share = CpuShare::new(percent).unwrap();
            let begin = share.at;
            let (mut now, mut used) = (begin, Duration::ZERO);
            for call in 0..1000u64 {
                // Calls of 0 to 20 ms, one after the other.
                let cpu = Duration::from_micros(call * 7919 % 20_000);
                (now, used) = (now + cpu, used + cpu);
                if let Some(rest) = share.rest(now, used) {
                    now += rest;
                }
            }
            let may = (now - begin) * percent / 100 + BURST + Duration::from_millis(21);
            assert!(used <= may, "{percent} %: {used:?} of {:?}", now - begin);
            let should = (now - begin) * percent / 100;
            assert!(used >= should * 99 / 100, "{percent} %: {used:?} of {:?}", now - begin);
        }
    }

    #[test]
    fn a_pause_is_worth_a_burst_and_no_more() {
        let mut share = CpuShare::new(50).unwrap();
        let now = share.at + Duration::from_secs(1 << 40);
        assert_eq!(share.rest(now, Duration::ZERO), None);
        assert_eq!(share.rest(now, BURST), None);
        let more = BURST + Duration::from_millis(7);
        assert_eq!(share.rest(now, more), Some(Duration::from_millis(14)));
        // Clocks that go back are no reason to panic.
        assert_eq!(share.rest(now - BURST, Duration::ZERO), Some(Duration::from_millis(14)));
        assert!(share.rest(now, Duration::from_secs(1 << 40)).is_some());
    }
}
