//! How much memory there is in use, and whether there is more.
//!
//! What is in use is an estimate, held against a limit. The host may allow less than that, and does not
//! say how much: so before the estimate grows by [`STEP_BYTES`] the allocator is asked for
//! [`ROOM_BYTES`] at once, which it keeps for what comes. If it has none, what is in use is the limit.

use alloc::vec::Vec;

use crate::fail::{Fail, fail};
use crate::store::Store;

/// What deletions and locks may use beyond the limit: they give it back.
pub const SPARE_BYTES: u64 = 16 << 20;
/// What a lock costs, about.
pub const LOCK_BYTES: u64 = 96;
/// What must be there for the next step: estimates are wrong, and there are buffers that they do not know.
const ROOM_BYTES: usize = 64 << 20;
/// A step.
const STEP_BYTES: u64 = 16 << 20;

/// Whether the allocator has so many bytes.
pub fn has_room(bytes: usize) -> bool {
    Vec::<u8>::new().try_reserve_exact(bytes).is_ok()
}

impl Store {
    /// About how much is in use.
    pub(crate) fn memory(&self) -> u64 {
        self.log.books.memory + self.locks.len() as u64 * LOCK_BYTES
    }

    /// Fails if so many bytes more are too many.
    pub(crate) fn check_memory(&mut self, more: u64) -> Result<(), Fail> {
        let used = self.memory();
        if used > self.proven_bytes && used < self.config.memory_bytes {
            if (self.config.has_room)(ROOM_BYTES) {
                self.proven_bytes = used + STEP_BYTES;
            } else {
                self.config.memory_bytes = used;
            }
        }
        let limit = self.config.memory_bytes;
        if used.saturating_add(more) > limit.saturating_add(SPARE_BYTES) {
            return Err(fail!(LIMIT, "memory: {used} bytes are in use, the limit is {limit}"));
        }
        Ok(())
    }
}
