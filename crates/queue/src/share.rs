//! A VM's share of the daemon's address space, and what its ports map of it.
//!
//! Each port of a VM is sent the same memory. It is mapped once: the ports of a VM have a
//! [`MemoryShare`] in common, which knows parts of files that are mapped already. A sparse file costs
//! its owner nothing, but our address space is everybody's, so there are two limits: one for each VM,
//! and one for the process, which many VMs together reach and one cannot.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use base::limits::{MAX_MAPPED_BYTES, MAX_MEMORY_BYTES, MIN_VM_MAPPED_BYTES};

use crate::mapping::Mapping;

/// Bytes in use, against a limit.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Who has it, for errors.
    owner: &'static str,
    used: AtomicU64,
    limit: u64,
}

/// The whole process's.
static PROCESS: LazyLock<Arc<Budget>> =
    LazyLock::new(|| Budget::new("the daemon", MAX_MAPPED_BYTES));

impl Budget {
    fn new(owner: &'static str, limit: u64) -> Arc<Self> {
        Arc::new(Self { owner, used: AtomicU64::new(0), limit })
    }

    /// Takes `len_bytes` of it; the error says what is used and what the limit is.
    fn take(self: &Arc<Self>, len_bytes: u64) -> Result<Taken, String> {
        let more = |used: u64| used.checked_add(len_bytes).filter(|&sum| sum <= self.limit);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Taken { budget: Arc::clone(self), len_bytes }),
            Err(used) => Err(format!(
                "{len_bytes:#x} bytes more than the {used:#x} that are mapped now; the limit of {} \
                 is {:#x}",
                self.owner, self.limit
            )),
        }
    }
}

/// A part of a budget; given back when dropped.
#[derive(Debug)]
struct Taken {
    budget: Arc<Budget>,
    len_bytes: u64,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.len_bytes, Ordering::Relaxed);
    }
}

/// What a mapping has of the budgets that it counts for.
#[derive(Debug)]
pub(crate) struct Charge {
    _process: Taken,
    _vm: Option<Taken>,
}

impl Charge {
    /// Charges the process, and the VM where one is given.
    pub fn take(len_bytes: u64, vm: Option<&Arc<Budget>>) -> Result<Self, String> {
        let _vm = vm.map(|budget| budget.take(len_bytes)).transpose()?;
        Ok(Self { _process: PROCESS.take(len_bytes)?, _vm })
    }
}

/// A part of a file: device, inode, offset and length in bytes.
type Part = (u64, u64, u64, u64);

/// See the module's text. Ports of one VM have one in common.
pub struct MemoryShare {
    budget: Arc<Budget>,
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
        let budget = Budget::new("one VM", limit_bytes);
        Arc::new(Self { budget, mapped: Mutex::default() })
    }

    /// Bytes that the VM's ports map now. What several of them map counts once.
    pub fn used_bytes(&self) -> u64 {
        self.budget.used.load(Ordering::Relaxed)
    }

    /// Most bytes that the VM's ports may map.
    pub fn limit_bytes(&self) -> u64 {
        self.budget.limit
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Part, Weak<Mapping>)>> {
        self.mapped.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps `offset..offset + len` of a file, or finds it mapped. The error is a text that says why
    /// not.
    pub(crate) fn map(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: u64,
    ) -> Result<Arc<Mapping>, String> {
        let stat = rustix::fs::fstat(fd).map_err(|e| format!("fstat: {e}"))?;
        let part = (stat.st_dev as u64, stat.st_ino as u64, offset, len);
        // Under the lock: two ports that are sent the same file at once must not map it twice. A
        // mapping keeps its file, so no other one has this inode meanwhile.
        let mut mapped = self.lock();
        mapped.retain(|(_, mapping)| mapping.strong_count() > 0);
        let found = mapped.iter().filter(|(other, _)| *other == part);
        let mut found = found.filter_map(|(_, mapping)| mapping.upgrade());
        // One that was truncated faults no more, whatever the file has become.
        if let Some(mapping) = found.find(|mapping| !mapping.was_truncated()) {
            Mapping::check(fd, offset, len)?;
            return Ok(mapping);
        }
        let mapping = Arc::new(Mapping::new(fd, offset, len, Some(&self.budget))?);
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
    use super::*;

    #[test]
    fn abuse_R10_a_budget_is_never_exceeded_and_comes_back() {
        let small = Budget::new("a test", 100);
        let first = small.take(60).unwrap();
        let text = small.take(41).unwrap_err();
        assert!(text.contains("0x29") && text.contains("0x3c"), "{text}");
        assert!(text.contains("the limit of a test is 0x64"), "{text}");
        assert!(small.take(u64::MAX).is_err());
        let second = small.take(40).unwrap();
        drop(first);
        let third = small.take(60).unwrap();
        assert!(small.take(1).is_err());
        drop((second, third));
        assert_eq!(small.used.load(Ordering::Relaxed), 0);
    }
}
