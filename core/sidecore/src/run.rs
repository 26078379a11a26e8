//! The thread of a sidecore: rounds, jobs, sleep.

use std::any::Any;
use std::cell::RefCell;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};

use base::clock::Clock;
use rustix::event::{Timespec, epoll};

use crate::config::SidecoreConfig;
use crate::core::{Job, Mailbox, Seat, Sidecore};
use crate::credit::Ledger;
use crate::load::Sampler;
use crate::spin::Spin;
use crate::stats::SidecoreStats;
use crate::worker::{Arm, Watcher, Worker, WorkerId};

/// Wake-ups taken from the kernel at once; more simply take another call.
const WAKE_EVENTS: usize = 64;

/// Most jobs between two rounds; more wait for the next gap. A front end can make its session send
/// jobs without an end, and the workers must go on all the same.
pub(crate) const JOBS_PER_ROUND: usize = 16;

/// Empty rounds between two yields: a yield costs as much as a few empty rounds.
const YIELD_EVERY: u32 = 4;

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

/// A worker on this thread, with the state that moves along.
pub(crate) struct Slot {
    seat: Arc<Seat>,
    worker: Box<dyn AnyWorker>,
    watched: RefCell<Vec<RawFd>>,
}

/// The state of the thread.
pub(crate) struct Run {
    config: SidecoreConfig,
    clock: Arc<dyn Clock>,
    mailbox: Arc<Mailbox>,
    inbox: mpsc::Receiver<Job>,
    slots: Vec<Slot>,
    sampler: Sampler,
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
        let config = SidecoreConfig { pause: config.pause.resolve(), ..config };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(mailbox.poller.fd(), &mailbox.bell, epoll::EventData::new_u64(BELL), flags)?;
        // `epoll_pwait2` is of Linux 5.11: where there is none, nothing could sleep.
        let mut events = Vec::with_capacity(WAKE_EVENTS);
        let spare = rustix::buffer::spare_capacity(&mut events);
        epoll::wait(mailbox.poller.fd(), spare, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }))?;
        events.clear();
        Ok(Self {
            config,
            clock,
            mailbox,
            inbox,
            slots: Vec::new(),
            sampler: Sampler::default(),
            stopping: false,
            events,
            ledger: Ledger::default(),
        })
    }

    pub(crate) fn add<W: Worker>(&mut self, worker: Box<W>, seat: Arc<Seat>) {
        self.slots.push(Slot { seat, worker, watched: RefCell::default() });
        self.show_seats();
    }

    /// Whether `core` is a handle on this thread.
    pub(crate) fn is_core(&self, core: &Sidecore) -> bool {
        std::ptr::eq(core.mailbox(), &*self.mailbox)
    }

    pub(crate) fn has(&self, seat: &Arc<Seat>) -> bool {
        self.position(seat).is_some()
    }

    fn position(&self, seat: &Arc<Seat>) -> Option<usize> {
        self.slots.iter().position(|s| Arc::ptr_eq(&s.seat, seat))
    }

    pub(crate) fn remove(&mut self, seat: &Arc<Seat>) -> Option<Box<dyn Any + Send>> {
        let slot = self.slots.remove(self.position(seat)?);
        self.show_seats();
        self.ledger.worker_left(self.clock.now_ns());
        self.unwatch(&slot);
        Some(slot.worker.into_any())
    }

    pub(crate) fn with_worker<W: Worker, R>(
        &mut self,
        seat: &Arc<Seat>,
        f: impl FnOnce(&mut W, &Watcher<'_>) -> R,
    ) -> Option<R> {
        let at = self.position(seat)?;
        let slot = self.slots.get_mut(at)?;
        // `AnyWorker` is implemented for the box' content, not for the box: reach through it.
        let worker = (*slot.worker).as_any().downcast_mut::<W>()?;
        let poller = &self.mailbox.poller;
        let watcher = Watcher { poller, id: slot.seat.id, watched: &slot.watched };
        match catch_unwind(AssertUnwindSafe(|| f(worker, &watcher))) {
            Ok(answer) => Some(answer),
            Err(_) => {
                self.drop_panicked(at);
                None
            }
        }
    }

    /// Ledger of this thread.
    pub(crate) fn ledger(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// Stops watching a worker's descriptors. They outlive the worker where a VMM has them too, and
    /// would go on to wake the thread.
    fn unwatch(&self, slot: &Slot) {
        for &fd in slot.watched.borrow().iter() {
            self.mailbox.poller.unwatch(fd);
        }
    }

    fn show_seats(&self) {
        let mut seats = self.mailbox.seats();
        seats.clear();
        seats.extend(self.slots.iter().map(|s| Arc::clone(&s.seat)));
        self.mailbox.stats.workers.set(self.slots.len() as u64);
    }

    pub(crate) fn stop(&mut self) {
        self.mailbox.close();
        self.stopping = true;
        for slot in std::mem::take(&mut self.slots) {
            drop_guarded(slot);
        }
        self.show_seats();
    }

    /// Runs until stopped: rounds while there is work and a while longer, then a sleep.
    pub(crate) fn run(&mut self) {
        crate::interrupt::accept();
        base::doorbell::prepare_thread();
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        self.mailbox.pulse.thread.store(thread, Ordering::Relaxed);
        self.rounds();
        self.mailbox.pulse.rests.store(true, Ordering::Relaxed);
    }

    fn rounds(&mut self) {
        let mut spin = Spin::new(u64::from(self.config.spin_us) * 1000, !self.config.fixed_spin);
        let mut idle = Idle::new(self.clock.now_ns());
        let mut round_start_ns = idle.last_work_ns;
        self.mailbox.stats.spin_limit_ns.set(spin.limit_ns());
        while !self.stopping {
            if self.has_jobs() {
                self.take_jobs();
                if self.stopping {
                    return;
                }
                round_start_ns = self.clock.now_ns();
                idle.since_ns = round_start_ns;
            }
            let done = self.round(round_start_ns);
            let now_ns = self.clock.now_ns();
            self.ledger.round_took(idle.is_fresh().then(|| now_ns - round_start_ns));
            let stats = &self.mailbox.stats;
            stats.rounds.add(1);
            if done > 0 {
                stats.busy_rounds.add(1);
                stats.busy_ns.add(now_ns - round_start_ns);
                idle.end(round_start_ns, &mut spin, stats);
                idle = Idle::new(now_ns);
                round_start_ns = now_ns;
                continue;
            }
            stats.spin_ns.add(now_ns - round_start_ns);
            if now_ns - idle.since_ns >= spin.limit_ns() && !self.has_jobs() {
                idle.slept |= self.sleep(now_ns);
                round_start_ns = self.clock.now_ns();
                self.mailbox.stats.asleep_ns.add(round_start_ns - now_ns);
                idle.since_ns = round_start_ns;
            } else {
                idle.rounds = idle.rounds.wrapping_add(1);
                self.relax(idle.rounds);
                round_start_ns = now_ns;
            }
        }
    }

    /// Whether jobs wait for which the bell may not ring: left by a drain, or sent since.
    fn has_jobs(&self) -> bool {
        self.mailbox.pending.load(Ordering::Relaxed)
    }

    /// Polls every worker once. In some rounds the time of each worker is measured.
    fn round(&mut self, now_ns: u64) -> usize {
        let sampled = self.sampler.next();
        // The first worker is another one each time: short credit goes to the first of a VM's
        // queues.
        let first = self.ledger.draw_below(self.slots.len());
        let mut done = self.poll_workers(first, usize::MAX, now_ns, sampled);
        done += self.poll_workers(0, first, now_ns, sampled);
        // A VM that may go on after this round has work in the next one.
        done + usize::from(self.ledger.end_round(now_ns))
    }

    /// Polls the workers from `at` up to `end`. `sampled`: number of rounds that their times stand
    /// for.
    fn poll_workers(
        &mut self,
        mut at: usize,
        mut end: usize,
        now_ns: u64,
        sampled: Option<u64>,
    ) -> usize {
        let mut done = 0;
        let mut start_ns = sampled.map_or(0, |_| self.clock.now_ns());
        while at < end.min(self.slots.len()) {
            let Some(n) = self.guarded(at, |worker, ledger| worker.poll(now_ns, ledger)) else {
                // Dropped; the next one is in its place.
                end -= 1;
                continue;
            };
            if let Some(weight) = sampled {
                let end_ns = self.clock.now_ns();
                let spent_ns = if n > 0 { (end_ns - start_ns) * weight } else { 0 };
                self.slots[at].seat.stats.busy_ns.add(spent_ns);
                start_ns = end_ns;
            }
            (done, at) = (done + n, at + 1);
        }
        done
    }

    /// Calls a worker. One that panics, by a bug, is dropped (none), and the others stay.
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
            worker = slot.seat.name,
            "worker panicked and was taken off"
        );
        self.mailbox.stats.panics.add(1);
        self.show_seats();
        self.ledger.worker_left(self.clock.now_ns());
        self.unwatch(&slot);
        let seat = Arc::clone(&slot.seat);
        drop_guarded(slot);
        if let Some(panicked) = &self.config.panicked {
            // Nobody listens any more when the daemon ends.
            let _ = panicked.send(seat.name.clone());
        }
    }

    /// Makes the worker of a name panic, as a bug would. False when there is none.
    #[cfg(feature = "testing")]
    pub(crate) fn panic_in(&mut self, name: &str) -> bool {
        let Some(at) = self.slots.iter().position(|slot| slot.seat.name == name) else {
            return false;
        };
        let _: Option<()> = self.guarded(at, |_, _| panic!("a test has {name} panic"));
        true
    }

    fn relax(&self, idle_rounds: u32) {
        if self.config.yield_when_idle && idle_rounds.is_multiple_of(YIELD_EVERY) {
            rustix::thread::sched_yield();
        } else {
            self.config.pause.wait(idle_rounds);
        }
    }

    fn take_jobs(&mut self) {
        // Cleared before the look: a job sent after the look sets it again.
        self.mailbox.pending.swap(false, Ordering::Acquire);
        for _ in 0..JOBS_PER_ROUND {
            let Ok(job) = self.inbox.try_recv() else { return };
            // The caller sees its answer's mpsc close. A worker that panicked in the job is dropped
            // already; only the making or dropping of one can panic besides.
            if catch_unwind(AssertUnwindSafe(|| job(self))).is_err() {
                tracing::error!(sidecore = self.config.index, "call on the sidecore panicked");
            }
            if self.stopping {
                return;
            }
        }
        self.mailbox.pending.store(true, Ordering::Relaxed);
    }

    /// Arms every worker, sleeps unless one is busy, and disarms the armed ones. True when it
    /// slept.
    fn sleep(&mut self, now_ns: u64) -> bool {
        self.ledger.settle(now_ns);
        let mut wake_at_ns = None;
        let mut armed = 0;
        let mut busy = false;
        while armed < self.slots.len() && !busy {
            match self.guarded(armed, |worker, ledger| worker.arm(now_ns, ledger)) {
                // Dropped; the next one is in its place.
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
        !busy
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
        let woken = epoll::wait(self.mailbox.poller.fd(), spare, timeout.as_ref());
        rests.store(false, Ordering::Relaxed);
        match woken {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => self.mailbox.stats.wakeups.add(1),
            Err(e) => {
                // Only a bug leads here; the core must not spin on it.
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
            if let Some(at) = self.slots.iter().position(|s| s.seat.id == id) {
                let _ = self.guarded(at, |worker, _| worker.fired(fd));
            }
        }
    }
}

mod moves;

/// The time since there was work.
struct Idle {
    last_work_ns: u64,
    /// Start of the polling before a sleep: a sleep or a call begins it anew.
    since_ns: u64,
    rounds: u32,
    slept: bool,
}

impl Idle {
    fn new(now_ns: u64) -> Self {
        Self { last_work_ns: now_ns, since_ns: now_ns, rounds: 0, slept: false }
    }

    /// Whether the last round had work: there was no pause and no sleep since.
    fn is_fresh(&self) -> bool {
        self.rounds == 0 && !self.slept
    }

    /// Counts work that came in the round that began at `now_ns`.
    fn end(&self, now_ns: u64, spin: &mut Spin, stats: &SidecoreStats) {
        if self.slept {
            spin.woke_to_work(now_ns - self.last_work_ns);
            stats.spin_limit_ns.set(spin.limit_ns());
        } else if self.rounds > 0 {
            stats.spin_hits.add(1);
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
