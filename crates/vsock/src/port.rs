//! Ports, one for each guest of a domain: settings, queues, counts of connections.

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use base::reject_log::RejectLog;
use queue::Vring;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use sidecore::VmId;

use crate::limits::{FIRST_HOST_PORT, HIGHEST_PRIVILEGED_PORT, MAX_HANDSHAKES, MAX_STRAY_RESETS};
use crate::metrics::VsockStats;
use crate::packet::{ConnectionKey, HOST_CID};
use crate::port_config::HostPorts;
use crate::queues::{RxQueue, TxQueue};
use crate::service::{HostService, ServiceSink};
use crate::slab::{ReadyList, SlabId};
use crate::unix_socket::{Listener, ProgramSockets};

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
