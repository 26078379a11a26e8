//! Mappings of front ends' files, which are checked first.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FileType, OFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::budget::{Charge, Purpose, VmBudget};
use crate::file_system::{self, PAGE_BYTES};
use crate::sigbus::SigbusGuard;

/// Length of a block that may become a huge page: one of x86-64 and of arm64.
pub(crate) const BLOCK_BYTES: usize = 2 << 20;

/// A shared, writable mapping of a part of a peer's file, guarded against truncation.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// None only within `drop`.
    guard: Option<SigbusGuard>,
    map: NonNull<u8>,
    map_len: usize,
    /// Bytes from the start of the mapping to the first byte asked for (huge pages only).
    head: usize,
    /// The file, for its size.
    file: OwnedFd,
    /// Blocks that may become huge pages: whole ones of a file with ordinary pages.
    blocks: usize,
    /// Offset of the first of them in the file.
    first_block_offset: u64,
    /// Bytes of those that have.
    huge_bytes: AtomicU64,
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
        let file = fd.try_clone_to_owned().map_err(|e| format!("duplicate a descriptor: {e}"))?;
        let ordinary = page_bytes == PAGE_BYTES;
        let map = if ordinary && map_len >= BLOCK_BYTES {
            map_aligned(fd, start, map_len)?
        } else {
            map_file(std::ptr::null_mut(), MapFlags::empty(), fd, start, map_len)?
        };
        let first_block = (map.as_ptr() as usize).next_multiple_of(BLOCK_BYTES);
        let before = first_block - map.as_ptr() as usize;
        let blocks = if ordinary { map_len.saturating_sub(before) / BLOCK_BYTES } else { 0 };
        match SigbusGuard::new(map.as_ptr() as usize, map_len, page_bytes as usize) {
            Ok(guard) => {
                let head = (offset - start) as usize;
                let (guard, huge_bytes) = (Some(guard), AtomicU64::new(0));
                let first_block_offset = start + before as u64;
                Ok(Self {
                    guard,
                    map,
                    map_len,
                    head,
                    file,
                    blocks,
                    first_block_offset,
                    huge_bytes,
                    _charge: charge,
                })
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

    /// Number of blocks of [`BLOCK_BYTES`] that may become huge pages.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes that have become huge pages.
    pub fn huge_bytes(&self) -> u64 {
        self.huge_bytes.load(Ordering::Relaxed)
    }

    /// Bytes of memory that the file has, all of it.
    pub fn allocated_bytes(&self) -> u64 {
        // Files that may wait for somebody were refused.
        rustix::fs::fstat(&self.file).map_or(0, |stat| stat.st_blocks as u64 * 512)
    }

    /// The file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Offset of a block in the file.
    pub fn block_offset(&self, number: usize) -> u64 {
        self.first_block_offset + (number * BLOCK_BYTES) as u64
    }

    /// Address of a block.
    fn block(&self, number: usize) -> *mut libc::c_void {
        let first = (self.map.as_ptr() as usize).next_multiple_of(BLOCK_BYTES);
        let at = first - self.map.as_ptr() as usize + number * BLOCK_BYTES;
        self.map.as_ptr().wrapping_add(at).cast()
    }

    /// Tells which pages are there from a block on: a byte for each, whose lowest bit says so.
    pub fn present(&self, first: usize, pages: &mut [u8]) -> io::Result<()> {
        let len = pages.len() * PAGE_BYTES as usize;
        assert!(first * BLOCK_BYTES + len <= self.blocks * BLOCK_BYTES);
        // SAFETY: the range is within the mapping, and there is a byte for each of its pages.
        match unsafe { libc::mincore(self.block(first), len, pages.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Notes that so many blocks more are huge pages.
    pub fn note_huge(&self, blocks: usize) {
        self.huge_bytes.fetch_add((blocks * BLOCK_BYTES) as u64, Ordering::Relaxed);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // First: the addresses may belong to another mapping as soon as they are unmapped.
        self.guard = None;
        unmap(self.map, self.map_len);
    }
}

/// Has the kernel move a part of a file into huge pages, for all who map it: whole blocks from
/// `offset` on. It may wait for long, and the caller's address space is locked meanwhile: see
/// [`block_mover`](crate::block_mover).
pub(crate) fn collapse(file: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<()> {
    if len == 0 || !len.is_multiple_of(BLOCK_BYTES) || !offset.is_multiple_of(BLOCK_BYTES as u64) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let map = map_aligned(file, offset, len).map_err(io::Error::other)?;
    // SAFETY: the range is that of the mapping. The bytes stay the same, and so do the rights.
    let done = match unsafe { libc::madvise(map.as_ptr().cast(), len, libc::MADV_COLLAPSE) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    unmap(map, len);
    done
}

/// Maps a part of a file for reading and writing.
fn map_file(
    address: *mut u8,
    flags: MapFlags,
    fd: BorrowedFd<'_>,
    start: u64,
    len: usize,
) -> Result<NonNull<u8>, String> {
    let flags = MapFlags::SHARED | MapFlags::NORESERVE | flags;
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: at an address that the kernel chooses it replaces nothing; the one caller with
    // another address has reserved it.
    let map = unsafe { rustix::mm::mmap(address.cast(), len, rights, flags, fd, start) };
    let map = map.map_err(|e| format!("mmap of {len:#x} bytes at {start:#x}: {e}"))?;
    NonNull::new(map.cast()).ok_or_else(|| "mmap returned address 0".into())
}

/// Maps a part of a file where its blocks may become huge pages: at an address that is as far from
/// a multiple of [`BLOCK_BYTES`] as the file's offset is.
fn map_aligned(fd: BorrowedFd<'_>, start: u64, len: usize) -> Result<NonNull<u8>, String> {
    let reserved_len = len.checked_add(BLOCK_BYTES).ok_or("file range wraps around")?;
    // SAFETY: a new mapping at an address that the kernel chooses; it replaces nothing.
    let reserved = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            reserved_len,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    };
    let reserved = reserved.map_err(|e| format!("mmap of {reserved_len:#x} bytes: {e}"))?;
    let reserved = NonNull::new(reserved.cast::<u8>()).ok_or("mmap returned address 0")?;
    let wanted = start as usize % BLOCK_BYTES;
    let is = reserved.as_ptr() as usize % BLOCK_BYTES;
    let before = (wanted + BLOCK_BYTES - is) % BLOCK_BYTES;
    // `before` is below `BLOCK_BYTES`, by which the reservation is longer.
    let address = reserved.as_ptr().wrapping_add(before);
    match map_file(address, MapFlags::FIXED, fd, start, len) {
        Ok(map) => {
            let behind = address.wrapping_add(len.next_multiple_of(PAGE_BYTES as usize));
            let end = reserved.as_ptr().wrapping_add(reserved_len);
            for (from, len) in
                [(reserved.as_ptr(), before), (behind, end as usize - behind as usize)]
            {
                if let Some(from) = NonNull::new(from).filter(|_| len > 0) {
                    unmap(from, len);
                }
            }
            Ok(map)
        }
        Err(error) => {
            unmap(reserved, reserved_len);
            Err(error)
        }
    }
}

fn unmap(map: NonNull<u8>, map_len: usize) {
    // SAFETY: address and length are those of a mapping that was made here, or of a reservation's
    // part that nothing was mapped into; called once for each.
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
