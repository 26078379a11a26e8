//! The dirty-page log of live migration (vhost-user `SET_LOG_BASE`).

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use crate::budget::Purpose;
use crate::error::MemoryError;
use crate::mapping::Mapping;
use crate::share::MemoryShare;

/// Bytes of guest memory behind one bit (vhost-user, "Migration": `VHOST_LOG_PAGE`).
pub const LOG_PAGE_BYTES: u64 = 4096;

/// Largest log: 2 GiB of bitmap tell of 64 TiB of guest addresses, the most that x86 with 46
/// physical address bits has.
pub const MAX_LOG_BYTES: u64 = 2 << 30;

/// The shared bitmap: one bit per 4 KiB guest page, set atomically; bits beyond its size are never
/// touched.
#[derive(Debug)]
pub struct DirtyLog {
    mapping: Arc<Mapping>,
    len_bytes: u64,
}

impl DirtyLog {
    /// Maps the bitmap, as one of a VM's mappings. Fails when size and offset wrap around, when
    /// the size is 0 or above [`MAX_LOG_BYTES`], or when the file is shorter.
    pub fn new(
        share: &MemoryShare,
        fd: impl AsFd,
        mmap_size: u64,
        mmap_offset: u64,
    ) -> Result<Self, MemoryError> {
        let unmappable = |reason: String| MemoryError::Unmappable {
            addr: mmap_offset,
            len: mmap_size,
            reason: format!("dirty log: {reason}"),
        };
        if mmap_offset.checked_add(mmap_size).is_none() {
            return Err(MemoryError::Wraps { addr: mmap_offset, len: mmap_size });
        }
        if mmap_size == 0 || mmap_size > MAX_LOG_BYTES {
            return Err(unmappable(format!("size 0 or above the limit {MAX_LOG_BYTES:#x}")));
        }
        let mapping =
            share.map(Purpose::Log, fd.as_fd(), mmap_offset, mmap_size).map_err(unmappable)?;
        Ok(Self { mapping, len_bytes: mmap_size })
    }

    /// Whether the log's own file was truncated under us.
    pub(crate) fn was_truncated(&self) -> bool {
        self.mapping.was_truncated()
    }

    /// Marks the pages of a guest range dirty.
    pub fn mark(&self, guest_addr: u64, len_bytes: u64) {
        if len_bytes == 0 {
            return;
        }
        let first = guest_addr / LOG_PAGE_BYTES;
        let last = guest_addr.saturating_add(len_bytes - 1) / LOG_PAGE_BYTES;
        let end = (last + 1).min(self.len_bytes * 8);
        for page in first..end {
            let bit = 1u8 << (page % 8);
            // SAFETY: `page / 8` is below `len_bytes`, which is mapped while `self` lives; the
            // front end reads and clears the byte with atomic operations too.
            let byte =
                unsafe { AtomicU8::from_ptr(self.mapping.as_ptr().add((page / 8) as usize)) };
            // No "is it set already" first: the front end may clear it between that look and our
            // data's becoming visible, and the page would be lost.
            byte.fetch_or(bit, Ordering::SeqCst);
        }
    }
}
