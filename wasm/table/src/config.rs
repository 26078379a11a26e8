//! Configuration of the store.

use alloc::vec::Vec;

/// Limits of a store.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Length of a segment of the log from which on it is not appended to any more.
    pub segment_bytes: u64,
    /// Bytes of ops above which a transaction puts them into the log before its commit.
    pub spill_bytes: usize,
    /// Least bytes of log between two checkpoints.
    pub checkpoint_bytes: u64,
    /// Estimate of memory above which writes fail, should the host allow more.
    pub memory_bytes: u64,
    /// Whether the allocator has a number of bytes more.
    pub has_room: fn(usize) -> bool,
    /// Largest reserve for records that free space on a full disk. 0: there is no reserve.
    pub reserve_bytes: u64,
    /// Steps that one call may do: ops, keys that are looked at, pages that are read.
    pub steps: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            segment_bytes: 64 << 20,
            spill_bytes: 1 << 20,
            checkpoint_bytes: 64 << 20,
            memory_bytes: u64::MAX,
            has_room,
            reserve_bytes: 4 << 20,
            steps: 16_384,
        }
    }
}

/// Whether the allocator has a number of bytes more.
pub fn has_room(bytes: usize) -> bool {
    let mut room = Vec::<u8>::new();
    let is_there = room.try_reserve_exact(bytes).is_ok();
    // Compilers may leave out an allocation that is not used, and take it for granted.
    core::hint::black_box(room.as_ptr());
    is_there
}
