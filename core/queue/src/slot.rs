//! Saved positions of queues, which survive the daemon: one slot per queue in a shared memory file
//! that the holder keeps.
//!
//! A completion in a packed ring overwrites descriptors, and nothing in the ring tells a later
//! daemon how far a batch got. So each batch is written down here first ([`PositionSlot`]'s log),
//! then the position after it (`announced`), then it is published, then the position is
//! `committed`. A daemon that finds the two positions different repeats the publication from the
//! log. That costs a store of 8 bytes per completion into memory that only we touch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::shm::SharedMemory;

use crate::crash;
use crate::setup::{Completion, Position};

/// Bytes per slot: one page, so that two sidecores never share a cache line and a batch's log fits.
pub const SLOT_LEN_BYTES: usize = 4096;

/// Words before the log: committed, announced, and the rest of their cache line.
const HEADER_WORDS: usize = 8;
const COMMITTED: usize = 0;
const ANNOUNCED: usize = 1;

/// Most completions of one publication: what is left of the page. Larger pushes are published in
/// parts.
pub(crate) const SLOT_LOG_ENTRIES: usize = SLOT_LEN_BYTES / 8 - HEADER_WORDS;

/// Marks a word as written. With the version of the layout, so that a file of another layout reads
/// as never written.
const WRITTEN: u64 = 0xa1 << 56;
const WRITTEN_MASK: u64 = 0xff << 56;
const WRAP: u64 = 1 << 16;
const COUNT_SHIFT: u32 = 32;

/// The saved position of one queue.
#[derive(Debug, Clone)]
pub struct PositionSlot {
    shm: Arc<SharedMemory>,
    index: usize,
}

impl PositionSlot {
    /// Slot `index` of the file; none when the file is too short.
    pub fn new(shm: Arc<SharedMemory>, index: usize) -> Option<Self> {
        let end = index.checked_add(1)?.checked_mul(SLOT_LEN_BYTES)?;
        (end <= shm.len_bytes()).then_some(Self { shm, index })
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at < SLOT_LEN_BYTES / 8);
        // SAFETY: slot `index` lies in the mapping (checked in `new`), which is page aligned,
        // sealed against shrinking and lives as long as `self`.
        unsafe {
            AtomicU64::from_ptr(self.shm.as_ptr().add(self.index * SLOT_LEN_BYTES + at * 8).cast())
        }
    }

    #[inline]
    fn encode(position: Position) -> u64 {
        let wrap = if position.used_wrap { WRAP } else { 0 };
        WRITTEN | wrap | u64::from(position.used)
    }

    #[inline]
    fn set(&self, at: usize, value: u64) {
        crash::point();
        self.word(at).store(value, Ordering::Release);
    }

    fn decode(word: u64) -> Option<Position> {
        let (used, used_wrap) = (word as u16, word & WRAP != 0);
        (word & WRITTEN_MASK == WRITTEN).then_some(Position {
            avail: used,
            used,
            avail_wrap: used_wrap,
            used_wrap,
        })
    }

    /// The saved position; none when the slot was never written or is nonsense. Where a daemon was
    /// killed within a publication, only [`crate::Queue::resume`] finds the right one.
    pub fn load(&self) -> Option<Position> {
        Self::decode(self.word(COMMITTED).load(Ordering::Acquire))
    }

    /// Forgets the position (ring reset).
    pub fn clear(&self) {
        // The announcement goes first: without it, the other word is always right.
        self.set(ANNOUNCED, 0);
        self.set(COMMITTED, 0);
    }

    /// Notes that a queue starts at `position`: nothing is announced.
    pub(crate) fn begin(&self, position: Position) {
        self.set(ANNOUNCED, 0);
        self.commit(position);
    }

    /// Notes that everything up to `position` is published.
    #[inline]
    pub(crate) fn commit(&self, position: Position) {
        self.set(COMMITTED, Self::encode(position));
    }

    /// Notes that `done` (at most [`SLOT_LOG_ENTRIES`]) is about to be published, up to `next`.
    #[inline]
    pub(crate) fn announce(&self, next: Position, done: &[Completion]) {
        let done = &done[..done.len().min(SLOT_LOG_ENTRIES)];
        for (i, c) in done.iter().enumerate() {
            let entry = u64::from(c.written) | u64::from(c.id) << 32 | u64::from(c.ndesc) << 48;
            self.set(HEADER_WORDS + i, entry);
        }
        let count = (done.len() as u64) << COUNT_SHIFT;
        self.set(ANNOUNCED, Self::encode(next) | count);
    }

    /// The publication that was announced and not committed: where it ends, and its completions.
    /// None when there is none, or when the log makes no sense for a ring of `size`.
    pub(crate) fn unfinished(&self, size: u16) -> Option<(Position, Vec<Completion>)> {
        let committed = self.load()?;
        let word = self.word(ANNOUNCED).load(Ordering::Acquire);
        let next = Self::decode(word)?;
        if next == committed || next.used >= size {
            return None;
        }
        let count = usize::from((word >> COUNT_SHIFT) as u16);
        if count == 0 || count > SLOT_LOG_ENTRIES {
            return None;
        }
        let entry = |i| {
            let entry = self.word(HEADER_WORDS + i).load(Ordering::Relaxed);
            let (id, ndesc) = ((entry >> 32) as u16, (entry >> 48) as u16);
            Completion { id, ndesc, written: entry as u32 }
        };
        Some((next, (0..count).map(entry).collect()))
    }
}
