//! Connections in the engine's table: state towards the guest, buffer, far end.

use std::os::fd::OwnedFd;

use crate::byte_ring::ByteRing;
use crate::connection::Connection;
use crate::slab::{Linked, Links, SlabId};

/// Unix socket behind a connection.
#[derive(Debug)]
pub(crate) struct HostEnd {
    pub fd: OwnedFd,
    /// Whether the socket may have bytes, or their end, for us.
    pub readable: bool,
    /// Whether the socket may take bytes.
    pub writable: bool,
    /// Whether the program's bytes end: the rest must be read to its end, since no event will come.
    pub ending: bool,
    /// Whether the program has closed both directions.
    pub hung_up: bool,
    /// Whether the program opened the connection and waits for `OK`.
    pub awaits_ok: bool,
}

/// Far end of a connection, behind the device.
#[derive(Debug)]
pub(crate) enum FarEnd {
    /// Socket of a host program.
    Host(HostEnd),
    /// Connection of another guest.
    Guest(SlabId),
    /// No far end any more.
    Gone,
}

/// One connection towards a guest, its buffer and its far end.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub port: SlabId,
    pub conn: Connection,
    pub far: FarEnd,
    /// Bytes of the guest for the far end.
    pub ring: ByteRing,
    pub links: Links,
    /// Whether the guest has forgotten the connection; only bytes in `ring` may keep it.
    pub is_released: bool,
    pub counted_half_open: bool,
    /// CID of the guest that asked for the connection, on the side of the guest that was asked.
    pub requester_cid: Option<u32>,
    pub opened_ns: u64,
    pub bytes_from_guest: u64,
    pub bytes_to_guest: u64,
}

impl Linked for Endpoint {
    fn links(&mut self) -> &mut Links {
        &mut self.links
    }
}

/// Unix connection that has not sent its `CONNECT` line.
#[derive(Debug)]
pub(crate) struct Handshake {
    pub fd: OwnedFd,
    pub port: SlabId,
    pub deadline_ns: u64,
}
