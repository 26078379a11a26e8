//! Measurement of loads from counters.

use std::collections::BTreeMap;

use super::load::{CoreLoad, UnitLoad};
use crate::load::MovingAverage;

/// A unit's counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitReading {
    /// Number of the unit.
    pub id: u32,
    /// The sidecore it is on.
    pub core: usize,
    /// Nanoseconds of work since it began, as sampled.
    pub busy_ns: u64,
    /// False when it must stay where it is.
    pub movable: bool,
}

/// Turns counters, look by look, into loads. Loads of units are smoothed, loads of sidecores are
/// not: decisions from them must hold in several looks anyway.
///
/// A sidecore's busy time is exact; that of its units is sampled. So the samples only say how the
/// sidecore's time is shared out.
#[derive(Debug, Default)]
pub struct Meter {
    cores: Vec<u64>,
    units: BTreeMap<u32, Unit>,
    looks: u64,
}

#[derive(Debug, Default)]
struct Unit {
    busy_ns: u64,
    load: MovingAverage,
    seen: u64,
}

impl Meter {
    /// Reads the counters after another `elapsed_ns`: the busy time of each sidecore since it
    /// began, and the units. All sidecores are usable in the answer, and no nodes known. The first
    /// look answers zeroes.
    pub fn read(
        &mut self,
        elapsed_ns: u64,
        busy_ns: &[u64],
        units: &[UnitReading],
    ) -> (Vec<CoreLoad>, Vec<UnitLoad>) {
        self.looks += 1;
        let is_first = self.cores.len() < busy_ns.len();
        self.cores.resize_with(busy_ns.len(), Default::default);
        let load = |(busy_ns, before_ns): (&u64, &mut u64)| {
            let spent_ns = busy_ns.saturating_sub(*before_ns);
            *before_ns = *busy_ns;
            if is_first { 0.0 } else { (spent_ns as f64 / elapsed_ns.max(1) as f64).min(1.0) }
        };
        let now: Vec<f64> = busy_ns.iter().zip(&mut self.cores).map(load).collect();
        let units = self.read_units(&now, units);
        (now.into_iter().map(|load| CoreLoad { load, usable: true, node: None }).collect(), units)
    }

    fn read_units(&mut self, cores: &[f64], units: &[UnitReading]) -> Vec<UnitLoad> {
        let mut spent_ns = Vec::with_capacity(units.len());
        let mut total_ns = vec![0u64; cores.len()];
        for unit in units {
            let known = self.units.entry(unit.id).or_default();
            // A new unit's first reading is its beginning.
            let since_ns =
                if known.seen == 0 { 0 } else { unit.busy_ns.saturating_sub(known.busy_ns) };
            known.busy_ns = unit.busy_ns;
            known.seen = self.looks;
            total_ns[unit.core] += since_ns;
            spent_ns.push(since_ns);
        }
        self.units.retain(|_, unit| unit.seen == self.looks);
        let load = |(unit, spent_ns): (&UnitReading, u64)| {
            let share = spent_ns as f64 / total_ns[unit.core].max(1) as f64;
            let smoothed = self.units.get_mut(&unit.id).map_or(0.0, |known| {
                known.load.add(share * cores[unit.core]);
                known.load.get()
            });
            let UnitReading { id, core, movable, .. } = *unit;
            UnitLoad { id, core, load: smoothed, movable, node: None }
        };
        units.iter().zip(spent_ns).map(load).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(id: u32, core: usize, busy_ns: u64) -> UnitReading {
        UnitReading { id, core, busy_ns, movable: true }
    }

    #[test]
    fn samples_share_out_what_the_sidecore_measured() {
        let mut meter = Meter::default();
        // The counters of a daemon that ran for long are no load of its first look.
        let (cores, units) = meter.read(100, &[5000, 0], &[unit(1, 0, 900), unit(2, 0, 50)]);
        assert_eq!((cores[0].load, units[0].load), (0.0, 0.0));
        let (cores, units) = meter.read(100, &[5080, 0], &[unit(1, 0, 930), unit(2, 0, 60)]);
        assert!((cores[0].load - 0.8).abs() < 1e-9 && cores[1].load == 0.0);
        // Samples said 40 of 100, three of four of them the first unit's.
        assert!(units[1].load > 0.0 && units[0].load > 2.9 * units[1].load);
    }

    #[test]
    fn a_load_never_exceeds_one_sidecore() {
        let mut meter = Meter::default();
        meter.read(100, &[0], &[unit(1, 0, 0)]);
        for look in 1..100 {
            let (cores, units) = meter.read(100, &[look * 200], &[unit(1, 0, look * 300)]);
            assert!(cores[0].load <= 1.0 && units[0].load <= 1.0);
        }
    }

    #[test]
    fn units_that_go_are_forgotten() {
        let mut meter = Meter::default();
        meter.read(100, &[0], &[unit(1, 0, 0)]);
        meter.read(100, &[0], &[]);
        assert!(meter.units.is_empty());
    }
}
