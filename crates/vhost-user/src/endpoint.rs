//! Where front ends come from: a socket we listen on, a socket we dial, or a descriptor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use base::peer_fd::PeerFd;
use base::socket::{self, SocketFile};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use crate::error::VhostUserError;

/// Connections that the kernel queues for us: a port has one front end.
const BACKLOG: i32 = 8;

/// Where the front end of a port is.
#[derive(Debug)]
pub enum Endpoint {
    /// We listen; front ends may come and go.
    Listen(PathBuf),
    /// We dial, and dial again (QEMU `server=on`).
    Dial(PathBuf),
    /// A connected socket, or a listening one, handed to us.
    Fd(OwnedFd),
}

impl Endpoint {
    /// For `status` and logs.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Listen(path) => format!("listen:{}", path.display()),
            Self::Dial(path) => format!("dial:{}", path.display()),
            Self::Fd(_) => "fd".to_owned(),
        }
    }
}

pub(crate) fn refused(path: &Path, reason: impl std::fmt::Display) -> VhostUserError {
    VhostUserError::Socket { path: path.display().to_string(), reason: reason.to_string() }
}

/// A listening socket. Its file goes when it is dropped, if it is still ours.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: PeerFd,
    /// None of a socket that somebody else made.
    _file: Option<SocketFile>,
}

impl Listener {
    /// Listens on `path` with `mode`. A socket file that nobody listens on any more is replaced;
    /// anything else at that place is left alone.
    pub fn bind(path: &Path, mode: u32) -> Result<Self, VhostUserError> {
        let (socket, file) = socket::listen(path, mode, BACKLOG).map_err(|e| refused(path, e))?;
        Ok(Self { socket: socket.into(), _file: Some(file) })
    }

    /// A listening socket that somebody else made (socket activation).
    pub fn from_fd(socket: OwnedFd) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&socket)?;
        rustix::fs::fcntl_setfl(&socket, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self { socket: socket.into(), _file: None })
    }

    /// The next connection; none when there is none (any more).
    pub fn accept(&self) -> Result<Option<PeerFd>, VhostUserError> {
        match accept_with(&self.socket, SocketFlags::CLOEXEC) {
            Ok(fd) => Ok(Some(fd.into())),
            // The connection went away before we took it.
            Err(Errno::AGAIN | Errno::CONNABORTED | Errno::INTR) => Ok(None),
            Err(e) => Err(VhostUserError::io("accepting a connection")(e)),
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// One attempt to reach a front end that listens; none when nobody does (yet). Never blocks: a
/// full backlog counts as nobody.
pub(crate) fn dial(path: &Path) -> Result<Option<PeerFd>, VhostUserError> {
    let socket = socket::stream().map_err(VhostUserError::io("making a socket"))?;
    match socket::connect(&socket, path) {
        Ok(()) => Ok(Some(socket.into())),
        Err(e) => {
            tracing::debug!("dialling {}: {e}", path.display());
            Ok(None)
        }
    }
}
