//! Guest memory that is registered with the kernel: right bytes, in the right memory, whatever
//! becomes of the memory table.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::clock::MonotonicClock;
use base::counter::Counter;
use base::random::{Random, Seeded};
use queue::memory::RegionSpec;
use queue::testing::{ModelDriver, ModelOptions};
use queue::{GuestMemory, Layout, Queue, Vring};
use rustix::process::Resource;
use rustix::thread::CapabilitySet;
use sidecore::{Sidecore, SidecoreConfig};
use vhost_user::Device;

use crate::backend::Backend;
use crate::raw::RawBackend;
use crate::registered_memory;
use crate::request::kind;
use crate::testing::{BOTH, Rig, UNTOUCHED, pattern};
use crate::{BackendConfig, BlockPort, BlockPortConfig};

const MIB: u64 = 1 << 20;

/// Offset, for the guest, of the memory that changes; below are the ring and the headers.
const MOVING: u64 = 4 * MIB;

/// A direct disk on a real file system, full of a pattern.
fn image() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk.img");
    std::fs::write(&path, pattern(1, 4 << 20)).unwrap();
    (dir, path)
}

fn backend(path: &std::path::Path) -> RawBackend {
    RawBackend::open(path, true, false, 4096).unwrap().registering_memory(1 << 30)
}

/// A guest with 4 MiB that stay and 4 MiB that are one of two places in its file.
struct Guest {
    driver: ModelDriver,
    disk: Vec<u8>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Place {
    First,
    Second,
}

impl Guest {
    fn new(layout: Layout) -> Self {
        let options = ModelOptions { mem_bytes: 12 << 20, event_idx: true, ..Default::default() };
        let driver = ModelDriver::with_options(layout, 256, options);
        Self { driver, disk: pattern(1, 4 << 20) }
    }

    fn region(&self, at: u64, offset: u64) -> RegionSpec {
        let all = self.driver.region();
        let (guest_addr, user_addr) = (all.guest_addr + at, all.user_addr + at);
        RegionSpec { guest_addr, user_addr, len_bytes: 4 * MIB, mmap_offset: offset }
    }

    fn fixed(&self) -> Arc<GuestMemory> {
        GuestMemory::empty().with_region(self.region(0, 0), &self.driver.fd()).unwrap()
    }

    fn table(&self, place: Place) -> Arc<GuestMemory> {
        let offset = if place == Place::First { MOVING } else { 2 * MOVING };
        self.fixed().with_region(self.region(MOVING, offset), &self.driver.fd()).unwrap()
    }

    fn vring(&self, memory: Arc<GuestMemory>) -> Vring {
        Vring::new(Queue::new(memory, self.driver.setup()).unwrap(), self.driver.parts(0)).unwrap()
    }

    /// The bytes at an address of the moving part, in one of its places.
    fn bytes(&self, place: Place, at: u64, len: usize) -> Vec<u8> {
        let offset = if place == Place::First { MOVING } else { 2 * MOVING };
        self.driver.read(self.driver.region().guest_addr + offset + at, len)
    }

    /// Offers a read into the moving part; gives where its status will be.
    fn ask(&mut self, sector: u64, at: u64, len: u32) -> u64 {
        let base = self.driver.region().guest_addr;
        for offset in [MOVING, 2 * MOVING] {
            self.driver.write(base + offset + at, &vec![UNTOUCHED; len as usize]);
        }
        let mut header = [0u8; 16];
        header[..4].copy_from_slice(&kind::IN.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        let (header, status) = (self.driver.buffer(&header), self.driver.buffer(&[UNTOUCHED]));
        self.driver.offer(&[header], &[(base + MOVING + at, len), status]);
        self.driver.kick();
        status.0
    }

    /// Waits until `count` requests are done.
    fn wait(&mut self, count: usize) {
        let begin = Instant::now();
        for _ in 0..count {
            while self.driver.used().is_none() {
                assert!(begin.elapsed() < Duration::from_secs(30), "requests do not end");
                std::thread::yield_now();
            }
        }
    }

    /// In which place the bytes of a read are; the other one must be untouched.
    fn place_of(&self, sector: u64, at: u64, len: usize) -> Place {
        let wanted = &self.disk[sector as usize * 512..][..len];
        let places = [Place::First, Place::Second].map(|place| self.bytes(place, at, len));
        let untouched = |bytes: &[u8]| bytes.iter().all(|&b| b == UNTOUCHED);
        match (places[0] == wanted, places[1] == wanted) {
            (true, false) if untouched(&places[1]) => Place::First,
            (false, true) if untouched(&places[0]) => Place::Second,
            other => panic!("sector {sector}: {other:?}"),
        }
    }
}

fn port(path: &std::path::Path) -> Arc<BlockPort> {
    let backend =
        BackendConfig::Raw { path: path.into(), direct: true, registered_memory_bytes: 1 << 30 };
    let config = BlockPortConfig { block_size: 4096, ..BlockPortConfig::new("vm/disk", backend) };
    let core = SidecoreConfig { yield_when_idle: true, ..SidecoreConfig::default() };
    let core = Sidecore::spawn(core, Arc::new(MonotonicClock)).unwrap();
    BlockPort::new(config, &[core], Arc::new(MonotonicClock)).unwrap()
}

#[test]
fn bytes_of_all_shapes_are_right_and_single_buffers_are_registered_ones() {
    let (_dir, path) = image();
    for layout in BOTH {
        let mut rig = Rig::new(layout, &backend(&path));
        let mut random = Seeded::new(7);
        for round in 0..100u64 {
            let before = rig.stats.registered.get();
            let len = 4096 * (1 + random.below(8)) as usize;
            let sector = u64::from(random.below(900)) * 8;
            let data = pattern(round, len);
            // In one buffer, or in two.
            let parts = if round % 2 == 0 { vec![len] } else { vec![4096, len] };
            let (header, status) = (rig.header(kind::OUT, sector), rig.status_byte());
            let mut readable = vec![header];
            let mut rest = &data[..];
            for part in parts {
                let (now, later) = rest.split_at(part.min(rest.len()));
                rest = later;
                if !now.is_empty() {
                    let at = rig.driver.ram().alloc_aligned(now.len(), 4096);
                    rig.driver.write(at, now);
                    readable.push((at, now.len() as u32));
                }
            }
            let single = readable.len() == 2;
            rig.driver.offer(&readable, &[status]);
            assert_eq!(rig.settle().len(), 1);
            assert_eq!(rig.driver.read(status.0, 1), [0]);
            assert_eq!(rig.stats.registered.get() - before, u64::from(single));
            assert!(rig.read(sector, len) == data, "round {round}");
        }
        let flush = rig.send(kind::FLUSH, 0, &[]);
        assert_eq!(rig.finish(flush), (0, 1));
    }
}

#[test]
fn a_buffer_over_two_regions_goes_the_usual_way() {
    let (_dir, path) = image();
    for layout in BOTH {
        let port = port(&path);
        let mut guest = Guest::new(layout);
        port.start_queue(guest.vring(guest.table(Place::Second))).unwrap();
        let used = |port: &BlockPort| port.stats()[0].block.registered.get();
        guest.ask(64, 8192, 16384);
        guest.wait(1);
        assert_eq!((guest.place_of(64, 8192, 16384), used(&port)), (Place::Second, 1));
        // From the last page of one region to the first of the next.
        let base = guest.driver.region().guest_addr;
        let (header, status) = {
            let mut header = [0u8; 16];
            header[8..].copy_from_slice(&64u64.to_le_bytes());
            (guest.driver.buffer(&header), guest.driver.buffer(&[UNTOUCHED]))
        };
        guest.driver.offer(&[header], &[(base + MOVING - 4096, 8192), status]);
        guest.driver.kick();
        guest.wait(1);
        assert_eq!(guest.driver.read(status.0, 1), [0]);
        let at = 64 * 512;
        assert!(guest.driver.read(base + MOVING - 4096, 4096) == guest.disk[at..][..4096]);
        assert!(guest.bytes(Place::Second, 0, 4096) == guest.disk[at + 4096..][..4096]);
        assert_eq!(used(&port), 1);
    }
}

/// The table changes under a full queue: what was in flight ends in one of
/// the two memories, what comes later in the new one, and never anything in both or neither.
#[test]
fn abuse_D3_a_changed_table_under_load_moves_reads_to_the_new_memory() {
    let (_dir, path) = image();
    for layout in BOTH {
        let port = port(&path);
        let mut guest = Guest::new(layout);
        port.start_queue(guest.vring(guest.table(Place::First))).unwrap();
        let mark = guest.driver.ram().mark();
        let mut random = Seeded::new(3);
        for round in 0..60 {
            guest.driver.ram().free_to(mark);
            let place = if round % 2 == 0 { Place::Second } else { Place::First };
            let reads = |random: &mut Seeded, first: u64| -> Vec<(u64, u64)> {
                (first..first + 32).map(|n| (u64::from(random.below(100)) * 8, n * 8192)).collect()
            };
            let before = reads(&mut random, 0);
            for &(sector, at) in &before {
                guest.ask(sector, at, 8192);
            }
            port.update_memory(guest.table(place)).unwrap();
            let after = reads(&mut random, 32);
            for &(sector, at) in &after {
                guest.ask(sector, at, 8192);
            }
            guest.wait(before.len() + after.len());
            for &(sector, at) in &before {
                guest.place_of(sector, at, 8192);
            }
            for &(sector, at) in &after {
                assert_eq!(guest.place_of(sector, at, 8192), place, "round {round}");
            }
        }
        assert!(port.stats()[0].block.registered.get() >= 60 * 32);
        assert!(port.stop_queue(0).unwrap().is_some());
    }
}

/// With a table that has not the memory in between, so that its address is free for the next.
#[test]
fn abuse_D3_the_same_address_with_another_mapping_is_not_the_old_memory() {
    let (_dir, path) = image();
    let port = port(&path);
    let mut guest = Guest::new(Layout::Split);
    let addresses = |table: &GuestMemory| -> Vec<usize> {
        table.mapped().iter().map(|m| m.iov_base as usize).collect()
    };
    let first = guest.table(Place::First);
    let mut before = addresses(&first);
    port.start_queue(guest.vring(first)).unwrap();
    let mut same = 0;
    for round in 0..20 {
        let place = if round % 2 == 0 { Place::Second } else { Place::First };
        port.update_memory(guest.fixed()).unwrap();
        let next = guest.table(place);
        let now = addresses(&next);
        same += usize::from(now.iter().any(|address| before.contains(address)));
        before = now;
        port.update_memory(next).unwrap();
        guest.ask(8, 0, 4096);
        guest.wait(1);
        assert_eq!(guest.place_of(8, 0, 4096), place, "round {round}");
    }
    // Up to the kernel; the test says more when it happens.
    eprintln!("an address was used again in {same} rounds of 20");
}

#[test]
fn a_dirty_log_pins_nothing_again() {
    let (_dir, path) = image();
    let port = port(&path);
    let mut guest = Guest::new(Layout::Packed);
    let table = guest.table(Place::First);
    port.start_queue(guest.vring(Arc::clone(&table))).unwrap();
    assert!(table.shares_mappings(&table.with_log(None)));
    assert!(!table.shares_mappings(&guest.table(Place::First)), "equal is not the same");
    port.update_memory(table.with_log(None)).unwrap();
    guest.ask(8, 0, 4096);
    guest.wait(1);
    assert_eq!(guest.place_of(8, 0, 4096), Place::First);
    assert_eq!(port.stats()[0].block.registered.get(), 1);
}

/// Without CAP_IPC_LOCK, which is a thread's own, and more memory than may be locked.
#[test]
fn memory_that_cannot_be_locked_is_told_and_the_disk_works_without() {
    let limit = rustix::process::getrlimit(Resource::Memlock).current;
    if limit.is_none_or(|bytes| bytes >= 256 << 20) {
        eprintln!("not run: RLIMIT_MEMLOCK is {limit:?}");
        return;
    }
    let (_dir, path) = image();
    let work = move || {
        let mut caps = rustix::thread::capabilities(None).unwrap();
        caps.effective.remove(CapabilitySet::IPC_LOCK);
        rustix::thread::set_capabilities(None, caps).unwrap();
        let used: Arc<Counter> = Arc::default();
        let backend = backend(&path);
        let mut rig = Rig::new(Layout::Split, &backend);
        let mut disk = backend.open_queue(64).unwrap();
        let mapped = rig.driver.memory().mapped();
        // SAFETY: the table outlives the disk.
        let error = unsafe { disk.set_memory(&mapped, Arc::clone(&used)) }.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOMEM), "{error}");
        let error = registered_memory::register(&mut *disk, &rig.driver.memory(), u64::MAX, &used);
        let text = error.unwrap_err().to_string();
        assert!(text.contains("Cannot allocate memory") && text.contains("LimitMEMLOCK"), "{text}");
        rig.engine.requests.in_flight.disk.replace(disk, 0);
        rig.write(0, &pattern(9, 65536));
        assert!(rig.read(0, 65536) == pattern(9, 65536));
        assert_eq!(used.get() + rig.stats.registered.get(), 0);
    };
    std::thread::spawn(work).join().unwrap();
}

/// Memory that a front end declares costs nothing until somebody fills it.
#[test]
fn abuse_R12_more_memory_than_is_allowed_is_neither_filled_nor_registered() {
    let (_dir, path) = image();
    let backend = backend(&path).registering_memory(1 << 20);
    let mut rig = Rig::new(Layout::Split, &backend);
    let (memory, used) = (rig.driver.memory(), Arc::default());
    let mut disk = backend.open_queue(64).unwrap();
    let error =
        registered_memory::register(&mut *disk, &memory, 1 << 20, &used).unwrap_err().to_string();
    assert!(error.contains("`registered_memory` allows 1 MiB"), "{error}");
    rig.write(0, &pattern(9, 65536));
    assert!(rig.read(0, 65536) == pattern(9, 65536));
    assert_eq!(used.get() + rig.stats.registered.get(), 0);
}

/// Fails where the kernel registers nothing for other reasons: there the tests above say nothing.
#[test]
fn one_gibibyte_is_one_buffer_for_the_kernel() {
    let (_dir, path) = image();
    let mut disk = backend(&path).open_queue(4).unwrap();
    let len = crate::limits::BUFFER_LEN_BYTES + 4096;
    let ram = base::shm::SharedMemory::new("large", len).unwrap();
    let iov_base = ram.as_ptr().cast();
    let whole = base::io::IoSlice { iov_base, iov_len: len };
    // SAFETY: mapped until the end of this function, and nothing is submitted.
    unsafe { disk.set_memory(&[whole], Arc::default()) }.unwrap();
}
