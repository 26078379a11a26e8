//! Eventfds: the doorbells between guests, VMMs and sidecores.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

/// A non-blocking eventfd (or any descriptor handed in its place by a VMM).
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// A new event at zero.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Wraps a descriptor received from elsewhere and makes it non-blocking: a guest must never be
    /// able to block a sidecore by handing in a full pipe.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// Rings. An event that is already saturated counts as rung.
    pub fn signal(&self) -> io::Result<()> {
        match rustix::io::write(&self.0, &1u64.to_ne_bytes()) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }

    /// Takes what was rung since the last time; false when nothing was.
    pub fn drain(&self) -> bool {
        let mut value = [0u8; 8];
        matches!(rustix::io::read(&self.0, &mut value), Ok(8))
    }

    /// A second descriptor for the same event.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.try_clone()?))
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
}
