//! `epoll(7)`, edge-triggered: whoever is told that a descriptor is ready uses it until it is not.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;

use crate::raw::timespec;

/// Events of one call.
const EVENTS: usize = 256;

/// What became ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ready {
    /// As given to [`Poller::add`].
    pub token: u64,
    /// There may be something to read, the end included.
    pub can_read: bool,
    /// There may be room to write, or an error.
    pub can_write: bool,
}

/// Waits for many descriptors.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
}

impl Poller {
    /// Without descriptors.
    ///
    /// # Errors
    /// The kernel has no more.
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(CreateFlags::CLOEXEC)? })
    }

    /// One more; it goes when it is closed.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub fn add(&self, descriptor: impl AsFd, token: u64) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        Ok(epoll::add(&self.epoll, descriptor, EventData::new_u64(token), flags)?)
    }

    /// What became ready, at most after `timeout`.
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
