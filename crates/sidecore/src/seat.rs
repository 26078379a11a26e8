//! Places of workers on sidecores: what a worker keeps while it moves from one to another.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};

use base::counter::Counter;
use base::sync::lock;

use crate::core::Sidecore;
use crate::memory::WorkerMemory;
use crate::run::Run;
use crate::worker::{SidecoreError, WorkerId};

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

/// Counters of a worker, written by the sidecore it is on.
#[derive(Debug, Default)]
pub struct WorkerStats {
    /// Nanoseconds spent in its polls that did something; extrapolated from the rounds that are
    /// sampled.
    pub busy_ns: Counter,
    /// Times it was moved to another sidecore.
    pub moves: Counter,
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
