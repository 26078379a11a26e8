//! Back-end channel, on which we send messages to the VMM: config changes.

use std::os::fd::{AsFd, BorrowedFd};

use base::peer_fd::PeerFd;
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, Shutdown, SocketType, getpeername, shutdown};
use zerocopy::IntoBytes;

use crate::codec::{Header, Request};
use crate::device::{ConfigNotifier, ConfigNotifyError};
use crate::error::VhostUserError;
use crate::wire::send_once;

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;

/// Socket of `SET_BACKEND_REQ_FD`. We never ask for replies, so nothing is ever read from it;
/// host notifiers, shared objects and shared memory are neither sent nor answered.
#[derive(Debug)]
pub(crate) struct BackendChannel {
    socket: PeerFd,
    port: String,
}

impl BackendChannel {
    /// Takes a connected Unix stream socket only: anything else may block its writer, or hold what
    /// blocks whoever closes it.
    pub fn new(socket: PeerFd, port: &str) -> Result<Self, VhostUserError> {
        let refuse = |why: &str| {
            let (message, why) = (Request::SetBackendReqFd.message(), why.to_owned());
            Err(VhostUserError::Misplaced { message, why })
        };
        // What is no socket has neither.
        let kind = (socket_domain(&socket).ok(), socket_type(&socket).ok());
        if kind != (Some(AddressFamily::UNIX), Some(SocketType::STREAM)) {
            return refuse("the descriptor is not a Unix stream socket");
        }
        if getpeername(&socket).is_err() || shutdown(&socket, Shutdown::Read).is_err() {
            return refuse("the socket is not connected");
        }
        // From here on nobody can put descriptors into it, and none are in it: its close ends.
        match rustix::io::ioctl_fionread(&socket) {
            Ok(0) => Ok(Self { socket: socket.checked(), port: port.to_owned() }),
            _ => refuse("something lies in the socket already; nothing is read from it"),
        }
    }
}

impl AsFd for BackendChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl ConfigNotifier for BackendChannel {
    fn config_changed(&self) -> Result<(), ConfigNotifyError> {
        let header = Header::request(CONFIG_CHANGE, 0, false);
        let error = match send_once(self.socket.as_fd(), header.as_bytes(), &[]) {
            Ok(sent) if sent == header.as_bytes().len() => return Ok(()),
            // A message this small goes as a whole on a Unix socket; a part of one is no message.
            Ok(_) => ConfigNotifyError::Dead { errno: Errno::IO.raw_os_error() },
            Err(Errno::AGAIN) => ConfigNotifyError::Full,
            Err(errno) => ConfigNotifyError::Dead { errno: errno.raw_os_error() },
        };
        tracing::warn!(port = %self.port, "config change not sent to the VMM: {error}");
        Err(error)
    }
}
