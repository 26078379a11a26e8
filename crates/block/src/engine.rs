//! Engine of one virtqueue of a disk, on its sidecore: takes requests, drives them through the
//! disk, completes them in any order.

mod flushing;
mod holding;
mod intake;
mod placeholders;
mod worker;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use base::io::{Disk, DiskDone};
use queue::{Batch, Coalescing, Completion, RingError, Vring};
use sidecore::Watcher;

use crate::driver_pace::DriverPace;
use crate::error::BlockError;
use crate::error_log::ErrorLog;
use crate::gate::GatePass;
use crate::in_flight::{InFlight, OpOutcome};
use crate::latency::LatencyRecorder;
use crate::limits::{BATCH_CHAINS, MAX_IN_FLIGHT, MIN_CHARGE_BYTES};
use crate::metrics::BlockStats;
use crate::port_state::PortState;
use crate::request::{self, Refusal, Request, Status};
use crate::slab::{Bounces, Job, JobKind, Slab, Slot};

use flushing::Flushes;
use holding::Holding;
pub(crate) use placeholders::PlaceholderQueue;

/// Limits of gathering completions while other requests are in the disk: the driver would only be
/// notified again when those finish.
const GATHERING: Coalescing = Coalescing { max_pending: 16, max_wait_ns: 100_000 };

/// Limits of gathering completions while the driver has slack, see [`DriverPace`].
const fn gather_within(slack_ns: u64) -> Coalescing {
    Coalescing { max_wait_ns: slack_ns, ..GATHERING }
}

/// Least requests in the disk of a busy queue: its completions gather, and its driver need not
/// kick, since new requests are found when one of those finishes.
const BUSY_DEPTH: usize = 2;

/// Most requests taken at once for a disk that finishes them within the call: there is no system
/// call to share, and the driver works through one batch while the next one is done.
const IMMEDIATE_BATCH: usize = 16;

/// Longest time for which new requests of a busy queue go unseen.
const LOOK_AGAIN_NS: u64 = 50_000;

/// The worker of one queue.
pub(crate) struct QueueEngine {
    pub vring: Vring,
    pub(crate) in_flight: InFlight,
    flushes: Flushes,
    holding: Holding,
    port: Arc<PortState>,
    stats: Arc<BlockStats>,
    batch: Batch,
    /// Most requests taken at once.
    batch_max: usize,
    done: Vec<DiskDone>,
    completions: Vec<Completion>,
    latencies: LatencyRecorder,
    log: ErrorLog,
    pace: DriverPace,
    pass: GatePass,
    /// Handler of placeholder requests; `None` on ports without one.
    pub(crate) placeholders: Option<PlaceholderQueue>,
    /// Whether requests of this batch may be placeholders.
    may_have_placeholders: bool,
    /// Whether requests wait for credit, or for room in the device.
    is_waiting: bool,
    /// Whether the next request waits for a segment list that has room for it.
    is_waiting_for_list: bool,
    /// Whether new requests go before those that wait for their next step, the next time.
    takes_new_first: bool,
    /// Mean charge of a request of the last batch.
    mean_cost: u64,
    /// Gets a message when the last request is done. While it is set, no request is taken.
    drain_notice: Option<Sender<()>>,
}

impl QueueEngine {
    /// An engine with everything allocated that the queue will ever need.
    pub fn new(
        vring: Vring,
        port: Arc<PortState>,
        stats: Arc<BlockStats>,
        disk: Box<dyn Disk>,
    ) -> Result<Self, BlockError> {
        let depth = Self::depth(&vring);
        let bounce = port.has_stages || port.demands.mem_align.max(port.demands.offset_align) > 1;
        let pass = GatePass::new(port.gate.clone(), port.vm);
        let bounces = Bounces::new(bounce).map_err(BlockError::resource("bounce buffers"))?;
        let in_flight = InFlight::new(disk, Slab::new(depth), bounces, Arc::clone(&port.orphans));
        // An earlier worker may have ended without resetting it.
        stats.held.set(0);
        let batch_max = if in_flight.is_immediate { IMMEDIATE_BATCH } else { BATCH_CHAINS };
        Ok(Self {
            vring,
            batch_max,
            flushes: Flushes::new(depth),
            holding: Holding::new(depth),
            in_flight,
            port,
            stats,
            batch: Batch::new(BATCH_CHAINS, BATCH_CHAINS * 8),
            done: Vec::with_capacity(usize::from(depth)),
            completions: Vec::with_capacity(usize::from(depth)),
            latencies: LatencyRecorder::new(depth),
            log: ErrorLog::default(),
            pace: DriverPace::default(),
            pass,
            placeholders: None,
            may_have_placeholders: false,
            is_waiting: false,
            is_waiting_for_list: false,
            takes_new_first: false,
            mean_cost: MIN_CHARGE_BYTES,
            drain_notice: None,
        })
    }

    /// Most requests in flight.
    pub fn depth(vring: &Vring) -> u16 {
        vring.queue.size().clamp(1, MAX_IN_FLIGHT)
    }

    /// Takes no more requests; sends to `notice` when those in flight are done. `stays_inflight`:
    /// held requests stay in the inflight region, see [`holding`].
    pub fn drain(&mut self, notice: Sender<()>, stays_inflight: bool) {
        self.drain_notice = Some(notice);
        self.end_all_held(stays_inflight);
        self.check_drained();
    }

    /// Wakes the thread that waits for the end of a drain.
    pub fn wake_drain(&self) {
        if let Some(notice) = &self.drain_notice {
            let _ = notice.send(());
        }
    }

    /// Moves the queue to a changed memory table. Requests in flight keep theirs.
    pub fn set_memory(&mut self, memory: Arc<queue::GuestMemory>) {
        // The batch is empty between polls, but holds the table of its last chains.
        self.batch = Batch::new(BATCH_CHAINS, BATCH_CHAINS * 8);
        self.in_flight.forget_tables();
        if let Err(e) = self.vring.queue.set_memory(memory) {
            self.vring.fail(&e);
        }
    }

    /// Moves the queue to a changed memory table and, in the same step, to a disk that knows it:
    /// see [`crate::registered_memory`].
    pub fn move_to(
        &mut self,
        memory: Arc<queue::GuestMemory>,
        disk: Option<Box<dyn Disk>>,
        watcher: &Watcher<'_>,
    ) -> io::Result<()> {
        let mut watched = Ok(());
        if let Some(disk) = disk {
            self.in_flight.disk.event_fd().into_iter().for_each(|fd| watcher.unwatch(fd));
            self.replace_disk(disk);
            watched = self.in_flight.disk.event_fd().map_or(Ok(()), |fd| watcher.watch(fd));
        }
        self.set_memory(memory);
        watched
    }

    /// Sends all further operations to another disk.
    fn replace_disk(&mut self, mut disk: Box<dyn Disk>) {
        // We are awake; before a sleep it is told otherwise.
        disk.set_wakeups(false);
        self.in_flight.disk.replace(disk, self.in_flight.in_disk);
    }

    /// Descriptors that wake this worker.
    pub fn watched_fds(&self) -> Vec<RawFd> {
        let answers = self.placeholders.as_ref().map(|p| p.answers.event.as_raw_fd());
        self.vring
            .kick_fd()
            .into_iter()
            .chain(self.in_flight.disk.event_fd())
            .chain(answers)
            .collect()
    }

    /// Switches the write cache, as a driver does.
    #[cfg(test)]
    pub fn set_writeback(&self, on: bool) {
        self.port.writeback.store(on, std::sync::atomic::Ordering::SeqCst);
    }

    /// State that it shares with the port's other queues.
    #[cfg(test)]
    pub fn port_state(&self) -> Arc<PortState> {
        Arc::clone(&self.port)
    }

    /// The vring, after a drain.
    pub fn into_vring(self) -> Vring {
        self.vring
    }

    fn check_drained(&mut self) {
        if self.in_flight.slab.taken() == 0
            && let Some(notice) = &self.drain_notice
        {
            // A second notice finds no receiver, or one that reads once.
            let _ = notice.send(());
        }
    }

    /// Loads a popped chain into a slot and begins its request. Returns the cost of its first step.
    fn start(&mut self, index: usize, now_ns: u64) -> u64 {
        let Some(slot) = self.in_flight.slab.free.pop() else { return 0 };
        // Cannot fail: `take` looked for room.
        if !self.in_flight.slab.load(slot, &self.batch, index) {
            self.in_flight.slab.free.push(slot);
            self.break_port(index, "no room for its segments");
            return 0;
        }
        let s = &mut self.in_flight.slab.slots[usize::from(slot)];
        (s.is_taken, s.taken_ns) = (true, now_ns);
        if let Some(fault) = s.chain.chain().fault {
            self.refuse(slot, Status::IoErr, fault.into());
            return 0;
        }
        if s.chain.chain().writable_len == 0 {
            self.in_flight.release(slot);
            self.break_port(index, "no room for the status byte");
            return 0;
        }
        match request::parse(&s.chain.chain(), &self.port.geometry(), &mut s.ranges) {
            Ok(request) => self.begin(slot, request),
            Err((status, refusal)) => {
                self.refuse(slot, status, refusal);
                0
            }
        }
    }

    fn break_port(&mut self, index: usize, what: &'static str) {
        let head = self.batch.get(index).id;
        self.vring.fail(&RingError::BadRequest { head, what });
    }

    fn begin(&mut self, slot: u16, request: Request) -> u64 {
        let s = &mut self.in_flight.slab.slots[usize::from(slot)];
        let first = s.ranges[0];
        s.job = match request {
            Request::Read(range) => {
                self.pace.note_request(range.len);
                Job::new(JobKind::Read, range)
            }
            Request::Write(range) => {
                self.pace.note_request(range.len);
                Job::new(JobKind::Write, range)
            }
            Request::Flush => Job::new(JobKind::Flush, request::Range::default()),
            Request::GetId => {
                self.get_id(slot);
                return 0;
            }
            Request::Discard(n) => Job { range_count: n, ..Job::new(JobKind::Discard, first) },
            Request::WriteZeroes(n) => Job {
                range_count: n,
                // Stages see what is written: zeroes then pass through them as data.
                writes_zeroes: self.port.has_stages,
                ..Job::new(JobKind::WriteZeroes, first)
            },
        };
        if s.job.kind != JobKind::Flush && self.in_flight.skip_empty_ranges(slot) {
            // Nothing to move, but write-through still promises durability: nothing was written.
            self.finish(slot, Status::Ok);
            return 0;
        }
        if self.needs_failed_flush(slot) {
            self.fail_for_flush(slot);
            return 0;
        }
        if self.may_have_placeholders && matches!(request, Request::Read(_) | Request::Write(_)) {
            self.inspect_head(slot);
        }
        self.in_flight.slab.ready.push_back(slot);
        self.in_flight.prepay(slot, &self.port)
    }

    /// GET ID: the serial number, then zeroes up to the status byte.
    fn get_id(&mut self, slot: u16) {
        let chain = self.in_flight.slab.slots[usize::from(slot)].chain.chain();
        let room = chain.writable_len as usize - 1;
        let id_len = self.port.serial.len().min(room);
        queue::seg::copy_in(chain.writable, 0, &self.port.serial[..id_len]);
        queue::seg::fill_zero(chain.writable, id_len, room - id_len);
        self.stats.get_ids.add(1);
        self.complete(slot, Status::Ok, room as u32);
    }

    fn refuse(&mut self, slot: u16, status: Status, refusal: Refusal) {
        self.stats.refused[refusal as usize].add(1);
        self.log.refused(self.vring.parts.health.name(), self.vring.parts.index, refusal);
        self.complete(slot, status, 0);
    }

    /// Ends a request that was begun.
    fn finish(&mut self, slot: u16, status: Status) {
        let s = &self.in_flight.slab.slots[usize::from(slot)];
        let chain = s.chain.chain();
        let mut written = 0;
        match s.job.kind {
            JobKind::Read => {
                self.stats.reads.add(1);
                if status == Status::Ok {
                    written = chain.writable_len - 1;
                    self.count_bytes(u64::from(written), true);
                } else {
                    // Steps that were done, in order.
                    written = s.job.done as u32;
                }
            }
            JobKind::Write => {
                self.stats.writes.add(1);
                if status == Status::Ok {
                    self.count_bytes(s.job.range.len, false);
                }
            }
            JobKind::Flush => self.stats.flushes.add(1),
            JobKind::Discard => self.stats.discards.add(1),
            JobKind::WriteZeroes => self.stats.write_zeroes.add(1),
        }
        self.complete(slot, status, written);
    }

    fn count_bytes(&self, len: u64, read: bool) {
        let counter = if read { &self.stats.read_bytes } else { &self.stats.written_bytes };
        counter.add(len);
        self.vring.parts.stats.bytes.add(len);
        if self.port.demands.copies {
            self.vring.parts.stats.copied_bytes.add(len);
        }
    }

    /// Writes the status byte, where there is one (of a chain with a fault it may be out of reach),
    /// and frees the slot; the completion is published with its batch. `data_len`: bytes of data
    /// that were written from the first on. The used length is of bytes without a gap (virtio 1.2,
    /// 2.7.8.2): it counts the status byte only when all before it was written.
    fn complete(&mut self, slot: u16, status: Status, data_len: u32) {
        self.forget_probe(slot);
        let Slot { chain: held, taken_ns, .. } = &self.in_flight.slab.slots[usize::from(slot)];
        self.latencies.add(*taken_ns);
        let chain = held.chain();
        let mut written = data_len;
        if queue::seg::set_last_byte(chain.writable, status as u8) {
            // Of a chain with a fault, what lies before the status byte is not known here.
            let is_whole = chain.writable_len - 1 == data_len && chain.fault.is_none();
            written += u32::from(is_whole);
        }
        // The status byte is the last one, and failed reads may have written too: all is dirty.
        self.vring.queue.mark_held(held, chain.writable_len as usize);
        self.completions.push(Completion { id: chain.id, ndesc: chain.ndesc, written });
        self.in_flight.release(slot);
    }

    /// Starts issued operations and takes in finished ones. Returns their number.
    fn collect(&mut self) -> usize {
        let placed = self.collect_answers();
        if self.in_flight.in_disk == 0 {
            return placed;
        }
        if let Err(e) = self.in_flight.disk.flush_submissions() {
            self.log.broken_disk(self.vring.parts.health.name(), self.vring.parts.index, &e);
        }
        self.done.clear();
        self.in_flight.disk.reap(&mut self.done);
        // All of them first: an error of one must not leave the others marked as in the disk.
        self.done.retain(|done| self.in_flight.returned(done.token).is_some());
        for k in 0..self.done.len() {
            let DiskDone { token, result } = self.done[k];
            self.advance(token as u16, result);
        }
        placed + self.done.len()
    }

    /// Takes in a finished operation: its request goes on, or ends.
    fn advance(&mut self, slot: u16, result: Result<u32, i32>) {
        let is_flush = self.in_flight.is_flush(slot);
        let next = self.in_flight.advance(slot, result, &self.port, &self.stats, &self.vring);
        self.note_progress(slot, &next);
        match next {
            OpOutcome::Again => self.in_flight.slab.ready.push_front(slot),
            OpOutcome::NextStep => self.in_flight.slab.ready.push_back(slot),
            OpOutcome::Finished if is_flush => self.end_flush(slot, None),
            OpOutcome::Finished => self.finish(slot, Status::Ok),
            OpOutcome::StageRefused => {
                self.stats.stage_refused.add(1);
                self.finish(slot, Status::IoErr);
            }
            OpOutcome::Failed(errno) if is_flush => self.end_flush(slot, Some(errno)),
            OpOutcome::Failed(errno) => self.fail(slot, errno),
        }
    }

    fn is_busy(&self) -> bool {
        self.in_flight.in_disk >= BUSY_DEPTH && self.drain_notice.is_none() && !self.pace.is_large()
    }

    /// Makes this poll's completions visible.
    fn publish(&mut self) {
        self.stats.in_flight.set(self.in_flight.slab.taken() as u64);
        self.pass.hold(self.in_flight.slab.taken() - self.holding.count());
        if self.completions.is_empty() {
            return;
        }
        self.vring.push(&self.completions);
        self.completions.clear();
    }

    /// Notifies the driver of completions: at once, or together with later ones.
    fn notify(&mut self, now_ns: u64) {
        match self.gathering(now_ns) {
            Some(lazy) => self.vring.notify_coalesced(now_ns, lazy),
            None => self.vring.notify(),
        }
        self.check_drained();
    }

    /// Limits of gathering completions now; `None`: they do not gather.
    fn gathering(&mut self, now_ns: u64) -> Option<Coalescing> {
        let slack_ns = self.slack_ns(now_ns);
        if slack_ns > 0 {
            return Some(gather_within(slack_ns));
        }
        self.is_busy().then_some(GATHERING)
    }

    /// Slack of the driver, see [`DriverPace`].
    fn slack_ns(&mut self, now_ns: u64) -> u64 {
        if self.drain_notice.is_some() {
            return 0;
        }
        let outstanding = self.outstanding();
        self.pace.slack_ns(now_ns, outstanding)
    }

    /// Number of requests that the driver sees as not done, without held ones.
    fn outstanding(&self) -> u32 {
        (self.in_flight.slab.taken() - self.holding.count()) as u32 + self.vring.unnotified()
    }
}
