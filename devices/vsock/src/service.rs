//! Ports of the host that the daemon itself answers, without a Unix path.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Hook that is called when the guest has begun anew, or has gone: it knows none of its connections
/// any more, and all are closed. It must not block, as [`ServiceSink`] must not. It may be called
/// more than once.
pub type GuestResetHook = Arc<dyn Fn() + Send + Sync>;

/// Function that gets the host's end of each connection.
pub type ServiceSink = Arc<dyn Fn(OwnedFd) + Send + Sync>;

/// Port of the host (CID 2) that this guest reaches inside of the daemon. It is for no one else:
/// not other guests, and not under this guest's CID. The port is never looked up as a Unix path,
/// also not when a connection is refused, and [`crate::HostPorts`] does not apply to it.
#[derive(Clone)]
pub struct HostService {
    /// Port number that the guest connects to: 1 to 2^32 - 2, each at most once per guest.
    pub port: u32,
    /// Whether only guest ports below 1,024 may connect: the guest's kernel gives those to root,
    /// and to programs with `CAP_NET_BIND_SERVICE`.
    pub privileged: bool,
    /// Receiver of one end of a pair of stream sockets (blocking, closed on `exec`) per connection,
    /// which the guest has been told is open. It runs on the sidecore, so it must not block: a
    /// `try_send` into a bounded channel that drops the socket, and with it the connection, when
    /// the channel is full. What is in that channel is not limited by the guest's number of
    /// connections, since it may close them again.
    pub sink: ServiceSink,
    /// Hook for services that keep state for the guest beyond its connections.
    pub on_guest_reset: Option<GuestResetHook>,
}

impl fmt::Debug for HostService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut s = f.debug_struct("HostService");
        s.field("port", &self.port).field("privileged", &self.privileged).finish_non_exhaustive()
    }
}
