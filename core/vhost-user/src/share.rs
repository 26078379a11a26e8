//! Budgets that the front ends of one VM share: more ports do not give a VM more.

use std::sync::Arc;

use base::limits::MAX_MEMORY_BYTES;
use queue::MemoryShare;

use crate::pace::Pace;

/// Budgets of one VM, for mappings and for session threads. A clone is the same share.
#[derive(Debug, Clone)]
pub struct VmShare {
    /// Budget of memory that its ports may map.
    pub memory: Arc<MemoryShare>,
    /// Budget of messages and CPU time of its session threads.
    pub pace: Arc<Pace>,
}

impl VmShare {
    /// Makes the share of a VM with the usual limit of mapped memory.
    pub fn new() -> Self {
        Self::of(MemoryShare::new())
    }

    /// Makes the share of a VM with `limit_bytes` of memory, which it may map twice: a VMM cuts the
    /// same file anew when it plugs memory or its firmware opens a window, and its ports follow one
    /// after the other.
    pub fn with_memory_limit(limit_bytes: u64) -> Self {
        Self::of(MemoryShare::with_limit(limit_bytes.saturating_mul(2).min(MAX_MEMORY_BYTES)))
    }

    fn of(memory: Arc<MemoryShare>) -> Self {
        Self { memory, pace: Pace::new() }
    }
}

impl Default for VmShare {
    fn default() -> Self {
        Self::new()
    }
}
