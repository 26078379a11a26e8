//! The split ring (virtio 2.7): positions, and the rules of taking and giving back.

use std::sync::atomic::{Ordering, fence};

use crate::batch::Batch;
use crate::dirty::DirtyLog;
use crate::error::RingError;
use crate::memory::GuestMemory;
use crate::parts::{AHEAD, Desc, SplitParts};
use crate::setup::{Completion, Position, RingSetup, Wish};
use crate::walk::{ChainBuilder, F_INDIRECT, F_NEXT, Stop, Walk, add_single, too_long};

/// `VIRTQ_AVAIL_F_NO_INTERRUPT` and `VIRTQ_USED_F_NO_NOTIFY` (2.7.6, 2.7.8).
const F_QUIET: u16 = 1;

#[derive(Debug)]
pub(crate) struct SplitRing {
    parts: SplitParts,
    size: u16,
    event_idx: bool,
    next_avail: u16,
    next_used: u16,
    /// `next_used` at the last look at the driver's event suppression; none at the start, when the
    /// notification of an earlier daemon may be missing.
    signalled_used: Option<u16>,
}

impl SplitRing {
    pub fn new(memory: &GuestMemory, setup: &RingSetup) -> Result<Self, RingError> {
        let parts = SplitParts::find(memory, setup)?;
        let (avail, seen, size) = (setup.start.avail, setup.start.used, setup.size);
        let ahead = avail.wrapping_sub(seen);
        if ahead > size {
            return Err(RingError::BadBase { base: avail, used: seen, ahead, size });
        }
        Ok(Self {
            parts,
            size,
            event_idx: setup.event_idx,
            next_avail: avail,
            next_used: seen,
            signalled_used: None,
        })
    }

    pub fn move_to(&mut self, memory: &GuestMemory, setup: &RingSetup) -> Result<(), RingError> {
        self.parts = SplitParts::find(memory, setup)?;
        Ok(())
    }

    #[inline]
    pub fn position(&self) -> Position {
        Position { avail: self.next_avail, used: self.next_used, avail_wrap: true, used_wrap: true }
    }

    /// Appends up to `max` chains to the batch.
    #[inline]
    pub fn pop(
        &mut self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        max: usize,
    ) -> Result<(), Box<RingError>> {
        let pending = self.pending()?;
        let count = usize::from(pending).min(max);
        for at in 0..AHEAD.min(count as u16) {
            self.parts.prefetch(self.parts.avail_entry(self.next_avail.wrapping_add(at)));
        }
        for at in 0..count {
            if at + usize::from(AHEAD) < count {
                let next = self.parts.avail_entry(self.next_avail.wrapping_add(AHEAD));
                self.parts.prefetch(next);
            }
            let head = self.parts.avail_entry(self.next_avail);
            match self.take(walk, batch, head) {
                Ok(()) => self.next_avail = self.next_avail.wrapping_add(1),
                Err(Stop::Full) => break,
                Err(Stop::Broken(error)) => return Err(error),
            }
        }
        Ok(())
    }

    /// Number of chains that wait. With those in flight they cannot be more than the queue holds.
    #[inline]
    fn pending(&self) -> Result<u16, Box<RingError>> {
        let avail = self.parts.avail_idx();
        let pending = avail.wrapping_sub(self.next_avail);
        let in_flight = self.next_avail.wrapping_sub(self.next_used);
        if u32::from(pending) + u32::from(in_flight) > u32::from(self.size) {
            return Err(Box::new(RingError::AvailJump {
                avail,
                seen: self.next_avail,
                ahead: pending,
                size: self.size,
            }));
        }
        Ok(pending)
    }

    /// Appends the chain at `head` to the batch, or leaves the batch as it was.
    #[inline]
    pub fn take(&self, walk: &mut Walk<'_>, batch: &mut Batch, head: u16) -> Result<(), Stop> {
        if head >= self.size {
            return Err(RingError::BadIndex { index: head, size: self.size }.into());
        }
        let first = self.parts.desc(head);
        if add_single(walk, batch, head, first) {
            return Ok(());
        }
        self.take_chain(walk, batch, head, first)
    }

    fn take_chain(
        &self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        head: u16,
        first: Desc,
    ) -> Result<(), Stop> {
        let mut build = ChainBuilder::new(batch, head);
        match self.walk_chain(walk, batch, &mut build, first) {
            Ok(ndesc) => build.finish(walk, batch, head, ndesc),
            Err(stop) => {
                batch.segs.truncate(build.first());
                Err(stop)
            }
        }
    }

    #[inline]
    fn walk_chain(
        &self,
        walk: &mut Walk<'_>,
        batch: &mut Batch,
        build: &mut ChainBuilder,
        first: Desc,
    ) -> Result<u16, Stop> {
        let (mut index, mut desc) = (build.head, first);
        // A chain visits each descriptor at most once: more steps than descriptors are a loop.
        for ndesc in 1..=self.size {
            build.add(walk, batch, desc, index)?;
            if desc.flags & (F_NEXT | F_INDIRECT) != F_NEXT {
                return Ok(ndesc);
            }
            index = desc.tail;
            if index >= self.size {
                return Err(RingError::BadIndex { index, size: self.size }.into());
            }
            desc = self.parts.desc(index);
        }
        Err(too_long(build.head, u64::from(self.size), "descriptors"))
    }

    /// Available index of the driver, and used index of the device, as they are in guest memory.
    pub fn read_indices(&self) -> (u16, u16) {
        (self.parts.avail_idx(), self.parts.used_idx())
    }

    /// Sets the position to `used`, with the next `in_flight` chains taken.
    pub fn restart(&mut self, used: u16, in_flight: u16) {
        self.next_used = used;
        self.next_avail = used.wrapping_add(in_flight);
    }

    #[inline]
    pub fn unpop(&mut self) {
        self.next_avail = self.next_avail.wrapping_sub(1);
    }

    #[inline]
    pub fn push(&mut self, done: &[Completion]) {
        for completion in done {
            self.parts.set_used(self.next_used, completion.id, completion.written);
            self.next_used = self.next_used.wrapping_add(1);
        }
        self.parts.set_used_idx(self.next_used);
    }

    /// Marks the used elements `used..used + count` and the index dirty.
    #[cold]
    pub fn log_used(&self, log: &DirtyLog, base: u64, used: u16, count: usize) {
        for i in 0..count.min(usize::from(self.size)) {
            let at = used.wrapping_add(i as u16) & (self.size - 1);
            log.mark(base.saturating_add(4 + 8 * u64::from(at)), 8);
        }
        log.mark(base.saturating_add(2), 2);
    }

    /// The driver's wish to hear of what was pushed (2.7.7.2, 2.7.10).
    #[inline]
    pub fn take_notify(&mut self) -> Wish {
        // The driver publishes its wish and then looks at our index; we publish our index and then
        // look at its wish. Without the fence both could see the past, and the driver would sleep.
        fence(Ordering::SeqCst);
        if !self.event_idx {
            return Wish::always(self.parts.avail_flags() & F_QUIET == 0);
        }
        let Some(old) = self.signalled_used.replace(self.next_used) else {
            return Wish { is_wanted: true, was_waiting: false };
        };
        let event = self.parts.used_event();
        let (past_event, pushed) =
            (self.next_used.wrapping_sub(event).wrapping_sub(1), self.next_used.wrapping_sub(old));
        Wish { is_wanted: past_event < pushed, was_waiting: event == old }
    }

    /// Whether the driver has taken all that was pushed and wants to hear of what comes next.
    #[inline]
    pub fn driver_waits(&self) -> bool {
        match self.event_idx {
            true => self.parts.used_event() == self.next_used,
            false => self.parts.avail_flags() & F_QUIET == 0,
        }
    }

    /// Whether chains wait.
    pub fn has_work(&self) -> bool {
        self.parts.avail_idx() != self.next_avail
    }

    /// Turns kicks on, before a look at what waits already.
    pub fn enable_kicks(&mut self) {
        if self.event_idx {
            self.parts.set_avail_event(self.next_avail);
        } else {
            self.parts.set_used_flags(0);
        }
        // As in `take_notify`, with the roles exchanged.
        fence(Ordering::SeqCst);
    }

    /// Turns kicks off. With EVENT_IDX there is nothing to do: the event index stays behind, and
    /// the driver kicks at most once when it passes it.
    pub fn disable_kicks(&mut self) {
        if !self.event_idx {
            self.parts.set_used_flags(F_QUIET);
        }
    }
}
