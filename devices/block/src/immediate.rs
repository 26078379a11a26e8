//! Disks whose operations are done within a call, on the thread of their queue.
//!
//! Memory, tmpfs and null disks need no ring and no event: each operation is done by an
//! [`Executor`], and its result waits in a list until it is reaped.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

use base::io::{Disk, DiskDone, DiskOp};

/// Access of one queue to bytes that a call can reach.
pub(crate) trait Executor: Send {
    /// Whether operations are done when their batch is handed over, instead of at their submission.
    const BATCHES: bool;

    /// Does one operation: bytes moved (0 for flush, discard and zeroes), or the errno.
    ///
    /// # Safety
    /// As [`Disk::submit`].
    unsafe fn execute(&self, op: DiskOp) -> Result<u32, i32>;

    /// Size of the disk in bytes.
    fn len_bytes(&self) -> u64;
}

/// Disk of one queue that an [`Executor`] serves.
pub(crate) struct ImmediateDisk<E> {
    executor: E,
    /// Submitted operations that were not handed over; empty unless [`Executor::BATCHES`].
    waiting: VecDeque<(u32, DiskOp)>,
    /// Results that were not reaped. Both lists together never grow beyond `depth`.
    done: Vec<DiskDone>,
    depth: usize,
}

// SAFETY: the addresses in `waiting` are used under the contract of `Disk::submit`, on any thread.
unsafe impl<E: Executor> Send for ImmediateDisk<E> {}

impl<E: Executor> ImmediateDisk<E> {
    /// Room for `depth` operations.
    pub fn new(executor: E, depth: u16) -> Self {
        let depth = usize::from(depth);
        let waiting = VecDeque::with_capacity(if E::BATCHES { depth } else { 0 });
        Self { executor, waiting, done: Vec::with_capacity(depth), depth }
    }

    /// Does the next operation that waits, for an owner that takes each result as it comes.
    #[inline]
    pub fn run_next(&mut self) -> Option<DiskDone> {
        let (token, op) = self.waiting.pop_front()?;
        // SAFETY: the contract of its submission, which has not been reaped.
        let result = unsafe { self.executor.execute(op) };
        Some(DiskDone { token, result })
    }
}

impl<E: Executor> Disk for ImmediateDisk<E> {
    unsafe fn submit(&mut self, token: u32, op: DiskOp) -> io::Result<()> {
        if self.done.len() + self.waiting.len() >= self.depth {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        if E::BATCHES {
            self.waiting.push_back((token, op));
        } else {
            // SAFETY: the caller's promise.
            let result = unsafe { self.executor.execute(op) };
            self.done.push(DiskDone { token, result });
        }
        Ok(())
    }

    #[inline]
    fn flush_submissions(&mut self) -> io::Result<()> {
        if E::BATCHES {
            while let Some(done) = self.run_next() {
                self.done.push(done);
            }
        }
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<DiskDone>) {
        let n = self.done.len().min(done.capacity() - done.len());
        done.extend(self.done.drain(..n));
    }

    fn event_fd(&self) -> Option<RawFd> {
        None
    }

    fn runs_within_call(&self, count: usize) -> bool {
        !E::BATCHES || count == 1
    }

    unsafe fn run(&mut self, op: DiskOp) -> Result<u32, i32> {
        // SAFETY: the caller's promise.
        unsafe { self.executor.execute(op) }
    }

    fn len_bytes(&self) -> u64 {
        self.executor.len_bytes()
    }
}
