//! Mapping a front end's file, and checking it first.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::FileType;
use rustix::mm::{MapFlags, ProtFlags};

use crate::sigbus::Guarded;

/// Page size of ordinary mappings.
const PAGE_BYTES: u64 = 4096;

/// `f_type` of hugetlbfs (statfs(2)).
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// A shared, writable mapping of a part of somebody else's file, guarded against truncation.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// None only within `drop`.
    guard: Option<Guarded>,
    map: NonNull<u8>,
    map_len: usize,
    /// From the start of the mapping to the first byte asked for (huge pages only).
    head: usize,
}

// SAFETY: plain shared memory; ordering is the business of whoever accesses it through `as_ptr`.
unsafe impl Send for Mapping {}
// SAFETY: as above; `&Mapping` only gives out the address.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `offset..offset + len` of the file. The error is a text that says why not.
    pub fn new(fd: &OwnedFd, offset: u64, len: u64) -> Result<Self, String> {
        let page_bytes = page_bytes(fd)?;
        if !offset.is_multiple_of(PAGE_BYTES) {
            return Err(format!("file offset {offset:#x} is not a multiple of {PAGE_BYTES}"));
        }
        let end = offset.checked_add(len).ok_or("file range wraps around")?;
        check_size(fd, end)?;
        // Huge pages can only be mapped whole: begin at the page, remember where our bytes begin.
        let start = offset & !(page_bytes - 1);
        let end = end.checked_next_multiple_of(page_bytes).ok_or("file range wraps around")?;
        let map_len = usize::try_from(end - start).map_err(|e| e.to_string())?;
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
        match Guarded::new(map.as_ptr() as usize, map_len, page_bytes as usize) {
            Ok(guard) => {
                Ok(Self { guard: Some(guard), map, map_len, head: (offset - start) as usize })
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
        self.guard.as_ref().is_some_and(Guarded::was_hit)
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

fn page_bytes(fd: &OwnedFd) -> Result<u64, String> {
    let stat = rustix::fs::fstatfs(fd).map_err(|e| format!("fstatfs: {e}"))?;
    if stat.f_type as u64 != HUGETLBFS_MAGIC {
        return Ok(PAGE_BYTES);
    }
    let bytes = stat.f_bsize as u64;
    if bytes.is_power_of_two() && bytes >= PAGE_BYTES {
        Ok(bytes)
    } else {
        Err(format!("huge page size {bytes:#x} is not a power of two"))
    }
}

/// Regular files must hold the whole range; devices have no size to compare with.
fn check_size(fd: &OwnedFd, end: u64) -> Result<(), String> {
    let stat = rustix::fs::fstat(fd).map_err(|e| format!("fstat: {e}"))?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    match kind {
        FileType::RegularFile => {
            let size = stat.st_size as u64;
            if size < end {
                return Err(format!("the file has {size:#x} bytes; {end:#x} are needed"));
            }
            Ok(())
        }
        FileType::BlockDevice | FileType::CharacterDevice => Ok(()),
        other => Err(format!("a descriptor of type {other:?} is not memory")),
    }
}
