//! Inflight tracking of a packed ring. Completions are published one by one: the specification's
//! way back from a half-published batch would leave used descriptors in the ring that the driver
//! finds too early.

use std::sync::atomic::Ordering::{Acquire, Relaxed};

use super::region::{
    AT_DESC_NUM, AT_VERSION, PACKED_ENTRY_BYTES, PACKED_HEADER_BYTES, QueueRegion, VERSION,
    offered_twice,
};
use crate::batch::Batch;
use crate::error::RingError;
use crate::parts::Desc;
use crate::queue::Queue;
use crate::redelivery::Redelivery;
use crate::setup::{Completion, Position};

// Further fields of `QueueRegionPacked` and `DescStatePacked` in the specification.
const AT_FREE_HEAD: usize = 12;
const AT_OLD_FREE_HEAD: usize = 14;
/// Offset of one word that is stored at once: used_idx, old_used_idx, used_wrap_counter,
/// old_used_wrap_counter and two bytes of padding. Position and wrap counter stored one after the
/// other would, where a completion wraps, leave a moment in which they name a place in the wrong
/// lap.
const AT_USED: usize = 16;
const ENTRY_INFLIGHT: usize = 0;
const ENTRY_NEXT: usize = 2;
const ENTRY_LAST: usize = 4;
const ENTRY_NUM: usize = 6;
const ENTRY_COUNTER: usize = 8;
const ENTRY_ID: usize = 16;
const ENTRY_FLAGS: usize = 18;
const ENTRY_LEN: usize = 20;
const ENTRY_ADDR: usize = 24;

/// No entry.
const NONE: u16 = u16::MAX;

/// Buffer ids: a driver may choose any (virtio 1.2, 2.8.6).
const IDS: usize = 1 << 16;

fn entry(index: u16, field: usize) -> usize {
    PACKED_HEADER_BYTES + usize::from(index) * PACKED_ENTRY_BYTES + field
}

/// Links of one entry, in memory of ours.
#[derive(Debug, Clone, Copy, Default)]
struct Links {
    next: u16,
    /// Last entry of the chain, on its first entry.
    last: u16,
}

#[derive(Debug)]
pub(crate) struct PackedTracker {
    region: QueueRegion,
    links: Box<[Links]>,
    /// One more than the first entry of the chain with each buffer id; 0: no chain. Most of it is
    /// never touched, and so takes no memory.
    by_id: Box<[u16]>,
    free_head: u16,
    /// Position up to which everything is published and recorded.
    used: (u16, bool),
    counter: u64,
}

/// A chain found in the region.
struct FoundChain {
    counter: u64,
    entries: Vec<u16>,
    descs: Vec<Desc>,
}

impl PackedTracker {
    pub(super) fn region(&self) -> &QueueRegion {
        &self.region
    }

    pub(super) fn attach(region: QueueRegion, queue: &mut Queue) -> Result<Self, RingError> {
        let size = queue.size();
        queue.start_recording();
        let mut tracker = Self {
            region,
            links: vec![Links::default(); usize::from(size)].into(),
            by_id: vec![0; IDS].into(),
            free_head: 0,
            used: (0, true),
            counter: 0,
        };
        if !tracker.region.is_used(size)? {
            tracker.format(size, queue.position());
            return Ok(tracker);
        }
        let (used, wrap) = tracker.settle(queue)?;
        let mut found = tracker.read(size)?;
        found.sort_by_key(|f| f.counter);
        tracker.counter = found.last().map_or(0, |f| f.counter.wrapping_add(1));
        for f in &found {
            tracker.adopt(f)?;
        }
        tracker.relink(&found, size);
        let again = found.into_iter().map(|f| Redelivery { head: f.entries[0], descs: f.descs });
        queue.resubmit(used, wrap, again.collect());
        Ok(tracker)
    }

    /// Makes the region an empty one.
    fn format(&mut self, size: u16, position: Position) {
        let region = &self.region;
        region.set_u16(AT_VERSION, 0);
        for i in 0..size {
            region.set_u8(entry(i, ENTRY_INFLIGHT), 0);
        }
        region.set_u64(0, 0);
        region.set_u16(AT_DESC_NUM, size);
        self.used = (position.used, position.used_wrap);
        self.store_used(self.used);
        self.relink(&[], size);
        self.region.set_u16(AT_VERSION, VERSION);
    }

    /// Commits or rolls back the completion that was under way; returns the position of the ring.
    fn settle(&mut self, queue: &Queue) -> Result<(u16, bool), RingError> {
        let (region, size) = (&self.region, queue.size());
        let word = u64::from_le(region.u64(AT_USED).load(Acquire));
        let new = (word as u16, (word >> 32) & 0xff != 0);
        let old = ((word >> 16) as u16, (word >> 40) & 0xff != 0);
        for (index, _) in [new, old] {
            if index >= size {
                return Err(RingError::BadInflight(format!(
                    "used index {index} is outside the ring of {size}"
                )));
            }
        }
        let published = new != old && queue.packed_is_used(old.0, old.1);
        let (used, free_head) = if published {
            (new, region.u16(AT_FREE_HEAD).load(Acquire))
        } else {
            (old, region.u16(AT_OLD_FREE_HEAD).load(Acquire))
        };
        // Entries on the free list are not in flight, whatever they say.
        let mut index = free_head;
        for _ in 0..size {
            if index >= size {
                break;
            }
            region.set_u8(entry(index, ENTRY_INFLIGHT), 0);
            index = region.u16(entry(index, ENTRY_NEXT)).load(Relaxed);
        }
        // In this order a second crash decides as we did: while the positions differ the ring is
        // asked again, and both free lists lead to the same entries.
        region.set_u16(AT_FREE_HEAD, free_head);
        region.set_u16(AT_OLD_FREE_HEAD, free_head);
        self.used = used;
        self.store_used(used);
        Ok(used)
    }

    /// Stores that the ring goes from `self.used` to `new` (or stands there, when they are the
    /// same).
    fn store_used(&self, new: (u16, bool)) {
        let old = self.used;
        let word = u64::from(new.0)
            | u64::from(old.0) << 16
            | u64::from(new.1) << 32
            | u64::from(old.1) << 40;
        self.region.set_u64(AT_USED, word.to_le());
    }

    /// Copies the chains in flight out of the region, each field once.
    fn read(&self, size: u16) -> Result<Vec<FoundChain>, RingError> {
        let region = &self.region;
        let mut found = Vec::new();
        let mut taken = vec![false; usize::from(size)];
        for head in 0..size {
            if region.u8(entry(head, ENTRY_INFLIGHT)).load(Acquire) != 1 {
                continue;
            }
            let num = region.u16(entry(head, ENTRY_NUM)).load(Relaxed);
            let counter = region.u64(entry(head, ENTRY_COUNTER)).load(Relaxed);
            if num == 0 || num > size {
                return Err(bad(head, "a chain has no or too many descriptors"));
            }
            let (mut entries, mut descs) = (Vec::new(), Vec::new());
            let mut index = head;
            for _ in 0..num {
                if index >= size {
                    return Err(bad(head, "a chain leaves the table"));
                }
                if std::mem::replace(&mut taken[usize::from(index)], true) {
                    return Err(bad(head, "two chains share a descriptor"));
                }
                entries.push(index);
                descs.push(Desc {
                    addr: region.u64(entry(index, ENTRY_ADDR)).load(Relaxed),
                    len: region.u32(entry(index, ENTRY_LEN)).load(Relaxed),
                    flags: region.u16(entry(index, ENTRY_FLAGS)).load(Relaxed),
                    tail: region.u16(entry(index, ENTRY_ID)).load(Relaxed),
                });
                index = region.u16(entry(index, ENTRY_NEXT)).load(Relaxed);
            }
            found.push(FoundChain { counter, entries, descs });
        }
        Ok(found)
    }

    /// Takes a chain that was found in the region into our own links.
    fn adopt(&mut self, found: &FoundChain) -> Result<(), RingError> {
        let (head, last) = (found.entries[0], found.entries[found.entries.len() - 1]);
        let id = found.descs[found.descs.len() - 1].tail;
        if self.by_id[usize::from(id)] != 0 {
            return Err(bad(head, "a buffer id is in flight twice"));
        }
        // Entries are 1,024 at most.
        self.by_id[usize::from(id)] = head + 1;
        for pair in found.entries.windows(2) {
            self.links[usize::from(pair[0])].next = pair[1];
        }
        self.links[usize::from(head)].last = last;
        Ok(())
    }

    /// Puts all entries that are in no chain on the free list. Only links among free entries
    /// change, so that a crash half-way loses no chain.
    fn relink(&mut self, found: &[FoundChain], size: u16) {
        let mut taken = vec![false; usize::from(size)];
        found.iter().flat_map(|f| &f.entries).for_each(|&i| taken[usize::from(i)] = true);
        let mut next = size;
        for i in (0..size).rev().filter(|&i| !taken[usize::from(i)]) {
            self.region.set_u16(entry(i, ENTRY_NEXT), next);
            self.links[usize::from(i)].next = next;
            next = i;
        }
        self.set_free_head(next);
        self.region.set_u16(AT_OLD_FREE_HEAD, next);
    }

    fn set_free_head(&mut self, index: u16) {
        self.free_head = index;
        self.region.set_u16(AT_FREE_HEAD, index);
    }

    pub(super) fn record_pop(&mut self, batch: &Batch, descs: &[Desc]) -> Result<(), RingError> {
        let mut descs = descs.iter();
        for e in &batch.entries {
            if self.by_id[usize::from(e.id)] != 0 {
                return Err(offered_twice(e.id));
            }
            let head = self.free_head;
            if usize::from(head) >= self.links.len() {
                return Err(bad(e.id, "more is in flight than the ring holds"));
            }
            self.by_id[usize::from(e.id)] = head + 1;
            let region = &self.region;
            region.set_u64(entry(head, ENTRY_COUNTER), self.counter);
            region.set_u16(entry(head, ENTRY_NUM), e.ndesc);
            region.set_u8(entry(head, ENTRY_INFLIGHT), 1);
            self.counter = self.counter.wrapping_add(1);
            let mut index = head;
            for desc in descs.by_ref().take(usize::from(e.ndesc)) {
                self.links[usize::from(head)].last = index;
                self.store_desc(index, desc);
                // Entries are as many as descriptors, and the ring bounds those in flight.
                index = self.links.get(usize::from(index)).map_or(NONE, |o| o.next);
            }
            let last = self.links[usize::from(head)].last;
            self.region.set_u16(entry(head, ENTRY_LAST), last);
            self.set_free_head(index);
            // From here on the chain counts as taken.
            self.region.set_u16(AT_OLD_FREE_HEAD, index);
        }
        Ok(())
    }

    fn store_desc(&self, index: u16, desc: &Desc) {
        let region = &self.region;
        region.set_u64(entry(index, ENTRY_ADDR), desc.addr);
        region.set_u32(entry(index, ENTRY_LEN), desc.len);
        region.set_u16(entry(index, ENTRY_FLAGS), desc.flags);
        region.set_u16(entry(index, ENTRY_ID), desc.tail);
    }

    /// Puts the entries of a chain at the front of the free list; returns its first entry.
    fn free(&mut self, id: u16) -> Option<u16> {
        let head = std::mem::take(self.by_id.get_mut(usize::from(id))?).checked_sub(1)?;
        let last = self.links.get(usize::from(head))?.last;
        self.links[usize::from(last)].next = self.free_head;
        self.region.set_u16(entry(last, ENTRY_NEXT), self.free_head);
        self.set_free_head(head);
        Some(head)
    }

    pub(super) fn record_unpop(&mut self, id: u16) {
        if let Some(head) = self.free(id) {
            self.region.set_u8(entry(head, ENTRY_INFLIGHT), 0);
            self.region.set_u16(AT_OLD_FREE_HEAD, head);
        }
    }

    pub(super) fn push(&mut self, done: &[Completion], queue: &mut Queue) {
        for c in done {
            let Some(head) = self.free(c.id) else {
                continue;
            };
            let next = queue.packed_position_after(c);
            self.store_used((next.used, next.used_wrap));
            queue.push(std::slice::from_ref(c));
            self.region.set_u8(entry(head, ENTRY_INFLIGHT), 0);
            self.region.set_u16(AT_OLD_FREE_HEAD, head);
            self.used = (next.used, next.used_wrap);
            self.store_used(self.used);
        }
    }
}

fn bad(entry: u16, what: &str) -> RingError {
    RingError::BadInflight(format!("entry {entry}: {what}"))
}
