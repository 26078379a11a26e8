//! Loads of sidecores and units in one look.

use base::numa::Node;

/// One sidecore in a look.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CoreLoad {
    /// Busy part of its time, 0 to 1.
    pub load: f64,
    /// False while it hangs: nothing can be moved to or from it.
    pub usable: bool,
    /// The NUMA node it runs on, where that is known.
    pub node: Option<Node>,
}

/// One unit in a look.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UnitLoad {
    /// Number of the unit.
    pub id: u32,
    /// The sidecore it is on.
    pub core: usize,
    /// Part of that sidecore's time, 0 to 1.
    pub load: f64,
    /// False when it must stay where it is.
    pub movable: bool,
    /// The NUMA node of its memory; none: unknown, or on several.
    pub node: Option<Node>,
}
