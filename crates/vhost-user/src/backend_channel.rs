//! The channel on which we talk first: config changes.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use zerocopy::IntoBytes;

use crate::codec::Header;
use crate::device::ConfigNotifier;
use crate::wire::send_once;

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;

/// The socket of `SET_BACKEND_REQ_FD`. We never ask for replies, so nothing is ever read from it;
/// host notifiers, shared objects and shared memory are neither sent nor answered.
#[derive(Debug)]
pub(crate) struct BackendChannel {
    socket: OwnedFd,
    port: String,
}

impl BackendChannel {
    pub fn new(socket: OwnedFd, port: &str) -> Self {
        Self { socket, port: port.to_owned() }
    }
}

impl AsFd for BackendChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl ConfigNotifier for BackendChannel {
    fn config_changed(&self) {
        let header = Header::request(CONFIG_CHANGE, 0, false);
        // A front end that does not read this channel has enough such messages in it already; one
        // that is gone needs none.
        if let Err(error) = send_once(self.socket.as_fd(), header.as_bytes(), &[]) {
            tracing::warn!(port = %self.port, "config change not sent to the VMM: {error}");
        }
    }
}
