//! Endpoints, from which front ends come: a socket we listen on, a socket we dial, a descriptor.

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

/// Place where a port meets its front end.
#[derive(Debug)]
pub enum Endpoint {
    /// Socket on which we listen; front ends may come and go.
    Listen(PathBuf),
    /// Socket that we dial, and dial again (QEMU `server=on`).
    Dial(PathBuf),
    /// Connected or listening socket that was handed to us.
    Fd(OwnedFd),
}

impl Endpoint {
    /// Text for `status` and logs.
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

/// Listening socket. Its file is removed when this is dropped, if it is still ours.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: PeerFd,
    /// None where another process made the socket.
    _file: Option<SocketFile>,
}

impl Listener {
    /// Listens on `path` with `mode`. A socket file that nobody listens on any more is replaced;
    /// anything else at that place is left alone.
    pub fn bind(path: &Path, mode: u32) -> Result<Self, VhostUserError> {
        let (socket, file) = socket::listen(path, mode, BACKLOG).map_err(|e| refused(path, e))?;
        Ok(Self { socket: socket.into(), _file: Some(file) })
    }

    /// Takes a listening socket that another process made (socket activation).
    pub fn from_fd(socket: OwnedFd) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&socket)?;
        rustix::fs::fcntl_setfl(&socket, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self { socket: socket.into(), _file: None })
    }

    /// Accepts the next connection; none when there is none (any more).
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

/// Tries once to reach a front end that listens; none when none does (yet). Never blocks: a
/// full backlog counts as none.
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
