//! Where a queue's position survives the daemon: 64 bytes per queue in a shared memory file that
//! the holder keeps.

use std::sync::Arc;

use base::shm::SharedMemory;

use crate::ring::Position;

/// Bytes per slot: one cache line, so that two sidecores never share one.
pub const SLOT_LEN_BYTES: usize = 64;

/// The saved position of one queue.
#[derive(Debug, Clone)]
pub struct PositionSlot {
    // (private: Arc<SharedMemory>, index)
}

impl PositionSlot {
    /// Slot `index` of the file.
    pub fn new(shm: Arc<SharedMemory>, index: usize) -> Option<Self> {
        let _ = (shm, index);
        unimplemented!("owner of crate queue")
    }

    /// The saved position; none when the slot was never written or is nonsense.
    pub fn load(&self) -> Option<Position> {
        unimplemented!("owner of crate queue")
    }

    /// Forgets the position (ring reset).
    pub fn clear(&self) {
        unimplemented!("owner of crate queue")
    }
}
