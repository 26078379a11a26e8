//! Requests of a queue, from the ring to their completion.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::io::DiskDone;
use queue::{Batch, Chain, Completion, RingError, Vring};

use super::at_once::AtOnce;
use super::flushes::Flushes;
use super::held_requests::HeldRequests;
use super::placeholders::PlaceholderQueue;
use crate::driver_pace::DriverPace;
use crate::error_log::ErrorLog;
use crate::in_flight::{InFlight, IssueOutcome, OpOutcome};
use crate::latency::LatencyRecorder;
use crate::metrics::BlockStats;
use crate::port_state::PortState;
use crate::request::{self, Refusal, Request, Status};
use crate::slab::{Job, JobKind, Slot};

/// Requests of a queue, with all that they need on their way. When they have their turns, and who
/// pays for it, is the [`QueueEngine`](super::QueueEngine)'s.
pub(crate) struct Requests {
    pub vring: Vring,
    pub in_flight: InFlight,
    flushes: Flushes,
    held: HeldRequests,
    /// Handler of placeholder requests; `None` on ports without one.
    pub placeholders: Option<PlaceholderQueue>,
    /// Whether requests of this batch may be placeholders.
    pub(super) may_have_placeholders: bool,
    pub(super) at_once: AtOnce,
    pub port: Arc<PortState>,
    pub(super) stats: Arc<BlockStats>,
    done: Vec<DiskDone>,
    pub(super) completions: Vec<Completion>,
    pub(super) latencies: LatencyRecorder,
    log: ErrorLog,
    pub pace: DriverPace,
}

impl Requests {
    /// No requests yet, but room for up to `depth`.
    pub fn new(
        vring: Vring,
        in_flight: InFlight,
        depth: u16,
        port: Arc<PortState>,
        stats: Arc<BlockStats>,
    ) -> Self {
        // An earlier worker may have ended without resetting it.
        stats.held.set(0);
        Self {
            vring,
            in_flight,
            flushes: Flushes::new(depth),
            held: HeldRequests::new(depth),
            placeholders: None,
            may_have_placeholders: false,
            at_once: AtOnce::new(&port),
            port,
            stats,
            done: Vec::with_capacity(usize::from(depth)),
            completions: Vec::with_capacity(usize::from(depth)),
            latencies: LatencyRecorder::new(depth),
            log: ErrorLog::default(),
            pace: DriverPace::default(),
        }
    }

    /// Begins a turn: what completed in the last one has become visible, and a held request may be
    /// tried again. Returns the number of tries.
    #[inline]
    pub fn begin_turn(&mut self, now_ns: u64) -> usize {
        self.log.now_ns = now_ns;
        self.latencies.record(now_ns, &self.stats.latency_ns);
        if self.held.count() > 0 { self.retry_held(now_ns) } else { 0 }
    }

    /// Begins the sleep of the queue: its disk and its answers wake it. Returns the number of
    /// requests that went on meanwhile.
    pub fn begin_sleep(&mut self, now_ns: u64) -> usize {
        self.log.now_ns = now_ns;
        self.set_wakeups(true);
        // Operations that finished before the disk was told to ring.
        self.collect()
    }

    /// Switches the events of the disk and of answers, before a sleep and after it.
    pub fn set_wakeups(&mut self, on: bool) {
        self.in_flight.disk.set_wakeups(on);
        if let Some(queue) = &self.placeholders {
            queue.set_wakeups(on);
        }
    }

    /// Held requests, which bound the queue's sleep.
    pub(super) fn held(&self) -> &HeldRequests {
        &self.held
    }

    /// Number of requests in flight, without held ones.
    #[inline]
    pub fn active_count(&self) -> usize {
        self.in_flight.slab.taken() - self.held.count()
    }

    /// Number of requests that the driver sees as not done, without held ones.
    #[inline]
    pub fn outstanding(&self) -> u32 {
        (self.active_count() + self.completions.len()) as u32 + self.vring.unnotified()
    }

    /// Notes that a batch of requests came from the ring: they are started next.
    #[inline]
    pub fn begin_batch(&mut self, popped: usize) {
        self.may_have_placeholders =
            popped > 0 && self.placeholders.as_ref().is_some_and(PlaceholderQueue::has_known);
        if popped > 0 {
            self.choose_at_once(popped);
        }
    }

    /// Begins the request of a popped chain, and ends it too where that is possible at once.
    /// Returns the cost of its first step.
    #[inline]
    pub fn start(&mut self, batch: &Batch, index: usize, now_ns: u64) -> u64 {
        match self.serve_at_once(&batch.get(index), now_ns) {
            Some(cost) => cost,
            None => self.start_in_slot(batch, index, now_ns),
        }
    }

    /// Loads a popped chain into a slot and begins its request. Returns the cost of its first step.
    fn start_in_slot(&mut self, batch: &Batch, index: usize, now_ns: u64) -> u64 {
        let Some(slot) = self.in_flight.slab.free.pop() else { return 0 };
        // Cannot fail: whoever took the batch looked for room.
        if !self.in_flight.slab.load(slot, batch, index) {
            self.in_flight.slab.free.push(slot);
            self.break_port(batch.get(index).id, "no room for its segments");
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
            self.break_port(batch.get(index).id, "no room for the status byte");
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

    fn break_port(&mut self, head: u16, what: &'static str) {
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
        if self.may_have_placeholders
            && matches!(request, Request::Read(_) | Request::Write(_))
            && let Some(queue) = &self.placeholders
        {
            queue.inspect_head(&mut self.in_flight, slot);
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

    /// Gives waiting requests to the disk until it is full, a bounce buffer is missing, this poll's
    /// `budget` of bytes is used up, or a step would have to be paid beyond `credit` (but for the
    /// last one). Returns the number of operations, and the bytes to be charged.
    pub fn issue(&mut self, budget: &mut u64, credit: u64) -> (usize, u64) {
        let (mut issued, mut due_bytes) = (0, 0);
        while *budget > 0 {
            let Some(&slot) = self.in_flight.slab.ready.front() else { break };
            if due_bytes >= credit && !self.in_flight.is_paid(slot) {
                break;
            }
            let may_be_placeholder =
                self.in_flight.slab.slots[usize::from(slot)].job.may_be_placeholder;
            if may_be_placeholder
                && let Some(queue) = &mut self.placeholders
                && let Some(looked) = queue.inspect_next_part(&mut self.in_flight, &self.port, slot)
            {
                *budget = budget.saturating_sub(looked.bytes);
                due_bytes += looked.due;
                issued += 1;
                continue;
            }
            let is_flush = self.in_flight.is_flush(slot);
            if is_flush && self.join_flush(slot) {
                self.in_flight.slab.ready.pop_front();
                issued += 1;
                continue;
            }
            match self.in_flight.issue(slot, &self.port) {
                IssueOutcome::Sent(sent) => {
                    if is_flush {
                        self.flushes.lead(slot);
                    }
                    *budget = budget.saturating_sub(sent.bytes);
                    due_bytes += sent.due;
                    self.stats.disk_ops.add(1);
                }
                IssueOutcome::Blocked => break,
                IssueOutcome::StageRefused => {
                    self.stats.stage_refused.add(1);
                    self.finish(slot, Status::IoErr);
                }
                IssueOutcome::Failed(errno) if is_flush => self.end_flush(slot, Some(errno)),
                IssueOutcome::Failed(errno) => self.fail(slot, errno),
            }
            self.in_flight.slab.ready.pop_front();
            issued += 1;
        }
        (issued, due_bytes)
    }

    /// Starts issued operations and takes in finished ones. Returns their number.
    pub fn collect(&mut self) -> usize {
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

    /// Takes in the answers to placeholder requests that have come. Returns their number.
    fn collect_answers(&mut self) -> usize {
        let Some(queue) = &self.placeholders else { return 0 };
        let count = queue.reap(&mut self.done);
        for k in 0..count {
            let done = self.done[k];
            self.end_placeholder(done.token as u16, done.result.err());
        }
        count
    }

    fn end_placeholder(&mut self, slot: u16, errno: Option<i32>) {
        let s = &mut self.in_flight.slab.slots[usize::from(slot)];
        if !self.placeholders.as_mut().is_some_and(|queue| queue.take_back(s)) {
            return;
        }
        let is_durable = s.is_durable;
        if let Some(errno) = errno {
            return self.report(slot, errno);
        }
        if self.needs_failed_flush(slot) {
            return self.fail_for_flush(slot);
        }
        self.stats.placeholders.add(1);
        if !is_durable && !self.port.writeback.load(Ordering::Relaxed) {
            // The cache was switched off meanwhile: flush, as after a write of the disk.
            self.in_flight.slab.slots[usize::from(slot)].job.is_flushing = true;
            return self.in_flight.slab.ready.push_front(slot);
        }
        self.finish(slot, Status::Ok);
    }

    /// Whether a request needs a flush, which cannot succeed any more.
    #[inline]
    fn needs_failed_flush(&self, slot: u16) -> bool {
        if self.port.flush_failure().is_none() {
            return false;
        }
        match self.in_flight.slab.slots[usize::from(slot)].job.kind {
            JobKind::Flush => true,
            JobKind::Read => false,
            _ => !self.port.writeback.load(Ordering::Relaxed),
        }
    }

    /// Ends a request that needs a flush with an error. The log has the failure already.
    #[cold]
    fn fail_for_flush(&mut self, slot: u16) {
        self.stats.io_errors.add(1);
        self.finish(slot, Status::IoErr);
    }

    /// Lets a request wait for another's flush, or fail after a failed one. False when the disk
    /// must be given a flush for it.
    fn join_flush(&mut self, slot: u16) -> bool {
        if self.flushes.join(slot) {
            return true;
        }
        let is_lost = self.port.flush_failure().is_some();
        if is_lost {
            self.end_flush(slot, None);
        }
        is_lost
    }

    /// Ends the leader's flush: answers all that share it, and lets the next one begin.
    fn end_flush(&mut self, slot: u16, errno: Option<i32>) {
        if let Some(errno) = errno {
            let parts = &self.vring.parts;
            if self.port.fail_flushes(errno) {
                ErrorLog::flush_failed(parts.health.name(), Some(parts.index), errno);
            }
        }
        let is_lost = self.port.flush_failure().is_some();
        self.flushes.end(is_lost);
        let mut ended = Some(slot);
        while let Some(slot) = ended {
            match is_lost {
                true => self.fail_for_flush(slot),
                false => self.finish(slot, Status::Ok),
            }
            ended = self.flushes.take_shared();
        }
        if let Some(next) = self.flushes.take_next() {
            self.in_flight.slab.ready.push_front(next);
        }
    }

    /// Takes in a failure of the disk: the request is held, or the guest sees an I/O error.
    fn fail(&mut self, slot: u16, errno: i32) {
        let work = self.in_flight.slab.slots[usize::from(slot)].job.kind;
        if !self.port.on_error.holds(work, errno) {
            return self.report(slot, errno);
        }
        match self.held.is_ending() {
            false => self.hold(slot, errno),
            true => self.end_held(slot, errno),
        }
    }

    fn hold(&mut self, slot: u16, errno: i32) {
        self.in_flight.rewind(slot);
        if self.held.add(slot, errno, self.log.now_ns, &self.stats) {
            let job = &self.in_flight.slab.slots[usize::from(slot)].job;
            self.log.held(self.vring.parts.health.name(), self.vring.parts.index, job, errno);
        }
    }

    /// Tries one of the held requests again when it is time. Returns the number of tries.
    #[cold]
    fn retry_held(&mut self, now_ns: u64) -> usize {
        let probe = self.held.begin_probe(now_ns, &self.stats);
        self.in_flight.slab.ready.extend(probe);
        usize::from(probe.is_some())
    }

    /// Notes the progress of a request: when the probe succeeds, all held requests go on.
    #[inline]
    fn note_progress(&mut self, slot: u16, next: &OpOutcome) {
        if self.held.is_probe(slot) {
            let is_done = match next {
                OpOutcome::NextStep | OpOutcome::Finished => true,
                // The data is there, or the same step goes on.
                OpOutcome::Again => self.in_flight.is_flush(slot),
                OpOutcome::StageRefused | OpOutcome::Failed(_) => false,
            };
            if is_done {
                self.resume_held();
            }
        }
    }

    /// Lets all held requests go on. Returns their number.
    #[cold]
    pub fn resume_held(&mut self) -> usize {
        let count = self.held.release(&mut self.in_flight.slab.ready, &self.stats);
        if count > 0 {
            self.log.resumed(self.vring.parts.health.name(), self.vring.parts.index, count);
        }
        count
    }

    /// Ends all held requests, at the end of the queue: none is held from now on. `stays_inflight`:
    /// the next session takes them again from the inflight region. Returns whether there were any.
    pub fn end_all_held(&mut self, stays_inflight: bool) -> bool {
        self.held.begin_end(stays_inflight && self.vring.parts.inflight.is_some());
        let had_any = self.held.count() > 0;
        let errno = self.stats.held_errno.get() as i32;
        while let Some(slot) = self.held.take() {
            self.end_held(slot, errno);
        }
        self.held.show_count(&self.stats);
        had_any
    }

    fn end_held(&mut self, slot: u16, errno: i32) {
        match self.held.stays_inflight() {
            true => self.in_flight.release(slot),
            false => self.report(slot, errno),
        }
    }

    /// Ends a request with an I/O error, and logs the cause.
    fn report(&mut self, slot: u16, errno: i32) {
        self.stats.io_errors.add(1);
        if errno == libc::ENOSPC || errno == libc::EDQUOT {
            self.stats.no_space.add(1);
        }
        let job = self.in_flight.slab.slots[usize::from(slot)].job;
        self.log.failed(self.vring.parts.health.name(), self.vring.parts.index, &job, errno);
        self.finish(slot, Status::IoErr);
    }

    /// Ends a request that was begun.
    fn finish(&mut self, slot: u16, status: Status) {
        let s = &self.in_flight.slab.slots[usize::from(slot)];
        let chain = s.chain.chain();
        let mut written = 0;
        match s.job.kind {
            JobKind::Read if status == Status::Ok => {
                written = chain.writable_len - 1;
                self.count_moved(true, written.into());
            }
            JobKind::Read => {
                self.stats.reads.add(1);
                // Steps that were done, in order.
                written = s.job.done as u32;
            }
            JobKind::Write if status == Status::Ok => self.count_moved(false, s.job.range.len),
            JobKind::Write => self.stats.writes.add(1),
            JobKind::Flush => self.stats.flushes.add(1),
            JobKind::Discard => self.stats.discards.add(1),
            JobKind::WriteZeroes => self.stats.write_zeroes.add(1),
        }
        self.complete(slot, status, written);
    }

    /// Counts a read or write of `len` bytes that was done.
    #[inline]
    pub(super) fn count_moved(&self, is_read: bool, len: u64) {
        let stats = &self.stats;
        let (count, bytes) = match is_read {
            true => (&stats.reads, &stats.read_bytes),
            false => (&stats.writes, &stats.written_bytes),
        };
        count.add(1);
        bytes.add(len);
        self.vring.parts.stats.bytes.add(len);
        if self.port.demands.copies {
            self.vring.parts.stats.copied_bytes.add(len);
        }
    }

    /// Writes the status byte and frees the slot; the completion is published with its batch.
    /// `data_len`: bytes of data that were written from the first on.
    fn complete(&mut self, slot: u16, status: Status, data_len: u32) {
        self.held.forget_probe(slot, self.log.now_ns, &self.stats);
        let Slot { chain: held, taken_ns, .. } = &self.in_flight.slab.slots[usize::from(slot)];
        self.latencies.add(*taken_ns);
        let chain = held.chain();
        let written = write_status(&chain, status, data_len);
        // The status byte is the last one, and failed reads may have written too: all is dirty.
        self.vring.queue.mark_held(held, chain.writable_len as usize);
        self.completions.push(Completion { id: chain.id, ndesc: chain.ndesc, written });
        self.in_flight.release(slot);
    }

    /// Whether there are completions that are not visible to the driver.
    #[inline]
    pub fn has_completions(&self) -> bool {
        !self.completions.is_empty()
    }

    /// Makes completions visible to the driver, and counts.
    pub fn publish(&mut self) {
        self.stats.in_flight.set(self.in_flight.slab.taken() as u64);
        if self.completions.is_empty() {
            return;
        }
        self.vring.push(&self.completions);
        self.completions.clear();
    }
}

/// Writes the status byte, where there is one (of a chain with a fault it may be out of reach).
/// Returns the used length: of bytes without a gap (virtio 1.2, 2.7.8.2), so it counts the status
/// byte only when all before it was written. `data_len`: bytes of data that were written from the
/// first on.
#[inline]
pub(super) fn write_status(chain: &Chain<'_>, status: Status, data_len: u32) -> u32 {
    if !queue::seg::set_last_byte(chain.writable, status as u8) {
        return data_len;
    }
    // Of a chain with a fault, what lies before the status byte is not known here.
    let is_whole = chain.writable_len - 1 == data_len && chain.fault.is_none();
    data_len + u32::from(is_whole)
}
