//! Handles on sidecores, and the places of workers on them: what a worker keeps while it moves.

use std::fmt;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};

use base::clock::Clock;
use base::event::Event;
use base::numa::{Node, NodePreference, prefer_node};
use base::sync::lock;

use crate::config::SidecoreConfig;
use crate::credit::{Account, VmId};
use crate::memory::WorkerMemory;
use crate::run::Run;
use crate::stats::{Pulse, SidecoreStats, WorkerStats};
use crate::worker::{Poller, SidecoreError, WorkerId};

/// Time slice of a sidecore's thread. Where guests run on its CPU too, it is woken for some 20 µs
/// of work at a time, and the scheduler runs a thread with a shorter slice than the running one at
/// once.
const SLICE_NS: u64 = 200_000;

/// By how much a sidecore's thread may wake up late, by the kernel's wish to do several wake-ups at
/// once; it is 50 µs for others. Waits for a ceiling or for a receiver are often shorter than that.
const TIMER_SLACK: NonZeroU64 = NonZeroU64::new(1_000).unwrap();

/// A closure for the sidecore's thread.
pub(crate) type Job = Box<dyn FnOnce(&mut Run) + Send>;

/// State that the handles share with the thread.
pub(crate) struct Mailbox {
    /// Sender of jobs to the thread; none once the thread has stopped, so that no job is left
    /// unseen.
    jobs: Mutex<Option<mpsc::Sender<Job>>>,
    /// Set when a job may be waiting; read once per round.
    pub(crate) pending: AtomicBool,
    /// Wakes a sleeping thread.
    pub(crate) bell: Event,
    pub(crate) stats: SidecoreStats,
    pub(crate) pulse: Pulse,
    /// Epoll set that wakes the thread. It is shared so that a worker's descriptors can be watched
    /// before the worker comes.
    pub(crate) poller: Poller,
    /// Places of the workers on it, for readers; changed by the thread, and never in a round.
    seats: Mutex<Vec<Arc<Seat>>>,
}

impl Mailbox {
    /// Closes the mailbox: it takes no more jobs.
    pub(crate) fn close(&self) {
        *lock(&self.jobs) = None;
    }

    pub(crate) fn seats(&self) -> MutexGuard<'_, Vec<Arc<Seat>>> {
        lock(&self.seats)
    }
}

/// A handle on a running sidecore. The thread ends when [`Sidecore::shutdown`] is called.
#[derive(Clone)]
pub struct Sidecore {
    index: usize,
    node: Option<Node>,
    mailbox: Arc<Mailbox>,
}

impl fmt::Debug for Sidecore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sidecore").field("index", &self.index).finish_non_exhaustive()
    }
}

impl Sidecore {
    /// Starts the thread, pinned when `config` says so. Fails when the CPU is not there or not
    /// allowed.
    pub fn spawn(config: SidecoreConfig, clock: Arc<dyn Clock>) -> Result<Self, SidecoreError> {
        let (index, node) = (config.index, config.node);
        let io = |what| move |source| SidecoreError::Io { what, source };
        let (jobs, inbox) = mpsc::channel();
        let mailbox = Arc::new(Mailbox {
            jobs: Mutex::new(Some(jobs)),
            pending: AtomicBool::new(false),
            bell: Event::new().map_err(io("making its wake-up event"))?,
            stats: SidecoreStats::default(),
            pulse: Pulse::default(),
            poller: Poller::new().map_err(io("making its epoll set"))?,
            seats: Mutex::default(),
        });
        let (ready, started) = mpsc::sync_channel(1);
        let shared = Arc::clone(&mailbox);
        std::thread::Builder::new()
            .name(format!("sidecore-{index}"))
            .spawn(move || {
                let pinned = config.cpu.map_or(Ok(()), base::cpu::pin_current_thread);
                // Some kernels and sandboxes have no slices: then guests on the same CPU make it
                // wait.
                if let Err(error) = base::cpu::shorten_slice(SLICE_NS) {
                    tracing::debug!(sidecore = index, %error, "keeping the usual time slice");
                }
                if let Err(error) = rustix::thread::set_current_timer_slack(Some(TIMER_SLACK)) {
                    tracing::debug!(sidecore = index, %error, "keeping the usual timer slack");
                }
                match pinned.and_then(|()| Run::new(config, clock, shared, inbox)) {
                    Ok(mut run) => {
                        if ready.send(Ok(())).is_ok() {
                            run.run();
                        }
                    }
                    // The starter waits below and reports it.
                    Err(e) => drop(ready.send(Err(e))),
                }
            })
            .map_err(io("starting its thread"))?;
        started.recv().map_err(|_| SidecoreError::Gone(index))?.map_err(io(
            "pinning its thread to the configured CPU, or waiting for its wake-up event",
        ))?;
        mailbox.stats.active.set(1);
        Ok(Self { index, node, mailbox })
    }

    /// Number of the sidecore.
    pub fn index(&self) -> usize {
        self.index
    }

    /// The NUMA node it runs on, where that is known.
    pub fn node(&self) -> Option<Node> {
        self.node
    }

    /// Has the calling thread take new memory from this sidecore's node, while the answer lives.
    pub fn prefer_node(&self) -> NodePreference {
        prefer_node(self.node)
    }

    /// Counters.
    pub fn stats(&self) -> &SidecoreStats {
        &self.mailbox.stats
    }

    /// True while a [`crate::Watchdog`] sees it hang, or its thread was lost.
    pub fn is_stalled(&self) -> bool {
        self.mailbox.pulse.stalled.load(Ordering::Relaxed)
    }

    pub(crate) fn pulse(&self) -> &Pulse {
        &self.mailbox.pulse
    }

    /// Takes an account into the ledger of this sidecore, or updates its settings there.
    pub fn enrol(&self, account: Arc<Account>) -> Result<(), SidecoreError> {
        self.ask(move |run| run.ledger().enrol(account))
    }

    /// Forgets an account.
    pub fn expel(&self, vm: VmId) -> Result<(), SidecoreError> {
        self.ask(move |run| run.ledger().expel(vm))
    }

    /// Makes its worker of this name panic between two rounds, as a bug would. False when there is
    /// none.
    #[cfg(feature = "testing")]
    pub fn panic_in(&self, name: &str) -> bool {
        let name = name.to_owned();
        self.ask(move |run| run.panic_in(&name)).unwrap_or(false)
    }

    /// Ends the thread and waits until its workers are dropped. Later calls on its workers fail
    /// with [`SidecoreError::Gone`].
    pub fn shutdown(&self) {
        // Already gone is what we want.
        let _ = self.ask(Run::stop);
    }

    /// Whether it takes workers; false while it is parked.
    pub fn is_active(&self) -> bool {
        self.mailbox.stats.active.get() != 0
    }

    /// CPU time of its thread, in nanoseconds; none before it runs and after it ended.
    pub(crate) fn cpu_ns(&self) -> Option<u64> {
        let thread = self.mailbox.pulse.thread.load(Ordering::Relaxed);
        crate::interrupt::cpu_ns(thread)
    }

    /// Whether both are handles on the same sidecore.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.mailbox, &other.mailbox)
    }

    /// The workers on it now, or on their way to it.
    pub(crate) fn seats(&self) -> Vec<Arc<Seat>> {
        self.mailbox.seats().clone()
    }

    pub(crate) fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    /// Runs `f` on the thread, between two rounds, and waits for the answer.
    pub(crate) fn ask<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Run) -> R + Send + 'static,
    ) -> Result<R, SidecoreError> {
        let gone = || SidecoreError::Gone(self.index);
        let (answer, wait) = mpsc::sync_channel(1);
        let job: Job = Box::new(move |run| {
            // The asker waits below; if it died there is nobody to tell.
            let _ = answer.send(f(run));
        });
        self.post(job)?;
        wait.recv().map_err(|_| gone())
    }

    /// Leaves a job for the thread. With [`SidecoreError::Gone`] it is dropped and never runs; with
    /// any other error it waits for somebody else to wake the thread.
    pub(crate) fn post(&self, job: Job) -> Result<(), SidecoreError> {
        let gone = || SidecoreError::Gone(self.index);
        lock(&self.mailbox.jobs).as_ref().and_then(|jobs| jobs.send(job).ok()).ok_or_else(gone)?;
        self.mailbox.pending.store(true, Ordering::Release);
        self.mailbox
            .bell
            .signal()
            .map_err(|source| SidecoreError::Io { what: "waking its thread", source })
    }
}

/// Unit of moves: a worker, or a group of workers that must share a sidecore.
pub(crate) struct Unit {
    /// Number of the unit, for logs and for the placer.
    pub(crate) id: u32,
    pinned: bool,
    /// Sidecore of its workers. Changed on the thread that they leave.
    home: Mutex<Home>,
}

#[derive(Clone)]
struct Home {
    core: Sidecore,
    /// Number of changes: a unit may move away and back between two looks.
    moves: u64,
}

impl Unit {
    pub(crate) fn new(core: &Sidecore, pinned: bool) -> Arc<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { id, pinned, home: Mutex::new(Home { core: core.clone(), moves: 0 }) })
    }

    pub(crate) fn core(&self) -> Sidecore {
        lock(&self.home).core.clone()
    }

    pub(crate) fn set_core(&self, core: Sidecore) {
        let mut home = lock(&self.home);
        home.core = core;
        home.moves += 1;
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// Runs `f` on the sidecore where the unit is, between two rounds, and waits for the answer.
    /// `None` of `f` means that what it looked for is not there; it is asked again when the unit
    /// moved meanwhile.
    pub(crate) fn ask<T: Send + 'static, R: Send + 'static>(
        self: &Arc<Self>,
        task: T,
        f: impl Fn(&mut Run, &Sidecore, &mut Option<T>) -> Option<R> + Clone + Send + 'static,
    ) -> Result<R, SidecoreError> {
        // Kept outside of the job: a job that is never run, or runs on the sidecore that the unit
        // has left, must not consume it.
        let task = Arc::new(Mutex::new(Some(task)));
        loop {
            let Home { core, moves } = lock(&self.home).clone();
            let (unit, task, f) = (Arc::clone(self), Arc::clone(&task), f.clone());
            let answer = core.ask(move |run| {
                let here = unit.core();
                let mut task = lock(&task);
                f(run, &here, &mut task)
            });
            match answer {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) | Err(SidecoreError::Gone(_)) if lock(&self.home).moves != moves => {}
                Ok(None) => return Err(SidecoreError::NoWorker(core.index())),
                Err(e) => return Err(e),
            }
        }
    }

    /// Moves all its workers, and waits until they are polled there. No error when they are there
    /// already.
    pub(crate) fn move_to(self: &Arc<Self>, target: &Sidecore) -> Result<(), SidecoreError> {
        if self.pinned {
            return Err(SidecoreError::Pinned(self.core().index()));
        }
        let (settled, wait) = mpsc::sync_channel(1);
        let (unit, to) = (Arc::clone(self), target.clone());
        let moved = self.ask((), move |run, here, _| {
            if here.is(&to) {
                let _ = settled.send(());
                return Some(Ok(0));
            }
            run.is_core(here).then(|| run.move_out(&unit, &to, settled.clone()))
        });
        moved??;
        wait.recv().map_err(|_| SidecoreError::Gone(target.index()))
    }
}

/// Place of a worker, shared by its slot and its handles.
pub(crate) struct Seat {
    pub(crate) id: WorkerId,
    pub(crate) name: String,
    pub(crate) unit: Arc<Unit>,
    pub(crate) stats: WorkerStats,
    pub(crate) memory: WorkerMemory,
}

impl Seat {
    pub(crate) fn new(unit: &Arc<Unit>, name: String) -> Arc<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let (unit, stats, memory) = (Arc::clone(unit), Default::default(), Default::default());
        Arc::new(Self { id, name, unit, stats, memory })
    }
}
