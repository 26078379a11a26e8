//! Medians of rounds' own ratios.
//!
//! The machine changes speed while we measure, so a quotient of two medians mixes slow minutes with
//! fast ones. Each round runs both sides within seconds of each other; its quotient is meaningful
//! by itself, and the median of those is what we publish.

use base::random::{Random, Seeded};
use serde::{Deserialize, Serialize};

/// Samples of the rounds that [`interval`] draws: enough that its bounds change by less than what
/// is printed when the seed does.
const DRAWS: usize = 10_000;
/// Seed of those draws: the same rounds, the same interval.
const SEED: u64 = 1;

/// Direction in which values are good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Rates, throughput.
    Higher,
    /// Times, CPU per operation.
    Lower,
}

/// Median, smallest and largest of some numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The middle one, or the mean of the two in the middle.
    pub median: f64,
    /// Smallest.
    pub min: f64,
    /// Largest.
    pub max: f64,
}

/// Median, minimum and maximum; `None` when there is no number or one is not finite.
pub fn spread(values: &[f64]) -> Option<Spread> {
    if values.is_empty() || values.iter().any(|v| !v.is_finite()) {
        return None;
    }
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (n, mid) = (sorted.len(), sorted.len() / 2);
    let median = if n % 2 == 1 { sorted[mid] } else { (sorted[mid - 1] + sorted[mid]) / 2.0 };
    Some(Spread { median, min: sorted[0], max: sorted[n - 1] })
}

/// Bounds within which the median lies with 95 %: what it is in samples drawn from these very
/// values (percentile bootstrap, Efron 1979). `None` when there is no number or one is not finite.
pub fn interval(values: &[f64]) -> Option<(f64, f64)> {
    spread(values)?;
    let mut random = Seeded::new(SEED);
    let mut draw = || values[random.below(values.len() as u32) as usize];
    let mut medians: Vec<f64> = Vec::with_capacity(DRAWS);
    for _ in 0..DRAWS {
        let sample: Vec<f64> = values.iter().map(|_| draw()).collect();
        medians.push(spread(&sample)?.median);
    }
    medians.sort_by(f64::total_cmp);
    let tail = DRAWS / 40;
    Some((medians[tail], medians[DRAWS - 1 - tail]))
}

/// One round's ratio, turned so that above 1 is better for us. `None` unless both are above zero.
pub fn ratio(ours: f64, peer: f64, better: Better) -> Option<f64> {
    let usable = |v: f64| v.is_finite() && v > 0.0;
    if !usable(ours) || !usable(peer) {
        return None;
    }
    Some(match better {
        Better::Higher => ours / peer,
        Better::Lower => peer / ours,
    })
}

/// Rounds to so many significant digits: files are read by people too.
pub fn significant(value: f64, digits: i32) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let scale = 10f64.powi(digits - 1 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_of_odd_and_even_counts() {
        let s = spread(&[3.0, 1.0, 2.0]).unwrap();
        assert_eq!(s, Spread { median: 2.0, min: 1.0, max: 3.0 });
        assert_eq!(spread(&[4.0, 1.0, 2.0, 3.0]).unwrap().median, 2.5);
        assert_eq!(spread(&[7.0]).unwrap(), Spread { median: 7.0, min: 7.0, max: 7.0 });
    }

    #[test]
    fn no_median_of_nothing_or_of_nonsense() {
        assert!(spread(&[]).is_none());
        assert!(spread(&[1.0, f64::NAN]).is_none());
        assert!(spread(&[1.0, f64::INFINITY]).is_none());
    }

    #[test]
    fn an_interval_holds_the_median_and_leaves_strays_out() {
        let values: Vec<f64> = (1..=17).map(f64::from).collect();
        let (low, high) = interval(&values).unwrap();
        // Order statistics say 5 and 13 for a median of 17 values.
        assert!((4.0..=6.0).contains(&low) && (12.0..=14.0).contains(&high), "{low} {high}");
        assert_eq!(interval(&values), Some((low, high)), "the same rounds, the same interval");
        let stray = [1.1, 1.2, 1.1, 1.2, 1.1, 1.2, 1.1, 1.2, 0.1];
        assert!(interval(&stray).unwrap().0 > 1.0);
        assert_eq!(interval(&[2.0]), Some((2.0, 2.0)));
        assert!(interval(&[]).is_none() && interval(&[1.0, f64::NAN]).is_none());
    }

    #[test]
    fn above_one_is_better_for_us_both_ways() {
        assert_eq!(ratio(200.0, 100.0, Better::Higher), Some(2.0));
        assert_eq!(ratio(50.0, 100.0, Better::Lower), Some(2.0));
        assert_eq!(ratio(1.0, 0.0, Better::Higher), None);
        assert_eq!(ratio(0.0, 1.0, Better::Lower), None);
        assert_eq!(ratio(f64::NAN, 1.0, Better::Higher), None);
        assert_eq!(ratio(-1.0, 1.0, Better::Higher), None);
    }

    #[test]
    fn the_median_of_ratios_is_not_the_ratio_of_medians() {
        // The machine halves its speed in the last two rounds; each round's own ratio stays 2.
        let (ours, peer) = ([200.0, 200.0, 100.0, 100.0, 100.0], [100.0, 100.0, 50.0, 50.0, 50.0]);
        let own: Vec<f64> =
            ours.iter().zip(peer).map(|(o, p)| ratio(*o, p, Better::Higher).unwrap()).collect();
        assert_eq!(spread(&own).unwrap(), Spread { median: 2.0, min: 2.0, max: 2.0 });
    }

    #[test]
    fn rounds_to_significant_digits() {
        assert_eq!(significant(1234.567, 4), 1235.0);
        assert_eq!(significant(0.0012345, 3), 0.00123);
        assert_eq!(significant(-98.76, 2), -99.0);
        assert_eq!(significant(0.0, 4), 0.0);
    }
}
