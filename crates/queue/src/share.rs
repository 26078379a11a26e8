//! A VM's share of the daemon's address space, and what its ports map of it.
//!
//! Each port of a VM is sent the same memory. It is mapped once: the ports of a VM have a
//! [`MemoryShare`] in common, which knows parts of files that are mapped already. A sparse file costs
//! its owner nothing, but our address space is everybody's, and so are the guards of mappings, so each has
//! two limits: one for each VM, and one for the process, which many VMs together reach and one cannot.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use base::limits::{MAX_MAPPED_BYTES, MAX_MEMORY_BYTES, MAX_VM_MAPPINGS, MIN_VM_MAPPED_BYTES};

use crate::mapping::Mapping;

/// What is in use of something, against a limit.
#[derive(Debug)]
struct Budget {
    used: AtomicU64,
    limit: u64,
}

/// Address space for the whole process.
static PROCESS: LazyLock<Arc<Budget>> = LazyLock::new(|| Budget::new(MAX_MAPPED_BYTES));

impl Budget {
    fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { used: AtomicU64::new(0), limit })
    }

    fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes so much of it; the error is what is used.
    fn take(self: &Arc<Self>, amount: u64) -> Result<Taken, u64> {
        let more = |used: u64| used.checked_add(amount).filter(|&sum| sum <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)?;
        Ok(Taken { budget: Arc::clone(self), amount })
    }
}

/// A part of a budget; given back when dropped.
#[derive(Debug)]
struct Taken {
    budget: Arc<Budget>,
    amount: u64,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.amount, Ordering::Relaxed);
    }
}

/// What one VM may map.
#[derive(Debug)]
pub(crate) struct VmBudget {
    bytes: Arc<Budget>,
    mappings: Arc<Budget>,
}

/// What a mapping is to its VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Counts {
    /// Its bytes are of those that it may have.
    Memory,
    /// A dirty log: a limit that is what the VM has must not end its move.
    Log,
}

/// What a mapping has of the budgets that it counts for.
#[derive(Debug)]
pub(crate) struct Charge {
    _process: Taken,
    _vm: Option<(Taken, Taken)>,
}

impl Charge {
    /// Charges the process, and the VM where one is given. The error is a text that says which limit
    /// stands in the way.
    pub fn take(len_bytes: u64, vm: Option<(&VmBudget, Counts)>) -> Result<Self, String> {
        let take_bytes = |budget: &Arc<Budget>, len_bytes: u64, owner: &str| {
            budget.take(len_bytes).map_err(|used| {
                format!(
                    "{len_bytes:#x} bytes more than the {used:#x} that are mapped now; the limit of \
                     {owner} is {:#x}",
                    budget.limit
                )
            })
        };
        let take_vm = |(vm, counts): (&VmBudget, Counts)| {
            let mapping = vm.mappings.take(1).map_err(|used| {
                format!("one mapping more than {used}; that is the limit of one VM")
            })?;
            let memory_bytes = if counts == Counts::Memory { len_bytes } else { 0 };
            Ok::<_, String>((take_bytes(&vm.bytes, memory_bytes, "one VM")?, mapping))
        };
        let _vm = vm.map(take_vm).transpose()?;
        Ok(Self { _process: take_bytes(&PROCESS, len_bytes, "the daemon")?, _vm })
    }
}

/// A part of a file: device, inode, offset and length in bytes, and what it is.
type Part = (u64, u64, u64, u64, Counts);

/// See the module's text. Ports of one VM have one in common.
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
        let mappings = Budget::new(MAX_VM_MAPPINGS);
        let budget = VmBudget { bytes: Budget::new(limit_bytes), mappings };
        Arc::new(Self { budget, mapped: Mutex::default() })
    }

    /// Bytes that the VM's ports map now. What several of them map counts once.
    pub fn used_bytes(&self) -> u64 {
        self.budget.bytes.used()
    }

    /// Mappings of the VM's ports now, of [`MAX_VM_MAPPINGS`].
    pub fn used_mappings(&self) -> u64 {
        self.budget.mappings.used()
    }

    /// Most bytes that the VM's ports may map.
    pub fn limit_bytes(&self) -> u64 {
        self.budget.bytes.limit
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Part, Weak<Mapping>)>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps `offset..offset + len` of a file, or finds it mapped. The error is a text that says why
    /// not.
    pub(crate) fn map(
        &self,
        counts: Counts,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
    ) -> Result<Arc<Mapping>, String> {
        // First: it asks no file system that may wait.
        Mapping::check(fd, offset, len)?;
        let stat = rustix::fs::fstat(fd).map_err(|e| format!("fstat: {e}"))?;
        let part = (stat.st_dev as u64, stat.st_ino as u64, offset, len, counts);
        // Under the lock: two ports that are sent the same file at once must not map it twice. A
        // mapping keeps its file, so no other one has this inode meanwhile.
        let mut mapped = self.lock();
        mapped.retain(|(_, mapping)| mapping.strong_count() > 0);
        let found = mapped.iter().filter(|(other, _)| *other == part);
        let mut found = found.filter_map(|(_, mapping)| mapping.upgrade());
        // One that was truncated faults no more, whatever the file has become.
        if let Some(mapping) = found.find(|mapping| !mapping.was_truncated()) {
            return Ok(mapping);
        }
        let mapping = Arc::new(Mapping::new(fd, offset, len, Some((&self.budget, counts)))?);
        mapped.push((part, Arc::downgrade(&mapping)));
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

    use base::shm::SharedMemory;

    use super::*;

    #[test]
    fn abuse_R10_a_budget_is_never_exceeded_and_comes_back() {
        let small = Budget::new(100);
        let first = small.take(60).unwrap();
        assert_eq!(small.take(41).unwrap_err(), 60);
        assert!(small.take(u64::MAX).is_err());
        let second = small.take(40).unwrap();
        drop(first);
        let third = small.take(60).unwrap();
        assert!(small.take(1).is_err());
        drop((second, third));
        assert_eq!(small.used(), 0);
    }

    /// A move needs a log of memory that is all that the VM may have.
    #[test]
    fn abuse_V1_a_dirty_log_is_none_of_the_bytes_of_a_vm() {
        let file = SharedMemory::new("share", 2 * 4096).unwrap();
        let vm = MemoryShare::with_limit(4096);
        let map = |counts, offset| vm.map(counts, file.as_fd(), offset, 4096);
        let _memory = map(Counts::Memory, 0).unwrap();
        let log = map(Counts::Log, 4096).unwrap();
        assert!(Arc::ptr_eq(&log, &map(Counts::Log, 4096).unwrap()));
        assert_eq!((vm.used_bytes(), vm.used_mappings()), (4096, 2));
        // Not a way to have more.
        assert!(map(Counts::Memory, 4096).is_err());
    }

    /// Guards of mappings are the process's: tables that requests in flight keep must not take all.
    #[test]
    fn abuse_V1_a_vm_has_so_many_mappings_and_others_have_theirs() {
        let file = SharedMemory::new("share", 4096 * (MAX_VM_MAPPINGS as usize + 1)).unwrap();
        let (vm, other) = (MemoryShare::new(), MemoryShare::with_limit(4096));
        let map = |share: &MemoryShare, page: u64| {
            share.map(Counts::Memory, file.as_fd(), page * 4096, 4096)
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
