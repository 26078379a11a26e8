//! Ports of the host that the daemon itself answers, without a Unix path.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::domain::in_range;
use crate::engine::{Engine, PortSpec};
use crate::error::VsockError;
use crate::limits::{HIGHEST_PRIVILEGED_PORT, HIGHEST_SERVICE_PORT, MAX_SERVICES};
use crate::packet::{HOST_CID, Key, TYPE_STREAM};
use crate::table::Id;

/// Is told that the guest has begun anew, or has gone: it knows none of its connections any more, and all are
/// closed. As [`Sink`], it must not block. It may be told so more than once.
pub type Gone = Arc<dyn Fn() + Send + Sync>;

/// Gets the host's end of each connection.
pub type Sink = Arc<dyn Fn(OwnedFd) + Send + Sync>;

/// A port of the host (CID 2) that this guest reaches inside of the daemon. Nobody else does: not
/// other guests, and not under this guest's CID. The port is never looked up as a Unix path, also
/// not when a connection is refused, and [`crate::HostPorts`] does not apply to it.
#[derive(Clone)]
pub struct Service {
    /// What the guest connects to: 1 to 2^32 - 2, each at most once per guest.
    pub port: u32,
    /// Only guest ports below 1,024: the guest's kernel gives those to root, and to programs
    /// with `CAP_NET_BIND_SERVICE`.
    pub privileged: bool,
    /// Gets one end of a pair of stream sockets (blocking, closed on `exec`) per connection, which
    /// the guest has been told is open. It runs on the sidecore, so it must not block: a
    /// `try_send` into a bounded channel that drops the socket, and with it the connection, when
    /// the channel is full. What is in that channel is not limited by the guest's number of
    /// connections, since it may close them again.
    pub sink: Sink,
    /// For those who keep something for the guest beyond its connections.
    pub gone: Option<Gone>,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut s = f.debug_struct("Service");
        s.field("port", &self.port).field("privileged", &self.privileged).finish_non_exhaustive()
    }
}

/// What is behind a port of the host once a guest may connect there.
pub(crate) struct Opened {
    /// Our end, non-blocking.
    pub fd: OwnedFd,
    /// The other one, and who gets it once the connection stands.
    pub handover: Option<(Sink, OwnedFd)>,
}

impl PortSpec {
    /// Opens what `key` names on the host: a service of ours or a program's Unix socket. None: the
    /// guest may not have it, or nobody listens.
    pub(crate) fn open(&self, key: Key) -> Option<Opened> {
        let number = key.peer_port;
        if let Some(service) = self.services.iter().find(|s| s.port == number) {
            if service.privileged && key.guest_port > HIGHEST_PRIVILEGED_PORT {
                self.stats.unprivileged.add(1);
                return None;
            }
            let (fd, other) = socket_pair().ok()?;
            return Some(Opened { fd, handover: Some((Arc::clone(&service.sink), other)) });
        }
        if !self.host_ports.allows(number) {
            return None;
        }
        let fd = self.programs.connect(number).ok()?;
        Some(Opened { fd, handover: None })
    }
}

impl Engine {
    /// A guest connects to the host. None: refused.
    pub(crate) fn open_to_host(&mut self, port: Id, request: &crate::packet::Header) -> Option<Id> {
        let p = self.ports.get(port)?;
        if !p.has_room(false) {
            return None;
        }
        let Opened { fd, handover } = p.spec.open(request.key)?;
        let id = self.connect_host(port, request, fd)?;
        if let Some((sink, other)) = handover {
            sink(other);
        }
        Some(id)
    }
}

/// Highest guest ports, of which the next clients of privileged services take the first free one.
const CLIENT_PORTS: u32 = 4;

impl Engine {
    /// The guest goes on where it was with another daemon, or after a pause. Its clients of privileged
    /// services, which choose their own ports from the highest down, may wait for an answer that never
    /// comes: they are told that connections that we do not know are gone.
    pub(crate) fn reset_old_clients(&mut self, id: Id) {
        let Some(port) = self.ports.get(id) else { return };
        let lowest = HIGHEST_PRIVILEGED_PORT + 1 - CLIENT_PORTS;
        let services = port.spec.services.iter().filter(|service| service.privileged);
        let unknown: Vec<Key> = services
            .flat_map(|service| {
                (lowest..=HIGHEST_PRIVILEGED_PORT).map(|guest_port| Key {
                    guest_port,
                    peer_cid: HOST_CID,
                    peer_port: service.port,
                })
            })
            .filter(|key| !port.keys.contains_key(key))
            .collect();
        unknown.into_iter().for_each(|key| self.stray_reset(id, key, TYPE_STREAM));
    }
}

/// A pair of streams: the first, ours, does not block.
fn socket_pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC;
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::io::ioctl_fionbio(&pair.0, true)?;
    Ok(pair)
}

/// Whether a guest's services can be had.
pub(crate) fn check(name: &str, services: &[Service]) -> Result<(), VsockError> {
    in_range(name, "number of services", services.len() as u64, 0, MAX_SERVICES as u64)?;
    for (at, service) in services.iter().enumerate() {
        let port = service.port;
        in_range(name, "service port", port.into(), 1, HIGHEST_SERVICE_PORT.into())?;
        if services[..at].iter().any(|s| s.port == port) {
            return Err(VsockError::ServiceTwice { name: name.to_owned(), port });
        }
    }
    Ok(())
}
