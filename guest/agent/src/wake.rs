//! Event that wakes a thread from `poll(2)`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

/// Event of one thread; other threads ring it.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// New event, not rung.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes the waiting thread's next `poll` return.
    pub fn ring(&self) {
        // Fails only when it has rung 2^64 times: then it is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears earlier rings; the caller then checks the state that they announced.
    pub fn clear(&self) {
        // Fails when there was no ring.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
