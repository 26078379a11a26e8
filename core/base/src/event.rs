//! Events between threads of this process. An eventfd that is shared with a peer is a
//! [`Doorbell`](crate::doorbell::Doorbell).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

/// Target of the link `/proc/self/fd/N` of an eventfd; no file of another kind has it.
const EVENTFD_LINK: &str = "anon_inode:[eventfd]";

/// A non-blocking eventfd that only this process has.
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// A new event at zero.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Signals. An event that is already saturated counts as signalled.
    pub fn signal(&self) -> io::Result<()> {
        match rustix::io::write(&self.0, &1u64.to_ne_bytes()) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes the signals since the last call; false when there were none.
    pub fn drain(&self) -> bool {
        let mut value = [0u8; 8];
        matches!(rustix::io::read(&self.0, &mut value), Ok(8))
    }

    /// A second descriptor for the same event.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
    }
}

impl From<Event> for OwnedFd {
    fn from(event: Event) -> Self {
        event.0
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl AsRawFd for Event {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Fails unless the descriptor is an eventfd; looked up in the kernel alone.
pub(crate) fn check_eventfd(fd: BorrowedFd<'_>) -> io::Result<()> {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let link = std::fs::read_link(&link)
        .map_err(|e| io::Error::new(e.kind(), format!("reading the link {link}: {e}")))?;
    if link.as_os_str() == EVENTFD_LINK {
        return Ok(());
    }
    let found = format!("{} is not an eventfd", link.display());
    Err(io::Error::new(io::ErrorKind::InvalidInput, found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_and_drains() {
        let event = Event::new().unwrap();
        assert!(!event.drain());
        event.signal().unwrap();
        event.signal().unwrap();
        assert!(event.drain());
        assert!(!event.drain());
    }

    #[test]
    fn clone_shares_the_event() {
        let event = Event::new().unwrap();
        event.try_clone().unwrap().signal().unwrap();
        assert!(event.drain());
    }

    #[test]
    fn a_saturated_event_is_rung_already() {
        let event = Event::new().unwrap();
        rustix::io::write(&event.0, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event.signal().unwrap();
        assert!(event.drain());
    }
}
