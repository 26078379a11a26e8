//! A guest's request over placeholders: whose it is, and its bytes, which are put into their place
//! on the disk, or copied from there.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use block::{PlaceholderOp, PlaceholderRequest};

use crate::copy::read_all;
use crate::page_cache::drop_cached;

/// Name of a pipe, or of a self-test, in its placeholders.
pub(crate) type Tag = [u8; 16];

/// Direction of requests over placeholders, as the guest sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// The guest reads over placeholders.
    Read,
    /// The guest writes placeholders.
    Write,
}

impl From<PlaceholderOp> for Direction {
    fn from(way: PlaceholderOp) -> Self {
        match way {
            PlaceholderOp::Read => Self::Read,
            PlaceholderOp::Write { .. } => Self::Write,
        }
    }
}

/// Has `put` put a write's bytes into their place (a file and an offset), and makes them durable if
/// the guest wants it.
pub(crate) fn fill(
    write: &PlaceholderRequest,
    put: impl FnOnce(BorrowedFd<'_>, u64) -> io::Result<()>,
) -> io::Result<()> {
    put(write.file().as_fd(), write.offset())?;
    make_durable(write)
}

/// Makes a write's bytes, which are in their place, durable if the guest wants it.
pub(crate) fn make_durable(write: &PlaceholderRequest) -> io::Result<()> {
    match write.op() {
        PlaceholderOp::Write { sync: true } => Ok(rustix::fs::fdatasync(write.file())?),
        _ => Ok(()),
    }
}

/// Copies a read's bytes from the disk; `into` is as long as the read.
pub(crate) fn fetch(read: &PlaceholderRequest, into: &mut [u8]) -> io::Result<()> {
    let file = read.file().as_fd();
    if read.may_lag() {
        drop_cached(file, read.offset(), read.len_bytes());
    }
    read_all(file, read.offset(), into)
}
