//! Front ends that want all of the daemon's address space. A process of its own: the limit is one
//! for all ports.
#![allow(non_snake_case)]
// Helpers of tests may unwrap as the tests themselves do.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard};

use base::limits::{MAX_MAPPED_BYTES, MAX_MEMORY_BYTES};
use queue::memory::RegionSpec;
use queue::{GuestMemory, MemoryError, MemoryShare};

/// The limit of the process is one for all tests here.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

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
fn abuse_R10_memory_of_a_table_and_of_all_vms_is_limited() {
    let _alone = alone();
    let fd = sparse(MAX_MEMORY_BYTES + 4096);
    let vm = || GuestMemory::of(MemoryShare::with_limit(MAX_MEMORY_BYTES));
    // One table.
    let half = map(&vm(), 0, MAX_MEMORY_BYTES / 2, &fd).unwrap();
    let over = map(&half, MAX_MEMORY_BYTES, MAX_MEMORY_BYTES / 2 + 4096, &fd).unwrap_err();
    assert!(matches!(over, MemoryError::TooLarge { .. }), "{over}");
    assert!(over.to_string().contains(&format!("{MAX_MEMORY_BYTES:#x}")), "{over}");
    assert!(map(&vm(), 0, MAX_MEMORY_BYTES + 4096, &fd).is_err());
    drop(half);
    // All VMs.
    let vms = MAX_MAPPED_BYTES / MAX_MEMORY_BYTES;
    let mut tables: Vec<_> =
        (0..vms).map(|_| map(&vm(), 0, MAX_MEMORY_BYTES, &fd).unwrap()).collect();
    let text = map(&vm(), 0, 4096, &fd).unwrap_err().to_string();
    assert!(text.contains(&format!("limit of the daemon is {MAX_MAPPED_BYTES:#x}")), "{text}");
    // The address space goes on working for everybody else, and what is unmapped comes back.
    std::thread::spawn(|| vec![1u8; 1 << 20]).join().unwrap();
    tables.pop();
    map(&vm(), 0, 4096, &fd).unwrap();
}

/// Four ports of one VM, each with a sparse file of its own, as large as it likes.
#[test]
fn abuse_V1_a_vm_takes_no_memory_from_the_others() {
    let _alone = alone();
    let hostile = MemoryShare::new();
    assert!(hostile.limit_bytes() * 4 <= MAX_MAPPED_BYTES);
    let quarter = hostile.limit_bytes() / 4;
    let all: Vec<_> = (0..4)
        .map(|_| map(&GuestMemory::of(hostile.clone()), 0, quarter, &sparse(quarter)).unwrap())
        .collect();
    let fd = sparse(quarter);
    let text = map(&GuestMemory::of(hostile.clone()), 0, quarter, &fd).unwrap_err().to_string();
    assert!(text.contains("limit of one VM is"), "{text}");
    // Its neighbours have all that they need, each with several ports.
    let (fd, len) = (sparse(1 << 40), 1 << 40);
    let good: Vec<_> = (0..16).map(|_| MemoryShare::new()).collect();
    let ports: Vec<_> = good
        .iter()
        .flat_map(|vm| (0..4).map(|_| map(&GuestMemory::of(vm.clone()), 0, len, &fd).unwrap()))
        .collect();
    assert!(good.iter().all(|vm| vm.used_bytes() == len));
    drop((all, ports));
    assert_eq!(hostile.used_bytes() + good[0].used_bytes(), 0);
}

/// Ports of one VM share a mapping; who may not write to the file does not come in by that.
#[test]
fn the_ports_of_a_vm_map_a_file_once() {
    let vm = MemoryShare::new();
    let fd = sparse(1 << 20);
    let first = map(&GuestMemory::of(vm.clone()), 0, 1 << 20, &fd).unwrap();
    let second = map(&GuestMemory::of(vm.clone()), 0, 1 << 20, &fd).unwrap();
    assert!(first.shares_mappings(&second));
    let other = map(&GuestMemory::of(vm.clone()), 0, 1 << 20, &sparse(1 << 20)).unwrap();
    assert!(!first.shares_mappings(&other));
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
    let reader: OwnedFd = std::fs::File::open(path).unwrap().into();
    let text = map(&GuestMemory::of(vm.clone()), 0, 1 << 20, &reader).unwrap_err().to_string();
    assert!(text.contains("not open for reading and writing"), "{text}");
    drop(first);
    assert_eq!(vm.used_bytes(), 2 << 20);
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    assert!(map(&GuestMemory::of(vm.clone()), 0, 1 << 20, &fd).is_err());
}

#[test]
fn abuse_V14_a_device_is_no_memory() {
    let zero: OwnedFd = File::options().read(true).write(true).open("/dev/zero").unwrap().into();
    let text = map(&GuestMemory::empty(), 0, 4096, &zero).unwrap_err().to_string();
    assert!(text.contains("CharacterDevice is not memory"), "{text}");
}

/// A file that the kernel keeps, and one that its size would betray.
#[test]
fn abuse_P9_a_file_of_a_foreign_file_system_is_no_memory() {
    let proc: OwnedFd = std::fs::File::open("/proc/self/status").unwrap().into();
    let text = map(&GuestMemory::empty(), 0, 4096, &proc).unwrap_err().to_string();
    assert!(text.contains("proc") && text.contains("allowed are"), "{text}");
}
