//! Inflight regions and logs that their owner spoils while they are used.
#![allow(non_snake_case)]
// Helpers of tests may unwrap as the tests themselves do.
#![allow(clippy::unwrap_used)]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use queue::dirty::DirtyLog;
use queue::inflight::InflightRegion;
use queue::testing::{GUEST_BASE, ModelDriver};
use queue::{Batch, Completion, Layout, MemoryShare, Vring};

const LAYOUTS: [Layout; 2] = [Layout::Split, Layout::Packed];

/// A file that can be truncated.
fn file(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("kept", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    fd
}

fn with_region(driver: &ModelDriver, region: &Arc<InflightRegion>) -> Vring {
    let mut parts = driver.parts(0);
    parts.inflight = Some(Arc::clone(region));
    Vring::new(driver.queue(), parts).unwrap()
}

fn offer(driver: &mut ModelDriver) -> u16 {
    let buffer = driver.buffer(b"x");
    driver.offer(&[buffer], &[])
}

fn ids(batch: &Batch) -> Vec<u16> {
    (0..batch.len()).map(|i| batch.get(i).id).collect()
}

#[test]
fn abuse_P9_a_truncated_inflight_region_breaks_the_port_only() {
    for layout in LAYOUTS {
        let fd = file(1 << 16);
        let twin = fd.try_clone().unwrap();
        let region = InflightRegion::from_fd(twin, 1 << 16, 0, 1, 8, layout).unwrap();
        let mut driver = ModelDriver::new(layout, 8);
        let mut vring = with_region(&driver, &region);
        let mut batch = Batch::new(8, 8);
        let id = offer(&mut driver);
        assert_eq!(vring.pop(&mut batch, 8), 1);
        rustix::fs::ftruncate(&fd, 0).unwrap();
        // The notes of this completion go nowhere; the completion itself arrives.
        vring.push(&[Completion { id, ndesc: 1, written: 0 }]);
        assert_eq!(driver.used(), Some((id, 0)));
        offer(&mut driver);
        assert_eq!(vring.pop(&mut batch, 8), 0);
        let reason = driver.health().reason().unwrap();
        assert!(reason.contains("inflight region: truncated by its owner"), "{reason}");
        assert!(driver.err_event().drain());
    }
}

#[test]
fn abuse_P9_a_truncated_dirty_log_breaks_the_port_only() {
    for layout in LAYOUTS {
        let mut driver = ModelDriver::new(layout, 8);
        let len = (GUEST_BASE + driver.region().len_bytes) / 4096 / 8 + 1;
        let fd = file(len);
        let log =
            Arc::new(DirtyLog::new(&MemoryShare::new(), fd.try_clone().unwrap(), len, 0).unwrap());
        let mut vring = driver.vring(0);
        vring.queue.set_memory(driver.memory().with_log(Some(log))).unwrap();
        let mut batch = Batch::new(8, 8);
        let room = (driver.alloc(64), 64);
        let id = driver.offer(&[], &[room]);
        assert_eq!(vring.pop(&mut batch, 8), 1);
        rustix::fs::ftruncate(&fd, 0).unwrap();
        vring.queue.mark_written(batch.get(0).writable, 64);
        vring.push(&[Completion { id, ndesc: 1, written: 64 }]);
        assert_eq!(driver.used(), Some((id, 64)));
        offer(&mut driver);
        assert_eq!(vring.pop(&mut batch, 8), 0);
        // Not "memory region": that is another file of the VMM's (V13).
        let wanted = "guest memory: the dirty log was truncated by its owner";
        assert_eq!(driver.health().reason().as_deref(), Some(wanted));
        assert!(driver.err_event().drain());
    }
}

/// The guest was reset with requests in flight: its new rings begin at 0, and nobody waits for what
/// the region tells of.
#[test]
fn abuse_P5_a_region_of_an_earlier_boot_is_ignored() {
    let region = InflightRegion::new(1, 8, Layout::Split).unwrap();
    let mut batch = Batch::new(8, 8);
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let mut vring = with_region(&driver, &region);
    for _ in 0..3 {
        offer(&mut driver);
    }
    assert_eq!(vring.pop(&mut batch, 8), 3);
    drop(vring);

    let mut driver = ModelDriver::new(Layout::Split, 8);
    let mut vring = with_region(&driver, &region);
    assert_eq!(vring.pop(&mut batch, 8), 0, "nothing was offered in this boot");
    let id = offer(&mut driver);
    assert_eq!(vring.pop(&mut batch, 8), 1);
    assert_eq!(ids(&batch), [id]);
    assert!(driver.health().is_live(), "{:?}", driver.health().reason());
    vring.push(&[Completion { id, ndesc: 1, written: 0 }]);
    assert_eq!(driver.used(), Some((id, 0)));
    drop(vring);
    // What was in flight in the earlier boot is not in the region any more.
    let mut vring = with_region(&driver, &region);
    assert_eq!(vring.pop(&mut batch, 8), 0);
}

/// A chain that the device still has, offered again: two requests would share one entry.
#[test]
fn abuse_P5_a_chain_offered_twice_breaks_the_port() {
    let region = InflightRegion::new(1, 8, Layout::Split).unwrap();
    let mut batch = Batch::new(8, 8);
    let mut driver = ModelDriver::new(Layout::Split, 8);
    let mut vring = with_region(&driver, &region);
    let id = offer(&mut driver);
    assert_eq!(vring.pop(&mut batch, 8), 1);
    driver.set_avail_entry(1, id);
    driver.set_avail_idx(2);
    assert_eq!(vring.pop(&mut batch, 8), 0);
    assert!(batch.is_empty());
    let reason = driver.health().reason().unwrap();
    assert!(reason.contains("in flight already"), "{reason}");
    assert!(driver.err_event().drain());
}
