//! A disk port: the vhost-user device of a session, and the administrator's operations on it.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use base::clock::Clock;
use base::counter::QueueStats;
use base::sync::lock;
use queue::{GuestMemory, Position, Vring};
use sidecore::{Group, Sidecore, WorkerRef};
use vhost_user::{ConfigNotifier, Device, DeviceError, DeviceKind};

use crate::backend::{Backend, ImageState};
use crate::claim::Claim;
use crate::config::{
    BackendConfig, BlockPortConfig, ConfigSpace, MAX_CONFIG_LEN_BYTES, Topology, WRITEBACK_OFFSET,
    feature,
};
use crate::dropper;
use crate::engine::QueueEngine;
use crate::error::BlockError;
use crate::error_log::ErrorLog;
use crate::memory::MemoryBackend;
use crate::metrics::{BlockStats, QueueSnapshot};
use crate::null::NullBackend;
use crate::placeholder::PlaceholderConfig;
use crate::port_state::PortState;
use crate::qcow2::{Qcow2Backend, Qcow2Options};
use crate::raw::RawBackend;
use crate::slab;

mod in_place;
mod queues;
mod size_notice;
mod write_cache;

use queues::Ending;
use size_notice::SizeNotice;
use write_cache::WriteCache;

pub use in_place::{Image, InPlaceError, PlaceholderError};

/// Key of a worker's memory: a queue's worker has the memory of one VM.
const MEMORY: u64 = 0;

/// State of one queue, running or not.
#[derive(Default)]
struct QueueState {
    running: Option<RunningQueue>,
    /// Counters of the ring, of the last time that the queue ran.
    ring_stats: Option<Arc<QueueStats>>,
    /// Whether the log says that its memory could not be registered.
    is_refusal_logged: bool,
    /// Whether a driver has begun with a fresh ring since the port is there.
    had_fresh_start: bool,
    /// Counters of requests, made at the first start: a port may have many queues that never start.
    block_stats: Option<Arc<BlockStats>>,
}

/// A queue that runs.
struct RunningQueue {
    worker: WorkerRef<QueueEngine>,
    /// Operations that its disk has room for.
    depth: u16,
    /// Table whose memory is registered with the disk; only where disks want it.
    known: Option<Arc<GuestMemory>>,
    /// Claim that its disks keep open.
    claim: Option<Arc<Claim>>,
}

/// A disk of a VM.
pub struct BlockPort {
    name: String,
    state: Arc<PortState>,
    backend: Arc<dyn Backend>,
    /// The first stage that changes content.
    changed_by: Option<String>,
    cores: Vec<Sidecore>,
    /// Group that keeps the queues of a port with stages on one sidecore.
    group: Option<Group>,
    features: u64,
    seg_max: u32,
    topology: Topology,
    write_cache: WriteCache,
    /// Features acknowledged by the driver.
    driver_features: AtomicU64,
    queue_count: u16,
    queues: Mutex<Vec<QueueState>>,
    /// Handler of placeholder requests, for queues that start.
    placeholder_config: Mutex<Option<Arc<PlaceholderConfig>>>,
    /// Claim on the inflight region of the session.
    claim: Mutex<Option<Arc<Claim>>>,
    size_notice: SizeNotice,
    ending: Mutex<Ending>,
    /// Whether the next session takes held requests again: see [`Device::session_ends`].
    is_taken_again: AtomicBool,
}

impl std::fmt::Debug for BlockPort {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BlockPort")
            .field("name", &self.name)
            .field("backend", &self.backend.kind())
            .finish_non_exhaustive()
    }
}

impl BlockPort {
    /// Opens the back end and makes the port; queue *i* begins on core *i* modulo their number, or
    /// on one nearer to the VM's memory (all on the first when there are stages, and they stay
    /// together). The clock is part of every port's constructor;
    /// a disk gets the time from its sidecores.
    pub fn new(
        mut config: BlockPortConfig,
        cores: &[Sidecore],
        _clock: Arc<dyn Clock>,
    ) -> Result<Arc<Self>, BlockError> {
        config.check()?;
        let backend: Arc<dyn Backend> = match &config.backend {
            BackendConfig::Raw { path, direct, registered_memory_bytes } => {
                let open =
                    if config.auto_block_size { RawBackend::open_auto } else { RawBackend::open };
                let raw = open(path, *direct, config.read_only, config.block_size)?;
                config.block_size = raw.block_size();
                Arc::new(raw.registering_memory(*registered_memory_bytes))
            }
            BackendConfig::Qcow2 { path, backing_dir, data_file, cache_len_bytes, direct } => {
                let options = Qcow2Options {
                    backing_dir: backing_dir.as_deref(),
                    data_file: data_file.as_deref(),
                    cache_len_bytes: *cache_len_bytes,
                    direct: *direct,
                    read_only: config.read_only,
                    progress: config.check_progress.clone(),
                };
                Arc::new(Qcow2Backend::open(path, &options)?)
            }
            BackendConfig::Memory { len_bytes } => Arc::new(MemoryBackend::new(*len_bytes)?),
            BackendConfig::Null { len_bytes } => Arc::new(NullBackend::new(*len_bytes)?),
        };
        Self::with_backend(config, backend, cores)
    }

    /// A port over any back end (`config.backend` is not looked at): for simulators and for back
    /// ends of other crates.
    pub fn with_backend(
        config: BlockPortConfig,
        backend: Arc<dyn Backend>,
        cores: &[Sidecore],
    ) -> Result<Arc<Self>, BlockError> {
        config.check()?;
        dropper::start();
        if cores.is_empty() {
            return Err(BlockError::Config {
                port: config.name,
                what: "the number of sidecores",
                value: "0".into(),
                rule: "at least 1".into(),
            });
        }
        let features = config.features();
        let group = (!config.stages.is_empty()).then(|| Group::new(&cores[0]));
        let changed_by = config.stages.iter().find(|s| s.changes_content());
        let changed_by = changed_by.map(|stage| stage.name().to_owned());
        let state = Arc::new(PortState {
            vm: config.vm,
            gate: backend.gate(),
            len_bytes: AtomicU64::new(backend.len_bytes()),
            writeback: AtomicBool::new(config.writeback),
            read_only: config.read_only,
            discard: AtomicBool::default(),
            write_zeroes: AtomicBool::default(),
            block_size: config.block_size,
            serial: slab::serial(&config.serial),
            demands: backend.demands(),
            has_stages: !config.stages.is_empty(),
            on_error: config.on_error,
            flush_errno: AtomicI32::new(0),
            orphans: Arc::default(),
            stages: Mutex::new(config.stages),
        });
        Ok(Arc::new(Self {
            name: config.name,
            state,
            backend,
            changed_by,
            cores: cores.to_vec(),
            group,
            features,
            seg_max: config.seg_max,
            topology: config.topology,
            write_cache: WriteCache::new(config.writeback),
            driver_features: AtomicU64::new(0),
            queue_count: config.queues,
            queues: Mutex::new((0..config.queues).map(|_| QueueState::default()).collect()),
            placeholder_config: Mutex::new(None),
            claim: Mutex::new(None),
            size_notice: SizeNotice::default(),
            ending: Mutex::default(),
            is_taken_again: AtomicBool::new(false),
        }))
    }

    /// The port's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `raw`, `qcow2`, `memory`, `null`.
    pub fn backend_kind(&self) -> &'static str {
        self.backend.kind()
    }

    /// Size of the disk in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.state.len_bytes.load(Ordering::Relaxed)
    }

    /// State of the image, where it has a map.
    pub fn image_state(&self) -> Option<ImageState> {
        self.backend.image_state()
    }

    /// Bytes of a block of the disk.
    pub fn block_size(&self) -> u32 {
        self.state.block_size
    }

    /// Whether the write cache is on now.
    pub fn writeback(&self) -> bool {
        self.state.writeback.load(Ordering::Relaxed)
    }

    /// Lets the requests go on that wait for their storage, see [`crate::OnError`]. Returns their
    /// number.
    pub fn resume(&self) -> usize {
        let workers: Vec<_> =
            self.lock().iter().filter_map(|q| Some(q.running.as_ref()?.worker.clone())).collect();
        // A worker that is gone holds nothing.
        workers.iter().filter_map(|w| w.call(|engine, _| engine.resume_held()).ok()).sum()
    }

    /// Number of requests that wait for their storage, with the error of the last one.
    pub fn held(&self) -> Option<(u64, std::io::Error)> {
        let queues = self.lock();
        let holding = || {
            let stats = queues.iter().filter_map(|queue| queue.block_stats.as_ref());
            stats.filter(|stats| stats.held.get() > 0)
        };
        let errno = holding().next()?.held_errno.get() as i32;
        let count = holding().map(|stats| stats.held.get()).sum();
        Some((count, std::io::Error::from_raw_os_error(errno)))
    }

    /// Error of the first failed flush. From then on all flushes fail until the image is opened
    /// anew: earlier writes may be lost, and no later flush would say so.
    pub fn flush_failure(&self) -> Option<std::io::Error> {
        self.state.flush_failure().map(std::io::Error::from_raw_os_error)
    }

    /// Makes all completed writes durable, without a queue. Its failure fails all later flushes, as
    /// a queue's does.
    fn sync(&self) -> Result<(), BlockError> {
        if let Some(source) = self.flush_failure() {
            return Err(BlockError::FlushFailed { port: self.name.clone(), source });
        }
        if let Err(error) = self.backend.sync() {
            let errno = error.errno();
            if self.state.fail_flushes(errno) {
                ErrorLog::flush_failed(&self.name, None, errno);
            }
            return Err(error);
        }
        Ok(())
    }

    /// Counters of each queue that ran since the port is there.
    pub fn stats(&self) -> Vec<QueueSnapshot> {
        let queues = self.lock();
        let snapshot = |(index, queue): (usize, &QueueState)| {
            Some(QueueSnapshot {
                index: index as u16,
                running: queue.running.is_some(),
                block: queue.block_stats.clone()?,
                ring: queue.ring_stats.clone(),
            })
        };
        queues.iter().enumerate().filter_map(snapshot).collect()
    }

    /// Counters of a queue that starts.
    fn stats_of(&self, index: usize) -> Arc<BlockStats> {
        Arc::clone(self.lock()[index].block_stats.get_or_insert_default())
    }

    /// Looks at the size of the image again (`None`), or changes the size of a memory or null disk,
    /// and tells the guest when it changed, or was not told before. Returns the size. Requests
    /// beyond a smaller size fail from then on. With [`BlockError::GuestNotTold`] the disk has the
    /// new size as well.
    pub fn resize(&self, new_len_bytes: Option<u64>) -> Result<u64, BlockError> {
        let len = self.backend.resize(new_len_bytes)?;
        let is_new = self.state.len_bytes.swap(len, Ordering::Relaxed) != len;
        if is_new {
            tracing::info!(port = %self.name, len_bytes = len, "disk resized");
        }
        if is_new || self.size_notice.is_pending() {
            self.size_notice.send().map_err(|source| BlockError::GuestNotTold {
                port: self.name.clone(),
                len_bytes: len,
                source,
            })?;
        }
        Ok(len)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<QueueState>> {
        lock(&self.queues)
    }

    /// Refuses a driver that used this queue in an earlier daemon, if the disk's bytes were lost
    /// with that daemon: its file system would be served zeroes. A driver that begins anew (a VM
    /// that was started or reset) is welcome.
    fn check_not_lost(&self, index: usize, vring: &Vring) -> Result<(), DeviceError> {
        if !self.backend.began_empty() {
            return Ok(());
        }
        let queue = &mut self.lock()[index];
        queue.had_fresh_start |= vring.queue.position() == Position::fresh();
        if queue.had_fresh_start {
            return Ok(());
        }
        Err(DeviceError::Failed(
            "the disk's bytes were in the memory of an earlier daemon and are lost (no holder kept \
             them); restart the VM to begin with an empty disk"
                .into(),
        ))
    }
}

impl Device for BlockPort {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Block
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_count(&self) -> u16 {
        self.queue_count
    }

    fn wants_inflight(&self) -> bool {
        true
    }

    fn has_config(&self) -> bool {
        true
    }

    fn read_config(&self, offset: u32, out: &mut [u8]) -> Result<(), DeviceError> {
        let space = ConfigSpace {
            len_bytes: self.len_bytes(),
            seg_max: self.seg_max,
            block_size: self.state.block_size,
            topology: self.topology,
            writeback: self.writeback(),
            queues: self.queue_count(),
            features: self.features,
        };
        if space.read(offset, out) {
            return Ok(());
        }
        Err(DeviceError::OutOfRange {
            what: "end of a disk's config read",
            value: u64::from(offset) + out.len() as u64,
            limit: u64::from(MAX_CONFIG_LEN_BYTES),
        })
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), DeviceError> {
        let &[value] = data else {
            return Err(DeviceError::Unsupported("writing disk config other than the write cache"));
        };
        if offset != WRITEBACK_OFFSET {
            return Err(DeviceError::Unsupported("writing disk config other than the write cache"));
        }
        if self.driver_features.load(Ordering::Relaxed) & feature::CONFIG_WCE == 0 {
            return Err(DeviceError::Unsupported("switching the write cache without CONFIG_WCE"));
        }
        if value > 1 {
            let (what, limit) = ("write cache", 1);
            return Err(DeviceError::OutOfRange { what, value: value.into(), limit });
        }
        self.write_cache.switch(value == 1);
        self.state.writeback.store(value == 1, Ordering::SeqCst);
        if value == 0 {
            // What completed while the cache was on must not stay volatile now that the driver
            // believes in write-through. Also when it is off already: the last sync may have
            // failed.
            self.sync().map_err(DeviceError::failed)?;
        }
        Ok(())
    }

    fn writes_through(&self) -> bool {
        self.write_cache.is_switched_off()
    }

    fn keep_writing_through(&self) {
        self.write_cache.switch(false);
        self.state.writeback.store(false, Ordering::SeqCst);
    }

    fn activate(&self, features: u64) -> Result<(), DeviceError> {
        self.driver_features.store(features, Ordering::Relaxed);
        let has = |bit| features & self.features & bit != 0;
        self.state.discard.store(has(feature::DISCARD), Ordering::Relaxed);
        self.state.write_zeroes.store(has(feature::WRITE_ZEROES), Ordering::Relaxed);
        self.state.writeback.store(self.write_cache.is_on_for(features), Ordering::SeqCst);
        Ok(())
    }

    fn start_queue(&self, vring: Vring) -> Result<(), DeviceError> {
        let index = usize::from(vring.parts.index);
        let count = usize::from(self.queue_count);
        if index >= count {
            let (what, value, limit) = ("disk queue", index as u64, count as u64 - 1);
            return Err(DeviceError::OutOfRange { what, value, limit });
        }
        if self.lock()[index].running.is_some() {
            return Err(DeviceError::Failed(format!("queue {index} is already running")));
        }
        self.check_not_lost(index, &vring)?;
        // Without the lock, which readers of counters take: all of these may take long.
        self.check_nothing_left()?;
        let claim = vring.parts.inflight.as_deref().map(|r| self.claim(r)).transpose()?.flatten();
        let memory = Arc::clone(vring.queue.memory());
        let depth = QueueEngine::depth(&vring);
        let core = match &self.group {
            Some(group) => group.core(),
            None => Sidecore::for_memory(&self.cores, index, &*memory).clone(),
        };
        let mut disk = {
            let _near = core.prefer_node();
            self.open_disk(depth, claim.as_deref())?
        };
        self.register(&mut *disk, index, &memory);
        let stats = self.stats_of(index);
        let mut queues = self.lock();
        let queue = &mut queues[index];
        queue.ring_stats = Some(Arc::clone(&vring.parts.stats));
        let near = core.prefer_node();
        let mut engine = QueueEngine::new(vring, Arc::clone(&self.state), stats, disk)
            .map_err(DeviceError::failed)?;
        self.give_placeholder_config(&mut engine, depth).map_err(DeviceError::failed)?;
        drop(near);
        let name = format!("disk {} queue {index}", self.name);
        let worker = match &self.group {
            Some(group) => group.add_named(name, engine),
            None => core.add_named(name, engine),
        };
        let worker = worker.map_err(DeviceError::failed)?;
        worker.works_on(MEMORY, &memory);
        let watched = worker
            .call(|engine, watcher| {
                // The sidecore is awake: a driver that never lets it sleep would kick for ever.
                engine.requests.vring.disarm();
                engine.watched_fds().into_iter().try_for_each(|fd| watcher.watch(fd))
            })
            .map_err(DeviceError::failed)
            .and_then(|r| r.map_err(|e| DeviceError::Failed(format!("watching a kick: {e}"))));
        if let Err(e) = watched {
            // A queue that did not start leaves nothing behind.
            let _ = worker.remove();
            return Err(e);
        }
        let known = (self.state.demands.max_registered_bytes > 0).then_some(memory);
        queue.running = Some(RunningQueue { worker, depth, known, claim });
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Result<Option<Vring>, DeviceError> {
        let index = usize::from(index);
        let running = self.lock().get_mut(index).and_then(|q| q.running.take());
        let worker = running.map(|running| running.worker);
        worker.map(|w| self.take_off(index, &w)).transpose()
    }

    fn update_memory(&self, memory: Arc<GuestMemory>) -> Result<(), DeviceError> {
        let workers: Vec<_> =
            self.lock().iter().map(|q| Some(q.running.as_ref()?.worker.clone())).collect();
        for (index, worker) in workers.into_iter().enumerate() {
            let Some(worker) = worker else { continue };
            worker.works_on(MEMORY, &memory);
            let disk = self.successor(index, &memory)?;
            let table = Arc::clone(&memory);
            worker
                .call(move |engine, watcher| engine.move_to(table, disk, watcher))
                .map_err(DeviceError::failed)?
                .map_err(|e| DeviceError::Failed(format!("watching a disk: {e}")))?;
            if let Some(running) = &mut self.lock()[index].running
                && let Some(known) = &mut running.known
            {
                *known = Arc::clone(&memory);
            }
        }
        Ok(())
    }

    fn set_notifier(&self, notifier: Option<Arc<dyn ConfigNotifier>>) {
        self.size_notice.set_notifier(notifier);
    }

    fn connected(&self, up: bool) {
        self.size_notice.set_connected(up);
    }

    fn session_ends(&self, is_taken_again: bool) {
        self.is_taken_again.store(is_taken_again, Ordering::Relaxed);
    }

    fn reset(&self) {
        for index in 0..self.queue_count() {
            if let Err(e) = self.stop_queue(index) {
                tracing::warn!(port = %self.name, queue = index, "stopping at reset: {e}");
            }
        }
        self.is_taken_again.store(false, Ordering::Relaxed);
        *lock(&self.claim) = None;
        self.driver_features.store(0, Ordering::Relaxed);
        self.state.writeback.store(self.write_cache.is_on_without_driver(), Ordering::SeqCst);
    }
}

impl Drop for BlockPort {
    fn drop(&mut self) {
        // A port that nobody holds must not leave workers on the sidecores.
        self.reset();
    }
}
