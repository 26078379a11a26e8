//! The model driver: one ring, and the books of its chains.

use std::sync::Arc;

use base::counter::QueueStats;
use base::event::Event;

use super::packed::PackedSide;
use super::ram::GuestRam;
use super::raw::RawDesc;
use super::split::SplitSide;
use crate::health::PortHealth;
use crate::memory::{GuestMemory, RegionSpec};
use crate::queue::Queue;
use crate::setup::{Layout, Position, RingAddrs, RingSetup};
use crate::vring::{Vring, VringParts};
use crate::walk::{F_INDIRECT, F_NEXT, F_WRITE};

/// Features that the driver negotiated.
#[derive(Debug, Clone, Copy)]
pub struct ModelOptions {
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
    /// VIRTIO_F_IN_ORDER.
    pub in_order: bool,
    /// Guest memory, when the driver makes its own.
    pub mem_bytes: usize,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self { event_idx: false, indirect: true, in_order: false, mem_bytes: 64 << 20 }
    }
}

#[derive(Debug)]
pub(super) enum Side {
    Split(SplitSide),
    Packed(PackedSide),
}

/// A driver with one ring in a [`GuestRam`]. Offers buffers, consumes used ones, keeps the books.
#[derive(Debug)]
pub struct ModelDriver {
    ram: Arc<GuestRam>,
    setup: RingSetup,
    side: Side,
    interrupts: bool,
    kick: Event,
    call: Event,
    err: Event,
    stats: Arc<QueueStats>,
    health: Arc<PortHealth>,
}

impl ModelDriver {
    /// A driver with memory of its own and default options.
    pub fn new(layout: Layout, size: u16) -> Self {
        Self::with_options(layout, size, ModelOptions::default())
    }

    /// A driver with memory of its own.
    pub fn with_options(layout: Layout, size: u16, options: ModelOptions) -> Self {
        Self::in_ram(GuestRam::new(options.mem_bytes), layout, size, options)
    }

    /// A driver whose ring is in `ram` (a device's several queues share one memory). Interrupts
    /// are wanted at first.
    pub fn in_ram(ram: Arc<GuestRam>, layout: Layout, size: u16, options: ModelOptions) -> Self {
        let entries = usize::from(size);
        let addrs = RingAddrs {
            desc: ram.alloc_aligned(16 * entries, 4096),
            driver: ram.alloc_aligned(6 + 2 * entries, 4096),
            device: ram.alloc_aligned(6 + 8 * entries, 4096),
        };
        let setup = RingSetup {
            size,
            layout,
            event_idx: options.event_idx,
            in_order: options.in_order,
            indirect: options.indirect,
            addrs,
            start: Position::fresh(),
            log_used_addr: None,
        };
        let side = match layout {
            Layout::Split => Side::Split(SplitSide::new(size)),
            Layout::Packed => Side::Packed(PackedSide::new(size)),
        };
        let driver = Self {
            ram,
            setup,
            side,
            interrupts: true,
            kick: Event::new().unwrap(),
            call: Event::new().unwrap(),
            err: Event::new().unwrap(),
            stats: Arc::default(),
            health: PortHealth::new("model/port"),
        };
        driver.refresh_event();
        driver
    }

    /// The guest's memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// The device's view of the memory.
    pub fn memory(&self) -> Arc<GuestMemory> {
        self.ram.memory()
    }

    /// The memory file, as a front end would send it.
    pub fn fd(&self) -> std::os::fd::OwnedFd {
        self.ram.fd()
    }

    /// The memory region, as a front end would send it.
    pub fn region(&self) -> RegionSpec {
        self.ram.region()
    }

    /// The ring's setup, at its fresh position.
    pub fn setup(&self) -> RingSetup {
        self.setup
    }

    /// A device's queue on this ring.
    pub fn queue(&self) -> Queue {
        Queue::new(self.memory(), self.setup).unwrap()
    }

    /// A vring on this ring, with doorbells, [`ModelDriver::stats`] and [`ModelDriver::health`].
    pub fn vring(&self, index: u16) -> Vring {
        Vring::new(self.queue(), self.parts(index)).unwrap()
    }

    /// The parts of [`ModelDriver::vring`].
    pub fn parts(&self, index: u16) -> VringParts {
        VringParts {
            index,
            kick: Some(self.kick.try_clone().unwrap().into()),
            call: Some(self.call.try_clone().unwrap().into()),
            err: Some(self.err.try_clone().unwrap().into()),
            stats: Arc::clone(&self.stats),
            health: Arc::clone(&self.health),
            slot: None,
            inflight: None,
        }
    }

    /// Counters of the vring.
    pub fn stats(&self) -> &QueueStats {
        &self.stats
    }

    /// Health of the vring's port.
    pub fn health(&self) -> &Arc<PortHealth> {
        &self.health
    }

    /// Driver → device doorbell.
    pub fn kick_event(&self) -> &Event {
        &self.kick
    }

    /// Device → driver doorbell.
    pub fn call_event(&self) -> &Event {
        &self.call
    }

    /// Event by which the device reports a broken ring.
    pub fn err_event(&self) -> &Event {
        &self.err
    }

    /// Guest memory for a buffer; its guest address. Never freed, but see [`GuestRam::free_to`].
    pub fn alloc(&self, len_bytes: usize) -> u64 {
        self.ram.alloc(len_bytes)
    }

    /// A buffer that holds `bytes`: its address and length, as [`ModelDriver::offer`] takes it.
    pub fn buffer(&self, bytes: &[u8]) -> (u64, u32) {
        let addr = self.alloc(bytes.len());
        self.write(addr, bytes);
        (addr, bytes.len() as u32)
    }

    /// Writes guest memory.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        self.ram.write(addr, bytes);
    }

    /// Reads guest memory.
    pub fn read(&self, addr: u64, len: usize) -> Vec<u8> {
        self.ram.read(addr, len)
    }

    /// Offers a chain of device-readable, then device-writable buffers (address and length);
    /// returns its id. Panics when the ring is full.
    pub fn offer(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> u16 {
        let id = self.stage(readable, writable);
        self.publish();
        id
    }

    /// Offers as [`ModelDriver::offer`], through an indirect table.
    pub fn offer_indirect(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> u16 {
        let mut descs = descriptors(readable, writable);
        let count = descs.len();
        for (i, desc) in descs.iter_mut().enumerate() {
            match self.setup.layout {
                Layout::Split if i + 1 < count => desc.tail = i as u16 + 1,
                Layout::Split => {}
                Layout::Packed => desc.flags &= F_WRITE,
            }
        }
        let addr = self.ram.table(self.setup.layout, &descs);
        let len = 16 * count as u32;
        self.offer_raw(&[RawDesc { addr, len, flags: F_INDIRECT, tail: 0 }])
    }

    /// Offers descriptors as they are (flags NEXT and `tail` are filled in).
    pub fn offer_raw(&mut self, descs: &[RawDesc]) -> u16 {
        let id = self.stage_raw(descs);
        self.publish();
        id
    }

    /// Stages a chain as [`ModelDriver::offer`] takes it, not yet visible: several staged chains
    /// are published together.
    pub fn stage(&mut self, readable: &[(u64, u32)], writable: &[(u64, u32)]) -> u16 {
        self.stage_raw(&descriptors(readable, writable))
    }

    /// Stages descriptors as [`ModelDriver::offer_raw`] takes them, not yet visible.
    pub fn stage_raw(&mut self, descs: &[RawDesc]) -> u16 {
        let linked: Vec<RawDesc> = descs
            .iter()
            .enumerate()
            .map(|(i, d)| {
                let next = if i + 1 < descs.len() { F_NEXT } else { 0 };
                RawDesc { flags: d.flags & !F_NEXT | next, ..*d }
            })
            .collect();
        match &mut self.side {
            Side::Split(side) => side.stage(&self.ram, &self.setup, &linked),
            Side::Packed(side) => side.stage(&self.ram, &self.setup, &linked),
        }
    }

    /// Makes all staged chains visible.
    pub fn publish(&mut self) {
        match &mut self.side {
            Side::Split(side) => side.publish(&self.ram, &self.setup),
            Side::Packed(side) => side.publish(&self.ram, &self.setup),
        }
    }

    /// Number of descriptors free for offers.
    pub fn free_descriptors(&self) -> usize {
        match &self.side {
            Side::Split(side) => side.free(),
            Side::Packed(side) => side.free(),
        }
    }

    /// The next used chain: its id and the bytes written.
    pub fn used(&mut self) -> Option<(u16, u32)> {
        let used = match &mut self.side {
            Side::Split(side) => side.used(&self.ram, &self.setup),
            Side::Packed(side) => side.used(&self.ram, &self.setup),
        };
        if used.is_some() {
            self.refresh_event();
        }
        used
    }

    /// Asks for interrupts, or for none.
    pub fn set_interrupts(&mut self, wanted: bool) {
        self.interrupts = wanted;
        self.refresh_event();
    }

    fn refresh_event(&self) {
        match &self.side {
            Side::Split(side) => side.set_event(&self.ram, &self.setup, self.interrupts),
            Side::Packed(side) => side.set_event(&self.ram, &self.setup, self.interrupts),
        }
    }

    /// Whether the device wants a kick for what was published since the last call.
    pub fn kick_needed(&mut self) -> bool {
        match &mut self.side {
            Side::Split(side) => side.kick_needed(&self.ram, &self.setup),
            Side::Packed(side) => side.kick_needed(&self.ram, &self.setup),
        }
    }

    /// Kicks the device if it wants it; whether it did.
    pub fn kick(&mut self) -> bool {
        let needed = self.kick_needed();
        if needed {
            self.kick.signal().unwrap();
        }
        needed
    }

    /// Whether the device interrupted since the last call.
    pub fn interrupted(&self) -> bool {
        self.call.drain()
    }
}

fn descriptors(readable: &[(u64, u32)], writable: &[(u64, u32)]) -> Vec<RawDesc> {
    let buffer = |flags| move |&(addr, len): &(u64, u32)| RawDesc { addr, len, flags, tail: 0 };
    let mut descs: Vec<_> =
        readable.iter().map(buffer(0)).chain(writable.iter().map(buffer(F_WRITE))).collect();
    let last = descs.len().saturating_sub(1);
    descs[..last].iter_mut().for_each(|d| d.flags |= F_NEXT);
    descs
}
