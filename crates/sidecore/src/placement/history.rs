//! What placement remembers from look to look.

use std::collections::BTreeMap;

use super::limits::Limits;
use super::load::{CoreLoad, UnitLoad};

/// What is remembered from look to look.
#[derive(Debug, Clone)]
pub struct History {
    pub(super) look: u64,
    /// Which sidecores are active.
    pub(super) active: Vec<bool>,
    /// For each sidecore, newest look in the lowest bit: was it saturated?
    pub(super) saturated: Vec<u32>,
    /// The same for the evenness of all.
    pub(super) uneven: u32,
    /// The same for remote units that have a place at home.
    pub(super) remote: u32,
    /// Looks in a row in which one sidecore could have been parked; not always the same one.
    pub(super) spare: u32,
    /// When each unit was moved.
    pub(super) moved: BTreeMap<u32, u64>,
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

    pub(super) fn begin(&mut self, cores: &[CoreLoad], units: &[UnitLoad], limits: &Limits) {
        self.look += 1;
        for (core, bits) in cores.iter().zip(&mut self.saturated) {
            *bits = *bits << 1 | u32::from(core.load >= limits.saturated);
        }
        let oldest = self.look.saturating_sub(limits.min_stay_looks);
        self.moved.retain(|id, at| *at >= oldest && units.iter().any(|u| u.id == *id));
    }

    pub(super) fn is_settled(&self, unit: u32) -> bool {
        !self.moved.contains_key(&unit)
    }

    pub(super) fn holds(bits: u32, limits: &Limits) -> bool {
        let window = u32::MAX >> (32 - limits.window_looks.clamp(1, 32));
        (bits & window).count_ones() >= limits.needed_looks
    }
}
