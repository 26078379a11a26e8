//! Disks and claims of a port's queues: at their start, at a change of memory, and at their end.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use base::io::Disk;
use base::sync::lock;
use queue::inflight::InflightRegion;
use queue::{GuestMemory, Vring};
use sidecore::{Watcher, WorkerRef};
use vhost_user::DeviceError;

use super::BlockPort;
use crate::claim::{self, Claim};
use crate::dropper;
use crate::engine::QueueEngine;
use crate::error::BlockError;
use crate::registered_memory;

/// Interval of log lines about a queue's end that still waits for its disk.
const DRAIN_REPORT: Duration = Duration::from_secs(10);

/// The end of a port's queues.
#[derive(Default)]
pub(super) struct Ending {
    /// Time until which disks are waited for; `None`: for ever.
    by: Option<Instant>,
    /// Queues that wait for their disks now.
    waiting: Vec<(usize, WorkerRef<QueueEngine>)>,
}

impl BlockPort {
    /// The claim on the inflight region that a queue starts with; all queues of a session share it.
    pub(super) fn claim(&self, region: &InflightRegion) -> Result<Option<Arc<Claim>>, DeviceError> {
        let (fd, ..) = region.as_parts();
        let mut claim = lock(&self.claim);
        if !claim.as_ref().is_some_and(|c| c.is_on(fd)) {
            let new = Claim::new(fd, claim::MAX_WAIT).map_err(|e| {
                DeviceError::Failed(format!(
                    "disk {}: requests of an earlier daemon have not ended within {:?} (its inflight \
                     region is locked): {e}",
                    self.name,
                    claim::MAX_WAIT
                ))
            })?;
            *claim = new.map(Arc::new);
        }
        Ok(claim.clone())
    }

    /// The worker of a queue that runs, to be moved.
    #[cfg(test)]
    pub(crate) fn worker(&self, index: usize) -> WorkerRef<QueueEngine> {
        self.lock()[index].running.as_ref().unwrap().worker.clone()
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

    /// Registers the memory of a queue's table with its new disk, if the config asks for it. It
    /// takes as long as the kernel needs to fill and pin the memory. A failure is logged once, and
    /// the disk works without.
    pub(super) fn register(&self, disk: &mut dyn Disk, index: usize, memory: &GuestMemory) {
        let max_bytes = self.state.demands.max_registered_bytes;
        if max_bytes == 0 {
            return;
        }
        let stats = self.stats_of(index);
        if let Err(error) = registered_memory::register(disk, memory, max_bytes, &stats.registered)
        {
            let is_logged = std::mem::replace(&mut self.lock()[index].is_refusal_logged, true);
            if !is_logged {
                tracing::warn!(port = %self.name, queue = index, "{error}");
            }
        }
    }

    /// New disk for a running queue that moves to `memory`. `None` where the queue can keep its
    /// disk: when only the dirty log of a migration comes or goes, nothing is pinned again.
    pub(super) fn successor(
        &self,
        index: usize,
        memory: &GuestMemory,
    ) -> Result<Option<Box<dyn Disk>>, DeviceError> {
        let (depth, known, claim) = {
            let queues = self.lock();
            let Some(running) = &queues[index].running else { return Ok(None) };
            (running.depth, running.known.clone(), running.claim.clone())
        };
        if known.is_none_or(|known| known.shares_mappings(memory)) {
            return Ok(None);
        }
        let mut disk = self.open_disk(depth, claim.as_deref())?;
        self.register(&mut *disk, index, memory);
        Ok(Some(disk))
    }

    /// Waits for the requests in flight, then takes the worker off its sidecore. After
    /// [`BlockPort::give_up_after`] operations are left in the disk in the end, which is an error.
    pub(super) fn take_off(
        &self,
        index: usize,
        worker: &WorkerRef<QueueEngine>,
    ) -> Result<Vring, DeviceError> {
        self.ending().waiting.push((index, worker.clone()));
        let left = self.drain(index, worker);
        self.ending().waiting.retain(|(other, _)| *other != index);
        let left = left?;
        worker
            .call(|engine, watcher| {
                engine.watched_fds().into_iter().for_each(|fd| watcher.unwatch(fd))
            })
            .map_err(DeviceError::failed)?;
        let vring = worker.remove().map_err(DeviceError::failed)?.into_vring();
        if left > 0 {
            return Err(DeviceError::Failed(format!(
                "disk {}: queue {index} ended, and the disk does not answer; requests left in the disk: \
                 {left}",
                self.name
            )));
        }
        // The next user of the image finds it unlocked.
        dropper::wait();
        Ok(vring)
    }

    /// Waits until a queue has ended its requests. Returns the number of operations left in the
    /// disk, see [`BlockPort::give_up_after`].
    fn drain(&self, index: usize, worker: &WorkerRef<QueueEngine>) -> Result<usize, DeviceError> {
        let (notice, woken) = mpsc::channel();
        let stays_inflight = self.is_taken_again.load(Ordering::Relaxed);
        worker
            .call(move |engine, _| engine.drain(notice, stays_inflight))
            .map_err(DeviceError::failed)?;
        loop {
            let by = self.ending().by;
            let until = |by: Instant| by.saturating_duration_since(Instant::now());
            let event = woken.recv_timeout(by.map_or(DRAIN_REPORT, until).min(DRAIN_REPORT));
            if event == Err(RecvTimeoutError::Disconnected) {
                return Err(DeviceError::Failed(format!(
                    "disk {}: queue {index} went with its sidecore",
                    self.name
                )));
            }
            let rest = |engine: &mut QueueEngine, _: &Watcher<'_>| {
                (engine.requests.in_flight.slab.taken(), engine.requests.in_flight.in_disk)
            };
            let (taken, in_disk) = worker.call(rest).map_err(DeviceError::failed)?;
            if taken == 0 || (in_disk > 0 && by.is_some_and(|by| until(by).is_zero())) {
                return Ok(in_disk);
            }
            if event.is_err() {
                tracing::warn!(port = %self.name, queue = index, in_disk, "waiting for the disk");
            }
        }
    }

    /// Limits the time for which ending queues wait for their disks. Operations that are in a disk
    /// then stay there, with the image locked: see [`BlockPort::orphaned_operations`]. Requests
    /// that a pipe has are waited for in any case.
    pub fn give_up_after(&self, limit: Duration) {
        let waiting = {
            let mut ending = self.ending();
            ending.by = Some(Instant::now() + limit);
            ending.waiting.clone()
        };
        for (_, worker) in waiting {
            // A queue that has ended needs no message.
            let _ = worker.call(|engine, _| engine.wake_drain());
        }
    }

    /// Operations that queues which ended left in the disk, and that are not over yet.
    pub fn orphaned_operations(&self) -> usize {
        self.state.orphans.wait(Duration::ZERO)
    }

    /// Count behind [`BlockPort::orphaned_operations`], to be waited for.
    #[cfg(test)]
    pub(crate) fn orphans(&self) -> Arc<crate::orphans::Orphans> {
        Arc::clone(&self.state.orphans)
    }

    fn ending(&self) -> MutexGuard<'_, Ending> {
        lock(&self.ending)
    }

    /// Checks that no operation of an earlier queue of this port is in the disk: a queue that
    /// starts takes the same requests again.
    pub(super) fn check_nothing_left(&self) -> Result<(), DeviceError> {
        match self.state.orphans.wait(claim::MAX_WAIT) {
            0 => Ok(()),
            left => Err(DeviceError::Failed(format!(
                "disk {}: after {:?} requests of a queue that ended are still in the disk: {left}",
                self.name,
                claim::MAX_WAIT
            ))),
        }
    }
}
