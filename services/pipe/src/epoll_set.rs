//! The epoll set in which a VM's pipes wait for their twins.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{Timespec, epoll};

/// The epoll set of a pool. Each descriptor in it has the token of the pipe's end that it wakes.
pub(crate) struct EpollSet(OwnedFd);

impl EpollSet {
    /// An empty set.
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(epoll::CreateFlags::CLOEXEC)?))
    }

    /// Adds a descriptor that wakes a thread as long as it has input.
    pub fn add_waker(&self, token: u64, fd: impl AsFd) -> io::Result<()> {
        let data = epoll::EventData::new_u64(token);
        Ok(epoll::add(&self.0, fd, data, epoll::EventFlags::IN)?)
    }

    /// Adds a pipe's descriptor. It wakes nobody until it is armed.
    pub fn add(&self, token: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        let flags = epoll::EventFlags::ONESHOT;
        Ok(epoll::add(&self.0, fd, epoll::EventData::new_u64(token), flags)?)
    }

    /// Wakes the pipe once, when the descriptor takes bytes, or fails.
    pub fn arm_for_output(&self, token: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.arm(token, fd, epoll::EventFlags::OUT)
    }

    /// Wakes the pipe once, when the descriptor has bytes, or fails.
    pub fn arm_for_input(&self, token: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.arm(token, fd, epoll::EventFlags::IN)
    }

    /// Wakes the pipe once, when the descriptor fails.
    pub fn arm_for_failure(&self, token: u64, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.arm(token, fd, epoll::EventFlags::empty())
    }

    fn arm(&self, token: u64, fd: BorrowedFd<'_>, flags: epoll::EventFlags) -> io::Result<()> {
        let flags = epoll::EventFlags::ONESHOT | flags;
        Ok(epoll::modify(&self.0, fd, epoll::EventData::new_u64(token), flags)?)
    }

    /// Waits for one event; its token, or none after the timeout.
    pub fn wait(&self, timeout: Option<&Timespec>) -> Option<u64> {
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }];
        match epoll::wait(&self.0, &mut events, timeout).unwrap_or(0) {
            0 => None,
            _ => Some(events[0].data.u64()),
        }
    }
}
