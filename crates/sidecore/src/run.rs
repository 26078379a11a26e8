//! The thread of a sidecore: rounds, jobs, sleep.

use std::any::Any;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

use base::clock::Clock;
use rustix::event::{Timespec, epoll};

use crate::core::{Job, Mailbox, SidecoreConfig};
use crate::credit::Ledger;
use crate::worker::{Arm, Poller, Watcher, Worker};

/// Wake-ups taken from the kernel at once; more simply take another call.
const WAKE_EVENTS: usize = 64;

/// Jobs run between two rounds; more wait for the next gap. A front end can make its session send
/// jobs without an end, and the workers must go on all the same.
pub(crate) const JOBS_PER_ROUND: usize = 16;

/// Empty rounds between two yields: a yield costs as much as a few empty rounds.
const YIELD_EVERY: u32 = 4;

/// Names a worker on its sidecore; never reused, so that a late handle cannot reach a stranger.
pub(crate) type WorkerId = u32;

/// The mailbox' own descriptor in the epoll set.
const BELL: u64 = u64::MAX;

/// A worker whose type is known to its handle only.
trait AnyWorker: Worker {
    fn as_any(&mut self) -> &mut dyn Any;
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

impl<W: Worker> AnyWorker for W {
    fn as_any(&mut self) -> &mut dyn Any {
        self
    }
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

struct Slot {
    id: WorkerId,
    worker: Box<dyn AnyWorker>,
}

/// The state of the thread.
pub(crate) struct Run {
    config: SidecoreConfig,
    clock: Arc<dyn Clock>,
    mailbox: Arc<Mailbox>,
    inbox: mpsc::Receiver<Job>,
    poller: Poller,
    slots: Vec<Slot>,
    next_id: WorkerId,
    stopping: bool,
    events: Vec<epoll::Event>,
    ledger: Ledger,
}

impl Run {
    pub(crate) fn new(
        config: SidecoreConfig,
        clock: Arc<dyn Clock>,
        mailbox: Arc<Mailbox>,
        inbox: mpsc::Receiver<Job>,
    ) -> io::Result<Self> {
        let poller = Poller::new()?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(poller.fd(), &mailbox.bell, epoll::EventData::new_u64(BELL), flags)?;
        Ok(Self {
            config,
            clock,
            mailbox,
            inbox,
            poller,
            slots: Vec::new(),
            next_id: 0,
            stopping: false,
            events: Vec::with_capacity(WAKE_EVENTS),
            ledger: Ledger::default(),
        })
    }

    pub(crate) fn add<W: Worker>(&mut self, worker: Box<W>) -> WorkerId {
        let id = self.next_id;
        self.next_id += 1;
        self.slots.push(Slot { id, worker });
        self.mailbox.stats.workers.set(self.slots.len() as u64);
        id
    }

    pub(crate) fn remove(&mut self, id: WorkerId) -> Option<Box<dyn Any + Send>> {
        let at = self.slots.iter().position(|s| s.id == id)?;
        let slot = self.slots.remove(at);
        self.mailbox.stats.workers.set(self.slots.len() as u64);
        Some(slot.worker.into_any())
    }

    pub(crate) fn with_worker<W: Worker, R>(
        &mut self,
        id: WorkerId,
        f: impl FnOnce(&mut W, &Watcher<'_>) -> R,
    ) -> Option<R> {
        let at = self.slots.iter().position(|s| s.id == id)?;
        let epoll = &self.poller;
        let slot = self.slots.get_mut(at)?;
        // `AnyWorker` is implemented for the box' content, not for the box: reach through it.
        let worker = (*slot.worker).as_any().downcast_mut::<W>()?;
        let watcher = Watcher { epoll: epoll.fd(), worker: id };
        match catch_unwind(AssertUnwindSafe(|| f(worker, &watcher))) {
            Ok(answer) => Some(answer),
            Err(_) => {
                self.drop_panicked(at);
                None
            }
        }
    }

    /// The credits of this thread.
    pub(crate) fn ledger(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    pub(crate) fn stop(&mut self) {
        self.stopping = true;
        for slot in self.slots.drain(..) {
            drop_guarded(slot);
        }
        self.mailbox.stats.workers.set(0);
    }

    /// Until stopped: rounds while there is work, `spin_us` longer, then sleep.
    pub(crate) fn run(&mut self) {
        crate::interrupt::accept();
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.mailbox.pulse.thread.store(thread, Ordering::Relaxed);
        self.rounds();
        self.mailbox.pulse.rests.store(true, Ordering::Relaxed);
    }

    fn rounds(&mut self) {
        let spin_ns = u64::from(self.config.spin_us) * 1000;
        let mut last_work_ns = self.clock.now_ns();
        let mut round_start_ns = last_work_ns;
        let mut idle_rounds = 0u32;
        while !self.stopping {
            if self.mailbox.pending.load(Ordering::Relaxed) {
                self.take_jobs();
                if self.stopping {
                    return;
                }
                last_work_ns = self.clock.now_ns();
                round_start_ns = last_work_ns;
            }
            let done = self.round(round_start_ns);
            let now_ns = self.clock.now_ns();
            let stats = &self.mailbox.stats;
            stats.rounds.add(1);
            if done > 0 {
                stats.busy_rounds.add(1);
                stats.busy_ns.add(now_ns - round_start_ns);
                last_work_ns = now_ns;
                idle_rounds = 0;
            } else if now_ns - last_work_ns >= spin_ns && !self.has_jobs() {
                self.sleep(now_ns);
                last_work_ns = self.clock.now_ns();
                round_start_ns = last_work_ns;
                continue;
            } else {
                idle_rounds = idle_rounds.wrapping_add(1);
                self.relax(idle_rounds);
            }
            round_start_ns = now_ns;
        }
    }

    /// Whether jobs wait that no bell may tell of: what a drain left, or what came since.
    fn has_jobs(&self) -> bool {
        self.mailbox.pending.load(Ordering::Relaxed)
    }

    /// One poll of every worker.
    fn round(&mut self, now_ns: u64) -> usize {
        // From another one each time: credit that is short goes to the first of a VM's queues.
        let first = self.ledger.lot().checked_rem(self.slots.len()).unwrap_or(0);
        let mut done = self.poll_workers(first, usize::MAX, now_ns);
        done += self.poll_workers(0, first, now_ns);
        // Who may go on after this round has work in the next one.
        done + usize::from(self.ledger.end_round(now_ns))
    }

    /// Polls the workers from `at` up to `end`.
    fn poll_workers(&mut self, mut at: usize, mut end: usize, now_ns: u64) -> usize {
        let mut done = 0;
        while at < end.min(self.slots.len()) {
            match self.guarded(at, |worker, ledger| worker.poll(now_ns, ledger)) {
                Some(n) => (done, at) = (done + n, at + 1),
                // Gone; the next one is in its place.
                None => end -= 1,
            }
        }
        done
    }

    /// Has a worker do something. One that panics is a bug of ours: it goes (none), and the others
    /// stay.
    fn guarded<R>(
        &mut self,
        at: usize,
        f: impl FnOnce(&mut dyn AnyWorker, &mut Ledger) -> R,
    ) -> Option<R> {
        let slot = self.slots.get_mut(at)?;
        let ledger = &mut self.ledger;
        match catch_unwind(AssertUnwindSafe(|| f(&mut *slot.worker, ledger))) {
            Ok(answer) => Some(answer),
            Err(_) => {
                self.drop_panicked(at);
                None
            }
        }
    }

    fn drop_panicked(&mut self, at: usize) {
        let slot = self.slots.remove(at);
        tracing::error!(
            sidecore = self.config.index,
            worker = slot.id,
            "worker panicked and was taken off; its ports are dead until re-attached"
        );
        self.mailbox.stats.panics.add(1);
        self.mailbox.stats.workers.set(self.slots.len() as u64);
        drop_guarded(slot);
    }

    fn relax(&self, idle_rounds: u32) {
        if self.config.yield_when_idle && idle_rounds.is_multiple_of(YIELD_EVERY) {
            rustix::thread::sched_yield();
        } else {
            std::hint::spin_loop();
        }
    }

    fn take_jobs(&mut self) {
        // Cleared before the look: a job sent after the look sets it again.
        self.mailbox.pending.swap(false, Ordering::Acquire);
        for _ in 0..JOBS_PER_ROUND {
            let Ok(job) = self.inbox.try_recv() else { return };
            // Whoever asked sees its answer's channel close. A worker that panicked in it is gone
            // already; what else can panic is the making or dropping of one.
            if catch_unwind(AssertUnwindSafe(|| job(self))).is_err() {
                tracing::error!(sidecore = self.config.index, "a call panicked");
            }
            if self.stopping {
                return;
            }
        }
        self.mailbox.pending.store(true, Ordering::Relaxed);
    }

    /// Arms every worker, sleeps unless one is busy, disarms those that were armed.
    fn sleep(&mut self, now_ns: u64) {
        self.ledger.settle();
        let mut wake_at_ns = None;
        let mut armed = 0;
        let mut busy = false;
        while armed < self.slots.len() && !busy {
            match self.guarded(armed, |worker, ledger| worker.arm(now_ns, ledger)) {
                // Gone; the next one is in its place.
                None => continue,
                Some(Arm::Busy) => busy = true,
                Some(Arm::Idle) => {}
                Some(Arm::Until(at_ns)) => {
                    wake_at_ns = Some(wake_at_ns.map_or(at_ns, |w: u64| w.min(at_ns)));
                }
            }
            armed += 1;
        }
        if !busy {
            self.mailbox.stats.sleeps.add(1);
            self.wait(now_ns, wake_at_ns);
            // All of them, less those that a panic has taken meanwhile.
            armed = self.slots.len();
        }
        let mut at = 0;
        while at < armed {
            match self.guarded(at, |worker, _| worker.disarm()) {
                Some(()) => at += 1,
                None => armed -= 1,
            }
        }
    }

    fn wait(&mut self, now_ns: u64, wake_at_ns: Option<u64>) {
        let timeout = wake_at_ns.map(|at_ns| {
            let left_ns = at_ns.saturating_sub(now_ns);
            Timespec {
                tv_sec: (left_ns / 1_000_000_000) as i64,
                tv_nsec: (left_ns % 1_000_000_000) as i64,
            }
        });
        self.events.clear();
        let spare = rustix::buffer::spare_capacity(&mut self.events);
        let rests = &self.mailbox.pulse.rests;
        rests.store(true, Ordering::Relaxed);
        let woken = epoll::wait(self.poller.fd(), spare, timeout.as_ref());
        rests.store(false, Ordering::Relaxed);
        match woken {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => {
                // Only a bug of ours gets here; do not burn the core over it.
                tracing::error!(sidecore = self.config.index, "epoll_wait: {e}");
                std::thread::yield_now();
            }
        }
        self.tell_fired();
    }

    fn tell_fired(&mut self) {
        for i in 0..self.events.len() {
            let data = self.events[i].data.u64();
            if data == BELL {
                self.mailbox.bell.drain();
                continue;
            }
            let (id, fd) = ((data >> 32) as WorkerId, data as u32 as RawFd);
            if let Some(at) = self.slots.iter().position(|s| s.id == id) {
                let _ = self.guarded(at, |worker, _| worker.fired(fd));
            }
        }
    }
}

/// Drops a worker. Its drop may panic on a broken state; that must not take the thread along.
fn drop_guarded(slot: Slot) {
    let _ = catch_unwind(AssertUnwindSafe(move || drop(slot)));
}

impl Drop for Run {
    fn drop(&mut self) {
        tracing::debug!(
            sidecore = self.config.index,
            bell = self.mailbox.bell.as_raw_fd(),
            "stopped"
        );
    }
}
