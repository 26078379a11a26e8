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

use std::collections::VecDeque;
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
    /// Submitted and not handed over.
    waiting: VecDeque<(u32, DiskOp)>,
    done: DoneList,
}

// SAFETY: the addresses in `waiting` are used under the contract of `Disk::submit`, on any thread.
unsafe impl Send for ResidentDisk {}

impl ResidentDisk {
    pub fn new(image: Arc<Image>, len_bytes: Arc<AtomicU64>, depth: u16) -> Self {
        let waiting = VecDeque::with_capacity(usize::from(depth));
        Self { image, len_bytes, waiting, done: DoneList::new(depth) }
    }

    /// Does the next operation that was submitted, for who takes the results as they come.
    #[inline]
    pub fn run_next(&mut self) -> Option<DiskDone> {
        let (token, op) = self.waiting.pop_front()?;
        // SAFETY: the contract of its submission, which has not been reaped.
        let result = unsafe { self.run(op) };
        Some(DiskDone { token, result })
    }

    /// Does one operation: bytes moved, or errno.
    ///
    /// # Safety
    /// As [`Disk::submit`].
    #[inline(always)]
    unsafe fn run(&self, op: DiskOp) -> Result<u32, i32> {
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
        self.done.check_room_for(self.waiting.len() + 1)?;
        self.waiting.push_back((token, op));
        Ok(())
    }

    #[inline]
    fn flush_submissions(&mut self) -> io::Result<()> {
        while let Some(done) = self.run_next() {
            self.done.push(done);
        }
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
