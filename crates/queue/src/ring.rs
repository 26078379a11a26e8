//! One virtqueue, split or packed.

use std::sync::Arc;

use crate::batch::Batch;
use crate::error::RingError;
use crate::memory::GuestMemory;

/// Ring format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Virtio 1.x split virtqueue (2.7).
    Split,
    /// Virtio 1.1 packed virtqueue (2.8).
    Packed,
}

/// Guest-physical addresses of the three parts. Packed: descriptor ring, driver event suppression,
/// device event suppression.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RingAddrs {
    /// Descriptor table or ring.
    pub desc: u64,
    /// Available ring or driver event suppression.
    pub driver: u64,
    /// Used ring or device event suppression.
    pub device: u64,
}

/// Where both sides of a ring stand. Split: indices that wrap at 65,536 (wrap flags unused).
/// Packed: ring offsets with their wrap counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Next available entry to take.
    pub avail: u16,
    /// Next used entry to write.
    pub used: u16,
    /// Packed: driver ring wrap counter at `avail`.
    pub avail_wrap: bool,
    /// Packed: device ring wrap counter at `used`.
    pub used_wrap: bool,
}

impl Position {
    /// The position of a fresh ring.
    pub fn fresh() -> Self {
        Self { avail: 0, used: 0, avail_wrap: true, used_wrap: true }
    }

    /// From vhost-user `SET_VRING_BASE`: split = next avail index (used is read from the ring by
    /// the caller), packed = avail in bits 0–15, used in bits 16–31, wrap counter in the top bit
    /// of each half. Some front ends send 0 for a fresh packed ring: taken as fresh.
    pub fn from_vring_base(layout: Layout, base: u32) -> Self {
        let _ = (layout, base);
        unimplemented!("owner of crate queue")
    }

    /// For the reply to `GET_VRING_BASE`.
    pub fn to_vring_base(self, layout: Layout) -> u32 {
        let _ = layout;
        unimplemented!("owner of crate queue")
    }
}

/// Everything needed to make a [`Queue`].
#[derive(Debug, Clone, Copy)]
pub struct RingSetup {
    /// Number of descriptors.
    pub size: u16,
    /// Split or packed.
    pub layout: Layout,
    /// VIRTIO_F_EVENT_IDX negotiated.
    pub event_idx: bool,
    /// VIRTIO_F_IN_ORDER negotiated.
    pub in_order: bool,
    /// VIRTIO_F_INDIRECT_DESC negotiated.
    pub indirect: bool,
    /// Where the parts are.
    pub addrs: RingAddrs,
    /// Where to go on.
    pub start: Position,
    /// VHOST_VRING_F_LOG: guest address at which writes to the used ring are logged.
    pub log_used_addr: Option<u64>,
}

/// One finished chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// [`crate::Chain::id`].
    pub id: u16,
    /// [`crate::Chain::ndesc`].
    pub ndesc: u16,
    /// Bytes written into the chain's writable part (never more than are really written).
    pub written: u32,
}

/// A virtqueue. Not a doorbell in sight: see [`crate::Vring`].
#[derive(Debug)]
pub struct Queue {
    // (private)
}

impl Queue {
    /// Checks the setup (sizes, alignment, ranges, overlaps) and makes the queue.
    pub fn new(memory: Arc<GuestMemory>, setup: RingSetup) -> Result<Self, RingError> {
        let _ = (memory, setup);
        unimplemented!("owner of crate queue")
    }

    /// Takes up to `max` available chains (and as many as `batch` has room for) into `batch`,
    /// after clearing it. Returns how many. An error means that the ring is broken: chains before
    /// the broken one are in the batch and may be completed.
    pub fn pop(&mut self, batch: &mut Batch, max: usize) -> Result<usize, RingError> {
        let _ = (batch, max);
        unimplemented!("owner of crate queue")
    }

    /// Gives the last `n` chains of `batch` back, untouched: the next pop returns them again.
    pub fn unpop(&mut self, batch: &mut Batch, n: usize) {
        let _ = (batch, n);
        unimplemented!("owner of crate queue")
    }

    /// Publishes completions, in the order given, all visible at once to the driver.
    pub fn push(&mut self, done: &[Completion]) {
        let _ = done;
        unimplemented!("owner of crate queue")
    }

    /// Marks the first `written` bytes of a chain's writable part dirty (only does something while
    /// a migration logs).
    pub fn mark_written(&self, writable: &[crate::Seg], written: usize) {
        let _ = (writable, written);
        unimplemented!("owner of crate queue")
    }

    /// Whether the driver wants a notification for what was pushed since the last call.
    pub fn take_notify(&mut self) -> bool {
        unimplemented!("owner of crate queue")
    }

    /// Asks the driver for kicks. True when chains are (already) available: do not sleep.
    pub fn enable_kicks(&mut self) -> bool {
        unimplemented!("owner of crate queue")
    }

    /// Tells the driver that kicks are not needed.
    pub fn disable_kicks(&mut self) {
        unimplemented!("owner of crate queue")
    }

    /// Where the ring stands.
    pub fn position(&self) -> Position {
        unimplemented!("owner of crate queue")
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        unimplemented!("owner of crate queue")
    }

    /// Moves the queue to a changed memory table. Fails (and the queue must stop) when its rings
    /// are no longer in it.
    pub fn set_memory(&mut self, memory: Arc<GuestMemory>) -> Result<(), RingError> {
        let _ = memory;
        unimplemented!("owner of crate queue")
    }
}
