//! Unix connections of host programs up to their `CONNECT` line.

use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;

use crate::connection::NEVER_NS;
use crate::connection_table::ConnectionTable;
use crate::host_connections::open_from_host;
use crate::limits::{ACCEPT_BATCH, HANDSHAKE_TIMEOUT_NS, SCAN_INTERVAL_NS};
use crate::port::Port;
use crate::slab::{EpollTag, Slab, SlabId};
use crate::socket_set::SocketSet;
use crate::unix_socket::{self, ConnectLine};

/// Unix connection that has not sent its `CONNECT` line.
#[derive(Debug)]
struct Handshake {
    fd: OwnedFd,
    port: SlabId,
    deadline_ns: u64,
}

/// Unix connections that have not sent their `CONNECT` lines.
#[derive(Debug)]
pub(crate) struct Handshakes(Slab<Handshake>);

impl Handshakes {
    pub fn new() -> Self {
        Self(Slab::new())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Accepts host programs, as far as there is room for their handshakes.
    pub fn accept_waiting(
        &mut self,
        table: &mut ConnectionTable,
        sockets: &SocketSet,
        port: SlabId,
    ) -> usize {
        for done in 0..ACCEPT_BATCH {
            let now_ns = table.timer.now_ns();
            let Some(p) = table.ports.get_mut(port).filter(|p| p.can_accept(now_ns)) else {
                return done as usize;
            };
            let accepted = p.spec.listener.as_ref().map_or(Err(Errno::AGAIN), |l| l.accept());
            match accepted {
                Ok(fd) if p.is_running() => {
                    p.handshakes += 1;
                    self.begin(table, sockets, port, fd);
                }
                // Nobody is there to talk to: closed at once, so that the program sees it.
                Ok(_) => p.spec.stats.handshakes_dropped.add(1),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => {
                    p.accept_ready = false;
                    return done as usize;
                }
                Err(e) => {
                    // Out of descriptors or memory: no event will tell when that is over.
                    tracing::warn!(cid = p.spec.cid, "accepting a Unix connection: {e}");
                    p.accept_after_ns = now_ns.saturating_add(SCAN_INTERVAL_NS);
                    table.timer.note(p.accept_after_ns);
                    return done as usize;
                }
            }
        }
        ACCEPT_BATCH as usize
    }

    fn begin(
        &mut self,
        table: &mut ConnectionTable,
        sockets: &SocketSet,
        port: SlabId,
        fd: OwnedFd,
    ) {
        let deadline_ns = table.timer.after_ns(HANDSHAKE_TIMEOUT_NS);
        let id = self.0.insert(Handshake { fd, port, deadline_ns });
        table.timer.note(deadline_ns);
        let Some(handshake) = self.0.get(id) else { return };
        // The set tells of a line that is there already.
        if sockets.watch(handshake.fd.as_fd(), EpollTag::Handshake(id), false).is_err() {
            self.end(&mut table.ports, id, true);
        }
    }

    /// Ends a handshake; the socket closes unless the caller took it over before.
    fn end(&mut self, ports: &mut Slab<Port>, id: SlabId, dropped: bool) -> Option<Handshake> {
        let handshake = self.0.remove(id)?;
        if let Some(p) = ports.get_mut(handshake.port) {
            p.handshakes -= 1;
            p.spec.stats.handshakes_dropped.add(u64::from(dropped));
        }
        Some(handshake)
    }

    /// Looks for the line of a socket that has bytes, and connects it to its guest.
    pub fn on_socket(&mut self, table: &mut ConnectionTable, sockets: &SocketSet, id: SlabId) {
        let Some(handshake) = self.0.get(id) else { return };
        match unix_socket::read_line(&handshake.fd) {
            ConnectLine::Partial => {}
            ConnectLine::Bad(why) => {
                tracing::debug!("CONNECT handshake dropped: {why}");
                self.end(&mut table.ports, id, true);
            }
            ConnectLine::Port(guest_port) => {
                let Some(h) = self.end(&mut table.ports, id, false) else { return };
                let port = h.port;
                if !open_from_host(table, sockets, port, h.fd, guest_port)
                    && let Some(p) = table.ports.get(port)
                {
                    p.spec.stats.handshakes_dropped.add(1);
                }
            }
        }
    }

    /// Ends all handshakes of a port.
    pub fn drop_port(&mut self, ports: &mut Slab<Port>, port: SlabId) {
        for index in 0..self.0.slots() {
            let Some(id) = self.0.id_at(index) else { continue };
            if self.0.get(id).is_some_and(|h| h.port == port) {
                self.end(ports, id, true);
            }
        }
    }

    /// Ends all handshakes that are past their deadlines. Returns the next deadline of the others,
    /// or of a port that accepts again then.
    pub fn expire_overdue(&mut self, ports: &mut Slab<Port>, now_ns: u64) -> u64 {
        let mut next_ns = NEVER_NS;
        for index in 0..self.0.slots() {
            let Some(id) = self.0.id_at(index) else { continue };
            let at_ns = self.0.get(id).map_or(NEVER_NS, |h| h.deadline_ns);
            if at_ns <= now_ns {
                self.end(ports, id, true);
            } else {
                next_ns = next_ns.min(at_ns);
            }
        }
        for index in 0..ports.slots() {
            let port = ports.id_at(index).and_then(|id| ports.get(id));
            if let Some(p) = port.filter(|p| p.accept_after_ns > now_ns) {
                next_ns = next_ns.min(p.accept_after_ns);
            }
        }
        next_ns
    }
}
