//! Handles on workers: they stay good while their worker moves from sidecore to sidecore.

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};

use base::counter::Counter;
use base::numa::Located;
use base::sync::lock;

use crate::core::Sidecore;
use crate::memory::Memories;
use crate::run::Run;
use crate::worker::{SidecoreError, Watcher, Worker, WorkerId};

/// The name of a worker that was given none.
const UNNAMED: &str = "worker";

/// What moves as one: a worker, or a group of them that must share a sidecore.
pub(crate) struct Unit {
    /// For logs, and for those who plan moves.
    pub(crate) id: u32,
    pinned: bool,
    /// Where its workers are. Changed on the thread that they leave.
    home: Mutex<Home>,
}

#[derive(Clone)]
struct Home {
    core: Sidecore,
    /// How often it changed: one may move away and back while nobody looks.
    moves: u64,
}

impl Unit {
    fn new(core: &Sidecore, pinned: bool) -> Arc<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { id, pinned, home: Mutex::new(Home { core: core.clone(), moves: 0 }) })
    }

    fn lock(&self) -> MutexGuard<'_, Home> {
        lock(&self.home)
    }

    pub(crate) fn core(&self) -> Sidecore {
        self.lock().core.clone()
    }

    pub(crate) fn set_core(&self, core: Sidecore) {
        let mut home = self.lock();
        home.core = core;
        home.moves += 1;
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned
    }

    /// Runs `f` on the sidecore where the unit is, between two rounds, and waits for the answer.
    /// `None` of `f` means that what it looked for is not there; it is asked again when the unit
    /// moved meanwhile.
    fn ask<T: Send + 'static, R: Send + 'static>(
        self: &Arc<Self>,
        task: T,
        f: impl Fn(&mut Run, &Sidecore, &mut Option<T>) -> Option<R> + Clone + Send + 'static,
    ) -> Result<R, SidecoreError> {
        // Kept outside of the job: a job that is never run, or runs where the unit was, must not
        // take it along.
        let task = Arc::new(Mutex::new(Some(task)));
        loop {
            let Home { core, moves } = self.lock().clone();
            let (unit, task, f) = (Arc::clone(self), Arc::clone(&task), f.clone());
            let answer = core.ask(move |run| {
                let here = unit.core();
                let mut task = lock(&task);
                f(run, &here, &mut task)
            });
            match answer {
                Ok(Some(answer)) => return Ok(answer),
                Ok(None) | Err(SidecoreError::Gone(_)) if self.lock().moves != moves => {}
                Ok(None) => return Err(SidecoreError::NoWorker(core.index())),
                Err(e) => return Err(e),
            }
        }
    }

    /// Moves all its workers, and waits until they are polled there. Already there is no error.
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

/// Counters of a worker, written by the sidecore it is on.
#[derive(Debug, Default)]
pub struct WorkerStats {
    /// Nanoseconds spent in its polls that did something; extrapolated from the rounds that are
    /// sampled.
    pub busy_ns: Counter,
    /// Times it was moved to another sidecore.
    pub moves: Counter,
}

/// A worker's place, shared by its slot and its handles.
pub(crate) struct Seat {
    pub(crate) id: WorkerId,
    pub(crate) name: String,
    pub(crate) unit: Arc<Unit>,
    pub(crate) stats: WorkerStats,
    pub(crate) memories: Memories,
}

/// What [`Sidecore::workers`] tells of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerInfo {
    /// The name that it was added with.
    pub name: String,
    /// See [`WorkerStats::busy_ns`].
    pub busy_ns: u64,
    /// See [`WorkerStats::moves`].
    pub moves: u64,
    /// Whether it stays on its sidecore.
    pub is_pinned: bool,
}

impl Seat {
    fn new(unit: &Arc<Unit>, name: String) -> Arc<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let (unit, stats, memories) = (Arc::clone(unit), Default::default(), Default::default());
        Arc::new(Self { id, name, unit, stats, memories })
    }
}

impl Sidecore {
    /// Puts a worker onto this sidecore, from where it may be moved.
    pub fn add<W: Worker>(&self, worker: W) -> Result<WorkerRef<W>, SidecoreError> {
        self.add_named(UNNAMED, worker)
    }

    /// As [`Sidecore::add`], with a name for listings, metrics and logs.
    pub fn add_named<W: Worker>(
        &self,
        name: impl Into<String>,
        worker: W,
    ) -> Result<WorkerRef<W>, SidecoreError> {
        Group { unit: Unit::new(self, worker.is_pinned()) }.add_named(name, worker)
    }

    /// The workers on it now, in the order in which they are polled. No call of the thread: what is
    /// read may be a moment old, and a worker on its way may be on none.
    pub fn workers(&self) -> Vec<WorkerInfo> {
        let info = |seat: &Arc<Seat>| WorkerInfo {
            name: seat.name.clone(),
            busy_ns: seat.stats.busy_ns.get(),
            moves: seat.stats.moves.get(),
            is_pinned: seat.unit.is_pinned(),
        };
        self.seats().iter().map(info).collect()
    }
}

/// Workers that are always on the same sidecore, and move together.
#[derive(Clone)]
pub struct Group {
    unit: Arc<Unit>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group").field("core", &self.unit.core()).finish()
    }
}

impl Group {
    /// An empty group; its first worker will be on `core`.
    pub fn new(core: &Sidecore) -> Self {
        Self { unit: Unit::new(core, false) }
    }

    /// The sidecore that it is on now.
    pub fn core(&self) -> Sidecore {
        self.unit.core()
    }

    /// Adds a worker where the others are.
    pub fn add<W: Worker>(&self, worker: W) -> Result<WorkerRef<W>, SidecoreError> {
        self.add_named(UNNAMED, worker)
    }

    /// As [`Group::add`], with a name for listings, metrics and logs.
    pub fn add_named<W: Worker>(
        &self,
        name: impl Into<String>,
        worker: W,
    ) -> Result<WorkerRef<W>, SidecoreError> {
        let seat = Seat::new(&self.unit, name.into());
        let handle = WorkerRef { seat: Arc::clone(&seat), _worker: PhantomData };
        self.unit.ask(worker, move |run, here, worker| {
            let worker = if run.is_core(here) { worker.take()? } else { return None };
            run.add(Box::new(worker), Arc::clone(&seat));
            Some(())
        })?;
        Ok(handle)
    }
}

/// A handle on a worker that lives on a sidecore.
pub struct WorkerRef<W> {
    seat: Arc<Seat>,
    _worker: PhantomData<fn(W)>,
}

impl<W> fmt::Debug for WorkerRef<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let core = self.seat.unit.core();
        f.debug_struct("WorkerRef").field("core", &core).field("id", &self.seat.id).finish()
    }
}

impl<W> Clone for WorkerRef<W> {
    fn clone(&self) -> Self {
        Self { seat: Arc::clone(&self.seat), _worker: PhantomData }
    }
}

impl<W: Worker> WorkerRef<W> {
    /// Runs `f` on the sidecore, between two rounds, and waits for its result. `f` must not block:
    /// it holds up every worker of that sidecore. Never call it from a sidecore's own thread.
    pub fn call<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut W, &Watcher<'_>) -> R + Send + 'static,
    ) -> Result<R, SidecoreError> {
        let seat = Arc::clone(&self.seat);
        let answer = self.seat.unit.ask(f, move |run, _, f| {
            let f = if run.has(&seat) { f.take()? } else { return None };
            Some(run.with_worker(&seat, f))
        })?;
        answer.ok_or_else(|| self.no_worker())
    }

    /// Takes the worker off the sidecore.
    pub fn remove(&self) -> Result<W, SidecoreError> {
        let seat = Arc::clone(&self.seat);
        let worker = self.seat.unit.ask((), move |run, _, _| run.remove(&seat))?;
        worker.downcast::<W>().map(|w| *w).map_err(|_| self.no_worker())
    }

    /// Moves the worker, and those of its group, to another sidecore, and waits until it is polled
    /// there. No error for one that is there already, or was removed. Fails for a pinned one, and
    /// when the target has stopped; then it stays where it is.
    pub fn move_to(&self, target: &Sidecore) -> Result<(), SidecoreError> {
        self.seat.unit.move_to(target)
    }

    /// It works on this memory from now on, instead of what it was given with the same key: it is
    /// best on a sidecore of the NUMA node with most of it. Memory that nobody else holds any more
    /// is forgotten.
    pub fn works_on(&self, key: u64, memory: &Arc<impl Located + 'static>) {
        let memory: Arc<dyn Located> = Arc::clone(memory) as _;
        self.seat.memories.set(key, &memory);
    }

    /// The sidecore it lives on now.
    pub fn core(&self) -> Sidecore {
        self.seat.unit.core()
    }

    /// Its counters; they go with it when it moves.
    pub fn stats(&self) -> &WorkerStats {
        &self.seat.stats
    }

    fn no_worker(&self) -> SidecoreError {
        SidecoreError::NoWorker(self.core().index())
    }
}
