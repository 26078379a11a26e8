//! Files whose bytes are always in memory (tmpfs, ramfs): plain vectored calls.
//!
//! These file systems cannot say "would block", so io_uring hands each of their operations to a
//! kernel thread: two context switches for a copy that takes half a microsecond. A call per
//! operation is the cheaper way; it is the one exception to one system call per batch, and it never
//! waits for a device (a host that swaps its tmpfs out has lost its latency anyway).

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::io::{Disk, DiskDone, DiskOp};

use crate::done::DoneList;
use crate::file::Image;

/// One queue's view.
pub(crate) struct ResidentDisk {
    image: Arc<Image>,
    len_bytes: Arc<AtomicU64>,
    done: DoneList,
}

impl ResidentDisk {
    pub fn new(image: Arc<Image>, len_bytes: Arc<AtomicU64>, depth: u16) -> Self {
        Self { image, len_bytes, done: DoneList::new(depth) }
    }

    /// Does one operation: bytes moved, or errno.
    ///
    /// # Safety
    /// As [`Disk::submit`].
    unsafe fn run(&self, op: DiskOp) -> Result<u32, i32> {
        let fd = self.image.get().as_raw_fd();
        let moved = match op {
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

impl Disk for ResidentDisk {
    unsafe fn submit(&mut self, token: u32, op: DiskOp) -> io::Result<()> {
        self.done.check_room()?;
        // SAFETY: the same contract.
        let result = unsafe { self.run(op) };
        self.done.push(DiskDone { token, result });
        Ok(())
    }

    fn flush_submissions(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<DiskDone>) {
        self.done.reap(done);
    }

    fn event_fd(&self) -> Option<RawFd> {
        None
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Relaxed)
    }
}
