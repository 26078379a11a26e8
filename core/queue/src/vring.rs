//! A virtqueue with its doorbells, counters and saved position: what device engines hold.

use std::os::fd::RawFd;
use std::sync::Arc;

use base::counter::QueueStats;
use base::doorbell::Doorbell;

use crate::batch::{Batch, Chain};
use crate::error::RingError;
use crate::health::PortHealth;
use crate::inflight::{InflightRegion, Tracker};
use crate::queue::Queue;
use crate::setup::{Completion, Position};
use crate::sigbus;
use crate::slot::PositionSlot;

/// Parts of a [`Vring`] besides its queue.
#[derive(Debug)]
pub struct VringParts {
    /// Index in the device.
    pub index: u16,
    /// Driver → device doorbell; none when the front end wants us to poll.
    pub kick: Option<Doorbell>,
    /// Device → driver doorbell; none when the driver polls.
    pub call: Option<Doorbell>,
    /// Doorbell that reports a broken ring to the VMM.
    pub err: Option<Doorbell>,
    /// Counters.
    pub stats: Arc<QueueStats>,
    /// Health of the port.
    pub health: Arc<PortHealth>,
    /// Slot in which the position is saved for the next daemon.
    pub slot: Option<PositionSlot>,
    /// Inflight tracking, when negotiated.
    pub inflight: Option<Arc<InflightRegion>>,
}

impl VringParts {
    /// Logs a receive buffer that cannot be filled and goes back empty. The port's limit of lines
    /// applies: a limit of the queue would begin anew whenever the front end starts the queue
    /// again.
    #[cold]
    pub fn log_unfilled(&self, chain: &Chain<'_>) {
        let Some(left_out) = self.health.log().admit() else { return };
        tracing::warn!(
            port = self.health.name(),
            queue = self.index,
            left_out,
            "a receive buffer went back empty: {} pieces, {:?}",
            chain.segs(),
            chain.fault
        );
    }
}

/// Notification coalescing: how long completions may wait for a common notification.
#[derive(Debug, Clone, Copy)]
pub struct Coalescing {
    /// Completions that wait at most: with this many the driver is notified.
    pub max_pending: u32,
    /// Longest wait of the oldest completion.
    pub max_wait_ns: u64,
}

/// Completions of which the driver has not been notified.
#[derive(Debug, Default)]
struct Unnotified {
    count: u32,
    /// Time at which the first of them was seen waiting.
    since_ns: Option<u64>,
    /// Time of the last notification for another queue whose handler looks at this one too.
    postponed_ns: u64,
}

impl Unnotified {
    fn due_ns(&self, coalescing: Coalescing) -> Option<u64> {
        let since_ns = self.since_ns.filter(|_| self.count > 0)?;
        let latest_ns = since_ns + MAX_POSTPONED_WAITS * coalescing.max_wait_ns;
        let from_ns = self.postponed_ns.clamp(since_ns, latest_ns);
        Some(from_ns.saturating_add(coalescing.max_wait_ns))
    }
}

/// Limit of postponement, in multiples of the wait: a driver that does not look at this queue when
/// it is notified for another one must not wait for ever.
const MAX_POSTPONED_WAITS: u64 = 3;

/// A virtqueue with its doorbells, its counters and its saved position.
#[derive(Debug)]
pub struct Vring {
    /// The queue.
    pub queue: Queue,
    /// Doorbells, counters, health, saved position.
    pub parts: VringParts,
    /// Number of SIGBUS faults of the process at the last check of this queue's memory.
    faults_seen: u64,
    tracker: Option<Tracker>,
    unnotified: Unnotified,
}

impl Vring {
    /// Joins a queue and its parts. With an inflight region: re-reads it, so that the first pops
    /// return the requests that an earlier back end took and did not complete (in their order), and
    /// finishes a half-done completion.
    ///
    /// A queue that does not start fresh rings the driver once: an earlier back end may have died
    /// between publishing and notifying.
    pub fn new(mut queue: Queue, parts: VringParts) -> Result<Self, RingError> {
        let tracker = match &parts.inflight {
            Some(region) => Some(Tracker::attach(Arc::clone(region), parts.index, &mut queue)?),
            None => None,
        };
        if let Some(slot) = &parts.slot {
            slot.begin(queue.position());
        }
        let unnotified = Unnotified::default();
        let mut vring = Self { queue, parts, faults_seen: 0, tracker, unnotified };
        if vring.queue.position() != Position::fresh() {
            vring.ring_driver();
        }
        Ok(vring)
    }

    /// Pops as [`Queue::pop`]; counts batches and requests, records inflight. A broken ring breaks
    /// the port (see [`PortHealth`]), is reported on the err event, and yields 0 from then on (the
    /// chains before the broken one are returned first).
    #[inline]
    pub fn pop(&mut self, batch: &mut Batch, max: usize) -> usize {
        if !self.parts.health.is_live() || !self.is_intact() {
            batch.release();
            return 0;
        }
        let popped = match self.queue.pop(batch, max) {
            Ok(n) => n,
            Err(error) => {
                self.fail(&error);
                batch.len()
            }
        };
        if popped > 0 && !self.track(batch) {
            return 0;
        }
        if popped > 0 {
            self.parts.stats.batches.add(1);
            self.parts.stats.requests.add(popped as u64);
        }
        popped
    }

    /// Records the popped chains in the inflight region. False when that broke the port.
    #[inline]
    fn track(&mut self, batch: &mut Batch) -> bool {
        let Some(tracker) = &mut self.tracker else {
            return true;
        };
        if self.queue.is_redelivering() {
            // Recorded already, by the back end that took them first.
            return true;
        }
        match tracker.record_pop(batch, &self.queue) {
            Ok(()) => true,
            Err(error) => {
                batch.release();
                self.fail(&error);
                false
            }
        }
    }

    /// Whether the queue's memory is intact. One load while there was no fault; a look at the
    /// memory table after a fault anywhere in the process.
    #[inline]
    fn is_intact(&mut self) -> bool {
        let faults = sigbus::fault_count();
        if faults == self.faults_seen {
            return true;
        }
        self.faults_seen = faults;
        if self.tracker.as_ref().is_some_and(Tracker::was_truncated) {
            self.fail(&RingError::BadInflight("truncated by its owner".into()));
            return false;
        }
        match self.queue.check_intact() {
            Ok(()) => true,
            Err(error) => {
                self.fail(&error);
                false
            }
        }
    }

    /// Gives chains back as [`Queue::unpop`].
    pub fn unpop(&mut self, batch: &mut Batch, n: usize) {
        let before = batch.len();
        if let Some(tracker) = &mut self.tracker
            && !self.queue.is_redelivering()
        {
            tracker.record_unpop(batch, before.saturating_sub(n));
        }
        self.queue.unpop(batch, n);
        let given_back = (before - batch.len()) as u64;
        let requests = &self.parts.stats.requests;
        requests.set(requests.get().saturating_sub(given_back));
    }

    /// Publishes as [`Queue::push`], then saves the position and clears the inflight records.
    #[inline]
    pub fn push(&mut self, done: &[Completion]) {
        self.unnotified.count = self.unnotified.count.saturating_add(done.len() as u32);
        match (&mut self.tracker, &self.parts.slot) {
            // The region knows more than the slot: requests that finish out of order.
            (Some(tracker), _) => tracker.push(done, &mut self.queue),
            (None, Some(slot)) => self.queue.push_saved(done, slot),
            (None, None) => self.queue.push(done),
        }
    }

    /// Notifies the driver if it wants it (counted either way). Call once per batch, after pushes.
    #[inline]
    pub fn notify(&mut self) {
        (self.unnotified.count, self.unnotified.since_ns) = (0, None);
        if !self.queue.has_unsignalled() {
            return;
        }
        if self.queue.take_notify() {
            self.parts.stats.notifications_sent.add(1);
            self.ring_driver();
        } else {
            self.parts.stats.notifications_suppressed.add(1);
        }
    }

    /// Notifies as [`Vring::notify`], but lets completions gather first. Call it in every poll,
    /// with or without new completions, and wake by [`Vring::notify_due_ns`].
    #[inline]
    pub fn notify_coalesced(&mut self, now_ns: u64, coalescing: Coalescing) {
        if self.unnotified.count == 0 {
            return;
        }
        self.unnotified.since_ns.get_or_insert(now_ns);
        let max_pending = coalescing.max_pending.min(u32::from(self.queue.size()) / 4);
        let is_due = self.unnotified.due_ns(coalescing).is_some_and(|due_ns| now_ns >= due_ns);
        if self.unnotified.count >= max_pending || is_due {
            self.notify();
        }
    }

    /// Time at which the driver must be notified of the completions that wait; none when none wait.
    pub fn notify_due_ns(&self, coalescing: Coalescing) -> Option<u64> {
        self.unnotified.due_ns(coalescing)
    }

    /// Number of completions that were pushed and of which the driver has not been notified.
    pub fn unnotified(&self) -> u32 {
        self.unnotified.count
    }

    /// Lets completions wait anew: the driver was just notified for another queue, and the handler
    /// of that one looks at this one too.
    #[inline]
    pub fn postpone_notify(&mut self, now_ns: u64) {
        self.unnotified.postponed_ns = now_ns;
    }

    /// Rings the driver's call doorbell. One that fails breaks the port and is not rung again.
    fn ring_driver(&mut self) {
        if let Some(call) = &self.parts.call
            && let Err(error) = call.ring()
        {
            let index = self.parts.index;
            self.parts.health.fail(Some(index), &format_args!("call doorbell: {error}"));
            self.parts.call = None;
        }
    }

    /// Counts a kick: the engine calls this when the kick descriptor fired. Reads nothing: the
    /// descriptor is watched edge-triggered.
    pub fn count_kick(&self) {
        self.parts.stats.kicks.add(1);
    }

    /// Whether a [`Vring::pop`] would find chains. As it does, it breaks the port when the queue's
    /// memory is not intact.
    #[inline]
    pub fn has_chains(&mut self) -> bool {
        self.parts.health.is_live() && self.is_intact() && self.queue.has_work()
    }

    /// Whether chains wait, as [`Queue::has_work`]; false when the port is broken.
    pub fn has_work(&self) -> bool {
        self.parts.health.is_live() && self.queue.has_work()
    }

    /// Asks for kicks, before a sleep. True when work is there already, and always where the front
    /// end gave no kick doorbell to wake by.
    pub fn arm(&mut self) -> bool {
        if !self.parts.health.is_live() {
            return false;
        }
        self.queue.enable_kicks() || self.parts.kick.is_none()
    }

    /// Turns kicks off, after a sleep.
    pub fn disarm(&mut self) {
        if self.parts.health.is_live() {
            self.queue.disable_kicks();
        }
    }

    /// Descriptor to watch for kicks.
    pub fn kick_fd(&self) -> Option<RawFd> {
        use std::os::fd::AsRawFd;
        self.parts.kick.as_ref().map(|k| k.as_raw_fd())
    }

    /// Breaks the port for a reason found by a device engine.
    #[cold]
    pub fn fail(&mut self, error: &RingError) {
        // Memory that is gone reads as zeroes: a fault found in it was not written by the driver.
        // It is the memory of the whole VM, so the number of the queue that met it first is left
        // out.
        let gone = self.queue.check_intact().err();
        let queue = gone.is_none().then_some(self.parts.index);
        self.parts.health.fail(queue, gone.as_ref().unwrap_or(error));
        if let Some(err) = &self.parts.err
            && err.ring().is_err()
        {
            // The VMM was told as far as it can be; the port has stopped either way.
            self.parts.err = None;
        }
    }
}
