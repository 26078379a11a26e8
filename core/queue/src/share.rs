//! A VM's share of the daemon's address space, and what its ports map of it.
//!
//! Each port of a VM is sent the same memory. It is mapped once: the ports of a VM have a
//! [`MemoryShare`] in common, which knows parts of files that are mapped already. A sparse file
//! costs its owner nothing, but our address space is everybody's, and so are the guards of
//! mappings, so each has two limits: one for each VM, and one for the process, which many VMs
//! together reach and one cannot.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Weak};

use base::limits::{MAX_MEMORY_BYTES, MIN_VM_MAPPED_BYTES};
use base::sync::lock;

use crate::budget::{Purpose, VmBudget};
use crate::huge_pages;
use crate::mapping::Mapping;

/// Part of a file: device, inode, offset and length in bytes, and its purpose.
type Part = (u64, u64, u64, u64, Purpose);

/// A VM's share of the daemon's address space, common to all ports of the VM.
pub struct MemoryShare {
    budget: VmBudget,
    mapped: Mutex<Vec<(Part, Weak<Mapping>)>>,
}

impl MemoryShare {
    /// A share for one VM: twice this host's memory, at least 1 TiB and at most 16 TiB.
    pub fn new() -> Arc<Self> {
        let info = rustix::system::sysinfo();
        let host_bytes = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit));
        let twice = host_bytes.saturating_mul(2);
        Self::with_limit(twice.clamp(MIN_VM_MAPPED_BYTES, MAX_MEMORY_BYTES))
    }

    /// A share of `limit_bytes`.
    pub fn with_limit(limit_bytes: u64) -> Arc<Self> {
        let budget = VmBudget::new(limit_bytes);
        Arc::new(Self { budget, mapped: Mutex::default() })
    }

    /// Bytes that the VM's ports map now. Memory that several of them map counts once.
    pub fn used_bytes(&self) -> u64 {
        self.budget.used_bytes()
    }

    /// Bytes of those that were put into huge pages (see [`huge_pages`]).
    pub fn huge_bytes(&self) -> u64 {
        let mapped = lock(&self.mapped);
        mapped.iter().filter_map(|(_, m)| m.upgrade()).map(|m| m.huge_bytes()).sum()
    }

    /// Number of mappings of the VM's ports now, of [`base::limits::MAX_VM_MAPPINGS`].
    pub fn used_mappings(&self) -> u64 {
        self.budget.used_mappings()
    }

    /// Most bytes that the VM's ports may map.
    pub fn limit_bytes(&self) -> u64 {
        self.budget.limit_bytes()
    }

    /// Maps `offset..offset + len` of a file, or finds it mapped. The error is a text that says why
    /// not.
    pub(crate) fn map(
        &self,
        purpose: Purpose,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
    ) -> Result<Arc<Mapping>, String> {
        // First: this check asks no file system that may wait.
        Mapping::check(fd, offset, len)?;
        let stat = rustix::fs::fstat(fd).map_err(|e| format!("fstat: {e}"))?;
        let part = (stat.st_dev as u64, stat.st_ino as u64, offset, len, purpose);
        // Under the lock: two ports that are sent the same file at once must not map it twice. A
        // mapping keeps its file, so no other one has this inode meanwhile.
        let mut mapped = lock(&self.mapped);
        mapped.retain(|(_, mapping)| mapping.strong_count() > 0);
        let found = mapped.iter().filter(|(other, _)| *other == part);
        let mut found = found.filter_map(|(_, mapping)| mapping.upgrade());
        // One that was truncated faults no more, whatever the file has become.
        if let Some(mapping) = found.find(|mapping| !mapping.was_truncated()) {
            return Ok(mapping);
        }
        let mapping = Arc::new(Mapping::new(fd, offset, len, Some((&self.budget, purpose)))?);
        mapped.push((part, Arc::downgrade(&mapping)));
        if purpose == Purpose::Memory {
            huge_pages::watch(&mapping);
        }
        Ok(mapping)
    }
}

impl fmt::Debug for MemoryShare {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryShare").field("budget", &self.budget).finish_non_exhaustive()
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::os::fd::AsFd;

    use base::limits::MAX_VM_MAPPINGS;
    use base::shm::SharedMemory;

    use super::*;

    /// A move needs a log of memory that is all that the VM may have.
    #[test]
    fn abuse_V1_a_dirty_log_is_none_of_the_bytes_of_a_vm() {
        let file = SharedMemory::new("share", 2 * 4096).unwrap();
        let vm = MemoryShare::with_limit(4096);
        let map = |purpose, offset| vm.map(purpose, file.as_fd(), offset, 4096);
        let _memory = map(Purpose::Memory, 0).unwrap();
        let log = map(Purpose::Log, 4096).unwrap();
        assert!(Arc::ptr_eq(&log, &map(Purpose::Log, 4096).unwrap()));
        assert_eq!((vm.used_bytes(), vm.used_mappings()), (4096, 2));
        // Not a way to have more.
        assert!(map(Purpose::Memory, 4096).is_err());
    }

    /// Guards of mappings are the process's: tables that requests in flight keep must not take all.
    #[test]
    fn abuse_V1_a_vm_has_so_many_mappings_and_others_have_theirs() {
        let file = SharedMemory::new("share", 4096 * (MAX_VM_MAPPINGS as usize + 1)).unwrap();
        let (vm, other) = (MemoryShare::new(), MemoryShare::with_limit(4096));
        let map = |share: &MemoryShare, page: u64| {
            share.map(Purpose::Memory, file.as_fd(), page * 4096, 4096)
        };
        let mut held: Vec<_> = (0..MAX_VM_MAPPINGS).map(|page| map(&vm, page).unwrap()).collect();
        let text = map(&vm, MAX_VM_MAPPINGS).unwrap_err();
        assert!(text.contains("more than 512; that is the limit of one VM"), "{text}");
        assert!(map(&vm, 7).is_ok(), "that is mapped already");
        let _others = map(&other, 0).unwrap();
        let text = map(&other, 1).unwrap_err();
        assert!(text.contains("0x1000 bytes more than the 0x1000"), "{text}");
        assert!(text.contains("the limit of one VM is 0x1000"), "{text}");
        assert_eq!(vm.used_mappings(), MAX_VM_MAPPINGS);
        held.pop();
        map(&vm, MAX_VM_MAPPINGS).unwrap();
    }
}
