//! Tally of one load: in windows, so that one sees how shares move.

use serde::{Deserialize, Serialize};

/// Latencies kept of one load: 8 s at a million in a second.
const MAX_SAMPLES: usize = 8 << 20;

/// Counts of one load while a run goes on. Times are nanoseconds from the run's start.
#[derive(Debug)]
pub struct Tally {
    window_ns: u64,
    ops: Vec<u64>,
    bytes: Vec<u64>,
    latencies: Option<Latencies>,
    /// Frames or requests that the back end took.
    pub taken: u64,
    /// Frames that were not answered in time.
    pub lost: u64,
    /// Turns in which there was something to do for the back end, or should have been.
    pub turns: u64,
    /// Turns that found everything before finished: the front end was too slow.
    pub dry: u64,
}

/// The latencies of a load. They are sorted in the end: a histogram's steps are too coarse to see
/// a tail move by a few percent.
#[derive(Debug)]
struct Latencies {
    window_ns: u64,
    values_ns: Vec<u32>,
    /// Index in `values_ns` at which each window begins.
    starts: Vec<usize>,
    windows: usize,
}

/// Report of one load.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Name of the load's VM.
    pub vm: String,
    /// `net` or `disk`.
    pub kind: String,
    /// Frames received, round trips or requests done.
    pub ops: u64,
    /// Bytes of them: frames with their Ethernet header, requests with their data.
    pub bytes: u64,
    /// Frames or requests that the back end took.
    pub taken: u64,
    /// Frames that were not answered in time.
    pub lost: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Notifications to the back end.
    pub kicks: u64,
    /// Share of the turns in which the back end had nothing left of this load.
    pub dry_share: f64,
    /// `ops` of each window.
    pub window_ops: Vec<u64>,
    /// `bytes` of each window.
    pub window_bytes: Vec<u64>,
    /// Latencies of the whole run; none where they are not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<LatencyReport>,
    /// Latencies of each window; empty where they are not measured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub window_latency: Vec<LatencyReport>,
}

/// Percentiles.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LatencyReport {
    /// How many there are; the others are 0 when there is none.
    pub count: u64,
    /// Median.
    pub p50_ns: u64,
    /// Ninetieth percentile, nanoseconds.
    pub p90_ns: u64,
    /// Ninety-ninth percentile, nanoseconds.
    pub p99_ns: u64,
    /// Longest, nanoseconds.
    pub max_ns: u64,
}

impl Tally {
    /// For a run of `length_ns` with windows of `window_ns`.
    pub fn new(length_ns: u64, window_ns: u64) -> Self {
        let windows = length_ns.div_ceil(window_ns) as usize;
        Self {
            window_ns,
            ops: vec![0; windows],
            bytes: vec![0; windows],
            latencies: None,
            taken: 0,
            lost: 0,
            turns: 0,
            dry: 0,
        }
    }

    /// Latencies are to be kept, in windows of `window_ns`.
    pub fn with_latencies(mut self, length_ns: u64, window_ns: u64) -> Self {
        // A page that is touched first while a run goes on would show as latency.
        let room = ((length_ns / 1000) as usize).clamp(1, MAX_SAMPLES);
        let mut values_ns = vec![u32::MAX; room];
        values_ns.clear();
        let windows = length_ns.div_ceil(window_ns) as usize;
        let starts = Vec::with_capacity(windows);
        self.latencies = Some(Latencies { window_ns, values_ns, starts, windows });
        self
    }

    /// Counts what was done.
    #[inline]
    pub fn add(&mut self, now_ns: u64, ops: u64, bytes: u64) {
        let window = (now_ns / self.window_ns) as usize;
        if let (Some(o), Some(b)) = (self.ops.get_mut(window), self.bytes.get_mut(window)) {
            *o += ops;
            *b += bytes;
        }
    }

    /// Counts a latency that ended now. Times never go back.
    #[inline]
    pub fn latency(&mut self, now_ns: u64, latency_ns: u64) {
        let Some(l) = &mut self.latencies else { return };
        let window = (now_ns / l.window_ns) as usize;
        if window >= l.windows || l.values_ns.len() == l.values_ns.capacity() {
            return;
        }
        while l.starts.len() <= window {
            l.starts.push(l.values_ns.len());
        }
        l.values_ns.push(u32::try_from(latency_ns).unwrap_or(u32::MAX));
    }

    /// Report of the load of `vm`.
    pub fn report(self, vm: String, kind: &str, errors: u64, kicks: u64) -> LoadReport {
        let mut latency = None;
        let mut window_latency = Vec::new();
        if let Some(mut l) = self.latencies {
            l.starts.resize(l.windows, l.values_ns.len());
            for w in 0..l.windows {
                let end = l.starts.get(w + 1).copied().unwrap_or(l.values_ns.len());
                window_latency.push(percentiles(&mut l.values_ns[l.starts[w]..end]));
            }
            latency = Some(percentiles(&mut l.values_ns));
        }
        LoadReport {
            vm,
            kind: kind.into(),
            ops: self.ops.iter().sum(),
            bytes: self.bytes.iter().sum(),
            taken: self.taken,
            lost: self.lost,
            errors,
            kicks,
            dry_share: self.dry as f64 / self.turns.max(1) as f64,
            window_ops: self.ops,
            window_bytes: self.bytes,
            latency,
            window_latency,
        }
    }
}

fn percentiles(values_ns: &mut [u32]) -> LatencyReport {
    values_ns.sort_unstable();
    let at = |share: f64| {
        let rank = (values_ns.len() as f64 * share).ceil() as usize;
        values_ns.get(rank.saturating_sub(1)).map_or(0, |v| u64::from(*v))
    };
    LatencyReport {
        count: values_ns.len() as u64,
        p50_ns: at(0.5),
        p90_ns: at(0.9),
        p99_ns: at(0.99),
        max_ns: at(1.0),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn windows_have_what_came_in_them_and_the_end_is_the_end() {
        let mut t = Tally::new(100, 30).with_latencies(100, 50);
        for (now_ns, ops) in [(0, 1), (29, 2), (30, 4), (99, 8), (120, 100)] {
            t.add(now_ns, ops, ops * 10);
        }
        t.taken = 15;
        let r = t.report("a".into(), "net", 0, 7);
        assert_eq!(r.window_ops, [3, 4, 0, 8]);
        assert_eq!((r.ops, r.bytes, r.taken, r.kicks), (15, 150, 15, 7));
        assert_eq!(r.window_latency, [LatencyReport::default(); 2]);
    }

    #[test]
    fn percentiles_are_of_their_window() {
        let mut t = Tally::new(3_000_000, 1_000_000).with_latencies(3_000_000, 1_000_000);
        (1..=100).for_each(|v| t.latency(5, v));
        t.latency(2_000_001, u64::MAX);
        t.latency(9_000_000, 1);
        let r = t.report("a".into(), "net", 0, 0);
        let first = LatencyReport { count: 100, p50_ns: 50, p90_ns: 90, p99_ns: 99, max_ns: 100 };
        assert_eq!(r.window_latency[0], first);
        let counts: Vec<u64> = r.window_latency.iter().map(|w| w.count).collect();
        assert_eq!(counts, [100, 0, 1]);
        assert_eq!(r.latency.map(|l| (l.count, l.max_ns)), Some((101, u32::MAX.into())));
    }

    proptest! {
        #[test]
        fn nothing_is_counted_twice_or_forgotten(
            steps in prop::collection::vec((0u64..50_000, 0u64..9), 0..200),
            window_ns in 1000u64..700_000,
        ) {
            let length_ns = 2_000_000;
            let mut t = Tally::new(length_ns, window_ns).with_latencies(length_ns, window_ns);
            let (mut now_ns, mut ops, mut count) = (0, 0, 0);
            for (step_ns, n) in steps {
                now_ns += step_ns;
                t.add(now_ns, n, n);
                t.latency(now_ns, step_ns);
                if now_ns < length_ns.next_multiple_of(window_ns) {
                    ops += n;
                    count += 1;
                }
            }
            let r = t.report("a".into(), "disk", 0, 0);
            prop_assert_eq!((r.ops, r.bytes), (ops, ops));
            prop_assert_eq!(r.latency.map(|l| l.count), Some(count));
            prop_assert_eq!(r.window_latency.iter().map(|w| w.count).sum::<u64>(), count);
        }
    }
}
