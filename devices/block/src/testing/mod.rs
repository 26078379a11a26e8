//! A driver, an engine and a disk on one thread, for tests: no sidecore, no time.

pub(crate) mod alloc;
pub(crate) mod model_disk;
pub(crate) mod placeholders;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64};

use crate::stage::BlockStage;
use base::io::Disk;
use queue::testing::{ModelDriver, ModelOptions};
use queue::{Layout, Vring};
use sidecore::{Ledger, VmId, Worker};

use crate::backend::{Backend, Demands};
use crate::config::OnError;
use crate::engine::QueueEngine;
use crate::gate::Gate;
use crate::metrics::BlockStats;
use crate::port_state::PortState;
use crate::registered_memory;
use crate::slab;

pub(crate) const BOTH: [Layout; 2] = [Layout::Split, Layout::Packed];

/// Options of a [`Rig`]'s port.
pub(crate) struct RigOptions {
    pub block_size: u32,
    pub read_only: bool,
    pub writeback: bool,
    pub demands: Demands,
    pub stages: Vec<Box<dyn BlockStage>>,
    pub vm: VmId,
    pub gate: Option<Arc<Gate>>,
    pub on_error: OnError,
}

impl Default for RigOptions {
    fn default() -> Self {
        Self {
            block_size: 512,
            read_only: false,
            writeback: true,
            demands: Demands::NONE,
            stages: Vec::new(),
            vm: VmId::NONE,
            gate: None,
            on_error: OnError::Report,
        }
    }
}

pub(crate) struct Rig {
    pub driver: ModelDriver,
    pub engine: QueueEngine,
    pub ledger: Ledger,
    pub stats: Arc<BlockStats>,
}

/// A request that was offered, and where its answer will be.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Offered {
    pub id: u16,
    pub data: u64,
    pub status: u64,
}

/// A status byte that no device writes.
pub(crate) const UNTOUCHED: u8 = 0xa5;

impl Rig {
    pub fn with_disk(layout: Layout, disk: Box<dyn Disk>, options: RigOptions) -> Self {
        Self::sized(layout, 64, disk, options)
    }

    pub fn sized(layout: Layout, size: u16, disk: Box<dyn Disk>, options: RigOptions) -> Self {
        let port = state(disk.len_bytes(), options);
        Self::of_port(layout, size, disk, port)
    }

    /// Queue of a port, with a driver and a memory of its own.
    pub fn of_port(layout: Layout, size: u16, disk: Box<dyn Disk>, port: Arc<PortState>) -> Self {
        let model = ModelOptions { event_idx: true, mem_bytes: 256 << 20, ..Default::default() };
        let driver = ModelDriver::with_options(layout, size, model);
        let stats = Arc::new(BlockStats::default());
        let engine = QueueEngine::new(driver.vring(0), port, Arc::clone(&stats), disk).unwrap();
        Self { driver, engine, ledger: Ledger::default(), stats }
    }

    /// An engine around a vring that the test made.
    pub fn around(vring: Vring, disk: &model_disk::ModelDisk, options: RigOptions) -> QueueEngine {
        engine(vring, disk.boxed(), options, Arc::default())
    }

    pub fn new(layout: Layout, backend: &dyn Backend) -> Self {
        let options = RigOptions { demands: backend.demands(), ..RigOptions::default() };
        let mut rig = Self::with_disk(layout, backend.open_queue(64).unwrap(), options);
        let max_bytes = backend.demands().max_registered_bytes;
        if max_bytes > 0 {
            let mut disk = backend.open_queue(64).unwrap();
            let (memory, used) = (rig.driver.memory(), &rig.stats.registered);
            // Some tests want it refused.
            let _ = registered_memory::register(&mut *disk, &memory, max_bytes, used);
            rig.engine.requests.in_flight.disk.replace(disk, 0);
        }
        rig
    }

    /// The header of a request, in guest memory.
    pub fn header(&self, kind: u32, sector: u64) -> (u64, u32) {
        let mut header = [0u8; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.driver.buffer(&header)
    }

    /// A status byte, in guest memory.
    pub fn status_byte(&self) -> (u64, u32) {
        self.driver.buffer(&[UNTOUCHED])
    }

    /// Offers a request with data from the driver.
    pub fn send(&mut self, kind: u32, sector: u64, data: &[u8]) -> Offered {
        let header = self.header(kind, sector);
        let status = self.status_byte();
        let mut readable = vec![header];
        if !data.is_empty() {
            readable.push(self.driver.buffer(data));
        }
        let id = self.driver.offer(&readable, &[status]);
        Offered { id, data: 0, status: status.0 }
    }

    /// Offers a request with room for data from the device, filled with a pattern before.
    pub fn ask(&mut self, kind: u32, sector: u64, len: usize) -> Offered {
        let header = self.header(kind, sector);
        let data = self.driver.buffer(&vec![0xee; len]);
        let status = self.status_byte();
        let id = self.driver.offer(&[header], &[data, status]);
        Offered { id, data: data.0, status: status.0 }
    }

    /// Polls until nothing is in flight; waits for the disk's event, never for time.
    pub fn settle(&mut self) -> Vec<(u16, u32)> {
        let mut now_ns = 0;
        loop {
            now_ns += 1;
            let work = self.engine.poll(now_ns, &mut self.ledger);
            if work == 0 && self.engine.requests.in_flight.slab.taken() == 0 {
                break;
            }
            if work == 0 {
                let fd =
                    self.engine.requests.in_flight.disk.event_fd().expect("stuck without an event");
                // SAFETY: the disk lives as long as the engine.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut fds, None).unwrap();
                rustix::io::read(fd, &mut [0u8; 8]).unwrap();
            }
        }
        std::iter::from_fn(|| self.driver.used()).collect()
    }

    /// Settles one request: its status and the length written.
    pub fn finish(&mut self, offered: Offered) -> (u8, u32) {
        let used = self.settle();
        assert_eq!(used.len(), 1, "one request, one completion");
        assert_eq!(used[0].0, offered.id);
        (self.status(offered), used[0].1)
    }

    pub fn status(&self, offered: Offered) -> u8 {
        self.driver.read(offered.status, 1)[0]
    }

    /// Writes and checks that it worked.
    pub fn write(&mut self, sector: u64, data: &[u8]) {
        let offered = self.send(crate::request::kind::OUT, sector, data);
        assert_eq!(self.finish(offered), (0, 1));
    }

    /// Reads and checks that it worked.
    pub fn read(&mut self, sector: u64, len: usize) -> Vec<u8> {
        let offered = self.ask(crate::request::kind::IN, sector, len);
        assert_eq!(self.finish(offered), (0, len as u32 + 1));
        self.driver.read(offered.data, len)
    }
}

/// Port state for an engine without a port.
pub(crate) fn state(len_bytes: u64, options: RigOptions) -> Arc<PortState> {
    Arc::new(PortState {
        vm: options.vm,
        gate: options.gate,
        len_bytes: AtomicU64::new(len_bytes),
        writeback: AtomicBool::new(options.writeback),
        read_only: options.read_only,
        discard: (options.stages.is_empty() && !options.read_only).into(),
        write_zeroes: (!options.read_only).into(),
        block_size: options.block_size,
        serial: slab::serial("serial-1"),
        demands: options.demands,
        has_stages: !options.stages.is_empty(),
        stages: options.stages.into(),
        on_error: options.on_error,
        flush_errno: AtomicI32::new(0),
        orphans: Arc::default(),
    })
}

fn engine(
    vring: Vring,
    disk: Box<dyn Disk>,
    options: RigOptions,
    stats: Arc<BlockStats>,
) -> QueueEngine {
    let port = state(disk.len_bytes(), options);
    QueueEngine::new(vring, port, stats, disk).unwrap()
}

/// Bytes that differ from block to block and from seed to seed.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    use base::random::Random;
    let mut random = base::random::Seeded::new(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&random.next_u64().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Bytes of a range of DISCARD or WRITE ZEROES.
pub(crate) fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend_from_slice(&sectors.to_le_bytes());
    bytes.extend_from_slice(&flags.to_le_bytes());
    bytes
}
