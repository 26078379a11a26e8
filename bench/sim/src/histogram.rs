//! Latencies in buckets of 1/16 of a power of two.

/// Buckets per power of two, as a power of two.
const SUB_BITS: u32 = 4;

/// Counts of latencies.
#[derive(Debug, Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; 64 << SUB_BITS], total: 0 }
    }
}

fn bucket(value: u64) -> usize {
    let value = value.max(1 << SUB_BITS);
    let exponent = value.ilog2();
    let sub = value >> (exponent - SUB_BITS) & ((1 << SUB_BITS) - 1);
    ((exponent << SUB_BITS) as u64 + sub) as usize
}

/// The middle of a bucket.
fn value(bucket: usize) -> u64 {
    let (exponent, sub) = ((bucket >> SUB_BITS) as u32, (bucket & ((1 << SUB_BITS) - 1)) as u64);
    let step = 1u64 << exponent.saturating_sub(SUB_BITS);
    (1u64 << exponent) + sub * step + step / 2
}

impl Histogram {
    /// Counts one.
    pub fn add(&mut self, value: u64) {
        self.counts[bucket(value)] += 1;
        self.total += 1;
    }

    /// Takes in another's counts.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(mine, theirs)| *mine += theirs);
        self.total += other.total;
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.total
    }

    /// The value below which `percent` of them are; 0 when there are none.
    pub fn percentile(&self, percent: f64) -> u64 {
        let rank = (self.total as f64 * percent / 100.0).ceil() as u64;
        let mut seen = 0;
        let reaches = |count: &u64| {
            seen += count;
            seen >= rank.max(1)
        };
        if self.total == 0 { 0 } else { self.counts.iter().position(reaches).map_or(0, value) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_a_sixteenth() {
        let mut all = Histogram::default();
        assert_eq!(all.percentile(50.0), 0);
        (1..=100_000u64).for_each(|v| all.add(v));
        for percent in [1.0, 50.0, 99.0, 100.0] {
            let (found, wanted) = (all.percentile(percent) as f64, percent * 1000.0);
            assert!((found / wanted - 1.0).abs() < 0.07, "{percent}: {found}");
        }
        let mut twice = all.clone();
        twice.merge(&all);
        assert_eq!((twice.count(), twice.percentile(50.0)), (200_000, all.percentile(50.0)));
    }
}
