//! A handle on a sidecore: starting it, its mailbox, its counters.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc;

use base::clock::Clock;
use base::counter::Counter;
use base::event::Event;

use crate::credit::{Account, VmId};
use crate::run::{Run, WorkerId};
use crate::worker::{SidecoreError, Watcher, Worker};

/// How a sidecore runs.
#[derive(Debug, Clone)]
pub struct SidecoreConfig {
    /// Number, for names and metrics.
    pub index: usize,
    /// CPU to pin to; none: the scheduler decides.
    pub cpu: Option<usize>,
    /// How long to poll without work before sleeping, in microseconds; 0 sleeps at once.
    pub spin_us: u32,
    /// Give the CPU away between polls that found nothing: for hosts where the guests need the
    /// same cores. Costs one system call per empty round, none per busy one.
    pub yield_when_idle: bool,
}

/// Counters of a sidecore.
#[derive(Debug, Default)]
pub struct SidecoreStats {
    /// Rounds over all workers.
    pub rounds: Counter,
    /// Rounds in which something was done.
    pub busy_rounds: Counter,
    /// Times it went to sleep.
    pub sleeps: Counter,
    /// Nanoseconds spent in rounds that did something.
    pub busy_ns: Counter,
    /// Workers on it now.
    pub workers: Counter,
    /// Workers that were taken off because they panicked (a bug of ours).
    pub panics: Counter,
    /// Times that it neither slept nor finished a round for about a second. Counted by the
    /// [`crate::Watchdog`], where there is one.
    pub stalls: Counter,
}

/// What a [`crate::Watchdog`] goes by, besides the counters of rounds and sleeps.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// The thread; 0 before it runs.
    pub(crate) thread: AtomicI32,
    /// It sleeps, or has ended as it should: nothing is to be expected of it.
    pub(crate) rests: AtomicBool,
    /// The watchdog's verdict.
    pub(crate) stalled: AtomicBool,
}

/// A closure for the sidecore's thread.
pub(crate) type Job = Box<dyn FnOnce(&mut Run) + Send>;

/// What the handles share with the thread.
pub(crate) struct Mailbox {
    /// Set when a job may be waiting; read once per round.
    pub(crate) pending: AtomicBool,
    /// Wakes a sleeping thread.
    pub(crate) bell: Event,
    pub(crate) stats: SidecoreStats,
    pub(crate) pulse: Pulse,
}

/// A handle on a running sidecore. The thread ends when [`Sidecore::shutdown`] is called.
#[derive(Clone)]
pub struct Sidecore {
    index: usize,
    jobs: mpsc::Sender<Job>,
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
        let index = config.index;
        let io = |what| move |source| SidecoreError::Io { what, source };
        let mailbox = Arc::new(Mailbox {
            pending: AtomicBool::new(false),
            bell: Event::new().map_err(io("making its wake-up event"))?,
            stats: SidecoreStats::default(),
            pulse: Pulse::default(),
        });
        let (jobs, inbox) = mpsc::channel();
        let (ready, started) = mpsc::sync_channel(1);
        let shared = Arc::clone(&mailbox);
        std::thread::Builder::new()
            .name(format!("sidecore-{index}"))
            .spawn(move || {
                let pinned = config.cpu.map_or(Ok(()), base::cpu::pin_current_thread);
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
        started
            .recv()
            .map_err(|_| SidecoreError::Gone(index))?
            .map_err(io("pinning its thread to the configured CPU, or making its epoll set"))?;
        Ok(Self { index, jobs, mailbox })
    }

    /// Number.
    pub fn index(&self) -> usize {
        self.index
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

    /// Moves a worker onto this sidecore.
    pub fn add<W: Worker>(&self, worker: W) -> Result<WorkerRef<W>, SidecoreError> {
        let id = self.ask(move |run| run.add(Box::new(worker)))?;
        Ok(WorkerRef { core: self.clone(), id, _worker: PhantomData })
    }

    /// Takes an account into the ledger of this sidecore, or takes over its new settings.
    pub fn enrol(&self, account: Arc<Account>) -> Result<(), SidecoreError> {
        self.ask(move |run| run.ledger().enrol(account))
    }

    /// Forgets an account.
    pub fn expel(&self, vm: VmId) -> Result<(), SidecoreError> {
        self.ask(move |run| run.ledger().expel(vm))
    }

    /// Ends the thread and waits until its workers are dropped. Later calls on its workers fail
    /// with [`SidecoreError::Gone`].
    pub fn shutdown(&self) {
        // Already gone is what we want.
        let _ = self.ask(Run::stop);
    }

    /// Runs `f` on the thread, between two rounds, and waits for the answer.
    fn ask<R: Send + 'static>(
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

    /// Leaves a job for the thread.
    pub(crate) fn post(&self, job: Job) -> Result<(), SidecoreError> {
        self.jobs.send(job).map_err(|_| SidecoreError::Gone(self.index))?;
        self.mailbox.pending.store(true, Ordering::Release);
        self.mailbox
            .bell
            .signal()
            .map_err(|source| SidecoreError::Io { what: "waking its thread", source })
    }
}

/// A handle on a worker that lives on a sidecore.
pub struct WorkerRef<W> {
    core: Sidecore,
    id: WorkerId,
    _worker: PhantomData<fn(W)>,
}

impl<W> fmt::Debug for WorkerRef<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerRef").field("core", &self.core).field("id", &self.id).finish()
    }
}

impl<W> Clone for WorkerRef<W> {
    fn clone(&self) -> Self {
        Self { core: self.core.clone(), id: self.id, _worker: PhantomData }
    }
}

impl<W: Worker> WorkerRef<W> {
    /// Runs `f` on the sidecore, between two rounds, and waits for its result. `f` must not block:
    /// it holds up every worker of that sidecore. Never call it from a sidecore's own thread.
    pub fn call<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut W, &Watcher<'_>) -> R + Send + 'static,
    ) -> Result<R, SidecoreError> {
        let id = self.id;
        self.core
            .ask(move |run| run.with_worker(id, f))?
            .ok_or(SidecoreError::NoWorker(self.core.index))
    }

    /// Takes the worker off the sidecore.
    pub fn remove(&self) -> Result<W, SidecoreError> {
        let id = self.id;
        let worker: Option<Box<dyn Any + Send>> = self.core.ask(move |run| run.remove(id))?;
        worker
            .and_then(|w| w.downcast::<W>().ok())
            .map(|w| *w)
            .ok_or(SidecoreError::NoWorker(self.core.index))
    }

    /// The sidecore it lives on.
    pub fn core(&self) -> &Sidecore {
        &self.core
    }
}
