//! Placement in virtual looks.

use base::numa::Node;
use proptest::prelude::*;

use super::*;

mod nodes;

/// A host whose units ask for fixed loads, and that does what it is told.
struct Host {
    units: Vec<UnitLoad>,
    count: usize,
    limits: Limits,
    history: History,
    moves: Vec<Move>,
    /// Nodes of the sidecores; empty: unknown.
    nodes: Vec<Node>,
    /// How much more a remote unit asks for.
    far_cost: f64,
}

impl Host {
    fn new(count: usize, limits: Limits, loads: &[f64]) -> Self {
        let unit = |(id, &load): (usize, &f64)| UnitLoad {
            id: id as u32,
            core: id % limits.min_active,
            load,
            movable: true,
            node: None,
        };
        let units = loads.iter().enumerate().map(unit).collect();
        let history = History::new(count, &limits);
        let (moves, nodes, far_cost) = (Vec::new(), Vec::new(), 1.0);
        Self { units, count, limits, history, moves, nodes, far_cost }
    }

    fn is_remote(&self, unit: &UnitLoad) -> bool {
        let core = self.nodes.get(unit.core);
        core.is_some_and(|core| unit.node.is_some_and(|memory| memory != *core))
    }

    /// Load that a unit asks for where it is.
    fn asks(&self, unit: &UnitLoad) -> f64 {
        if self.is_remote(unit) { unit.load * self.far_cost } else { unit.load }
    }

    fn loads(&self) -> Vec<f64> {
        let mine = |core| self.units.iter().filter(move |u| u.core == core);
        (0..self.count).map(|core| mine(core).map(|u| self.asks(u)).sum()).collect()
    }

    fn active(&self) -> usize {
        self.history.active().iter().filter(|a| **a).count()
    }

    /// Loads as measured: no sidecore gives more than 1, and its units share that.
    fn measured(&self) -> (Vec<CoreLoad>, Vec<UnitLoad>) {
        let sums = self.loads();
        let core = |(index, load): (usize, &f64)| CoreLoad {
            load: load.min(1.0),
            usable: true,
            node: self.nodes.get(index).copied(),
        };
        let cores = sums.iter().enumerate().map(core).collect();
        let unit = |u: &UnitLoad| UnitLoad { load: self.asks(u) / sums[u.core].max(1.0), ..*u };
        (cores, self.units.iter().map(unit).collect())
    }

    fn look(&mut self) -> Plan {
        let (cores, units) = self.measured();
        let before = self.active();
        let plan = plan(&cores, &units, &self.limits, &mut self.history);
        for step in &plan.moves {
            let unit = self.units.iter_mut().find(|u| u.id == step.unit).unwrap();
            assert!(unit.movable && unit.core == step.from && step.from != step.to);
            assert!(self.history.active()[step.to], "moved to a parked sidecore");
            unit.core = step.to;
            self.moves.push(*step);
        }
        for &core in &plan.park {
            assert!(self.units.iter().all(|u| u.core != core), "parked with units");
        }
        assert!(self.active() <= self.limits.max_active.max(before));
        assert!(self.active() >= self.limits.min_active);
        plan
    }

    fn looks(&mut self, count: usize) {
        (0..count).for_each(|_| drop(self.look()));
    }

    fn busiest(&self) -> f64 {
        self.loads().into_iter().fold(0.0, f64::max)
    }
}

#[test]
fn sidecores_follow_the_load_up_and_down() {
    let mut host = Host::new(4, Limits::new(1, 4), &[0.4; 8]);
    host.looks(100);
    assert_eq!(host.active(), 4);
    assert!(host.busiest() < 0.85, "{:?}", host.loads());
    host.units.iter_mut().for_each(|u| u.load = 0.02);
    host.looks(200);
    assert_eq!(host.active(), 1);
    let moves = host.moves.len();
    host.looks(1000);
    assert_eq!(host.moves.len(), moves, "a steady load moves nothing");
}

#[test]
fn a_burst_in_two_looks_moves_nothing() {
    let mut host = Host::new(2, Limits::new(1, 2), &[0.1; 4]);
    for _ in 0..20 {
        host.units.iter_mut().for_each(|u| u.load = 0.4);
        host.looks(2);
        host.units.iter_mut().for_each(|u| u.load = 0.1);
        host.looks(5);
    }
    assert_eq!((host.moves.len(), host.active()), (0, 1));
}

#[test]
fn one_unit_that_fills_a_sidecore_is_left_alone() {
    let mut host = Host::new(2, Limits::new(1, 2), &[3.0]);
    host.looks(100);
    assert_eq!((host.moves.len(), host.active()), (0, 1));
}

#[test]
fn a_load_between_the_thresholds_does_not_swing() {
    // 0.7 in all: too much to park (0.6), too little to activate (0.85).
    for min in [1, 2] {
        let mut host = Host::new(2, Limits::new(min, 2), &[0.35, 0.35]);
        host.limits.min_active = 1;
        host.looks(500);
        assert_eq!((host.moves.len(), host.active()), (0, min));
    }
}

#[test]
fn unevenness_is_evened_once() {
    let mut host = Host::new(2, Limits::new(2, 2), &[0.3, 0.05, 0.3, 0.05, 0.2, 0.05]);
    host.units.iter_mut().for_each(|u| u.core = u.id as usize % 2);
    assert!(host.busiest() > 0.79);
    host.looks(200);
    assert!(host.busiest() < 0.56, "{:?}", host.loads());
    assert!(host.moves.len() <= 3 && host.moves.iter().all(|m| m.reason == Reason::Even));
}

#[test]
fn what_was_put_onto_a_parked_sidecore_leaves_it() {
    let mut host = Host::new(3, Limits::new(1, 3), &[0.1, 0.1]);
    host.units[1].core = 2;
    let moves = host.look().moves;
    assert_eq!(moves, [Move { unit: 1, from: 2, to: 0, reason: Reason::Parked }]);
    host.units.push(UnitLoad { id: 9, core: 2, load: 0.1, movable: false, node: None });
    assert_eq!(host.look().activate, [2], "one that must stay keeps its sidecore active");
    host.looks(100);
    assert_eq!(host.history.active(), [false, false, true], "the others come to it");
}

#[test]
fn a_sidecore_that_hangs_is_left_out() {
    let limits = Limits::new(2, 2);
    let mut history = History::new(2, &limits);
    let cores =
        [(1.0, true), (0.0, false)].map(|(load, usable)| CoreLoad { load, usable, node: None });
    let unit = |id| UnitLoad { id, core: 0, load: 0.25, movable: true, node: None };
    let units = [unit(0), unit(1), unit(2), unit(3)];
    for _ in 0..100 {
        assert!(plan(&cores, &units, &limits, &mut history).is_empty());
    }
}

#[test]
fn a_thousand_units_on_64_sidecores_settle() {
    // Zipf: the r-th unit asks for 1/r of the first.
    let loads: Vec<f64> = (1..=1000).map(|rank| 4.0 / f64::from(rank)).collect();
    let mut host = Host::new(64, Limits::new(1, 64), &loads);
    host.looks(600);
    let moves = host.moves.len();
    // The first four fill a sidecore each; the others must not.
    let mut sums = host.loads();
    sums.sort_by(|a, b| b.total_cmp(a));
    assert!(sums[4] < 0.9, "{sums:?}");
    let asked: f64 = loads.iter().sum();
    assert!(host.active() as f64 <= asked / 0.6 + 4.0, "{} for {asked}", host.active());
    host.looks(600);
    assert_eq!(host.moves.len(), moves, "it goes on moving");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// `Host::look` asserts what must never happen; here: any load comes to rest, and no sidecore
    /// is left saturated that could give a unit to one with room.
    #[test]
    fn steady_loads_come_to_rest(
        loads in prop::collection::vec(0.0..0.5f64, 0..40),
        count in 1usize..8,
        min in 1usize..8,
    ) {
        let mut host = Host::new(count, Limits::new(min.min(count), count), &loads);
        host.looks(1000);
        let moves = host.moves.len();
        host.looks(200);
        prop_assert_eq!(host.moves.len(), moves);
        let asked: f64 = loads.iter().sum();
        if asked < 0.35 * count as f64 {
            prop_assert!(host.busiest() < 0.85, "{:?}", host.loads());
        }
    }

    /// Loads that change all the time: the rules of `Host::look` hold, and units stay.
    #[test]
    fn changing_loads_break_no_rule(
        loads in prop::collection::vec(prop::collection::vec(0.0..1.0f64, 12), 1..60),
    ) {
        let mut host = Host::new(4, Limits::new(1, 4), &loads[0]);
        let mut last = std::collections::BTreeMap::new();
        for (look, loads) in loads.iter().cycle().take(300).enumerate() {
            host.units.iter_mut().zip(loads).for_each(|(u, &load)| u.load = load);
            let plan = host.look();
            for step in plan.moves {
                let before = last.insert(step.unit, look);
                prop_assert!(
                    plan.activate.contains(&step.to) || before.is_none_or(|b| look - b >= 10),
                    "{:?}",
                    step
                );
            }
        }
    }
}
