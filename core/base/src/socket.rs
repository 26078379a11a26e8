//! Unix sockets at a path: bound with their mode from the first moment, replaced when nobody
//! listens any more, and removed by their maker. Links of other users are not followed, neither to
//! bind nor to connect: see [`crate::folder`].

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use rustix::fs::{AtFlags, Gid, Mode, RenameFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::folder::{self, Folder};

/// Longest path of a socket: `sockaddr_un` with the zero at its end.
const MAX_PATH_LEN_BYTES: usize = 107;

/// Error of a socket at a path.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// Another kind of file is left alone.
    ///
    /// Remedy: move the file away, or name another path.
    #[error("there is a file that is not a socket")]
    NotASocket,
    /// Another process takes connections there.
    ///
    /// Remedy: end the other process (`ss -xlp` names it), or name another path.
    #[error("somebody listens there")]
    InUse,
    /// The owner of the folder has put another file there.
    ///
    /// Remedy: give the folder to root or to the daemon's user, with no other user who may write in
    /// it.
    #[error("somebody else put another file in its place")]
    Swapped,
    /// A path of a socket has 107 bytes at most: `sockaddr_un`.
    ///
    /// Remedy: shorten the path: a shorter `run_dir`, VM's or port's name.
    #[error("the path has {0} bytes; 107 at most")]
    LongPath(usize),
    /// The operating system refused a step.
    ///
    /// Remedy: mend what the cause says: permissions of the folder, space, or limits of open files.
    #[error("{what}: {source}")]
    Io {
        /// The step.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
}

impl SocketError {
    fn io<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { what, source: source.into() }
    }
}

/// File of a bound socket. It is removed when this is dropped, unless another file has taken its
/// place.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    folder: Folder,
    name: OsString,
    identity: Identity,
}

/// Device, inode, and creation time where that is known: a file system reuses inode numbers.
type Identity = (u64, u64, Option<SystemTime>);

fn identity(file: &File) -> io::Result<Identity> {
    let meta = file.metadata()?;
    Ok((meta.dev(), meta.ino(), meta.created().ok()))
}

impl SocketFile {
    /// Binds `socket` to `path`. The file has these permission bits, whatever the umask is, and
    /// wider ones at no time. A socket file that nobody listens on is replaced.
    ///
    /// # Errors
    /// Something else is there, or the operating system refuses.
    pub fn bind(socket: &OwnedFd, path: &Path, mode: u32) -> Result<Self, SocketError> {
        // A client has to name this path, too.
        address(path)?;
        let (folder, name) =
            Folder::open_parent(path).map_err(SocketError::io("opening its folder"))?;
        remove_stale(&folder, &name)?;
        let mode = Mode::from_raw_mode(mode & 0o777);
        // Before bind(2): the file takes the mode that its socket has. After it: the umask.
        rustix::fs::fchmod(socket, mode).map_err(SocketError::io("setting the mode"))?;
        bind_in(socket, &folder, &name)?;
        let file = folder.look(&name).map_err(SocketError::io("looking at it"))?;
        let meta = file.metadata().map_err(SocketError::io("looking at it"))?;
        let own = meta.uid() == rustix::process::geteuid().as_raw() && meta.nlink() == 1;
        if !own || !meta.file_type().is_socket() {
            // The folder belongs to another user, who has swapped the file: theirs gets no mode of
            // ours.
            return Err(SocketError::Swapped);
        }
        rustix::fs::chmod(folder::path_of(&file), mode)
            .map_err(SocketError::io("setting the mode"))?;
        let identity = identity(&file).map_err(SocketError::io("looking at it"))?;
        Ok(Self { path: path.into(), folder, name, identity })
    }

    /// Gives the file to a group, whose rights are those of the mode. Without CAP_CHOWN it has to
    /// be one of this process's own groups.
    ///
    /// # Errors
    /// The operating system refuses.
    pub fn give_to_group(&self, group_id: u32) -> Result<(), SocketError> {
        let (flags, group) = (AtFlags::SYMLINK_NOFOLLOW, Some(Gid::from_raw(group_id)));
        rustix::fs::chownat(&self.folder, &self.name, None, group, flags)
            .map_err(SocketError::io("giving it to its group"))
    }

    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let there = self.folder.look(&self.name).and_then(|file| identity(&file));
        if there.is_ok_and(|identity| identity == self.identity) {
            // If it stays, the next to bind replaces it.
            let _ = rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty());
        }
    }
}

/// Makes a non-blocking stream socket.
///
/// # Errors
/// No descriptor is left.
pub fn stream() -> Result<OwnedFd, Errno> {
    of_kind(SocketType::STREAM)
}

/// Listens for streams at `path`: see [`SocketFile::bind`].
///
/// # Errors
/// Another file is there, or the operating system refuses.
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

/// Binds to a name in a folder. The path through `/proc/self/fd` may be longer than the folder's
/// own: a name that does not fit is bound by a short name first, and renamed.
fn bind_in(socket: &OwnedFd, folder: &Folder, name: &OsStr) -> Result<(), SocketError> {
    let bind = |name: &OsStr| -> Result<(), SocketError> {
        let address = address(&folder.path_of(name))?;
        rustix::net::bind(socket, &address).map_err(SocketError::io("binding"))
    };
    if folder.path_of(name).as_os_str().len() <= MAX_PATH_LEN_BYTES {
        return bind(name);
    }
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let short = OsString::from(format!(".new-{process}-{number}"));
    bind(&short)?;
    rustix::fs::renameat_with(folder, &short, folder, name, RenameFlags::NOREPLACE).map_err(|e| {
        // Nobody knows the short name.
        let _ = rustix::fs::unlinkat(folder, &short, AtFlags::empty());
        SocketError::io("giving it its name")(e)
    })
}

/// Connects `socket` to the socket at a path. Only links that root or this user owns are followed.
///
/// # Errors
/// Those of connect(2), and `PermissionDenied` for a link of another user.
pub fn connect(socket: impl AsFd, path: &Path) -> io::Result<()> {
    connect_to(socket, &folder::find(path)?)
}

/// Connects as [`connect`], to a name in an open folder.
///
/// # Errors
/// Those of connect(2), and `PermissionDenied` for a link of another user.
pub fn connect_in(socket: impl AsFd, folder: &Folder, name: &OsStr) -> io::Result<()> {
    connect_to(socket, &folder.find(name)?)
}

fn connect_to(socket: impl AsFd, file: &File) -> io::Result<()> {
    let address = SocketAddrUnix::new(folder::path_of(file))?;
    Ok(rustix::net::connect(socket, &address)?)
}

/// Removes a socket that a killed process left.
fn remove_stale(folder: &Folder, name: &OsStr) -> Result<(), SocketError> {
    let file = match folder.look(name) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(SocketError::io("looking at it")(e)),
    };
    let meta = file.metadata().map_err(SocketError::io("looking at it"))?;
    if !meta.file_type().is_socket() {
        return Err(SocketError::NotASocket);
    }
    let address = address(&folder::path_of(&file))?;
    let connect = |kind| rustix::net::connect(of_kind(kind)?, &address);
    // A listener of the other kind answers so as well.
    let result = match connect(SocketType::STREAM) {
        Err(Errno::PROTOTYPE) => connect(SocketType::SEQPACKET),
        other => other,
    };
    match result {
        Err(Errno::CONNREFUSED) => rustix::fs::unlinkat(folder, name, AtFlags::empty())
            .map_err(SocketError::io("removing a stale socket")),
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
    fn a_path_of_any_length_that_fits_is_bound() {
        let dir = tempfile::tempdir().unwrap();
        let left = MAX_PATH_LEN_BYTES - dir.path().as_os_str().len() - 1;
        let names = [1, left - 1, left].map(|len| "n".repeat(len));
        let path = |name: &String| dir.path().join(name);
        let bound: Vec<_> = names.iter().map(|n| listen(&path(n), 0o600, 1).unwrap()).collect();
        for name in &names {
            UnixStream::connect(path(name)).unwrap();
            assert!(matches!(listen(&path(name), 0o600, 1), Err(SocketError::InUse)));
        }
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 3);
        drop(bound);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
        // A folder whose own path is short, and a name that is long.
        let short = tempfile::Builder::new().prefix("s").rand_bytes(3).tempdir_in("/tmp").unwrap();
        let path = short.path().join("n".repeat(MAX_PATH_LEN_BYTES - 10));
        let (_socket, file) = listen(&path, 0o660, 1).unwrap();
        assert_eq!(mode(&path), 0o660);
        UnixStream::connect(&path).unwrap();
        drop(file);
        assert_eq!(std::fs::read_dir(&short).unwrap().count(), 0);
    }

    #[test]
    #[allow(non_snake_case)]
    fn abuse_V5_a_socket_is_bound_and_reached_without_links_of_others() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("folder")).unwrap();
        // The folder is opened once: what takes its place later is not looked at.
        let (_socket, file) = listen(&at("folder/s"), 0o600, 1).unwrap();
        std::fs::rename(at("folder"), at("moved")).unwrap();
        std::fs::create_dir(at("folder")).unwrap();
        std::fs::write(at("folder/s"), "mine").unwrap();
        drop(file);
        assert!(!at("moved/s").exists() && at("folder/s").exists());
        // A link in the place of a socket is no socket, whoever made it.
        let (_socket, _file) = listen(&at("real"), 0o600, 1).unwrap();
        std::os::unix::fs::symlink("real", at("link")).unwrap();
        assert!(matches!(listen(&at("link"), 0o600, 1), Err(SocketError::NotASocket)));
        let connect_to = |name: &str| connect(stream().unwrap(), &at(name));
        connect_to("link").unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::lchown(at("link"), Some(65_534), None).unwrap();
            let error = connect_to("link").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            let (folder, _) = Folder::open_parent(&at("real")).unwrap();
            connect_in(stream().unwrap(), &folder, OsStr::new("link")).unwrap_err();
            connect_in(stream().unwrap(), &folder, OsStr::new("real")).unwrap();
        }
    }

    #[test]
    fn a_long_path_is_told() {
        let path = PathBuf::from("/").join("x".repeat(200));
        let error = listen(&path, 0o600, 1).unwrap_err();
        assert!(error.to_string().contains("201 bytes; 107"), "{error}");
    }
}
