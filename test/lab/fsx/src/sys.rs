//! The system calls that `std` and rustix do not wrap safely: all of this crate's unsafe code.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;

use rustix::mm::{MapFlags, MsyncFlags, ProtFlags, mmap, msync, munmap};

/// Pages of x86-64.
pub const PAGE_BYTES: u64 = 4096;

// include/uapi/linux/fs.h, by _IO(0x12, n) and _IOWR('X', 121, struct fstrim_range).
const BLKDISCARD: libc::c_ulong = 0x1277;
const BLKZEROOUT: libc::c_ulong = 0x127f;
const FITRIM: libc::c_ulong = 0xc018_5879;

fn checked(answer: libc::c_int) -> io::Result<()> {
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Lets a disk forget a range.
///
/// # Errors
/// No disk; not aligned to its blocks; it fails.
pub fn discard(disk: &File, at: u64, len: u64) -> io::Result<()> {
    let range = [at, len];
    // SAFETY: the call reads two numbers of 64 bits from a pointer to two.
    checked(unsafe { libc::ioctl(disk.as_raw_fd(), BLKDISCARD, range.as_ptr()) })
}

/// Zeroes a range of a disk.
///
/// # Errors
/// As [`discard`].
pub fn zero_out(disk: &File, at: u64, len: u64) -> io::Result<()> {
    let range = [at, len];
    // SAFETY: as in `discard`.
    checked(unsafe { libc::ioctl(disk.as_raw_fd(), BLKZEROOUT, range.as_ptr()) })
}

/// Lets a file system discard all that is free.
///
/// # Errors
/// The file system or its disk cannot.
pub fn trim(folder: &File) -> io::Result<()> {
    // From 0, all of it, no least length.
    let mut range = [0, u64::MAX, 0];
    // SAFETY: the call reads and writes three numbers of 64 bits at a pointer to three.
    checked(unsafe { libc::ioctl(folder.as_raw_fd(), FITRIM, range.as_mut_ptr()) })
}

/// Writes a range's dirty pages to the disk and waits, without a flush of the disk's cache.
///
/// # Errors
/// The disk fails.
pub fn write_back(file: &File, at: u64, len: u64) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE
        | libc::SYNC_FILE_RANGE_WRITE
        | libc::SYNC_FILE_RANGE_WAIT_AFTER;
    let (at, len) = (at.cast_signed(), len.cast_signed());
    // SAFETY: no memory is passed.
    checked(unsafe { libc::sync_file_range(file.as_raw_fd(), at, len, flags) })
}

/// Maps the pages around a range of a file and copies bytes into it or out of it.
///
/// # Errors
/// The file cannot be mapped, or not be written back when that is asked for. A disk that fails
/// while the pages are touched ends the program with SIGBUS.
fn with_mapping(
    file: &File,
    at: u64,
    len: usize,
    sync: bool,
    copy: impl FnOnce(*mut u8),
) -> io::Result<()> {
    let skip = (at % PAGE_BYTES) as usize;
    let map_len = skip + len;
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let from = at - skip as u64;
    // SAFETY: a new mapping at a place of the kernel's choice; nothing else knows of it.
    let map = unsafe { mmap(ptr::null_mut(), map_len, both, MapFlags::SHARED, file, from)? };
    // SAFETY: `skip` is below the length of the mapping, for callers have at least one byte.
    copy(unsafe { map.cast::<u8>().add(skip) });
    let synced = if sync {
        // SAFETY: the mapping of above, with its length.
        unsafe { msync(map, map_len, MsyncFlags::SYNC) }
    } else {
        Ok(())
    };
    // SAFETY: the same; no pointer into it is left.
    unsafe { munmap(map, map_len)? };
    Ok(synced?)
}

/// Writes through a mapping; with `sync`, msync(2) follows.
///
/// # Errors
/// As mmap(2) and msync(2).
pub fn write_mapped(file: &File, at: u64, bytes: &[u8], sync: bool) -> io::Result<()> {
    // SAFETY: the mapping has as many bytes from its pointer on; it is no memory of Rust's.
    let copy = |to| unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    with_mapping(file, at, bytes.len(), sync, copy)
}

/// Reads through a mapping.
///
/// # Errors
/// As mmap(2).
pub fn read_mapped(file: &File, at: u64, bytes: &mut [u8]) -> io::Result<()> {
    let len = bytes.len();
    // SAFETY: as in `write_mapped`, the other way.
    let copy = |from: *mut u8| unsafe { ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len) };
    with_mapping(file, at, len, false, copy)
}
