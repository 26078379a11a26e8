//! List of connections, for `status` commands.

use crate::connection::Phase;
use crate::endpoint::{Endpoint, FarEnd};

/// Far end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// Program of the host.
    Host,
    /// The guest with this CID.
    Guest(u32),
    /// Far end that has closed already.
    Gone,
}

/// Connection of a port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// Port number of the guest.
    pub guest_port: u32,
    /// Far end.
    pub peer: Peer,
    /// Port number of the far end.
    pub peer_port: u32,
    /// State: `connecting`, `open` or `closing`.
    pub state: &'static str,
    /// Payload bytes that the guest sent.
    pub bytes_from_guest: u64,
    /// Payload bytes that the guest received.
    pub bytes_to_guest: u64,
    /// Bytes of the guest that the other end has not taken.
    pub buffered_bytes: u64,
    /// Time since the connection was asked for.
    pub age_ms: u64,
}

impl ConnectionInfo {
    /// Describes a connection.
    pub(crate) fn new(ep: &Endpoint, now_ns: u64) -> Self {
        let key = ep.conn.key();
        Self {
            guest_port: key.guest_port,
            peer: match ep.far {
                FarEnd::Host(_) => Peer::Host,
                FarEnd::Guest(_) => Peer::Guest(key.peer_cid),
                FarEnd::Gone => Peer::Gone,
            },
            peer_port: key.peer_port,
            state: match ep.conn.phase() {
                Phase::Requesting | Phase::Responding => "connecting",
                Phase::Open => "open",
                Phase::Closing => "closing",
            },
            bytes_from_guest: ep.bytes_from_guest,
            bytes_to_guest: ep.bytes_to_guest,
            buffered_bytes: ep.ring.len() as u64,
            age_ms: now_ns.saturating_sub(ep.opened_ns) / 1_000_000,
        }
    }
}
