//! Table of a domain's ports and their connections: counts, buffers, ends of connections.

use std::os::fd::OwnedFd;

use rustix::event::epoll::EventFlags;

use crate::byte_ring::BufferPool;
use crate::connection::{Connection, NEVER_NS};
use crate::endpoint::{Endpoint, FarEnd, HostEnd};
use crate::limits::DRAIN_TIMEOUT_NS;
use crate::listing::ConnectionInfo;
use crate::packet::SHUT_BOTH;
use crate::port::Port;
use crate::slab::{Links, Slab, SlabId};
use crate::timer::Timer;

/// Ports and connections of a domain. It knows no queues' contents, and of Unix sockets only those
/// behind its connections.
#[derive(Debug)]
pub(crate) struct ConnectionTable {
    pub ports: Slab<Port>,
    pub endpoints: Slab<Endpoint>,
    pub buffers: BufferPool,
    pub timer: Timer,
}

impl ConnectionTable {
    pub fn new(max_buffer_bytes: u64, now_ns: u64) -> Self {
        Self {
            ports: Slab::new(),
            endpoints: Slab::new(),
            buffers: BufferPool::new(max_buffer_bytes),
            timer: Timer::new(now_ns),
        }
    }

    /// Adds a connection; none if there is no buffer for it.
    pub fn insert(&mut self, port: SlabId, conn: Connection, far: FarEnd) -> Option<SlabId> {
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
            opened_ns: self.timer.now_ns(),
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

    /// Puts a Unix socket behind a connection.
    pub fn attach_host(&mut self, id: SlabId, fd: OwnedFd, awaits_ok: bool) {
        if let Some(ep) = self.endpoints.get_mut(id) {
            ep.far = FarEnd::Host(HostEnd::new(fd, awaits_ok));
        }
    }

    /// Port of a connection.
    pub fn port_of(&self, id: SlabId) -> Option<&Port> {
        self.ports.get(self.endpoints.get(id)?.port)
    }

    /// CID of a connection's guest.
    pub fn cid_of(&self, id: SlabId) -> Option<u32> {
        self.port_of(id).map(|p| p.spec.cid)
    }

    /// Whether bytes of the other end wait for the guest.
    pub fn far_has_bytes(&self, id: SlabId) -> bool {
        match self.endpoints.get(id).map(|ep| &ep.far) {
            Some(FarEnd::Guest(peer)) => {
                self.endpoints.get(*peer).is_some_and(|other| !other.ring.is_empty())
            }
            _ => false,
        }
    }

    /// Whether there is a packet to send to the guest, buffers aside.
    pub fn has_work(&self, id: SlabId) -> bool {
        let Some(ep) = self.endpoints.get(id) else { return false };
        let bytes = self.far_has_bytes(id);
        let readable = matches!(&ep.far, FarEnd::Host(end) if end.readable);
        ep.conn.next_op(!bytes).is_some() || ((bytes || readable) && ep.conn.send_room() > 0)
    }

    /// Takes a connection that is no longer half-open out of that count.
    pub fn settle_half_open(&mut self, id: SlabId) {
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
    pub fn enqueue(&mut self, id: SlabId) {
        let Some(ep) = self.endpoints.get(id) else { return };
        if let Some(p) = self.ports.get_mut(ep.port).filter(|_| !ep.is_released) {
            p.ready.push_back(&mut self.endpoints, id);
        }
    }

    /// Applies events of the Unix socket behind a connection.
    pub fn on_socket(&mut self, id: SlabId, flags: EventFlags) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        let FarEnd::Host(end) = &mut ep.far else { return };
        end.note_events(&mut ep.conn, flags);
        if end.awaits_ok && (end.hung_up || flags.contains(EventFlags::ERR)) {
            // It did not wait for the guest's answer.
            return self.reset(id);
        }
        if flags.contains(EventFlags::OUT) {
            end.writable = true;
            if ep.flush_ring().is_err() {
                self.stop_sending_to_host(id);
            } else {
                self.try_free(id);
            }
        }
        self.enqueue(id);
    }

    /// Drops all bytes for a program that reads no more, those that wait and those that come.
    pub fn stop_sending_to_host(&mut self, id: SlabId) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        ep.stop_sending_to_host();
        self.try_free(id);
        self.enqueue(id);
    }

    /// Ends a connection, both ways, without waiting for bytes.
    pub fn reset(&mut self, id: SlabId) {
        let far = self.abort_side(id);
        if let FarEnd::Guest(peer) = far {
            self.abort_side(peer);
            self.release_or_reset(peer);
        }
        self.release_or_reset(id);
    }

    /// Ends a connection that the guest reset.
    pub fn reset_by_guest(&mut self, id: SlabId) {
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
    pub fn release(&mut self, id: SlabId) {
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
    pub fn try_free(&mut self, id: SlabId) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        if !ep.is_released {
            return;
        }
        if !ep.ring.is_empty() && !matches!(ep.far, FarEnd::Gone) {
            let at_ns = self.timer.after_ns(DRAIN_TIMEOUT_NS);
            ep.conn.set_deadline_ns(at_ns);
            self.timer.note(at_ns);
            return;
        }
        let far = std::mem::replace(&mut ep.far, FarEnd::Gone);
        self.remove(id);
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
    pub fn remove(&mut self, id: SlabId) {
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
    pub fn drop_connections(&mut self, port: SlabId) {
        for index in 0..self.endpoints.slots() {
            let Some(id) = self.endpoints.id_at(index) else { continue };
            if self.endpoints.get(id).is_some_and(|ep| ep.port == port) {
                self.reset_by_guest(id);
            }
        }
        if let Some(p) = self.ports.get_mut(port) {
            p.forget_guest();
        }
    }

    /// Ends all connections that are past their deadlines. Returns the next deadline of the others.
    pub fn expire_overdue(&mut self) -> u64 {
        let mut next_ns = NEVER_NS;
        for index in 0..self.endpoints.slots() {
            let Some(id) = self.endpoints.id_at(index) else { continue };
            let at_ns = self.endpoints.get(id).map_or(NEVER_NS, |ep| ep.conn.deadline_ns());
            if at_ns <= self.timer.now_ns() {
                self.expire(id);
            } else {
                next_ns = next_ns.min(at_ns);
            }
        }
        next_ns
    }

    /// Counts bytes that went through a connection's buffer, which is one more copy.
    pub fn count_buffered(&self, id: SlabId, bytes: u64) {
        if let Some(p) = self.port_of(id) {
            p.spec.stats.buffered_bytes.add(bytes);
        }
    }

    fn expire(&mut self, id: SlabId) {
        if let Some(p) = self.port_of(id) {
            p.spec.stats.timeouts.add(1);
        }
        self.reset(id);
    }

    /// Lists a port's connections, in no meaningful order.
    pub fn list(&self, port: SlabId) -> Vec<ConnectionInfo> {
        let ids = (0..self.endpoints.slots()).filter_map(|i| self.endpoints.id_at(i));
        ids.filter_map(|id| self.endpoints.get(id))
            .filter(|ep| ep.port == port)
            .map(|ep| ConnectionInfo::new(ep, self.timer.now_ns()))
            .collect()
    }
}
