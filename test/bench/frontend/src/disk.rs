//! A disk: a number of requests always under way, each followed by the next at once.

use base::random::{Random, Seeded};
use serde::{Deserialize, Serialize};

use crate::access::{Access, Blocks};
use crate::error::FrontendError;
use crate::frame::pattern;
use crate::memory::Memory;
use crate::port::{Port, Reach, SILENCE_S, features_of, sleep_on};
use crate::report::{Meter, Report};
use crate::ring::{Buf, RingShape};

/// Bytes of a sector.
const SECTOR: u64 = 512;
/// Request types (virtio 1.2, 5.2.6).
const IN: u32 = 0;
const OUT: u32 = 1;
/// `VIRTIO_BLK_F_FLUSH`.
const FLUSH: u64 = 1 << 9;
/// Most bytes that are used of a disk: enough to leave the caches behind.
const SPAN_BYTES: u64 = 1 << 30;
/// Most bytes that are used of a disk when content is checked: all of them are written first.
const VERIFY_SPAN_BYTES: u64 = 64 << 20;
/// `num_queues` and all before it in the config space (virtio 1.2, 5.2.4).
const CONFIG_LEN: usize = 36;

/// Kind of the requests of a disk load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Half and half.
    Mixed,
}

/// A disk run.
#[derive(Debug, Clone, Copy)]
pub struct DiskRun {
    /// Kind of the requests.
    pub op: Op,
    /// The queue.
    pub shape: RingShape,
    /// Bytes of a request.
    pub block_bytes: usize,
    /// Requests under way.
    pub depth: usize,
    /// Compare every byte read; writes the used part of the disk first.
    pub verify: bool,
    /// Sleep on interrupts instead of polling.
    pub wait: bool,
    /// Guest memory of huge pages.
    pub huge: bool,
    /// For the order of blocks.
    pub seed: u64,
}

/// A request's place in memory.
#[derive(Debug, Clone, Copy)]
struct Slot {
    header: *mut u8,
    data: *mut u8,
    status: *mut u8,
    block: u64,
    write: bool,
    start_ns: u64,
}

/// A disk in use.
pub struct DiskLoad {
    run: DiskRun,
    pub(crate) port: Port,
    slots: Vec<Slot>,
    /// Blocks in use.
    blocks: u64,
    /// Blocks that are to come, in their order.
    to_come: Blocks,
    /// Version last written to each block, when content is checked; 0: none.
    versions: Vec<u32>,
    /// A request for the block is under way.
    busy: Vec<bool>,
    random: Seeded,
    /// Requests that failed.
    pub(crate) errors: u64,
}

impl DiskLoad {
    /// Connects and starts the disk, for random places.
    pub fn start(reach: Reach<'_>, run: DiskRun) -> Result<Self, FrontendError> {
        Self::start_with(reach, run, Access::default())
    }

    /// Starts as [`DiskLoad::start`] does, with places and write cache as `access` has them.
    pub fn start_with(
        reach: Reach<'_>,
        run: DiskRun,
        access: Access,
    ) -> Result<Self, FrontendError> {
        let usage = |text: String| Err(FrontendError::Usage(text));
        if run.block_bytes == 0
            || !run.block_bytes.is_multiple_of(SECTOR as usize)
            || run.block_bytes > 1 << 20
        {
            return usage(format!("block of {} bytes: whole sectors up to 1 MiB", run.block_bytes));
        }
        let room = usize::from(run.shape.size) / if run.shape.indirect { 1 } else { 3 };
        if run.depth == 0 || run.depth > room {
            return usage(format!("depth {}: 1 to {room} fit into the queue", run.depth));
        }
        if run.verify && access.once_per_bytes.is_some() {
            return usage("what is checked is written first: no stretch is left for once".into());
        }
        let mut session = reach.session()?;
        let cache = if access.write_cache { FLUSH } else { 0 };
        session.negotiate(features_of(run.shape) | cache)?;
        let config = session.config(CONFIG_LEN)?;
        let sectors = u64::from_le_bytes(config[..8].try_into().unwrap_or_default());
        let span = if run.verify { VERIFY_SPAN_BYTES } else { SPAN_BYTES };
        let blocks = (sectors * SECTOR).min(span) / run.block_bytes as u64;
        if blocks < run.depth as u64 {
            return usage(format!("a disk of {sectors} sectors is too small for the depth"));
        }
        let tables = if run.shape.indirect { usize::from(run.shape.size) * 512 } else { 0 };
        let bytes = run.depth * (run.block_bytes + 4096 + 128) + tables + (1 << 20);
        let mut memory = Memory::new(bytes, run.huge)?;
        let slots = (0..run.depth).map(|_| Slot::new(&mut memory, run.block_bytes));
        let slots = slots.collect::<Result<Vec<_>, _>>()?;
        let port = Port::start(session, memory, run.shape, 1)?;
        let tracked = if run.verify { blocks as usize } else { 0 };
        let (versions, busy) = (vec![0; tracked], vec![false; tracked]);
        let mut random = Seeded::new(run.seed);
        // At most SPAN_BYTES / SECTOR.
        let to_come = Blocks::new(blocks as u32, run.block_bytes, run.depth, access, &mut random)?;
        let mut load =
            Self { run, port, slots, blocks, to_come, versions, busy, random, errors: 0 };
        if run.verify {
            load.fill()?;
        } else if run.op != Op::Read {
            load.fill_slots();
        }
        Ok(load)
    }

    /// Data that is not zeroes, which a back end may store as nothing at all.
    fn fill_slots(&mut self) {
        for (k, slot) in self.slots.iter_mut().enumerate() {
            fill_block(slot.bytes(self.run.block_bytes), k as u64, 1);
        }
    }

    /// Writes version 1 of every block, in order.
    fn fill(&mut self) -> Result<(), FrontendError> {
        let (mut next, mut out) = (0, 0);
        let mut free: Vec<usize> = (0..self.slots.len()).collect();
        while next < self.blocks || out > 0 {
            while next < self.blocks
                && let Some(k) = free.pop()
            {
                self.begin(k, next, true, 0);
                (next, out) = (next + 1, out + 1);
            }
            self.port.queues[0].publish()?;
            while let Some(k) = self.finish()? {
                free.push(k);
                out -= 1;
            }
            if out == self.slots.len() && self.run.wait {
                sleep_on(&mut [&mut self.port.queues[0]], "a write")?;
            }
        }
        match self.errors {
            0 => Ok(()),
            n => Err(FrontendError::Content(format!("{n} writes failed"))),
        }
    }

    /// Posts a request for `block` from slot `k`.
    #[inline]
    fn begin(&mut self, k: usize, block: u64, write: bool, now_ns: u64) {
        let len = self.run.block_bytes;
        if self.run.verify {
            self.busy[block as usize] = true;
            if write {
                let version = &mut self.versions[block as usize];
                *version += 1;
                fill_block(self.slots[k].bytes(len), block, *version);
            }
        }
        let slot = &mut self.slots[k];
        (slot.block, slot.write, slot.start_ns) = (block, write, now_ns);
        let kind = u64::from(if write { OUT } else { IN });
        let sector = block * (len as u64 / SECTOR);
        // SAFETY: header and status of a slot that the device does not use now.
        unsafe {
            slot.header.cast::<u64>().write_volatile(kind.to_le());
            slot.header.add(8).cast::<u64>().write_volatile(sector.to_le());
            slot.status.write_volatile(0xff);
        }
        let memory = &self.port.memory;
        let bufs = [
            Buf { addr: memory.guest_addr(slot.header), len: 16, write: false },
            Buf { addr: memory.guest_addr(slot.data), len: len as u32, write: !write },
            Buf { addr: memory.guest_addr(slot.status), len: 1, write: true },
        ];
        self.port.queues[0].ring.post(&bufs, k as u16);
    }

    /// Takes one finished request; its slot.
    #[inline]
    pub(crate) fn finish(&mut self) -> Result<Option<usize>, FrontendError> {
        let Some(used) = self.port.queues[0].ring.used()? else { return Ok(None) };
        let k = usize::from(used.token);
        let Slot { status, block, write, .. } = self.slots[k];
        // SAFETY: the status byte of a request that the device has finished.
        let status = unsafe { status.read_volatile() };
        if status != 0 {
            self.errors += 1;
        }
        if self.run.verify {
            self.busy[block as usize] = false;
            let version = self.versions[block as usize];
            let bytes = self.slots[k].bytes(self.run.block_bytes);
            if status == 0 && !write && !block_is(bytes, block, version) {
                let text = format!("block {block} is not version {version}");
                return Err(FrontendError::Content(text));
            }
        }
        Ok(Some(k))
    }

    /// Starts a request from slot `k` for the block whose turn it is; false when there is none.
    #[inline]
    pub(crate) fn next(&mut self, k: usize, now_ns: u64) -> bool {
        let Some((block, write)) = self.pick() else { return false };
        self.begin(k, block, write, now_ns);
        true
    }

    /// When the request in slot `k` was started.
    #[inline]
    pub(crate) fn started_ns(&self, k: usize) -> u64 {
        self.slots[k].start_ns
    }

    fn pick(&mut self) -> Option<(u64, bool)> {
        let write = match self.run.op {
            Op::Read => false,
            Op::Write => true,
            Op::Mixed => self.random.next_u64() & 1 == 0,
        };
        loop {
            let block = self.to_come.next(&mut self.random)?;
            // Two requests for one block at a time have no order that could be checked.
            if !self.run.verify || !self.busy[block as usize] {
                return Some((block, write));
            }
        }
    }

    /// Asks for each stretch once: first for some that do not count, then for all others, for at
    /// most `run_ns` each.
    pub fn run_once(&mut self, run_ns: u64) -> Result<Report, FrontendError> {
        self.to_come.open_warm_up();
        self.run(run_ns)?;
        self.to_come.open_all();
        self.run(run_ns)
    }

    /// Runs for `run_ns` or until no block is to come, and until everything is finished.
    pub fn run(&mut self, run_ns: u64) -> Result<Report, FrontendError> {
        let (kicks, interrupts) = self.counts();
        let errors = self.errors;
        let mut meter = Meter::start(run_ns)?;
        let mut out = 0;
        while out < self.slots.len() && self.next(out, meter.now_ns()) {
            out += 1;
        }
        self.port.queues[0].publish()?;
        let (mut go_on, mut last_ns, mut spins) = (true, 0, 0u32);
        while out > 0 {
            let mut now_ns = 0;
            let mut finished = 0;
            // At most what was under way: a back end may be faster than this loop.
            while finished < self.slots.len() as u64
                && let Some(k) = self.finish()?
            {
                if finished == 0 {
                    now_ns = meter.now_ns();
                    go_on = go_on && meter.goes_on(now_ns);
                }
                finished += 1;
                meter.latency.record(now_ns.saturating_sub(self.slots[k].start_ns));
                if !(go_on && self.next(k, now_ns)) {
                    out -= 1;
                }
            }
            if finished > 0 {
                meter.ops += finished;
                self.port.queues[0].publish()?;
                (last_ns, spins) = (now_ns, 0);
            } else if self.run.wait {
                sleep_on(&mut [&mut self.port.queues[0]], "a request")?;
            } else {
                spins += 1;
                if spins.is_multiple_of(1 << 16)
                    && meter.now_ns() > last_ns + SILENCE_S * 1_000_000_000
                {
                    return Err(FrontendError::Silent { secs: SILENCE_S, what: "a request" });
                }
            }
        }
        let mut report = meter.report(self.run.block_bytes as u64)?;
        let after = self.counts();
        (report.kicks, report.interrupts) = (after.0 - kicks, after.1 - interrupts);
        report.errors = self.errors - errors;
        report.verified = self.run.verify;
        Ok(report)
    }

    fn counts(&mut self) -> (u64, u64) {
        let queue = &mut self.port.queues[0];
        queue.count_interrupts();
        (queue.kicks, queue.interrupts)
    }

    /// Stops the queue.
    pub fn stop(mut self) -> Result<(), FrontendError> {
        self.port.stop()
    }
}

impl Slot {
    fn new(memory: &mut Memory, block_bytes: usize) -> Result<Self, FrontendError> {
        // In one cache line, as Linux' driver has them.
        let header = memory.alloc(17, 64)?;
        let status = header.wrapping_add(16);
        let data = memory.alloc(block_bytes, 4096)?;
        Ok(Self { header, data, status, block: 0, write: false, start_ns: 0 })
    }

    /// Data of the slot. Only while the device does not own it.
    fn bytes(&mut self, len: usize) -> &mut [u8] {
        // SAFETY: `len` bytes were allocated for this slot alone, in memory that the port keeps.
        unsafe { std::slice::from_raw_parts_mut(self.data, len) }
    }
}

fn fill_block(bytes: &mut [u8], block: u64, version: u32) {
    let seed = pattern(block, u64::from(version));
    for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&pattern(seed, i as u64).to_le_bytes());
    }
}

fn block_is(bytes: &[u8], block: u64, version: u32) -> bool {
    let seed = pattern(block, u64::from(version));
    let mut words = bytes.chunks_exact(8).enumerate();
    words.all(|(i, word)| *word == pattern(seed, i as u64).to_le_bytes())
}
