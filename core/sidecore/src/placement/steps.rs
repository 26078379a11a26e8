//! Steps that a look leads to: sidecores activated, units moved, sidecores parked.

/// Reason of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum Reason {
    /// The unit's sidecore was saturated.
    Saturated,
    /// The unit's sidecore had much more to do than another.
    Even,
    /// The unit's sidecore is parked, since the others have room.
    Consolidate,
    /// The unit had been put onto a parked sidecore.
    Parked,
    /// The unit's memory is on the node of the other sidecore.
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

/// Move of one unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    /// The unit.
    pub unit: u32,
    /// The sidecore it is on.
    pub from: usize,
    /// The sidecore it goes to.
    pub to: usize,
    /// Reason.
    pub reason: Reason,
}

/// Steps of one look: activate, then move, then park.
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
