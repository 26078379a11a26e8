//! One sidecore: its thread, its mailbox, its sleep.

use std::marker::PhantomData;
use std::sync::Arc;

use base::clock::Clock;
use base::counter::Counter;

use crate::worker::{SidecoreError, Watcher, Worker};

/// How a sidecore runs.
#[derive(Debug, Clone)]
pub struct SidecoreConfig {
    /// Number, for names and metrics.
    pub index: usize,
    /// CPU to pin to; none: the scheduler decides.
    pub cpu: Option<usize>,
    /// How long to poll without work before sleeping.
    pub spin_us: u32,
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
    /// Workers.
    pub workers: Counter,
}

/// A handle on a running sidecore; the thread ends when it is shut down.
#[derive(Debug, Clone)]
pub struct Sidecore {
    index: usize,
    stats: Arc<SidecoreStats>,
}

impl Sidecore {
    /// Starts the thread.
    pub fn spawn(config: SidecoreConfig, clock: Arc<dyn Clock>) -> Result<Self, SidecoreError> {
        let _ = clock;
        Ok(Self { index: config.index, stats: Arc::default() })
    }

    /// Number.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Counters.
    pub fn stats(&self) -> &SidecoreStats {
        &self.stats
    }

    /// Moves a worker onto this sidecore.
    pub fn add<W: Worker>(&self, worker: W) -> Result<WorkerRef<W>, SidecoreError> {
        let _ = worker;
        unimplemented!("sidecore")
    }

    /// Ends the thread; its workers are dropped there.
    pub fn shutdown(&self) {}
}

/// A handle on a worker that lives on a sidecore.
#[derive(Debug)]
pub struct WorkerRef<W> {
    core: Sidecore,
    _worker: PhantomData<fn(W)>,
}

impl<W> Clone for WorkerRef<W> {
    fn clone(&self) -> Self {
        Self { core: self.core.clone(), _worker: PhantomData }
    }
}

impl<W: Worker> WorkerRef<W> {
    /// Runs `f` on the sidecore, between two rounds, and waits for its result. `f` must not block:
    /// it holds up every worker of that sidecore.
    pub fn call<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut W, &Watcher<'_>) -> R + Send + 'static,
    ) -> Result<R, SidecoreError> {
        let _ = f;
        unimplemented!("sidecore")
    }

    /// Takes the worker off the sidecore.
    pub fn remove(&self) -> Result<W, SidecoreError> {
        unimplemented!("sidecore")
    }

    /// The sidecore it lives on.
    pub fn core(&self) -> &Sidecore {
        &self.core
    }
}
