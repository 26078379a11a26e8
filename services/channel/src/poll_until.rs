//! Waiting for descriptors with a deadline.

use std::io;
use std::time::Instant;

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

/// Waits until something happens to one of `fds`, or until the deadline (none: for ever). False
/// when nothing happened. An interrupted wait counts as nothing.
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], until: Option<Instant>) -> io::Result<bool> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    // A time that no Timespec can hold is as good as for ever.
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    match poll(fds, left.as_ref()) {
        Ok(count) => Ok(count > 0),
        Err(Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
