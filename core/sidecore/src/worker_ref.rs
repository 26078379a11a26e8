//! Handles on workers: they stay good while their worker moves from sidecore to sidecore.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use base::numa::NumaMemory;

use crate::core::{Seat, Sidecore, Unit};
use crate::stats::WorkerStats;
use crate::worker::{SidecoreError, Watcher, Worker};

/// Name of a worker that was added without one.
const UNNAMED: &str = "worker";

/// Listing of one worker, by [`Sidecore::workers`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerInfo {
    /// Name that the worker was added with.
    pub name: String,
    /// Busy time, as [`WorkerStats::busy_ns`].
    pub busy_ns: u64,
    /// Number of moves, as [`WorkerStats::moves`].
    pub moves: u64,
    /// Whether it stays on its sidecore.
    pub is_pinned: bool,
}

impl Sidecore {
    /// Puts a worker onto this sidecore, from where it may be moved.
    pub fn add<W: Worker>(&self, worker: W) -> Result<WorkerRef<W>, SidecoreError> {
        self.add_named(UNNAMED, worker)
    }

    /// Adds as [`Sidecore::add`], with a name for listings, metrics and logs.
    pub fn add_named<W: Worker>(
        &self,
        name: impl Into<String>,
        worker: W,
    ) -> Result<WorkerRef<W>, SidecoreError> {
        Group { unit: Unit::new(self, worker.is_pinned()) }.add_named(name, worker)
    }

    /// Lists the workers on it now, in the order in which they are polled. This does not call the
    /// thread: the list may be a moment old, and a worker that is moving may be on no sidecore.
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

    /// The sidecore that the group is on now.
    pub fn core(&self) -> Sidecore {
        self.unit.core()
    }

    /// Adds a worker where the others are.
    pub fn add<W: Worker>(&self, worker: W) -> Result<WorkerRef<W>, SidecoreError> {
        self.add_named(UNNAMED, worker)
    }

    /// Adds as [`Group::add`], with a name for listings, metrics and logs.
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

    /// Sets the guest memory that the worker works on, in place of earlier memory with the same
    /// key: it is best on a sidecore of the NUMA node with most of it. Memory that nobody else
    /// holds any more is forgotten.
    pub fn works_on(&self, key: u64, memory: &Arc<impl NumaMemory + 'static>) {
        let memory: Arc<dyn NumaMemory> = Arc::clone(memory) as _;
        self.seat.memory.set(key, &memory);
    }

    /// The sidecore that the worker is on now.
    pub fn core(&self) -> Sidecore {
        self.seat.unit.core()
    }

    /// Counters of the worker; they go with it when it moves.
    pub fn stats(&self) -> &WorkerStats {
        &self.seat.stats
    }

    fn no_worker(&self) -> SidecoreError {
        SidecoreError::NoWorker(self.core().index())
    }
}
