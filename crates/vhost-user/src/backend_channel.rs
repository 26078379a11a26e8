//! The channel on which we talk first: config changes.

use std::os::fd::{AsFd, BorrowedFd};

use base::peer_fd::PeerFd;
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};
use zerocopy::IntoBytes;

use crate::codec::{Header, Request};
use crate::device::{ConfigNotifier, NotTold};
use crate::error::VhostUserError;
use crate::wire::send_once;

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;

/// The socket of `SET_BACKEND_REQ_FD`. We never ask for replies, so nothing is ever read from it;
/// host notifiers, shared objects and shared memory are neither sent nor answered.
#[derive(Debug)]
pub(crate) struct BackendChannel {
    socket: PeerFd,
    port: String,
}

impl BackendChannel {
    /// Only a Unix stream socket: anything else may block whoever writes to it.
    pub fn new(socket: PeerFd, port: &str) -> Result<Self, VhostUserError> {
        // What is no socket has neither.
        let kind = (socket_domain(&socket).ok(), socket_type(&socket).ok());
        if kind == (Some(AddressFamily::UNIX), Some(SocketType::STREAM)) {
            return Ok(Self { socket, port: port.to_owned() });
        }
        let message = Request::SetBackendReqFd.message();
        let why = "the descriptor is not a Unix stream socket".to_owned();
        Err(VhostUserError::Misplaced { message, why })
    }
}

impl AsFd for BackendChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl ConfigNotifier for BackendChannel {
    fn config_changed(&self) -> Result<(), NotTold> {
        let header = Header::request(CONFIG_CHANGE, 0, false);
        let error = match send_once(self.socket.as_fd(), header.as_bytes(), &[]) {
            Ok(sent) if sent == header.as_bytes().len() => return Ok(()),
            // So small a message goes as a whole on a Unix socket; on anything else it is no message.
            Ok(_) => NotTold::Dead { errno: Errno::IO.raw_os_error() },
            Err(Errno::AGAIN) => NotTold::Full,
            Err(errno) => NotTold::Dead { errno: errno.raw_os_error() },
        };
        tracing::warn!(port = %self.port, "config change not sent to the VMM: {error}");
        Err(error)
    }
}
