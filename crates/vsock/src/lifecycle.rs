//! Opening and ending of connections.

use std::os::fd::{AsFd, OwnedFd};

use crate::connection::{Connection, NEVER_NS};
use crate::endpoint::{Endpoint, FarEnd, HostEnd};
use crate::engine::VsockEngine;
use crate::limits::{
    CONNECT_TIMEOUT_NS, DRAIN_TIMEOUT_NS, HIGHEST_PRIVILEGED_PORT, MAX_STRAY_RESETS,
    SCAN_INTERVAL_NS,
};
use crate::packet::{ConnectionKey, HOST_CID, Header, SHUT_BOTH, TYPE_STREAM};
use crate::port::HostSocket;
use crate::slab::{EpollTag, Links, SlabId};

/// Highest guest ports, of which the next clients of privileged services take the first free one.
const CLIENT_PORTS: u32 = 4;

impl VsockEngine {
    /// Opens a connection that a guest asks for. Every refusal is a reset.
    pub(crate) fn open_from_guest(&mut self, port: SlabId, request: &Header) {
        let opened = if request.key.peer_cid == HOST_CID {
            self.open_to_host(port, request)
        } else {
            self.open_to_guest(port, request)
        };
        if let Some(p) = self.ports.get(port) {
            if opened.is_some() {
                p.spec.stats.opened_by_guest.add(1);
                return;
            }
            p.spec.stats.refused.add(1);
        }
        self.queue_stray_reset(port, request.key, TYPE_STREAM);
    }

    /// Opens a connection of a guest to the host; none when refused.
    pub(crate) fn open_to_host(&mut self, port: SlabId, request: &Header) -> Option<SlabId> {
        let p = self.ports.get(port)?;
        if !p.has_room(false) {
            return None;
        }
        let HostSocket { fd, handover } = p.spec.open(request.key)?;
        let id = self.connect_host(port, request, fd)?;
        if let Some((sink, other)) = handover {
            sink(other);
        }
        Some(id)
    }

    /// Opens a connection of the guest to the socket `fd`, established from the start.
    pub(crate) fn connect_host(
        &mut self,
        port: SlabId,
        request: &Header,
        fd: OwnedFd,
    ) -> Option<SlabId> {
        let p = self.ports.get(port)?;
        let conn = Connection::incoming(request, p.spec.buffer_bytes, NEVER_NS);
        let id = self.insert(port, conn, FarEnd::Gone)?;
        if !self.attach_host(id, fd, false, false) {
            self.remove_connection(id);
            return None;
        }
        self.endpoints.get_mut(id)?.conn.accept();
        self.settle_half_open(id);
        self.enqueue(id);
        Some(id)
    }

    fn open_to_guest(&mut self, port: SlabId, request: &Header) -> Option<SlabId> {
        let p = self.ports.get(port)?;
        let peer = *self.by_cid.get(&request.key.peer_cid).filter(|_| self.guest_to_guest)?;
        let peer_key = ConnectionKey {
            guest_port: request.key.peer_port,
            peer_cid: p.spec.cid,
            peer_port: request.key.guest_port,
        };
        let q = self.ports.get(peer)?;
        let possible = peer != port
            && p.has_room(true)
            && q.has_room_for(p.spec.cid)
            && q.is_running()
            && !q.keys.contains_key(&peer_key);
        if !possible {
            return None;
        }
        let deadline_ns = self.now_ns.saturating_add(CONNECT_TIMEOUT_NS);
        let near = Connection::incoming(request, p.spec.buffer_bytes, deadline_ns);
        let away = Connection::outgoing(peer_key, q.spec.buffer_bytes, deadline_ns);
        q.spec.stats.opened_to_guest.add(1);
        let id = self.insert(port, near, FarEnd::Gone)?;
        let Some(peer_id) = self.insert(peer, away, FarEnd::Guest(id)) else {
            self.remove_connection(id);
            return None;
        };
        self.endpoints.get_mut(id)?.far = FarEnd::Guest(peer_id);
        self.note_deadline(deadline_ns);
        self.enqueue(peer_id);
        Some(id)
    }

    /// Opens a connection of a host program to `guest_port`. False when refused: the socket is
    /// closed.
    pub(crate) fn open_from_host(&mut self, port: SlabId, fd: OwnedFd, guest_port: u32) -> bool {
        let Some(p) = self.ports.get_mut(port).filter(|p| p.has_room(true) && p.is_running())
        else {
            return false;
        };
        let key = p.free_host_port(guest_port);
        let deadline_ns = self.now_ns.saturating_add(CONNECT_TIMEOUT_NS);
        let conn = Connection::outgoing(key, p.spec.buffer_bytes, deadline_ns);
        p.spec.stats.opened_to_guest.add(1);
        let Some(id) = self.insert(port, conn, FarEnd::Gone) else { return false };
        if !self.attach_host(id, fd, true, true) {
            self.remove_connection(id);
            return false;
        }
        self.note_deadline(deadline_ns);
        self.enqueue(id);
        true
    }

    /// Puts the Unix socket behind a connection. `known`: it is in the epoll set already.
    fn attach_host(&mut self, id: SlabId, fd: OwnedFd, known: bool, awaits_ok: bool) -> bool {
        if self.watch(fd.as_fd(), EpollTag::Endpoint(id), known).is_err() {
            return false;
        }
        if let Some(ep) = self.endpoints.get_mut(id) {
            ep.far = FarEnd::Host(HostEnd {
                fd,
                readable: false,
                writable: true,
                ending: false,
                hung_up: false,
                awaits_ok,
            });
        }
        true
    }

    fn insert(&mut self, port: SlabId, conn: Connection, far: FarEnd) -> Option<SlabId> {
        if !self.has_buffer_for(port) {
            return None;
        }
        let requester_cid = match far {
            FarEnd::Guest(near) => self.cid_of(near),
            FarEnd::Host(_) | FarEnd::Gone => None,
        };
        let p = self.ports.get_mut(port)?;
        let len = u64::from(p.spec.buffer_bytes);
        let key = conn.key();
        let half = conn.is_half_open();
        let id = self.endpoints.insert(Endpoint {
            port,
            conn,
            far,
            ring: self.buffers.take(len),
            links: Links::default(),
            is_released: false,
            counted_half_open: half,
            requester_cid,
            opened_ns: self.now_ns,
            bytes_from_guest: 0,
            bytes_to_guest: 0,
        });
        p.keys.insert(key, id);
        p.open += 1;
        p.half_open += u32::from(half);
        if let Some(cid) = requester_cid {
            let asked = p.peer_usage.entry(cid).or_default();
            asked.open += 1;
            asked.half_open += u32::from(half);
        }
        p.count();
        Some(id)
    }

    /// Whether a port may have one more buffer: within its share of the domain's always, beyond it
    /// as long as that leaves every other port its own share.
    fn has_buffer_for(&self, port: SlabId) -> bool {
        let Some(p) = self.ports.get(port) else { return false };
        let share = self.buffers.max_bytes / self.ports.len().max(1) as u64;
        let wanted = p.buffer_bytes() + u64::from(p.spec.buffer_bytes);
        if wanted <= share {
            return true;
        }
        let others = (0..self.ports.slots())
            .filter_map(|index| self.ports.id_at(index).filter(|id| *id != port))
            .filter_map(|id| self.ports.get(id))
            .map(|other| other.buffer_bytes().max(share))
            .sum::<u64>();
        others.saturating_add(wanted) <= self.buffers.max_bytes
    }

    /// Resets old clients of a guest that goes on after a restart of the daemon or a pause. Its
    /// clients of privileged services, which choose their own ports from the highest down, may wait
    /// for an answer that never comes: they get resets for connections that we do not know.
    pub(crate) fn reset_old_clients(&mut self, id: SlabId) {
        let Some(port) = self.ports.get(id) else { return };
        let lowest = HIGHEST_PRIVILEGED_PORT + 1 - CLIENT_PORTS;
        let services = port.spec.services.iter().filter(|service| service.privileged);
        let unknown: Vec<ConnectionKey> = services
            .flat_map(|service| {
                (lowest..=HIGHEST_PRIVILEGED_PORT).map(|guest_port| ConnectionKey {
                    guest_port,
                    peer_cid: HOST_CID,
                    peer_port: service.port,
                })
            })
            .filter(|key| !port.keys.contains_key(key))
            .collect();
        unknown.into_iter().for_each(|key| self.queue_stray_reset(id, key, TYPE_STREAM));
    }

    /// Queues a reset for a packet of no connection.
    pub(crate) fn queue_stray_reset(&mut self, port: SlabId, key: ConnectionKey, kind: u16) {
        let Some(p) = self.ports.get_mut(port) else { return };
        if p.stray_resets.len() < MAX_STRAY_RESETS {
            p.stray_resets.push_back((key, kind));
        } else {
            p.spec.stats.resets_dropped.add(1);
        }
    }

    /// Takes a connection that is no longer half-open out of that count.
    pub(crate) fn settle_half_open(&mut self, id: SlabId) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        if !ep.counted_half_open || (ep.conn.is_half_open() && !ep.is_released) {
            return;
        }
        ep.counted_half_open = false;
        let requester_cid = ep.requester_cid;
        if let Some(p) = self.ports.get_mut(ep.port) {
            p.half_open -= 1;
            p.uncount_peer(requester_cid, |asked| asked.half_open -= 1);
            p.count();
        }
    }

    /// Puts a connection with something for its guest into the ready list.
    pub(crate) fn enqueue(&mut self, id: SlabId) {
        let Some(ep) = self.endpoints.get(id) else { return };
        if let Some(p) = self.ports.get_mut(ep.port).filter(|_| !ep.is_released) {
            p.ready.push_back(&mut self.endpoints, id);
        }
    }

    /// Ends a connection, both ways, without waiting for bytes.
    pub(crate) fn reset(&mut self, id: SlabId) {
        let far = self.abort_side(id);
        if let FarEnd::Guest(peer) = far {
            self.abort_side(peer);
            self.release_or_reset(peer);
        }
        self.release_or_reset(id);
    }

    /// Ends a connection that the guest reset.
    pub(crate) fn reset_by_guest(&mut self, id: SlabId) {
        if let FarEnd::Guest(peer) = self.abort_side(id) {
            self.abort_side(peer);
            self.release_or_reset(peer);
        }
        self.release(id);
    }

    /// Aborts one side of a connection. Returns its far end, which is detached.
    fn abort_side(&mut self, id: SlabId) -> FarEnd {
        let Some(ep) = self.endpoints.get_mut(id) else { return FarEnd::Gone };
        ep.conn.abort();
        ep.ring.clear();
        let far = std::mem::replace(&mut ep.far, FarEnd::Gone);
        self.settle_half_open(id);
        far
    }

    fn release_or_reset(&mut self, id: SlabId) {
        let Some(ep) = self.endpoints.get(id) else { return };
        if ep.is_released || ep.conn.next_op(true).is_none() {
            self.release(id);
        } else {
            self.enqueue(id);
        }
    }

    /// Releases a connection that the guest has forgotten: its key is free.
    pub(crate) fn release(&mut self, id: SlabId) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        ep.is_released = true;
        let (port, key) = (ep.port, ep.conn.key());
        if let Some(p) = self.ports.get_mut(port) {
            p.ready.remove(&mut self.endpoints, id);
            if p.keys.get(&key) == Some(&id) {
                p.keys.remove(&key);
            }
        }
        self.settle_half_open(id);
        self.try_free(id);
    }

    /// Frees a connection that the guest has forgotten, unless the far end is still to get bytes.
    pub(crate) fn try_free(&mut self, id: SlabId) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        if !ep.is_released {
            return;
        }
        if !ep.ring.is_empty() && !matches!(ep.far, FarEnd::Gone) {
            let at_ns = self.now_ns.saturating_add(DRAIN_TIMEOUT_NS);
            ep.conn.set_deadline_ns(at_ns);
            self.note_deadline(at_ns);
            return;
        }
        let far = std::mem::replace(&mut ep.far, FarEnd::Gone);
        self.remove_connection(id);
        if let FarEnd::Guest(peer) = far
            && let Some(other) = self.endpoints.get_mut(peer)
        {
            other.far = FarEnd::Gone;
            other.conn.far_shutdown(SHUT_BOTH);
            if other.is_released {
                self.try_free(peer);
            } else {
                self.enqueue(peer);
            }
        }
    }

    /// Takes a connection out of every table.
    fn remove_connection(&mut self, id: SlabId) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        ep.is_released = true;
        let (port, key, requester_cid) = (ep.port, ep.conn.key(), ep.requester_cid);
        self.settle_half_open(id);
        if let Some(p) = self.ports.get_mut(port) {
            p.ready.remove(&mut self.endpoints, id);
            if p.keys.get(&key) == Some(&id) {
                p.keys.remove(&key);
            }
            p.open -= 1;
            p.uncount_peer(requester_cid, |asked| asked.open -= 1);
            p.count();
        }
        if let Some(ep) = self.endpoints.remove(id) {
            self.buffers.give_back(ep.ring);
        }
    }

    /// Ends all connections of a port whose guest knows none of them (any more).
    pub(crate) fn drop_connections(&mut self, port: SlabId) {
        for index in 0..self.endpoints.slots() {
            let Some(id) = self.endpoints.id_at(index) else { continue };
            if self.endpoints.get(id).is_some_and(|ep| ep.port == port) {
                self.reset_by_guest(id);
            }
        }
        if let Some(p) = self.ports.get_mut(port) {
            p.stray_resets.clear();
            p.is_starved = false;
            p.spec
                .services
                .iter()
                .filter_map(|s| s.on_guest_reset.as_ref())
                .for_each(|gone| gone());
        }
    }

    pub(crate) fn drop_handshakes(&mut self, port: SlabId) {
        for index in 0..self.handshakes.slots() {
            let Some(id) = self.handshakes.id_at(index) else { continue };
            if self.handshakes.get(id).is_some_and(|h| h.port == port) {
                self.end_handshake(id, true);
            }
        }
    }

    /// Ends all connections and handshakes that are past their deadlines, and finds the next
    /// deadline.
    pub(crate) fn expire_overdue(&mut self) {
        let mut next_ns = NEVER_NS;
        // Deadlines that are noted while connections expire count as well.
        self.next_deadline_ns = NEVER_NS;
        for index in 0..self.endpoints.slots() {
            let Some(id) = self.endpoints.id_at(index) else { continue };
            let at_ns = self.endpoints.get(id).map_or(NEVER_NS, |ep| ep.conn.deadline_ns());
            if at_ns <= self.now_ns {
                self.expire(id);
            } else {
                next_ns = next_ns.min(at_ns);
            }
        }
        for index in 0..self.handshakes.slots() {
            let Some(id) = self.handshakes.id_at(index) else { continue };
            let at_ns = self.handshakes.get(id).map_or(NEVER_NS, |h| h.deadline_ns);
            if at_ns <= self.now_ns {
                self.end_handshake(id, true);
            } else {
                next_ns = next_ns.min(at_ns);
            }
        }
        for index in 0..self.ports.slots() {
            let port = self.ports.id_at(index).and_then(|id| self.ports.get(id));
            if let Some(p) = port.filter(|p| p.accept_after_ns > self.now_ns) {
                next_ns = next_ns.min(p.accept_after_ns);
            }
        }
        let soonest_ns = self.now_ns.saturating_add(SCAN_INTERVAL_NS);
        if next_ns != NEVER_NS {
            self.note_deadline(next_ns.max(soonest_ns));
        }
    }

    fn expire(&mut self, id: SlabId) {
        if let Some(p) = self.endpoints.get(id).and_then(|ep| self.ports.get(ep.port)) {
            p.spec.stats.timeouts.add(1);
        }
        self.reset(id);
    }
}
