//! Budgets of address space and of mappings: one for the process, one for each VM.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use base::limits::{MAX_MAPPED_BYTES, MAX_VM_MAPPINGS};

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

impl VmBudget {
    /// A budget of `limit_bytes` in [`MAX_VM_MAPPINGS`] mappings.
    pub fn new(limit_bytes: u64) -> Self {
        Self { bytes: Budget::new(limit_bytes), mappings: Budget::new(MAX_VM_MAPPINGS) }
    }

    /// Bytes charged now.
    pub fn used_bytes(&self) -> u64 {
        self.bytes.used()
    }

    /// Mappings charged now.
    pub fn used_mappings(&self) -> u64 {
        self.mappings.used()
    }

    /// Most bytes that can be charged.
    pub fn limit_bytes(&self) -> u64 {
        self.bytes.limit
    }
}

/// What a mapping is to its VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Its bytes are of those that it may have.
    Memory,
    /// A dirty log: a limit that is what the VM has must not end its move.
    Log,
}

/// What a mapping has of the budgets that it purpose for.
#[derive(Debug)]
pub(crate) struct Charge {
    _process: Taken,
    _vm: Option<(Taken, Taken)>,
}

impl Charge {
    /// Charges the process, and the VM where one is given. The error is a text that says which limit
    /// stands in the way.
    pub fn take(len_bytes: u64, vm: Option<(&VmBudget, Purpose)>) -> Result<Self, String> {
        let take_bytes = |budget: &Arc<Budget>, len_bytes: u64, owner: &str| {
            budget.take(len_bytes).map_err(|used| {
                format!(
                    "{len_bytes:#x} bytes more than the {used:#x} that are mapped now; the limit of \
                     {owner} is {:#x}",
                    budget.limit
                )
            })
        };
        let take_vm = |(vm, purpose): (&VmBudget, Purpose)| {
            let mapping = vm.mappings.take(1).map_err(|used| {
                format!("one mapping more than {used}; that is the limit of one VM")
            })?;
            let memory_bytes = if purpose == Purpose::Memory { len_bytes } else { 0 };
            Ok::<_, String>((take_bytes(&vm.bytes, memory_bytes, "one VM")?, mapping))
        };
        let _vm = vm.map(take_vm).transpose()?;
        Ok(Self { _process: take_bytes(&PROCESS, len_bytes, "the daemon")?, _vm })
    }
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
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
}
