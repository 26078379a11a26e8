//! Lengths of loads.

use std::time::Duration;

use super::case::Case;

/// Time for either part of a load that ends by itself. One that takes longer is measured as far as
/// it came.
const LONGEST_ONCE: Duration = Duration::from_secs(5);

/// How long a load runs.
#[derive(Debug, Clone, Copy)]
pub struct Window {
    /// Before it counts.
    pub warm_up: Duration,
    /// While it counts.
    pub length: Duration,
}

impl Window {
    /// The window of a case's loads, where those that go by time have this one.
    pub fn of(self, case: &Case) -> Window {
        match case.once_per_bytes() {
            Some(_) => Window { warm_up: LONGEST_ONCE, length: LONGEST_ONCE },
            None => self,
        }
    }
}

/// How much to measure.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// Rounds that count; one more is run first and thrown away.
    pub rounds: u32,
    /// Window of each load.
    pub window: Window,
}
