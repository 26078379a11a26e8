//! Packets from the guests, off their transmit queues.

use std::fmt::Display;

use rustix::io::Errno;

use base::counter::DropReason;
use queue::seg::copy_across;

use sidecore::{Ledger, VmId};

use crate::connection::{Event, Phase};
use crate::endpoint::{Endpoint, FarEnd};
use crate::engine::VsockEngine;
use crate::packet::{ConnectionKey, HEADER_LEN_BYTES, Header, Op, SHUT_RECEIVE, SHUT_SEND};
use crate::queues::{RxQueue, TxQueue, WaitReason};
use crate::slab::SlabId;
use crate::unix_socket;

const HEADER: usize = HEADER_LEN_BYTES as usize;

impl VsockEngine {
    /// Serves one batch of a port's packets. Returns how many there were.
    pub(crate) fn serve_tx(&mut self, port: SlabId, ledger: &mut Ledger) -> usize {
        // Taken out of the table for the batch, so that its packets can be read while other ports
        // and connections change. A guest never sends to itself through here.
        let Some(mut tx) = self.ports.get_mut(port).and_then(|p| p.tx.take()) else { return 0 };
        let vm = self.ports.get(port).map_or(VmId::NONE, |p| p.spec.vm);
        let allowance = ledger.allowance(vm, self.now_ns);
        let (spent, is_more) = tx.take_batch(allowance);
        if allowance.is_none() && tx.vring.has_work() {
            ledger.held_back(vm, self.now_ns);
        }
        let count = spent.requests as usize;
        if count > 0 {
            ledger.charge(vm, spent, is_more, self.now_ns);
            let mut last = None;
            for index in 0..count {
                self.take_packet(port, &tx, index, &mut last);
            }
            self.flush_run(&tx);
            tx.finish();
        }
        if let Some(p) = self.ports.get_mut(port) {
            p.tx = Some(tx);
        }
        count
    }

    /// Checks one packet and finds its connection. `last`: the connection of the packet before,
    /// since packets come in trains.
    fn take_packet(
        &mut self,
        port: SlabId,
        tx: &TxQueue,
        index: usize,
        last: &mut Option<(ConnectionKey, SlabId)>,
    ) {
        let Some(p) = self.ports.get(port) else { return };
        let chain = tx.batch.get(index);
        let Some(raw) = tx.header(index) else {
            let what = "it is shorter than a header, or not in the VM's memory";
            return self.malformed(port, tx, &what);
        };
        // `header` found all its bytes, so there are not fewer. A chain that cannot be served has
        // no payload: its connection ends, since the stream would have a gap.
        let payload_bytes = match chain.fault {
            None => chain.readable_len.saturating_sub(HEADER_LEN_BYTES),
            Some(_) => 0,
        };
        let header = match raw.check(p.spec.cid, payload_bytes) {
            Ok(header) => header,
            Err(e) => {
                self.malformed(port, tx, &e);
                if e.names_connection() && raw.op.get() != Op::Rst as u16 {
                    self.refuse_packet(port, tx, raw.key(), raw.kind.get());
                }
                return;
            }
        };
        let cached =
            last.filter(|(key, id)| *key == header.key && self.endpoints.get(*id).is_some());
        let known = cached.map(|(_, id)| id).or_else(|| p.keys.get(&header.key).copied());
        match known {
            Some(id) if header.op == Op::Request && self.is_closing(id) => {
                // The guest is done with it, and uses its name again.
                *last = None;
                self.flush_run(tx);
                self.reset_by_guest(id);
                self.open_from_guest(port, &header);
            }
            // A second request of a name that lives, too: a guest that starts anew has reset its
            // device, and with that all connections.
            Some(id) => {
                *last = Some((header.key, id));
                self.on_packet(tx, index, id, &header);
            }
            None if header.op == Op::Request => self.open_from_guest(port, &header),
            None if header.op == Op::Rst => {}
            None => {
                tx.vring.parts.stats.drop_one(DropReason::NoDestination);
                self.queue_stray_reset(port, header.key, raw.kind.get());
            }
        }
    }

    fn is_closing(&self, id: SlabId) -> bool {
        self.endpoints.get(id).is_some_and(|ep| ep.conn.phase() == Phase::Closing)
    }

    #[cold]
    fn malformed(&mut self, port: SlabId, tx: &TxQueue, what: &dyn Display) {
        tx.vring.parts.stats.drop_one(DropReason::Malformed);
        let Some(p) = self.ports.get_mut(port) else { return };
        p.spec.stats.malformed.add(1);
        if let Some(left_out) = p.rejects.admit(DropReason::Malformed, self.now_ns) {
            let port = tx.vring.parts.health.name();
            tracing::warn!(port, left_out, "dropped a packet of the guest's: {what}");
        }
    }

    /// Refuses a packet that names a connection and makes no sense: the connection, if there is
    /// one, ends.
    fn refuse_packet(&mut self, port: SlabId, tx: &TxQueue, key: ConnectionKey, kind: u16) {
        let known = self.ports.get(port).and_then(|p| p.keys.get(&key).copied());
        match known.filter(|_| kind == crate::packet::TYPE_STREAM) {
            Some(id) => {
                self.flush_run(tx);
                self.reset(id);
            }
            None => self.queue_stray_reset(port, key, kind),
        }
    }

    fn on_packet(&mut self, tx: &TxQueue, index: usize, id: SlabId, header: &Header) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        let port = ep.port;
        let event = ep.conn.on_packet(header);
        // Packets of one connection stay in order: its data goes out before anything else acts.
        if !matches!(event, Event::Data(_) | Event::Nothing) && self.send_run.endpoint == Some(id) {
            self.flush_run(tx);
        }
        match event {
            Event::Nothing => {}
            Event::Accepted => self.on_accepted(id),
            Event::Data(len) => self.on_data(tx, index, id, len),
            Event::Shutdown(new) => self.on_shutdown(id, new),
            Event::Reset => {
                if let Some(p) = self.ports.get(port) {
                    p.spec.stats.resets_received.add(1);
                }
                self.reset_by_guest(id);
            }
            Event::Violation(what) => {
                tracing::debug!(?header, "connection reset: {what}");
                if let Some(p) = self.ports.get(port) {
                    p.spec.stats.violations.add(1);
                }
                self.reset(id);
            }
        }
        // Every packet may bring credit, and may have made an answer due.
        if self.has_work(id) {
            self.enqueue(id);
        }
    }

    fn on_accepted(&mut self, id: SlabId) {
        self.settle_half_open(id);
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        match &mut ep.far {
            FarEnd::Host(end) => {
                let is_sent = !std::mem::take(&mut end.awaits_ok)
                    || unix_socket::send_ok(&end.fd, ep.conn.key().peer_port);
                if !is_sent {
                    self.reset(id);
                }
            }
            FarEnd::Guest(peer) => {
                let peer = *peer;
                if let Some(other) = self.endpoints.get_mut(peer) {
                    other.conn.accept();
                }
                self.settle_half_open(peer);
                self.enqueue(peer);
            }
            FarEnd::Gone => self.reset(id),
        }
    }

    fn on_data(&mut self, tx: &TxQueue, index: usize, id: SlabId, len: u32) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        ep.bytes_from_guest += u64::from(len);
        tx.vring.parts.stats.bytes.add(u64::from(len));
        if let Some(p) = self.ports.get(ep.port) {
            p.spec.stats.bytes_from_guest.add(u64::from(len));
        }
        match ep.far {
            FarEnd::Host(_) if ep.conn.far_shut() & SHUT_RECEIVE == 0 => {
                if self.send_run.endpoint != Some(id) {
                    self.flush_run(tx);
                    self.send_run.endpoint = Some(id);
                    self.send_run.pieces.clear();
                }
                self.send_run.pieces.push((index, len));
            }
            FarEnd::Guest(peer) => self.pass_to_guest(tx, index, id, peer, len),
            // Nobody takes bytes any more; the guest has been told or is about to be.
            FarEnd::Host(_) | FarEnd::Gone => ep.conn.note_forwarded(len),
        }
    }

    /// Sends the packets gathered for one Unix socket: one system call, unless they have more
    /// pieces than it takes. What does not fit goes to the connection's buffer.
    pub(crate) fn flush_run(&mut self, tx: &TxQueue) {
        let Some(id) = self.send_run.endpoint.take() else { return };
        let total: u32 = self.send_run.pieces.iter().map(|(_, len)| len).sum();
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        let mut sent = 0;
        let mut broken = false;
        if let FarEnd::Host(end) = &mut ep.far {
            while ep.ring.is_empty() && end.writable && sent < total {
                self.iovecs.clear();
                let wanted = gather(&self.send_run.pieces, sent, |i, offset, len| {
                    self.iovecs.add(tx.bytes(i), offset, len)
                });
                // SAFETY: the buffers are those of `tx`'s batch, which keeps them mapped.
                match unsafe { self.iovecs.send(std::os::fd::AsFd::as_fd(&end.fd)) } {
                    Ok(n) => {
                        sent += n as u32;
                        end.writable = n == wanted && n > 0;
                    }
                    Err(Errno::AGAIN) => end.writable = false,
                    Err(_) => {
                        broken = true;
                        break;
                    }
                }
            }
        }
        ep.conn.note_forwarded(sent);
        if broken {
            return self.stop_sending_to_host(id);
        }
        if sent < total {
            let ring = &mut ep.ring;
            let buffered = gather(&self.send_run.pieces, sent, |i, offset, len| {
                ring.push(tx.bytes(i), offset, len)
            });
            self.count_buffered(tx, id, buffered);
        }
    }

    /// Counts bytes that went through a connection's buffer, which is one more copy.
    fn count_buffered(&self, tx: &TxQueue, id: SlabId, bytes: usize) {
        tx.vring.parts.stats.copied_bytes.add(bytes as u64);
        let port = self.endpoints.get(id).and_then(|ep| self.ports.get(ep.port));
        if let Some(p) = port {
            p.spec.stats.buffered_bytes.add(bytes as u64);
        }
    }

    /// Passes a packet from guest to guest: one copy when the receiver has buffers and gives
    /// credit, else through the sender's buffer, which its credit never exceeds.
    fn pass_to_guest(&mut self, tx: &TxQueue, index: usize, id: SlabId, peer: SlabId, len: u32) {
        let other = self.endpoints.get(peer);
        let is_receiving = other.is_some_and(|o| {
            o.conn.phase() == Phase::Open && o.conn.guest_shut() & SHUT_RECEIVE == 0
        });
        let has_backlog = self.endpoints.get(id).is_some_and(|ep| !ep.ring.is_empty());
        let mut done = 0;
        if is_receiving && !has_backlog {
            done = self.copy_to_guest(tx, index, peer, len);
        }
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        if !is_receiving {
            return ep.conn.note_forwarded(len);
        }
        ep.conn.note_forwarded(done);
        if done < len {
            let buffered =
                ep.ring.push(tx.bytes(index), HEADER + done as usize, (len - done) as usize);
            self.count_buffered(tx, id, buffered);
            self.enqueue(peer);
        }
    }

    /// Copies a packet's payload into the receiver's buffers, as far as there are buffers, credit
    /// and something left of the receiver's share of the round. Returns how many bytes went.
    fn copy_to_guest(&mut self, tx: &TxQueue, index: usize, peer: SlabId, len: u32) -> u32 {
        let Some(other) = self.endpoints.get_mut(peer) else { return 0 };
        let Some(port) = self.ports.get_mut(other.port) else { return 0 };
        // Those who waited longer for buffers come first.
        if port.is_starved {
            return 0;
        }
        let Some(rx) = &mut port.rx else { return 0 };
        let (cid, mut done) = (port.spec.cid, 0);
        while done < len {
            let room = other.conn.send_room().min(len - done);
            if room == 0 {
                break;
            }
            if let Err(wait) = rx.ensure_buffer() {
                port.is_starved = wait == WaitReason::Buffers;
                break;
            }
            let Some(chain) = rx.peek(0) else { break };
            let n = room.min(rx.bytes_left()).min(chain.writable_len - HEADER_LEN_BYTES);
            let from = HEADER + done as usize;
            let n = copy_across(tx.bytes(index), from, chain.writable, HEADER, n as usize) as u32;
            if n == 0 {
                break;
            }
            send_payload(rx, other, cid, n);
            rx.count_copied(n);
            port.spec.stats.bytes_to_guest.add(u64::from(n));
            done += n;
        }
        done
    }

    fn on_shutdown(&mut self, id: SlabId, new: u8) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        match ep.far {
            FarEnd::Host(_) => self.shut_host(id, new),
            FarEnd::Guest(peer) => {
                if let Some(other) = self.endpoints.get_mut(peer) {
                    other.conn.far_shutdown(new);
                    if new & SHUT_RECEIVE != 0 {
                        // What waits there for this guest is for nobody.
                        other.conn.note_forwarded(other.ring.len() as u32);
                        other.ring.clear();
                    }
                }
                self.try_free(peer);
                self.enqueue(peer);
            }
            FarEnd::Gone => {}
        }
        self.enqueue(id);
    }

    fn shut_host(&mut self, id: SlabId, new: u8) {
        let Some(ep) = self.endpoints.get_mut(id) else { return };
        let closing = ep.conn.phase() == Phase::Closing;
        let FarEnd::Host(end) = &mut ep.far else { return };
        if new & SHUT_RECEIVE != 0 {
            end.readable = false;
            unix_socket::shut(&end.fd, rustix::net::Shutdown::Read);
            if end.hung_up {
                ep.conn.far_shutdown(crate::packet::SHUT_BOTH);
            }
        }
        if new & SHUT_SEND != 0 && ep.ring.is_empty() {
            unix_socket::shut(&end.fd, rustix::net::Shutdown::Write);
        }
        if closing && ep.ring.is_empty() {
            ep.far = FarEnd::Gone;
        }
    }
}

/// Completes the receiver's next buffer as a data packet of `len` bytes that lie in it already.
pub(crate) fn send_payload(rx: &mut RxQueue, ep: &mut Endpoint, cid: u32, len: u32) {
    let header = ep.conn.header(Op::Rw, cid, len);
    rx.put(&header, len);
    ep.conn.note_sent(len);
    ep.bytes_to_guest += u64::from(len);
}

/// Walks the payload of a run's pieces behind the first `skip` bytes; `f` gets batch index, offset
/// and length, and says how much it took. Stops when it takes less. Returns the sum.
fn gather(
    pieces: &[(usize, u32)],
    skip: u32,
    mut f: impl FnMut(usize, usize, usize) -> usize,
) -> usize {
    let mut skip = skip as usize;
    let mut sum = 0;
    for &(index, len) in pieces {
        let len = len as usize;
        if skip >= len {
            skip -= len;
            continue;
        }
        let took = f(index, HEADER + skip, len - skip);
        sum += took;
        if took < len - skip {
            break;
        }
        skip = 0;
    }
    sum
}
