//! Model of the load as it would be after the decisions so far.

use super::history::History;
use super::limits::Limits;
use super::load::{CoreLoad, UnitLoad};
use super::steps::{Move, Plan, Reason};

mod node;

pub(super) struct Model<'a> {
    cores: Vec<CoreLoad>,
    units: Vec<UnitLoad>,
    limits: &'a Limits,
    history: &'a mut History,
    pub(super) plan: Plan,
}

/// Moves that would be good together: indices of units, and their target.
struct Candidate {
    units: Vec<usize>,
    to: usize,
    /// The target's load after them.
    fills: f64,
}

/// Restriction of the units that may move.
#[derive(Clone, Copy)]
struct MoveFilter {
    /// Leave out units that moved a short time ago.
    settled: bool,
    /// Leave out units that would become remote.
    near: bool,
}

/// Less than this part of a sidecore is not worth a move.
const LEAST_LOAD: f64 = 0.0005;

impl<'a> Model<'a> {
    pub(super) fn new(
        cores: &[CoreLoad],
        units: &[UnitLoad],
        limits: &'a Limits,
        history: &'a mut History,
    ) -> Self {
        let (cores, units) = (cores.to_vec(), units.to_vec());
        Self { cores, units, limits, history, plan: Plan::default() }
    }

    fn is_active(&self, core: usize) -> bool {
        self.history.active[core]
    }

    fn active_count(&self) -> usize {
        self.history.active.iter().filter(|active| **active).count()
    }

    /// Active sidecores that can be moved to and from, busiest first; of equals the lower number.
    fn by_load(&self) -> Vec<usize> {
        let good = |&core: &usize| self.is_active(core) && self.cores[core].usable;
        let mut all: Vec<usize> = (0..self.cores.len()).filter(good).collect();
        all.sort_by(|&a, &b| self.cores[b].load.total_cmp(&self.cores[a].load));
        all
    }

    fn shift(&mut self, unit: usize, to: usize, reason: Reason) {
        let UnitLoad { id, core: from, load, .. } = self.units[unit];
        self.cores[from].load = (self.cores[from].load - load).max(0.0);
        self.cores[to].load += load;
        self.units[unit].core = to;
        self.history.moved.insert(id, self.history.look);
        self.plan.moves.push(Move { unit: id, from, to, reason });
    }

    fn activate(&mut self, core: usize) {
        self.history.active[core] = true;
        self.history.saturated[core] = 0;
        self.plan.activate.push(core);
    }

    fn has_moves_left(&self) -> bool {
        self.plan.moves.len() < self.limits.max_moves
    }

    /// Finds the units of `from` whose move to the least busy of `targets` evens the two, largest
    /// first, but units that become remote last; none when the busier of the two would gain too
    /// little.
    fn best_moves(&self, from: usize, targets: &[usize], which: MoveFilter) -> Option<Candidate> {
        let to = *targets
            .iter()
            .filter(|&&core| core != from)
            .min_by(|&&a, &&b| self.cores[a].load.total_cmp(&self.cores[b].load))?;
        let before = self.cores[from].load;
        let (mut left, mut fills) = (before, self.cores[to].load);
        let can_move = |&unit: &usize| {
            let UnitLoad { id, core, load, movable, .. } = self.units[unit];
            let may = movable && (!which.settled || self.history.is_settled(id));
            core == from && may && load >= LEAST_LOAD && !(which.near && self.makes_far(unit, to))
        };
        let mut mine: Vec<usize> = (0..self.units.len()).filter(can_move).collect();
        mine.sort_by(|&a, &b| {
            let far = self.makes_far(a, to).cmp(&self.makes_far(b, to));
            far.then(self.units[b].load.total_cmp(&self.units[a].load))
        });
        let mut units = Vec::new();
        for unit in mine {
            if units.len() + self.plan.moves.len() >= self.limits.max_moves
                || left - fills < self.limits.min_gain
            {
                break;
            }
            let load = self.units[unit].load;
            // One that would only change the roles of the two stays.
            if load < left - fills {
                (left, fills) = (left - load, fills + load);
                units.push(unit);
            }
        }
        let gain = before - left.max(fills);
        (gain >= self.limits.min_gain).then_some(Candidate { units, to, fills })
    }

    /// Finds the first [`Model::best_moves`] that are `good`, node by node, to the least busy
    /// target of each node; no unit becomes remote.
    fn near_moves(
        &self,
        from: usize,
        targets: &[usize],
        good: impl Fn(&Candidate) -> bool,
    ) -> Option<Candidate> {
        let which = MoveFilter { settled: true, near: true };
        let others = targets.iter().rev().copied().filter(|&core| core != from);
        self.first_of_nodes(others).into_iter().find_map(|first| {
            let alike = |&&core: &&usize| self.cores[core].node == self.cores[first].node;
            let alike: Vec<usize> = targets.iter().filter(alike).copied().collect();
            self.best_moves(from, &alike, which).filter(&good)
        })
    }

    fn shift_all(&mut self, moves: &Candidate, reason: Reason) {
        moves.units.iter().for_each(|&unit| self.shift(unit, moves.to, reason));
    }

    /// Moves units on parked sidecores to the least busy active one, of their node if it has room;
    /// a unit that must stay activates its sidecore.
    pub(super) fn leave_parked(&mut self) {
        for unit in 0..self.units.len() {
            let UnitLoad { core, movable, .. } = self.units[unit];
            if self.is_active(core) {
                continue;
            }
            if !movable {
                self.activate(core);
            } else if self.cores[core].usable
                && self.has_moves_left()
                && let Some(to) =
                    self.home_with_room(unit).or_else(|| self.by_load().last().copied())
            {
                self.shift(unit, to, Reason::Parked);
            }
        }
    }

    /// Moves units away from saturated sidecores, busiest first.
    pub(super) fn relieve(&mut self) {
        for core in self.by_load() {
            if !History::holds(self.history.saturated[core], self.limits) {
                continue;
            }
            if self.relieve_one(core) {
                self.history.saturated[core] = 0;
            }
        }
    }

    fn relieve_one(&mut self, core: usize) -> bool {
        let order = self.by_load();
        let has_room = |moves: &Candidate| moves.fills < self.limits.saturated;
        // Half of the load: the demand on a saturated sidecore is more than its load can show. It
        // cannot swing back before one is parked, so units that moved a short time ago may move
        // again: otherwise many small units would spread to one more sidecore a second.
        let parked = self.parked_for(core);
        let fresh = |near| self.best_moves(core, &[parked?], MoveFilter { settled: false, near });
        let far = || self.best_moves(core, &order, MoveFilter { settled: true, near: false });
        // A sidecore more before a far one: that costs each request.
        let found = self
            .near_moves(core, &order, has_room)
            .or_else(|| fresh(true))
            .or_else(|| far().filter(has_room))
            .or_else(|| fresh(false));
        let Some(moves) = found else { return false };
        if !self.is_active(moves.to) {
            self.activate(moves.to);
        }
        self.shift_all(&moves, Reason::Saturated);
        true
    }

    /// Moves units from the busiest sidecore, or the busiest of a node, to the least busy.
    pub(super) fn even(&mut self) {
        let order = self.by_load();
        let busiest = self.first_of_nodes(order.iter().copied());
        let best = busiest.into_iter().find_map(|busiest| {
            self.near_moves(busiest, &order, |_| self.cores[busiest].load >= self.limits.even_above)
        });
        self.history.uneven = self.history.uneven << 1 | u32::from(best.is_some());
        if let Some(moves) = best
            && History::holds(self.history.uneven, self.limits)
        {
            self.history.uneven = 0;
            self.shift_all(&moves, Reason::Even);
        }
    }

    /// Parks the least busy sidecores, after their units have moved to the others: one after the
    /// other, as long as that leaves room, once that has held for some looks.
    pub(super) fn consolidate(&mut self) {
        if !self.plan.is_empty() || self.spare().is_none() {
            self.history.spare = 0;
            return;
        }
        self.history.spare += 1;
        if self.history.spare < self.limits.park_looks {
            return;
        }
        self.history.spare = 0;
        while let Some((core, places)) = self.spare()
            && self.plan.moves.len() + places.len() <= self.limits.max_moves
        {
            for (unit, to) in places {
                self.shift(unit, to, Reason::Consolidate);
            }
            self.history.active[core] = false;
            self.plan.park.push(core);
        }
    }

    /// Finds a sidecore that is not needed, and a place for each of its units.
    fn spare(&self) -> Option<(usize, Vec<(usize, usize)>)> {
        if self.active_count() <= self.limits.min_active {
            return None;
        }
        let order = self.by_load();
        let first =
            |near| order.iter().rev().find_map(|&core| Some((core, self.fit(core, &order, near)?)));
        // Better one that makes no unit remote.
        first(true).or_else(|| first(false))
    }

    /// Finds a place for each unit of `core`, largest first, with room to spare. `near`: no unit
    /// may become remote.
    fn fit(&self, core: usize, order: &[usize], near: bool) -> Option<Vec<(usize, usize)>> {
        let mut mine: Vec<usize> =
            (0..self.units.len()).filter(|&u| self.units[u].core == core).collect();
        mine.sort_by(|&a, &b| self.units[b].load.total_cmp(&self.units[a].load));
        let mut loads: Vec<(usize, f64)> =
            order.iter().filter(|&&c| c != core).map(|&c| (c, self.cores[c].load)).collect();
        if loads.is_empty() {
            return None;
        }
        let mut places = Vec::new();
        for unit in mine {
            let UnitLoad { id, load, movable, .. } = self.units[unit];
            if !movable || !self.history.is_settled(id) {
                return None;
            }
            let has_room = |(to, filled): &&mut (usize, f64)| {
                *filled + load <= self.limits.room && !(near && self.makes_far(unit, *to))
            };
            // Onto the busiest of its node, else the busiest: the others are the next to be parked.
            let (to, filled) = loads.iter_mut().filter(has_room).max_by(|a, b| {
                let far = self.is_far(unit, b.0).cmp(&self.is_far(unit, a.0));
                far.then(a.1.total_cmp(&b.1))
            })?;
            *filled += load;
            places.push((unit, *to));
        }
        Some(places)
    }
}
