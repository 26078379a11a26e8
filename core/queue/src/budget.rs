//! Budgets of address space and of mappings: one for the process, one for each VM.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use base::limits::{MAX_MAPPED_BYTES, MAX_VM_MAPPINGS};

/// Amount in use, against a limit.
#[derive(Debug)]
struct Budget {
    used: AtomicU64,
    limit: u64,
}

/// Budget of address space of the whole process.
static PROCESS: LazyLock<Arc<Budget>> = LazyLock::new(|| Budget::new(MAX_MAPPED_BYTES));

impl Budget {
    fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self { used: AtomicU64::new(0), limit })
    }

    fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Reserves `amount`; the error is the amount in use.
    fn take(self: &Arc<Self>, amount: u64) -> Result<Reservation, u64> {
        let more = |used: u64| used.checked_add(amount).filter(|&sum| sum <= self.limit);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)?;
        Ok(Reservation { budget: Arc::clone(self), amount })
    }
}

/// Reserved part of a budget; given back when dropped.
#[derive(Debug)]
struct Reservation {
    budget: Arc<Budget>,
    amount: u64,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.amount, Ordering::Relaxed);
    }
}

/// Budgets of one VM: bytes and mappings.
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

/// Purpose of a mapping, which decides whether its bytes count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Guest memory: its bytes count against the VM's budget.
    Memory,
    /// Dirty log: its bytes do not count. A VM that uses all of its budget can be moved all the
    /// same.
    Log,
}

/// Reservations of one mapping in the budgets of the process and of its VM.
#[derive(Debug)]
pub(crate) struct Charge {
    _process: Reservation,
    _vm: Option<(Reservation, Reservation)>,
}

impl Charge {
    /// Charges the process, and the VM where one is given. The error is a text that names the limit
    /// in the way.
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
