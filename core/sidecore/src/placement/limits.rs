//! The constants of placement.

/// The constants of placement. `test/bench/sim` shows what they do.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// Fewest active sidecores, at least 1.
    pub min_active: usize,
    /// Most active sidecores.
    pub max_active: usize,
    /// Load from which a sidecore is saturated: queues grow fast from here on.
    pub saturated: f64,
    /// Load up to which a sidecore may be filled when another is to be parked, or to bring a unit
    /// to its memory.
    pub room: f64,
    /// Load below which a sidecore is not worth relieving for evenness.
    pub even_above: f64,
    /// Load that the busier of two sidecores must lose by the moves between them.
    pub min_gain: f64,
    /// Looks for which a unit stays where it was moved to, unless one is activated for it.
    pub min_stay_looks: u64,
    /// Looks among the last [`Limits::window_looks`] that must show saturation, unevenness or a
    /// remote unit.
    pub needed_looks: u32,
    /// Looks among which [`Limits::needed_looks`] are counted; at most 32.
    pub window_looks: u32,
    /// Looks in a row that must show that one sidecore fewer would do.
    pub park_looks: u32,
    /// Most moves of one look: each costs two sidecores the length of a call. Enough for half of
    /// the workers of a sidecore that has hundreds.
    pub max_moves: usize,
}

/// Value of [`Limits::room`]. A unit that costs a third more on another node still stays below
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
