//! Ports, one for each guest of a domain: settings, queues, counts of connections.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;

use base::reject_log::RejectLog;
use queue::{GuestMemory, Position, RingError, Vring};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use sidecore::VmId;

use crate::limits::{FIRST_HOST_PORT, HIGHEST_PRIVILEGED_PORT, MAX_HANDSHAKES, MAX_STRAY_RESETS};
use crate::metrics::VsockStats;
use crate::packet::{ConnectionKey, HOST_CID, TYPE_STREAM};
use crate::port_config::HostPorts;
use crate::queues::{RX, RxQueue, TX, TxQueue};
use crate::service::{HostService, ServiceSink};
use crate::slab::{ReadyList, SlabId};
use crate::unix_socket::{Listener, ProgramSockets};

/// Highest guest ports, of which the next clients of privileged services take the first free one.
const CLIENT_PORTS: u32 = 4;

/// Settings of a port.
#[derive(Debug)]
pub(crate) struct PortSpec {
    /// VM whose account packets are charged to.
    pub vm: VmId,
    pub cid: u32,
    pub programs: ProgramSockets,
    pub max_connections: u32,
    pub max_half_open: u32,
    pub buffer_bytes: u32,
    pub host_ports: HostPorts,
    pub services: Vec<HostService>,
    pub listener: Option<Listener>,
    pub stats: Arc<VsockStats>,
}

/// Port of one guest: its queues and its connections.
#[derive(Debug)]
pub(crate) struct Port {
    pub spec: PortSpec,
    pub rx: Option<RxQueue>,
    pub tx: Option<TxQueue>,
    pub event: Option<Vring>,
    /// Whether the driver of both queues is the one that the connections are of. Until then neither
    /// is served.
    pub knows_driver: bool,
    /// Connections by the guest's keys.
    pub keys: HashMap<ConnectionKey, SlabId>,
    /// Connections with something for the guest.
    pub ready: ReadyList,
    /// Resets for packets of no connection: key and socket type.
    pub stray_resets: VecDeque<(ConnectionKey, u16)>,
    /// Number of endpoints, those without a key included.
    pub open: u32,
    pub half_open: u32,
    /// Connections that other guests asked for, by their CIDs.
    pub peer_usage: HashMap<u32, PeerUsage>,
    pub handshakes: u32,
    /// Whether the listener may have connections for us, to be accepted not before the time below.
    pub accept_ready: bool,
    pub accept_after_ns: u64,
    /// Whether packets wait for receive buffers.
    pub is_starved: bool,
    pub next_host_port: u32,
    /// Log limit for packets that make no sense.
    pub rejects: RejectLog,
}

/// Driver that a port meets when both of its queues run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Driver {
    /// One that has just started, and knows none of the connections.
    New,
    /// One that goes on after a pause, or after a restart of the daemon.
    Old,
}

/// Connections that one guest has asked another for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PeerUsage {
    pub open: u32,
    pub half_open: u32,
}

impl Port {
    pub fn new(spec: PortSpec) -> Self {
        Self {
            keys: HashMap::with_capacity(spec.max_connections as usize),
            spec,
            rx: None,
            tx: None,
            event: None,
            knows_driver: false,
            ready: ReadyList::default(),
            stray_resets: VecDeque::with_capacity(MAX_STRAY_RESETS),
            open: 0,
            half_open: 0,
            peer_usage: HashMap::new(),
            handshakes: 0,
            accept_ready: false,
            accept_after_ns: 0,
            is_starved: false,
            next_host_port: FIRST_HOST_PORT,
            rejects: RejectLog::default(),
        }
    }

    /// Whether packets can go to the driver and come from it.
    pub fn is_running(&self) -> bool {
        self.rx.is_some() && self.tx.is_some()
    }

    pub fn has_queue(&self, index: u16) -> bool {
        match index {
            RX => self.rx.is_some(),
            TX => self.tx.is_some(),
            _ => self.event.is_some(),
        }
    }

    /// Takes a ring as the queue of its index.
    pub fn set_queue(&mut self, vring: Vring) {
        match vring.parts.index {
            RX => self.rx = Some(RxQueue::new(vring)),
            TX => self.tx = Some(TxQueue::new(vring)),
            _ => self.event = Some(vring),
        }
    }

    /// Gives the ring of a queue away; nothing of it is in use afterwards.
    pub fn take_queue(&mut self, index: u16) -> Option<Vring> {
        let vring = match index {
            RX => self.rx.take().map(RxQueue::into_vring),
            TX => self.tx.take().map(|tx| tx.vring),
            _ => self.event.take(),
        };
        self.knows_driver &= self.rx.is_some() || self.tx.is_some();
        vring
    }

    /// Finds out whose queues these are, once both run after neither did. A new driver's rings are
    /// both at their very start. One queue alone says nothing: it starts anew with every change of
    /// its doorbells, before its first packet as well as later.
    pub fn meet_driver(&mut self) -> Option<Driver> {
        let (Some(rx), Some(tx)) = (&mut self.rx, &self.tx) else { return None };
        if std::mem::replace(&mut self.knows_driver, true) {
            return None;
        }
        let is_fresh = |vring: &Vring| vring.queue.position() == Position::fresh();
        let is_new = is_fresh(rx.vring()) && is_fresh(&tx.vring);
        Some(if is_new { Driver::New } else { Driver::Old })
    }

    /// Moves all running queues to a changed memory table.
    pub fn set_memory(&mut self, memory: &Arc<GuestMemory>) -> Result<(), RingError> {
        if let Some(rx) = &mut self.rx {
            rx.give_back();
            rx.vring().queue.set_memory(Arc::clone(memory))?;
        }
        if let Some(tx) = &mut self.tx {
            // A batch of the last turn keeps the old table, whose end would be this thread's work.
            tx.batch.release();
            tx.vring.queue.set_memory(Arc::clone(memory))?;
        }
        if let Some(event) = &mut self.event {
            event.queue.set_memory(Arc::clone(memory))?;
        }
        Ok(())
    }

    /// Arms the queues. Returns whether there is work. `at_ceiling`: the guest's packets may wait.
    pub fn arm(&mut self, now_ns: u64, at_ceiling: bool) -> bool {
        let mut busy = self.can_accept(now_ns);
        if !self.knows_driver {
            return busy;
        }
        if let Some(tx) = self.tx.as_mut().filter(|_| !at_ceiling) {
            // A queue without a kick wants to be polled.
            busy |=
                tx.vring.arm() || (tx.vring.kick_fd().is_none() && tx.vring.parts.health.is_live());
        }
        let waiting = !self.stray_resets.is_empty() || !self.ready.is_empty();
        if let Some(rx) = self.rx.as_mut().filter(|_| waiting) {
            // Receive buffers are interesting only to those who wait for them.
            busy |= !self.is_starved || rx.vring().arm();
        }
        busy
    }

    pub fn disarm(&mut self) {
        if let Some(tx) = &mut self.tx {
            tx.vring.disarm();
        }
        if let Some(rx) = &mut self.rx {
            rx.vring().disarm();
        }
    }

    /// Counts a kick at the queue whose descriptor this is, if any.
    pub fn count_kick(&mut self, fd: RawFd) {
        let tx = self.tx.as_mut().map(|tx| &mut tx.vring);
        let rx = self.rx.as_mut().map(RxQueue::vring);
        for vring in [tx, rx].into_iter().flatten() {
            if vring.kick_fd() == Some(fd) {
                vring.count_kick();
            }
        }
    }

    /// Queues a reset for a packet of no connection.
    pub fn queue_stray_reset(&mut self, key: ConnectionKey, kind: u16) {
        if self.stray_resets.len() < MAX_STRAY_RESETS {
            self.stray_resets.push_back((key, kind));
        } else {
            self.spec.stats.resets_dropped.add(1);
        }
    }

    /// Resets old clients of a guest that goes on after a restart of the daemon or a pause. Its
    /// clients of privileged services, which choose their own ports from the highest down, may wait
    /// for an answer that never comes: they get resets for connections that we do not know.
    pub fn reset_old_clients(&mut self) {
        let lowest = HIGHEST_PRIVILEGED_PORT + 1 - CLIENT_PORTS;
        let services = self.spec.services.iter().filter(|service| service.privileged);
        let unknown: Vec<ConnectionKey> = services
            .flat_map(|service| {
                (lowest..=HIGHEST_PRIVILEGED_PORT).map(|guest_port| ConnectionKey {
                    guest_port,
                    peer_cid: HOST_CID,
                    peer_port: service.port,
                })
            })
            .filter(|key| !self.keys.contains_key(key))
            .collect();
        unknown.into_iter().for_each(|key| self.queue_stray_reset(key, TYPE_STREAM));
    }

    /// Forgets what its guest was owed, which knows none of it (any more), and tells services.
    pub fn forget_guest(&mut self) {
        self.stray_resets.clear();
        self.is_starved = false;
        let hooks = self.spec.services.iter().filter_map(|s| s.on_guest_reset.as_ref());
        hooks.for_each(|gone| gone());
    }

    pub fn has_room(&self, half_open: bool) -> bool {
        self.open < self.spec.max_connections
            && (!half_open || self.half_open < self.spec.max_half_open)
    }

    /// Whether the guest `cid` may have one more connection here. It may have as many as it leaves
    /// free, so that there is always something left for the next one: a single guest gets half of
    /// the port's limits, two a third each.
    pub fn has_room_for(&self, cid: u32) -> bool {
        let asked = self.peer_usage.get(&cid).copied().unwrap_or_default();
        asked.open < self.spec.max_connections.saturating_sub(self.open)
            && asked.half_open < self.spec.max_half_open.saturating_sub(self.half_open)
    }

    /// Bytes of its connections' buffers.
    pub fn buffer_bytes(&self) -> u64 {
        u64::from(self.open) * u64::from(self.spec.buffer_bytes)
    }

    /// Counts one connection, or half-open one, less for the guest that asked for it.
    pub fn uncount_peer(&mut self, by: Option<u32>, uncount: impl FnOnce(&mut PeerUsage)) {
        let Some(cid) = by else { return };
        if let Some(asked) = self.peer_usage.get_mut(&cid) {
            uncount(asked);
            if *asked == PeerUsage::default() {
                self.peer_usage.remove(&cid);
            }
        }
    }

    pub fn count(&self) {
        self.spec.stats.connections.set(u64::from(self.open));
        self.spec.stats.half_open.set(u64::from(self.half_open));
    }

    /// Finds a free number for the host's side of a connection to `guest_port`.
    pub fn free_host_port(&mut self, guest_port: u32) -> ConnectionKey {
        loop {
            let peer_port = self.next_host_port;
            self.next_host_port = FIRST_HOST_PORT | (peer_port.wrapping_add(1) & !(3 << 30));
            let key = ConnectionKey { guest_port, peer_cid: HOST_CID, peer_port };
            // Ends: there are fewer connections than numbers.
            if !self.keys.contains_key(&key) {
                return key;
            }
        }
    }

    pub fn can_accept(&self, now_ns: u64) -> bool {
        self.accept_ready && self.handshakes < MAX_HANDSHAKES && now_ns >= self.accept_after_ns
    }
}

/// Socket behind a port of the host to which a guest may connect.
pub(crate) struct HostSocket {
    /// The end of the socket that is ours, non-blocking.
    pub fd: OwnedFd,
    /// Other end for a service, with the sink that gets it once the connection is open.
    pub handover: Option<(ServiceSink, OwnedFd)>,
}

impl PortSpec {
    /// Opens the host's side of `key`: a service of ours or a program's Unix socket. None: the
    /// guest may not have it, or nobody listens.
    pub fn open(&self, key: ConnectionKey) -> Option<HostSocket> {
        let number = key.peer_port;
        if let Some(service) = self.services.iter().find(|s| s.port == number) {
            if service.privileged && key.guest_port > HIGHEST_PRIVILEGED_PORT {
                self.stats.unprivileged.add(1);
                return None;
            }
            let (fd, other) = socket_pair().ok()?;
            return Some(HostSocket { fd, handover: Some((Arc::clone(&service.sink), other)) });
        }
        if !self.host_ports.allows(number) {
            return None;
        }
        let fd = self.programs.connect(number).ok()?;
        Some(HostSocket { fd, handover: None })
    }
}

/// Makes a pair of streams; the first, ours, does not block.
fn socket_pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC;
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::io::ioctl_fionbio(&pair.0, true)?;
    Ok(pair)
}
