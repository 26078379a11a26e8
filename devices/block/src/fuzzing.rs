//! Queue of a memory disk with its driver, on one thread, for the fuzzer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64};

use queue::Layout;
use queue::testing::{ModelDriver, ModelOptions};
use sidecore::{Ledger, VmId, Worker};

use crate::backend::Backend;
use crate::config::OnError;
use crate::engine::QueueEngine;
use crate::error::BlockError;
use crate::memory::MemoryBackend;
use crate::port_state::PortState;
use crate::slab;

/// Polls after which every request must be done: one is done in steps, each of which is a poll.
const MAX_POLLS: u64 = 10_000;

/// Queue of a memory disk with its driver.
pub struct DiskQueue {
    /// The guest's side of the queue.
    pub driver: ModelDriver,
    engine: QueueEngine,
    ledger: Ledger,
    now_ns: u64,
}

impl std::fmt::Debug for DiskQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskQueue").finish_non_exhaustive()
    }
}

impl DiskQueue {
    /// A disk of zeroes.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new(
        layout: Layout,
        mem_bytes: usize,
        len_bytes: u64,
        block_size: u32,
        read_only: bool,
    ) -> Result<Self, BlockError> {
        let options = ModelOptions { mem_bytes, ..ModelOptions::default() };
        let driver = ModelDriver::with_options(layout, 64, options);
        let backend = MemoryBackend::new(len_bytes)?;
        let port = Arc::new(PortState {
            vm: VmId::NONE,
            gate: None,
            len_bytes: AtomicU64::new(len_bytes),
            writeback: AtomicBool::new(true),
            read_only,
            discard: (!read_only).into(),
            write_zeroes: (!read_only).into(),
            block_size,
            serial: slab::serial("serial-1"),
            demands: backend.demands(),
            has_stages: false,
            stages: Vec::new().into(),
            on_error: OnError::Report,
            flush_errno: AtomicI32::new(0),
            orphans: Arc::default(),
        });
        let disk = backend.open_queue(64)?;
        let engine = QueueEngine::new(driver.vring(0), port, Arc::default(), disk)?;
        Ok(Self { driver, engine, ledger: Ledger::default(), now_ns: 0 })
    }

    /// Whether the driver did what none may, and the port has stopped.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        !self.engine.requests.vring.parts.health.is_live()
    }

    /// Polls until there is nothing to do.
    ///
    /// # Panics
    /// That never happens.
    pub fn settle(&mut self) {
        for _ in 0..MAX_POLLS {
            self.now_ns += 1_000_000;
            let work = self.engine.poll(self.now_ns, &mut self.ledger);
            if work == 0 && self.engine.requests.in_flight.slab.taken() == 0 {
                return;
            }
        }
        panic!("{} requests are not done", self.engine.requests.in_flight.slab.taken());
    }
}
