//! Front ends that want all of the daemon's address space. A process of its own: the limit is one for
//! all ports.
#![allow(non_snake_case)]
// Helpers of tests may unwrap as the tests themselves do.
#![allow(clippy::unwrap_used)]

use std::os::fd::OwnedFd;
use std::sync::Arc;

use base::limits::{MAX_MAPPED_BYTES, MAX_MEMORY_BYTES};
use queue::memory::RegionSpec;
use queue::{GuestMemory, MemoryError};

/// A sparse file: it costs its owner nothing.
fn sparse(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    fd
}

fn map(
    table: &GuestMemory,
    at: u64,
    len: u64,
    fd: &OwnedFd,
) -> Result<Arc<GuestMemory>, MemoryError> {
    table.with_region(
        RegionSpec { guest_addr: at, user_addr: at, len_bytes: len, mmap_offset: 0 },
        fd,
    )
}

#[test]
fn abuse_R10_memory_of_a_port_and_of_all_ports_is_limited() {
    let fd = sparse(MAX_MEMORY_BYTES + 4096);
    let none = GuestMemory::empty();
    // One port.
    let half = map(&none, 0, MAX_MEMORY_BYTES / 2, &fd).unwrap();
    let over = map(&half, MAX_MEMORY_BYTES, MAX_MEMORY_BYTES / 2 + 4096, &fd).unwrap_err();
    assert!(matches!(over, MemoryError::TooLarge { .. }), "{over}");
    assert!(over.to_string().contains(&format!("{MAX_MEMORY_BYTES:#x}")), "{over}");
    assert!(map(&none, 0, MAX_MEMORY_BYTES + 4096, &fd).is_err());
    drop(half);
    // All ports.
    let ports = MAX_MAPPED_BYTES / MAX_MEMORY_BYTES;
    let mut tables: Vec<_> =
        (0..ports).map(|_| map(&none, 0, MAX_MEMORY_BYTES, &fd).unwrap()).collect();
    let text = map(&none, 0, 4096, &fd).unwrap_err().to_string();
    assert!(text.contains(&format!("limit of the daemon is {MAX_MAPPED_BYTES:#x}")), "{text}");
    // The address space goes on working for everybody else, and what is unmapped comes back.
    std::thread::spawn(|| vec![1u8; 1 << 20]).join().unwrap();
    tables.pop();
    map(&none, 0, 4096, &fd).unwrap();
}

/// A file that the kernel keeps, and one that its size would betray.
#[test]
fn abuse_P9_a_file_of_a_foreign_file_system_is_no_memory() {
    let proc: OwnedFd = std::fs::File::open("/proc/self/status").unwrap().into();
    let text = map(&GuestMemory::empty(), 0, 4096, &proc).unwrap_err().to_string();
    assert!(text.contains("proc") && text.contains("allowed are"), "{text}");
}
