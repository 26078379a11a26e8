//! What the front ends of one VM have in common: a VM has no more of it for having more ports.

use std::sync::Arc;

use base::limits::MAX_MEMORY_BYTES;
use queue::MemoryShare;

use crate::pace::Pace;

/// See the module's text. A clone is the same share.
#[derive(Debug, Clone)]
pub struct VmShare {
    /// What its ports may map.
    pub memory: Arc<MemoryShare>,
    /// What its session threads may do.
    pub pace: Arc<Pace>,
}

impl VmShare {
    /// The share of a VM that may map what is usual.
    pub fn new() -> Self {
        Self::of(MemoryShare::new())
    }

    /// The same, of a VM that may share so much, and map it twice: a VMM cuts the same file anew when it
    /// plugs memory or its firmware opens a window, and its ports follow one after the other.
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
