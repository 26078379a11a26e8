//! Packets from the guests, off their transmit queues.

use std::fmt::Display;

use base::counter::DropReason;
use sidecore::Ledger;

use crate::connection::{Event, Phase};
use crate::connection_table::ConnectionTable;
use crate::endpoint::FarEnd;
use crate::guest_copy::pass_to_guest;
use crate::guest_directory::GuestDirectory;
use crate::host_connections::open_to_host;
use crate::packet::{
    ConnectionKey, HEADER_LEN_BYTES, HOST_CID, Header, Op, SHUT_RECEIVE, TYPE_STREAM,
};
use crate::queues::TxQueue;
use crate::send_run::SendRun;
use crate::slab::SlabId;
use crate::socket_set::SocketSet;
use crate::unix_socket::{self, Iovecs};

/// Turn of a guest's transmit queue, with the parts of the engine that its packets change.
pub(crate) struct TxTurn<'a> {
    pub table: &'a mut ConnectionTable,
    pub directory: &'a GuestDirectory,
    pub sockets: &'a SocketSet,
    pub run: &'a mut SendRun,
    pub iovecs: &'a mut Iovecs,
}

impl TxTurn<'_> {
    /// Serves one batch of a port's packets. Returns how many there were.
    pub fn serve(&mut self, port: SlabId, ledger: &mut Ledger) -> usize {
        // Taken out of the table for the batch, so that its packets can be read while other ports
        // and connections change. A guest never sends to itself through here.
        let served = self.table.ports.get_mut(port).filter(|p| p.knows_driver);
        let Some(p) = served else { return 0 };
        let Some(mut tx) = p.tx.take() else { return 0 };
        let (vm, now_ns) = (p.spec.vm, self.table.timer.now_ns());
        let allowance = ledger.allowance(vm, now_ns);
        let (spent, is_more) = tx.take_batch(allowance);
        if allowance.is_none() && tx.vring.has_work() {
            ledger.held_back(vm, now_ns);
        }
        let count = spent.requests as usize;
        if count > 0 {
            ledger.charge(vm, spent, is_more, now_ns);
            let mut last = None;
            for index in 0..count {
                self.take_packet(port, &tx, index, &mut last);
            }
            self.flush_run(&tx);
            tx.finish();
        }
        if let Some(p) = self.table.ports.get_mut(port) {
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
        let Some(p) = self.table.ports.get(port) else { return };
        let chain = tx.batch.get(index);
        let Some(raw) = tx.header(index) else {
            let what = "it is shorter than a header, or not in the VM's memory";
            return count_malformed(self.table, port, tx, &what);
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
                count_malformed(self.table, port, tx, &e);
                if e.names_connection() && raw.op.get() != Op::Rst as u16 {
                    self.refuse_packet(port, tx, raw.key(), raw.kind.get());
                }
                return;
            }
        };
        let cached =
            last.filter(|(key, id)| *key == header.key && self.table.endpoints.get(*id).is_some());
        let known = cached.map(|(_, id)| id).or_else(|| p.keys.get(&header.key).copied());
        match known {
            Some(id) if header.op == Op::Request && is_closing(self.table, id) => {
                // The guest is done with it, and uses its name again.
                *last = None;
                self.flush_run(tx);
                self.table.reset_by_guest(id);
                self.open(port, &header);
            }
            // A second request of a name that lives, too: a guest that starts anew has reset its
            // device, and with that all connections.
            Some(id) => {
                *last = Some((header.key, id));
                self.on_packet(tx, index, id, &header);
            }
            None if header.op == Op::Request => self.open(port, &header),
            None if header.op == Op::Rst => {}
            None => {
                tx.vring.parts.stats.drop_one(DropReason::NoDestination);
                self.queue_stray_reset(port, header.key, raw.kind.get());
            }
        }
    }

    /// Opens a connection that a guest asks for. Every refusal is a reset.
    fn open(&mut self, port: SlabId, request: &Header) {
        let opened = if request.key.peer_cid == HOST_CID {
            open_to_host(self.table, self.sockets, port, request)
        } else {
            self.directory.open(self.table, port, request)
        };
        let Some(p) = self.table.ports.get_mut(port) else { return };
        if opened.is_some() {
            p.spec.stats.opened_by_guest.add(1);
        } else {
            p.spec.stats.refused.add(1);
            p.queue_stray_reset(request.key, TYPE_STREAM);
        }
    }

    fn queue_stray_reset(&mut self, port: SlabId, key: ConnectionKey, kind: u16) {
        if let Some(p) = self.table.ports.get_mut(port) {
            p.queue_stray_reset(key, kind);
        }
    }

    /// Refuses a packet that names a connection and makes no sense: the connection, if there is
    /// one, ends.
    fn refuse_packet(&mut self, port: SlabId, tx: &TxQueue, key: ConnectionKey, kind: u16) {
        let known = self.table.ports.get(port).and_then(|p| p.keys.get(&key).copied());
        match known.filter(|_| kind == TYPE_STREAM) {
            Some(id) => {
                self.flush_run(tx);
                self.table.reset(id);
            }
            None => self.queue_stray_reset(port, key, kind),
        }
    }

    fn on_packet(&mut self, tx: &TxQueue, index: usize, id: SlabId, header: &Header) {
        let Some(ep) = self.table.endpoints.get_mut(id) else { return };
        let port = ep.port;
        let event = ep.conn.on_packet(header);
        // Packets of one connection stay in order: its data goes out before anything else acts.
        if !matches!(event, Event::Data(_) | Event::Nothing) && self.run.endpoint() == Some(id) {
            self.flush_run(tx);
        }
        match event {
            Event::Nothing => {}
            Event::Accepted => on_accepted(self.table, id),
            Event::Data(len) => self.on_data(tx, index, id, len),
            Event::Shutdown(new) => on_shutdown(self.table, id, new),
            Event::Reset => {
                if let Some(p) = self.table.ports.get(port) {
                    p.spec.stats.resets_received.add(1);
                }
                self.table.reset_by_guest(id);
            }
            Event::Violation(what) => {
                tracing::debug!(?header, "connection reset: {what}");
                if let Some(p) = self.table.ports.get(port) {
                    p.spec.stats.violations.add(1);
                }
                self.table.reset(id);
            }
        }
        // Every packet may bring credit, and may have made an answer due.
        if self.table.has_work(id) {
            self.table.enqueue(id);
        }
    }

    fn on_data(&mut self, tx: &TxQueue, index: usize, id: SlabId, len: u32) {
        let Some(ep) = self.table.endpoints.get_mut(id) else { return };
        ep.bytes_from_guest += u64::from(len);
        tx.vring.parts.stats.bytes.add(u64::from(len));
        if let Some(p) = self.table.ports.get(ep.port) {
            p.spec.stats.bytes_from_guest.add(u64::from(len));
        }
        match ep.far {
            FarEnd::Host(_) if ep.conn.far_shut() & SHUT_RECEIVE == 0 => {
                if self.run.endpoint() != Some(id) {
                    self.flush_run(tx);
                    self.run.begin(id);
                }
                self.run.push(index, len);
            }
            FarEnd::Guest(peer) => pass_to_guest(self.table, tx, index, (id, peer), len),
            // Nobody takes bytes any more; the guest has been told or is about to be.
            FarEnd::Host(_) | FarEnd::Gone => ep.conn.note_forwarded(len),
        }
    }

    fn flush_run(&mut self, tx: &TxQueue) {
        self.run.flush(self.table, self.iovecs, tx);
    }
}

fn is_closing(table: &ConnectionTable, id: SlabId) -> bool {
    table.endpoints.get(id).is_some_and(|ep| ep.conn.phase() == Phase::Closing)
}

#[cold]
fn count_malformed(table: &mut ConnectionTable, port: SlabId, tx: &TxQueue, what: &dyn Display) {
    tx.vring.parts.stats.drop_one(DropReason::Malformed);
    let Some(p) = table.ports.get_mut(port) else { return };
    p.spec.stats.malformed.add(1);
    if let Some(left_out) = p.rejects.admit(DropReason::Malformed, table.timer.now_ns()) {
        let port = tx.vring.parts.health.name();
        tracing::warn!(port, left_out, "dropped a packet of the guest's: {what}");
    }
}

/// Tells the far end that the guest accepted its connection.
fn on_accepted(table: &mut ConnectionTable, id: SlabId) {
    table.settle_half_open(id);
    let Some(ep) = table.endpoints.get_mut(id) else { return };
    match &mut ep.far {
        FarEnd::Host(end) => {
            let is_sent = !std::mem::take(&mut end.awaits_ok)
                || unix_socket::send_ok(&end.fd, ep.conn.key().peer_port);
            if !is_sent {
                table.reset(id);
            }
        }
        FarEnd::Guest(peer) => {
            let peer = *peer;
            if let Some(other) = table.endpoints.get_mut(peer) {
                other.conn.accept();
            }
            table.settle_half_open(peer);
            table.enqueue(peer);
        }
        FarEnd::Gone => table.reset(id),
    }
}

/// Shuts directions of the far end that the guest shut.
fn on_shutdown(table: &mut ConnectionTable, id: SlabId, new: u8) {
    let Some(ep) = table.endpoints.get_mut(id) else { return };
    match ep.far {
        FarEnd::Host(_) => ep.shut_host(new),
        FarEnd::Guest(peer) => {
            if let Some(other) = table.endpoints.get_mut(peer) {
                other.conn.far_shutdown(new);
                if new & SHUT_RECEIVE != 0 {
                    // What waits there for this guest is for nobody.
                    other.conn.note_forwarded(other.ring.len() as u32);
                    other.ring.clear();
                }
            }
            table.try_free(peer);
            table.enqueue(peer);
        }
        FarEnd::Gone => {}
    }
    table.enqueue(id);
}
