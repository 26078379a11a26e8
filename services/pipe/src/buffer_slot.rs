//! The limit of a VM's pipes that hold bytes in memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A slot among the pipes that hold bytes in memory; free again when dropped.
#[derive(Debug)]
pub(crate) struct BufferSlot(Arc<AtomicUsize>);

impl BufferSlot {
    /// Takes one of at most `max` slots, of which `count` are taken. None: all are taken.
    pub fn take(count: &Arc<AtomicUsize>, max: usize) -> Option<Self> {
        let is_free = |n: usize| (n < max).then_some(n + 1);
        count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_free).ok()?;
        Some(Self(Arc::clone(count)))
    }
}

impl Drop for BufferSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
