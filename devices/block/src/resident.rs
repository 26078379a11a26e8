//! Files whose bytes are always in memory (tmpfs, ramfs): plain vectored calls.
//!
//! These file systems cannot say "would block", so io_uring hands each of their operations to a
//! kernel thread: two context switches for a copy that takes half a microsecond. A call per
//! operation is the cheaper way; it is the one exception to one system call per batch, and it never
//! waits for a device (a host that swaps its tmpfs out has lost its latency anyway).
//!
//! The calls of a batch are made together when it is handed over, not each where it is submitted: a
//! return to a deep stack after a system call is a row of mispredicted branches (the kernel clears
//! what the CPU knew of it), and what plans the next request would find its caches full of the data
//! of the last.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::io::DiskOp;

use crate::image_file::ImageFile;
use crate::immediate::{Executor, ImmediateDisk};

/// Disk of one queue on a file in memory.
pub(crate) type ResidentDisk = ImmediateDisk<ResidentQueue>;

/// Access of one queue to the file.
pub(crate) struct ResidentQueue {
    image: Arc<ImageFile>,
    len_bytes: Arc<AtomicU64>,
}

impl ResidentDisk {
    /// A disk with room for `depth` operations on an open image.
    pub fn on_image(image: Arc<ImageFile>, len_bytes: Arc<AtomicU64>, depth: u16) -> Self {
        Self::new(ResidentQueue { image, len_bytes }, depth)
    }
}

impl Executor for ResidentQueue {
    const BATCHES: bool = true;

    #[inline(always)]
    unsafe fn execute(&self, op: DiskOp) -> Result<u32, i32> {
        let fd = self.image.get().as_raw_fd();
        let moved = match op {
            // One buffer needs no list, which the kernel would copy first.
            DiskOp::Read { offset, bufs, count: 1, .. } => {
                // SAFETY: the caller vouches for the list and its buffer; the descriptor is open.
                unsafe { libc::pread(fd, (*bufs).iov_base, (*bufs).iov_len, signed(offset)?) }
            }
            DiskOp::Write { offset, bufs, count: 1, .. } => {
                // SAFETY: as for reads.
                unsafe { libc::pwrite(fd, (*bufs).iov_base, (*bufs).iov_len, signed(offset)?) }
            }
            DiskOp::Read { offset, bufs, count, .. } => {
                // SAFETY: the caller vouches for the list and its buffers; the descriptor is open.
                unsafe { libc::preadv(fd, bufs, count as i32, signed(offset)?) }
            }
            DiskOp::Write { offset, bufs, count, .. } => {
                // SAFETY: as for reads.
                unsafe { libc::pwritev(fd, bufs, count as i32, signed(offset)?) }
            }
            // Nothing of such a file survives a power cut, flushed or not.
            DiskOp::Flush => 0,
            DiskOp::Discard { offset, len_bytes }
            | DiskOp::WriteZeroes { offset, len_bytes, may_unmap: true } => {
                return allocate(fd, libc::FALLOC_FL_PUNCH_HOLE, offset, len_bytes);
            }
            DiskOp::WriteZeroes { offset, len_bytes, may_unmap: false } => {
                return allocate(fd, libc::FALLOC_FL_ZERO_RANGE, offset, len_bytes);
            }
        };
        u32::try_from(moved).map_err(|_| last_errno())
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Relaxed)
    }
}

fn last_errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn signed(offset: u64) -> Result<i64, i32> {
    i64::try_from(offset).map_err(|_| libc::EINVAL)
}

fn allocate(fd: RawFd, mode: i32, offset: u64, len: u64) -> Result<u32, i32> {
    let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: no memory is involved; a wrong descriptor would be an error.
    match unsafe { libc::fallocate(fd, mode, signed(offset)?, signed(len)?) } {
        0 => Ok(0),
        _ => Err(last_errno()),
    }
}
