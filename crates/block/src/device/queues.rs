//! What a queue is started with, what it moves to, and its end.

use std::os::fd::AsFd;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use base::io::Disk;
use queue::inflight::InflightRegion;
use queue::{GuestMemory, Vring};
use sidecore::WorkerRef;
use vhost_user::DeviceError;

use super::BlockPort;
use crate::claim::{self, Claim};
use crate::dropper;
use crate::engine::Engine;
use crate::error::BlockError;
use crate::registered;

/// How often the end of a queue says that it still waits for its disk.
const DRAIN_REPORT: Duration = Duration::from_secs(10);

impl BlockPort {
    /// The claim on the inflight region that a queue starts with; all queues of a session share it.
    pub(super) fn claim(&self, region: &InflightRegion) -> Result<Option<Arc<Claim>>, DeviceError> {
        let (fd, ..) = region.as_parts();
        let mut claim = self.claim.lock().unwrap_or_else(PoisonError::into_inner);
        if !claim.as_ref().is_some_and(|c| c.is_on(fd)) {
            let new = Claim::new(fd, claim::LIMIT).map_err(|e| {
                DeviceError::Failed(format!(
                    "disk {}: requests of an earlier daemon have not ended within {:?} (its inflight \
                     region is locked): {e}",
                    self.name,
                    claim::LIMIT
                ))
            })?;
            *claim = new.map(Arc::new);
        }
        Ok(claim.clone())
    }

    /// The worker of a queue that runs, to be moved.
    #[cfg(test)]
    pub(crate) fn worker(&self, index: usize) -> WorkerRef<Engine> {
        self.lock()[index].worker.clone().unwrap()
    }

    /// A disk for a queue.
    pub(super) fn open_disk(
        &self,
        depth: u16,
        claim: Option<&Claim>,
    ) -> Result<Box<dyn Disk>, DeviceError> {
        let mut disk = self.backend.open_queue(depth).map_err(DeviceError::failed)?;
        if let Some(claim) = claim {
            disk.keep_open(claim.file().as_fd())
                .map_err(BlockError::resource("keeping the inflight region's lock"))
                .map_err(DeviceError::failed)?;
        }
        Ok(disk)
    }

    /// Registers the memory that a queue's table is, or will be, with its new disk, if that is wanted:
    /// takes as long as the kernel needs to fill and pin it. What fails is told once, and the disk
    /// works without.
    pub(super) fn register(&self, disk: &mut dyn Disk, index: usize, memory: &GuestMemory) {
        let max_bytes = self.state.demands.max_registered_bytes;
        if max_bytes == 0 {
            return;
        }
        let used = &self.block_stats[index].registered;
        if let Err(error) = registered::register(disk, memory, max_bytes, used) {
            let is_told = std::mem::replace(&mut self.lock()[index].is_told, true);
            if !is_told {
                tracing::warn!(port = %self.name, queue = index, "{error}");
            }
        }
    }

    /// The disk for a running queue that moves to `memory`; none where it can keep the one it has:
    /// when only the dirty log of a migration comes or goes nothing is pinned again.
    pub(super) fn successor(
        &self,
        index: usize,
        memory: &GuestMemory,
    ) -> Result<Option<Box<dyn Disk>>, DeviceError> {
        let (depth, known, claim) = {
            let queue = &self.lock()[index];
            (queue.depth, queue.known.clone(), queue.claim.clone())
        };
        if known.is_none_or(|known| known.shares_mappings(memory)) {
            return Ok(None);
        }
        let mut disk = self.open_disk(depth, claim.as_deref())?;
        self.register(&mut *disk, index, memory);
        Ok(Some(disk))
    }

    /// Waits for the requests in flight, then takes the worker off its sidecore.
    pub(super) fn take_off(
        &self,
        index: usize,
        worker: &WorkerRef<Engine>,
    ) -> Result<Vring, DeviceError> {
        let (notice, drained) = mpsc::channel();
        worker.call(move |engine, _| engine.drain(notice)).map_err(DeviceError::failed)?;
        loop {
            match drained.recv_timeout(DRAIN_REPORT) {
                Ok(()) => break,
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!(port = %self.name, queue = index, "waiting for the disk");
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(DeviceError::Failed(format!(
                        "disk {}: queue {index} went with its sidecore",
                        self.name
                    )));
                }
            }
        }
        worker
            .call(|engine, watcher| engine.watched().into_iter().for_each(|fd| watcher.unwatch(fd)))
            .map_err(DeviceError::failed)?;
        let vring = worker.remove().map_err(DeviceError::failed)?.into_vring();
        // Whoever comes next finds the image unlocked.
        dropper::wait();
        Ok(vring)
    }
}
