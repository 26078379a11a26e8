//! A port as its session sees it.

use std::fmt;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::clock::Clock;
use base::counter::QueueStats;
use base::log_limit::LogLimit;
use base::sync::lock;
use queue::{GuestMemory, Vring};
use sidecore::{VmId, WorkerRef};
use vhost_user::{ConfigNotifier, Device, DeviceError, DeviceKind};

use crate::allow::Allow;
use crate::binding::BindMode;
use crate::config_space::ConfigSpace;
use crate::control;
use crate::engine::Engine;
use crate::features;
use crate::hook::{HookSlot, Outbox, PortHook};
use crate::kicks::{Kicks, take_queue};
use crate::port::{ControlQueue, Place, Port, TxQueue, queue_count};
use crate::rxq::{RxQueue, vnet_len};
use frame::Mac;

/// Smallest MTU: what IPv4 asks of every link (RFC 791).
pub const MIN_MTU: u16 = 68;

/// Settings of a port.
pub struct NetPortConfig {
    /// Name, for logs and metrics (`vm/port`).
    pub name: String,
    /// The VM's account.
    pub vm: VmId,
    /// MAC address of the VM; none: the first it uses.
    pub mac: Option<[u8; 6]>,
    /// IP addresses of the VM; empty: learned, up to [`crate::binding::MAX_LEARNED_IPS`]. IPv6
    /// link-local addresses are always learned.
    pub addresses: Vec<IpAddr>,
    /// How strictly source addresses are checked.
    pub bind: BindMode,
    /// MAC addresses that it may use besides its own, shared with the other ports that name them.
    pub shared_macs: Vec<[u8; 6]>,
    /// IP addresses that it may use besides its own, shared in the same way.
    pub shared_addresses: Vec<IpAddr>,
    /// Frames that it may send besides ARP and IP, with [`BindMode::MacAndIp`].
    pub allow: Allow,
    /// Queue pairs, 1 to [`base::limits::MAX_QUEUE_PAIRS`].
    pub queue_pairs: u16,
    /// Most broadcasts of the VM that are passed in a second; 0: no ceiling.
    pub broadcasts_per_s: u32,
    /// Longest IP packet the VM takes, in bytes.
    pub mtu: u16,
    /// Offer checksum and segmentation offloads.
    pub offloads: bool,
    /// Offer packed rings.
    pub packed: bool,
    /// Offer in-order use of buffers.
    pub in_order: bool,
    /// Offer control queue and config space also to a front end that seems to have its own.
    pub whole_device: bool,
}

impl NetPortConfig {
    /// A port with one queue pair, everything offered, addresses learned and bound.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            vm: VmId::NONE,
            mac: None,
            addresses: Vec::new(),
            bind: BindMode::default(),
            shared_macs: Vec::new(),
            shared_addresses: Vec::new(),
            allow: Allow::default(),
            queue_pairs: 1,
            broadcasts_per_s: 0,
            mtu: 1500,
            offloads: true,
            packed: true,
            in_order: true,
            whole_device: false,
        }
    }
}

impl fmt::Debug for NetPortConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetPortConfig").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A network port. Made by [`crate::Switch::add_port`]; its session drives it as a [`Device`].
pub struct NetPort {
    pub(crate) worker: WorkerRef<Engine>,
    pub(crate) place: Place,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) announcements: LogLimit,
    pub(crate) name: String,
    pub(crate) offered: u64,
    pub(crate) queue_pairs: u16,
    pub(crate) whole_device: bool,
    pub(crate) features: AtomicU64,
    pub(crate) link_up: AtomicBool,
    /// Whether the driver is asked to announce itself; the port's own side takes it back.
    pub(crate) announce: Arc<AtomicBool>,
    /// Configured MAC address.
    pub(crate) mac: Option<[u8; 6]>,
    pub(crate) mtu: AtomicU16,
    pub(crate) stats: Vec<Arc<QueueStats>>,
    pub(crate) notifier: Mutex<Option<Arc<dyn ConfigNotifier>>>,
}

impl fmt::Debug for NetPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NetPort").field("name", &self.name).field("place", &self.place).finish()
    }
}

/// The features a port offers.
pub(crate) fn offered(config: &NetPortConfig) -> u64 {
    let mut bits = features::ALWAYS;
    let mut add = |yes, more| bits |= if yes { more } else { 0 };
    add(config.offloads, features::OFFLOADS);
    add(config.packed, features::RING_PACKED);
    add(config.in_order, features::IN_ORDER);
    add(config.queue_pairs > 1, features::MQ);
    add(config.mac.is_some(), features::MAC);
    bits
}

impl NetPort {
    /// Name of the port.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Counters of its queues: receive queue of pair `i` at `2 * i`, transmit queue behind it; the
    /// control queue last.
    pub fn stats(&self) -> Vec<Arc<QueueStats>> {
        self.stats.clone()
    }

    /// The features its driver negotiated; 0 while there is none.
    pub fn negotiated(&self) -> u64 {
        self.features.load(Ordering::Relaxed)
    }

    /// Whether its link is up.
    pub fn link_up(&self) -> bool {
        self.link_up.load(Ordering::Relaxed)
    }

    /// Takes the link down (frames both ways are dropped and counted) or up again. Returns whether
    /// a connected guest can see it: its VMM left config space to us, and its driver reads the
    /// state.
    pub fn set_link(&self, up: bool) -> Result<bool, DeviceError> {
        self.with(move |port, _, _| port.link_up = up)?;
        let has_changed = self.link_up.swap(up, Ordering::Relaxed) != up;
        let Some(notifier) = self.notifier() else { return Ok(false) };
        if has_changed {
            // Its own log line says why not; the link is what the guest's frames see.
            let _ = notifier.config_changed();
        }
        Ok(self.negotiated() & features::STATUS != 0)
    }

    /// Puts a hook between the guest and the switch. Fails on a port that has one, and gives the
    /// hook back to nobody.
    pub fn set_hook(&self, hook: Box<dyn PortHook>) -> Result<(), DeviceError> {
        let slot = HookSlot::new(hook);
        let (refused, answer) = self.with(move |port, kicks, _| {
            if port.hook.is_some() {
                return (Some(slot), Err("it has one already"));
            }
            if let Some(fd) = slot.hook.event_fd()
                && kicks.watcher.watch(fd).is_err()
            {
                return (Some(slot), Err("its descriptor cannot be watched"));
            }
            port.hook = Some(slot);
            (None, Ok(()))
        })?;
        // What it holds is not to be freed on the sidecore.
        drop(refused);
        answer.map_err(|why| DeviceError::Failed(format!("no hook on port {}: {why}", self.name())))
    }

    /// Runs `f` on the sidecore, between two frames, with the port's hook and an outbox, whose
    /// frames are sent then. None: the port has gone, or has no hook of that type.
    pub fn with_hook<H: PortHook, R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut H, &mut Outbox) -> R + Send + 'static,
    ) -> Option<R> {
        let place = self.place;
        self.worker.call(move |engine, _| engine.fabric.with_hook(place, f)).ok().flatten()
    }

    /// MAC address of the port, once known, and the IP addresses bound to it.
    pub fn addresses(&self) -> Result<(Option<[u8; 6]>, Vec<IpAddr>), DeviceError> {
        let place = self.place;
        let answer = self.worker.call(move |engine, _| {
            let port = engine.fabric.port_mut(place)?;
            let mac = port.binding.mac.map(frame::Mac::bytes);
            let all = engine.fabric.tables.ips.list(0);
            let own = all.into_iter().filter(|l| l.owner == place.id).map(|l| l.key.into());
            Some((mac, own.collect()))
        });
        answer.map_err(DeviceError::failed)?.ok_or_else(|| self.gone())
    }

    fn notifier(&self) -> Option<Arc<dyn ConfigNotifier>> {
        lock(&self.notifier).clone()
    }

    fn gone(&self) -> DeviceError {
        DeviceError::Failed(format!("port {} was removed from its switch", self.name))
    }

    /// Runs `f` on the sidecore with the port, its place and the descriptors it is woken by.
    pub(crate) fn with<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Port, &mut Kicks<'_>, Place) -> R + Send + 'static,
    ) -> Result<R, DeviceError> {
        let place = self.place;
        let answer = self.worker.call(move |engine, watcher| {
            let Engine { fabric, kicks, .. } = engine;
            let port = fabric.port_mut(place)?;
            Some(f(port, &mut Kicks { kicks, watcher }, place))
        });
        answer.map_err(DeviceError::failed)?.ok_or_else(|| self.gone())
    }
}

/// A queue ready to run, made on the session's thread: the sidecore only moves a pointer.
enum Ready {
    Rx(Box<RxQueue>),
    Tx(Box<TxQueue>),
    Control(Box<ControlQueue>),
}

impl Device for NetPort {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Net
    }

    fn features(&self) -> u64 {
        self.offered
    }

    fn whole_device_features(&self) -> u64 {
        features::WHOLE_DEVICE
    }

    fn is_whole_to_any_front_end(&self) -> bool {
        self.whole_device
    }

    /// The pairs, and the control queue behind them.
    fn queue_count(&self) -> u16 {
        queue_count(self.queue_pairs)
    }

    fn has_config(&self) -> bool {
        true
    }

    fn set_mtu(&self, mtu: u16) -> Result<(), DeviceError> {
        if mtu < MIN_MTU {
            return Err(DeviceError::OutOfRange {
                what: "MTU",
                value: mtu.into(),
                limit: MIN_MTU.into(),
            });
        }
        self.with(move |port, _, _| port.mtu = mtu)?;
        self.mtu.store(mtu, Ordering::Relaxed);
        Ok(())
    }

    /// Refused where the port may not send from `mac`, and then told in the log.
    fn announce(&self, mac: [u8; 6]) {
        let (place, now_ns) = (self.place, self.clock.now_ns());
        // A VMM announces some five times after a move; each time is a frame for everybody.
        if self.announcements.admit().is_none() {
            return;
        }
        let answer =
            self.worker.call(move |engine, _| engine.announce(place, Mac::new(mac), now_ns));
        let port = &self.name;
        match answer {
            Ok(Ok(())) => tracing::info!(%port, mac = %Mac::new(mac), "announced"),
            Ok(Err(reason)) => {
                let reason = reason.name();
                tracing::warn!(%port, mac = %Mac::new(mac), reason, "not announced");
            }
            Err(error) => tracing::warn!(%port, "not announced: {error}"),
        }
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) -> Result<(), DeviceError> {
        let space = ConfigSpace {
            mac: self.mac.unwrap_or_default(),
            link_up: self.link_up(),
            announce: self.announce.load(Ordering::Relaxed),
            queue_pairs: self.queue_pairs,
            mtu: self.mtu.load(Ordering::Relaxed),
        };
        space.read(offset, out);
        Ok(())
    }

    /// No field is the driver's to write (virtio 1.2, 5.1.4.2): its MAC address was, before 1.0.
    fn write_config(&self, _offset: u32, _data: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("writing config space"))
    }

    fn activate(&self, features: u64) -> Result<(), DeviceError> {
        // Bits of the transport (30: protocol features, 26: dirty log) are the session's.
        let own = features & !(1 << 30 | 1 << 26);
        let unknown = own & !(self.offered | self.whole_device_features());
        if unknown != 0 {
            return Err(DeviceError::Failed(format!(
                "the driver acknowledged feature bits {unknown:#x}, which were not offered"
            )));
        }
        self.with(move |port, _, _| port.set_features(own))?;
        self.features.store(own, Ordering::Relaxed);
        Ok(())
    }

    fn start_queue(&self, vring: Vring) -> Result<(), DeviceError> {
        let index = vring.parts.index;
        if index >= self.queue_count() {
            return Err(DeviceError::OutOfRange {
                what: "queue index",
                value: index.into(),
                limit: u64::from(self.queue_count()) - 1,
            });
        }
        let features = self.negotiated();
        let is_control = control::index(features, self.queue_pairs) == Some(index);
        self.worker.works_on(self.place.serial, vring.queue.memory());
        let near = self.worker.core().prefer_node();
        let ready = if is_control {
            Ready::Control(Box::new(ControlQueue::new(vring)))
        } else if index >= 2 * self.queue_pairs {
            let why = "a control queue that was not negotiated (VIRTIO_NET_F_CTRL_VQ)";
            return Err(DeviceError::Unsupported(why));
        } else if index.is_multiple_of(2) {
            let mergeable = features & features::MRG_RXBUF != 0;
            Ready::Rx(Box::new(RxQueue::new(vring, vnet_len(features), mergeable)))
        } else {
            Ready::Tx(Box::new(TxQueue::new(vring)))
        };
        drop(near);
        self.with(move |port, kicks, place| {
            let at = usize::from(index / 2);
            match ready {
                Ready::Rx(_) if port.rx[at].is_some() => Err(running(index)),
                Ready::Tx(_) if port.tx[at].is_some() => Err(running(index)),
                Ready::Control(_) if port.control.is_some() => Err(running(index)),
                Ready::Rx(mut rxq) => {
                    kicks.watch(&rxq.vring, place)?;
                    rxq.vring.disarm();
                    port.rx[at] = Some(rxq);
                    port.find_running();
                    Ok(())
                }
                Ready::Tx(mut txq) => {
                    kicks.watch(&txq.vring, place)?;
                    txq.vring.disarm();
                    port.tx[at] = Some(txq);
                    Ok(())
                }
                Ready::Control(mut queue) => {
                    kicks.watch(&queue.vring, place)?;
                    queue.vring.disarm();
                    control::start(port, &queue.vring);
                    port.control = Some(queue);
                    Ok(())
                }
            }
        })??;
        if is_control
            && self.announce.load(Ordering::Relaxed)
            && let Some(notifier) = self.notifier()
        {
            // Without a way to say so the driver sees it with the next change.
            let _ = notifier.config_changed();
        }
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Result<Option<Vring>, DeviceError> {
        self.with(move |port, kicks, _| take_queue(port, index, kicks))
    }

    fn update_memory(&self, memory: Arc<GuestMemory>) -> Result<(), DeviceError> {
        self.worker.works_on(self.place.serial, &memory);
        self.with(move |port, _, _| {
            let mut answer = Ok(());
            let rx = port.rx.iter_mut().flatten().map(|q| {
                q.publish();
                q.give_back();
                &mut q.vring
            });
            let tx = port.tx.iter_mut().flatten().map(|q| {
                q.batch.release();
                &mut q.vring
            });
            let control = port.control.iter_mut().map(|q| {
                q.batch.release();
                &mut q.vring
            });
            for vring in rx.chain(tx).chain(control) {
                if let Err(e) = vring.queue.set_memory(Arc::clone(&memory)) {
                    vring.fail(&e);
                    answer = Err(DeviceError::failed(e));
                }
            }
            answer
        })?
    }

    fn set_notifier(&self, notifier: Option<Arc<dyn ConfigNotifier>>) {
        *lock(&self.notifier) = notifier;
    }

    fn reset(&self) {
        let place = self.place;
        self.features.store(0, Ordering::Relaxed);
        // A sidecore that is gone has no queue of ours left.
        let _ = self.worker.call(move |engine, watcher| engine.reset_port(place, watcher));
    }

    /// The end of the session forgets what was learned; a reset must not: a driver can ask for one
    /// at will (by negotiating other features), and would choose new addresses that way.
    fn connected(&self, up: bool) {
        if !up {
            let place = self.place;
            let _ = self.worker.call(move |engine, _| engine.forget_learned(place));
        }
    }
}

fn running(index: u16) -> DeviceError {
    DeviceError::Failed(format!("queue {index} is running already"))
}
