//! The packed ring (virtio 2.8): positions with wrap counters, and the rules of taking and giving
//! back.
//!
//! A completion overwrites length, id and flags of a descriptor with one 8-byte store, the batch's
//! first descriptor last. The driver looks at the first one first, so the batch appears at once;
//! and a daemon killed between two stores leaves whole completions only, which
//! [`crate::Queue::resume`] can finish from its log.

use std::sync::atomic::{Ordering, fence};

use crate::batch::Batch;
use crate::dirty::DirtyLog;
use crate::error::RingError;
use crate::memory::GuestMemory;
use crate::parts::{AHEAD, Desc, PackedParts};
use crate::setup::{Completion, Position, RingSetup, WRAP_BIT, Wish};
use crate::walk::{ChainBuilder, F_INDIRECT, F_NEXT, F_WRITE, Stop, Walk, add_single, too_long};

/// `VIRTQ_DESC_F_AVAIL` and `VIRTQ_DESC_F_USED` (2.8.1).
const F_AVAIL: u16 = 1 << 7;
const F_USED: u16 = 1 << 15;

/// Event suppression (2.8.14): on, off, at one descriptor.
const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_DESC: u16 = 2;

/// Descriptors of a line.
const PER_LINE: usize = 4;

/// Ring offset with the wrap counter of its lap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    at: u16,
    wrap: bool,
}

impl Place {
    #[inline]
    fn advance(&mut self, n: u16, size: u16) {
        // The place is below 32,768, and `n` at most that: no overflow.
        self.at += n;
        if self.at >= size {
            self.at -= size;
            self.wrap = !self.wrap;
        }
    }

    #[inline]
    fn retreat(&mut self, n: u16, size: u16) {
        if self.at < n {
            self.at += size;
            self.wrap = !self.wrap;
        }
        self.at -= n;
    }

    /// Descriptors from this place to `other`, which is ahead by at most one lap.
    #[inline]
    fn distance(self, other: Self, size: u16) -> u16 {
        if self.wrap == other.wrap {
            other.at.wrapping_sub(self.at)
        } else {
            other.at.wrapping_add(size).wrapping_sub(self.at)
        }
    }
}

#[derive(Debug)]
pub(crate) struct PackedRing {
    parts: PackedParts,
    size: u16,
    event_idx: bool,
    avail: Place,
    used: Place,
    /// Descriptors used since the driver's wishes were last looked at; none at the start, when the
    /// notification of an earlier daemon may be missing.
    unsignalled: Option<u32>,
    /// Chains taken by the last pop.
    expected: u16,
}

impl PackedRing {
    pub fn new(memory: &GuestMemory, setup: &RingSetup) -> Result<Self, RingError> {
        let parts = PackedParts::find(memory, setup)?;
        let (start, size) = (setup.start, setup.size);
        for (which, index) in [("available", start.avail), ("used", start.used)] {
            if index >= size {
                return Err(RingError::BadStart { which, index, size });
            }
        }
        let avail = Place { at: start.avail, wrap: start.avail_wrap };
        let used = Place { at: start.used, wrap: start.used_wrap };
        let ahead = used.distance(avail, size);
        if ahead > size {
            return Err(RingError::BadBase { base: avail.at, used: used.at, ahead, size });
        }
        let event_idx = setup.event_idx;
        Ok(Self { parts, size, event_idx, avail, used, unsignalled: None, expected: 0 })
    }

    pub fn move_to(&mut self, memory: &GuestMemory, setup: &RingSetup) -> Result<(), RingError> {
        self.parts = PackedParts::find(memory, setup)?;
        Ok(())
    }

    #[inline]
    pub fn position(&self) -> Position {
        Position {
            avail: self.avail.at,
            used: self.used.at,
            avail_wrap: self.avail.wrap,
            used_wrap: self.used.wrap,
        }
    }

    /// Appends up to `max` chains to the batch.
    #[inline]
    pub fn pop(
        &mut self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        max: usize,
    ) -> Result<(), Box<RingError>> {
        // As many as last time are there, most likely; fetching what the driver still writes would
        // take it away from it.
        for ahead in (0..self.expected.min(AHEAD)).step_by(PER_LINE) {
            self.parts.prefetch(self.avail.at + ahead);
        }
        let first = batch.entries.len();
        let result = self.take_all(walk, batch, max);
        self.expected = (batch.entries.len() - first) as u16;
        result
    }

    #[inline]
    fn take_all(
        &mut self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        max: usize,
    ) -> Result<(), Box<RingError>> {
        // Descriptors that are not ours to complete. With none left, the next is one of ours:
        // nothing new.
        let mut free = self.size.saturating_sub(self.used.distance(self.avail, self.size));
        for taken in 0..max {
            if taken.is_multiple_of(PER_LINE)
                && taken + usize::from(AHEAD) < usize::from(self.expected)
            {
                // A position beyond the ring's end is only a wasted fetch.
                self.parts.prefetch(self.avail.at + AHEAD);
            }
            match self.take(walk, batch, free) {
                Ok(0) | Err(Stop::Full) => break,
                Ok(ndesc) => {
                    self.avail.advance(ndesc, self.size);
                    free -= ndesc;
                }
                Err(Stop::Broken(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// Appends the next chain, of `free` descriptors at most, to the batch, or leaves the batch as
    /// it was. Returns how many it has; 0 when there is none.
    #[inline]
    fn take(&self, walk: &mut Walk<'_>, batch: &mut Batch, free: u16) -> Result<u16, Stop> {
        if free == 0 {
            return Ok(0);
        }
        let first = self.parts.desc(self.avail.at);
        if !self.is_available(first.flags) {
            return Ok(0);
        }
        // A lone descriptor has its id, and no inflight region wants to know of it.
        if walk.record.is_none() && add_single(walk, batch, first.tail, first) {
            return Ok(1);
        }
        self.take_chain(walk, batch, first, free)
    }

    fn take_chain(
        &self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        first: Desc,
        free: u16,
    ) -> Result<u16, Stop> {
        let mut build = ChainBuilder::new(batch, self.avail.at);
        let recorded = walk.record.as_ref().map_or(0, |r| r.len());
        let walked = self.walk_chain(walk, batch, &mut build, first, free);
        let first_seg = build.first();
        let taken =
            walked.and_then(|(id, ndesc)| build.finish(walk, batch, id, ndesc).map(|()| ndesc));
        match taken {
            Ok(ndesc) => Ok(ndesc),
            Err(stop) => {
                batch.segs.truncate(first_seg);
                if let Some(record) = &mut walk.record {
                    record.truncate(recorded);
                }
                Err(stop)
            }
        }
    }

    #[inline]
    fn is_available(&self, flags: u16) -> bool {
        (flags & F_AVAIL != 0) == self.avail.wrap && (flags & F_USED != 0) != self.avail.wrap
    }

    /// Walks a chain of at most `room` descriptors; returns its id and length.
    #[inline]
    fn walk_chain(
        &self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        build: &mut ChainBuilder,
        first: Desc,
        room: u16,
    ) -> Result<(u16, u16), Stop> {
        let (mut desc, mut place) = (first, self.avail);
        for ndesc in 1..=room {
            build.add(walk, batch, desc, place.at)?;
            if let Some(record) = &mut walk.record {
                record.push(desc);
            }
            if desc.flags & (F_NEXT | F_INDIRECT) != F_NEXT {
                // The last descriptor has the id, which may be any number (2.8.6).
                return Ok((desc.tail, ndesc));
            }
            place.advance(1, self.size);
            desc = self.parts.desc(place.at);
        }
        Err(too_long(build.head, u64::from(room), "descriptors"))
    }

    #[inline]
    pub fn unpop(&mut self, ndesc: u16) {
        self.avail.retreat(ndesc, self.size);
    }

    #[inline]
    pub fn push(&mut self, done: &[Completion]) {
        let Some((first, rest)) = done.split_first() else {
            return;
        };
        let start = self.used;
        let mut place = start;
        place.advance(self.step(first), self.size);
        for completion in rest {
            self.set_used(place, completion);
            place.advance(self.step(completion), self.size);
        }
        self.set_used(start, first);
        let count = start.distance(place, self.size);
        // Any full lap shows as distance `size`: the wrap counter differs, the offset does not.
        if let Some(n) = &mut self.unsignalled {
            *n = n.saturating_add(u32::from(count));
        }
        self.used = place;
    }

    /// Descriptors that a completion covers. A chain has 1 to `size` descriptors; anything else in
    /// the argument would be an engine's bug, which must not take us off the ring.
    #[inline]
    fn step(&self, completion: &Completion) -> u16 {
        completion.ndesc.clamp(1, self.size)
    }

    #[inline]
    fn set_used(&self, place: Place, completion: &Completion) {
        let written = if completion.written > 0 { F_WRITE } else { 0 };
        let lap = if place.wrap { F_AVAIL | F_USED } else { 0 };
        self.parts.set_used(place.at, completion.id, completion.written, lap | written);
    }

    /// Position after `push(done)`.
    #[inline]
    pub fn position_after(&self, done: &[Completion]) -> Position {
        let mut place = self.used;
        for completion in done {
            place.advance(self.step(completion), self.size);
        }
        Position { used: place.at, used_wrap: place.wrap, ..self.position() }
    }

    /// Flags of the descriptor at `index`, which is below the queue size.
    pub fn flags_at(&self, index: u16) -> u16 {
        self.parts.flags(index)
    }

    /// Whether the descriptor at `index` says "used" in the lap of `wrap`.
    pub fn is_used(&self, index: u16, wrap: bool) -> bool {
        (self.flags_at(index) & F_USED != 0) == wrap
    }

    /// Sets the position to `used`, with the next `in_flight` descriptors taken.
    pub fn restart(&mut self, used: u16, wrap: bool, in_flight: u16) {
        self.used = Place { at: used, wrap };
        self.avail = self.used;
        self.avail.advance(in_flight, self.size);
    }

    /// Finishes the publication of `done` that an earlier daemon began at our position and meant to
    /// end at `next`. Idempotent until its last store, which the driver waits for.
    pub fn finish(&mut self, next: Position, done: &[Completion]) -> Result<(), RingError> {
        let after = self.position_after(done);
        if (after.used, after.used_wrap) != (next.used, next.used_wrap) {
            return Err(RingError::BadStart { which: "saved", index: next.used, size: self.size });
        }
        // Published: the driver's side of the first descriptor says "used in this lap", or it was
        // made available again for the next lap, which leaves the used bit as it is.
        if self.is_used(self.used.at, self.used.wrap) {
            self.used = Place { at: next.used, wrap: next.used_wrap };
        } else {
            self.push(done);
        }
        self.avail = self.used;
        Ok(())
    }

    /// Marks the descriptors that `done` used from `used` on dirty.
    #[cold]
    pub fn log_used(&self, log: &DirtyLog, ring: u64, used: u16, done: &[Completion]) {
        let mut place = Place { at: used, wrap: true };
        for completion in done {
            log.mark(ring.saturating_add(16 * u64::from(place.at)), 16);
            place.advance(self.step(completion), self.size);
        }
    }

    /// The driver's wish to hear of what was pushed (2.8.10).
    #[inline]
    pub fn take_notify(&mut self) -> Wish {
        // A full fence, as in `SplitRing::take_notify`.
        fence(Ordering::SeqCst);
        let pushed = self.unsignalled.replace(0);
        let (off_wrap, flags) = self.parts.driver_event();
        match flags & 3 {
            EVENT_DISABLE => Wish::always(false),
            EVENT_DESC if self.event_idx => match pushed {
                Some(pushed) => {
                    let behind = self.pushed_since(off_wrap);
                    let is_wanted = behind > 0 && behind <= i64::from(pushed);
                    Wish { is_wanted, was_waiting: behind == i64::from(pushed) }
                }
                None => Wish { is_wanted: true, was_waiting: false },
            },
            _ => Wish::always(true),
        }
    }

    /// Whether the driver has taken all that was pushed and wants to hear of what comes next.
    #[inline]
    pub fn driver_waits(&self) -> bool {
        let (off_wrap, flags) = self.parts.driver_event();
        match flags & 3 {
            EVENT_DISABLE => false,
            EVENT_DESC if self.event_idx => self.pushed_since(off_wrap) == 0,
            _ => true,
        }
    }

    /// Used descriptors from the one at `off_wrap` on; less than one: it is not used yet.
    #[inline]
    fn pushed_since(&self, off_wrap: u16) -> i64 {
        let same_lap = (off_wrap & WRAP_BIT != 0) == self.used.wrap;
        let lap = if same_lap { 0 } else { i64::from(self.size) };
        let event = i64::from(off_wrap & !WRAP_BIT) - lap;
        i64::from(self.used.at) - event
    }

    /// Whether chains wait.
    pub fn has_work(&self) -> bool {
        self.used.distance(self.avail, self.size) != self.size
            && self.is_available(self.parts.flags(self.avail.at))
    }

    /// Turns kicks on, before a look at what waits already.
    pub fn enable_kicks(&mut self) {
        if self.event_idx {
            let wrap = if self.avail.wrap { WRAP_BIT } else { 0 };
            self.parts.set_device_event(Some(self.avail.at | wrap), EVENT_DESC);
        } else {
            self.parts.set_device_event(None, EVENT_ENABLE);
        }
        // A full fence, as in `SplitRing::enable_kicks`.
        fence(Ordering::SeqCst);
    }

    /// Turns kicks off.
    pub fn disable_kicks(&mut self) {
        self.parts.set_device_event(None, EVENT_DISABLE);
    }
}
