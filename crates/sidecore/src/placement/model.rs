//! The load as it would be after the decisions so far.

use super::{CoreLoad, History, Limits, Move, Plan, Reason, UnitLoad};

pub(super) struct Model<'a> {
    cores: Vec<CoreLoad>,
    units: Vec<UnitLoad>,
    limits: &'a Limits,
    history: &'a mut History,
    pub(super) plan: Plan,
}

/// A move that would be good: place in the list of units, target, gain.
#[derive(Clone, Copy)]
struct Candidate {
    unit: usize,
    to: usize,
    gain: f64,
    /// The target's load after it.
    fills: f64,
}

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

    /// The unit of `from` whose move to one of `targets` leaves the busier of the two with the
    /// least.
    fn best_move(&self, from: usize, targets: &[usize]) -> Option<Candidate> {
        let to = *targets
            .iter()
            .filter(|&&core| core != from)
            .min_by(|&&a, &&b| self.cores[a].load.total_cmp(&self.cores[b].load))?;
        let before = self.cores[from].load;
        let mine = self.units.iter().enumerate().filter(|(_, u)| u.core == from && u.movable);
        let settled = mine.filter(|(_, u)| self.history.is_settled(u.id));
        let candidates = settled.map(|(unit, u)| {
            let fills = self.cores[to].load + u.load;
            Candidate { unit, to, fills, gain: before - fills.max(before - u.load) }
        });
        let good = candidates.filter(|c| c.gain >= self.limits.min_gain);
        // Of equals the first: a later one must be better.
        good.reduce(|best, c| if c.gain > best.gain { c } else { best })
    }

    /// Units on parked sidecores go to the least busy active one; one that must stay activates its
    /// sidecore.
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
                && let Some(&to) = self.by_load().last()
            {
                self.shift(unit, to, Reason::Parked);
            }
        }
    }

    /// Saturated sidecores give away, busiest first.
    pub(super) fn relieve(&mut self) {
        for core in self.by_load() {
            if !History::holds(self.history.saturated[core], self.limits) {
                continue;
            }
            let mut moved = false;
            while self.has_moves_left() && self.cores[core].load >= self.limits.saturated {
                if !self.relieve_once(core) {
                    break;
                }
                moved = true;
            }
            if moved {
                self.history.saturated[core] = 0;
            }
        }
    }

    fn relieve_once(&mut self, core: usize) -> bool {
        let among = self.best_move(core, &self.by_load());
        if let Some(c) = among.filter(|c| c.fills < self.limits.saturated) {
            self.shift(c.unit, c.to, Reason::Saturated);
            return true;
        }
        let parked = (0..self.cores.len()).find(|&c| !self.is_active(c) && self.cores[c].usable);
        let Some(parked) = parked.filter(|_| self.active_count() < self.limits.max_active) else {
            return false;
        };
        // Half of the load at once: what was asked of a saturated sidecore is more than it could
        // show.
        let mut moved = false;
        while self.has_moves_left()
            && let Some(c) = self.best_move(core, &[parked])
        {
            if !moved {
                self.activate(parked);
            }
            moved = true;
            self.shift(c.unit, c.to, Reason::Saturated);
        }
        moved
    }

    /// The busiest gives to the least busy.
    pub(super) fn even(&mut self) {
        let order = self.by_load();
        let Some(&busiest) = order.first() else { return };
        let best = self
            .best_move(busiest, &order)
            .filter(|_| self.cores[busiest].load >= self.limits.even_above);
        self.history.uneven = self.history.uneven << 1 | u32::from(best.is_some());
        if let Some(c) = best
            && History::holds(self.history.uneven, self.limits)
        {
            self.history.uneven = 0;
            self.shift(c.unit, c.to, Reason::Even);
        }
    }

    /// The least busy gives everything to the others and parks.
    pub(super) fn consolidate(&mut self) {
        let order = self.by_load();
        let Some(&core) = order.last() else { return };
        let has_spare = self.plan.is_empty() && self.active_count() > self.limits.min_active;
        let targets = if has_spare { self.fit(core, &order[..order.len() - 1]) } else { None };
        let Some(targets) = targets else {
            self.history.spare = 0;
            return;
        };
        self.history.spare += 1;
        if self.history.spare < self.limits.park_looks {
            return;
        }
        self.history.spare = 0;
        for (unit, to) in targets {
            self.shift(unit, to, Reason::Consolidate);
        }
        self.history.active[core] = false;
        self.plan.park.push(core);
    }

    /// A place for each unit of `core`, largest first, with room to spare.
    fn fit(&self, core: usize, others: &[usize]) -> Option<Vec<(usize, usize)>> {
        let mut mine: Vec<usize> =
            (0..self.units.len()).filter(|&u| self.units[u].core == core).collect();
        mine.sort_by(|&a, &b| self.units[b].load.total_cmp(&self.units[a].load));
        let mut loads: Vec<(usize, f64)> =
            others.iter().map(|&other| (other, self.cores[other].load)).collect();
        if loads.is_empty() {
            return None;
        }
        let mut places = Vec::new();
        for unit in mine {
            let UnitLoad { id, load, movable, .. } = self.units[unit];
            if !movable || !self.history.is_settled(id) {
                return None;
            }
            // Onto the least busy that remain: parking must not make one core hot.
            let (to, filled) = loads.iter_mut().min_by(|a, b| a.1.total_cmp(&b.1))?;
            *filled += load;
            if *filled > self.limits.room {
                return None;
            }
            places.push((unit, *to));
        }
        Some(places)
    }
}
