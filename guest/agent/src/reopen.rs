//! Open files of the agent's own, from a program's descriptors.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use guest_abi::Reason;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Opens a file again, for reading: a lease belongs to an open file, and the program's may be
/// duplicated anywhere.
pub fn reopen_to_read(file: &impl AsFd, flags: OFlags) -> Result<File, Reason> {
    let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
    // Does not wait for another process's write lease.
    let flags = flags | OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => Ok(file.into()),
        Err(Errno::WOULDBLOCK) => Err(Reason::NoLease),
        Err(_) => Err(Reason::NotPermitted),
    }
}

/// Opens a file of the agent's own: the program may change the flags of its descriptor at any time.
pub fn reopen_to_write(file: BorrowedFd<'_>, flags: OFlags) -> Result<File, Reason> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    // Does not wait for another process's lease.
    let flags = flags | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => Ok(file.into()),
        Err(Errno::WOULDBLOCK) => Err(Reason::NoLease),
        // The file system has no direct I/O.
        Err(Errno::INVAL) => Err(Reason::FileSystem),
        Err(_) => Err(Reason::NotPermitted),
    }
}
