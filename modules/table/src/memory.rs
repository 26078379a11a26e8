//! How much memory there is in use, and whether there is more.
//!
//! What is in use is an estimate. The limit is the host's, which does not say how much it is: so before the
//! estimate grows by [`STEP_BYTES`] the allocator is asked for [`ROOM_BYTES`] at once, which it keeps for
//! what comes. If it has none, what is in use then is the limit, until it has some again.

use alloc::format;
use alloc::vec::Vec;

use sdk::Errno;

use crate::fail::{Fail, fail};
use crate::replay::Broken;
use crate::store::Store;

/// What deletions and locks may use beyond the limit: they give it back.
pub const SPARE_BYTES: u64 = 16 << 20;
/// What a lock costs, about.
pub const LOCK_BYTES: u64 = 96;
/// What must be there for the next step: estimates are wrong, and there are buffers that they do not know.
pub const ROOM_BYTES: usize = 64 << 20;
/// A step.
pub const STEP_BYTES: u64 = 16 << 20;

/// Whether the allocator has so many bytes.
pub fn has_room(bytes: usize) -> bool {
    let mut room = Vec::<u8>::new();
    let is_there = room.try_reserve_exact(bytes).is_ok();
    // Compilers may leave out what is allocated for nothing, and take it for granted.
    core::hint::black_box(room.as_ptr());
    is_there
}

impl Store {
    /// About how much is in use.
    pub(crate) fn memory(&self) -> u64 {
        self.log.books.memory + self.locks.len() as u64 * LOCK_BYTES
    }

    /// Fails if so many bytes more are too many.
    pub(crate) fn check_memory(&mut self, more: u64) -> Result<(), Fail> {
        let used = self.memory();
        let is_over = |limit: u64| used.saturating_add(more) > limit.saturating_add(SPARE_BYTES);
        if used > self.proven_bytes || self.found_bytes.is_some_and(is_over) {
            if (self.config.has_room)(ROOM_BYTES) {
                (self.proven_bytes, self.found_bytes) = (used + STEP_BYTES, None);
            } else {
                self.found_bytes = Some(self.found_bytes.map_or(used, |found| found.min(used)));
            }
        }
        let limit = self.found_bytes.unwrap_or(u64::MAX).min(self.config.memory_bytes);
        if is_over(limit) {
            return Err(fail!(
                LIMIT,
                "memory: {used} bytes are in use, the limit is {limit}: the module's, less {ROOM_BYTES} that are \
                 kept free"
            ));
        }
        Ok(())
    }

    /// At the start there is less to spare: what ran with so much memory must start with it.
    pub(crate) fn check_start(&mut self) -> Result<(), Broken> {
        let used = self.log.books.memory;
        if used < self.proven_bytes {
            return Ok(());
        }
        if !(self.config.has_room)(STEP_BYTES as usize) {
            let text =
                format!("memory: {used} bytes are in use, and the module is allowed no more");
            return Err(Broken { errno: Errno::NOMEM, text });
        }
        self.proven_bytes = used + STEP_BYTES / 2;
        Ok(())
    }
}
