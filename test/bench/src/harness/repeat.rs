//! Loads that fail are put on again, and what failed is noted.

use serde::{Deserialize, Serialize};

use crate::harness::error::BenchError;
use crate::harness::progress::Progress;
use crate::harness::results::Missing;

/// How often a load that failed is put on again.
const REPEATS: u32 = 1;

/// A load that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The row's case.
    pub case: String,
    /// Name of the side that failed.
    pub name: String,
    /// In which round, and why.
    pub why: String,
    /// Whether the load succeeded when put on again.
    pub repeated: bool,
}

impl Failure {
    /// One for good.
    pub fn new(case: &str, name: &str, why: String) -> Self {
        Self { case: case.into(), name: name.into(), why, repeated: false }
    }

    /// For the report.
    pub fn text(&self) -> String {
        let then = if self.repeated { ", and succeeded when put on again" } else { "" };
        format!("{}, {}: failed in {}{then}", self.case, self.name, self.why)
    }
}

/// Sides and cases that failed for good, each with its first failure.
pub fn lost(failed: &[Failure]) -> Vec<Missing> {
    let mut lost: Vec<Missing> = Vec::new();
    for f in failed.iter().filter(|f| !f.repeated) {
        if !lost.iter().any(|m| m.case == f.case && m.name == f.name) {
            let (case, name, why) = (f.case.clone(), f.name.clone(), f.why.clone());
            lost.push(Missing { case, name, why });
        }
    }
    lost
}

/// Runs a load, again if it fails; `None` when it failed for good, now or `given_up` times before:
/// a load that hangs must not do so in each round. `load` is told how often it failed just now.
pub fn with_repeats<T>(
    given_up: usize,
    (case, name): (&str, &str),
    round: u32,
    failed: &mut Vec<Failure>,
    progress: &mut Progress,
    mut load: impl FnMut(u32) -> Result<T, BenchError>,
) -> Option<T> {
    let lost = |f: &&Failure| !f.repeated && f.case == case && f.name == name;
    if failed.iter().filter(lost).count() >= given_up {
        return None;
    }
    for time in 0..=REPEATS {
        let why = match load(time) {
            Ok(value) => {
                if let (true, Some(last)) = (time > 0, failed.last_mut()) {
                    last.repeated = true;
                }
                return Some(value);
            }
            Err(e) => format!("round {round}: {e}"),
        };
        // The rest is a guest's console.
        let why = why.lines().next().unwrap_or_default().to_owned();
        progress.step(&format!("FAILED {case} {name}: {why}"));
        failed.push(Failure::new(case, name, why));
    }
    None
}

/// `items` from the `round`th on, forwards or backwards: nobody always comes after the same one.
pub fn order_for_round<T: Copy>(items: &[T], round: u32) -> Vec<T> {
    let mut order = items.to_vec();
    if !order.is_empty() {
        order.rotate_left(round as usize % items.len());
        if (round as usize / items.len()) % 2 == 1 {
            order.reverse();
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everyone_begins_and_everyone_follows_everyone() {
        let orders: Vec<_> = (0..6).map(|round| order_for_round(&[1, 2, 3], round)).collect();
        assert_eq!(orders[0], [1, 2, 3]);
        for pair in [(1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2)] {
            let follows = |o: &Vec<i32>| o.windows(2).any(|w| (w[0], w[1]) == pair);
            assert!(orders.iter().any(follows), "{pair:?} in {orders:?}");
        }
        assert!(order_for_round::<u8>(&[], 3).is_empty());
    }
}
