//! What runs on a sidecore.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::epoll;
use thiserror::Error;

use crate::credit::Ledger;

/// A worker's answer to "may we sleep?".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arm {
    /// Work is there: poll again.
    Busy,
    /// Kicks are on; nothing to do until a watched descriptor fires.
    Idle,
    /// As `Idle`, but wake at this time (of the sidecore's clock) at the latest.
    Until(u64),
}

/// One thing to poll: a switch, a disk queue, a vsock domain. Lives on one thread.
pub trait Worker: Send + 'static {
    /// Does at most one batch per queue. Returns how much was done (0: idle). Never blocks, never
    /// allocates, takes no lock; system calls only once per batch and only where a device below
    /// needs one.
    /// It asks `ledger` before it takes a VM's work, and charges what it took.
    fn poll(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize;

    /// The sidecore wants to sleep: turn kicks on, then look again. Work of a VM that `ledger` holds
    /// back until some time is no reason to stay awake.
    fn arm(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm;

    /// The sidecore is awake (always called after an [`Worker::arm`]): turn kicks off.
    fn disarm(&mut self);

    /// A watched descriptor fired (for counters; the next poll finds the work).
    fn fired(&mut self, fd: RawFd) {
        let _ = fd;
    }
}

/// Why a sidecore did not do what it was asked.
#[derive(Debug, Error)]
pub enum SidecoreError {
    /// Its thread has ended.
    #[error("sidecore {0} has stopped")]
    Gone(usize),
    /// The worker was removed.
    #[error("the worker is no longer on sidecore {0}")]
    NoWorker(usize),
    /// The operating system refused.
    #[error("sidecore: {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// The descriptors that wake a sidecore, as one worker sees them.
#[derive(Debug)]
pub struct Watcher<'a> {
    pub(crate) epoll: BorrowedFd<'a>,
    pub(crate) worker: u32,
}

impl Watcher<'_> {
    /// Wakes the sidecore when `fd` becomes readable (edge). Watching twice is no error.
    pub fn watch(&self, fd: RawFd) -> io::Result<()> {
        // SAFETY: the descriptor is open for the length of this call: the caller owns it.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let data = epoll::EventData::new_u64(u64::from(self.worker) << 32 | fd as u32 as u64);
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        match epoll::add(self.epoll, borrowed, data, flags) {
            Err(rustix::io::Errno::EXIST) => Ok(epoll::modify(self.epoll, borrowed, data, flags)?),
            other => Ok(other?),
        }
    }

    /// Stops watching; call before the descriptor is closed.
    pub fn unwatch(&self, fd: RawFd) {
        // SAFETY: as in `watch`.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        // Not watched is as good as no longer watched.
        let _ = epoll::delete(self.epoll, borrowed);
    }
}

/// The epoll set itself.
#[derive(Debug)]
pub(crate) struct Poller(OwnedFd);

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
