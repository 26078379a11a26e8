//! Unix sockets of host programs. The only file of this crate that hands guest memory
//! to the kernel.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use base::folder::Folder;
use base::io::IoSlice;
use base::socket::{self, SocketError, SocketFile};
use queue::Seg;
use queue::seg::subrange;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, SocketFlags};

use crate::error::VsockError;
use crate::limits::{LISTEN_BACKLOG, MAX_IOVECS, MAX_LINE_BYTES};

/// Buffers of one system call, filled and used within one function call.
#[derive(Debug)]
pub(crate) struct Iovecs(Vec<IoSlice>);

// SAFETY: the addresses are only ever used by the function that put them there; between two such
// functions the vector's content is stale and never read, so it may move between threads.
unsafe impl Send for Iovecs {}

impl Iovecs {
    pub fn new() -> Self {
        Self(Vec::with_capacity(MAX_IOVECS))
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Adds `len` bytes of `segs` from `offset`; returns how many found room.
    pub fn add(&mut self, segs: &[Seg], offset: usize, len: usize) -> usize {
        subrange(segs, offset, len, &mut self.0)
    }

    fn msghdr(&mut self) -> libc::msghdr {
        // SAFETY: all zeroes is a valid `msghdr`: no name, no buffers, no control data.
        let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
        msg.msg_iov = self.0.as_mut_ptr();
        msg.msg_iovlen = self.0.len() as _;
        msg
    }

    /// Sends the buffers; never blocks, never raises SIGPIPE.
    ///
    /// # Safety
    /// The buffers added since the last [`Iovecs::clear`] are still mapped.
    pub unsafe fn send(&mut self, fd: BorrowedFd<'_>) -> Result<usize, Errno> {
        let msg = self.msghdr();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        retry(|| {
            // SAFETY: `msg` describes `self.0`, whose buffers the caller vouches for.
            unsafe { libc::sendmsg(fd.as_raw_fd(), &msg, flags) }
        })
    }

    /// Fills the buffers; never blocks. 0 is the end. Descriptors that the sender attached are
    /// closed by the kernel, since there is no room for them.
    ///
    /// # Safety
    /// As [`Iovecs::send`]; and nobody holds a reference to the buffers' bytes.
    pub unsafe fn receive(&mut self, fd: BorrowedFd<'_>) -> Result<usize, Errno> {
        let mut msg = self.msghdr();
        retry(|| {
            // SAFETY: as in `send`; the kernel writes only within the buffers.
            unsafe { libc::recvmsg(fd.as_raw_fd(), &mut msg, libc::MSG_DONTWAIT) }
        })
    }
}

fn retry(mut call: impl FnMut() -> isize) -> Result<usize, Errno> {
    loop {
        match usize::try_from(call()) {
            Ok(n) => return Ok(n),
            Err(_) => {
                let e = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
                if e != libc::EINTR {
                    return Err(Errno::from_raw_os_error(e));
                }
            }
        }
    }
}

/// Sends two pieces of our memory; never blocks, never raises SIGPIPE.
pub(crate) fn send_pieces(fd: &OwnedFd, pieces: (&[u8], &[u8])) -> Result<usize, Errno> {
    let bufs = [io::IoSlice::new(pieces.0), io::IoSlice::new(pieces.1)];
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let mut none = rustix::net::SendAncillaryBuffer::default();
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(fd, &bufs, &mut none, flags))
}

/// Shuts one direction of a socket, or both.
pub(crate) fn shut(fd: &OwnedFd, how: Shutdown) {
    // Fails only when the other end is gone, and then it is shut anyway.
    let _ = rustix::net::shutdown(fd, how);
}

/// Listening socket at a path that is removed with it.
#[derive(Debug)]
pub(crate) struct Listener {
    fd: OwnedFd,
    _file: SocketFile,
}

impl Listener {
    /// Listens for the owner only. A stale socket file without a listener is replaced.
    pub fn bind(name: &str, path: &Path) -> Result<Self, VsockError> {
        let failed = |source| {
            let (name, path) = (name.to_owned(), path.to_owned());
            VsockError::Socket { name, path, source }
        };
        let (fd, _file) = socket::listen(path, 0o600, LISTEN_BACKLOG).map_err(failed)?;
        Ok(Self { fd, _file })
    }

    /// Accepts the next connection; `AGAIN` when there is none.
    pub fn accept(&self) -> Result<OwnedFd, Errno> {
        rustix::net::accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Sockets on which host programs listen for a guest's connections: `<path>_<port>`.
#[derive(Debug)]
pub(crate) struct ProgramSockets {
    folder: Folder,
    base: OsString,
}

impl ProgramSockets {
    /// Opens the folder once, so that no guest waits for it again.
    pub fn at(name: &str, path: &Path) -> Result<Self, VsockError> {
        let (folder, base) = Folder::open_parent(path).map_err(|source| {
            let source = SocketError::Io { what: "opening its folder", source };
            VsockError::Socket { name: name.to_owned(), path: path.to_owned(), source }
        })?;
        Ok(Self { folder, base })
    }

    /// Connects without waiting: a listener whose backlog is full answers `AGAIN`.
    pub fn connect(&self, port: u32) -> io::Result<OwnedFd> {
        let mut name = self.base.clone();
        name.push(format!("_{port}"));
        let fd = socket::stream()?;
        socket::connect_in(&fd, &self.folder, &name)?;
        Ok(fd)
    }
}

/// Result of reading a `CONNECT` line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ConnectLine {
    /// Port of the guest that the host program wants.
    Port(u32),
    /// The line is not complete yet.
    Partial,
    /// The line is another one or too long, or the program has gone.
    Bad(&'static str),
}

/// Reads the `CONNECT <port>` line, and nothing behind it. A line in pieces is left in the socket
/// until it is whole, so that no memory of ours is needed.
pub(crate) fn read_line(fd: &OwnedFd) -> ConnectLine {
    let mut bytes = [0u8; MAX_LINE_BYTES];
    let peek = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let have = match rustix::net::recv(fd, &mut bytes, peek) {
        Ok((0, _)) => return ConnectLine::Bad("closed before its CONNECT line"),
        Ok((n, _)) => n.min(MAX_LINE_BYTES),
        Err(Errno::AGAIN | Errno::INTR) => return ConnectLine::Partial,
        Err(_) => return ConnectLine::Bad("the socket failed"),
    };
    let Some(end) = bytes[..have].iter().position(|&b| b == b'\n') else {
        return if have == MAX_LINE_BYTES {
            ConnectLine::Bad("no newline within the limit of 32 bytes")
        } else {
            ConnectLine::Partial
        };
    };
    let line = &mut [0u8; MAX_LINE_BYTES][..end + 1];
    match rustix::net::recv(fd, line, RecvFlags::DONTWAIT) {
        Ok((n, _)) if n == end + 1 => {}
        _ => return ConnectLine::Bad("the socket failed"),
    }
    parse_connect(&bytes[..end]).map_or(ConnectLine::Bad("not CONNECT <port>"), ConnectLine::Port)
}

/// Parses the port of `CONNECT <port>` (any case, blanks around the number as other devices take
/// them).
fn parse_connect(line: &[u8]) -> Option<u32> {
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    let command = words.next()?;
    let port = words.next()?;
    let valid = command.eq_ignore_ascii_case("connect")
        && words.next().is_none()
        && port.bytes().all(|b| b.is_ascii_digit());
    if valid { port.parse().ok() } else { None }
}

/// Tells a host program that the guest accepted: `OK <port>`. A fresh socket has room for it; one
/// that has not is broken.
pub(crate) fn send_ok(fd: &OwnedFd, port: u32) -> bool {
    let mut line = [0u8; MAX_LINE_BYTES];
    let mut rest = &mut line[..];
    if io::Write::write_fmt(&mut rest, format_args!("OK {port}\n")).is_err() {
        return false;
    }
    let len = MAX_LINE_BYTES - rest.len();
    send_pieces(fd, (&line[..len], &[])) == Ok(len)
}

#[cfg(test)]
mod tests;
