//! Birth and death of connections.

use crate::buffer::ByteRing;
use crate::connection::{Connection, NEVER_NS};
use crate::engine::{Asked, Endpoint, Engine, Far, HostEnd, Port};
use crate::limits::{
    CONNECT_TIMEOUT_NS, DRAIN_TIMEOUT_NS, FIRST_HOST_PORT, MAX_STRAYS, SCAN_INTERVAL_NS,
    SPARE_BUFFERS,
};
use crate::packet::{HOST_CID, Header, Key, SHUT_BOTH, TYPE_STREAM};
use crate::table::{Id, Links, Tag};
use std::os::fd::{AsFd, OwnedFd};

impl Port {
    pub(crate) fn has_room(&self, half_open: bool) -> bool {
        self.open < self.spec.max_connections
            && (!half_open || self.half_open < self.spec.max_half_open)
    }

    /// Whether the guest `cid` may have one more connection here. It may have as many as it leaves
    /// free, so that there is always something left for the next one: a single guest gets half of
    /// the port's limits, two a third each.
    fn has_room_for(&self, cid: u32) -> bool {
        let asked = self.asked_by.get(&cid).copied().unwrap_or_default();
        asked.open < self.spec.max_connections.saturating_sub(self.open)
            && asked.half_open < self.spec.max_half_open.saturating_sub(self.half_open)
    }

    /// Bytes of its connections' buffers.
    fn buffer_bytes(&self) -> u64 {
        u64::from(self.open) * u64::from(self.spec.buffer_bytes)
    }

    /// One connection less that another guest asked for, or one half-open one.
    fn uncount_asked(&mut self, by: Option<u32>, uncount: impl FnOnce(&mut Asked)) {
        let Some(cid) = by else { return };
        if let Some(asked) = self.asked_by.get_mut(&cid) {
            uncount(asked);
            if *asked == Asked::default() {
                self.asked_by.remove(&cid);
            }
        }
    }

    fn count(&self) {
        self.spec.stats.connections.set(u64::from(self.open));
        self.spec.stats.half_open.set(u64::from(self.half_open));
    }

    /// A number for the host's side of a connection to `guest_port` that is not in use.
    fn free_host_port(&mut self, guest_port: u32) -> Key {
        loop {
            let peer_port = self.next_host_port;
            self.next_host_port = FIRST_HOST_PORT | (peer_port.wrapping_add(1) & !(3 << 30));
            let key = Key { guest_port, peer_cid: HOST_CID, peer_port };
            // Ends: there are fewer connections than numbers.
            if !self.keys.contains_key(&key) {
                return key;
            }
        }
    }
}

impl Engine {
    /// A guest asks for a connection. Every refusal is a reset.
    pub(crate) fn open_from_guest(&mut self, port: Id, request: &Header) {
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
        self.stray_reset(port, request.key, TYPE_STREAM);
    }

    /// A connection of the guest to what is behind `fd`, open from the start.
    pub(crate) fn connect_host(&mut self, port: Id, request: &Header, fd: OwnedFd) -> Option<Id> {
        let p = self.ports.get(port)?;
        let conn = Connection::incoming(request, p.spec.buffer_bytes, NEVER_NS);
        let id = self.insert(port, conn, Far::Gone)?;
        if !self.attach_host(id, fd, false, false) {
            self.forget(id);
            return None;
        }
        self.endpoints.get_mut(id)?.conn.accept();
        self.settle_half_open(id);
        self.enqueue(id);
        Some(id)
    }

    fn open_to_guest(&mut self, port: Id, request: &Header) -> Option<Id> {
        let p = self.ports.get(port)?;
        let peer = *self.by_cid.get(&request.key.peer_cid).filter(|_| self.guest_to_guest)?;
        let peer_key = Key {
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
        let id = self.insert(port, near, Far::Gone)?;
        let Some(peer_id) = self.insert(peer, away, Far::Guest(id)) else {
            self.forget(id);
            return None;
        };
        self.endpoints.get_mut(id)?.far = Far::Guest(peer_id);
        self.note_deadline(deadline_ns);
        self.enqueue(peer_id);
        Some(id)
    }

    /// A host program asks for `guest_port`. False: refused, the socket is closed.
    pub(crate) fn open_from_host(&mut self, port: Id, fd: OwnedFd, guest_port: u32) -> bool {
        let Some(p) = self.ports.get_mut(port).filter(|p| p.has_room(true) && p.is_running())
        else {
            return false;
        };
        let key = p.free_host_port(guest_port);
        let deadline_ns = self.now_ns.saturating_add(CONNECT_TIMEOUT_NS);
        let conn = Connection::outgoing(key, p.spec.buffer_bytes, deadline_ns);
        p.spec.stats.opened_to_guest.add(1);
        let Some(id) = self.insert(port, conn, Far::Gone) else { return false };
        if !self.attach_host(id, fd, true, true) {
            self.forget(id);
            return false;
        }
        self.note_deadline(deadline_ns);
        self.enqueue(id);
        true
    }

    /// Puts the Unix socket behind a connection. `known`: it is in the epoll set already.
    fn attach_host(&mut self, id: Id, fd: OwnedFd, known: bool, awaits_ok: bool) -> bool {
        if self.watch(fd.as_fd(), Tag::Endpoint(id), known).is_err() {
            return false;
        }
        if let Some(ep) = self.endpoints.get_mut(id) {
            ep.far = Far::Host(HostEnd {
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

    fn insert(&mut self, port: Id, conn: Connection, far: Far) -> Option<Id> {
        if !self.has_buffer_for(port) {
            return None;
        }
        let asked_by = match far {
            Far::Guest(near) => self.cid_of(near),
            Far::Host(_) | Far::Gone => None,
        };
        let p = self.ports.get_mut(port)?;
        let len = u64::from(p.spec.buffer_bytes);
        let spare = self.spare.pop().filter(|r| r.capacity() as u64 == len);
        let key = conn.key();
        let half = conn.is_half_open();
        let id = self.endpoints.insert(Endpoint {
            port,
            conn,
            far,
            ring: spare.unwrap_or_else(|| ByteRing::new(len as usize)),
            links: Links::default(),
            guest_done: false,
            counted_half_open: half,
            asked_by,
            opened_ns: self.now_ns,
            bytes_from_guest: 0,
            bytes_to_guest: 0,
        });
        self.buffer_bytes += len;
        p.keys.insert(key, id);
        p.open += 1;
        p.half_open += u32::from(half);
        if let Some(cid) = asked_by {
            let asked = p.asked_by.entry(cid).or_default();
            asked.open += 1;
            asked.half_open += u32::from(half);
        }
        p.count();
        Some(id)
    }

    /// Whether a port may have one more buffer: within its share of the domain's always, beyond it
    /// as long as that leaves every other port its own share.
    fn has_buffer_for(&self, port: Id) -> bool {
        let Some(p) = self.ports.get(port) else { return false };
        let share = self.max_buffer_bytes / self.ports.len().max(1) as u64;
        let wanted = p.buffer_bytes() + u64::from(p.spec.buffer_bytes);
        if wanted <= share {
            return true;
        }
        let others = (0..self.ports.slots())
            .filter_map(|index| self.ports.id_at(index).filter(|id| *id != port))
            .filter_map(|id| self.ports.get(id))
            .map(|other| other.buffer_bytes().max(share))
            .sum::<u64>();
        others.saturating_add(wanted) <= self.max_buffer_bytes
    }

    /// Owes the guest a reset for a packet of no connection.
    pub(crate) fn stray_reset(&mut self, port: Id, key: Key, kind: u16) {
        let Some(p) = self.ports.get_mut(port) else { return };
        if p.strays.len() < MAX_STRAYS {
            p.strays.push_back((key, kind));
        } else {
            p.spec.stats.resets_dropped.add(1);
        }
    }

    /// The connection is no longer half-open: takes it out of that count.
    pub(crate) fn settle_half_open(&mut self, id: Id) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        if !ep.counted_half_open || (ep.conn.is_half_open() && !ep.guest_done) {
            return;
        }
        ep.counted_half_open = false;
        let asked_by = ep.asked_by;
        if let Some(p) = self.ports.get_mut(ep.port) {
            p.half_open -= 1;
            p.uncount_asked(asked_by, |asked| asked.half_open -= 1);
            p.count();
        }
    }

    /// The connection has something for its guest.
    pub(crate) fn enqueue(&mut self, id: Id) {
        let Some(ep) = self.endpoints.get(id) else { return };
        if let Some(p) = self.ports.get_mut(ep.port).filter(|_| !ep.guest_done) {
            p.ready.push_back(&mut self.endpoints, id);
        }
    }

    /// We end a connection, both ways, without waiting for bytes.
    pub(crate) fn reset(&mut self, id: Id) {
        let far = self.cut(id);
        if let Far::Guest(peer) = far {
            self.cut(peer);
            self.close_or_tell(peer);
        }
        self.close_or_tell(id);
    }

    /// The guest ended a connection.
    pub(crate) fn reset_by_guest(&mut self, id: Id) {
        if let Far::Guest(peer) = self.cut(id) {
            self.cut(peer);
            self.close_or_tell(peer);
        }
        self.guest_done(id);
    }

    /// Aborts one side; its far end is let go of (a Unix socket closes here) and returned.
    fn cut(&mut self, id: Id) -> Far {
        let Some(ep) = self.endpoints.get_mut(id) else { return Far::Gone };
        ep.conn.abort();
        ep.ring.clear();
        let far = std::mem::replace(&mut ep.far, Far::Gone);
        self.settle_half_open(id);
        far
    }

    fn close_or_tell(&mut self, id: Id) {
        let Some(ep) = self.endpoints.get(id) else { return };
        if ep.guest_done || ep.conn.next_op(true).is_none() {
            self.guest_done(id);
        } else {
            self.enqueue(id);
        }
    }

    /// The guest knows the connection no more: its name is free.
    pub(crate) fn guest_done(&mut self, id: Id) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        ep.guest_done = true;
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
    pub(crate) fn try_free(&mut self, id: Id) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        if !ep.guest_done {
            return;
        }
        if !ep.ring.is_empty() && !matches!(ep.far, Far::Gone) {
            let at_ns = self.now_ns.saturating_add(DRAIN_TIMEOUT_NS);
            ep.conn.set_deadline_ns(at_ns);
            self.note_deadline(at_ns);
            return;
        }
        let far = std::mem::replace(&mut ep.far, Far::Gone);
        self.forget(id);
        if let Far::Guest(peer) = far
            && let Some(other) = self.endpoints.get_mut(peer)
        {
            other.far = Far::Gone;
            other.conn.far_shutdown(SHUT_BOTH);
            if other.guest_done {
                self.try_free(peer);
            } else {
                self.enqueue(peer);
            }
        }
    }

    /// Takes a connection out of every table.
    fn forget(&mut self, id: Id) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        ep.guest_done = true;
        let (port, key, asked_by) = (ep.port, ep.conn.key(), ep.asked_by);
        self.settle_half_open(id);
        if let Some(p) = self.ports.get_mut(port) {
            p.ready.remove(&mut self.endpoints, id);
            if p.keys.get(&key) == Some(&id) {
                p.keys.remove(&key);
            }
            p.open -= 1;
            p.uncount_asked(asked_by, |asked| asked.open -= 1);
            p.count();
        }
        if let Some(mut ep) = self.endpoints.remove(id) {
            self.buffer_bytes -= ep.ring.capacity() as u64;
            if self.spare.len() < SPARE_BUFFERS {
                ep.ring.clear();
                self.spare.push(ep.ring);
            }
        }
    }

    /// Ends all connections of a port whose guest knows none of them (any more).
    pub(crate) fn drop_connections(&mut self, port: Id) {
        for index in 0..self.endpoints.slots() {
            let Some(id) = self.endpoints.id_at(index) else { continue };
            if self.endpoints.get(id).is_some_and(|ep| ep.port == port) {
                self.reset_by_guest(id);
            }
        }
        if let Some(p) = self.ports.get_mut(port) {
            p.strays.clear();
            p.starved = false;
            p.spec.services.iter().filter_map(|s| s.gone.as_ref()).for_each(|gone| gone());
        }
    }

    pub(crate) fn drop_handshakes(&mut self, port: Id) {
        for index in 0..self.handshakes.slots() {
            let Some(id) = self.handshakes.id_at(index) else { continue };
            if self.handshakes.get(id).is_some_and(|h| h.port == port) {
                self.end_handshake(id, true);
            }
        }
    }

    /// Looks at all deadlines.
    pub(crate) fn scan(&mut self) {
        let mut next_ns = NEVER_NS;
        // What is noted while deadlines pass is kept.
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

    fn expire(&mut self, id: Id) {
        if let Some(p) = self.endpoints.get(id).and_then(|ep| self.ports.get(ep.port)) {
            p.spec.stats.timeouts.add(1);
        }
        self.reset(id);
    }
}
