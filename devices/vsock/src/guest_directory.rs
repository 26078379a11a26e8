//! Guests of a domain by their CIDs, and opening of connections between them.

use std::collections::HashMap;

use crate::connection::Connection;
use crate::connection_table::ConnectionTable;
use crate::endpoint::FarEnd;
use crate::limits::CONNECT_TIMEOUT_NS;
use crate::packet::{ConnectionKey, Header};
use crate::slab::SlabId;

/// Guests of a domain, and whether they may connect to each other.
#[derive(Debug)]
pub(crate) struct GuestDirectory {
    pub guest_to_guest: bool,
    by_cid: HashMap<u32, SlabId>,
}

impl GuestDirectory {
    pub fn new(guest_to_guest: bool) -> Self {
        Self { guest_to_guest, by_cid: HashMap::new() }
    }

    pub fn insert(&mut self, cid: u32, port: SlabId) {
        self.by_cid.insert(cid, port);
    }

    pub fn remove(&mut self, cid: u32) {
        self.by_cid.remove(&cid);
    }

    /// Opens a connection of one guest to another; none when refused.
    pub fn open(
        &self,
        table: &mut ConnectionTable,
        port: SlabId,
        request: &Header,
    ) -> Option<SlabId> {
        let p = table.ports.get(port)?;
        let peer = *self.by_cid.get(&request.key.peer_cid).filter(|_| self.guest_to_guest)?;
        let peer_key = ConnectionKey {
            guest_port: request.key.peer_port,
            peer_cid: p.spec.cid,
            peer_port: request.key.guest_port,
        };
        let q = table.ports.get(peer)?;
        let possible = peer != port
            && p.has_room(true)
            && q.has_room_for(p.spec.cid)
            && q.is_running()
            && !q.keys.contains_key(&peer_key);
        if !possible {
            return None;
        }
        let deadline_ns = table.timer.after_ns(CONNECT_TIMEOUT_NS);
        let near = Connection::incoming(request, p.spec.buffer_bytes, deadline_ns);
        let away = Connection::outgoing(peer_key, q.spec.buffer_bytes, deadline_ns);
        q.spec.stats.opened_to_guest.add(1);
        let id = table.insert(port, near, FarEnd::Gone)?;
        let Some(peer_id) = table.insert(peer, away, FarEnd::Guest(id)) else {
            table.remove(id);
            return None;
        };
        table.endpoints.get_mut(id)?.far = FarEnd::Guest(peer_id);
        table.timer.note(deadline_ns);
        table.enqueue(peer_id);
        Some(id)
    }
}
