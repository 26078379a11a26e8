//! Placement: decides from measured load which worker runs where and how many sidecores are active.
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
//! its own for little load is a waste. Where all sidecores are on one node, or the node of a unit
//! is unknown, nodes decide nothing.
//!
//! Against swinging: conditions must hold in several looks, a unit that moved stays for a while, a
//! move must gain something, and the load limit of parking is far from saturation.

mod history;
mod limits;
mod load;
mod meter;
mod model;
mod steps;

pub use history::History;
pub use limits::Limits;
pub(crate) use limits::ROOM;
pub use load::{CoreLoad, UnitLoad};
pub use meter::{Meter, UnitReading};
use model::Model;
pub use steps::{Move, Plan, Reason};

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
