//! Memory of placement from look to look.

use std::collections::BTreeMap;

use super::limits::Limits;
use super::load::{CoreLoad, UnitLoad};

/// State from look to look: active sidecores, conditions that held, recent moves.
#[derive(Debug, Clone)]
pub struct History {
    pub(super) look: u64,
    /// Whether each sidecore is active.
    pub(super) active: Vec<bool>,
    /// Saturation of each sidecore, a bit for each look, the newest in the lowest bit.
    pub(super) saturated: Vec<u32>,
    /// Unevenness of all sidecores, a bit for each look.
    pub(super) uneven: u32,
    /// Remote units that have a place on their memory's node, a bit for each look.
    pub(super) remote: u32,
    /// Looks in a row in which one sidecore could have been parked; not always the same one.
    pub(super) spare: u32,
    /// Look in which each unit was moved.
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

    /// Whether each sidecore is active.
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
