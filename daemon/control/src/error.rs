//! Errors of control sockets, their clients, and the lists of run-time changes.

use std::io;
use std::path::{Path, PathBuf};

use base::socket::SocketError;
use config::Problems;
use thiserror::Error;

/// An error of this crate outside of a request's handling (for that: [`crate::plane::PlaneError`]).
#[derive(Debug, Error)]
pub enum ControlError {
    /// The config is wrong.
    ///
    /// Remedy: mend each setting as its line says; `millrace check` shows all.
    #[error(transparent)]
    Config(#[from] Problems),
    /// A daemon already serves the control socket.
    ///
    /// Remedy: stop that daemon, or set another `control_socket` and `run_dir`.
    #[error("another daemon answers on {0}: stop it, or set another path in [daemon]")]
    AlreadyRunning(PathBuf),
    /// The path of a socket is taken by another kind of file.
    ///
    /// Remedy: move the file away, or set another path in `[daemon]`.
    #[error("{0} is there and is no socket: move it away, or set another path in [daemon]")]
    NotASocket(PathBuf),
    /// The control socket cannot be made.
    ///
    /// Remedy: do as the cause says; see `SocketError` of base.
    #[error("the control socket {path}: {source}")]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// The cause.
        source: SocketError,
    },
    /// The group of the socket for reading does not exist.
    ///
    /// Remedy: make the group (`packaging/millrace.sysusers`), or name another in `read_group`.
    #[error("daemon.read_group: {0:?} is neither a group of /etc/group nor a number")]
    NoGroup(String),
    /// The operating system refused.
    ///
    /// Remedy: mend what the cause says: permissions of the folder, or space.
    #[error("{what} {path}: {source}")]
    Io {
        /// Operation that failed.
        what: &'static str,
        /// File of the operation.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// No daemon answers on the control socket.
    ///
    /// Remedy: start the daemon (`systemctl start millrace`), or name its socket with `--socket`.
    #[error("no daemon answers on {path}: {source}")]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The user may not open the control socket.
    ///
    /// Remedy: run the command as root, or take `daemon.read_socket` for listings.
    #[error(
        "this user may not open {path}: {source}; run the command as root, with sudo for example. \
         Listings are also had from daemon.read_socket, where the config has one"
    )]
    NotAllowed {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The body of a request cannot be read.
    ///
    /// Remedy: check the file or the pipe that is to be sent.
    #[error("reading what is to be sent: {0}")]
    Input(io::Error),
    /// The answer is no HTTP, is cut short, or is over the limit.
    ///
    /// Remedy: check that the socket is Millrace's, and that command and daemon are of one version.
    #[error("the daemon's answer on {path} makes no sense: {what}")]
    BadAnswer {
        /// The socket.
        path: PathBuf,
        /// Description of the fault.
        what: String,
    },
    /// A list of what was changed at run time cannot be read.
    ///
    /// Remedy: make the changes again that the text says are lost: ports by `millrace attach`,
    /// shares by `millrace vm set`.
    #[error("{path}: {what}: {lost} are lost")]
    BadList {
        /// Contents of the list.
        lost: &'static str,
        /// The file.
        path: PathBuf,
        /// Description of the fault.
        what: String,
    },
}

impl ControlError {
    /// Makes the error of a connection to `path` that failed.
    pub(crate) fn unreachable(path: &Path) -> impl Fn(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| match source.kind() {
            io::ErrorKind::PermissionDenied => Self::NotAllowed { path: path.clone(), source },
            _ => Self::Unreachable { path: path.clone(), source },
        }
    }

    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { what, path, source }
    }
}

#[cfg(test)]
mod tests {
    #![allow(non_snake_case)]

    use super::*;

    #[test]
    fn abuse_O6_a_user_without_rights_is_told_so_and_what_to_do() {
        let denied = io::Error::from(io::ErrorKind::PermissionDenied);
        let told = ControlError::unreachable(Path::new("/c.sock"))(denied).to_string();
        assert!(told.starts_with("this user may not open /c.sock"), "{told}");
        assert!(told.contains("run the command as root"), "{told}");
        let gone = io::Error::from(io::ErrorKind::NotFound);
        let told = ControlError::unreachable(Path::new("/c.sock"))(gone).to_string();
        assert!(told.starts_with("no daemon answers on /c.sock"), "{told}");
    }
}
