//! Histograms of times in plain shared memory: one thread writes, everybody reads.

use crate::counter::Counter;

/// Buckets of one octave: values are known to within 1/32.
const STEPS: usize = 32;
const STEP_BITS: u32 = STEPS.trailing_zeros();

/// Values of 2^36 and more share the last bucket: 2^36 ns are more than a minute.
const MAX_BITS: u32 = 36;

/// Buckets that [`Snapshot::coarse`] takes together.
const COARSE: usize = STEPS / 8;

const BUCKETS: usize = (MAX_BITS - STEP_BITS + 1) as usize * STEPS;

/// Counts values (nanoseconds, say) by size. Recording is two additions to memory of its own, so a
/// histogram belongs to one thread, as a [`Counter`] does; readers see values that are a moment
/// old.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[Counter]>,
    sum: Counter,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            buckets: (0..BUCKETS).map(|_| Counter::default()).collect(),
            sum: Counter::default(),
        }
    }
}

/// The values of a [`Histogram`] at one moment; two of them subtract to what came between.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    counts: Vec<u64>,
    sum: u64,
}

fn bucket_of(value: u64) -> usize {
    let value = value.min((1 << MAX_BITS) - 1);
    let bits = 64 - value.leading_zeros();
    if bits <= STEP_BITS {
        return value as usize;
    }
    let shift = bits - STEP_BITS - 1;
    // The highest bit says which octave, the five behind it which step.
    (shift as usize) * STEPS + (value >> shift) as usize
}

/// The smallest value of a bucket.
fn value_of(bucket: usize) -> u64 {
    if bucket < 2 * STEPS {
        return bucket as u64;
    }
    let shift = bucket / STEPS - 1;
    ((bucket % STEPS + STEPS) as u64) << shift
}

impl Histogram {
    /// Counts one value.
    #[inline]
    pub fn record(&self, value: u64) {
        self.record_many(value, 1);
    }

    /// Counts `n` equal values.
    #[inline]
    pub fn record_many(&self, value: u64, n: u64) {
        self.buckets[bucket_of(value)].add(n);
        self.sum.add(value.wrapping_mul(n));
    }

    /// Values of the histogram now.
    pub fn snapshot(&self) -> Snapshot {
        let counts = self.buckets.iter().map(Counter::get).collect();
        Snapshot { counts, sum: self.sum.get() }
    }
}

impl Snapshot {
    /// Number of values.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of all values.
    pub fn sum(&self) -> u64 {
        self.sum
    }

    /// Values that came since `earlier`, a snapshot of the same histogram.
    pub fn since(&self, earlier: &Self) -> Self {
        let before = earlier.counts.iter().copied().chain(std::iter::repeat(0));
        let counts = self.counts.iter().zip(before).map(|(n, b)| n.saturating_sub(b)).collect();
        Self { counts, sum: self.sum.wrapping_sub(earlier.sum) }
    }

    /// Adds the values of another histogram.
    pub fn add(&mut self, other: &Self) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (mine, others) in self.counts.iter_mut().zip(&other.counts) {
            *mine += others;
        }
        self.sum = self.sum.wrapping_add(other.sum);
    }

    /// Number of values up to `bound`; values within 1/32 above it may count as well.
    pub fn count_up_to(&self, bound: u64) -> u64 {
        let below = self.counts.len().min(bucket_of(bound) + 1);
        self.counts[..below].iter().sum()
    }

    /// Number of values by size, for readers who subtract: smallest value of a bucket and its
    /// count, without empty buckets. Coarser than the histogram, to be short: 8 buckets in each
    /// octave, so that a bucket from `low` on ends at `low` and an eighth of the power of two at or
    /// below it, or 4 where that is more.
    pub fn coarse(&self) -> impl Iterator<Item = (u64, u64)> {
        let groups = self.counts.chunks(COARSE).enumerate();
        groups
            .map(|(group, counts)| (value_of(group * COARSE), counts.iter().sum()))
            .filter(|(_, count)| *count > 0)
    }

    /// Makes a snapshot of the buckets of [`Snapshot::coarse`]. A peer may have sent wrong counts:
    /// the snapshot has no more than `u64::MAX` values in all.
    #[must_use]
    pub fn from_coarse(buckets: &[(u64, u64)], sum: u64) -> Self {
        let (mut counts, mut room) = (vec![0u64; BUCKETS], u64::MAX);
        for (low, count) in buckets {
            let count = room.min(*count);
            room -= count;
            counts[bucket_of(*low)] += count;
        }
        Self { counts, sum }
    }

    /// Value below which `share` (0 to 1) of all values lie, to within 1/32; 0 when there are none.
    pub fn quantile(&self, share: f64) -> u64 {
        let want = ((self.count() as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (bucket, n) in self.counts.iter().enumerate() {
            seen += n;
            if seen >= want {
                return value_of(bucket);
            }
        }
        0
    }

    /// The largest value, to within 1/32; 0 when there are none.
    pub fn max(&self) -> u64 {
        self.counts.iter().rposition(|n| *n > 0).map_or(0, value_of)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_known_to_within_a_step() {
        for value in (0..200).chain((8..36).flat_map(|b| [1u64 << b, (1 << b) + 77, (2 << b) - 1]))
        {
            let found = value_of(bucket_of(value));
            assert!(found <= value && value - found <= value / STEPS as u64, "{value}: {found}");
        }
        assert!(bucket_of(u64::MAX) < BUCKETS);
        let increasing = (1..BUCKETS).all(|b| value_of(b) > value_of(b - 1));
        assert!(increasing);
        assert!((0..BUCKETS).all(|b| bucket_of(value_of(b)) == b));
    }

    #[test]
    fn quantiles_of_a_thousand() {
        let h = Histogram::default();
        (1..=1000).for_each(|v| h.record(v * 10));
        let s = h.snapshot();
        assert_eq!((s.count(), s.sum()), (1000, 5_005_000));
        for (share, exact) in [(0.5, 5000.0), (0.99, 9900.0), (1.0, 10_000.0)] {
            let got = s.quantile(share) as f64;
            assert!(got <= exact && got >= exact * 0.96, "{share}: {got}");
        }
        assert_eq!(s.max(), s.quantile(1.0));
    }

    #[test]
    fn coarse_buckets_have_every_value_and_end_where_they_say() {
        let h = Histogram::default();
        let values: Vec<u64> = (0..36).flat_map(|b| [1u64 << b, (1 << b) + (1 << b) / 3]).collect();
        values.iter().for_each(|v| h.record(*v));
        let coarse: Vec<(u64, u64)> = h.snapshot().coarse().collect();
        for &(low, count) in &coarse {
            let width = low.checked_ilog2().map_or(0, |bits| (1u64 << bits) / 8).max(4);
            let inside = values.iter().filter(|v| (low..low + width).contains(v)).count();
            assert_eq!(inside as u64, count, "from {low}");
        }
        assert_eq!(coarse.iter().map(|(_, n)| n).sum::<u64>(), values.len() as u64);
        let again = Snapshot::from_coarse(&coarse, h.snapshot().sum());
        assert_eq!(again.coarse().collect::<Vec<_>>(), coarse);
        assert_eq!((again.count(), again.sum()), (values.len() as u64, h.snapshot().sum()));
        let lie = Snapshot::from_coarse(&[(0, u64::MAX), (1, u64::MAX), (u64::MAX, 1)], u64::MAX);
        assert_eq!((lie.count(), lie.quantile(0.99)), (u64::MAX, 0));
    }

    #[test]
    fn histograms_add_up_and_count_up_to_a_bound() {
        let (a, b) = (Histogram::default(), Histogram::default());
        a.record_many(1000, 3);
        b.record(5000);
        let mut sum = Snapshot::default();
        sum.add(&a.snapshot());
        sum.add(&b.snapshot());
        assert_eq!((sum.count(), sum.sum()), (4, 8000));
        let up_to = [0, 900, 1000, 2000, 5000, u64::MAX].map(|bound| sum.count_up_to(bound));
        assert_eq!(up_to, [0, 0, 3, 3, 4, 4]);
        assert_eq!(Snapshot::default().count_up_to(1), 0);
    }

    #[test]
    fn a_difference_has_only_what_came_between() {
        let h = Histogram::default();
        h.record_many(100, 50);
        let before = h.snapshot();
        h.record(7);
        let new = h.snapshot().since(&before);
        assert_eq!((new.count(), new.quantile(0.5), new.sum()), (1, 7, 7));
        assert_eq!(Snapshot::default().quantile(0.5), 0);
        assert_eq!(before.since(&Snapshot::default()).count(), 50);
    }
}
