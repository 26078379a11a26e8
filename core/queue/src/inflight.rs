//! The inflight region of vhost-user (`GET_INFLIGHT_FD` / `SET_INFLIGHT_FD`): which requests were
//! taken and not completed when a back end died. Layouts as in the specification ("inflight I/O
//! tracking"), split and packed.
//!
//! The region is shared with the front end, so it is read only when a queue starts: everything is
//! copied once and checked. From then on the tracker's own memory is the truth, and the region is
//! only written.

mod packed;
mod region;
mod split;

use std::sync::Arc;

use crate::batch::Batch;
use crate::error::RingError;
use crate::queue::Queue;
use crate::setup::{Completion, Layout};

use packed::PackedTracker;
use region::QueueRegion;
pub use region::{InflightRegion, MAX_INFLIGHT_DESCS};
use split::SplitTracker;

/// Inflight tracking of one queue: writes its part of the region.
#[derive(Debug)]
pub(crate) enum Tracker {
    /// For a split ring.
    Split(SplitTracker),
    /// For a packed ring.
    Packed(PackedTracker),
}

impl Tracker {
    /// Reads the state that an earlier back end left, finishes its half-done completion, restores
    /// the queue's position, and hands the unfinished requests to the queue.
    pub fn attach(
        region: Arc<InflightRegion>,
        index: u16,
        queue: &mut Queue,
    ) -> Result<Self, RingError> {
        let region = QueueRegion::new(region, index, queue)?;
        match queue.layout() {
            Layout::Split => SplitTracker::attach(region, queue).map(Self::Split),
            Layout::Packed => PackedTracker::attach(region, queue).map(Self::Packed),
        }
    }

    /// Records that the chains of `batch` were taken. Fails for a driver that offers a chain twice.
    pub fn record_pop(&mut self, batch: &Batch, queue: &Queue) -> Result<(), RingError> {
        match self {
            Self::Split(t) => t.record_pop(batch),
            Self::Packed(t) => t.record_pop(batch, queue.recorded()),
        }
    }

    /// Records that the last chains of `batch`, from `keep` on, are about to be given back.
    pub fn record_unpop(&mut self, batch: &Batch, keep: usize) {
        for entry in batch.entries[keep..].iter().rev() {
            match self {
                Self::Split(t) => t.record_unpop(entry.id),
                Self::Packed(t) => t.record_unpop(entry.id),
            }
        }
    }

    /// Publishes `done`, with the steps around it.
    pub fn push(&mut self, done: &[Completion], queue: &mut Queue) {
        match self {
            Self::Split(t) => t.push(done, queue),
            Self::Packed(t) => t.push(done, queue),
        }
    }

    /// Whether the front end truncated the region.
    pub fn was_truncated(&self) -> bool {
        match self {
            Self::Split(t) => t.region().was_truncated(),
            Self::Packed(t) => t.region().was_truncated(),
        }
    }
}
