//! Unix sockets at a path: for one owner from their first moment, replaced when nobody listens any
//! more, and removed by who made them.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use rustix::fs::{AtFlags, CWD, Gid, Mode};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Why a socket cannot be at a path.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another kind of file is left alone.
    #[error("there is a file that is not a socket")]
    NotASocket,
    /// Somebody takes connections there.
    #[error("somebody listens there")]
    InUse,
    /// A path of a socket has 107 bytes at most: `sockaddr_un`.
    #[error("the path has {0} bytes; 107 at most")]
    LongPath(usize),
    /// The operating system refused a step.
    #[error("{what}: {source}")]
    Io {
        /// The step.
        what: &'static str,
        /// Its reason.
        source: io::Error,
    },
}

impl SocketError {
    fn io<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { what, source: source.into() }
    }
}

/// The file of a bound socket. It goes when this is dropped, unless somebody has put another there.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    identity: Identity,
}

/// Device, inode, and when it was made, where that is known: a file system gives numbers again.
type Identity = (u64, u64, Option<SystemTime>);

fn identity(path: &Path) -> io::Result<Identity> {
    let meta = path.symlink_metadata()?;
    Ok((meta.dev(), meta.ino(), meta.created().ok()))
}

impl SocketFile {
    /// Binds `socket` to `path`. The file has these permission bits, whatever the umask is, and wider
    /// ones at no time. A socket file that nobody listens on is replaced.
    ///
    /// # Errors
    /// Something else is there, or the operating system refuses.
    pub fn bind(socket: &OwnedFd, path: &Path, mode: u32) -> Result<Self, SocketError> {
        let address = address(path)?;
        remove_stale(path, &address)?;
        let mode = Mode::from_raw_mode(mode & 0o777);
        // Before bind(2): the file takes the mode that its socket has. After it: the umask.
        rustix::fs::fchmod(socket, mode).map_err(SocketError::io("setting the mode"))?;
        rustix::net::bind(socket, &address).map_err(SocketError::io("binding"))?;
        rustix::fs::chmod(path, mode).map_err(SocketError::io("setting the mode"))?;
        let identity = identity(path).map_err(SocketError::io("looking at it"))?;
        Ok(Self { path: path.into(), identity })
    }

    /// Gives the file to a group, whose rights are those of the mode. Without CAP_CHOWN it has to be one
    /// of this process's own groups.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn give_to_group(&self, group_id: u32) -> Result<(), SocketError> {
        let (flags, group) = (AtFlags::SYMLINK_NOFOLLOW, Some(Gid::from_raw(group_id)));
        rustix::fs::chownat(CWD, &self.path, None, group, flags)
            .map_err(SocketError::io("giving it to its group"))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|identity| identity == self.identity) {
            // Left behind, it would be replaced by who binds next.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A stream socket that nothing waits for.
///
/// # Errors
/// No descriptor is left.
pub fn stream() -> Result<OwnedFd, Errno> {
    of_kind(SocketType::STREAM)
}

/// Listens for streams at `path`: see [`SocketFile::bind`].
///
/// # Errors
/// As there.
pub fn listen(path: &Path, mode: u32, backlog: i32) -> Result<(OwnedFd, SocketFile), SocketError> {
    let socket = stream().map_err(SocketError::io("making a socket"))?;
    let file = SocketFile::bind(&socket, path, mode)?;
    rustix::net::listen(socket.as_fd(), backlog).map_err(SocketError::io("listening"))?;
    Ok((socket, file))
}

fn of_kind(kind: SocketType) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
}

fn address(path: &Path) -> Result<SocketAddrUnix, SocketError> {
    SocketAddrUnix::new(path).map_err(|_| SocketError::LongPath(path.as_os_str().len()))
}

/// Removes a socket that a killed process left.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), SocketError> {
    let meta = match path.symlink_metadata() {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(SocketError::io("looking at it")(e)),
    };
    if !meta.file_type().is_socket() {
        return Err(SocketError::NotASocket);
    }
    let connect = |kind| rustix::net::connect(of_kind(kind)?, address);
    // A listener of the other kind answers so as well.
    let result = match connect(SocketType::STREAM) {
        Err(Errno::PROTOTYPE) => connect(SocketType::SEQPACKET),
        other => other,
    };
    match result {
        Err(Errno::CONNREFUSED) => {
            std::fs::remove_file(path).map_err(SocketError::io("removing a stale socket"))
        }
        Err(Errno::NOENT) => Ok(()),
        // A full backlog is somebody's.
        Ok(()) | Err(Errno::AGAIN | Errno::PROTOTYPE) => Err(SocketError::InUse),
        Err(e) => Err(SocketError::io("looking who listens there")(e)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

    use super::*;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_socket_has_its_mode_and_goes_with_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        for wanted in [0o600, 0o660, 0o666] {
            let path = dir.path().join("s");
            let (socket, file) = listen(&path, wanted, 1).unwrap();
            assert_eq!(mode(&path), wanted);
            UnixStream::connect(file.path()).unwrap();
            assert!(matches!(listen(&path, wanted, 1), Err(SocketError::InUse)));
            drop((socket, file));
            assert!(!path.exists());
        }
    }

    #[test]
    fn another_ones_file_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let (socket, file) = listen(&path, 0o600, 1).unwrap();
        drop(socket);
        let (_socket, next) = listen(&path, 0o600, 1).unwrap();
        drop(file);
        assert!(path.exists());
        drop(next);
        std::fs::write(&path, "mine").unwrap();
        assert!(matches!(listen(&path, 0o600, 1), Err(SocketError::NotASocket)));
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }

    #[test]
    fn dead_sockets_are_replaced_and_living_ones_of_any_kind_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name| dir.path().join(name);
        drop(UnixListener::bind(path("dead")).unwrap());
        drop(listen(&path("dead"), 0o600, 1).unwrap());
        let packets = of_kind(SocketType::SEQPACKET).unwrap();
        let _file = SocketFile::bind(&packets, &path("packets"), 0o600).unwrap();
        rustix::net::listen(&packets, 1).unwrap();
        let _datagrams = UnixDatagram::bind(path("datagrams")).unwrap();
        for name in ["packets", "datagrams"] {
            assert!(matches!(listen(&path(name), 0o600, 1), Err(SocketError::InUse)), "{name}");
        }
    }

    #[test]
    fn a_long_path_is_told() {
        let path = PathBuf::from("/").join("x".repeat(200));
        let error = listen(&path, 0o600, 1).unwrap_err();
        assert!(error.to_string().contains("201 bytes; 107"), "{error}");
    }
}
