//! The dirty-page log of live migration (vhost-user `SET_LOG_BASE`).

use std::os::fd::OwnedFd;

use crate::error::MemoryError;

/// The shared bitmap: one bit per 4 KiB guest page, set atomically; bits beyond its size are never
/// touched.
#[derive(Debug)]
pub struct DirtyLog {
    // (private: mapping, length)
}

impl DirtyLog {
    /// Maps the bitmap.
    pub fn new(fd: OwnedFd, mmap_size: u64, mmap_offset: u64) -> Result<Self, MemoryError> {
        let _ = (fd, mmap_size, mmap_offset);
        unimplemented!("owner of crate queue")
    }

    /// Marks the pages of a guest range dirty.
    pub fn mark(&self, guest_addr: u64, len_bytes: u64) {
        let _ = (guest_addr, len_bytes);
        unimplemented!("owner of crate queue")
    }
}
