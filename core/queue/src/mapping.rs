//! Mappings of front ends' files, which are checked first.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use rustix::fs::{FileType, OFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::budget::{Charge, Purpose, VmBudget};
use crate::file_system::{self, PAGE_BYTES};
use crate::sigbus::SigbusGuard;

/// A shared, writable mapping of a part of a peer's file, guarded against truncation.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// None only within `drop`.
    guard: Option<SigbusGuard>,
    map: NonNull<u8>,
    map_len: usize,
    /// Bytes from the start of the mapping to the first byte asked for (huge pages only).
    head: usize,
    /// Given back after the unmapping: fields are dropped after `drop`.
    _charge: Charge,
}

// SAFETY: plain shared memory; ordering is the business of whoever accesses it through `as_ptr`.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` only gives out the address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Checks that `offset..offset + len` of the file may be mapped; returns the size of its pages.
    /// The error is a text that says why not.
    pub fn check(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<u64, String> {
        file_system::check_never_waits(fd)?;
        let page_bytes = file_system::page_bytes(fd)?;
        let size = file_size(fd)?;
        if !offset.is_multiple_of(PAGE_BYTES) {
            return Err(format!("file offset {offset:#x} is not a multiple of {PAGE_BYTES}"));
        }
        let end = offset.checked_add(len).ok_or("file range wraps around")?;
        if size < end {
            return Err(format!("the file has {size:#x} bytes; {end:#x} are needed"));
        }
        Ok(page_bytes)
    }

    /// Maps `offset..offset + len` of the file, at the expense of the process and of `vm`. The
    /// error is a text that says why not.
    pub fn new(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
        vm: Option<(&VmBudget, Purpose)>,
    ) -> Result<Self, String> {
        let page_bytes = Self::check(fd, offset, len)?;
        let end = offset + len;
        // Huge pages can only be mapped whole: begin at the page, remember where our bytes begin.
        let start = offset & !(page_bytes - 1);
        let end = end.checked_next_multiple_of(page_bytes).ok_or("file range wraps around")?;
        let map_len = usize::try_from(end - start).map_err(|e| e.to_string())?;
        let charge = Charge::take(end - start, vm)?;
        // SAFETY: a new mapping at an address that the kernel chooses; it replaces nothing.
        let map = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                map_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                start,
            )
        };
        let map = map.map_err(|e| format!("mmap of {map_len:#x} bytes at {start:#x}: {e}"))?;
        let map = NonNull::new(map.cast::<u8>()).ok_or("mmap returned address 0")?;
        match SigbusGuard::new(map.as_ptr() as usize, map_len, page_bytes as usize) {
            Ok(guard) => {
                let head = (offset - start) as usize;
                Ok(Self { guard: Some(guard), map, map_len, head, _charge: charge })
            }
            Err(reason) => {
                unmap(map, map_len);
                Err(reason)
            }
        }
    }

    /// The first byte asked for.
    pub fn as_ptr(&self) -> *mut u8 {
        // `head` is below `map_len`.
        self.map.as_ptr().wrapping_add(self.head)
    }

    /// Whether an access found the file shorter than it was.
    pub fn was_truncated(&self) -> bool {
        self.guard.as_ref().is_some_and(SigbusGuard::was_hit)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First: the addresses may belong to another mapping as soon as they are unmapped.
        self.guard = None;
        unmap(self.map, self.map_len);
    }
}

fn unmap(map: NonNull<u8>, map_len: usize) {
    // SAFETY: address and length are those of a mapping made by `Mapping::new`; called once.
    let _ = unsafe { rustix::mm::munmap(map.as_ptr().cast(), map_len) };
}

/// Size of a regular file that is open for reading and writing; any other descriptor is refused. A
/// device is refused whatever file system its node is on: pages that are read from `/dev/zero` are
/// the daemon's own memory.
fn file_size(fd: BorrowedFd<'_>) -> Result<u64, String> {
    let stat = rustix::fs::fstat(fd).map_err(|e| format!("fstat: {e}"))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind != FileType::RegularFile {
        return Err(format!("a descriptor of type {kind:?} is not memory; allowed are files"));
    }
    let flags = rustix::fs::fcntl_getfl(fd).map_err(|e| format!("fcntl: {e}"))?;
    if flags & OFlags::RWMODE != OFlags::RDWR {
        return Err("the file is not open for reading and writing".into());
    }
    Ok(stat.st_size as u64)
}
