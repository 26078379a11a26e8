//! Inflight tracking of a split ring.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::region::{
    AT_DESC_NUM, AT_VERSION, QueueRegion, SPLIT_ENTRY_BYTES, SPLIT_HEADER_BYTES, VERSION,
    offered_twice,
};
use crate::batch::Batch;
use crate::error::RingError;
use crate::queue::Queue;
use crate::redelivery::Redelivery;
use crate::setup::Completion;

// Further fields of `QueueRegionSplit` and `DescStateSplit` in the specification.
const AT_LAST_BATCH_HEAD: usize = 12;
const AT_USED_IDX: usize = 14;
const ENTRY_INFLIGHT: usize = 0;
const ENTRY_NEXT: usize = 6;
const ENTRY_COUNTER: usize = 8;

fn entry(head: u16, field: usize) -> usize {
    SPLIT_HEADER_BYTES + usize::from(head) * SPLIT_ENTRY_BYTES + field
}

#[derive(Debug)]
pub(crate) struct SplitTracker {
    region: QueueRegion,
    in_flight: Box<[bool]>,
    counter: u64,
    last_batch_head: u16,
}

impl SplitTracker {
    pub(super) fn region(&self) -> &QueueRegion {
        &self.region
    }

    pub(super) fn attach(region: QueueRegion, queue: &mut Queue) -> Result<Self, RingError> {
        let size = queue.size();
        let mut tracker = Self {
            region,
            in_flight: vec![false; usize::from(size)].into(),
            counter: 0,
            last_batch_head: 0,
        };
        let (avail, used) = queue.read_split_indices();
        if !tracker.region.is_used(size)? {
            tracker.format(size, used);
            return Ok(tracker);
        }
        let mut heads = tracker.read(size, used);
        // What the driver offered and we did not complete bounds what can be in flight. More than
        // that was left by another boot of the guest, whose requests nobody waits for.
        let offered = avail.wrapping_sub(used);
        if heads.len() > usize::from(offered) || offered > size {
            tracing::warn!(
                "inflight region is stale: {} requests in flight, {offered} offered; ignored",
                heads.len()
            );
            tracker.format(size, used);
            return Ok(tracker);
        }
        heads.sort_unstable();
        tracker.counter = heads.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        for &(_, head) in &heads {
            tracker.in_flight[usize::from(head)] = true;
        }
        tracker.region.set_u16(AT_USED_IDX, used);
        let again = heads.iter().map(|&(_, head)| Redelivery { head, descs: Vec::new() });
        queue.resubmit(used, true, again.collect());
        Ok(tracker)
    }

    /// Makes the region an empty one.
    fn format(&mut self, size: u16, used: u16) {
        let region = &self.region;
        // Not valid while it is being written.
        region.set_u16(AT_VERSION, 0);
        for head in 0..size {
            region.set_u8(entry(head, ENTRY_INFLIGHT), 0);
        }
        region.set_u64(0, 0);
        region.set_u16(AT_DESC_NUM, size);
        region.set_u16(AT_LAST_BATCH_HEAD, 0);
        region.set_u16(AT_USED_IDX, used);
        region.set_u16(AT_VERSION, VERSION);
    }

    /// Reads the unfinished requests as (counter, head), and settles the last batch: when the
    /// ring's used index is ahead of the region's, the batch between them was published.
    fn read(&mut self, size: u16, used: u16) -> Vec<(u64, u16)> {
        let region = &self.region;
        let batch = used.wrapping_sub(region.u16(AT_USED_IDX).load(Acquire));
        let mut head = region.u16(AT_LAST_BATCH_HEAD).load(Acquire);
        self.last_batch_head = if head < size { head } else { 0 };
        // A distance above the size is no batch of ours but a ring of another boot: nothing to
        // settle, and the caller finds out.
        for _ in 0..if batch <= size { batch } else { 0 } {
            if head >= size {
                break;
            }
            region.set_u8(entry(head, ENTRY_INFLIGHT), 0);
            head = region.u16(entry(head, ENTRY_NEXT)).load(Relaxed);
        }
        (0..size)
            .filter(|&h| region.u8(entry(h, ENTRY_INFLIGHT)).load(Acquire) == 1)
            .map(|h| (region.u64(entry(h, ENTRY_COUNTER)).load(Relaxed), h))
            .collect()
    }

    pub(super) fn record_pop(&mut self, batch: &Batch) -> Result<(), RingError> {
        for e in &batch.entries {
            let mark = &mut self.in_flight[usize::from(e.id)];
            if std::mem::replace(mark, true) {
                return Err(offered_twice(e.id));
            }
            self.region.set_u64(entry(e.id, ENTRY_COUNTER), self.counter);
            self.counter = self.counter.wrapping_add(1);
            self.region.set_u8(entry(e.id, ENTRY_INFLIGHT), 1);
        }
        Ok(())
    }

    pub(super) fn record_unpop(&mut self, head: u16) {
        self.in_flight[usize::from(head)] = false;
        self.region.set_u8(entry(head, ENTRY_INFLIGHT), 0);
    }

    pub(super) fn push(&mut self, done: &[Completion], queue: &mut Queue) {
        for c in done {
            self.region.set_u16(entry(c.id, ENTRY_NEXT), self.last_batch_head);
            self.last_batch_head = c.id;
        }
        self.region.set_u16(AT_LAST_BATCH_HEAD, self.last_batch_head);
        queue.push(done);
        for c in done {
            self.in_flight[usize::from(c.id)] = false;
            self.region.set_u8(entry(c.id, ENTRY_INFLIGHT), 0);
        }
        self.region.set_u16(AT_USED_IDX, queue.position().used);
    }
}
