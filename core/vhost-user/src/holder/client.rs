//! The daemon's side of the holder: a [`SessionStore`] over its socket.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use base::peer_fd::PeerFd;
use base::sync::lock;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, socket_with};

use super::protocol::{Op, Packet, Received, receive, send};
use crate::error::VhostUserError;
use crate::session_store::{SavedSession, SessionStore, file_key};

/// Time limit for a holder's answer. A holder does no work of its own, so only a machine in deep
/// trouble takes this long; a stopped holder must not stop a session.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Session store in a holder process. Connects when needed, and again after a failure: a holder
/// that was restarted gets the next save of each port.
#[derive(Debug)]
pub struct HolderStore {
    path: PathBuf,
    socket: Mutex<Option<OwnedFd>>,
}

impl HolderStore {
    /// Makes a store on the holder that listens on `path`; it need not be there yet.
    pub fn new(path: PathBuf) -> Self {
        Self { path, socket: Mutex::new(None) }
    }

    /// Lists the ports for which the holder has a session or a file.
    pub fn list(&self) -> Result<Vec<String>, VhostUserError> {
        let answer = self.ask(Op::List, "", &[], &[])?;
        let text = String::from_utf8(answer.blob)
            .map_err(|_| VhostUserError::Holder("a list that is not UTF-8".to_owned()))?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// Sends one request and returns its answer. A connection that fails is tried once more, fresh:
    /// the holder may have been restarted since.
    fn ask(
        &self,
        op: Op,
        port: &str,
        blob: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<Packet, VhostUserError> {
        let mut slot = lock(&self.socket);
        let fresh = slot.is_none();
        let socket = match slot.take() {
            Some(socket) => socket,
            None => dial(&self.path)?,
        };
        let answer = match exchange(socket.as_fd(), op, port, blob, fds) {
            Ok(answer) => {
                *slot = Some(socket);
                answer
            }
            Err(error) if fresh => return Err(error),
            Err(_) => {
                let socket = dial(&self.path)?;
                let answer = exchange(socket.as_fd(), op, port, blob, fds)?;
                *slot = Some(socket);
                answer
            }
        };
        if answer.op == Op::Refused {
            let why = String::from_utf8_lossy(&answer.blob).into_owned();
            return Err(VhostUserError::Holder(format!("{port}: {why}")));
        }
        Ok(answer)
    }
}

fn dial(path: &Path) -> Result<OwnedFd, VhostUserError> {
    let failed = |reason: String| VhostUserError::Socket {
        path: path.display().to_string(),
        reason: format!("holder: {reason}"),
    };
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(VhostUserError::io("making a socket"))?;
    for direction in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(&socket, direction, Some(ANSWER_LIMIT))
            .map_err(VhostUserError::io("limiting the holder's time"))?;
    }
    base::socket::connect(&socket, path).map_err(|e| failed(e.to_string()))?;
    let peer = socket_peercred(&socket).map_err(VhostUserError::io("asking who the holder is"))?;
    if peer.uid != rustix::process::geteuid() {
        return Err(failed(format!("it runs as user {}, not as ours", peer.uid.as_raw())));
    }
    Ok(socket)
}

fn exchange(
    socket: BorrowedFd<'_>,
    op: Op,
    port: &str,
    blob: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<Packet, VhostUserError> {
    send(socket, op, port, blob, fds)?;
    match receive(socket, RecvFlags::empty())? {
        Received::Packet(packet) => Ok(packet),
        Received::Closed => Err(VhostUserError::Holder("it closed the connection".to_owned())),
        Received::Nothing => {
            let limit = ANSWER_LIMIT.as_millis();
            Err(VhostUserError::Holder(format!("no answer within {limit} ms")))
        }
    }
}

impl SessionStore for HolderStore {
    fn is_persistent(&self) -> bool {
        true
    }

    fn save(
        &self,
        port: &str,
        state: &SavedSession,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), VhostUserError> {
        let blob = serde_json::to_vec(state)
            .map_err(|e| VhostUserError::Holder(format!("{port}: state not written: {e}")))?;
        self.ask(Op::Put, port, &blob, fds).map(drop)
    }

    fn load(&self, port: &str) -> Result<Option<(SavedSession, Vec<PeerFd>)>, VhostUserError> {
        let answer = self.ask(Op::Get, port, &[], &[])?;
        if answer.op == Op::Nothing {
            return Ok(None);
        }
        let state = serde_json::from_slice(&answer.blob).map_err(|e| {
            VhostUserError::Holder(format!("{port}: saved state not readable: {e}"))
        })?;
        Ok(Some((state, answer.fds)))
    }

    fn forget(&self, port: &str) -> Result<(), VhostUserError> {
        self.ask(Op::Forget, port, &[], &[]).map(drop)
    }

    fn save_file(&self, port: &str, file: BorrowedFd<'_>) -> Result<(), VhostUserError> {
        self.ask(Op::Put, &file_key(port), &[], &[file]).map(drop)
    }

    fn load_file(&self, port: &str) -> Result<Option<OwnedFd>, VhostUserError> {
        let answer = self.ask(Op::Get, &file_key(port), &[], &[])?;
        Ok(answer.fds.into_iter().next().map(PeerFd::into_checked))
    }
}
