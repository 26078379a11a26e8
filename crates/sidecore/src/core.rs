//! A handle on a sidecore: starting it, its mailbox, its counters.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};

use base::clock::Clock;
use base::counter::Counter;
use base::event::Event;
use base::numa::{Node, NodePreference, prefer_node};
use base::sync::lock;

use crate::credit::{Account, VmId};
use crate::pause::Pause;
use crate::run::Run;
use crate::seat::Seat;
use crate::worker::{Poller, SidecoreError};

/// Time slice of a sidecore's thread. Where guests run on its CPU too, it is woken for some 20 µs
/// of work at a time, and the scheduler runs a thread with a shorter slice than the running one at
/// once.
const SLICE_NS: u64 = 200_000;

/// Configuration of a sidecore. The default sleeps at once.
#[derive(Debug, Clone, Default)]
pub struct SidecoreConfig {
    /// Number, for names and metrics.
    pub index: usize,
    /// CPU to pin to; none: the scheduler decides.
    pub cpu: Option<usize>,
    /// NUMA node of the CPUs that it may run on, where they are on one node and that is known.
    pub node: Option<Node>,
    /// Longest poll without work before sleeping, in microseconds; 0 sleeps at once. See
    /// [`crate::Spin`] for how the time adapts.
    pub spin_us: u32,
    /// Always poll for `spin_us`.
    pub fixed_spin: bool,
    /// Wait between two empty rounds.
    pub pause: Pause,
    /// Give the CPU away between polls that found nothing: for hosts where the guests need the
    /// same cores. Costs one system call per empty round, none per busy one.
    pub yield_when_idle: bool,
    /// Receives the name of each worker that panicked, once the worker is dropped.
    pub panicked: Option<mpsc::Sender<String>>,
}

/// Counters of a sidecore.
#[derive(Debug, Default)]
pub struct SidecoreStats {
    /// Rounds over all workers.
    pub rounds: Counter,
    /// Rounds in which something was done.
    pub busy_rounds: Counter,
    /// Number of sleeps.
    pub sleeps: Counter,
    /// Wake-ups by a watched descriptor or a call, not by a deadline.
    pub wakeups: Counter,
    /// Times that work was found by polling on, which would have had to wake it otherwise.
    pub spin_hits: Counter,
    /// Nanoseconds spent in rounds that did something.
    pub busy_ns: Counter,
    /// Nanoseconds spent in rounds that found nothing.
    pub spin_ns: Counter,
    /// Nanoseconds asleep, falling asleep and waking up included.
    pub asleep_ns: Counter,
    /// Polling time before a sleep now, in nanoseconds (a gauge).
    pub spin_limit_ns: Counter,
    /// Workers on it now.
    pub workers: Counter,
    /// Workers that were taken off because they panicked (a bug of ours).
    pub panics: Counter,
    /// 1 while it takes workers, 0 while it is parked. Written by the [`crate::Placer`], where
    /// there is one.
    pub active: Counter,
    /// Load at the last look of the [`crate::Placer`], in percent (a gauge); 0 without one.
    pub load_percent: Counter,
    /// Times that it neither slept nor finished a round for about a second. Counted by the
    /// [`crate::Watchdog`], where there is one.
    pub stalls: Counter,
}

/// Signs of life that a [`crate::Watchdog`] reads, besides the counters of rounds and sleeps.
#[derive(Debug, Default)]
pub(crate) struct Pulse {
    /// Number of the thread; 0 before it runs.
    pub(crate) thread: AtomicI32,
    /// The thread sleeps, or has ended as it should: no progress is expected.
    pub(crate) rests: AtomicBool,
    /// The watchdog's verdict.
    pub(crate) stalled: AtomicBool,
}

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
            "pinning its thread to the configured CPU, or watching its wake-up event",
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
