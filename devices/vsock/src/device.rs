//! The vsock device of one guest, for its vhost-user session.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use queue::{GuestMemory, Vring};
use sidecore::{SidecoreError, WorkerRef};
use vhost_user::device::{ConfigNotifier, Device, DeviceError, DeviceKind};

use crate::engine::VsockEngine;
use crate::listing::ConnectionInfo;
use crate::metrics::VsockStats;
use crate::queues::EVENT;
use crate::slab::SlabId;

/// Ring features: VERSION_1 (32), INDIRECT_DESC (28), EVENT_IDX (29), RING_PACKED (34), IN_ORDER
/// (35). No device feature: without any of its own, a vsock device serves streams (virtio 1.2,
/// 5.10.3).
const FEATURES: u64 = 1 << 32 | 1 << 28 | 1 << 29 | 1 << 34 | 1 << 35;

/// Queues: receive, transmit, event (virtio 1.2, 5.10.2). QEMU keeps the event queue to itself.
const QUEUES: u16 = 3;

/// The vsock device of one guest. Made by [`crate::Domain::add_port`].
pub struct VsockPort {
    name: String,
    cid: u64,
    id: SlabId,
    worker: WorkerRef<VsockEngine>,
    stats: Arc<VsockStats>,
    features: AtomicU64,
}

impl fmt::Debug for VsockPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VsockPort").field("name", &self.name).field("cid", &self.cid).finish()
    }
}

impl VsockPort {
    pub(crate) fn new(
        name: String,
        cid: u64,
        id: SlabId,
        worker: WorkerRef<VsockEngine>,
        stats: Arc<VsockStats>,
    ) -> Self {
        Self { name, cid, id, worker, stats, features: AtomicU64::new(0) }
    }

    /// Name of the port.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// CID of the guest.
    pub fn cid(&self) -> u64 {
        self.cid
    }

    /// Counters of the device; those of its queues are in the queues' own `QueueStats`.
    pub fn stats(&self) -> &VsockStats {
        &self.stats
    }

    /// Features that the driver took.
    pub fn driver_features(&self) -> u64 {
        self.features.load(Ordering::Relaxed)
    }

    /// Lists the port's connections. Fails when the sidecore or the domain is gone.
    pub fn connections(&self) -> Result<Vec<ConnectionInfo>, SidecoreError> {
        let id = self.id;
        self.worker.call(move |engine, _| engine.list_connections(id))
    }

    pub(crate) fn id(&self) -> SlabId {
        self.id
    }

    fn call<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut VsockEngine, &sidecore::Watcher<'_>) -> R + Send + 'static,
    ) -> Result<R, DeviceError> {
        self.worker.call(f).map_err(|e| self.failed(e))
    }

    fn failed(&self, e: impl fmt::Display) -> DeviceError {
        DeviceError::Failed(format!("vsock port {}: {e}", self.name))
    }
}

impl Device for VsockPort {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Vsock
    }

    fn features(&self) -> u64 {
        FEATURES
    }

    fn queue_count(&self) -> u16 {
        QUEUES
    }

    fn has_config(&self) -> bool {
        // QEMU's vhost-user-vsock asks for the CID when it starts, and fails without.
        true
    }

    /// The guest's CID (virtio 1.2, 5.10.4), and zeroes behind it, where guests may read as well:
    /// front ends of crate `vhost` would wait for ever for the bytes that a refusal lacks.
    fn read_config(&self, offset: u32, out: &mut [u8]) -> Result<(), DeviceError> {
        let config = self.cid.to_le_bytes();
        for (at, byte) in (offset as usize..).zip(out) {
            *byte = config.get(at).copied().unwrap_or(0);
        }
        Ok(())
    }

    fn write_config(&self, _offset: u32, _data: &[u8]) -> Result<(), DeviceError> {
        Err(DeviceError::Unsupported("writing the config space"))
    }

    fn activate(&self, features: u64) -> Result<(), DeviceError> {
        // Connections are kept: front ends come here when a paused VM goes on. A driver that
        // starts anew shows itself by its fresh rings.
        self.features.store(features, Ordering::Relaxed);
        Ok(())
    }

    fn start_queue(&self, vring: Vring) -> Result<(), DeviceError> {
        let index = vring.parts.index;
        if index > EVENT {
            return Err(DeviceError::OutOfRange {
                what: "queue index",
                value: index.into(),
                limit: EVENT.into(),
            });
        }
        self.worker.works_on(self.cid, vring.queue.memory());
        let id = self.id;
        self.call(move |engine, watcher| {
            let kick = engine.start_queue(id, vring)?;
            let watched = kick.map_or(Ok(()), |fd| watcher.watch(fd));
            if let Err(e) = watched {
                drop(engine.stop_queue(id, index));
                return Err(format!("watching the kick of queue {index}: {e}"));
            }
            Ok(())
        })?
        .map_err(|e| self.failed(e))
    }

    fn stop_queue(&self, index: u16) -> Result<Option<Vring>, DeviceError> {
        if index > EVENT {
            return Ok(None);
        }
        let id = self.id;
        self.call(move |engine, watcher| {
            let vring = engine.stop_queue(id, index);
            if let Some(fd) = vring.as_ref().and_then(Vring::kick_fd) {
                watcher.unwatch(fd);
            }
            vring
        })
    }

    fn update_memory(&self, memory: Arc<GuestMemory>) -> Result<(), DeviceError> {
        self.worker.works_on(self.cid, &memory);
        let id = self.id;
        self.call(move |engine, _| engine.set_memory(id, &memory))?.map_err(|e| self.failed(e))
    }

    fn set_notifier(&self, _notifier: Option<Arc<dyn ConfigNotifier>>) {
        // The CID never changes while a driver runs.
    }

    fn reset(&self) {
        let id = self.id;
        self.features.store(0, Ordering::Relaxed);
        // A worker that is gone has no queues and no connections any more.
        let _ = self.call(move |engine, watcher| {
            for index in 0..QUEUES {
                let vring = engine.stop_queue(id, index);
                if let Some(fd) = vring.as_ref().and_then(Vring::kick_fd) {
                    watcher.unwatch(fd);
                }
            }
            engine.reset_port(id);
        });
    }
}
