//! Pages of a file in the host's page cache: looked for, and dropped.

use std::io;
use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;

use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::mm::{MapFlags, ProtFlags};

/// Whether a byte of a file is in the page cache. (Where nobody can tell, it is.)
///
/// A read that must not wait is not asked first: it begins to read what is missing, and finds it
/// when the disk is fast. `mincore` reads nothing, but says that all is there of a file that is not
/// the daemon's to write; then the read tells.
pub(crate) fn is_cached(file: BorrowedFd<'_>, offset: u64) -> bool {
    is_in_core(file, offset) && {
        let mut byte = [0];
        let into = &mut [io::IoSliceMut::new(&mut byte)];
        preadv2(file, into, offset, ReadWriteFlags::NOWAIT) != Err(Errno::AGAIN)
    }
}

/// Whether the page that holds a byte is in memory, by `mincore`. (A page that cannot be mapped
/// is.)
fn is_in_core(file: BorrowedFd<'_>, offset: u64) -> bool {
    let page_bytes = rustix::param::page_size();
    let start = offset - offset % page_bytes as u64;
    // SAFETY: a new mapping at an address that the kernel chooses; it replaces nothing.
    let map = unsafe {
        rustix::mm::mmap(null_mut(), page_bytes, ProtFlags::READ, MapFlags::SHARED, file, start)
    };
    let Ok(map) = map else { return true };
    let mut state = 1;
    // SAFETY: one page of a mapping that nobody else knows, and one byte of ours for it.
    let result = unsafe { libc::mincore(map, page_bytes, &raw mut state) };
    // SAFETY: made above, and nothing refers to it.
    let _ = unsafe { rustix::mm::munmap(map, page_bytes) };
    result != 0 || state & 1 != 0
}

/// Drops the pages that hold these bytes of a file: they are read from its disk anew.
pub(crate) fn drop_cached(file: BorrowedFd<'_>, offset: u64, len_bytes: u64) {
    let (first, len_bytes) = whole_pages(offset, len_bytes, rustix::param::page_size() as u64);
    // It cannot fail for a file or a block device.
    let _ = fadvise(file, first, NonZeroU64::new(len_bytes), Advice::DontNeed);
}

/// Offset and length of the pages that hold some bytes: of one that is named in part, nothing is
/// dropped.
fn whole_pages(offset: u64, len_bytes: u64, page: u64) -> (u64, u64) {
    let first = offset / page * page;
    let last = offset.saturating_add(len_bytes).div_ceil(page).saturating_mul(page);
    (first, last - first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    /// A file of 2 MiB on a disk (what is on a tmpfs is in memory), of which nothing is cached.
    fn on_disk() -> File {
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        file.write_all_at(&vec![7; 2 << 20], 0).unwrap();
        file.sync_all().unwrap();
        drop_cached(file.as_fd(), 0, 2 << 20);
        file
    }

    /// A disk that is fast had answered one of some hundred questions before it was asked.
    #[test]
    fn to_ask_brings_nothing_into_the_cache() {
        let file = on_disk();
        for page in 0..512 {
            assert!(!is_in_core(file.as_fd(), page * 4096 + page), "page {page}");
            assert!(!is_cached(file.as_fd(), page * 4096 + page), "page {page}");
        }
    }

    #[test]
    fn what_was_read_is_cached() {
        let file = on_disk();
        file.read_exact_at(&mut [0; 2], (1 << 20) + 4095).unwrap();
        assert!([4095, 4096].iter().all(|at| is_cached(file.as_fd(), (1 << 20) + at)));
    }

    #[test]
    fn of_what_cannot_be_mapped_all_is_cached() {
        let (pipe, _other) = std::io::pipe().unwrap();
        assert!(is_cached(pipe.as_fd(), 0));
    }

    /// The kernel keeps a page of which not all is named.
    #[test]
    fn whole_pages_are_dropped() {
        let pages = [(0, 1), (4095, 1), (4095, 2), (4096, 4096), (5000, 9000)];
        let whole = pages.map(|(offset, len)| whole_pages(offset, len, 4096));
        assert_eq!(whole, [(0, 4096), (0, 4096), (0, 8192), (4096, 4096), (4096, 12288)]);
        let (first, len) = whole_pages(u64::MAX - 1, 1 << 40, 4096);
        assert!(first.checked_add(len).is_some());
    }
}
