//! NUMA nodes in the model. Where they are all the same, or unknown, every answer here leaves
//! decisions to the load alone.

use super::{LEAST_LOAD, Model};
use crate::placement::history::History;
use crate::placement::load::UnitLoad;
use crate::placement::steps::Reason;

impl Model<'_> {
    /// Whether a unit's memory is known to be on another node than a sidecore.
    pub(super) fn is_far(&self, unit: usize, core: usize) -> bool {
        let nodes = (self.units[unit].node, self.cores[core].node);
        matches!(nodes, (Some(memory), Some(core)) if memory != core)
    }

    /// Whether a unit that is not remote now would become remote.
    pub(super) fn makes_far(&self, unit: usize, to: usize) -> bool {
        self.is_far(unit, to) && !self.is_far(unit, self.units[unit].core)
    }

    /// First sidecore of each node in a list.
    pub(super) fn first_of_nodes(&self, cores: impl Iterator<Item = usize>) -> Vec<usize> {
        let mut first: Vec<usize> = Vec::new();
        for core in cores {
            if first.iter().all(|&other| self.cores[other].node != self.cores[core].node) {
                first.push(core);
            }
        }
        first
    }

    /// Chooses a parked sidecore that is to relieve `core`, if one more may be active: the one that
    /// is far for the least load; of equals the lower number.
    pub(super) fn parked_for(&self, core: usize) -> Option<usize> {
        if self.active_count() >= self.limits.max_active {
            return None;
        }
        let far = |parked: usize| -> f64 {
            let mine = self.units.iter().enumerate().filter(|(_, u)| u.core == core && u.movable);
            mine.filter(|&(unit, _)| self.is_far(unit, parked)).map(|(_, u)| u.load).sum()
        };
        let parked = (0..self.cores.len()).filter(|&c| !self.is_active(c) && self.cores[c].usable);
        parked.min_by(|&a, &b| far(a).total_cmp(&far(b)))
    }

    /// The least busy active sidecore on a unit's node that has room for it.
    pub(super) fn home_with_room(&self, unit: usize) -> Option<usize> {
        let UnitLoad { load, node, .. } = self.units[unit];
        node?;
        let good = |&core: &usize| {
            self.cores[core].node == node && self.cores[core].load + load <= self.limits.room
        };
        self.by_load().into_iter().rev().find(good)
    }

    /// Finds a unit that is remote the other way round, for a remote unit to change places with:
    /// the busier of the two sidecores must not get much busier, unless there is room. A little is
    /// noise, and both units ask for less at home.
    fn partner(&self, unit: usize, remote: &[usize]) -> Option<usize> {
        let UnitLoad { core: from, load, node, .. } = self.units[unit];
        let here = self.cores[from];
        let noise = self.limits.min_gain / 2.0;
        remote.iter().copied().find(|&other| {
            let other = self.units[other];
            let there = self.cores[other.core];
            let gain = other.load - load;
            let after = (here.load + gain).max(there.load - gain);
            there.node == node
                && other.node == here.node
                && after <= (here.load.max(there.load) + noise).max(self.limits.room)
        })
    }

    /// Finds the moves that bring a remote unit home, each with its target; none: there is no room.
    fn moves_home(&self, unit: usize, remote: &[usize]) -> Vec<(usize, usize)> {
        if let Some(to) = self.home_with_room(unit) {
            return vec![(unit, to)];
        }
        let partner = self.partner(unit, remote);
        let swap = |other: usize| [(unit, self.units[other].core), (other, self.units[unit].core)];
        partner.map(swap).into_iter().flatten().collect()
    }

    /// Remote units, largest first.
    fn remote(&self) -> Vec<usize> {
        let is_remote = |&unit: &usize| {
            let UnitLoad { id, core, load, movable, .. } = self.units[unit];
            let may = movable && self.cores[core].usable && self.history.is_settled(id);
            may && self.is_active(core) && load >= LEAST_LOAD && self.is_far(unit, core)
        };
        let mut remote: Vec<usize> = (0..self.units.len()).filter(is_remote).collect();
        remote.sort_by(|&a, &b| self.units[b].load.total_cmp(&self.units[a].load));
        remote
    }

    /// Moves remote units to their memory's node, where there is room or a unit to change places
    /// with.
    pub(in crate::placement) fn go_home(&mut self) {
        let mut remote = self.remote();
        let finds = remote.iter().any(|&unit| !self.moves_home(unit, &remote).is_empty());
        self.history.remote = self.history.remote << 1 | u32::from(finds);
        if !finds || !History::holds(self.history.remote, self.limits) {
            return;
        }
        self.history.remote = 0;
        while let Some(&unit) = remote.first() {
            let moves = self.moves_home(unit, &remote);
            if self.plan.moves.len() + moves.len() > self.limits.max_moves {
                return;
            }
            remote.retain(|&other| other != unit && moves.iter().all(|(moved, _)| *moved != other));
            moves.into_iter().for_each(|(unit, to)| self.shift(unit, to, Reason::Node));
        }
    }
}
