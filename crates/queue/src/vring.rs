//! A virtqueue with its doorbells, counters and saved position: what device engines hold.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

use base::counter::QueueStats;
use base::doorbell::Doorbell;
use base::event::Event;
use base::log_limit::LogLimit;
use base::sync::lock;

use crate::batch::{Batch, Chain};
use crate::error::RingError;
use crate::inflight::{InflightRegion, Tracker};
use crate::queue::Queue;
use crate::setup::{Completion, Position};
use crate::sigbus;
use crate::slot::PositionSlot;

/// Whether a port still works; shared by all its queues and its session. A broken ring breaks the
/// port, and only the port.
#[derive(Debug)]
pub struct PortHealth {
    name: Arc<str>,
    broken: AtomicBool,
    reason: Mutex<Option<String>>,
    log: LogLimit,
    alarm: OnceLock<Event>,
}

impl PortHealth {
    /// A healthy port.
    pub fn new(name: &str) -> Arc<Self> {
        Arc::new(Self {
            name: name.into(),
            broken: AtomicBool::new(false),
            log: LogLimit::default(),
            reason: Mutex::new(None),
            alarm: OnceLock::new(),
        })
    }

    /// An event to ring whenever the port breaks; the first one stays.
    pub fn set_alarm(&self, alarm: Event) {
        let _ = self.alarm.set(alarm);
    }

    /// The port's name (`vm/port`).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True while nothing has failed. One relaxed load.
    #[inline]
    pub fn is_live(&self) -> bool {
        !self.broken.load(Ordering::Relaxed)
    }

    /// Declares the port broken; the first reason is kept and logged.
    pub fn fail(&self, queue: Option<u16>, reason: &dyn std::fmt::Display) {
        let text = match queue {
            Some(q) => format!("queue {q}: {reason}"),
            None => reason.to_string(),
        };
        if !self.broken.swap(true, Ordering::SeqCst) {
            if let Some(left_out) = self.log.admit() {
                tracing::error!(port = %self.name, left_out, "port stopped: {text}");
            }
            *lock(&self.reason) = Some(text);
            // An event of our own does not fail; the reason is there in any case.
            let _ = self.alarm.get().map(Event::signal);
        }
    }

    /// The limit of what the port's front end can have logged.
    pub fn log(&self) -> &LogLimit {
        &self.log
    }

    /// Why the port is broken.
    pub fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }

    /// A new session starts with a clean slate.
    pub fn reset(&self) {
        *lock(&self.reason) = None;
        self.broken.store(false, Ordering::SeqCst);
    }
}

/// What a [`Vring`] is made of besides its queue.
#[derive(Debug)]
pub struct VringParts {
    /// Index in the device.
    pub index: u16,
    /// Driver → device doorbell; none when the front end wants us to poll.
    pub kick: Option<Doorbell>,
    /// Device → driver doorbell; none when the driver polls.
    pub call: Option<Doorbell>,
    /// Where a broken ring is reported to the VMM.
    pub err: Option<Doorbell>,
    /// Counters.
    pub stats: Arc<QueueStats>,
    /// Port state.
    pub health: Arc<PortHealth>,
    /// Where the position is saved for the next daemon.
    pub slot: Option<PositionSlot>,
    /// Inflight tracking, when negotiated.
    pub inflight: Option<Arc<InflightRegion>>,
}

impl VringParts {
    /// Tells of a receive buffer that cannot be filled and goes back empty. Within the port's limit of
    /// lines, and not one of the queue's: that can be started anew without an end.
    #[cold]
    pub fn tell_of_empty(&self, chain: &Chain<'_>) {
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

/// How long completions may wait for a common notification.
#[derive(Debug, Clone, Copy)]
pub struct Lazy {
    /// So many completions are told at once.
    pub max_pending: u32,
    /// The oldest of them waits no longer than this.
    pub max_wait_ns: u64,
}

/// Completions that the driver has not been told of.
#[derive(Debug, Default)]
struct Untold {
    count: u32,
    /// When the first was seen waiting.
    since_ns: Option<u64>,
    /// When the driver last had another reason to look.
    excused_ns: u64,
}

impl Untold {
    fn due_ns(&self, lazy: Lazy) -> Option<u64> {
        let since_ns = self.since_ns.filter(|_| self.count > 0)?;
        let from_ns = self.excused_ns.clamp(since_ns, since_ns + EXCUSES * lazy.max_wait_ns);
        Some(from_ns.saturating_add(lazy.max_wait_ns))
    }
}

/// How many times longer than its wait a completion may be excused: a driver that does not look at
/// this queue when it is told of another one must not wait for ever.
const EXCUSES: u64 = 3;

/// See the module's text.
#[derive(Debug)]
pub struct Vring {
    /// The queue.
    pub queue: Queue,
    /// The rest.
    pub parts: VringParts,
    /// Faults in mapped files that this queue has looked into.
    faults_seen: u64,
    tracker: Option<Tracker>,
    untold: Untold,
}

impl Vring {
    /// Puts the two together. With an inflight region: re-reads it, so that the first pops return
    /// the requests that an earlier back end took and did not complete (in their order), and
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
        let untold = Untold::default();
        let mut vring = Self { queue, parts, faults_seen: 0, tracker, untold };
        if vring.queue.position() != Position::fresh() {
            vring.ring_driver();
        }
        Ok(vring)
    }

    /// As [`Queue::pop`]; counts batches and requests, records inflight. A broken ring breaks the
    /// port (see [`PortHealth`]), is reported on the err event, and yields 0 from then on (the
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

    /// Notes what was taken in the inflight region. False when that broke the port.
    #[inline]
    fn track(&mut self, batch: &mut Batch) -> bool {
        let Some(tracker) = &mut self.tracker else {
            return true;
        };
        if self.queue.is_redelivering() {
            // Noted already, by whoever took them first.
            return true;
        }
        match tracker.popped(batch, &self.queue) {
            Ok(()) => true,
            Err(error) => {
                batch.release();
                self.fail(&error);
                false
            }
        }
    }

    /// One load while nothing happened; a look at the table after a fault anywhere.
    #[inline]
    fn is_intact(&mut self) -> bool {
        let faults = sigbus::faults();
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

    /// As [`Queue::unpop`].
    pub fn unpop(&mut self, batch: &mut Batch, n: usize) {
        let before = batch.len();
        if let Some(tracker) = &mut self.tracker
            && !self.queue.is_redelivering()
        {
            tracker.unpopped(batch, before.saturating_sub(n));
        }
        self.queue.unpop(batch, n);
        let given_back = (before - batch.len()) as u64;
        let requests = &self.parts.stats.requests;
        requests.set(requests.get().saturating_sub(given_back));
    }

    /// As [`Queue::push`], then saves the position and clears inflight.
    #[inline]
    pub fn push(&mut self, done: &[Completion]) {
        self.untold.count = self.untold.count.saturating_add(done.len() as u32);
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
        (self.untold.count, self.untold.since_ns) = (0, None);
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

    /// As [`Vring::notify`], but lets completions gather first. Call it in every poll, with or
    /// without new completions, and wake by [`Vring::notify_due_ns`].
    #[inline]
    pub fn notify_lazily(&mut self, now_ns: u64, lazy: Lazy) {
        if self.untold.count == 0 {
            return;
        }
        self.untold.since_ns.get_or_insert(now_ns);
        let max_pending = lazy.max_pending.min(u32::from(self.queue.size()) / 4);
        let is_due = self.untold.due_ns(lazy).is_some_and(|due_ns| now_ns >= due_ns);
        if self.untold.count >= max_pending || is_due {
            self.notify();
        }
    }

    /// When completions that wait must be told of; none when none wait.
    pub fn notify_due_ns(&self, lazy: Lazy) -> Option<u64> {
        self.untold.due_ns(lazy)
    }

    /// Completions that were pushed and not told.
    pub fn untold(&self) -> u32 {
        self.untold.count
    }

    /// The driver was just notified for another queue, whose handler looks at this one too: what
    /// waits here may wait anew.
    #[inline]
    pub fn excuse(&mut self, now_ns: u64) {
        self.untold.excused_ns = now_ns;
    }

    /// A call that fails breaks the port and is not rung again.
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
    pub fn kicked(&self) {
        self.parts.stats.kicks.add(1);
    }

    /// As [`Queue::has_work`]; false when the port is broken.
    pub fn has_work(&self) -> bool {
        self.parts.health.is_live() && self.queue.has_work()
    }

    /// Before sleeping: asks for kicks. True when work is there already, and always where the
    /// front end gave no kick to wake us by.
    pub fn arm(&mut self) -> bool {
        if !self.parts.health.is_live() {
            return false;
        }
        self.queue.enable_kicks() || self.parts.kick.is_none()
    }

    /// After waking: kicks are not needed.
    pub fn disarm(&mut self) {
        if self.parts.health.is_live() {
            self.queue.disable_kicks();
        }
    }

    /// The descriptor to watch for kicks.
    pub fn kick_fd(&self) -> Option<RawFd> {
        use std::os::fd::AsRawFd;
        self.parts.kick.as_ref().map(|k| k.as_raw_fd())
    }

    /// Breaks the port for a reason found by a device engine.
    #[cold]
    pub fn fail(&mut self, error: &RingError) {
        // Memory that is gone reads as zeroes: whatever is wrong in it, the driver did not write it. And it is
        // the whole VM's: the queue that met it first says nothing.
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
