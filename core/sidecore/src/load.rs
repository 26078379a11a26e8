//! Sampling of workers' time on a sidecore, and smoothing of the samples.

/// Rounds from one sample to the next, on average. A sample costs a clock reading (20 to 30 ns) per
/// worker; a round with work takes that long per packet.
pub(crate) const SAMPLE_EVERY: u32 = 32;

/// Chooses the rounds in which each worker's time is taken. The distance varies (16 to 47 rounds),
/// so that a load with a period of its own is not always met at the same place.
#[derive(Debug)]
pub(crate) struct Sampler {
    left: u32,
    gap: u32,
    state: u32,
}

impl Default for Sampler {
    fn default() -> Self {
        Self { left: 1, gap: 1, state: 0x9e37_79b9 }
    }
}

impl Sampler {
    /// Counts a round. Some when the round is to be sampled: the number of rounds that it stands
    /// for.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<u64> {
        self.left -= 1;
        if self.left > 0 {
            return None;
        }
        let weight = u64::from(self.gap);
        self.restart();
        Some(weight)
    }

    #[cold]
    fn restart(&mut self) {
        // Xorshift (Marsaglia 2003): never 0, since it does not begin there.
        self.state ^= self.state << 13;
        self.state ^= self.state >> 17;
        self.state ^= self.state << 5;
        self.gap = SAMPLE_EVERY / 2 + self.state % SAMPLE_EVERY;
        self.left = self.gap;
    }
}

/// Moving average of a share of time over looks: an exponentially weighted mean.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct MovingAverage(Option<f64>);

/// Weight of the newest look: the last three looks weigh seven eighths.
const NEWEST: f64 = 0.5;

impl MovingAverage {
    /// Adds one look. The first one counts fully.
    pub fn add(&mut self, value: f64) {
        self.0 = Some(self.0.map_or(value, |old| old + NEWEST * (value - old)));
    }

    /// The mean; 0 before the first look.
    pub fn get(self) -> f64 {
        self.0.unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_stand_for_every_round_once() {
        let mut sampler = Sampler::default();
        let (mut rounds, mut stood_for, mut samples) = (0u64, 0u64, 0u64);
        while samples < 10_000 {
            rounds += 1;
            if let Some(weight) = sampler.next() {
                samples += 1;
                stood_for += weight;
            }
        }
        assert_eq!(stood_for, rounds);
        let mean = rounds as f64 / samples as f64;
        assert!((31.0..33.0).contains(&mean), "{mean}");
    }

    #[test]
    fn a_periodic_load_is_not_always_met_at_the_same_place() {
        // Every 32nd round is busy: a fixed distance would see all of it, or nothing.
        let mut sampler = Sampler::default();
        let mut busy = 0;
        let rounds = 32 * 10_000;
        for round in 0..rounds {
            if let Some(weight) = sampler.next()
                && round % 32 == 7
            {
                busy += weight;
            }
        }
        let share = busy as f64 / f64::from(rounds) * 32.0;
        assert!((0.8..1.2).contains(&share), "{share}");
    }

    #[test]
    fn smoothing_follows() {
        let mut load = MovingAverage::default();
        assert_eq!(load.get(), 0.0);
        load.add(0.5);
        assert_eq!(load.get(), 0.5);
        for _ in 0..4 {
            load.add(1.0);
        }
        assert_eq!(load.get(), 1.0 - 0.5 / 16.0);
    }
}
