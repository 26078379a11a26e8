//! Which worker runs where, and how many sidecores are active: decided from measured load.
//!
//! Everything here is a function of its arguments, so that a simulation can drive it in virtual
//! time. One *look* is one call of [`plan`], ten a second in the product. A *unit* is what moves as
//! one: a worker, or a group of workers that share a sidecore.
//!
//! In each look, in this order:
//! 1. A unit that was put onto a parked sidecore moves to an active one.
//! 2. A saturated sidecore gives units to another that has room, or half of its load to a parked
//!    one that is activated for it.
//! 3. When one sidecore has much and another little, units that even them move.
//! 4. A unit on another NUMA node than its memory moves home, if an active sidecore there has room.
//! 5. When the load of one fits the others with room to spare, it moves there and that one parks.
//!
//! A unit whose memory is on another node than its sidecore is *remote*: each of its accesses is
//! slower, so it has more to do for the same work. Evenness makes no unit remote. Saturation and
//! parking do, where nothing else helps: a full sidecore is worse than a far one, and a sidecore of
//! its own for little load is a waste. Where all sidecores are on one node, or the node of a unit is
//! unknown, nodes decide nothing.
//!
//! What keeps it calm: conditions must hold in several looks, a unit that moved stays for a while,
//! a move must gain something, and the room that parking asks for is far from saturation.

use std::collections::BTreeMap;

use base::numa::Node;

mod meter;
mod model;

pub use meter::{Meter, UnitReading};
use model::Model;

/// One sidecore in a look.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoreLoad {
    /// Part of the time it was busy, 0 to 1.
    pub load: f64,
    /// False while it hangs: nothing can be moved to or from it.
    pub usable: bool,
    /// The NUMA node it runs on, where that is known.
    pub node: Option<Node>,
}

/// One unit in a look.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UnitLoad {
    /// Its number.
    pub id: u32,
    /// The sidecore it is on.
    pub core: usize,
    /// Its part of that sidecore's time, 0 to 1.
    pub load: f64,
    /// False when it must stay where it is.
    pub movable: bool,
    /// The NUMA node of its memory; none: unknown, or on several.
    pub node: Option<Node>,
}

/// The constants of placement. `bench/sim` shows what they do.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Fewest active sidecores, at least 1.
    pub min_active: usize,
    /// Most active sidecores.
    pub max_active: usize,
    /// Load from which a sidecore is saturated: queues grow fast from here on.
    pub saturated: f64,
    /// Load up to which a sidecore may be filled when another is to be parked, or to bring a unit to
    /// its memory.
    pub room: f64,
    /// Load below which a sidecore is not worth relieving for evenness.
    pub even_above: f64,
    /// By how much the busier of two sidecores must get better for the moves between them.
    pub min_gain: f64,
    /// Looks for which a unit stays where it was moved to, unless one is activated for it.
    pub min_stay_looks: u64,
    /// Of the last [`Limits::window_looks`] looks, so many must show saturation, unevenness or a
    /// remote unit.
    pub needed_looks: u32,
    /// See [`Limits::needed_looks`]; at most 32.
    pub window_looks: u32,
    /// Looks in a row that must show that one sidecore fewer would do.
    pub park_looks: u32,
    /// Most moves of one look: each costs two sidecores the length of a call. Enough for half of the
    /// workers of a sidecore that has hundreds.
    pub max_moves: usize,
}

/// See [`Limits::room`]. A unit that costs a third more on another node still stays below
/// saturation when parking has sent it there.
pub(crate) const ROOM: f64 = 0.6;

impl Limits {
    /// The constants of the product, for between `min` and `max` active sidecores.
    pub fn new(min_active: usize, max_active: usize) -> Self {
        let min_active = min_active.max(1);
        Self {
            min_active,
            max_active: max_active.max(min_active),
            saturated: 0.85,
            room: ROOM,
            even_above: 0.5,
            min_gain: 0.1,
            min_stay_looks: 10,
            needed_looks: 3,
            window_looks: 5,
            park_looks: 20,
            max_moves: 256,
        }
    }
}

/// Why a unit moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Reason {
    /// Its sidecore was saturated.
    Saturated,
    /// Its sidecore had much more to do than another.
    Even,
    /// Its sidecore is parked, since the others have room.
    Consolidate,
    /// It had been put onto a parked sidecore.
    Parked,
    /// Its memory is on the node of the other sidecore.
    Node,
}

impl Reason {
    /// All reasons, in the order of their counters.
    pub const ALL: [Self; 5] =
        [Self::Saturated, Self::Even, Self::Consolidate, Self::Parked, Self::Node];

    /// The name used in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Saturated => "saturated",
            Self::Even => "even",
            Self::Consolidate => "consolidate",
            Self::Parked => "parked",
            Self::Node => "node",
        }
    }
}

/// One move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The unit.
    pub unit: u32,
    /// The sidecore it is on.
    pub from: usize,
    /// The sidecore it goes to.
    pub to: usize,
    /// Why.
    pub reason: Reason,
}

/// What is to be done: activate, then move, then park.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// Parked sidecores that become active.
    pub activate: Vec<usize>,
    /// Moves, in this order.
    pub moves: Vec<Move>,
    /// Active sidecores, without units by then, that become parked.
    pub park: Vec<usize>,
}

impl Plan {
    /// Whether nothing is to be done.
    pub fn is_empty(&self) -> bool {
        self.activate.is_empty() && self.moves.is_empty() && self.park.is_empty()
    }
}

/// What is remembered from look to look.
#[derive(Debug, Clone)]
pub struct History {
    look: u64,
    /// Which sidecores are active.
    active: Vec<bool>,
    /// For each sidecore, newest look in the lowest bit: was it saturated?
    saturated: Vec<u32>,
    /// The same for the evenness of all.
    uneven: u32,
    /// The same for remote units that have a place at home.
    remote: u32,
    /// Looks in a row in which one sidecore could have been parked; not always the same one.
    spare: u32,
    /// When each unit was moved.
    moved: BTreeMap<u32, u64>,
}

impl History {
    /// The first `min_active` of `count` sidecores are active.
    pub fn new(count: usize, limits: &Limits) -> Self {
        Self {
            look: 0,
            active: (0..count).map(|i| i < limits.min_active).collect(),
            saturated: vec![0; count],
            uneven: 0,
            remote: 0,
            spare: 0,
            moved: BTreeMap::new(),
        }
    }

    /// Which sidecores are active.
    pub fn active(&self) -> &[bool] {
        &self.active
    }

    fn begin(&mut self, cores: &[CoreLoad], units: &[UnitLoad], limits: &Limits) {
        self.look += 1;
        for (core, bits) in cores.iter().zip(&mut self.saturated) {
            *bits = *bits << 1 | u32::from(core.load >= limits.saturated);
        }
        let oldest = self.look.saturating_sub(limits.min_stay_looks);
        self.moved.retain(|id, at| *at >= oldest && units.iter().any(|u| u.id == *id));
    }

    fn is_settled(&self, unit: u32) -> bool {
        !self.moved.contains_key(&unit)
    }

    fn holds(bits: u32, limits: &Limits) -> bool {
        let window = u32::MAX >> (32 - limits.window_looks.clamp(1, 32));
        (bits & window).count_ones() >= limits.needed_looks
    }
}

/// Decides what one look leads to. `cores` are all sidecores, by number, parked ones included.
pub fn plan(
    cores: &[CoreLoad],
    units: &[UnitLoad],
    limits: &Limits,
    history: &mut History,
) -> Plan {
    history.begin(cores, units, limits);
    let mut model = Model::new(cores, units, limits, history);
    model.leave_parked();
    model.relieve();
    if model.plan.is_empty() {
        model.even();
    }
    if model.plan.is_empty() {
        model.go_home();
    }
    model.consolidate();
    model.plan
}

#[cfg(test)]
mod tests;
