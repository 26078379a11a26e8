//! Worker of a domain: its parts, and one round.

use std::io;
use std::os::fd::{AsFd, RawFd};
use std::sync::Arc;

use queue::{RingError, Vring};
use sidecore::{Arm, Ledger, VmId, Worker};

use crate::connection::NEVER_NS;
use crate::connection_table::ConnectionTable;
use crate::guest_directory::GuestDirectory;
use crate::handshakes::Handshakes;
use crate::limits::{SCAN_INTERVAL_NS, SOCKET_POLL_EVENTS};
use crate::listing::ConnectionInfo;
use crate::port::{Driver, Port, PortSpec};
use crate::queues::{EVENT, RX, TX};
use crate::rx::RxTurn;
use crate::send_run::SendRun;
use crate::slab::{EpollTag, SlabId};
use crate::socket_set::SocketSet;
use crate::tx::TxTurn;
use crate::unix_socket::Iovecs;

/// Worker of a domain, which moves packets between guests and host programs.
#[derive(Debug)]
pub struct VsockEngine {
    pub(crate) table: ConnectionTable,
    pub(crate) directory: GuestDirectory,
    pub(crate) handshakes: Handshakes,
    pub(crate) sockets: SocketSet,
    run: SendRun,
    iovecs: Iovecs,
}

impl VsockEngine {
    pub(crate) fn new(
        guest_to_guest: bool,
        max_buffer_bytes: u64,
        now_ns: u64,
    ) -> io::Result<Self> {
        Ok(Self {
            table: ConnectionTable::new(max_buffer_bytes, now_ns),
            directory: GuestDirectory::new(guest_to_guest),
            handshakes: Handshakes::new(),
            sockets: SocketSet::new()?,
            run: SendRun::new(),
            iovecs: Iovecs::new(),
        })
    }

    pub(crate) fn add_port(&mut self, spec: PortSpec) -> io::Result<SlabId> {
        let cid = spec.cid;
        let ports = &mut self.table.ports;
        let id = ports.insert(Port::new(spec));
        let watched = match ports.get(id).and_then(|p| p.spec.listener.as_ref()) {
            Some(l) => self.sockets.watch_listener(l.as_fd(), EpollTag::Listener(id)),
            None => Ok(()),
        };
        if let Err(e) = watched {
            ports.remove(id);
            return Err(e.into());
        }
        self.directory.insert(cid, id);
        Ok(id)
    }

    pub(crate) fn remove_port(&mut self, id: SlabId) -> bool {
        self.table.drop_connections(id);
        self.handshakes.drop_port(&mut self.table.ports, id);
        let Some(port) = self.table.ports.remove(id) else { return false };
        self.directory.remove(port.spec.cid);
        true
    }

    /// Runs a queue from now on. Returns its kick descriptor, to be watched.
    pub(crate) fn start_queue(
        &mut self,
        id: SlabId,
        vring: Vring,
    ) -> Result<Option<RawFd>, String> {
        let index = vring.parts.index;
        let Some(port) = self.table.ports.get_mut(id) else {
            return Err("the port was removed".into());
        };
        if port.has_queue(index) {
            return Err(format!("queue {index} is running already"));
        }
        let kick = vring.kick_fd();
        port.set_queue(vring);
        match port.meet_driver() {
            Some(Driver::New) => self.table.drop_connections(id),
            Some(Driver::Old) => port.reset_old_clients(),
            None => {}
        }
        Ok(kick)
    }

    /// Stops a queue; nothing of it is in use afterwards.
    pub(crate) fn stop_queue(&mut self, id: SlabId, index: u16) -> Option<Vring> {
        self.table.ports.get_mut(id)?.take_queue(index)
    }

    /// Moves all running queues to a changed memory table.
    pub(crate) fn set_memory(
        &mut self,
        id: SlabId,
        memory: &Arc<queue::GuestMemory>,
    ) -> Result<(), RingError> {
        self.table.ports.get_mut(id).map_or(Ok(()), |port| port.set_memory(memory))
    }

    /// Drops queues and connections of a port.
    pub(crate) fn reset_port(&mut self, id: SlabId) {
        for index in [RX, TX, EVENT] {
            drop(self.stop_queue(id, index));
        }
        self.table.drop_connections(id);
    }

    /// Lists a port's connections, in no meaningful order.
    pub(crate) fn list_connections(&self, port: SlabId) -> Vec<ConnectionInfo> {
        self.table.list(port)
    }

    /// Applies `f` to every port and adds up what it did.
    fn for_each_port(&mut self, mut f: impl FnMut(&mut Self, SlabId) -> usize) -> usize {
        let mut done = 0;
        for index in 0..self.table.ports.slots() {
            if let Some(id) = self.table.ports.id_at(index) {
                done += f(self, id);
            }
        }
        done
    }

    /// Whether there are Unix sockets besides the listeners.
    fn has_sockets(&self) -> bool {
        self.table.endpoints.len() + self.handshakes.len() > 0
    }

    /// Takes the events of the Unix sockets: one system call. Returns how many there were.
    fn poll_sockets(&mut self) -> usize {
        let mut room = [const { std::mem::MaybeUninit::uninit() }; SOCKET_POLL_EVENTS];
        let events = self.sockets.take_events(self.table.timer.now_ns(), &mut room);
        for event in events {
            let (flags, data) = (event.flags, event.data);
            match EpollTag::from_u64(data.u64()) {
                EpollTag::Listener(id) => {
                    if let Some(p) = self.table.ports.get_mut(id) {
                        p.accept_ready = true;
                    }
                }
                EpollTag::Handshake(id) => {
                    self.handshakes.on_socket(&mut self.table, &self.sockets, id);
                }
                EpollTag::Endpoint(id) => self.table.on_socket(id, flags),
            }
        }
        events.len()
    }

    /// Ends all connections and handshakes that are past their deadlines, and finds the next
    /// deadline.
    fn expire_overdue(&mut self) {
        // Deadlines that are noted while connections expire count as well.
        self.table.timer.clear();
        let connections_ns = self.table.expire_overdue();
        let now_ns = self.table.timer.now_ns();
        let handshakes_ns = self.handshakes.expire_overdue(&mut self.table.ports, now_ns);
        let next_ns = connections_ns.min(handshakes_ns);
        if next_ns != NEVER_NS {
            let soonest_ns = self.table.timer.after_ns(SCAN_INTERVAL_NS);
            self.table.timer.note(next_ns.max(soonest_ns));
        }
    }

    fn accept_waiting(&mut self, id: SlabId) -> usize {
        self.handshakes.accept_waiting(&mut self.table, &self.sockets, id)
    }

    fn serve_tx(&mut self, id: SlabId, ledger: &mut Ledger) -> usize {
        let Self { table, directory, sockets, run, iovecs, .. } = self;
        TxTurn { table, directory, sockets, run, iovecs }.serve(id, ledger)
    }

    fn serve_rx(&mut self, id: SlabId, ledger: &mut Ledger) -> usize {
        RxTurn { table: &mut self.table, iovecs: &mut self.iovecs }.serve(id, ledger)
    }
}

impl Worker for VsockEngine {
    fn poll(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        self.table.timer.set_now_ns(now_ns);
        let mut done = 0;
        if self.table.timer.is_due() {
            self.expire_overdue();
        }
        if self.sockets.is_due(now_ns, self.has_sockets()) {
            done += self.poll_sockets();
        }
        done += self.for_each_port(Self::accept_waiting);
        done += self.for_each_port(|e, id| e.serve_tx(id, ledger));
        done + self.for_each_port(|e, id| e.serve_rx(id, ledger))
    }

    fn arm(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm {
        self.table.timer.set_now_ns(now_ns);
        // Events that are in the set already do not fire its descriptor again. With listeners only,
        // every event fires it: each is looked at before the next sleep.
        let events = if self.has_sockets() { self.poll_sockets() } else { 0 };
        let mut wake_at_ns = self.table.timer.next_ns();
        let busy_ports = self.for_each_port(|e, id| {
            let mut port = e.table.ports.get_mut(id);
            let vm = port.as_ref().map_or(VmId::NONE, |p| p.spec.vm);
            let ceiling_ns = ledger.until_ns(vm, now_ns);
            wake_at_ns = wake_at_ns.min(ceiling_ns.unwrap_or(NEVER_NS));
            let busy = port.as_mut().is_some_and(|p| p.arm(now_ns, ceiling_ns.is_some()));
            usize::from(busy)
        });
        if events + busy_ports > 0 {
            Arm::Busy
        } else if wake_at_ns == NEVER_NS {
            Arm::Idle
        } else {
            Arm::Until(wake_at_ns)
        }
    }

    fn disarm(&mut self) {
        self.for_each_port(|e, id| {
            if let Some(port) = e.table.ports.get_mut(id) {
                port.disarm();
            }
            0
        });
    }

    fn fired(&mut self, fd: RawFd) {
        self.sockets.make_due();
        self.for_each_port(|e, id| {
            if let Some(port) = e.table.ports.get_mut(id) {
                port.count_kick(fd);
            }
            0
        });
    }
}
