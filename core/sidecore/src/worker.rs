//! The trait of workers, which run on sidecores, and the descriptors that wake them.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::epoll;
use thiserror::Error;

use crate::credit::Ledger;

/// Number of a worker in the process; not reused, so that a late event cannot reach another worker.
pub(crate) type WorkerId = u32;

/// A worker's answer to "may we sleep?".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arm {
    /// Work is there: poll again.
    Busy,
    /// Kicks are on; nothing to do until a watched descriptor fires.
    Idle,
    /// Kicks are on, as in `Idle`, but wake at this time (of the sidecore's clock) at the latest.
    Until(u64),
}

/// One thing to poll: a switch, a disk queue, a vsock domain. One thread at a time has it; between
/// two rounds it may move to another sidecore, with its watched descriptors and with kicks off.
pub trait Worker: Send + 'static {
    /// Whether it stays on its sidecore for ever. Asked once, when it is added.
    fn is_pinned(&self) -> bool {
        false
    }

    /// Does at most one batch per queue. Returns the amount of work done (0: idle). Never blocks,
    /// never allocates, takes no lock; system calls only once per batch and only where a device
    /// below needs one. Asks `ledger` before it takes a VM's work, and charges the work that it
    /// took.
    fn poll(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize;

    /// Turns kicks on, then looks for work again, before the sidecore sleeps. Work of a VM that
    /// `ledger` holds back until some time is no reason to stay awake.
    fn arm(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm;

    /// Turns kicks off, after the sidecore has woken (always called after an [`Worker::arm`]).
    fn disarm(&mut self);

    /// Notes that a watched descriptor fired (for counters; the next poll finds the work).
    fn fired(&mut self, fd: RawFd) {
        let _ = fd;
    }
}

/// Error of a call to a sidecore.
#[derive(Debug, Error)]
pub enum SidecoreError {
    /// The thread of the sidecore has ended.
    ///
    /// Remedy: restart the daemon, and report the panic that the log has.
    #[error("sidecore {0} has stopped")]
    Gone(usize),
    /// The worker was removed.
    ///
    /// Remedy: `millrace start VM PORT`; the log says why it went.
    #[error("the worker is no longer on sidecore {0}")]
    NoWorker(usize),
    /// The worker says that it must stay, see [`Worker::is_pinned`].
    ///
    /// Remedy: none is needed.
    #[error("the worker is pinned to sidecore {0}")]
    Pinned(usize),
    /// The operating system refused a step.
    ///
    /// Remedy: raise the limit that the cause names: open files (LimitNOFILE=), threads
    /// (TasksMax=).
    #[error("sidecore: {what}: {source}")]
    Io {
        /// The step.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// The descriptors that wake a sidecore, as one worker sees them.
#[derive(Debug)]
pub struct Watcher<'a> {
    pub(crate) poller: &'a Poller,
    pub(crate) id: WorkerId,
    /// Descriptors that are watched for this worker; they move with it.
    pub(crate) watched: &'a RefCell<Vec<RawFd>>,
}

impl Watcher<'_> {
    /// Wakes the sidecore when `fd` becomes readable (edge). Watching twice is no error.
    pub fn watch(&self, fd: RawFd) -> io::Result<()> {
        self.poller.watch(fd, self.id)?;
        let mut watched = self.watched.borrow_mut();
        if !watched.contains(&fd) {
            watched.push(fd);
        }
        Ok(())
    }

    /// Stops watching; call before the descriptor is closed.
    pub fn unwatch(&self, fd: RawFd) {
        self.watched.borrow_mut().retain(|&other| other != fd);
        self.poller.unwatch(fd);
    }
}

/// The epoll set itself. Any thread may change it.
#[derive(Debug)]
pub(crate) struct Poller(OwnedFd);

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Watches a worker's descriptor, by edges. One that is readable fires at once.
    pub(crate) fn watch(&self, fd: RawFd, id: WorkerId) -> io::Result<()> {
        // SAFETY: the descriptor is open for the length of this call: the caller or its worker
        // owns it.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let data = epoll::EventData::new_u64(u64::from(id) << 32 | u64::from(fd as u32));
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        match epoll::add(&self.0, borrowed, data, flags) {
            Err(rustix::io::Errno::EXIST) => Ok(epoll::modify(&self.0, borrowed, data, flags)?),
            other => Ok(other?),
        }
    }

    pub(crate) fn unwatch(&self, fd: RawFd) {
        // SAFETY: as in `watch`.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        // Not watched is as good as no longer watched.
        let _ = epoll::delete(&self.0, borrowed);
    }
}
