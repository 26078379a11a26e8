//! Poller over edge-triggered `epoll(7)`: a descriptor that is ready must be used until it is not.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use crate::raw::timespec;

/// Most events of one call.
const EVENTS: usize = 256;

/// Readiness of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// Token that was given to [`Poller::add`].
    pub token: u64,
    /// Whether bytes, or the end, may be there to read.
    pub can_read: bool,
    /// Whether there may be room to write, or an error.
    pub can_write: bool,
}

/// Poller of many descriptors.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    /// Poller without descriptors.
    ///
    /// # Errors
    /// The kernel has no more.
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)? })
    }

    /// Adds a descriptor, until it is closed.
    ///
    /// # Errors
    /// It cannot be polled.
    pub fn add(&self, descriptor: impl AsFd, token: u64) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        Ok(epoll::add(&self.epoll, descriptor, EventData::new_u64(token), flags)?)
    }

    /// Waits for ready descriptors, at most for `timeout`.
    ///
    /// # Errors
    /// Waiting is not possible.
    pub fn wait(&self, timeout: Option<Duration>, found: &mut Vec<Ready>) -> io::Result<()> {
        let timeout = timeout.map(timespec);
        let mut events = [MaybeUninit::uninit(); EVENTS];
        found.clear();
        match epoll::wait(&self.epoll, &mut events, timeout.as_ref()) {
            Ok((events, _)) => found.extend(events.iter().map(ready)),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}

fn ready(event: &Event) -> Ready {
    let flags = event.flags;
    let ended = EventFlags::ERR | EventFlags::HUP;
    Ready {
        token: event.data.u64(),
        can_read: flags.intersects(EventFlags::IN | EventFlags::RDHUP | ended),
        can_write: flags.intersects(EventFlags::OUT | ended),
    }
}
