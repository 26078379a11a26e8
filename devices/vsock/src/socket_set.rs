//! Epoll set of a domain's Unix sockets.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;

use crate::limits::{IDLE_SOCKET_POLL_INTERVAL_NS, SOCKET_POLL_EVENTS, SOCKET_POLL_INTERVAL_NS};
use crate::slab::EpollTag;

/// Room for the events of one system call.
pub(crate) type EventRoom = [MaybeUninit<epoll::Event>; SOCKET_POLL_EVENTS];

/// Epoll set of Unix sockets, edge-triggered. Its own descriptor wakes the sidecore.
#[derive(Debug)]
pub(crate) struct SocketSet {
    epoll: OwnedFd,
    /// Time of the last poll; none: events may wait.
    polled_ns: Option<u64>,
}

impl SocketSet {
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, polled_ns: None })
    }

    /// Watches a listener.
    pub fn watch_listener(&self, fd: BorrowedFd<'_>, tag: EpollTag) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, data(tag), EventFlags::IN | EventFlags::ET)
    }

    /// Watches a Unix socket. `known`: it is in the set already.
    pub fn watch(&self, fd: BorrowedFd<'_>, tag: EpollTag, known: bool) -> Result<(), Errno> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        if known {
            // Tells again what is ready already.
            epoll::modify(&self.epoll, fd, data(tag), flags)
        } else {
            epoll::add(&self.epoll, fd, data(tag), flags)
        }
    }

    /// Whether it is time to poll. `has_sockets`: there are others than listeners.
    pub fn is_due(&self, now_ns: u64, has_sockets: bool) -> bool {
        let interval_ns =
            if has_sockets { SOCKET_POLL_INTERVAL_NS } else { IDLE_SOCKET_POLL_INTERVAL_NS };
        self.polled_ns.is_none_or(|at_ns| now_ns.saturating_sub(at_ns) >= interval_ns)
    }

    /// Makes the next poll due at once: the set's descriptor has fired.
    pub fn make_due(&mut self) {
        self.polled_ns = None;
    }

    /// Takes events: one system call.
    pub fn take_events<'a>(&mut self, now_ns: u64, room: &'a mut EventRoom) -> &'a [epoll::Event] {
        self.polled_ns = Some(now_ns);
        let no_wait = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut room[..], Some(&no_wait)) else {
            // Interrupted: the events are still there the next time.
            return &[];
        };
        if events.len() == SOCKET_POLL_EVENTS {
            self.polled_ns = None;
        }
        events
    }
}

impl AsRawFd for SocketSet {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

fn data(tag: EpollTag) -> epoll::EventData {
    epoll::EventData::new_u64(tag.to_u64())
}
