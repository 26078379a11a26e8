//! A port as the switch's thread sees it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::counter::DropReason;
use base::reject_log::RejectLog;
use queue::{Batch, Chain, Completion, Vring};
use sidecore::{VmId, least_charge_bytes};

use crate::backlog::Backlog;
use crate::binding::Binding;
use crate::ceiling::Ceiling;
use crate::fdb::PortId;
use crate::features;
use crate::filter::Filter;
use crate::forward_cache::ForwardCache;
use crate::hook::HookSlot;
use crate::metrics::SwitchStats;
use crate::outcome::Held;
use crate::rxq::{RxQueue, vnet_len};
use frame::{Allowed, VNET_LEN};

/// Frames taken from a transmit queue at once.
pub const TX_BATCH: usize = 64;

/// Least charge for a frame: handling one takes as long as copying so much.
pub(crate) const MIN_CHARGE_BYTES: u64 = 512;

/// Segments of one batch: Linux sends up to 19 for a frame.
const TX_SEGS: usize = TX_BATCH * 20;

/// Requests of a control queue served in a round: they are rare, and frames wait meanwhile.
pub(crate) const CONTROL_BATCH: usize = 4;

/// Segments of them: four descriptors each, and more where a driver cuts them up.
const CONTROL_SEGS: usize = base::limits::MAX_CHAIN_SEGS + 16;

/// Charge for a frame in a chain of the sender's.
#[inline]
pub(crate) fn charge_bytes(chain: &Chain<'_>) -> u64 {
    least_charge_bytes(MIN_CHARGE_BYTES, chain.segs()).max(chain.readable_len.into())
}

/// Bytes in front of an IP packet that the MTU does not count: Ethernet and two VLAN tags.
const L2_OVERHEAD: usize = 14 + 8;

/// No limit to the queue pairs that receive but those that run.
pub(crate) const ALL_PAIRS: u16 = u16::MAX;

/// One running transmit queue.
#[derive(Debug)]
pub(crate) struct TxQueue {
    pub vring: Vring,
    pub batch: Batch,
    pub done: Vec<Completion>,
    /// Charge for a frame of the last batch on average: not many more are taken from the ring
    /// than may be sent.
    pub mean_cost: u64,
    /// The receiver that the first frame waits for.
    pub held: Option<Held>,
    /// Since when, while there is one.
    held_since_ns: u64,
}

impl TxQueue {
    pub fn new(vring: Vring) -> Self {
        Self {
            vring,
            batch: Batch::new(TX_BATCH, TX_SEGS),
            done: Vec::with_capacity(TX_BATCH),
            mean_cost: MIN_CHARGE_BYTES,
            held: None,
            held_since_ns: 0,
        }
    }

    /// Counts holds, and their time when they end. Called after a batch: `was_held` says whether
    /// its first frame had been waiting.
    #[inline]
    pub fn count_hold(&mut self, was_held: bool, now_ns: u64, stats: &SwitchStats) {
        let is_held = self.held.is_some();
        if was_held && is_held && self.done.is_empty() {
            // It still waits.
            return;
        }
        if was_held {
            stats.held_ns.add(now_ns.saturating_sub(self.held_since_ns));
        }
        if is_held {
            stats.holds.add(1);
            self.held_since_ns = now_ns;
        }
    }
}

/// A running control queue.
#[derive(Debug)]
pub(crate) struct ControlQueue {
    pub vring: Vring,
    pub batch: Batch,
}

impl ControlQueue {
    pub fn new(vring: Vring) -> Self {
        Self { vring, batch: Batch::new(CONTROL_BATCH, CONTROL_SEGS) }
    }
}

/// Virtqueues of a port: its pairs, and the control queue.
pub(crate) fn queue_count(pairs: u16) -> u16 {
    2 * pairs + 1
}

/// Place of a port: its number in the switch, and the serial that tells it from an earlier port
/// with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub id: PortId,
    pub serial: u64,
}

/// A port of the switch.
pub(crate) struct Port {
    pub id: PortId,
    /// Tells this port from an earlier one with the same number.
    pub serial: u64,
    pub name: Arc<str>,
    /// VM whose account its frames are charged to.
    pub vm: VmId,
    /// Bytes that its last turn was charged; a port that had to stop goes on with a long one.
    pub turn_bytes: u64,
    pub link_up: bool,
    pub mtu: u16,
    pub features: u64,
    /// Features among `features` that count for what it receives: a driver can switch offloads off.
    pub rx_features: u64,
    pub allowed: Allowed,
    pub tx_vnet_len: usize,
    pub binding: Binding,
    /// Log lines about its VM's frames that are dropped.
    pub rejects: RejectLog,
    /// How many broadcasts its VM may send.
    pub broadcasts: Ceiling,
    pub forward_cache: ForwardCache,
    /// Hook between its guest and the switch.
    pub hook: Option<HookSlot>,
    pub tx: Vec<Option<Box<TxQueue>>>,
    pub rx: Vec<Option<Box<RxQueue>>>,
    /// Indexes of the receive queues that run, and that the driver wants, ascending.
    pub rx_running: Vec<u16>,
    /// Frames from the uplink that it has no buffers for.
    pub backlog: Option<Backlog>,
    /// The port let a backlog grow old, and has taken nothing since.
    pub is_stuck: bool,
    /// Most queue pairs that receive.
    pub wanted_pairs: u16,
    /// Control queue, where the front end leaves it to us.
    pub control: Option<Box<ControlQueue>>,
    /// Filter of the frames that it takes; none: all.
    pub filter: Option<Box<Filter>>,
    /// Whether its driver is asked to announce itself: what config space says.
    pub announce: Arc<AtomicBool>,
}

impl Port {
    pub fn new(serial: u64, name: Arc<str>, pairs: u16, mtu: u16, binding: Binding) -> Self {
        let mut port = Self {
            id: 0,
            serial,
            name,
            vm: VmId::NONE,
            turn_bytes: 0,
            link_up: true,
            mtu,
            features: 0,
            rx_features: 0,
            allowed: allowed(0),
            tx_vnet_len: VNET_LEN,
            binding,
            rejects: RejectLog::default(),
            broadcasts: Ceiling::default(),
            forward_cache: ForwardCache::default(),
            hook: None,
            tx: (0..pairs).map(|_| None).collect(),
            rx: (0..pairs).map(|_| None).collect(),
            rx_running: Vec::with_capacity(usize::from(pairs)),
            backlog: None,
            is_stuck: false,
            wanted_pairs: ALL_PAIRS,
            control: None,
            filter: None,
            announce: Arc::default(),
        };
        port.set_features(0);
        port
    }

    /// Asks the driver to announce itself, or takes that back.
    pub fn ask_to_announce(&self, asks: bool) {
        self.announce.store(asks, Ordering::Relaxed);
    }

    /// The driver has announced itself; none when that was not negotiated.
    pub fn was_announced(&self) -> Option<()> {
        let may = self.features & features::GUEST_ANNOUNCE != 0;
        may.then(|| self.ask_to_announce(false))
    }

    pub fn set_features(&mut self, features: u64) {
        self.features = features;
        self.rx_features = features;
        self.filter = None;
        self.ask_to_announce(false);
        self.set_pairs(ALL_PAIRS);
        self.allowed = allowed(features);
        self.tx_vnet_len = vnet_len(features);
    }

    /// A running queue by its index in the session.
    pub fn vring(&self, index: u16) -> Option<&Vring> {
        let at = usize::from(index / 2);
        match &self.control {
            Some(control) if control.vring.parts.index == index => Some(&control.vring),
            _ if index.is_multiple_of(2) => Some(&self.rx.get(at)?.as_ref()?.vring),
            _ => Some(&self.tx.get(at)?.as_ref()?.vring),
        }
    }

    /// The receive queue for frames of `lane` (the sender's transmit queue, or a flow's hash).
    #[inline]
    pub fn rx_for(&self, lane: usize) -> Option<u16> {
        match self.rx_running.len() {
            0 => None,
            1 => Some(self.rx_running[0]),
            n => Some(self.rx_running[lane % n]),
        }
    }

    /// Whether its frames may leave without a look at more than their addresses.
    #[inline]
    pub fn sends_plain(&self) -> bool {
        self.link_up && self.hook.is_none() && self.tx_vnet_len == VNET_LEN
    }

    /// Length of the longest frame that is not to be cut.
    #[inline]
    pub fn longest(&self) -> usize {
        usize::from(self.mtu) + L2_OVERHEAD
    }

    /// How many queue pairs it has.
    pub fn pairs(&self) -> u16 {
        self.rx.len() as u16
    }

    /// From now on so many pairs receive at most.
    pub fn set_pairs(&mut self, pairs: u16) {
        self.wanted_pairs = pairs;
        self.find_running();
    }

    pub fn find_running(&mut self) {
        self.rx_running.clear();
        let wanted = self.rx.iter().take(self.wanted_pairs.into());
        let running = wanted.enumerate().filter(|(_, q)| q.is_some());
        self.rx_running.extend(running.map(|(i, _)| i as u16));
    }

    /// When what waits for it is given up; none when nothing does.
    pub fn backlog_ends_ns(&self) -> Option<u64> {
        self.backlog.as_ref().map(Backlog::ends_ns)
    }

    /// The receive queue that the oldest frame waits for.
    pub fn backlog_queue(&self) -> Option<u16> {
        let (lane, _) = self.backlog.as_ref()?.front()?;
        self.rx_for(lane)
    }

    /// Counts frames of `lane` that were lost, at the receive queue that they were for.
    pub fn count_stalled(&self, lane: usize, count: u64) {
        let queue = self.rx_for(lane).and_then(|queue| self.rx[usize::from(queue)].as_ref());
        if let Some(rxq) = queue {
            rxq.vring.parts.stats.drops[DropReason::ReceiverStalled as usize].add(count);
        }
    }
}

fn allowed(negotiated: u64) -> Allowed {
    let has = |bit| negotiated & bit != 0;
    Allowed {
        csum: has(features::CSUM),
        tso4: has(features::HOST_TSO4),
        tso6: has(features::HOST_TSO6),
        ecn: has(features::HOST_ECN),
        uso: has(features::HOST_USO),
        data_valid: false,
    }
}
