//! Limit of memory: how much is in use, and whether there is more.
//!
//! The memory in use is an estimate. The limit is the host's, which does not tell it: so before the
//! estimate grows by [`STEP_BYTES`] the allocator is asked for [`ROOM_BYTES`] at once, which it
//! keeps for later. If it has none, the memory in use then is the limit, until it has some again.

use alloc::format;

use sdk::Errno;

use crate::config::Config;
use crate::fail::{Fail, StartError, fail};

/// Bytes that deletions and locks may use beyond the limit: they give them back.
pub const SPARE_BYTES: u64 = 16 << 20;
/// Memory that a lock costs, about.
pub const LOCK_BYTES: u64 = 96;
/// Bytes that must be free for the next step: estimates are wrong, and there are buffers that they
/// do not know.
pub const ROOM_BYTES: usize = 64 << 20;
/// Growth of the estimate after which the allocator is asked again.
pub const STEP_BYTES: u64 = 16 << 20;

/// Limit of memory, as far as it was found.
#[derive(Debug, Default)]
pub struct MemoryLimit {
    /// Bytes that may be in use without another question to the allocator.
    proven_bytes: u64,
    /// Bytes that were in use when the allocator had no more.
    found_bytes: Option<u64>,
}

impl MemoryLimit {
    /// Fails if `more` bytes are too many while `used` bytes are in use.
    pub fn check(&mut self, used: u64, more: u64, config: &Config) -> Result<(), Fail> {
        let is_over = |limit: u64| used.saturating_add(more) > limit.saturating_add(SPARE_BYTES);
        if used > self.proven_bytes || self.found_bytes.is_some_and(is_over) {
            if (config.has_room)(ROOM_BYTES) {
                (self.proven_bytes, self.found_bytes) = (used + STEP_BYTES, None);
            } else {
                self.found_bytes = Some(self.found_bytes.map_or(used, |found| found.min(used)));
            }
        }
        let limit = self.found_bytes.unwrap_or(u64::MAX).min(config.memory_bytes);
        if is_over(limit) {
            return Err(fail!(
                LIMIT,
                "memory: {used} bytes are in use, the limit is {limit}: the module's, less {ROOM_BYTES} that are \
                 kept free"
            ));
        }
        Ok(())
    }

    /// Fails if the memory in use at the start is too much. Less is spared than later: a store that
    /// ran with a limit must start with it.
    pub fn check_start(&mut self, used: u64, config: &Config) -> Result<(), StartError> {
        if used < self.proven_bytes {
            return Ok(());
        }
        if !(config.has_room)(STEP_BYTES as usize) {
            let text =
                format!("memory: {used} bytes are in use, and the module is allowed no more");
            return Err(StartError { errno: Errno::NOMEM, text });
        }
        self.proven_bytes = used + STEP_BYTES / 2;
        Ok(())
    }
}
