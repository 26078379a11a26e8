//! A switch as the rest of the daemon sees it: ports come and go, the uplink is set, addresses are
//! listed. Everything here runs between two rounds of the sidecore.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};

use base::clock::Clock;
use base::counter::QueueStats;
use base::io::Wire;
use base::limits::{MAX_NAME_LEN_BYTES, MAX_PORTS, MAX_QUEUE_PAIRS};
use base::log_limit::LogLimit;
use base::random::{OsRandom, Random};
use sidecore::{Sidecore, WorkerRef};

use crate::backlog::Backlogs;
use crate::binding::{Binding, Shared, Tables};
use crate::ceiling::Ceiling;
use crate::device::{MIN_MTU, NetPort, NetPortConfig, offered};
use crate::engine::Engine;
use crate::error::NetError;
use crate::fdb::{Ip, PortId, Table};
use crate::forward::Fabric;
use crate::metrics::SwitchStats;
use crate::moves::Moves;
use crate::port::{Place, Port, queue_count};
use crate::uplink::Uplink;
use frame::Mac;

/// Most MAC addresses a switch can be told to hold: 64 entries per port of a full daemon.
const MAX_MACS: usize = 65_536;

/// IP addresses a switch holds, learned and configured: four per port of a full daemon.
const MAX_IPS: usize = 4 * MAX_PORTS;

/// How long a learned IP address stays with a silent port. Longer than any neighbour cache, so
/// that an address does not change hands while others still send to its owner.
const IP_AGE_S: u64 = 3600;

/// Settings of a switch.
#[derive(Debug, Clone)]
pub struct SwitchConfig {
    /// Name, for logs and metrics.
    pub name: String,
    /// How long senders are held for a receiver without buffers, or with a full window, in
    /// microseconds; then it counts as stalled and its frames are dropped. The frames it takes make
    /// it longer.
    pub hold_us: u32,
    /// How long a learned MAC address is kept unseen, in seconds.
    pub mac_age_s: u32,
    /// Most MAC addresses of the switch; half of them may be learned from the uplink.
    pub max_macs: usize,
    /// Most learned MAC addresses of one port.
    pub max_macs_per_port: u32,
}

impl SwitchConfig {
    /// A switch with the defaults. 20 ms of holding outlasts a guest that is descheduled for a few
    /// ticks; 300 s is the ageing time of IEEE 802.1Q.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            hold_us: 20_000,
            mac_age_s: 300,
            max_macs: 4096,
            max_macs_per_port: 64,
        }
    }
}

/// One known MAC address, for listings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MacEntry {
    /// The address.
    pub mac: [u8; 6],
    /// The port's name; none: the uplink.
    pub port: Option<String>,
    /// Configured or bound: does not age.
    pub fixed: bool,
    /// Seconds since it was last seen.
    pub age_s: u64,
}

/// A switch; see the crate's text. Dropping the last handle leaves it running: see
/// [`Switch::shutdown`].
#[derive(Clone)]
pub struct Switch {
    config: Arc<SwitchConfig>,
    worker: WorkerRef<Engine>,
    clock: Arc<dyn Clock>,
    stats: Arc<SwitchStats>,
    serials: Arc<AtomicU64>,
}

impl std::fmt::Debug for Switch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Switch").field("config", &self.config).finish_non_exhaustive()
    }
}

fn in_range(what: &'static str, value: u64, min: u64, max: u64) -> Result<(), NetError> {
    if (min..=max).contains(&value) {
        return Ok(());
    }
    Err(NetError::OutOfRange { what, value, min, max })
}

impl Switch {
    /// A switch without ports on a sidecore. `clock` is the sidecore's.
    pub fn new(
        core: &Sidecore,
        config: SwitchConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, NetError> {
        let name_len = config.name.len() as u64;
        in_range("switch name (bytes)", name_len, 1, MAX_NAME_LEN_BYTES as u64)?;
        in_range("hold_us", config.hold_us.into(), 0, 10_000_000)?;
        in_range("mac_age_s", config.mac_age_s.into(), 1, 1_000_000)?;
        in_range("max_macs", config.max_macs as u64, 1, MAX_MACS as u64)?;
        in_range("max_macs_per_port", config.max_macs_per_port.into(), 1, MAX_MACS as u64)?;
        let stats = Arc::new(SwitchStats::default());
        let worker =
            core.add_named(format!("switch {}", config.name), engine(&config, Arc::clone(&stats)))?;
        let serials = Arc::new(AtomicU64::new(1));
        Ok(Self { config: Arc::new(config), worker, clock, stats, serials })
    }

    /// Name of the switch.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The number of the sidecore that it is on now.
    pub fn sidecore(&self) -> usize {
        self.worker.core().index()
    }

    /// Whether its worker is there: false after a panic, or when the sidecore has ended.
    pub fn is_alive(&self) -> bool {
        self.worker.call(|_, _| ()).is_ok()
    }

    /// Counters of the switch.
    pub fn stats(&self) -> &SwitchStats {
        &self.stats
    }

    /// Sets the way out of the host, or takes it away. All offloads are assumed on the wire; see
    /// [`Switch::set_uplink_with`].
    pub fn set_uplink(
        &self,
        wire: Option<Box<dyn Wire>>,
        stats: Arc<QueueStats>,
    ) -> Result<(), NetError> {
        self.set_uplink_with(wire, stats, true)
    }

    /// Sets the uplink, as [`Switch::set_uplink`]; `uso`: the wire takes UDP super-packets (else
    /// they are cut in software). Checksum and TCP offloads are asked of every wire.
    pub fn set_uplink_with(
        &self,
        wire: Option<Box<dyn Wire>>,
        stats: Arc<QueueStats>,
        uso: bool,
    ) -> Result<(), NetError> {
        let uplink = wire.map(|wire| Box::new(Uplink::new(wire, stats, uso)));
        let backlogs = uplink.as_ref().map(|_| Backlogs::new());
        let old = self.worker.call(move |engine, watcher| {
            if let Some(backlogs) = backlogs.filter(|_| engine.fabric.backlogs.is_none()) {
                engine.fabric.backlogs = backlogs;
            }
            engine.replace_uplink(uplink, watcher)
        })?;
        // A wire may wait for the kernel when it goes: not on the sidecore.
        let (old, watched) = old;
        drop(old);
        watched.map_err(|source| NetError::Uplink { switch: self.config.name.clone(), source })
    }

    /// A new port, without a driver yet.
    pub fn add_port(&self, config: NetPortConfig) -> Result<Arc<NetPort>, NetError> {
        in_range("port name (bytes)", config.name.len() as u64, 1, MAX_NAME_LEN_BYTES as u64)?;
        in_range("queue_pairs", config.queue_pairs.into(), 1, MAX_QUEUE_PAIRS.into())?;
        in_range("mtu", config.mtu.into(), MIN_MTU.into(), u16::MAX.into())?;
        let (offered, pairs) = (offered(&config), config.queue_pairs);
        let (whole_device, broadcasts_per_s) = (config.whole_device, config.broadcasts_per_s);
        let serial = self.serials.fetch_add(1, Ordering::Relaxed);
        let shared = Shared {
            macs: config.shared_macs.iter().copied().map(Mac::new).collect(),
            ips: config.shared_addresses.iter().copied().map(Ip::from).collect(),
        };
        let NetPortConfig { name, vm, mac, addresses, bind, allow, mtu, .. } = config;
        let configured_mac = mac;
        let mac = mac.map(Mac::new);
        let mut all = mac.iter().chain(&shared.macs);
        if let Some(mac) = all.find(|m| m.is_group() || m.is_zero()) {
            let why = "a group address or zero";
            return Err(NetError::BadMac { port: name, mac: mac.to_string(), why });
        }
        let binding = Binding {
            mode: bind,
            mac,
            mac_configured: mac.is_some(),
            learn_ips: addresses.is_empty(),
            shared,
            allow,
        };
        let port = Port::new(serial, name.as_str().into(), pairs, mtu, binding);
        let broadcasts = Ceiling::per_second(broadcasts_per_s);
        let announce = Arc::clone(&port.announce);
        let port = Box::new(Port { vm, broadcasts, ..port });
        let now_ns = self.clock.now_ns();
        let switch = self.config.name.clone();
        let id = self.worker.call(move |e, _| e.add_port(port, &addresses, &switch, now_ns))??;
        Ok(Arc::new(NetPort {
            worker: self.worker.clone(),
            place: Place { id, serial },
            clock: Arc::clone(&self.clock),
            announcements: LogLimit::default(),
            name,
            offered,
            queue_pairs: pairs,
            whole_device,
            features: AtomicU64::new(0),
            link_up: AtomicBool::new(true),
            announce,
            mac: configured_mac,
            mtu: AtomicU16::new(mtu),
            stats: (0..queue_count(pairs)).map(|_| Arc::default()).collect(),
            notifier: std::sync::Mutex::new(None),
        }))
    }

    /// Takes a port away; its queues stop, its addresses are free. A port that is not there is no
    /// error.
    pub fn remove_port(&self, port: &NetPort) -> Result<(), NetError> {
        let place = port.place;
        let port = self.worker.call(move |engine, watcher| engine.remove_port(place, watcher))?;
        // Queues are unmapped here, not on the sidecore.
        drop(port);
        Ok(())
    }

    /// Every known MAC address. Learning is by address alone, shared by all VLANs.
    pub fn macs(&self) -> Result<Vec<MacEntry>, NetError> {
        let now_ns = self.clock.now_ns();
        let macs = self.worker.call(move |engine, _| list_macs(&engine.fabric, now_ns))?;
        Ok(macs)
    }

    /// Takes the switch off its sidecore; ports fail from then on.
    pub fn shutdown(&self) -> Result<(), NetError> {
        drop(self.worker.remove()?);
        Ok(())
    }
}

fn engine(config: &SwitchConfig, stats: Arc<SwitchStats>) -> Engine {
    let age_ns = |s: u64| s * 1_000_000_000;
    let tables = Tables {
        macs: Table::new(config.max_macs, age_ns(config.mac_age_s.into()), OsRandom.next_u64()),
        ips: Table::new(MAX_IPS, age_ns(IP_AGE_S), OsRandom.next_u64()),
        max_macs_per_port: config.max_macs_per_port,
        max_macs_uplink: (config.max_macs as u32).div_ceil(2),
        shared: Shared::default(),
        moves: Moves::default(),
        stats: Arc::clone(&stats),
    };
    let max_touched = MAX_PORTS * usize::from(MAX_QUEUE_PAIRS);
    Engine::new(tables, u64::from(config.hold_us) * 1000, max_touched, stats)
}

fn list_macs(fabric: &Fabric, now_ns: u64) -> Vec<MacEntry> {
    let name = |owner: PortId| {
        let port = fabric.ports.get(usize::from(owner))?.as_ref()?;
        Some(port.name.to_string())
    };
    let list = fabric.tables.macs.list(now_ns);
    list.into_iter()
        .map(|l| MacEntry {
            mac: l.key.bytes(),
            port: name(l.owner),
            fixed: l.fixed,
            age_s: l.age_ns / 1_000_000_000,
        })
        .collect()
}
