//! The guest memory that a driver shares with its back end: one file, one region.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use crate::error::FrontendError;

/// First address of the region in the guest's address space. Not 0, so that a forgotten translation
/// shows.
pub const GUEST_BASE: u64 = 0x4000_0000;

/// Bytes of a huge page.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// A mapped memory file; see the module's text. Handed out from the front, never taken back.
#[derive(Debug)]
pub struct Memory {
    fd: OwnedFd,
    base: NonNull<u8>,
    len_bytes: usize,
    used_bytes: usize,
}

// SAFETY: plain shared memory owned by this value; who accesses it minds the order.
unsafe impl Send for Memory {}

impl Memory {
    /// A new region of at least `len_bytes`, present in memory. `huge`: of huge pages, which must
    /// have been reserved.
    pub fn new(len_bytes: usize, huge: bool) -> Result<Self, FrontendError> {
        let len_bytes = len_bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let size = if huge { MemfdFlags::HUGETLB } else { MemfdFlags::empty() };
        let io = FrontendError::io("making guest memory");
        let fd = rustix::fs::memfd_create("frontend", MemfdFlags::CLOEXEC | size).map_err(&io)?;
        rustix::fs::ftruncate(&fd, len_bytes as u64).map_err(&io)?;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::POPULATE,
                &fd,
                0,
            )
        }
        .map_err(&io)?;
        let base = NonNull::new(base.cast()).ok_or(FrontendError::NoMemory { len_bytes })?;
        Ok(Self { fd, base, len_bytes, used_bytes: 0 })
    }

    /// The file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Length in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Address of the region in this process: what vhost-user calls the user address.
    pub fn user_base(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// The guest's address of a byte at `ptr`, which lies in the region.
    pub fn guest_addr(&self, ptr: *const u8) -> u64 {
        GUEST_BASE + (ptr as u64 - self.user_base())
    }

    /// `len_bytes` of zeroes, aligned to `align` (a power of two), ours for the region's life.
    pub fn alloc(&mut self, len_bytes: usize, align: usize) -> Result<*mut u8, FrontendError> {
        let start = self.used_bytes.next_multiple_of(align);
        let end = start.saturating_add(len_bytes);
        if end > self.len_bytes {
            return Err(FrontendError::NoMemory { len_bytes });
        }
        self.used_bytes = end;
        // SAFETY: `start` lies in the mapping.
        Ok(unsafe { self.base.as_ptr().add(start) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, unmapped once.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}
