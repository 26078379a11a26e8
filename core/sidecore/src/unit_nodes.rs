//! NUMA nodes of units, and the choice of a sidecore near a worker's memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::numa::{Node, NumaMemory, Spread};

use crate::core::{Sidecore, Unit};
use crate::placement::ROOM;

/// Looks between two questions for the node of a unit's memory: 10 s. Guests move their memory
/// seldom, and a question for 1,000 VMs takes some 20 ms of the placer's thread.
const ASK_EVERY: u64 = 100;

/// Looks between two questions while the node is unknown: Linux knows a page only once this process
/// has touched it.
const ASK_UNKNOWN_EVERY: u64 = 10;

/// Nodes of units, as far as the placer knows them.
#[derive(Debug, Default)]
pub(crate) struct UnitNodes {
    look: u64,
    known: BTreeMap<u32, Known>,
}

/// Node of one unit, as far as known.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// Node of most of its memory; none: on several, or unknown.
    node: Option<Node>,
    /// Linux knew some of its pages.
    is_seen: bool,
}

impl UnitNodes {
    /// Asks, once a look, for the memory of new units, and of some of the others. Nothing is asked
    /// where the answer would decide nothing.
    pub(crate) fn look<'a>(
        &mut self,
        cores: &[Sidecore],
        units: impl Iterator<Item = (&'a Arc<Unit>, usize)>,
    ) {
        if !is_worth_asking(cores) {
            return;
        }
        self.look += 1;
        let before = std::mem::take(&mut self.known);
        for (unit, core) in units {
            let known = before.get(&unit.id).copied();
            let every =
                if known.is_some_and(|k| k.is_seen) { ASK_EVERY } else { ASK_UNKNOWN_EVERY };
            // In turns, so that each look asks few.
            let is_due = (self.look + u64::from(unit.id)).is_multiple_of(every);
            let known = match known {
                Some(known) if !is_due => known,
                _ => self.ask(&cores[core], unit, known.unwrap_or_default()),
            };
            self.known.insert(unit.id, known);
        }
    }

    /// Asks for the node of a unit's memory. When none of its pages is known, the last answer
    /// stays.
    fn ask(&self, core: &Sidecore, unit: &Arc<Unit>, before: Known) -> Known {
        let mut sum = Spread::default();
        for seat in core.seats().iter().filter(|seat| Arc::ptr_eq(&seat.unit, unit)) {
            sum.add(&seat.memory.spread(self.look as u32));
        }
        if sum.is_unknown() { before } else { Known { node: sum.most(), is_seen: true } }
    }

    /// Node of most of a unit's memory.
    pub(crate) fn of(&self, unit: u32) -> Option<Node> {
        self.known.get(&unit).and_then(|known| known.node)
    }
}

/// Whether sidecores are on several nodes.
fn is_worth_asking(cores: &[Sidecore]) -> bool {
    let mut known = cores.iter().filter_map(Sidecore::node);
    known.next().is_some_and(|first| known.any(|node| node != first))
}

impl Sidecore {
    /// Chooses one of `cores` for a new worker on `memory`: the one whose turn it is, or, when that
    /// is on another node, an active one of the memory's node that has room.
    pub fn for_memory<'a>(cores: &'a [Self], turn: usize, memory: &impl NumaMemory) -> &'a Self {
        let turn = turn % cores.len();
        if !is_worth_asking(cores) {
            return &cores[turn];
        }
        let place = |core: &Self| Place {
            node: core.node(),
            is_open: core.is_active() && !core.is_stalled(),
            load: core.stats().load_percent.get() as f64 / 100.0,
        };
        let places: Vec<Place> = cores.iter().map(place).collect();
        &cores[choose(&places, turn, memory.spread(0).most())]
    }
}

/// A sidecore as a place for a new worker.
#[derive(Debug, Clone, Copy)]
struct Place {
    node: Option<Node>,
    is_open: bool,
    load: f64,
}

fn choose(places: &[Place], turn: usize, memory: Option<Node>) -> usize {
    let is_far = places[turn].node.is_some() && places[turn].node != memory;
    let is_good = |place: &Place| place.is_open && place.node == memory && place.load < ROOM;
    let mut others = (turn..places.len()).chain(0..turn);
    let near = others.find(|&at| is_good(&places[at]));
    near.filter(|_| is_far && memory.is_some()).unwrap_or(turn)
}

#[cfg(test)]
mod tests;
