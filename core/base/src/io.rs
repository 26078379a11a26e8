//! The seams for disks and wires: the traits that device engines work on.

use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use crate::counter::Counter;

/// One buffer of a vectored operation; the layout of `struct iovec`.
pub type IoSlice = libc::iovec;

/// Operation of a disk. Offsets and lengths are bytes.
#[derive(Debug, Clone, Copy)]
pub enum DiskOp {
    /// Fill the buffers from `offset`.
    Read {
        /// First byte on the disk.
        offset: u64,
        /// First of the buffers.
        bufs: *const IoSlice,
        /// Number of buffers.
        count: u32,
        /// Bytes in all buffers.
        len_bytes: u32,
    },
    /// Store the buffers at `offset`.
    Write {
        /// First byte on the disk.
        offset: u64,
        /// First of the buffers.
        bufs: *const IoSlice,
        /// Number of buffers.
        count: u32,
        /// Bytes in all buffers.
        len_bytes: u32,
    },
    /// Make every completed write durable.
    Flush,
    /// The range's content is no longer needed.
    Discard {
        /// First byte.
        offset: u64,
        /// Length.
        len_bytes: u64,
    },
    /// The range reads as zeroes afterwards.
    WriteZeroes {
        /// First byte.
        offset: u64,
        /// Length.
        len_bytes: u64,
        /// The blocks may be given back to the file system.
        may_unmap: bool,
    },
}

/// A finished operation: the caller's token, and bytes moved (0 for flush, discard and zeroes) or
/// the positive errno.
#[derive(Debug, Clone, Copy)]
pub struct DiskDone {
    /// The token given at [`Disk::submit`].
    pub token: u32,
    /// Bytes, or errno.
    pub result: Result<u32, i32>,
}

/// The disk seam: asynchronous, batched, owned by one thread.
pub trait Disk: Send {
    /// Takes one operation. `Err(WouldBlock)` when no more fit before the next
    /// [`Disk::reap`]. Nothing need start before [`Disk::flush_submissions`].
    ///
    /// # Safety
    /// The buffer array and the buffers stay valid, at the same addresses, until the operation's
    /// [`DiskDone`] has been reaped.
    unsafe fn submit(&mut self, token: u32, op: DiskOp) -> io::Result<()>;

    /// Starts everything submitted: at most one system call.
    fn flush_submissions(&mut self) -> io::Result<()>;

    /// Moves finished operations into `done` (up to its spare capacity; never grows it). No
    /// system call.
    fn reap(&mut self, done: &mut Vec<DiskDone>);

    /// A descriptor that becomes readable (edge) when something finishes; none for disks whose
    /// operations are over when [`Disk::flush_submissions`] returns.
    fn event_fd(&self) -> Option<RawFd>;

    /// Whether nearly all operations are over when [`Disk::flush_submissions`] returns: there is no
    /// system call to share then.
    fn is_immediate(&self) -> bool {
        self.event_fd().is_none()
    }

    /// Whether [`Disk::run`] is the shorter way for `count` requests that came together. What it
    /// refuses is to be submitted.
    fn runs_within_call(&self, count: usize) -> bool {
        let _ = count;
        false
    }

    /// Does one operation before it returns, past those that were submitted: bytes moved, or the
    /// errno. Only where [`Disk::runs_within_call`] says so.
    ///
    /// # Safety
    /// The buffer array and the buffers are valid until it returns.
    unsafe fn run(&mut self, op: DiskOp) -> Result<u32, i32> {
        let _ = op;
        Err(libc::EOPNOTSUPP)
    }

    /// Sets whether finished operations ring [`Disk::event_fd`]: off while the owner polls (a ring
    /// that nobody waits for costs time), on before it sleeps. An operation that finished before
    /// this call may not ring: the owner reaps once more after switching on. On at first.
    fn set_wakeups(&mut self, on: bool) {
        let _ = on;
    }

    /// Keeps this opening of a file until the last operation is over, also when the process is
    /// killed before that: a lock on it tells when guest memory is left alone. Nothing to do for
    /// disks whose operations end with the process.
    fn keep_open(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        let _ = file;
        Ok(())
    }

    /// Sets, once and before the first operation, the ranges where most buffers will be, for disks
    /// that can prepare for it. `used` counts the operations that gained by it. After an error the
    /// disk works as without ranges. An empty list, at any time, makes it forget the ranges. Most
    /// disks do nothing.
    ///
    /// # Safety
    /// The ranges are mapped now. While operations are submitted, these addresses hold the mappings
    /// that they hold now, or none: the disk may remember the pages.
    unsafe fn set_memory(&mut self, memory: &[IoSlice], used: Arc<Counter>) -> io::Result<()> {
        let _ = (memory, used);
        Ok(())
    }

    /// Size in bytes.
    fn len_bytes(&self) -> u64;
}

/// The wire seam: frames in and out of the host. A frame here is a virtio-net header
/// (12 bytes) followed by the Ethernet frame.
pub trait Wire: Send {
    /// Queues one frame made of `bufs`; it is sent at the next [`Wire::flush`] at the latest.
    /// `Err(WouldBlock)` when full.
    ///
    /// # Safety
    /// The buffers stay valid until the next [`Wire::flush`] returns.
    unsafe fn send(&mut self, bufs: &[IoSlice]) -> io::Result<()>;

    /// Sends what is queued (at most one system call); afterwards no buffer is in use. Returns
    /// how many frames the wire refused.
    fn flush(&mut self) -> io::Result<u32>;

    /// The next received frame, if any; valid until [`Wire::release`]. No system call.
    fn receive(&mut self) -> Option<&[u8]>;

    /// Gives back the frame last received, so that its buffer can take another.
    fn release(&mut self);

    /// Hands empty buffers to the kernel: at most one system call, none when there are no empty
    /// buffers.
    fn refill(&mut self) -> io::Result<()>;

    /// A descriptor that becomes readable (edge) when a frame arrives.
    fn event_fd(&self) -> Option<RawFd>;
}
