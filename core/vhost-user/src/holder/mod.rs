//! Holder: a tiny process that keeps sessions while no daemon runs.
//!
//! It knows nothing of vhost-user: per port it keeps a blob and some descriptors, and gives them
//! back to every client with its own user id. One thread, no timers, no files besides its socket.

mod client;
pub mod protocol;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use base::event::Event;
use base::limits::MAX_PORTS;
use base::peer_fd::PeerFd;
use base::socket::SocketFile;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, RecvFlags, SocketFlags, SocketType, accept_with, listen, socket_with,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::endpoint::refused;
use crate::error::VhostUserError;
use crate::wire::retry;
use protocol::{Op, Packet, Received, receive, send};

pub use client::HolderStore;
pub use protocol::{MAX_BLOB_LEN_BYTES, MAX_FDS};

/// Most connections at once: a daemon, the one that replaces it, a few tools.
const MAX_CLIENTS: usize = 16;

/// Serves until it is killed. Fails when the socket cannot be listened on: also when another
/// holder is there.
pub fn run(socket_path: &Path) -> Result<(), VhostUserError> {
    // All ports' saves wait for this thread.
    base::peer_fd::never_wait();
    let stop = Event::new().map_err(VhostUserError::std_io("making an eventfd"))?;
    run_until(socket_path, &stop)
}

/// Serves as [`run`] does, until `stop` is rung; then drops everything it keeps.
pub fn run_until(socket_path: &Path, stop: &Event) -> Result<(), VhostUserError> {
    raise_descriptor_limit();
    let mut holder = Holder::listen(socket_path)?;
    tracing::info!("holder listens on {}", socket_path.display());
    while holder.serve_event(stop)? {}
    Ok(())
}

/// 1,024 ports of up to 168 descriptors are more than the usual soft limit of 1,024.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!("descriptor limit stays at {:?}: {error}", limit.current);
    }
}

#[derive(Debug)]
struct HeldSession {
    blob: Vec<u8>,
    fds: Vec<PeerFd>,
}

struct Holder {
    listener: OwnedFd,
    _file: SocketFile,
    /// Connections; descriptors of VMMs may lie in their sockets.
    clients: Vec<PeerFd>,
    ports: BTreeMap<String, HeldSession>,
}

impl Holder {
    fn listen(path: &Path) -> Result<Self, VhostUserError> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(VhostUserError::io("making a socket"))?;
        let _file = SocketFile::bind(&listener, path, 0o600).map_err(|e| refused(path, e))?;
        listen(&listener, MAX_CLIENTS as i32)
            .map_err(VhostUserError::io("listening on the holder's socket"))?;
        Ok(Self { listener, _file, clients: Vec::new(), ports: BTreeMap::new() })
    }

    /// Waits for an event and handles it; false when `stop` was rung.
    fn serve_event(&mut self, stop: &Event) -> Result<bool, VhostUserError> {
        let mut set: Vec<PollFd<'_>> = [stop.as_fd(), self.listener.as_fd()]
            .into_iter()
            .chain(self.clients.iter().map(AsFd::as_fd))
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        retry(|| poll(&mut set, None::<&Timespec>)).map_err(VhostUserError::io("waiting"))?;
        let ready: Vec<bool> = set.iter().map(|p| !p.revents().is_empty()).collect();
        drop(set);
        if ready[0] {
            return Ok(false);
        }
        let clients = std::mem::take(&mut self.clients);
        for (client, ready) in clients.into_iter().zip(&ready[2..]) {
            if !ready || self.serve(&client) {
                self.clients.push(client);
            }
        }
        if ready[1] {
            self.admit();
        }
        Ok(true)
    }

    fn admit(&mut self) {
        let client = match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
        {
            Ok(client) => PeerFd::from(client),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
            Err(error) => return tracing::warn!("holder: no connection accepted: {error}"),
        };
        let ours = rustix::process::geteuid();
        match socket_peercred(&client) {
            Ok(peer) if peer.uid != ours => {
                tracing::warn!("holder: connection of user {} refused", peer.uid.as_raw());
            }
            Ok(_) if self.clients.len() < MAX_CLIENTS => self.clients.push(client),
            Ok(_) => tracing::warn!("holder: connection refused, {MAX_CLIENTS} are open"),
            Err(error) => tracing::warn!("holder: user of a connection unknown: {error}"),
        }
    }

    /// Serves one request; false when the connection is over.
    fn serve(&mut self, client: &PeerFd) -> bool {
        let packet = match receive(client.as_fd(), RecvFlags::DONTWAIT) {
            Ok(Received::Packet(packet)) => packet,
            Ok(Received::Nothing) => return true,
            Ok(Received::Closed) => return false,
            Err(error) => {
                tracing::warn!("{error}");
                return false;
            }
        };
        let sent = match self.answer(packet) {
            Ok(Answer { op, blob, fds }) => {
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                send(client.as_fd(), op, "", &blob, &fds)
            }
            Err(why) => send(client.as_fd(), Op::Refused, "", why.as_bytes(), &[]),
        };
        // A daemon that does not read its answers is as good as gone.
        sent.map_err(|error| tracing::warn!("{error}")).is_ok()
    }

    fn answer(&mut self, packet: Packet) -> Result<Answer<'_>, String> {
        let Packet { op, port, blob, fds } = packet;
        match op {
            Op::Put => {
                if port.is_empty() || port.contains('\n') {
                    return Err("a port's name is not empty and has one line".to_owned());
                }
                if !self.ports.contains_key(&port) && self.ports.len() >= MAX_PORTS {
                    return Err(format!("{MAX_PORTS} ports are kept already"));
                }
                self.ports.insert(port, HeldSession { blob, fds });
                Ok(Answer::done())
            }
            Op::Get => Ok(match self.ports.get(&port) {
                Some(held) => Answer { op: Op::Done, blob: held.blob.clone(), fds: &held.fds },
                None => Answer { op: Op::Nothing, ..Answer::done() },
            }),
            Op::Forget => {
                self.ports.remove(&port);
                Ok(Answer::done())
            }
            Op::List => Ok(Answer { blob: self.names(), ..Answer::done() }),
            Op::Done | Op::Nothing | Op::Refused => Err("an answer is not a request".to_owned()),
        }
    }

    /// Lists as many names as an answer holds: 1,024 of usual length, half of that of the longest.
    fn names(&self) -> Vec<u8> {
        let mut blob = Vec::new();
        for name in self.ports.keys() {
            if blob.len() + name.len() + 1 > MAX_BLOB_LEN_BYTES {
                break;
            }
            blob.extend_from_slice(name.as_bytes());
            blob.push(b'\n');
        }
        blob
    }
}

struct Answer<'h> {
    op: Op,
    blob: Vec<u8>,
    fds: &'h [PeerFd],
}

impl Answer<'_> {
    fn done() -> Self {
        Self { op: Op::Done, blob: Vec::new(), fds: &[] }
    }
}

#[cfg(test)]
mod tests;
