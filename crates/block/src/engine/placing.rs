//! A queue's writes that stand for a pipe's bytes: see [`crate::placed`].
//!
//! A write whose first sector is a placeholder is looked at in steps as long as those that data is
//! written in, and each is charged as one: it costs about as much, and others have their turn in
//! between. The write is offered when all of it was looked at. From then on it waits with its slot and
//! nothing else, like an operation with the disk. One that turns out to be ordinary begins there and
//! then, and pays like any other; what it paid for earlier looks is lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sidecore::Watcher;

use super::Engine;
use crate::cost;
use crate::flight::Sent;
use crate::placed::{Answers, Head, PlacedWrite, Places, are_placeholders};
use crate::request::{HEADER_LEN_BYTES, Status};

/// What a queue needs for it; see [`crate::BlockPort::set_placeholders`].
pub(crate) struct Placing {
    pub places: Arc<Places>,
    /// Stays with the queue: answers to what an earlier `places` took come here too.
    pub answers: Arc<Answers>,
    /// Writes that were taken and are not answered yet.
    pub parked: usize,
}

impl Engine {
    /// Offers placed writes from now on. What is not needed any more comes back, to be dropped
    /// elsewhere.
    pub fn set_places(
        &mut self,
        places: Arc<Places>,
        answers: Arc<Answers>,
        watcher: Option<&Watcher<'_>>,
    ) -> std::io::Result<Option<(Arc<Places>, Arc<Answers>)>> {
        if let Some(placing) = &mut self.placing {
            return Ok(Some((std::mem::replace(&mut placing.places, places), answers)));
        }
        if let Some(watcher) = watcher {
            watcher.watch(std::os::fd::AsRawFd::as_raw_fd(&answers.event))?;
        }
        self.placing = Some(Placing { places, answers, parked: 0 });
        Ok(None)
    }

    /// Whether writes are looked at now: asked once for a batch, and after it was taken from the ring.
    /// Who knows a tag before the guest writes it is known to us then.
    pub(super) fn are_placeholders_known(&self) -> bool {
        self.placing.as_ref().is_some_and(|p| p.places.knows.are_any())
    }

    /// A write begins: notes what its first sector says if it is a placeholder.
    pub(super) fn look_first(&mut self, slot: u16) {
        let Some(placing) = &self.placing else { return };
        let s = &mut self.flight.slab.slots[usize::from(slot)];
        let range = s.job.range;
        if !(range.offset | range.len).is_multiple_of(placing.places.align_bytes) {
            return;
        }
        let head = Head::of_first(s.chain.chain().readable, HEADER_LEN_BYTES, range.len);
        if let Some(head) = head {
            (s.head, s.looked) = (head, 0);
            s.job.is_suspect = true;
        }
    }

    /// Looks at the next part of such a write. None: it is an ordinary one. Else it has gone from the
    /// front of those that wait for the disk: to their end, or to who takes it.
    pub(super) fn look_on(&mut self, slot: u16) -> Option<Sent> {
        let longest = {
            let job = &self.flight.slab.slots[usize::from(slot)].job;
            cost::longest_step(job, &self.port, self.flight.step_len_bytes)
        };
        let s = &mut self.flight.slab.slots[usize::from(slot)];
        let left = s.job.range.len - s.looked;
        let len = left.min(longest);
        let readable = s.chain.chain().readable;
        let goes_on = are_placeholders(readable, HEADER_LEN_BYTES, &s.head, s.looked, len);
        s.looked += len;
        if !goes_on || (len == left && !self.park(slot)) {
            self.flight.slab.slots[usize::from(slot)].job.is_suspect = false;
            return None;
        }
        self.flight.slab.ready.pop_front();
        if len < left {
            self.flight.slab.ready.push_back(slot);
        }
        let job = &mut self.flight.slab.slots[usize::from(slot)].job;
        job.is_suspect = len < left;
        let cost = cost::of_step(job, len, self.port.demands.within_call());
        let paid = job.paid.min(cost);
        job.paid -= paid;
        Some(Sent { bytes: len, due: cost - paid })
    }

    /// Offers a write; true when it was taken.
    fn park(&mut self, slot: u16) -> bool {
        let Some(placing) = &mut self.placing else { return false };
        let s = &mut self.flight.slab.slots[usize::from(slot)];
        let range = (s.job.range.offset, s.job.range.len);
        s.synced = !self.port.writeback.load(Ordering::Relaxed);
        let place = Arc::clone(&placing.places.place);
        let own = (Arc::clone(&placing.answers), slot);
        let write = PlacedWrite::new(s.head, range, s.synced, place, own);
        match placing.places.knows.take(write) {
            Some(back) if back.is_of(&placing.answers, slot) => {
                back.forget();
                false
            }
            // Another one than was offered would be a mistake of theirs, and fails where it belongs.
            _ => {
                s.job.is_parked = true;
                placing.parked += 1;
                true
            }
        }
    }

    /// Takes in the answers that have come. Returns how many.
    pub(super) fn collect_placed(&mut self) -> usize {
        let Some(placing) = self.placing.as_ref().filter(|p| p.parked > 0) else { return 0 };
        self.done.clear();
        placing.answers.reap(&mut self.done);
        for k in 0..self.done.len() {
            let done = self.done[k];
            self.answered(done.token as u16, done.result.err());
        }
        self.done.len()
    }

    fn answered(&mut self, slot: u16, errno: Option<i32>) {
        let s = &mut self.flight.slab.slots[usize::from(slot)];
        if !std::mem::take(&mut s.job.is_parked) {
            return;
        }
        let synced = s.synced;
        if let Some(placing) = &mut self.placing {
            placing.parked -= 1;
        }
        if let Some(errno) = errno {
            return self.fail(slot, errno);
        }
        self.stats.placed.add(1);
        if !synced && !self.port.writeback.load(Ordering::Relaxed) {
            // The cache was switched off meanwhile: as for a write that the disk did.
            self.flight.slab.slots[usize::from(slot)].job.flushing = true;
            return self.flight.slab.ready.push_front(slot);
        }
        self.finish(slot, Status::Ok);
    }

    /// Before a sleep, and after it.
    pub(super) fn set_wakeups(&mut self, on: bool) {
        self.flight.disk.set_wakeups(on);
        if let Some(placing) = &self.placing {
            placing.answers.set_wakeups(on);
        }
    }
}
