//! Socket options that no library has.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::OnceLock;

use libc::{c_int, socklen_t};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Longest time between two retransmissions, in milliseconds (Linux 6.15).
pub(crate) const TCP_RTO_MAX_MS: c_int = 44;

/// Bytes that have not been sent yet (`linux/sockios.h`).
const SIOCOUTQNSD: libc::Ioctl = 0x894b;

/// Sets an option.
pub(crate) fn set<T: IntoBytes + Immutable + ?Sized>(
    fd: impl AsFd,
    level: c_int,
    name: c_int,
    value: &T,
) -> io::Result<()> {
    let bytes = value.as_bytes();
    let len = bytes.len() as socklen_t;
    let fd = fd.as_fd().as_raw_fd();
    // SAFETY: the kernel reads `len` bytes, which are there.
    match unsafe { libc::setsockopt(fd, level, name, bytes.as_ptr().cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets an option of TCP.
pub(crate) fn set_tcp<T: IntoBytes + Immutable + ?Sized>(
    fd: impl AsFd,
    name: c_int,
    value: &T,
) -> io::Result<()> {
    set(fd, libc::IPPROTO_TCP, name, value)
}

/// Reads an option of TCP; bytes that the kernel does not fill in are zero.
pub(crate) fn get_tcp<T: FromBytes + IntoBytes>(fd: impl AsFd, name: c_int) -> io::Result<T> {
    let mut value = T::new_zeroed();
    let bytes = value.as_mut_bytes();
    let mut len = bytes.len() as socklen_t;
    let (fd, to) = (fd.as_fd().as_raw_fd(), bytes.as_mut_ptr().cast());
    // SAFETY: the kernel writes at most `len` bytes, which are there, and any bytes make a `T`.
    match unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, name, to, &raw mut len) } {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Bytes in the send queue: all of them, or those that were never sent.
pub(crate) fn queued_bytes(fd: impl AsFd, never_sent: bool) -> io::Result<u32> {
    let number = if never_sent { SIOCOUTQNSD } else { libc::TIOCOUTQ };
    let mut bytes: c_int = 0;
    // SAFETY: both write one integer.
    match unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), number, &raw mut bytes) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(bytes.unsigned_abs()),
    }
}

/// Whether the kernel bounds the retransmission timeout of a socket ([`TCP_RTO_MAX_MS`]).
pub(crate) fn knows_rto_max() -> bool {
    static KNOWS: OnceLock<bool> = OnceLock::new();
    *KNOWS.get_or_init(|| {
        socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)
            .is_ok_and(|fd| get_tcp::<c_int>(&fd, TCP_RTO_MAX_MS).is_ok())
    })
}
