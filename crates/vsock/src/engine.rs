//! Worker of a domain: its state, and one round.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;

use queue::{Position, RingError, Vring};
use rustix::event::epoll;
use sidecore::{Arm, Ledger, VmId, Worker};

use crate::byte_ring::BufferPool;
use crate::connection::NEVER_NS;
use crate::endpoint::{Endpoint, Handshake};
use crate::limits::{BATCH, IDLE_SOCKET_POLL_INTERVAL_NS, SOCKET_POLL_INTERVAL_NS};
use crate::port::{Port, PortSpec};
use crate::queues::{RxQueue, TxQueue};
use crate::slab::{EpollTag, Slab, SlabId};
use crate::unix_socket::Iovecs;

/// Index of the queue towards the driver (virtio 1.2, 5.10.2).
pub(crate) const RX: u16 = 0;
/// Index of the queue from the driver.
pub(crate) const TX: u16 = 1;
/// Index of the event queue: kept for front ends that hand it over, nothing is sent on it.
pub(crate) const EVENT: u16 = 2;

/// Packets of one batch for one Unix socket: they leave in one system call.
#[derive(Debug)]
pub(crate) struct SendRun {
    pub endpoint: Option<SlabId>,
    /// Index in the batch and payload bytes of each packet.
    pub pieces: Vec<(usize, u32)>,
}

/// Worker of a domain, which moves packets between guests and host programs.
#[derive(Debug)]
pub struct VsockEngine {
    pub(crate) guest_to_guest: bool,
    pub(crate) buffers: BufferPool,
    pub(crate) ports: Slab<Port>,
    pub(crate) by_cid: HashMap<u32, SlabId>,
    pub(crate) endpoints: Slab<Endpoint>,
    pub(crate) handshakes: Slab<Handshake>,
    pub(crate) epoll: OwnedFd,
    pub(crate) iovecs: Iovecs,
    pub(crate) send_run: SendRun,
    pub(crate) now_ns: u64,
    pub(crate) sockets_polled_ns: Option<u64>,
    pub(crate) next_deadline_ns: u64,
}

impl VsockEngine {
    pub(crate) fn new(
        guest_to_guest: bool,
        max_buffer_bytes: u64,
        now_ns: u64,
    ) -> io::Result<Self> {
        Ok(Self {
            guest_to_guest,
            buffers: BufferPool::new(max_buffer_bytes),
            ports: Slab::new(),
            by_cid: HashMap::new(),
            endpoints: Slab::new(),
            handshakes: Slab::new(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            iovecs: Iovecs::new(),
            send_run: SendRun { endpoint: None, pieces: Vec::with_capacity(BATCH) },
            now_ns,
            sockets_polled_ns: None,
            next_deadline_ns: NEVER_NS,
        })
    }

    pub(crate) fn add_port(&mut self, spec: PortSpec) -> io::Result<SlabId> {
        let cid = spec.cid;
        let id = self.ports.insert(Port::new(spec));
        let watched = match self.ports.get(id).and_then(|p| p.spec.listener.as_ref()) {
            Some(l) => epoll::add(
                &self.epoll,
                l.as_fd(),
                epoll::EventData::new_u64(EpollTag::Listener(id).to_u64()),
                epoll::EventFlags::IN | epoll::EventFlags::ET,
            ),
            None => Ok(()),
        };
        if let Err(e) = watched {
            self.ports.remove(id);
            return Err(e.into());
        }
        self.by_cid.insert(cid, id);
        Ok(id)
    }

    pub(crate) fn remove_port(&mut self, id: SlabId) -> bool {
        self.drop_connections(id);
        self.drop_handshakes(id);
        let Some(port) = self.ports.remove(id) else { return false };
        self.by_cid.remove(&port.spec.cid);
        true
    }

    /// Runs a queue from now on. Returns its kick descriptor, to be watched. A ring at its very
    /// start belongs to a driver that has just started: it knows none of the connections.
    pub(crate) fn start_queue(
        &mut self,
        id: SlabId,
        vring: Vring,
    ) -> Result<Option<RawFd>, String> {
        let index = vring.parts.index;
        let Some(port) = self.ports.get_mut(id) else { return Err("the port was removed".into()) };
        let running = match index {
            RX => port.rx.is_some(),
            TX => port.tx.is_some(),
            _ => port.event.is_some(),
        };
        if running {
            return Err(format!("queue {index} is running already"));
        }
        let fresh = vring.queue.position() == Position::fresh();
        let kick = vring.kick_fd();
        match index {
            RX => port.rx = Some(RxQueue::new(vring)),
            TX => port.tx = Some(TxQueue::new(vring)),
            _ => port.event = Some(vring),
        }
        match index {
            RX if !fresh => self.reset_old_clients(id),
            RX | TX if fresh => self.drop_connections(id),
            _ => {}
        }
        Ok(kick)
    }

    /// Stops a queue; nothing of it is in use afterwards.
    pub(crate) fn stop_queue(&mut self, id: SlabId, index: u16) -> Option<Vring> {
        let port = self.ports.get_mut(id)?;
        match index {
            RX => port.rx.take().map(RxQueue::into_vring),
            TX => port.tx.take().map(|tx| tx.vring),
            _ => port.event.take(),
        }
    }

    /// Moves all running queues to a changed memory table.
    pub(crate) fn set_memory(
        &mut self,
        id: SlabId,
        memory: &Arc<queue::GuestMemory>,
    ) -> Result<(), RingError> {
        let Some(port) = self.ports.get_mut(id) else { return Ok(()) };
        if let Some(rx) = &mut port.rx {
            rx.give_back();
            rx.vring().queue.set_memory(Arc::clone(memory))?;
        }
        if let Some(tx) = &mut port.tx {
            // A batch of the last turn keeps the old table, whose end would be this thread's work.
            tx.batch.release();
            tx.vring.queue.set_memory(Arc::clone(memory))?;
        }
        if let Some(event) = &mut port.event {
            event.queue.set_memory(Arc::clone(memory))?;
        }
        Ok(())
    }

    /// Drops queues and connections of a port.
    pub(crate) fn reset_port(&mut self, id: SlabId) {
        for index in [RX, TX, EVENT] {
            drop(self.stop_queue(id, index));
        }
        self.drop_connections(id);
    }

    pub(crate) fn note_deadline(&mut self, at_ns: u64) {
        self.next_deadline_ns = self.next_deadline_ns.min(at_ns);
    }

    /// Applies `f` to every port and adds up what it did.
    fn for_each_port(&mut self, mut f: impl FnMut(&mut Self, SlabId) -> usize) -> usize {
        let mut done = 0;
        for index in 0..self.ports.slots() {
            if let Some(id) = self.ports.id_at(index) {
                done += f(self, id);
            }
        }
        done
    }

    /// Arms a port's queues. Returns whether it has work. `at_ceiling`: its packets may wait.
    fn arm_port(&mut self, id: SlabId, at_ceiling: bool) -> bool {
        let now_ns = self.now_ns;
        let Some(port) = self.ports.get_mut(id) else { return false };
        let mut busy = port.can_accept(now_ns);
        if let Some(tx) = port.tx.as_mut().filter(|_| !at_ceiling) {
            // A queue without a kick wants to be polled.
            busy |=
                tx.vring.arm() || (tx.vring.kick_fd().is_none() && tx.vring.parts.health.is_live());
        }
        let waiting = !port.stray_resets.is_empty() || !port.ready.is_empty();
        if let Some(rx) = port.rx.as_mut().filter(|_| waiting) {
            // Receive buffers are interesting only to those who wait for them.
            busy |= !port.is_starved || rx.vring().arm();
        }
        busy
    }
}

impl Worker for VsockEngine {
    fn poll(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        self.now_ns = now_ns;
        let mut done = 0;
        if now_ns >= self.next_deadline_ns {
            self.expire_overdue();
        }
        if self.should_poll_sockets() {
            done += self.poll_sockets();
        }
        done += self.for_each_port(Self::accept_waiting);
        done += self.for_each_port(|e, id| e.serve_tx(id, ledger));
        done + self.for_each_port(|e, id| e.serve_rx(id, ledger))
    }

    fn arm(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm {
        self.now_ns = now_ns;
        // Events that are in the set already do not fire its descriptor again. With listeners only,
        // every event fires it: each is looked at before the next sleep.
        let events = if self.has_sockets() { self.poll_sockets() } else { 0 };
        let mut wake_at_ns = self.next_deadline_ns;
        let busy_ports = self.for_each_port(|e, id| {
            let vm = e.ports.get(id).map_or(VmId::NONE, |p| p.spec.vm);
            let ceiling_ns = ledger.until_ns(vm, now_ns);
            wake_at_ns = wake_at_ns.min(ceiling_ns.unwrap_or(NEVER_NS));
            usize::from(e.arm_port(id, ceiling_ns.is_some()))
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
            if let Some(port) = e.ports.get_mut(id) {
                if let Some(tx) = &mut port.tx {
                    tx.vring.disarm();
                }
                if let Some(rx) = &mut port.rx {
                    rx.vring().disarm();
                }
            }
            0
        });
    }

    fn fired(&mut self, fd: RawFd) {
        self.sockets_polled_ns = None;
        self.for_each_port(|e, id| {
            let Some(port) = e.ports.get_mut(id) else { return 0 };
            for vring in
                [port.tx.as_mut().map(|t| &mut t.vring), port.rx.as_mut().map(RxQueue::vring)]
                    .into_iter()
                    .flatten()
            {
                if vring.kick_fd() == Some(fd) {
                    vring.count_kick();
                }
            }
            0
        });
    }
}

impl VsockEngine {
    /// Whether it is time to poll the Unix sockets.
    fn should_poll_sockets(&self) -> bool {
        let interval_ns =
            if self.has_sockets() { SOCKET_POLL_INTERVAL_NS } else { IDLE_SOCKET_POLL_INTERVAL_NS };
        self.sockets_polled_ns.is_none_or(|at_ns| self.now_ns.saturating_sub(at_ns) >= interval_ns)
    }

    /// Whether there are Unix sockets besides the listeners.
    fn has_sockets(&self) -> bool {
        self.endpoints.len() + self.handshakes.len() > 0
    }
}
