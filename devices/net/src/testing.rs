//! A switch driven by hand, for tests of this and other crates: model drivers on every queue, a
//! clock that moves when told to, one poll at a time.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::missing_panics_doc, missing_docs)]

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::IpAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};

use base::counter::{DropReason, QueueStats};
use base::io::{IoSlice, Wire};
use queue::Layout;
use queue::testing::{GuestRam, ModelDriver, ModelOptions};
use sidecore::{Arm, Ledger, Worker};

use crate::allow::Allow;
use crate::binding::{BindMode, Binding, Shared, Tables};
use crate::engine::{Engine, TX_TELL};
use crate::fdb::{Ip, Table};
use crate::features;
use crate::hook::{HookSlot, Outbox, PortHook};
use crate::metrics::SwitchStats;
use crate::port::{Place, Port, TxQueue};
use crate::rxq::{RxQueue, vnet_len};
use crate::uplink::Uplink;
use frame::{Mac, VNET_LEN, Vnet};

/// Features that a plain driver of today negotiates.
pub const MODERN: u64 = features::VERSION_1 | features::MRG_RXBUF | features::OFFLOADS;

/// How a guest is made.
pub struct Spec {
    pub features: u64,
    pub layout: Layout,
    pub ring: u16,
    pub pairs: u16,
    pub options: ModelOptions,
    pub bind: BindMode,
    pub mac: Option<[u8; 6]>,
    pub addresses: Vec<IpAddr>,
    pub shared: Shared,
    pub allow: Allow,
    pub mtu: u16,
}

impl Default for Spec {
    fn default() -> Self {
        Self {
            features: MODERN,
            layout: Layout::Split,
            ring: 256,
            pairs: 1,
            options: ModelOptions::default(),
            bind: BindMode::Mac,
            mac: None,
            addresses: Vec::new(),
            shared: Shared::default(),
            allow: Allow::default(),
            mtu: 1500,
        }
    }
}

pub struct Guest {
    pub ram: Arc<GuestRam>,
    pub rx: Vec<ModelDriver>,
    pub tx: Vec<ModelDriver>,
    posted: Vec<HashMap<u16, Vec<(u64, u32)>>>,
    pub vnet_len: usize,
    mergeable: bool,
    indirect: bool,
}

pub struct Lab {
    pub(crate) engine: Engine,
    pub(crate) ledger: Ledger,
    pub stats: Arc<SwitchStats>,
    pub guests: Vec<Guest>,
    pub now_ns: u64,
}

pub const HOLD_NS: u64 = 20_000_000;
/// MAC addresses of the switch.
pub const MAX_MACS: u32 = 256;
pub const MAC_AGE_NS: u64 = 300_000_000_000;

/// The address guest `n` uses.
pub fn mac(n: usize) -> [u8; 6] {
    [0x52, 0x54, 0, 0, 0, n as u8 + 1]
}

pub const BROADCAST: [u8; 6] = [0xff; 6];

/// An Ethernet frame with a recognisable payload; `len` is that of the whole frame.
pub fn frame(dst: [u8; 6], src: [u8; 6], len: usize) -> Vec<u8> {
    let mut out = [&dst[..], &src[..], &[0x88, 0xb5]].concat();
    out.extend((out.len()..len).map(|i| (i * 7 + len) as u8));
    out
}

pub fn no_offload() -> [u8; VNET_LEN] {
    [0; VNET_LEN]
}

impl Lab {
    pub fn new(specs: Vec<Spec>) -> Self {
        let tables = Tables {
            macs: Table::new(MAX_MACS as usize, MAC_AGE_NS, 1),
            ips: Table::new(256, MAC_AGE_NS, 2),
            max_macs_per_port: 4,
            max_macs_uplink: MAX_MACS / 2,
            shared: Shared::default(),
            moves: crate::moves::Moves::default(),
            stats: Arc::default(),
        };
        let stats = Arc::clone(&tables.stats);
        let engine = Engine::new(tables, HOLD_NS, 1024, Arc::clone(&stats));
        let mut lab = Self {
            engine,
            ledger: Ledger::default(),
            stats,
            guests: Vec::new(),
            now_ns: 1_000_000,
        };
        for spec in specs {
            lab.add(spec);
        }
        lab
    }

    /// Two guests with default settings that know each other.
    pub fn pair() -> Self {
        let mut lab = Self::new(vec![Spec::default(), Spec::default()]);
        lab.introduce();
        lab
    }

    pub fn add(&mut self, spec: Spec) {
        let id = self.guests.len();
        let binding = Binding {
            mode: spec.bind,
            mac: spec.mac.map(Mac::new),
            mac_configured: spec.mac.is_some(),
            learn_ips: spec.addresses.is_empty(),
            shared: spec.shared.clone(),
            allow: spec.allow.clone(),
        };
        let all = &mut self.engine.fabric.tables.shared;
        all.macs.extend(&spec.shared.macs);
        all.ips.extend(&spec.shared.ips);
        if let Some(mac) = binding.mac {
            self.engine.fabric.tables.macs.fix(mac, id as u16, 0);
        }
        for ip in &spec.addresses {
            self.engine.fabric.tables.ips.fix(Ip::from(*ip), id as u16, 0);
        }
        let name = format!("g{id}");
        let mut port = Port::new(id as u64, name.as_str().into(), spec.pairs, spec.mtu, binding);
        port.id = id as u16;
        port.set_features(spec.features);
        let ram = GuestRam::new(64 << 20);
        let driver = || ModelDriver::in_ram(ram.clone(), spec.layout, spec.ring, spec.options);
        let rx: Vec<_> = (0..spec.pairs).map(|_| driver()).collect();
        let tx: Vec<_> = (0..spec.pairs).map(|_| driver()).collect();
        let mergeable = spec.features & features::MRG_RXBUF != 0;
        let vnet_len = vnet_len(spec.features);
        for at in 0..spec.pairs {
            let i = usize::from(at);
            let rxq = RxQueue::new(rx[i].vring(2 * at), vnet_len, mergeable);
            port.rx[i] = Some(Box::new(rxq));
            port.tx[i] = Some(Box::new(TxQueue::new(tx[i].vring(2 * at + 1))));
        }
        port.find_running();
        self.engine.fabric.ports.push(Some(Box::new(port)));
        let posted = (0..spec.pairs).map(|_| HashMap::new()).collect();
        let indirect = spec.options.indirect;
        self.guests.push(Guest { ram, rx, tx, posted, vnet_len, mergeable, indirect });
    }

    /// Every guest says hello once, with nobody listening, so that all addresses are known.
    pub fn introduce(&mut self) {
        for n in 0..self.guests.len() {
            self.guests[n].send(0, &no_offload(), &frame(BROADCAST, mac(n), 60), 1);
        }
        self.poll();
        for guest in &mut self.guests {
            while guest.tx[0].used().is_some() {}
        }
        self.tell();
    }

    /// Lets every transmit completion that waits for company be told.
    pub fn tell(&mut self) {
        for _ in 0..4 {
            self.advance(TX_TELL.max_wait_ns);
            self.poll();
        }
    }

    pub fn poll(&mut self) -> usize {
        self.engine.poll(self.now_ns, &mut self.ledger)
    }

    pub fn advance(&mut self, ns: u64) {
        self.now_ns += ns;
    }

    pub fn drops(&self, guest: usize, reason: DropReason) -> u64 {
        self.guests[guest].tx[0].stats().drops[reason as usize].get()
    }

    pub fn rx_drops(&self, guest: usize, reason: DropReason) -> u64 {
        self.guests[guest].rx[0].stats().drops[reason as usize].get()
    }

    pub(crate) fn port(&mut self, guest: usize) -> &mut Port {
        self.engine.fabric.ports[guest].as_deref_mut().unwrap()
    }

    /// Sends and polls once; the drop counter tells what happened.
    pub fn judge(&mut self, guest: usize, bytes: &[u8]) -> Option<DropReason> {
        self.judge_with(guest, &no_offload(), bytes)
    }

    pub fn judge_with(&mut self, guest: usize, vnet: &[u8], bytes: &[u8]) -> Option<DropReason> {
        let all = |lab: &Self| DropReason::ALL.map(|r| lab.drops(guest, r));
        let before = all(self);
        self.guests[guest].send(0, vnet, bytes, 1);
        self.poll();
        let after = all(self);
        assert!(self.guests[guest].tx[0].used().is_some(), "the frame was not completed");
        DropReason::ALL.into_iter().find(|r| after[*r as usize] != before[*r as usize])
    }

    pub fn set_wire(&mut self) -> Arc<Mutex<Model>> {
        let (wire, model) = model_wire();
        self.set_uplink(wire, Arc::default());
        model
    }

    pub fn set_uplink(&mut self, wire: Box<dyn Wire>, stats: Arc<QueueStats>) {
        self.engine.fabric.uplink = Some(Box::new(Uplink::new(wire, stats, true)));
    }

    /// Gives a guest's port a hook, in place of the one that it has.
    pub fn set_hook(&mut self, guest: usize, hook: Box<dyn PortHook>) {
        self.port(guest).hook = Some(HookSlot::new(hook));
    }

    /// Runs `f` with the hook, as [`crate::NetPort::with_hook`] does from other threads.
    pub fn with_hook<H: PortHook, R>(
        &mut self,
        guest: usize,
        f: impl FnOnce(&mut H, &mut Outbox) -> R,
    ) -> R {
        let place = Place { id: guest as u16, serial: guest as u64 };
        self.engine.fabric.with_hook(place, f).expect("a hook of that type")
    }

    /// Whether the switch could sleep, and for how long.
    pub fn arm(&mut self) -> Arm {
        self.engine.arm(self.now_ns, &mut self.ledger)
    }

    pub fn disarm(&mut self) {
        self.engine.disarm();
    }

    pub fn uplink_stats(&self) -> Arc<QueueStats> {
        Arc::clone(&self.engine.fabric.uplink.as_ref().unwrap().queue.stats)
    }
}

impl Guest {
    /// Offers a frame, its bytes spread over `pieces` descriptors.
    pub fn send(&mut self, queue: usize, vnet: &[u8], bytes: &[u8], pieces: usize) -> u16 {
        let whole = [vnet, bytes].concat();
        let step = whole.len().div_ceil(pieces);
        let driver = &mut self.tx[queue];
        let bufs: Vec<_> = whole.chunks(step).map(|piece| driver.buffer(piece)).collect();
        let id = match bufs.len() > 1 && self.indirect {
            true => driver.offer_indirect(&bufs, &[]),
            false => driver.offer(&bufs, &[]),
        };
        driver.kick();
        id
    }

    /// Posts `count` receive buffers of `len` bytes in `pieces` pieces each, filled with 0xee.
    pub fn post(&mut self, queue: usize, count: usize, len: usize, pieces: usize) {
        for _ in 0..count {
            let driver = &mut self.rx[queue];
            let fill = vec![0xee; len];
            let bufs: Vec<_> =
                fill.chunks(len.div_ceil(pieces)).map(|piece| driver.buffer(piece)).collect();
            let id = match bufs.len() > 1 && self.indirect {
                true => driver.offer_indirect(&[], &bufs),
                false => driver.offer(&[], &bufs),
            };
            self.posted[queue].insert(id, bufs);
        }
        self.rx[queue].kick();
    }

    /// Posts what is missing to `count` buffers.
    pub fn post_up_to(&mut self, queue: usize, count: usize, len: usize, pieces: usize) {
        self.post(queue, count.saturating_sub(self.posted[queue].len()), len, pieces);
    }

    /// The next used receive buffer: what was written, and the whole of it.
    pub fn raw_recv(&mut self, queue: usize) -> Option<(usize, Vec<u8>)> {
        let (id, written) = self.rx[queue].used()?;
        let bufs = self.posted[queue].remove(&id).expect("a buffer that was posted");
        let all = bufs.iter().flat_map(|(addr, len)| self.rx[queue].read(*addr, *len as usize));
        Some((written as usize, all.collect()))
    }

    /// The next frame, from as many buffers as it took; its header first.
    pub fn recv(&mut self, queue: usize) -> Option<(Vec<u8>, Vec<u8>)> {
        let (written, bytes) = self.raw_recv(queue)?;
        let mut whole = bytes[..written].to_vec();
        // Nothing behind the written part was touched.
        assert!(bytes[written..].iter().all(|b| *b == 0xee));
        if self.vnet_len == VNET_LEN {
            let buffers = u16::from_le_bytes([whole[10], whole[11]]);
            assert!(buffers == 1 || self.mergeable, "num_buffers {buffers}");
            for _ in 1..buffers {
                let (written, bytes) = self.raw_recv(queue).expect("as many buffers as announced");
                whole.extend(&bytes[..written]);
            }
        }
        let frame = whole.split_off(self.vnet_len);
        Some((whole, frame))
    }

    /// All frames there are, without headers.
    pub fn recv_all(&mut self, queue: usize) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.recv(queue)).map(|(_, frame)| frame).collect()
    }
}

/// A virtio-net header as a driver writes it.
pub fn vnet(flags: u8, gso_type: u8, gso_size: u16, csum_start: u16, csum_offset: u16) -> Vec<u8> {
    Vnet { flags, gso_type, hdr_len: 0, gso_size, csum_start, csum_offset }.to_bytes(0).to_vec()
}

/// The other end of a [`ModelWire`].
#[derive(Default)]
pub struct Model {
    pub incoming: VecDeque<Vec<u8>>,
    pub sent: Vec<Vec<u8>>,
    pub flushes: usize,
    pub refuse: bool,
    pub refill_fails: bool,
}

/// A wire in memory, and its other end.
pub fn model_wire() -> (Box<dyn Wire>, Arc<Mutex<Model>>) {
    let model = Arc::new(Mutex::new(Model::default()));
    let wire = ModelWire { model: Arc::clone(&model), current: Vec::new(), queued: Vec::new() };
    (Box::new(wire), model)
}

/// A wire in memory. Frames are read at the flush, as a kernel would.
struct ModelWire {
    model: Arc<Mutex<Model>>,
    current: Vec<u8>,
    queued: Vec<Vec<IoSlice>>,
}

// SAFETY: the addresses in `queued` are used by the thread that polls, before its flush returns.
unsafe impl Send for ModelWire {}

impl Wire for ModelWire {
    unsafe fn send(&mut self, bufs: &[IoSlice]) -> io::Result<()> {
        if self.queued.len() == 8 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.queued.push(bufs.to_vec());
        Ok(())
    }

    fn flush(&mut self) -> io::Result<u32> {
        let mut model = self.model.lock().unwrap();
        model.flushes += 1;
        let count = self.queued.len() as u32;
        for bufs in self.queued.drain(..) {
            let mut whole = Vec::new();
            for b in &bufs {
                // SAFETY: valid until this flush returns, says the contract under test.
                let piece =
                    unsafe { std::slice::from_raw_parts(b.iov_base.cast::<u8>(), b.iov_len) };
                whole.extend_from_slice(piece);
            }
            if !model.refuse {
                model.sent.push(whole);
            }
        }
        Ok(if model.refuse { count } else { 0 })
    }

    fn receive(&mut self) -> Option<&[u8]> {
        self.current = self.model.lock().unwrap().incoming.front()?.clone();
        Some(&self.current)
    }

    fn release(&mut self) {
        self.model.lock().unwrap().incoming.pop_front();
    }

    fn refill(&mut self) -> io::Result<()> {
        match self.model.lock().unwrap().refill_fails {
            true => Err(io::ErrorKind::WouldBlock.into()),
            false => Ok(()),
        }
    }

    fn event_fd(&self) -> Option<RawFd> {
        None
    }
}
