//! The pipes of a VM under way: new ones begin, and get the agent's answers, until they end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use base::clock::{Clock, MonotonicClock};
use guest_abi::Reason;

use crate::buffer_slot::BufferSlot;
use crate::config::{Devices, PipesConfig};
use crate::disks::{DiskNumbers, PipeDisks, has_all};
use crate::ends::EndOpener;
use crate::job::{Job, TOKEN_STEP, Work};
use crate::limits::{MAX_ANSWERS, MAX_BUFFERING_PIPES, MAX_LEN_BYTES};
use crate::line::Line;
use crate::message::{Answer, End, MessageError, Request};
use crate::metrics::PipeStats;
use crate::pipe_info::PipeInfo;
use crate::pipe_to_file::PipeToFile;
use crate::pipe_to_socket::PipeToSocket;
use crate::placed_request::Direction;
use crate::placed_source::PlacedSource;
use crate::placeholders::PlaceholderTable;
use crate::pool::Pool;
use crate::purse::Purse;
use crate::self_test::SelfTest;
use crate::twin_port::TwinPorts;

/// All pipes of a VM, with what they need of it.
pub(crate) struct PipeSet {
    config: PipesConfig,
    devices: Arc<dyn Devices>,
    pool: Arc<Pool>,
    ports: TwinPorts,
    stats: Arc<PipeStats>,
    clock: Arc<dyn Clock>,
    placeholders: Arc<PlaceholderTable>,
    /// Number of pipes that hold bytes in memory.
    buffering: Arc<AtomicUsize>,
    next_token: AtomicU64,
}

impl PipeSet {
    /// A VM's pipes: none yet.
    pub fn new(config: PipesConfig, devices: Arc<dyn Devices>, pool: Arc<Pool>) -> Self {
        let watch = Arc::clone(&pool);
        Self {
            ports: TwinPorts::new(&config.vm, &config.run_dir, watch),
            placeholders: Arc::new(PlaceholderTable::new(&pool)),
            config,
            devices,
            pool,
            stats: Arc::default(),
            clock: Arc::new(MonotonicClock),
            buffering: Arc::default(),
            next_token: AtomicU64::new(TOKEN_STEP),
        }
    }

    /// Name of the VM.
    pub fn vm(&self) -> &str {
        &self.config.vm
    }

    /// Secret of the VM's agent; empty: there is none.
    pub fn secret(&self) -> &[u8] {
        &self.config.secret.0
    }

    /// Most pipes at a time.
    pub fn max_pipes(&self) -> u32 {
        self.config.max_pipes
    }

    /// Counters.
    pub fn stats(&self) -> &PipeStats {
        &self.stats
    }

    /// The VM's account, to pay from.
    pub fn purse(&self) -> Purse {
        Purse::new(self.devices.account(), Arc::clone(&self.stats), Arc::clone(&self.clock))
    }

    /// The VM's ports.
    pub fn devices(&self) -> &dyn Devices {
        &*self.devices
    }

    /// The VM's network ports that take pipes.
    pub fn ports(&self) -> &TwinPorts {
        &self.ports
    }

    /// Placeholders of the VM's pipes.
    pub fn placeholders(&self) -> &Arc<PlaceholderTable> {
        &self.placeholders
    }

    /// The pipes under way.
    pub fn list(&self) -> Vec<PipeInfo> {
        self.pool.jobs().iter().map(|job| PipeInfo::of(job)).collect()
    }

    /// Welcomes an agent: the VM's network ports get what their connections need. Before the first
    /// agent a VM costs nothing.
    pub fn welcome(&self) {
        self.stats.agents.fetch_add(1, Ordering::Relaxed);
        self.ports.update(self.devices.nets());
        self.ports.end_broken_connections();
    }

    /// Follows a change of the VM's ports.
    pub fn ports_changed(&self) {
        self.cancel_without_disks();
        if self.stats.agents.load(Ordering::Relaxed) > 0 {
            self.ports.update(self.devices.nets());
        }
    }

    /// Begins a pipe.
    pub fn begin(
        &self,
        line: &Arc<Line>,
        id: u64,
        request: Request,
        numbers: &DiskNumbers,
    ) -> Result<(), Reason> {
        if self.pool.len() >= self.config.max_pipes as usize {
            return Err(Reason::TooMany);
        }
        if request.len_bytes > MAX_LEN_BYTES {
            return Err(Reason::Malformed);
        }
        let ends = [PipeInfo::name(&request.source), PipeInfo::name(&request.sink)];
        let len_bytes = request.len_bytes;
        let token = self.next_token.fetch_add(TOKEN_STEP, Ordering::Relaxed);
        let purse = Arc::new(self.purse());
        let mut opener = EndOpener {
            ports: &self.ports,
            devices: &*self.devices,
            placeholders: &self.placeholders,
            disks: PipeDisks::new(&*self.devices, numbers, &purse),
            token,
        };
        let work = self.open(request, &mut opener)?;
        let disks = opener.disks.used;
        let used = disks.clone();
        self.stats.asked.fetch_add(1, Ordering::Relaxed);
        let line = (id, Arc::clone(line));
        let job = Job::new(token, line, (ends, len_bytes), (work, disks), purse);
        if !self.pool.add(job) {
            return Err(Reason::HostGone);
        }
        // A disk may have been taken away before the pipe was there to be cancelled.
        if !has_all(&self.devices.disks(), &used) {
            self.cancel_without_disks();
        }
        Ok(())
    }

    /// Opens the ends of a pipe. A connection that is written is reserved then.
    fn open(&self, request: Request, ends: &mut EndOpener<'_>) -> Result<Box<dyn Work>, Reason> {
        let Request { source, sink, len_bytes, is_cached } = request;
        match (source, sink) {
            (End::File { disk, extents }, End::Socket(sink)) => {
                let source = ends.file_source(disk, extents, len_bytes, is_cached)?;
                let sink = ends.socket_sink(sink)?;
                Ok(Box::new(PipeToSocket::from_file(source, sink, len_bytes)))
            }
            (End::File { disk, extents }, End::Places(sink)) => {
                let source = ends.file_source(disk, extents, len_bytes, is_cached)?;
                let sink = ends.placed_file(&sink, Direction::Write)?;
                Ok(Box::new(PipeToFile::from_file(source, sink, len_bytes)))
            }
            (End::Socket(source), End::Socket(sink)) => {
                let mut sink = ends.socket_sink(sink)?;
                match ends.socket_source(source) {
                    Ok(source) => Ok(Box::new(PipeToSocket::from_socket(source, sink, len_bytes))),
                    Err(reason) => {
                        // It is not reserved any more.
                        let _ = sink.finish();
                        Err(reason)
                    }
                }
            }
            (End::Socket(source), End::Places(sink)) => {
                let slot = self.take_buffer_slot()?;
                let sink = ends.placed_file(&sink, Direction::Write)?;
                let source = ends.socket_source(source)?;
                Ok(Box::new(PipeToFile::from_socket(source, sink, len_bytes, slot)))
            }
            (End::Places(source), End::Socket(sink)) => {
                let slot = self.take_buffer_slot()?;
                let file = ends.placed_file(&source, Direction::Read)?;
                let source = PlacedSource::new(file, len_bytes, is_cached);
                let sink = ends.socket_sink(sink)?;
                Ok(Box::new(PipeToSocket::from_placed(source, sink, len_bytes, slot)))
            }
            (End::Places(_), End::Places(_)) | (_, End::File { .. }) => {
                Err(Reason::PairUnsupported)
            }
        }
    }

    fn take_buffer_slot(&self) -> Result<BufferSlot, Reason> {
        BufferSlot::take(&self.buffering, MAX_BUFFERING_PIPES).ok_or(Reason::TooMany)
    }

    /// Expects a self-test with placeholders; none: expects none any more.
    pub fn expect_self_test(&self, test: Option<SelfTest>) {
        self.placeholders.expect_self_test(test);
    }

    /// Gives an agent's answer to its pipe. One to a pipe that is over is dropped.
    pub fn deliver(&self, line: &Line, id: u64, answer: Answer) -> Result<(), MessageError> {
        let Some(job) = self.pool.find(line, id) else { return Ok(()) };
        if !job.push_answer(answer) {
            return Err(MessageError::TooMany { limit: MAX_ANSWERS });
        }
        self.pool.nudge(job.token);
        Ok(())
    }

    /// Refuses a pipe before it begins.
    pub fn refuse(&self, line: &Line, id: u64, reason: Reason) {
        self.stats.end(reason, 0, std::time::Duration::ZERO);
        line.send_done(id, 0, reason);
    }

    /// Cancels the agent's pipe of that id, or all of its pipes.
    pub fn cancel(&self, line: &Line, id: Option<u64>, reason: Reason) {
        for job in self.pool.jobs() {
            if job.is_of(line, id) {
                job.cancel(reason);
                self.pool.nudge(job.token);
            }
        }
    }

    /// Cancels pipes of disks that the VM does not have any more.
    fn cancel_without_disks(&self) {
        let live = self.devices.disks();
        for job in self.pool.jobs() {
            if !has_all(&live, &job.disks) {
                job.cancel(Reason::NoDisk);
                self.pool.nudge(job.token);
            }
        }
    }
}
