//! Memory disks and drivers that outlive a daemon.

use std::sync::Arc;

use queue::Vring;
use vhost_user::{Device, DeviceError};

use super::port::{Guest, cores};
use crate::memory::MemoryBackend;
use crate::request::kind;
use crate::testing::{BOTH, pattern};
use crate::{BackendConfig, BlockPort, BlockPortConfig};

const LEN: u64 = 1 << 20;

fn port(memory: MemoryBackend) -> Arc<BlockPort> {
    let config = BlockPortConfig::new("vm/disk", BackendConfig::Memory { len_bytes: LEN });
    let port = BlockPort::with_backend(config, Arc::new(memory), &cores(1, 0)).unwrap();
    port.activate(port.features()).unwrap();
    port
}

fn empty() -> Arc<BlockPort> {
    port(MemoryBackend::new(LEN).unwrap())
}

/// A guest that wrote its first sector, its ring where it stands then, and the disk's file.
fn used(layout: queue::Layout) -> (Guest, Vring, std::os::fd::OwnedFd) {
    let memory = MemoryBackend::new(LEN).unwrap();
    let file = memory.file().try_clone_to_owned().unwrap();
    let port = port(memory);
    let mut guest = Guest::new(layout);
    port.start_queue(guest.driver.vring(0)).unwrap();
    assert_eq!(guest.request(kind::OUT, 0, &pattern(1, 512), 0).0, 0);
    let vring = port.stop_queue(0).unwrap().unwrap();
    (guest, vring, file)
}

#[test]
fn a_driver_goes_on_with_the_memory_that_was_kept() {
    for layout in BOTH {
        let (mut guest, vring, file) = used(layout);
        let port = port(MemoryBackend::from_file(file, LEN).unwrap());
        port.start_queue(vring).unwrap();
        assert_eq!(guest.request(kind::IN, 0, &[], 512), (0, pattern(1, 512)));
    }
}

#[test]
fn a_driver_whose_bytes_are_lost_is_refused_until_it_begins_anew() {
    for layout in BOTH {
        let (_guest, vring, _) = used(layout);
        let port = empty();
        let refused = port.start_queue(vring);
        assert!(
            matches!(&refused, Err(DeviceError::Failed(why)) if why.contains("are lost")),
            "{refused:?}"
        );
        // A driver that begins anew is served, also when it goes on later.
        let mut guest = Guest::new(layout);
        port.start_queue(guest.driver.vring(0)).unwrap();
        assert_eq!(guest.request(kind::IN, 0, &[], 512), (0, vec![0; 512]));
        let vring = port.stop_queue(0).unwrap().unwrap();
        port.reset();
        port.activate(port.features()).unwrap();
        port.start_queue(vring).unwrap();
        assert_eq!(guest.request(kind::OUT, 0, &pattern(2, 512), 0).0, 0);
    }
}
