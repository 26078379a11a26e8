//! Where front ends come from: a socket we listen on, a socket we dial, or a descriptor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    socket_with,
};

use crate::error::VhostUserError;

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

fn refused(path: &Path, reason: impl std::fmt::Display) -> VhostUserError {
    VhostUserError::Socket { path: path.display().to_string(), reason: reason.to_string() }
}

fn address(path: &Path) -> Result<SocketAddrUnix, VhostUserError> {
    SocketAddrUnix::new(path).map_err(|_| refused(path, "the path has more than 107 bytes"))
}

fn stream_socket() -> Result<OwnedFd, VhostUserError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(VhostUserError::io("making a socket"))
}

/// A listening socket. The file goes when it is dropped, if it is still ours.
#[derive(Debug)]
pub(crate) struct Listener {
    socket: OwnedFd,
    file: Option<SocketFile>,
}

#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Listener {
    /// Listens on `path` with `mode`. A socket file that nobody listens on any more is replaced;
    /// anything else at that place is left alone.
    pub fn bind(path: &Path, mode: u32) -> Result<Self, VhostUserError> {
        let socket = stream_socket()?;
        bind_path(&socket, path, mode)?;
        listen(&socket, 8).map_err(|e| refused(path, e))?;
        let file = std::fs::symlink_metadata(path).ok().map(|m| SocketFile {
            path: path.to_owned(),
            device: m.dev(),
            inode: m.ino(),
        });
        Ok(Self { socket, file })
    }

    /// A listening socket that somebody else made (socket activation).
    pub fn from_fd(socket: OwnedFd) -> io::Result<Self> {
        let flags = rustix::fs::fcntl_getfl(&socket)?;
        rustix::fs::fcntl_setfl(&socket, flags | rustix::fs::OFlags::NONBLOCK)?;
        Ok(Self { socket, file: None })
    }

    /// The next connection; none when there is none (any more).
    pub fn accept(&self) -> Result<Option<OwnedFd>, VhostUserError> {
        match accept_with(&self.socket, SocketFlags::CLOEXEC) {
            Ok(fd) => Ok(Some(fd)),
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

impl Drop for Listener {
    fn drop(&mut self) {
        let Some(file) = &self.file else { return };
        let ours = std::fs::symlink_metadata(&file.path)
            .is_ok_and(|m| m.dev() == file.device && m.ino() == file.inode);
        if ours {
            // Left behind, it would be replaced by the next daemon.
            let _ = std::fs::remove_file(&file.path);
        }
    }
}

/// Binds any Unix socket to `path`, replacing a dead socket file.
pub(crate) fn bind_path(socket: &OwnedFd, path: &Path, mode: u32) -> Result<(), VhostUserError> {
    let address = address(path)?;
    remove_stale(path)?;
    let mode = Mode::from_raw_mode(mode & 0o777);
    // Before bind(2): the file never exists with a wider mode. After it: not narrowed by the umask.
    rustix::fs::fchmod(socket, mode).map_err(|e| refused(path, e))?;
    bind(socket, &address).map_err(|e| refused(path, e))?;
    rustix::fs::chmod(path, mode).map_err(|e| refused(path, e))
}

fn remove_stale(path: &Path) -> Result<(), VhostUserError> {
    let meta = match std::fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(refused(path, e)),
    };
    if !meta.file_type().is_socket() {
        return Err(refused(path, "there is a file that is not a socket"));
    }
    match try_connect(path, SocketType::STREAM) {
        Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(|e| refused(path, e)),
        Err(Errno::PROTOTYPE) => match try_connect(path, SocketType::SEQPACKET) {
            Err(Errno::CONNREFUSED) => std::fs::remove_file(path).map_err(|e| refused(path, e)),
            _ => Err(refused(path, "somebody listens on it")),
        },
        Err(Errno::NOENT) => Ok(()),
        Ok(_) | Err(Errno::AGAIN) => Err(refused(path, "somebody listens on it")),
        Err(e) => Err(refused(path, e)),
    }
}

fn try_connect(path: &Path, kind: SocketType) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, kind, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// One attempt to reach a front end that listens; none when nobody does (yet). Never blocks: a
/// full backlog counts as nobody.
pub(crate) fn dial(path: &Path) -> Result<Option<OwnedFd>, VhostUserError> {
    let address = address(path)?;
    let socket = stream_socket()?;
    match connect(&socket, &address) {
        Ok(()) => Ok(Some(socket)),
        Err(e) => {
            tracing::debug!("dialling {}: {e}", path.display());
            Ok(None)
        }
    }
}
