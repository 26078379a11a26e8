//! Wakes a thread that waits in `poll(2)`.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

/// An event of one thread; others ring it.
#[derive(Debug)]
pub struct Wake(OwnedFd);

impl Wake {
    /// A new one.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// The waiting thread's next `poll` returns.
    pub fn ring(&self) {
        // Fails only when it has rung 2^64 times: then it is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Forgets earlier rings; whoever calls looks at what was told after it.
    pub fn clear(&self) {
        // Fails when nobody has rung.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
