//! Memory tables, logs and inflight regions: what a front end may send.
#![allow(non_snake_case)]
// Helpers of tests may unwrap as the tests themselves do.
#![allow(clippy::unwrap_used)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use base::limits::{MAX_MEMORY_REGIONS, MAX_QUEUE_SIZE, MAX_QUEUES};
use base::shm::SharedMemory;
use queue::dirty::{DirtyLog, LOG_PAGE_BYTES, MAX_LOG_BYTES};
use queue::inflight::InflightRegion;
use queue::memory::RegionSpec;
use queue::seg::{copy_across, copy_in, copy_out, fill_zero, subrange, total_len};
use queue::testing::{GUEST_BASE, ModelDriver, ModelOptions};
use queue::vring::VringParts;
use queue::{
    Batch, ChainBuf, ChainFault, Completion, GuestMemory, Layout, MemoryError, MemoryShare, Queue,
    RingError, RingSetup, Vring,
};

const PAGE: u64 = 4096;

fn file(len: u64) -> OwnedFd {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let fd = rustix::fs::memfd_create("guest", flags).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    fd
}

fn spec(guest_addr: u64, user_addr: u64, len_bytes: u64) -> RegionSpec {
    RegionSpec { guest_addr, user_addr, len_bytes, mmap_offset: 0 }
}

#[test]
fn a_table_is_built_and_taken_apart() {
    let fd = file(4 * PAGE);
    let (a, b) = (spec(0, 0x10_0000, PAGE), spec(8 * PAGE, 0x20_0000, 2 * PAGE));
    let one = GuestMemory::empty().with_region(b, &fd).unwrap();
    let both = one.with_region(a, &fd).unwrap();
    assert_eq!(both.regions(), [a, b]);
    assert_eq!(one.regions(), [b]);
    assert_eq!(both.user_to_guest(0x20_0010, 16), Ok(8 * PAGE + 16));
    assert_eq!(both.user_to_guest(0x10_0000, PAGE), Ok(0));
    assert!(both.user_to_guest(0x10_0000, PAGE + 1).is_err());
    assert!(both.user_to_guest(0x10_0000 - 1, 2).is_err());
    assert_eq!(both.user_to_guest(u64::MAX, 2), Err(MemoryError::Wraps { addr: u64::MAX, len: 2 }));
    let removed = both.without_region(b).unwrap();
    assert_eq!(removed.regions(), [a]);
    assert!(matches!(removed.without_region(b), Err(MemoryError::NoSuchRegion { .. })));
    assert!(both.without_region(spec(0, 0x20_0000, PAGE)).is_err());
}

#[test]
fn abuse_P6_bad_regions_are_refused() {
    let fd = file(4 * PAGE);
    let table = GuestMemory::empty().with_region(spec(PAGE, PAGE, 2 * PAGE), &fd).unwrap();
    let refused = |spec: RegionSpec| table.with_region(spec, &fd).unwrap_err();
    for overlapping in [
        spec(0, 0x100_0000, 2 * PAGE),
        spec(2 * PAGE, 0x100_0000, PAGE),
        spec(PAGE, 0x100_0000, 4 * PAGE),
        spec(0x100_0000, 2 * PAGE, PAGE),
    ] {
        assert!(matches!(refused(overlapping), MemoryError::Overlaps { .. }), "{overlapping:?}");
    }
    assert!(matches!(refused(spec(0x100_0000, 0x100_0000, 0)), MemoryError::Unmappable { .. }));
    let longer = spec(0x100_0000, 0x100_0000, 5 * PAGE);
    assert!(matches!(refused(longer), MemoryError::Unmappable { .. }));
    for wrapping in [spec(u64::MAX - PAGE, 0, 2 * PAGE), spec(0, u64::MAX - PAGE, 2 * PAGE)] {
        assert!(matches!(refused(wrapping), MemoryError::Wraps { .. }));
    }
    let at = |mmap_offset| RegionSpec { mmap_offset, ..spec(0x100_0000, 0x100_0000, PAGE) };
    assert!(matches!(refused(at(1)), MemoryError::Unmappable { .. }));
    assert!(matches!(refused(at(4 * PAGE)), MemoryError::Unmappable { .. }));
    assert!(matches!(refused(at(u64::MAX)), MemoryError::Wraps { .. }));
    assert!(table.with_region(at(3 * PAGE), &fd).is_ok());
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let not_memory = table.with_region(spec(0x100_0000, 0x100_0000, PAGE), &pipe);
    assert!(matches!(not_memory, Err(MemoryError::Unmappable { .. })));
}

#[test]
fn too_many_regions_are_refused() {
    let fd = file(PAGE);
    let mut table = GuestMemory::empty();
    for i in 0..MAX_MEMORY_REGIONS as u64 {
        table = table.with_region(spec(i * PAGE, i * PAGE, PAGE), &fd).unwrap();
    }
    let one_more = table.with_region(spec(1 << 40, 1 << 40, PAGE), &fd);
    assert!(matches!(one_more, Err(MemoryError::TooMany { .. })));
}

/// A driver whose memory is followed, without a gap, by one page of another file.
fn driver_and_page(layout: Layout) -> (ModelDriver, Arc<GuestMemory>, RegionSpec) {
    let options = ModelOptions { mem_bytes: 1 << 20, ..Default::default() };
    let driver = ModelDriver::with_options(layout, 8, options);
    let page = spec(GUEST_BASE + (1 << 20), 0x1000, PAGE);
    let memory = driver.memory().with_region(page, &file(PAGE)).unwrap();
    (driver, memory, page)
}

#[test]
fn abuse_R5_a_buffer_across_two_regions_is_split() {
    for layout in [Layout::Split, Layout::Packed] {
        let (mut driver, memory, page) = driver_and_page(layout);
        let mut queue = Queue::new(memory, driver.setup()).unwrap();
        driver.write(page.guest_addr - 100, &[7; 100]);
        driver.offer(&[(page.guest_addr - 100, 300)], &[(page.guest_addr, 10)]);
        let mut batch = Batch::new(8, 64);
        assert_eq!(queue.pop(&mut batch, 8), Ok(1));
        let chain = batch.get(0);
        let lens: Vec<usize> = chain.readable.iter().map(|s| s.len()).collect();
        assert_eq!((lens, chain.readable_len), (vec![100, 200], 300));
        let mut bytes = [1; 300];
        assert_eq!(copy_out(chain.readable, 0, &mut bytes), 300);
        assert_eq!(bytes[..100], [7; 100]);
        assert_eq!(bytes[100..], [0; 200]);
        // One byte more than there is.
        driver.offer(&[(page.guest_addr, PAGE as u32 + 1)], &[]);
        assert_eq!(queue.pop(&mut batch, 8), Ok(1));
        assert_eq!(batch.get(0).fault, Some(ChainFault::NotMapped));
    }
}

#[test]
fn abuse_R5_a_table_across_two_regions_is_read() {
    for layout in [Layout::Split, Layout::Packed] {
        let (mut driver, memory, page) = driver_and_page(layout);
        let buffer = driver.buffer(b"0123456789");
        // One entry, half here and half there: the second half (length 10) is on the page.
        let start = page.guest_addr - 8;
        driver.write(start, &buffer.0.to_le_bytes());
        let mut queue = Queue::new(memory.clone(), driver.setup()).unwrap();
        let mut batch = Batch::new(8, 64);
        driver.offer(&[], &[(page.guest_addr, 8)]);
        assert_eq!(queue.pop(&mut batch, 8), Ok(1));
        assert_eq!(copy_in(batch.get(0).writable, 0, &10u64.to_le_bytes()), 8);
        let table = queue::testing::RawDesc { addr: start, len: 16, flags: 4, tail: 0 };
        driver.offer_raw(&[table]);
        assert_eq!(queue.pop(&mut batch, 8), Ok(1));
        let mut bytes = [0; 10];
        assert_eq!(copy_out(batch.get(0).readable, 0, &mut bytes), 10);
        assert_eq!(&bytes, b"0123456789");
    }
}

#[test]
fn abuse_D3_removed_memory_stays_mapped_while_a_request_holds_it() {
    let (mut driver, memory, page) = driver_and_page(Layout::Split);
    let mut queue = Queue::new(memory.clone(), driver.setup()).unwrap();
    driver.offer(&[], &[(page.guest_addr, 100)]);
    let mut batch = Batch::new(8, 64);
    assert_eq!(queue.pop(&mut batch, 8), Ok(1));
    let mut held = ChainBuf::new(4);
    assert!(held.load(&batch, 0));
    let address = held.chain().writable.as_ptr();
    let weak = Arc::downgrade(&memory);
    queue.set_memory(memory.without_region(page).unwrap()).unwrap();
    drop(memory);
    assert_eq!(queue.pop(&mut batch, 8), Ok(0));
    // Only the request holds the old table now; its memory can be written, at the same address.
    assert!(weak.upgrade().is_some());
    assert_eq!(copy_in(held.chain().writable, 0, &[9; 100]), 100);
    assert_eq!(held.chain().writable.as_ptr(), address);
    held.release();
    assert!(weak.upgrade().is_none());
    assert!(held.chain().writable.is_empty());
    // And new chains cannot reach it.
    driver.offer(&[], &[(page.guest_addr, 100)]);
    assert_eq!(queue.pop(&mut batch, 8), Ok(1));
    assert_eq!(batch.get(0).fault, Some(ChainFault::NotMapped));
    assert!(batch.get(0).writable.is_empty());
}

#[test]
fn rings_in_removed_memory_stop_the_queue() {
    let (driver, memory, _) = driver_and_page(Layout::Packed);
    let mut queue = Queue::new(memory.clone(), driver.setup()).unwrap();
    let without = memory.without_region(driver.region()).unwrap();
    assert!(matches!(queue.set_memory(without), Err(RingError::Memory { .. })));
}

#[test]
fn chain_buffers_refuse_what_does_not_fit() {
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let buffer = driver.buffer(b"x");
    driver.offer(&[buffer, buffer], &[buffer]);
    let mut batch = Batch::new(8, 64);
    assert_eq!(driver.queue().pop(&mut batch, 8), Ok(1));
    assert!(!ChainBuf::new(2).load(&batch, 0));
    assert!(ChainBuf::new(3).load(&batch, 0));
}

#[test]
fn abuse_P9_a_truncated_file_breaks_the_port_only() {
    for layout in [Layout::Split, Layout::Packed] {
        let options = ModelOptions { mem_bytes: 1 << 20, ..Default::default() };
        let mut driver = ModelDriver::with_options(layout, 8, options);
        let page = spec(GUEST_BASE + (1 << 30), 0x1000, 4 * PAGE);
        let fd = file(4 * PAGE);
        let memory = driver.memory().with_region(page, &fd).unwrap();
        let queue = Queue::new(memory.clone(), driver.setup()).unwrap();
        let mut vring = Vring::new(queue, driver.parts(0)).unwrap();
        let mut bystander = ModelDriver::new(layout, 8);
        let mut other = bystander.vring(0);
        let mut batch = Batch::new(8, 64);
        driver.offer(&[], &[(page.guest_addr, 4 * PAGE as u32)]);
        assert_eq!(vring.pop(&mut batch, 8), 1);
        rustix::fs::ftruncate(&fd, PAGE).unwrap();
        assert_eq!(memory.check_intact(), Ok(()));
        // The copy crosses the new end of the file: it must come back, and be noticed.
        assert_eq!(copy_in(batch.get(0).writable, 0, &[7; 4 * 4096]), 4 * 4096);
        let truncated = MemoryError::Truncated { addr: page.guest_addr, len: page.len_bytes };
        assert_eq!(memory.check_intact(), Err(truncated));
        assert!(driver.health().is_live());
        assert_eq!(vring.pop(&mut batch, 8), 0);
        assert!(!driver.health().is_live());
        assert!(driver.err_event().drain());
        let buffer = bystander.buffer(b"x");
        bystander.offer(&[buffer], &[]);
        assert_eq!(other.pop(&mut batch, 8), 1);
        assert!(bystander.health().is_live());
    }
}

#[test]
fn abuse_P9_the_ring_itself_is_truncated() {
    let fd = file(64 * PAGE);
    let region = spec(0, 0, 64 * PAGE);
    let memory = GuestMemory::empty().with_region(region, &fd).unwrap();
    let driver = ModelDriver::new(Layout::Split, 8);
    let mut setup = RingSetup { ..driver.setup() };
    setup.addrs = queue::RingAddrs { desc: 0, driver: PAGE, device: 2 * PAGE };
    let queue = Queue::new(memory, setup).unwrap();
    let mut vring = Vring::new(queue, driver.parts(0)).unwrap();
    rustix::fs::ftruncate(&fd, 0).unwrap();
    let mut batch = Batch::new(8, 64);
    assert_eq!(vring.pop(&mut batch, 8), 0);
    assert_eq!(vring.pop(&mut batch, 8), 0);
    assert!(driver.health().reason().is_some_and(|r| r.contains("truncated")));
}

/// The buffers of queue 0 are gone. Queue 1, which is polled next, meets it and is not to blame.
#[test]
fn abuse_V13_truncated_memory_is_named_and_not_the_queue_that_meets_it() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut rx = ModelDriver::new(layout, 8);
        let tx = ModelDriver::in_ram(rx.ram().clone(), layout, 8, ModelOptions::default());
        let fd = file(PAGE);
        let memory = rx.memory().with_region(spec(0, 0, PAGE), &fd).unwrap();
        let vring = |driver: &ModelDriver, index| {
            let queue = Queue::new(memory.clone(), driver.setup()).unwrap();
            let health = rx.health().clone();
            Vring::new(queue, VringParts { health, ..driver.parts(index) }).unwrap()
        };
        let (mut receive, mut send) = (vring(&rx, 0), vring(&tx, 1));
        let mut batch = Batch::new(8, 64);
        rx.offer(&[], &[(0, 64)]);
        assert_eq!(receive.pop(&mut batch, 8), 1);
        rustix::fs::ftruncate(&fd, 0).unwrap();
        assert_eq!(copy_in(batch.get(0).writable, 0, &[7; 64]), 64);
        for vring in [&mut send, &mut receive] {
            assert_eq!(vring.pop(&mut batch, 8), 0);
            let wanted = "guest memory: memory region 0x0+0x1000 was truncated by its owner";
            assert_eq!(rx.health().reason().as_deref(), Some(wanted), "{layout:?}");
        }
    }
}

/// Memory that is gone reads as zeroes: an index of 0 looks as if the driver had run ahead.
#[test]
fn abuse_V13_a_ring_whose_memory_was_truncated_is_called_that() {
    let fd = file(64 * PAGE);
    let memory = GuestMemory::empty().with_region(spec(0, 0, 64 * PAGE), &fd).unwrap();
    let driver = ModelDriver::new(Layout::Split, 8);
    let mut setup = driver.setup();
    setup.addrs = queue::RingAddrs { desc: 0, driver: PAGE, device: 2 * PAGE };
    let mut vring = Vring::new(Queue::new(memory, setup).unwrap(), driver.parts(1)).unwrap();
    // Descriptor 0 is a buffer of 64 bytes, and the available index is 1.
    let buffer = [&(8 * PAGE).to_le_bytes()[..], &64u32.to_le_bytes(), &[0; 4]].concat();
    rustix::io::pwrite(&fd, &buffer, 0).unwrap();
    rustix::io::pwrite(&fd, &1u16.to_le_bytes(), PAGE + 2).unwrap();
    let mut batch = Batch::new(8, 64);
    assert_eq!(vring.pop(&mut batch, 8), 1);
    vring.push(&[Completion { id: 0, ndesc: 1, written: 0 }]);
    rustix::fs::ftruncate(&fd, 0).unwrap();
    assert_eq!(vring.pop(&mut batch, 8), 0);
    let wanted = "guest memory: memory region 0x0+0x40000 was truncated by its owner";
    assert_eq!(driver.health().reason().as_deref(), Some(wanted));
    assert!(driver.err_event().drain());
}

fn shared(len: usize) -> (SharedMemory, OwnedFd) {
    let shm = SharedMemory::new("log", len).unwrap();
    let fd = shm.as_fd().try_clone_to_owned().unwrap();
    (shm, fd)
}

fn byte(shm: &SharedMemory, at: usize) -> u8 {
    assert!(at < shm.len_bytes());
    // SAFETY: inside the mapping; only this thread uses it.
    unsafe { shm.as_ptr().add(at).read_volatile() }
}

#[test]
fn abuse_P3_log_size_and_offset() {
    let (_shm, fd) = shared(2 * 4096);
    let log = |size, offset| {
        DirtyLog::new(&MemoryShare::new(), fd.try_clone().unwrap(), size, offset).err()
    };
    assert_eq!(log(4096, 4096), None);
    assert!(matches!(log(u64::MAX, 4096), Some(MemoryError::Wraps { .. })));
    assert!(matches!(log(4096, u64::MAX - 4095), Some(MemoryError::Wraps { .. })));
    for (size, offset) in [(0, 0), (MAX_LOG_BYTES + 1, 0), (4096, 8192), (8193, 0), (16, 1)] {
        assert!(matches!(log(size, offset), Some(MemoryError::Unmappable { .. })), "{size}");
    }
}

#[test]
fn abuse_P11_bits_beyond_the_log_are_ignored() {
    let (shm, fd) = shared(4096);
    // A log of 2 bytes tells of 16 pages.
    let log = DirtyLog::new(&MemoryShare::new(), fd, 2, 0).unwrap();
    log.mark(0, 1);
    log.mark(15 * LOG_PAGE_BYTES + 4095, 1);
    assert_eq!((byte(&shm, 0), byte(&shm, 1)), (0x01, 0x80));
    log.mark(3 * LOG_PAGE_BYTES - 1, 2);
    assert_eq!(byte(&shm, 0), 0x0d);
    log.mark(14 * LOG_PAGE_BYTES, u64::MAX);
    log.mark(16 * LOG_PAGE_BYTES, 1);
    log.mark(u64::MAX, 5);
    log.mark(0x8000_0000_0000, 1 << 40);
    assert_eq!(byte(&shm, 1), 0xc0);
    assert!((2..4096).all(|i| byte(&shm, i) == 0));
    log.mark(8 * LOG_PAGE_BYTES, 0);
    assert_eq!(byte(&shm, 1), 0xc0);
}

#[test]
fn writes_are_logged_while_a_migration_runs() {
    for layout in [Layout::Split, Layout::Packed] {
        let mut driver = ModelDriver::new(layout, 8);
        let pages = (GUEST_BASE + driver.region().len_bytes) / LOG_PAGE_BYTES;
        let (shm, fd) = shared((pages / 8 + 1) as usize);
        let dirty = |addr: u64| {
            let page = addr / LOG_PAGE_BYTES;
            byte(&shm, (page / 8) as usize) >> (page % 8) & 1 == 1
        };
        let log = Arc::new(DirtyLog::new(&MemoryShare::new(), fd, pages / 8 + 1, 0).unwrap());
        let device = driver.setup().addrs.device;
        let setup = RingSetup { log_used_addr: Some(device), ..driver.setup() };
        let mut queue = Queue::new(driver.memory(), setup).unwrap();
        let mut batch = Batch::new(8, 64);
        let reply = driver.ram().alloc_aligned(8 * 4096, 4096);
        let mut serve = |driver: &mut ModelDriver, queue: &mut Queue| {
            driver.offer(&[], &[(reply, 4096), (reply + 4096, 3 * 4096)]);
            assert_eq!(queue.pop(&mut batch, 8), Ok(1));
            let chain = batch.get(0);
            queue.mark_written(chain.writable, 2 * 4096 + 1);
            let (id, ndesc) = (chain.id, chain.ndesc);
            queue.push(&[queue::Completion { id, ndesc, written: 2 * 4096 + 1 }]);
        };
        let ring = if layout == Layout::Split { device } else { driver.setup().addrs.desc };
        serve(&mut driver, &mut queue);
        assert!(!dirty(reply) && !dirty(ring));
        queue.set_memory(driver.memory().with_log(Some(log))).unwrap();
        serve(&mut driver, &mut queue);
        let pages = [0, 1, 2, 3].map(|i| dirty(reply + i * 4096));
        assert_eq!(pages, [true, true, true, false]);
        assert!(dirty(ring));
        assert!(!dirty(driver.setup().addrs.driver));
        queue.enable_kicks();
        assert!(dirty(device));
        queue.set_memory(driver.memory().with_log(None)).unwrap();
    }
}

#[test]
fn abuse_P5_inflight_regions_of_wrong_size_are_refused() {
    for layout in [Layout::Split, Layout::Packed] {
        let good = InflightRegion::new(4, 8, layout).unwrap();
        let (fd, size, offset) = good.as_parts();
        let fd = fd.try_clone_to_owned().unwrap();
        let from = |size, offset, queues, entries| {
            let fd = fd.try_clone().unwrap();
            InflightRegion::from_fd(fd, size, offset, queues, entries, layout).err()
        };
        assert_eq!(from(size, offset, 4, 8), None);
        assert!(matches!(from(size, 0, 0, 8), Some(RingError::BadInflight(_))));
        assert!(matches!(from(size, 0, 5, 8), Some(RingError::BadInflight(_))));
        assert!(matches!(from(size, 0, MAX_QUEUES + 1, 8), Some(RingError::BadInflight(_))));
        assert!(matches!(from(size, 0, u16::MAX, 8), Some(RingError::BadInflight(_))));
        assert!(matches!(from(size, 0, 4, 0), Some(RingError::BadSize { .. })));
        let large = from(u64::MAX, 0, 4, MAX_QUEUE_SIZE + 1);
        assert!(matches!(large, Some(RingError::BadSize { .. })));
        // As many queues and descriptors as there may be, but not both.
        let huge = from(u64::MAX, 0, 5, MAX_QUEUE_SIZE);
        assert!(matches!(huge, Some(RingError::BadInflight(text)) if text.contains("131072")));
        assert!(InflightRegion::new(4, MAX_QUEUE_SIZE, layout).is_ok());
        assert!(matches!(from(u64::MAX, 0, 32, 1024), Some(RingError::Memory { .. })));
        assert!(matches!(from(size, 4096, 4, 8), Some(RingError::Memory { .. })));
        assert!(matches!(from(size, u64::MAX, 4, 8), Some(RingError::Memory { .. })));
        // A queue that is not in it, or does not fit.
        for (index, size) in [(4, 8), (0, 16)] {
            let driver = ModelDriver::new(layout, size);
            let mut parts = driver.parts(index);
            parts.inflight = Some(Arc::clone(&good));
            let result = Vring::new(driver.queue(), parts);
            assert!(matches!(result, Err(RingError::BadInflight(_))));
        }
    }
}

#[test]
fn copies_respect_offsets_and_lengths() {
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let parts = [driver.buffer(b"abc"), driver.buffer(b"defgh"), driver.buffer(b"i")];
    let room = [(driver.alloc(4), 4), (driver.alloc(4), 4)];
    driver.offer(&parts, &room);
    let mut batch = Batch::new(8, 64);
    assert_eq!(driver.queue().pop(&mut batch, 8), Ok(1));
    let (from, to) = (batch.get(0).readable, batch.get(0).writable);
    assert_eq!(total_len(from), 9);
    let mut bytes = [b'.'; 6];
    assert_eq!(copy_out(from, 2, &mut bytes), 6);
    assert_eq!(&bytes, b"cdefgh");
    assert_eq!(copy_out(from, 8, &mut bytes), 1);
    assert_eq!(copy_out(from, 9, &mut bytes), 0);
    assert_eq!(copy_out(from, usize::MAX, &mut bytes), 0);
    assert_eq!(copy_across(from, 1, to, 2, 100), 6);
    assert_eq!(driver.read(room[0].0, 4), b"\0\0bc");
    assert_eq!(driver.read(room[1].0, 4), b"defg");
    assert_eq!(copy_in(to, 7, b"xyz"), 1);
    assert_eq!(fill_zero(to, 3, 2), 2);
    assert_eq!(driver.read(room[0].0, 4), b"\0\0b\0");
    assert_eq!(driver.read(room[1].0, 4), b"\0efx");
    let mut iovecs = Vec::with_capacity(2);
    assert_eq!(subrange(from, 1, 100, &mut iovecs), 7);
    assert_eq!(iovecs.iter().map(|v| v.iov_len).collect::<Vec<_>>(), [2, 5]);
    iovecs.clear();
    assert_eq!(subrange(from, 4, 3, &mut iovecs), 3);
    assert_eq!(iovecs.len(), 1);
}

/// The limit of segments counts what buffers become where they cross memory regions: a thousand
/// descriptors fit even if each of them does.
#[test]
fn abuse_B2_a_thousand_buffers_that_each_cross_two_regions() {
    for layout in [Layout::Split, Layout::Packed] {
        let (mut driver, memory, page) = driver_and_page(layout);
        let mut queue = Queue::new(memory, driver.setup()).unwrap();
        let crossing = (page.guest_addr - 1, 2);
        for (count, fault) in [(1024, None), (1025, Some(ChainFault::TooManySegs))] {
            driver.offer_indirect(&vec![crossing; count], &[]);
            let mut batch = Batch::new(8, 64);
            assert_eq!(queue.pop(&mut batch, 8), Ok(1));
            let chain = batch.get(0);
            assert_eq!(chain.fault, fault, "{layout:?} {count}");
            assert_eq!(chain.readable.len(), fault.map_or(2 * count, |_| 1));
        }
    }
}
