//! What all queues of a port share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use sidecore::VmId;
use stage::{BlockStage, Direction, Verdict};

use crate::backend::Demands;
use crate::gate::Gate;
use crate::request::Geometry;
use crate::slab::Serial;

/// See the module's text. Written by the session's thread, read by sidecores.
pub(crate) struct PortState {
    /// Whose account requests are charged to.
    pub vm: VmId,
    /// Of the device below.
    pub gate: Option<Arc<Gate>>,
    /// Size of the disk.
    pub len_bytes: AtomicU64,
    /// The write cache is on: writes are durable after a flush only.
    pub writeback: AtomicBool,
    pub read_only: bool,
    pub discard: bool,
    pub block_size: u32,
    pub serial: Serial,
    pub demands: Demands,
    /// First to last on the way from the VM. All queues of a port with stages are on one sidecore,
    /// so this lock is never waited for; ports without stages never take it.
    pub stages: Mutex<Vec<Box<dyn BlockStage>>>,
    pub has_stages: bool,
}

impl PortState {
    pub fn geometry(&self) -> Geometry {
        Geometry {
            len_bytes: self.len_bytes.load(Ordering::Relaxed),
            block_size: self.block_size,
            read_only: self.read_only,
            discard: self.discard,
        }
    }

    /// Shows `data` to all stages; false when one refuses it.
    pub fn run_stages(&self, direction: Direction, offset: u64, data: &mut [u8]) -> bool {
        let mut stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner);
        let mut pass =
            |stage: &mut Box<dyn BlockStage>| stage.push(direction, offset, data) == Verdict::Pass;
        match direction {
            Direction::FromVm => stages.iter_mut().all(&mut pass),
            Direction::ToVm => stages.iter_mut().rev().all(&mut pass),
        }
    }
}
