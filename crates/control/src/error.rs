//! Why the control side could not do its work.

use std::io;
use std::path::PathBuf;

use base::socket::SocketError;
use thiserror::Error;

use crate::config::Problems;

/// An error of this crate outside of a request's handling (for that: [`crate::plane::PlaneError`]).
#[derive(Debug, Error)]
pub enum ControlError {
    /// The config is wrong.
    #[error(transparent)]
    Config(#[from] Problems),
    /// A daemon already serves the control socket.
    #[error("another daemon answers on {0}: stop it, or set daemon.control_socket")]
    AlreadyRunning(PathBuf),
    /// Something else is where a socket should be.
    #[error("{0} is there and is no socket: move it away, or set daemon.control_socket")]
    NotASocket(PathBuf),
    /// The control socket cannot be made.
    #[error("the control socket {path}: {source}")]
    Socket {
        /// Where.
        path: PathBuf,
        /// The cause.
        source: SocketError,
    },
    /// The operating system refused.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Nobody answers on the control socket.
    #[error("no daemon answers on {path}: {source}")]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// What is to be sent cannot be read.
    #[error("reading what is to be sent: {0}")]
    Input(io::Error),
    /// The answer is no HTTP, is cut short, or is over the limit.
    #[error("the daemon's answer on {path} makes no sense: {what}")]
    BadAnswer {
        /// The socket.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A list of what was changed at run time cannot be read.
    #[error("{path}: {what}: {lost} are lost")]
    BadList {
        /// What it held.
        lost: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

impl ControlError {
    pub(crate) fn io(what: &'static str, path: &std::path::Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { what, path, source }
    }
}
