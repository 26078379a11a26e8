//! Estimate of the driver's pace: how long it can do without an interrupt or a kick.
//!
//! A guest that keeps many requests in flight works through completions one by one: for each it
//! wakes a program and submits the next request. While it has a backlog of them, one more interrupt
//! only delays that work, and so does each kick that we ask for. The height of the backlog is the
//! most requests that were outstanding in the last periods, less those that are outstanding now. It
//! shrinks by one in the time between two requests. Half the time that the backlog will last is the
//! driver's *slack*: that long completions may gather and new requests may wait, and the driver
//! never runs dry.
//!
//! Where the estimate is wrong (the program ended, or waits for exactly these completions), they
//! come at most [`MAX_SLACK_NS`] late. A driver with one request at a time never has slack, nor one
//! with large requests: there the storage is what must not run dry.

/// Most slack: a completion comes that late when the estimate is wrong.
const MAX_SLACK_NS: u64 = 300_000;

/// Least slack: below it a timer costs as much as it saves.
const MIN_SLACK_NS: u64 = 20_000;

/// Least backlog: fewer requests may be chance.
const MIN_BACKLOG: u32 = 4;

/// Gaps of the usual length without a request after which the driver counts as idle.
const IDLE_GAPS: u64 = 4;

/// Requests of more bytes on average keep the storage busy for longer than an interrupt takes.
const LARGE_BYTES: u64 = 64 << 10;

/// Length of a period. The peak is that of the current and of the last period.
const PERIOD_NS: u64 = 10_000_000;

/// Weight of the old mean against a new gap, of 8.
const OLD_WEIGHT: u64 = 7;

/// Means and peaks of one queue from which its driver's slack follows.
#[derive(Debug, Default)]
pub(crate) struct DriverPace {
    /// Mean time between two requests while the driver had completions in hand.
    gap_ns: u64,
    last_take_ns: u64,
    /// Mean bytes of a request.
    len_bytes: u64,
    backlog: u32,
    /// Most requests outstanding in the last and in this period.
    peaks: [u32; 2],
    period_end_ns: u64,
}

impl DriverPace {
    /// Notes the size of a request that began.
    #[inline]
    pub fn note_request(&mut self, len_bytes: u64) {
        self.len_bytes = (self.len_bytes * OLD_WEIGHT + len_bytes) / (OLD_WEIGHT + 1);
    }

    /// Notes that `taken` requests came. `outstanding`: all that the driver sees as not done, so
    /// those included that are done but not announced.
    pub fn note_batch(&mut self, now_ns: u64, taken: usize, outstanding: u32) {
        if now_ns >= self.period_end_ns {
            let skipped = now_ns - self.period_end_ns >= PERIOD_NS;
            self.peaks = [if skipped { 0 } else { self.peaks[1] }, 0];
            self.period_end_ns = now_ns + PERIOD_NS;
        }
        self.peaks[1] = self.peaks[1].max(outstanding);
        // A gap in which the driver waited for us says nothing of its speed.
        if self.backlog > 0 {
            let gap_ns = now_ns.saturating_sub(self.last_take_ns) / taken.max(1) as u64;
            // A pause is not the driver's speed, and a mean that took it in would hide the next
            // one. Longer gaps than this give no more slack in any case.
            let gap_ns = gap_ns.min(MAX_SLACK_NS);
            self.gap_ns = match self.gap_ns {
                0 => gap_ns,
                old => (old * OLD_WEIGHT + gap_ns) / (OLD_WEIGHT + 1),
            };
        }
        self.last_take_ns = now_ns;
        self.update_backlog(outstanding);
    }

    /// Time for which the driver can be left alone; 0: it may be waiting for us.
    pub fn slack_ns(&mut self, now_ns: u64, outstanding: u32) -> u64 {
        self.update_backlog(outstanding);
        let quiet_ns = now_ns.saturating_sub(self.last_take_ns);
        // With nothing in our hands there is nothing to tell: only the next kick is saved.
        let is_idle =
            quiet_ns > IDLE_GAPS * self.gap_ns || (outstanding == 0 && quiet_ns > MAX_SLACK_NS);
        if self.backlog < MIN_BACKLOG || is_idle || self.is_large() {
            return 0;
        }
        let slack_ns = (u64::from(self.backlog) * self.gap_ns / 2).min(MAX_SLACK_NS);
        if slack_ns < MIN_SLACK_NS { 0 } else { slack_ns }
    }

    /// Whether requests are so large that each is worth a kick and an interrupt.
    pub fn is_large(&self) -> bool {
        self.len_bytes > LARGE_BYTES
    }

    fn update_backlog(&mut self, outstanding: u32) {
        self.backlog = self.peaks[0].max(self.peaks[1]).saturating_sub(outstanding);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GAP_NS: u64 = 50_000;

    /// A driver that had 32 requests outstanding and brings one each gap while we keep `ours`.
    fn pile(ours: u32, gap_ns: u64) -> (DriverPace, u64) {
        let mut pace = DriverPace::default();
        let mut now_ns = 1_000_000;
        pace.note_batch(now_ns, 32, 32);
        pace.slack_ns(now_ns, ours);
        for _ in 0..50 {
            now_ns += gap_ns;
            pace.note_batch(now_ns, 1, ours + 1);
            pace.slack_ns(now_ns, ours);
            // Without a full queue now and then the peak would be forgotten.
            pace.peaks[1] = 32;
        }
        (pace, now_ns)
    }

    #[test]
    fn one_request_at_a_time_has_no_slack() {
        let mut pace = DriverPace::default();
        for k in 0..100 {
            pace.note_batch(k * GAP_NS, 1, 1);
            assert_eq!(pace.slack_ns(k * GAP_NS + 10_000, 1), 0, "in the disk");
            assert_eq!(pace.slack_ns(k * GAP_NS + 20_000, 1), 0, "done and not told");
        }
    }

    #[test]
    fn slack_is_half_of_what_the_pile_lasts_up_to_the_limit() {
        let (mut pace, now_ns) = pile(22, GAP_NS);
        assert_eq!(pace.slack_ns(now_ns, 22), 10 * GAP_NS / 2);
        let (mut pace, now_ns) = pile(2, GAP_NS);
        assert_eq!(pace.slack_ns(now_ns, 2), MAX_SLACK_NS);
    }

    #[test]
    fn a_driver_that_waits_for_us_or_is_fast_or_idle_has_none() {
        let (mut pace, now_ns) = pile(2, GAP_NS);
        assert_eq!(pace.slack_ns(now_ns, 30), 0, "nearly all requests are in our hands");
        assert_eq!(pace.slack_ns(now_ns + 5 * GAP_NS, 2), 0, "idle for five gaps");
        let (mut pace, now_ns) = pile(16, 1000);
        assert_eq!(pace.slack_ns(now_ns, 16), 0, "8 µs is not worth a timer");
    }

    #[test]
    fn a_pause_is_not_the_speed_of_the_driver() {
        let mut pace = DriverPace::default();
        let mut now_ns = 1_000_000;
        // Bursts with a minute in between, each done at once.
        for _ in 0..3 {
            pace.note_batch(now_ns, 8, 8);
            pace.slack_ns(now_ns, 0);
            let later_ns = now_ns + MAX_SLACK_NS + 1;
            assert_eq!(pace.slack_ns(later_ns, 0), 0, "nothing to tell, and no request came");
            assert_eq!(pace.slack_ns(now_ns + 5_000_000, 4), 0, "idle, whatever the disk does");
            now_ns += 60_000_000_000;
        }
    }

    #[test]
    fn large_requests_never_wait() {
        let (mut pace, now_ns) = pile(22, GAP_NS);
        pace.note_request(4096);
        assert!(pace.slack_ns(now_ns, 22) > 0);
        for _ in 0..20 {
            pace.note_request(1 << 20);
        }
        assert_eq!(pace.slack_ns(now_ns, 22), 0);
    }

    #[test]
    fn old_peaks_are_forgotten() {
        let (mut pace, now_ns) = pile(2, GAP_NS);
        let later_ns = now_ns + 3 * PERIOD_NS;
        pace.note_batch(later_ns, 1, 1);
        assert_eq!(pace.slack_ns(later_ns, 0), 0);
    }
}
