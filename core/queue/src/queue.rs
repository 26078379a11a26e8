//! The virtqueue, split or packed: descriptor chains in, completions out.

use std::sync::Arc;

use base::limits::MAX_QUEUE_SIZE;

use crate::batch::{Batch, ChainBuf};
use crate::dirty::DirtyLog;
use crate::error::RingError;
use crate::memory::{GuestMemory, Window};
use crate::packed::PackedRing;
use crate::parts::{Desc, SplitParts};
use crate::redelivery::{Redeliveries, Redelivery};
use crate::setup::{Completion, Layout, Position, RingSetup};
use crate::slot::{PositionSlot, SLOT_LOG_ENTRIES};
use crate::split::SplitRing;
use crate::walk::Walk;

#[derive(Debug)]
enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

/// A virtqueue without doorbells; [`crate::Vring`] adds them.
#[derive(Debug)]
pub struct Queue {
    memory: Arc<GuestMemory>,
    setup: RingSetup,
    /// Region of the last buffer; the next one usually is there, too.
    window: Window,
    ring: Ring,
    /// Requests that an earlier back end left unfinished.
    redeliveries: Redeliveries,
    /// Ring descriptors of the last popped chains, where an inflight region needs them.
    record: Option<Vec<Desc>>,
    /// Completions published since the last `take_notify`.
    unsignalled: u32,
    /// The driver had nothing left to take when the first of them came.
    was_waiting: bool,
}

impl Queue {
    /// Checks the setup (sizes, alignment, ranges, overlaps) and makes the queue.
    pub fn new(memory: Arc<GuestMemory>, setup: RingSetup) -> Result<Self, RingError> {
        check_size(&setup)?;
        let ring = match setup.layout {
            Layout::Split => Ring::Split(SplitRing::new(&memory, &setup)?),
            Layout::Packed => Ring::Packed(PackedRing::new(&memory, &setup)?),
        };
        memory.note_ring(setup.addrs.parts());
        Ok(Self {
            memory,
            setup,
            window: Window::NONE,
            ring,
            redeliveries: Redeliveries::default(),
            record: None,
            unsignalled: 0,
            was_waiting: false,
        })
    }

    /// Reads the used index of a split ring from guest memory: the `used` half of a start position,
    /// which vhost-user does not carry. For a packed ring it is `setup.start.used`.
    pub fn read_used_index(memory: &GuestMemory, setup: &RingSetup) -> Result<u16, RingError> {
        check_size(setup)?;
        match setup.layout {
            Layout::Split => Ok(SplitParts::find(memory, setup)?.used_idx()),
            Layout::Packed => Ok(setup.start.used),
        }
    }

    /// Takes over a queue that an earlier daemon served, in whatever instruction it was killed, for
    /// devices that complete in order: chains that were taken and not completed are taken again
    /// (`setup.start` is ignored). Split: the used index in guest memory is the truth. Packed: the
    /// slot is; a publication that was begun is finished first. A packed ring whose slot was never
    /// written goes on at `setup.start`.
    pub fn resume(
        memory: Arc<GuestMemory>,
        setup: RingSetup,
        slot: &PositionSlot,
    ) -> Result<Self, RingError> {
        if setup.layout == Layout::Split {
            let used = Self::read_used_index(&memory, &setup)?;
            let start = Position { avail: used, used, avail_wrap: true, used_wrap: true };
            return Self::new(memory, RingSetup { start, ..setup });
        }
        let Some(start) = slot.load() else {
            return Self::new(memory, setup);
        };
        let mut queue = Self::new(memory, RingSetup { start, ..setup })?;
        if let Ring::Packed(ring) = &mut queue.ring
            && let Some((next, done)) = slot.unfinished(setup.size)
        {
            ring.finish(next, &done)?;
            queue.log_used(start.used, &done);
            slot.commit(next);
        }
        Ok(queue)
    }

    /// Takes up to `max` available chains (and as many as `batch` has room for) into `batch`,
    /// after clearing it. Returns how many. An error means that the ring is broken: chains before
    /// the broken one are in the batch and may be completed.
    #[inline]
    pub fn pop(&mut self, batch: &mut Batch, max: usize) -> Result<usize, RingError> {
        // An empty ring costs one load, and no change of the memory table's reference count.
        if !self.has_work() {
            self.redeliveries.pass();
            batch.release();
            return Ok(0);
        }
        batch.begin(&self.memory);
        let max = max.min(batch.room());
        if let Some(record) = &mut self.record {
            record.clear();
        }
        let mut walk = Walk {
            memory: &self.memory,
            window: &mut self.window,
            indirect: self.setup.indirect,
            layout: self.setup.layout,
            record: self.record.as_mut(),
        };
        let again = self.redeliveries.is_pending();
        if !again {
            self.redeliveries.pass();
        }
        let result = match &mut self.ring {
            Ring::Split(ring) if again => self.redeliveries.pop_split(ring, &mut walk, batch, max),
            Ring::Packed(_) if again => self.redeliveries.pop_packed(&mut walk, batch, max),
            Ring::Split(ring) => ring.pop(&mut walk, batch, max),
            Ring::Packed(ring) => ring.pop(&mut walk, batch, max),
        };
        if batch.is_empty() {
            batch.release();
        }
        match result {
            Ok(()) => Ok(batch.len()),
            Err(error) => Err(*error),
        }
    }

    /// Gives the last `n` chains of `batch` back, untouched: the next pop returns them again. Only
    /// for the batch that was popped last, and only while none of the `n` has been completed.
    pub fn unpop(&mut self, batch: &mut Batch, n: usize) {
        let keep = batch.len().saturating_sub(n);
        let again = self.redeliveries.is_delivering();
        if again {
            self.redeliveries.unpop(batch.len() - keep);
        }
        for entry in &batch.entries[keep..] {
            match &mut self.ring {
                _ if again => {}
                Ring::Split(ring) => ring.unpop(),
                Ring::Packed(ring) => ring.unpop(entry.ndesc),
            }
        }
        if let Some(entry) = batch.entries.get(keep) {
            batch.segs.truncate(entry.first_seg as usize);
        }
        batch.entries.truncate(keep);
        batch.faulty = batch.faulty.filter(|(at, _)| *at < keep);
    }

    /// Publishes completions, in the order given, all visible at once to the driver. The caller
    /// answers for `written`: a length above what was really written would hand the guest stale
    /// bytes of its own memory as if they were data.
    #[inline]
    pub fn push(&mut self, done: &[Completion]) {
        if done.is_empty() {
            return;
        }
        let before = self.position();
        match &mut self.ring {
            Ring::Split(ring) => ring.push(done),
            Ring::Packed(ring) => ring.push(done),
        }
        self.unsignalled = self.unsignalled.saturating_add(done.len() as u32);
        self.log_used(before.used, done);
    }

    /// Publishes as [`Queue::push`], and keeps `slot` such that [`Queue::resume`] can go on from
    /// every instruction in between.
    #[inline]
    pub(crate) fn push_saved(&mut self, done: &[Completion], slot: &PositionSlot) {
        if let Ring::Split(_) = self.ring {
            self.push(done);
            slot.commit(self.position());
            return;
        }
        for part in done.chunks(SLOT_LOG_ENTRIES) {
            if let Ring::Packed(ring) = &self.ring {
                slot.announce(ring.position_after(part), part);
            }
            self.push(part);
            slot.commit(self.position());
        }
    }

    /// Marks what `push` wrote dirty, while a migration logs.
    #[inline]
    fn log_used(&self, used: u16, done: &[Completion]) {
        if let (Some(log), Some(base)) = (self.memory.log(), self.setup.log_used_addr) {
            match &self.ring {
                Ring::Split(ring) => ring.log_used(log, base, used, done.len()),
                Ring::Packed(ring) => ring.log_used(log, self.setup.addrs.desc, used, done),
            }
        }
    }

    /// Marks the first `written` bytes of a chain's writable part dirty (only does something while
    /// a migration logs).
    #[inline]
    pub fn mark_written(&self, writable: &[crate::Seg], written: usize) {
        if let Some(log) = self.memory.log() {
            mark_segs(&self.memory, log, writable, written);
        }
    }

    /// Marks as [`Queue::mark_written`], for a chain that was held: its memory table may be an
    /// older one.
    #[inline]
    pub fn mark_held(&self, held: &ChainBuf, written: usize) {
        if let (Some(log), Some(memory)) = (self.memory.log(), &held.memory) {
            mark_segs(memory, log, held.chain().writable, written);
        }
    }

    /// Whether the driver wants a notification for what was pushed since the last call.
    #[inline]
    pub fn take_notify(&mut self) -> bool {
        if self.unsignalled == 0 {
            return false;
        }
        self.unsignalled = 0;
        let wish = match &mut self.ring {
            Ring::Split(ring) => ring.take_notify(),
            Ring::Packed(ring) => ring.take_notify(),
        };
        self.was_waiting = wish.was_waiting;
        wish.is_wanted
    }

    /// Whether the driver had taken all that there was before, as [`Queue::driver_waits`] says it,
    /// when the last [`Queue::take_notify`] found something new. That one has looked already.
    #[inline]
    pub fn driver_waited(&self) -> bool {
        self.was_waiting
    }

    /// Whether the driver has taken all that was pushed and wants to hear of what comes next: its
    /// interrupt handler has come to an end. A driver that turns notifications neither off nor on
    /// seems to wait always. It may change its mind at any time.
    #[inline]
    pub fn driver_waits(&self) -> bool {
        match &self.ring {
            Ring::Split(ring) => ring.driver_waits(),
            Ring::Packed(ring) => ring.driver_waits(),
        }
    }

    /// Whether anything was pushed since the last [`Queue::take_notify`].
    #[inline]
    pub(crate) fn has_unsignalled(&self) -> bool {
        self.unsignalled != 0
    }

    /// Whether chains wait to be popped, as the driver says: popping them may fail.
    pub fn has_work(&self) -> bool {
        let available = match &self.ring {
            Ring::Split(ring) => ring.has_work(),
            Ring::Packed(ring) => ring.has_work(),
        };
        available || self.redeliveries.is_pending()
    }

    /// Asks the driver for kicks. True when chains are (already) available: do not sleep.
    pub fn enable_kicks(&mut self) -> bool {
        match &mut self.ring {
            Ring::Split(ring) => ring.enable_kicks(),
            Ring::Packed(ring) => ring.enable_kicks(),
        }
        self.log_event();
        self.has_work()
    }

    /// Tells the driver that kicks are not needed.
    pub fn disable_kicks(&mut self) {
        match &mut self.ring {
            Ring::Split(ring) => ring.disable_kicks(),
            Ring::Packed(ring) => ring.disable_kicks(),
        }
        self.log_event();
    }

    /// Marks the part that tells the driver about kicks dirty, while a migration logs.
    fn log_event(&self) {
        if let (Some(log), Some(base)) = (self.memory.log(), self.setup.log_used_addr) {
            match &self.ring {
                Ring::Split(_) => {
                    log.mark(base, 2);
                    log.mark(base.saturating_add(4 + 8 * u64::from(self.setup.size)), 2);
                }
                Ring::Packed(_) => log.mark(self.setup.addrs.device, 4),
            }
        }
    }

    /// Position of the ring.
    #[inline]
    pub fn position(&self) -> Position {
        match &self.ring {
            Ring::Split(ring) => ring.position(),
            Ring::Packed(ring) => ring.position(),
        }
    }

    /// Number of descriptors.
    #[inline]
    pub fn size(&self) -> u16 {
        self.setup.size
    }

    /// The memory table.
    pub fn memory(&self) -> &Arc<GuestMemory> {
        &self.memory
    }

    /// Setup of the queue, with its position now.
    pub fn setup(&self) -> RingSetup {
        RingSetup { start: self.position(), ..self.setup }
    }

    /// Sets (or ends) the logging of writes to the used ring: `SET_VRING_ADDR` with
    /// `VHOST_VRING_F_LOG` while the queue runs.
    pub fn set_log_used(&mut self, log_used_addr: Option<u64>) {
        self.setup.log_used_addr = log_used_addr;
    }

    /// Fails when the memory behind the queue was truncated.
    pub(crate) fn check_intact(&self) -> Result<(), RingError> {
        self.memory
            .check_intact()
            .map_err(|source| RingError::Memory { place: "guest memory", source })
    }

    /// Moves the queue to a changed memory table. Fails (and the queue must stop) when its rings
    /// are no longer in it.
    pub fn set_memory(&mut self, memory: Arc<GuestMemory>) -> Result<(), RingError> {
        match &mut self.ring {
            Ring::Split(ring) => ring.move_to(&memory, &self.setup)?,
            Ring::Packed(ring) => ring.move_to(&memory, &self.setup)?,
        }
        self.window = Window::NONE;
        memory.note_ring(self.setup.addrs.parts());
        self.memory = memory;
        Ok(())
    }
}

/// Access for the inflight region.
impl Queue {
    /// The ring's format.
    pub(crate) fn layout(&self) -> Layout {
        self.setup.layout
    }

    /// Available and used index of a split ring, as they are in guest memory. Packed: zeroes.
    pub(crate) fn read_split_indices(&self) -> (u16, u16) {
        match &self.ring {
            Ring::Split(ring) => ring.read_indices(),
            Ring::Packed(_) => (0, 0),
        }
    }

    /// Whether the packed descriptor at `index` (below the size) was used in the lap of `wrap`.
    pub(crate) fn packed_is_used(&self, index: u16, wrap: bool) -> bool {
        match &self.ring {
            Ring::Split(_) => false,
            Ring::Packed(ring) => ring.is_used(index, wrap),
        }
    }

    /// Position of a packed ring after `push` of this completion.
    #[inline]
    pub(crate) fn packed_position_after(&self, done: &Completion) -> Position {
        match &self.ring {
            Ring::Split(ring) => ring.position(),
            Ring::Packed(ring) => ring.position_after(std::slice::from_ref(done)),
        }
    }

    /// Sets the position to `used`, with `requests` in flight, which are delivered again first.
    pub(crate) fn resubmit(&mut self, used: u16, wrap: bool, requests: Vec<Redelivery>) {
        match &mut self.ring {
            Ring::Split(ring) => ring.restart(used, requests.len() as u16),
            Ring::Packed(ring) => {
                let in_flight: usize = requests.iter().map(|r| r.descs.len()).sum();
                ring.restart(used, wrap, in_flight as u16);
            }
        }
        self.redeliveries = Redeliveries::new(requests);
    }

    /// Starts to keep the ring descriptors of popped chains until the next pop.
    pub(crate) fn start_recording(&mut self) {
        self.record = Some(Vec::with_capacity(usize::from(self.setup.size)));
    }

    /// The ring descriptors of the chains popped last, in order.
    #[inline]
    pub(crate) fn recorded(&self) -> &[Desc] {
        self.record.as_deref().unwrap_or(&[])
    }

    /// Whether the last pop delivered what an earlier back end left.
    #[inline]
    pub(crate) fn is_redelivering(&self) -> bool {
        self.redeliveries.is_delivering()
    }
}

fn check_size(setup: &RingSetup) -> Result<(), RingError> {
    let bad =
        |rule| Err(RingError::BadSize { size: u32::from(setup.size), rule, limit: MAX_QUEUE_SIZE });
    match setup.layout {
        Layout::Split if !setup.size.is_power_of_two() => bad("a power of two"),
        _ if setup.size == 0 || setup.size > MAX_QUEUE_SIZE => bad("above 0"),
        _ => Ok(()),
    }
}

#[cold]
fn mark_segs(memory: &GuestMemory, log: &DirtyLog, writable: &[crate::Seg], written: usize) {
    let mut left = written;
    for seg in writable {
        let len = seg.len.min(left);
        if let Some(addr) = memory.host_to_guest(seg.ptr) {
            log.mark(addr, len as u64);
        }
        left -= len;
    }
}
