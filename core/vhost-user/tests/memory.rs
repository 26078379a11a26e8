//! Memory while rings run: slots, whole tables, the dirty log.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::os::fd::{AsFd, OwnedFd};

use base::shm::SharedMemory;
use queue::Layout;
use queue::testing::ModelDriver;
use vhost_user::DeviceKind;
use vhost_user::codec::{self, Region, Request, VRING_F_LOG, feature};
use vhost_user::testing::*;
use zerocopy::IntoBytes;

fn round(device: &FakeDevice, driver: &mut ModelDriver) {
    let id = driver.offer(&[], &[(driver.alloc(64), 64)]);
    assert_eq!(device.serve(0, 8), 1);
    assert_eq!(driver.used(), Some((id, 64)));
}

#[test]
fn slots_come_and_go_while_a_ring_runs() {
    let (device, server, front) = simple(DeviceKind::Net);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    front.hello(BASIC);
    front.ok(Request::AddMemReg, &single(region(&driver)), &[driver.fd().as_fd()]);
    front.start_ring(0, &driver, 0);
    round(&device, &mut driver);

    front.ok(Request::AddMemReg, &single(LOW), &[memfd(1 << 20).as_fd()]);
    device.wait_for(&Call::Memory(2));
    round(&device, &mut driver);
    assert_eq!(server.status().memory_regions.len(), 2);

    // "The mmap offset is ignored", and one descriptor is tolerated.
    let low = Region { mmap_offset: 4096, ..LOW };
    front.ok(Request::RemMemReg, &single(low), &[memfd(0).as_fd()]);
    device.wait_for(&Call::Memory(1));
    round(&device, &mut driver);
    assert!(!device.calls().contains(&Call::Stop(0)));
}

#[test]
fn a_ring_whose_region_goes_stops_and_comes_back_with_it() {
    let (device, _server, front) = simple(DeviceKind::Net);
    let mut driver = ModelDriver::new(Layout::Packed, 8);
    front.start(BASIC | feature::RING_PACKED, &driver);
    for _ in 0..11 {
        round(&device, &mut driver);
    }
    front.ok(Request::RemMemReg, &single(region(&driver)), &[]);
    assert_eq!(device.running(), [] as [u16; 0]);
    front.ok(Request::AddMemReg, &single(region(&driver)), &[driver.fd().as_fd()]);
    assert_eq!(device.running(), [0]);
    for _ in 0..11 {
        round(&device, &mut driver);
    }
}

#[test]
fn a_refused_slot_changes_nothing() {
    let (device, server, front) = simple(DeviceKind::Net);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    device.forget_calls();
    let small = memfd(4096);
    let bad = [
        // Larger than its file.
        LOW,
        Region { mmap_offset: 5, len_bytes: 64, ..LOW }, // not at a page
        Region { len_bytes: 0, ..LOW },                  // empty
        Region { guest_addr: u64::MAX - 4095, len_bytes: 8192, ..LOW }, // wraps
        Region { guest_addr: driver.region().guest_addr, len_bytes: 4096, ..LOW }, // overlaps
        Region { user_addr: driver.region().user_addr, len_bytes: 4096, ..LOW },
    ];
    for region in bad {
        let ack = front.ack(Request::AddMemReg, &single(region), &[small.as_fd()]);
        assert_eq!(ack, Some(1), "{region:?}");
    }
    assert_eq!(front.ack(Request::RemMemReg, &single(LOW), &[]), Some(1));
    assert_eq!(device.calls(), []);
    assert_eq!(server.status().memory_regions.len(), 1);
    round(&device, &mut driver);
}

/// QEMU 7.2 tells a back end of every region once per queue pair.
#[test]
fn a_card_with_several_queue_pairs_hears_of_a_region_more_than_once() {
    let device = FakeDevice::new(DeviceKind::Net, 8);
    let (server, front) = connected(&device);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    for _ in 0..3 {
        front.ok(Request::AddMemReg, &single(region(&driver)), &[driver.fd().as_fd()]);
    }
    assert_eq!(server.status().memory_regions.len(), 1);
    round(&device, &mut driver);
    for _ in 0..4 {
        front.ok(Request::RemMemReg, &single(region(&driver)), &[]);
    }
    assert_eq!(server.status().memory_regions.len(), 0);
    // Another region at the same place is still an error.
    front.ok(Request::AddMemReg, &single(region(&driver)), &[driver.fd().as_fd()]);
    let other = Region { len_bytes: 4096, ..region(&driver) };
    assert_eq!(front.ack(Request::AddMemReg, &single(other), &[driver.fd().as_fd()]), Some(1));
}

#[test]
fn as_many_slots_as_announced_and_not_one_more() {
    let (_device, _server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    let slots = front.get_u64(Request::GetMaxMemSlots);
    let file = memfd(4096);
    for i in 0..=slots {
        let at = i * 8192;
        let region =
            Region { guest_addr: at, user_addr: 0x1000_0000 + at, len_bytes: 4096, mmap_offset: 0 };
        let ack = front.ack(Request::AddMemReg, &single(region), &[file.as_fd()]);
        assert_eq!(ack, Some(u64::from(i == slots)), "slot {i}");
    }
}

#[test]
fn a_whole_table_is_replaced_under_a_running_ring() {
    let (device, _server, front) = simple(DeviceKind::Net);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    round(&device, &mut driver);
    let (fd, low) = (driver.fd(), memfd(1 << 20));
    let regions = table(&[LOW, region(&driver)]);
    front.ok(Request::SetMemTable, &regions, &[low.as_fd(), fd.as_fd()]);
    device.wait_for(&Call::Memory(2));
    assert!(!device.calls().contains(&Call::Stop(0)), "the ring did not move");
    round(&device, &mut driver);

    // The same user addresses, at another guest address: the ring is resolved again.
    let moved = Region { guest_addr: 0x2_0000_0000, ..region(&driver) };
    front.ok(Request::SetMemTable, &table(&[moved]), &[fd.as_fd()]);
    assert!(device.calls().contains(&Call::Stop(0)));
    device.with_vring(0, |v| assert!(v.queue.setup().addrs.desc >= 0x2_0000_0000));

    // And a table without it: nothing runs, nothing breaks, until it is back.
    front.ok(Request::SetMemTable, &table(&[LOW]), &[low.as_fd()]);
    assert_eq!(device.running(), [] as [u16; 0]);
    front.set_memory(&driver);
    round(&device, &mut driver);
}

fn pages(log: &SharedMemory) -> Vec<usize> {
    // SAFETY: the mapping has this many bytes, and nobody writes while the test looks.
    let bytes = unsafe { std::slice::from_raw_parts(log.as_ptr(), log.len_bytes()) };
    (0..bytes.len() * 8).filter(|&page| bytes[page / 8] & 1 << (page % 8) != 0).collect()
}

fn log_file(len: usize) -> (SharedMemory, OwnedFd) {
    let log = SharedMemory::new("log", len).unwrap();
    let fd = log.as_fd().try_clone_to_owned().unwrap();
    (log, fd)
}

fn set_log(front: &FrontEnd, fd: &OwnedFd, size: u64) {
    let body = codec::Log { size, offset: 0 };
    front.send(Request::SetLogBase, body.as_bytes(), &[fd.as_fd()]);
    // QEMU and Cloud Hypervisor wait for this reply without having asked; the second reads it.
    let reply = front.reply();
    assert_eq!(reply.header.request, Request::SetLogBase as u32);
    assert_eq!(reply.body, body.as_bytes());
}

/// Marks what was written into the guest and completes it then, as an engine does. Gives the page.
fn written_round(device: &FakeDevice, driver: &mut ModelDriver) -> usize {
    let target = driver.alloc(4096);
    let id = driver.offer(&[], &[(target, 64)]);
    device.with_vring(0, |v| {
        let mut batch = queue::Batch::new(1, 1);
        assert_eq!(v.pop(&mut batch, 1), 1);
        v.queue.mark_written(batch.get(0).writable, 64);
        v.push(&[queue::Completion { id, ndesc: 1, written: 64 }]);
    });
    assert_eq!(driver.used(), Some((id, 64)));
    (target / 4096) as usize
}

/// On, off, on again, with another log, all while the ring runs; nothing beyond the log's end.
#[test]
fn abuse_P11_logging_goes_on_and_off_while_a_ring_runs() {
    let (device, server, front) = simple(DeviceKind::Net);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    let used_page = 3; // Where the front end wants the used ring's writes logged.
    let plain = addr(0, &driver);
    let logged = codec::VringAddr { flags: VRING_F_LOG, log: used_page as u64 * 4096, ..plain };
    let first_page = (driver.region().guest_addr / 4096) as usize;
    let (log, fd) = log_file(first_page / 8 + 4096);
    set_log(&front, &fd, log.len_bytes() as u64);
    written_round(&device, &mut driver);
    assert!(pages(&log).is_empty(), "logged before it was asked for");

    let all = (BASIC | feature::LOG_ALL).to_ne_bytes();
    front.ok(Request::SetFeatures, &all, &[]);
    let data = written_round(&device, &mut driver);
    assert_eq!(pages(&log), [data], "the used ring is not to be logged yet");
    front.ok(Request::SetVringAddr, logged.as_bytes(), &[]);
    assert!(server.status().logging);
    let more = written_round(&device, &mut driver);
    assert_eq!(pages(&log), [used_page, data, more]);

    front.ok(Request::SetFeatures, &BASIC.to_ne_bytes(), &[]);
    front.ok(Request::SetVringAddr, plain.as_bytes(), &[]);
    assert!(!server.status().logging);
    set_log(&front, &fd, log.len_bytes() as u64);
    let before = pages(&log);
    written_round(&device, &mut driver);
    assert_eq!(pages(&log), before);
    front.ok(Request::SetFeatures, &all, &[]);
    let again = written_round(&device, &mut driver);
    assert!(pages(&log).contains(&again));
}

/// The VMM truncates a memory file after we mapped it: the port breaks, the daemon lives.
#[test]
fn abuse_P9_memory_that_shrinks() {
    let (device, server, front) = simple(DeviceKind::Net);
    let file = memfd(1 << 20);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.hello(BASIC);
    front.ok(Request::AddMemReg, &single(LOW), &[file.as_fd()]);
    let addr = codec::VringAddr {
        index: 0,
        flags: 0,
        desc: LOW.user_addr,
        avail: LOW.user_addr + 4096,
        used: LOW.user_addr + 8192,
        log: 0,
    };
    front.state(Request::SetVringNum, 0, 16);
    front.ok(Request::SetVringAddr, addr.as_bytes(), &[]);
    front.set_doorbells(0, &driver);
    front.state(Request::SetVringEnable, 0, 1);
    rustix::fs::ftruncate(&file, 0).unwrap();
    for _ in 0..2 {
        assert_eq!(device.serve(0, 8), 0);
    }
    assert!(server.status().broken.unwrap().contains("truncated"));
    assert!(driver.err_event().drain());
    assert_eq!(
        front.get_u64(Request::GetStatus),
        0x40,
        "the session lives, the device needs a reset"
    );
}
