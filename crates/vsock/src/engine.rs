//! The worker of a domain: its state, and one round.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::sync::Arc;

use base::reject_log::RejectLog;
use queue::{Position, RingError, Vring};
use rustix::event::epoll;
use sidecore::{Arm, Ledger, VmId, Worker};

use crate::buffer::ByteRing;
use crate::connection::{Connection, NEVER_NS};
use crate::device::HostPorts;
use crate::host::{Iovecs, Listener, Programs};
use crate::limits::{BATCH, IDLE_LOOK_INTERVAL_NS, LOOK_INTERVAL_NS, MAX_STRAYS, SPARE_BUFFERS};
use crate::metrics::VsockStats;
use crate::packet::Key;
use crate::queues::{RxQueue, TxQueue};
use crate::service::Service;
use crate::table::{Id, Linked, Links, ReadyList, Slab, Tag};

/// Index of the queue towards the driver (virtio 1.2, 5.10.2).
pub(crate) const RX: u16 = 0;
/// Index of the queue from the driver.
pub(crate) const TX: u16 = 1;
/// Index of the event queue: kept for front ends that hand it over, nothing is sent on it.
pub(crate) const EVENT: u16 = 2;

/// What a port is made of.
#[derive(Debug)]
pub(crate) struct PortSpec {
    /// Whose account packets are charged to.
    pub vm: VmId,
    pub cid: u32,
    pub programs: Programs,
    pub max_connections: u32,
    pub max_half_open: u32,
    pub buffer_bytes: u32,
    pub host_ports: HostPorts,
    pub services: Vec<Service>,
    pub listener: Option<Listener>,
    pub stats: Arc<VsockStats>,
}

/// A guest of the domain.
#[derive(Debug)]
pub(crate) struct Port {
    pub spec: PortSpec,
    pub rx: Option<RxQueue>,
    pub tx: Option<TxQueue>,
    pub event: Option<Vring>,
    /// The guest's names of its connections.
    pub keys: HashMap<Key, Id>,
    /// Connections with something for the guest.
    pub ready: ReadyList,
    /// Resets for packets of no connection: who, and of which socket type.
    pub strays: VecDeque<(Key, u16)>,
    /// Its endpoints, those without a key included.
    pub open: u32,
    pub half_open: u32,
    /// Of those, by the CID of the guest that asked for them.
    pub asked_by: HashMap<u32, Asked>,
    pub handshakes: u32,
    /// The listener may have connections for us, but not before this time.
    pub accept_ready: bool,
    pub accept_after_ns: u64,
    /// Packets wait for receive buffers.
    pub starved: bool,
    pub next_host_port: u32,
    /// What was told of packets that make no sense.
    pub rejects: RejectLog,
}

/// What one guest has asked of another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    pub open: u32,
    pub half_open: u32,
}

impl Port {
    fn new(spec: PortSpec) -> Self {
        Self {
            keys: HashMap::with_capacity(spec.max_connections as usize),
            spec,
            rx: None,
            tx: None,
            event: None,
            ready: ReadyList::default(),
            strays: VecDeque::with_capacity(MAX_STRAYS),
            open: 0,
            half_open: 0,
            asked_by: HashMap::new(),
            handshakes: 0,
            accept_ready: false,
            accept_after_ns: 0,
            starved: false,
            next_host_port: crate::limits::FIRST_HOST_PORT,
            rejects: RejectLog::default(),
        }
    }

    /// True when the driver can be talked to.
    pub fn is_running(&self) -> bool {
        self.rx.is_some() && self.tx.is_some()
    }
}

/// The Unix end of a connection.
#[derive(Debug)]
pub(crate) struct HostEnd {
    pub fd: OwnedFd,
    /// May have bytes or its end for us.
    pub readable: bool,
    /// May take bytes.
    pub writable: bool,
    /// The program's bytes end: what is left must be read to its end, since no event will come.
    pub ending: bool,
    /// The program has closed both directions.
    pub hung_up: bool,
    /// The program opened it and waits for `OK`.
    pub awaits_ok: bool,
}

/// What is behind a connection.
#[derive(Debug)]
pub(crate) enum Far {
    /// A program of the host.
    Host(HostEnd),
    /// Another guest's connection.
    Guest(Id),
    /// Nothing any more.
    Gone,
}

/// One connection, its buffer and its other end.
#[derive(Debug)]
pub(crate) struct Endpoint {
    pub port: Id,
    pub conn: Connection,
    pub far: Far,
    /// Bytes of the guest for the far end.
    pub ring: ByteRing,
    pub links: Links,
    /// The guest has forgotten it; only bytes in `ring` may keep it.
    pub guest_done: bool,
    pub counted_half_open: bool,
    /// The CID of the guest that asked for it, on the side of the guest that was asked.
    pub asked_by: Option<u32>,
    pub opened_ns: u64,
    pub bytes_from_guest: u64,
    pub bytes_to_guest: u64,
}

impl Linked for Endpoint {
    fn links(&mut self) -> &mut Links {
        &mut self.links
    }
}

/// A Unix connection that has not said what it wants.
#[derive(Debug)]
pub(crate) struct Handshake {
    pub fd: OwnedFd,
    pub port: Id,
    pub deadline_ns: u64,
}

/// Packets of one batch for one Unix socket: they leave in one system call.
#[derive(Debug)]
pub(crate) struct Run {
    pub endpoint: Option<Id>,
    /// Place in the batch and payload bytes.
    pub pieces: Vec<(usize, u32)>,
}

/// See the crate's text.
#[derive(Debug)]
pub struct Engine {
    pub(crate) guest_to_guest: bool,
    pub(crate) max_buffer_bytes: u64,
    pub(crate) buffer_bytes: u64,
    pub(crate) spare: Vec<ByteRing>,
    pub(crate) ports: Slab<Port>,
    pub(crate) by_cid: HashMap<u32, Id>,
    pub(crate) endpoints: Slab<Endpoint>,
    pub(crate) handshakes: Slab<Handshake>,
    pub(crate) epoll: OwnedFd,
    pub(crate) iovecs: Iovecs,
    pub(crate) run: Run,
    pub(crate) now_ns: u64,
    pub(crate) looked_ns: Option<u64>,
    pub(crate) next_deadline_ns: u64,
}

impl Engine {
    pub(crate) fn new(
        guest_to_guest: bool,
        max_buffer_bytes: u64,
        now_ns: u64,
    ) -> io::Result<Self> {
        Ok(Self {
            guest_to_guest,
            max_buffer_bytes,
            buffer_bytes: 0,
            spare: Vec::with_capacity(SPARE_BUFFERS),
            ports: Slab::new(),
            by_cid: HashMap::new(),
            endpoints: Slab::new(),
            handshakes: Slab::new(),
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            iovecs: Iovecs::new(),
            run: Run { endpoint: None, pieces: Vec::with_capacity(BATCH) },
            now_ns,
            looked_ns: None,
            next_deadline_ns: NEVER_NS,
        })
    }

    pub(crate) fn add_port(&mut self, spec: PortSpec) -> io::Result<Id> {
        let cid = spec.cid;
        let id = self.ports.insert(Port::new(spec));
        let watched = match self.ports.get(id).and_then(|p| p.spec.listener.as_ref()) {
            Some(l) => epoll::add(
                &self.epoll,
                l.as_fd(),
                epoll::EventData::new_u64(Tag::Listener(id).to_u64()),
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

    pub(crate) fn remove_port(&mut self, id: Id) -> bool {
        self.drop_connections(id);
        self.drop_handshakes(id);
        let Some(port) = self.ports.remove(id) else { return false };
        self.by_cid.remove(&port.spec.cid);
        true
    }

    /// Runs a queue from now on; its kick descriptor, to be watched. A ring at its very start
    /// belongs to a driver that has just started: it knows none of the connections.
    pub(crate) fn start_queue(&mut self, id: Id, vring: Vring) -> Result<Option<RawFd>, String> {
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
    pub(crate) fn stop_queue(&mut self, id: Id, index: u16) -> Option<Vring> {
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
        id: Id,
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
    pub(crate) fn reset_port(&mut self, id: Id) {
        for index in [RX, TX, EVENT] {
            drop(self.stop_queue(id, index));
        }
        self.drop_connections(id);
    }

    pub(crate) fn note_deadline(&mut self, at_ns: u64) {
        self.next_deadline_ns = self.next_deadline_ns.min(at_ns);
    }

    /// Applies `f` to every port and adds up what it did.
    fn each_port(&mut self, mut f: impl FnMut(&mut Self, Id) -> usize) -> usize {
        let mut done = 0;
        for index in 0..self.ports.slots() {
            if let Some(id) = self.ports.id_at(index) {
                done += f(self, id);
            }
        }
        done
    }

    /// `at_ceiling`: its packets need not be looked at now.
    fn arm_port(&mut self, id: Id, at_ceiling: bool) -> bool {
        let now_ns = self.now_ns;
        let Some(port) = self.ports.get_mut(id) else { return false };
        let mut busy = port.can_accept(now_ns);
        if let Some(tx) = port.tx.as_mut().filter(|_| !at_ceiling) {
            // A queue without a kick wants to be polled.
            busy |=
                tx.vring.arm() || (tx.vring.kick_fd().is_none() && tx.vring.parts.health.is_live());
        }
        let waiting = !port.strays.is_empty() || !port.ready.is_empty();
        if let Some(rx) = port.rx.as_mut().filter(|_| waiting) {
            // Receive buffers are interesting only to those who wait for them.
            busy |= !port.starved || rx.vring().arm();
        }
        busy
    }
}

impl Worker for Engine {
    fn poll(&mut self, now_ns: u64, ledger: &mut Ledger) -> usize {
        self.now_ns = now_ns;
        let mut done = 0;
        if now_ns >= self.next_deadline_ns {
            self.scan();
        }
        if self.should_look() {
            done += self.look();
        }
        done += self.each_port(Self::accept_waiting);
        done += self.each_port(|e, id| e.serve_tx(id, ledger));
        done + self.each_port(|e, id| e.serve_rx(id, ledger))
    }

    fn arm(&mut self, now_ns: u64, ledger: &mut Ledger) -> Arm {
        self.now_ns = now_ns;
        // Events that are in the set already do not fire its descriptor again. With listeners only,
        // every event fires it: each is looked at before the next sleep.
        let events = if self.has_sockets() { self.look() } else { 0 };
        let mut wake_at_ns = self.next_deadline_ns;
        let busy_ports = self.each_port(|e, id| {
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
        self.each_port(|e, id| {
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
        self.looked_ns = None;
        self.each_port(|e, id| {
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

impl Engine {
    /// Whether it is time to look at the Unix sockets, while polling.
    fn should_look(&self) -> bool {
        let interval_ns = if self.has_sockets() { LOOK_INTERVAL_NS } else { IDLE_LOOK_INTERVAL_NS };
        self.looked_ns.is_none_or(|at_ns| self.now_ns.saturating_sub(at_ns) >= interval_ns)
    }

    /// Whether there are Unix sockets besides the listeners.
    fn has_sockets(&self) -> bool {
        self.endpoints.len() + self.handshakes.len() > 0
    }
}
