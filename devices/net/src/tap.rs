//! The uplink through a TAP interface: a wire whose other end is the host's network stack.
//!
//! Frames go out with one `io_uring_enter` per batch. For frames in, exactly one read waits in the
//! kernel (the *waiter*); when it has a frame, the next submission is a burst of reads that do not
//! wait, then the waiter again. So an idle interface costs nothing, a busy one a system call per
//! burst, and frames stay in order: reads are only submitted while none waits. (Many waiting reads
//! would each be woken by every frame.) The burst grows while it comes back full.

mod setup;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use base::io::{IoSlice, Wire};
use io_uring::{IoUring, opcode, types};

use crate::error::NetError;
use frame::{MAX_FRAME, VNET_LEN};
pub use setup::{TapConfig, mtu_of, raise_mtu};

/// Receive buffers: what a switch takes from its uplink in a round.
const BUFFERS: usize = 64;

/// Bytes of each: the largest frame with its header, to the next page.
const BUFFER_LEN: usize = (VNET_LEN + MAX_FRAME).next_multiple_of(4096);

/// Frames queued for one flush: a transmit batch.
const SEND_SLOTS: usize = 64;

/// Buffers of all queued frames together: 64 frames of 19 pieces and the header, and room for one
/// of any legal chain.
const SEND_PIECES: usize = 2048;

/// Marks the waiter's completion; other reads carry their buffer's number alone.
const WAITER: u64 = 1 << 32;

/// Marks the completion of a cancellation.
const CANCEL: u64 = 1 << 33;

/// A TAP interface with `IFF_VNET_HDR`. It goes when this value goes.
pub struct Tap {
    file: OwnedFd,
    name: String,
    uso: bool,
    receiver: Receiver,
    sender: Sender,
}

impl std::fmt::Debug for Tap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tap").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Tap {
    /// Opens (and makes, if need be) the interface, sets its header length and offloads, attaches
    /// it to its bridge and brings it up. Needs CAP_NET_ADMIN.
    pub fn open(config: &TapConfig) -> Result<Self, NetError> {
        let opened = setup::open(config)?;
        let ring = |entries: u32| {
            IoUring::new(entries).map_err(|source| NetError::Tap {
                name: opened.name.clone(),
                what: "making its io_uring",
                source,
            })
        };
        let receiver = Receiver::new(ring(2 * BUFFERS as u32)?);
        let sender = Sender::new(ring(SEND_SLOTS as u32)?);
        Ok(Self { file: opened.file, name: opened.name, uso: opened.uso, receiver, sender })
    }

    /// The interface's name, as the kernel gave it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the kernel takes UDP super-packets (Linux 6.2); for
    /// [`crate::Switch::set_uplink_with`].
    pub fn takes_uso(&self) -> bool {
        self.uso
    }
}

impl Wire for Tap {
    unsafe fn send(&mut self, bufs: &[IoSlice]) -> io::Result<()> {
        // SAFETY: the caller keeps the buffers valid until the flush.
        unsafe { self.sender.queue(self.file.as_raw_fd(), bufs) }
    }

    fn flush(&mut self) -> io::Result<u32> {
        self.sender.flush()
    }

    /// The same frame again until it is released.
    fn receive(&mut self) -> Option<&[u8]> {
        self.receiver.front()
    }

    fn release(&mut self) {
        self.receiver.release();
    }

    fn refill(&mut self) -> io::Result<()> {
        self.receiver.refill(self.file.as_raw_fd())
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.receiver.ring.as_raw_fd())
    }
}

struct Receiver {
    ring: IoUring,
    /// `BUFFERS` times `BUFFER_LEN` bytes, allocated as one boxed slice. The kernel writes into
    /// buffers that are neither free nor ready.
    memory: NonNull<[u8]>,
    free: Vec<u16>,
    ready: VecDeque<(u16, u32)>,
    in_kernel: usize,
    /// The waiter is posted.
    waiting: bool,
    burst: usize,
    /// Reads are posted that the kernel has not taken yet: a burst of so many, and the waiter.
    unsubmitted: Option<usize>,
    /// The kernel knows `RWF_NOWAIT` for this file.
    nowait: bool,
    failed: Option<i32>,
    failure_told: bool,
}

// SAFETY: `memory` is owned by this value alone; the kernel's accesses do not care about threads.
unsafe impl Send for Receiver {}

impl Receiver {
    fn new(ring: IoUring) -> Self {
        let memory = vec![0u8; BUFFERS * BUFFER_LEN].into_boxed_slice();
        Self {
            ring,
            memory: NonNull::from(Box::leak(memory)),
            free: (0..BUFFERS as u16).collect(),
            ready: VecDeque::with_capacity(BUFFERS),
            in_kernel: 0,
            waiting: false,
            burst: 1,
            unsubmitted: None,
            nowait: true,
            failed: None,
            failure_told: false,
        }
    }

    fn buffer(&self, index: u16) -> *mut u8 {
        // In range: indexes come from `free` alone.
        self.memory.as_ptr().cast::<u8>().wrapping_add(usize::from(index) * BUFFER_LEN)
    }

    fn front(&mut self) -> Option<&[u8]> {
        if self.ready.is_empty() {
            self.reap();
        }
        let &(index, len) = self.ready.front()?;
        // SAFETY: a ready buffer is not the kernel's; `len` is what the kernel wrote, at most
        // BUFFER_LEN; the slice lives no longer than the borrow of `self`.
        Some(unsafe { std::slice::from_raw_parts(self.buffer(index), len as usize) })
    }

    fn release(&mut self) {
        if let Some((index, _)) = self.ready.pop_front() {
            self.free.push(index);
        }
    }

    /// Takes completions; no system call. Returns frames got and reads that found nothing.
    fn reap(&mut self) -> (usize, usize) {
        let (mut got, mut empty) = (0, 0);
        for cqe in self.ring.completion() {
            if cqe.user_data() == CANCEL {
                continue;
            }
            let (index, result) = (cqe.user_data() as u16, cqe.result());
            self.in_kernel -= 1;
            if cqe.user_data() & WAITER != 0 {
                self.waiting = false;
            }
            if result > 0 {
                self.ready.push_back((index, (result as u32).min(BUFFER_LEN as u32)));
                got += 1;
                continue;
            }
            self.free.push(index);
            match -result {
                libc::EAGAIN => empty += 1,
                libc::EINTR | libc::ECANCELED => {}
                libc::EOPNOTSUPP if self.nowait => self.nowait = false,
                errno => self.failed = Some(errno),
            }
        }
        (got, empty)
    }

    fn refill(&mut self, file: RawFd) -> io::Result<()> {
        self.reap();
        if let Some(errno) = self.failed {
            // The interface is gone. Told once; the frames that were read are still delivered.
            let told = std::mem::replace(&mut self.failure_told, true);
            return if told { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) };
        }
        if !self.waiting && !self.free.is_empty() {
            let burst = if self.nowait { self.burst.min(self.free.len() - 1) } else { 0 };
            for _ in 0..burst {
                self.post(file, 0, libc::RWF_NOWAIT)?;
            }
            self.post(file, WAITER, 0)?;
            self.waiting = true;
            self.unsubmitted = Some(burst);
        }
        self.submit()
    }

    /// Submits what is posted. What fails (no memory) stays posted, and the next call tries again:
    /// until then nothing is read.
    fn submit(&mut self) -> io::Result<()> {
        let Some(burst) = self.unsubmitted else { return Ok(()) };
        self.ring.submit()?;
        if !self.ring.submission().is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.unsubmitted = None;
        let (got, empty) = self.reap();
        if empty > 0 {
            self.burst /= 2;
        } else if got > burst {
            self.burst = (self.burst * 2).clamp(1, BUFFERS - 1);
        }
        Ok(())
    }

    fn post(&mut self, file: RawFd, mark: u64, flags: i32) -> io::Result<()> {
        let Some(index) = self.free.pop() else { return Ok(()) };
        let entry = opcode::Read::new(types::Fd(file), self.buffer(index), BUFFER_LEN as u32)
            .rw_flags(flags)
            .build()
            .user_data(mark | u64::from(index));
        // SAFETY: the buffer stays ours until its completion is taken: it is in neither list, and
        // `drop` waits for all of them.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.free.push(index);
            return Err(io::Error::other("submission queue full"));
        }
        self.in_kernel += 1;
        Ok(())
    }

    /// Takes back the buffers that the kernel has. False when it does not give them.
    fn cancel(&mut self) -> bool {
        // A read that is cancelled completes; a few rounds cover one that races with a frame.
        for _ in 0..8 {
            self.reap();
            if self.in_kernel == 0 {
                return true;
            }
            let all = types::CancelBuilder::any();
            let entry = opcode::AsyncCancel2::new(all).build().user_data(CANCEL);
            // SAFETY: a cancellation refers to no memory.
            if unsafe { self.ring.submission().push(&entry) }.is_err() {
                return false;
            }
            if self.ring.submit_and_wait(2).is_err() {
                return false;
            }
        }
        self.in_kernel == 0
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        if self.cancel() {
            // SAFETY: leaked by `new` from a box of this very slice; the kernel has none of it
            // any more.
            drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
        } else {
            tracing::warn!("TAP reads could not be cancelled; their buffers are leaked");
        }
    }
}

struct Sender {
    ring: IoUring,
    /// The pieces of queued frames; never grows, so that addresses stay.
    pieces: Vec<IoSlice>,
    queued: usize,
}

// SAFETY: `pieces` holds addresses only between `queue` and `flush`, whose caller vouches for
// them.
unsafe impl Send for Sender {}

impl Sender {
    fn new(ring: IoUring) -> Self {
        Self { ring, pieces: Vec::with_capacity(SEND_PIECES), queued: 0 }
    }

    /// # Safety
    /// The buffers stay valid until [`Sender::flush`].
    unsafe fn queue(&mut self, file: RawFd, bufs: &[IoSlice]) -> io::Result<()> {
        let first = self.pieces.len();
        if self.queued == SEND_SLOTS || first + bufs.len() > self.pieces.capacity() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.pieces.extend_from_slice(bufs);
        let iovecs = self.pieces[first..].as_ptr();
        let entry = opcode::Writev::new(types::Fd(file), iovecs, bufs.len() as u32).build();
        // SAFETY: the buffers by the caller's promise; their list stays in `pieces`, which does
        // not grow and is cleared only after all completions.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.pieces.truncate(first);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.queued += 1;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<u32> {
        let mut refused = 0;
        while self.queued > 0 {
            match self.ring.submit_and_wait(self.queued) {
                Ok(_) => {}
                // A signal, or no memory right now: the rest is still queued.
                Err(e) if is_passing(&e) => {}
                Err(e) => {
                    // Only a bug of ours gets here. The kernel may have buffers that are a
                    // guest's or about to be freed: neither going on nor unwinding is safe.
                    tracing::error!("io_uring_enter for the TAP: {e}");
                    std::process::abort();
                }
            }
            for cqe in self.ring.completion() {
                self.queued -= 1;
                refused += u32::from(cqe.result() < 0);
            }
        }
        self.pieces.clear();
        Ok(refused)
    }
}

fn is_passing(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

#[cfg(test)]
mod tests;
