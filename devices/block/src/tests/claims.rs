//! One daemon at a time on an inflight region, until the last request of the dead one has ended.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::clock::MonotonicClock;
use queue::Layout;
use queue::inflight::InflightRegion;
use queue::testing::ModelDriver;
use sidecore::{Sidecore, SidecoreConfig};
use vhost_user::Device;

use crate::backend::Backend;
use crate::claim::Claim;
use crate::raw::RawBackend;
use crate::{BackendConfig, BlockPort, BlockPortConfig};

const NOW: Duration = Duration::ZERO;
const LIMIT: Duration = Duration::from_secs(5);

fn region() -> Arc<InflightRegion> {
    InflightRegion::new(1, 64, Layout::Split).unwrap()
}

fn is_free(region: &InflightRegion) -> bool {
    match Claim::new(region.as_parts().0, NOW) {
        Ok(claim) => claim.is_some(),
        Err(e) => {
            assert_eq!(e.kind(), ErrorKind::WouldBlock);
            false
        }
    }
}

/// A read-only image on a disk file system: served through io_uring.
fn image() -> (tempfile::TempDir, std::path::PathBuf) {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk.img");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    (dir, path)
}

/// State after the kill of a process: its own descriptors are gone, the ring in the kernel is not.
#[test]
fn abuse_D3_a_claim_lives_as_long_as_the_ring() {
    let (_dir, path) = image();
    let backend = RawBackend::open(&path, false, true, 512).unwrap();
    let region = region();
    let mut disk = backend.open_queue(4).unwrap();
    let claim = Claim::new(region.as_parts().0, NOW).unwrap().unwrap();
    assert!(claim.is_on(region.as_parts().0));
    disk.keep_open(claim.file().as_fd()).unwrap();
    drop(claim);
    assert!(!is_free(&region), "the ring holds it");
    drop(disk);
    // The kernel takes the ring apart in the background.
    let begin = Instant::now();
    while !is_free(&region) {
        assert!(begin.elapsed() < LIMIT, "the ring is gone, the claim is not");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn abuse_D3_a_queue_starts_when_the_dead_daemons_requests_have_ended() {
    let (_dir, path) = image();
    let config = SidecoreConfig { yield_when_idle: true, ..SidecoreConfig::default() };
    let core = Sidecore::spawn(config, Arc::new(MonotonicClock)).unwrap();
    let backend = BackendConfig::Raw { path, direct: false, registered_memory_bytes: 0 };
    let config = BlockPortConfig { read_only: true, ..BlockPortConfig::new("vm/disk", backend) };
    let port = BlockPort::new(config, &[core], Arc::new(MonotonicClock)).unwrap();
    let region = region();
    let driver = ModelDriver::new(Layout::Split, 64);
    let vring = || {
        let mut parts = driver.parts(0);
        parts.inflight = Some(Arc::clone(&region));
        queue::Vring::new(driver.queue(), parts).unwrap()
    };
    let dead = Claim::new(region.as_parts().0, NOW).unwrap().unwrap();
    let begin = Instant::now();
    let ends = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        drop(dead);
    });
    port.start_queue(vring()).unwrap();
    assert!(begin.elapsed() >= Duration::from_millis(100));
    ends.join().unwrap();
    assert!(!is_free(&region));
    // The port's own queue stops and starts without waiting for its own ring.
    for _ in 0..3 {
        port.stop_queue(0).unwrap().unwrap();
        port.start_queue(vring()).unwrap();
    }
}
