//! What is connected to what, for `status` commands.

use crate::connection::Phase;
use crate::engine::{Engine, Far};
use crate::table::Id;

/// What is behind a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// A program of the host.
    Host,
    /// The guest with this CID.
    Guest(u32),
    /// It has closed already.
    Gone,
}

/// One connection of a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// The guest's port number.
    pub guest_port: u32,
    /// What is at the other end.
    pub peer: Peer,
    /// The other end's port number.
    pub peer_port: u32,
    /// `connecting`, `open` or `closing`.
    pub state: &'static str,
    /// Payload bytes that the guest sent.
    pub bytes_from_guest: u64,
    /// Payload bytes that the guest received.
    pub bytes_to_guest: u64,
    /// Bytes of the guest that the other end has not taken.
    pub buffered_bytes: u64,
    /// Time since it was asked for.
    pub age_ms: u64,
}

impl Engine {
    /// A port's connections, in no order that means anything.
    pub(crate) fn connections(&self, port: Id) -> Vec<ConnectionInfo> {
        let ids = (0..self.endpoints.slots()).filter_map(|i| self.endpoints.id_at(i));
        ids.filter_map(|id| self.endpoints.get(id))
            .filter(|ep| ep.port == port)
            .map(|ep| {
                let key = ep.conn.key();
                ConnectionInfo {
                    guest_port: key.guest_port,
                    peer: match ep.far {
                        Far::Host(_) => Peer::Host,
                        Far::Guest(_) => Peer::Guest(key.peer_cid),
                        Far::Gone => Peer::Gone,
                    },
                    peer_port: key.peer_port,
                    state: match ep.conn.phase() {
                        Phase::Asking | Phase::Answering => "connecting",
                        Phase::Open => "open",
                        Phase::Closing => "closing",
                    },
                    bytes_from_guest: ep.bytes_from_guest,
                    bytes_to_guest: ep.bytes_to_guest,
                    buffered_bytes: ep.ring.len() as u64,
                    age_ms: self.now_ns.saturating_sub(ep.opened_ns) / 1_000_000,
                }
            })
            .collect()
    }
}
