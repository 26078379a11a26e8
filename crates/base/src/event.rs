//! Eventfds: the doorbells between guests, VMMs and sidecores.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{EventfdFlags, eventfd};

/// What `/proc/self/fd/N` of an eventfd says; the kernel lets no file of another kind say it.
const EVENTFD_LINK: &str = "anon_inode:[eventfd]";

/// A non-blocking eventfd.
#[derive(Debug)]
pub struct Event(OwnedFd);

impl Event {
    /// A new event at zero.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Wraps an eventfd received from elsewhere and makes it non-blocking. Anything else is refused:
    /// a pipe, a socket or a file of somebody's own file system could block whoever writes to it or
    /// watches it.
    ///
    /// The giver shares the flags and can make the eventfd blocking again; then
    /// [`Event::signal`] may sleep, until a signal handler interrupts it.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Self> {
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let link = std::fs::read_link(&link)
            .map_err(|e| io::Error::new(e.kind(), format!("reading the link {link}: {e}")))?;
        if link.as_os_str() != EVENTFD_LINK {
            let found = format!("{} is not an eventfd", link.display());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, found));
        }
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        rustix::fs::fcntl_setfl(&fd, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self(fd))
    }

    /// Rings. An event that is already saturated counts as rung. Interrupted is an error: only an
    /// event that its giver made blocking again sleeps long enough for that.
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
    use rustix::fs::MemfdFlags;

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
    #[allow(non_snake_case)]
    fn abuse_P1_only_eventfds_are_taken() {
        let twin = Event::new().unwrap().try_clone().unwrap();
        Event::from_fd(twin.0).unwrap().signal().unwrap();
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let memfd = rustix::fs::memfd_create("[eventfd]", MemfdFlags::CLOEXEC).unwrap();
        for (fd, name) in [(reader, "pipe:["), (writer, "pipe:["), (memfd, "/memfd:")] {
            let text = Event::from_fd(fd).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains("not an eventfd"), "{text}");
        }
    }

    #[test]
    fn a_saturated_event_is_rung_already() {
        let event = Event::new().unwrap();
        rustix::io::write(&event.0, &(u64::MAX - 1).to_ne_bytes()).unwrap();
        event.signal().unwrap();
        assert!(event.drain());
    }
}
