//! Requests on their way through the disk: steps, bounce buffers, short operations, fallbacks.
//!
//! A range is done in steps of at most [`STEP_LEN_BYTES`] (or a bounce buffer), and a step in as
//! many operations as the disk needs: one that moves less than asked goes on where it stopped.
//! Steps are the unit of fairness between requests; within a step nothing else of the request is in
//! flight.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::stage::Direction;
use base::io::{Disk, DiskDone, DiskOp, IoSlice};
use queue::{Chain, ChainBuf, Seg, Vring};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::cost;
use crate::dropper;
use crate::error::is_transient;
use crate::limits::{MAX_OP_SEGS, MAX_RETRIES, SHORT_STEP_LEN_BYTES, STEP_LEN_BYTES};
use crate::metrics::BlockStats;
use crate::orphans::Orphans;
use crate::port_state::PortState;
use crate::queue_disks::QueueDisks;
use crate::request::HEADER_LEN_BYTES;
use crate::slab::{Bounces, IoVecs, Job, JobKind, Slab, Slot, ZEROES};

/// Longest pause between two looks at the disks of a queue that ended: former disks ring no event.
const SETTLE_LOOK: Duration = Duration::from_millis(100);

/// Outcome of an attempt to give a request to the disk.
#[derive(Debug)]
pub(crate) enum IssueOutcome {
    /// The disk has it.
    Sent(IssuedOp),
    /// No bounce buffer, or the disk is full: try again when something finishes.
    Blocked,
    /// A stage does not let the data pass.
    StageRefused,
    /// The disk refused, with this errno.
    Failed(i32),
}

/// Operation that was given to the disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct IssuedOp {
    /// Bytes that move while the sidecore waits, or as if it did.
    pub bytes: u64,
    /// Bytes to be charged: the cost of a step that begins, less the part that was paid before.
    pub due: u64,
}

/// Outcome of an operation for its request.
#[derive(Debug)]
pub(crate) enum OpOutcome {
    /// The same step goes on, or the flush after the last one.
    Again,
    /// The next step, after others had their turn and when there is credit for it.
    NextStep,
    /// All done.
    Finished,
    /// A stage does not let the data pass.
    StageRefused,
    /// The disk failed, with this errno.
    Failed(i32),
}

/// Requests of a queue that are in flight, with the disk that works on them.
pub(crate) struct InFlight {
    /// The queue's disk. Dropped before the buffers that it uses. With operations left in it, both
    /// live on until those are over: see [`crate::orphans`].
    pub disk: ManuallyDrop<QueueDisks>,
    pub slab: Slab,
    bounces: Bounces,
    orphans: Arc<Orphans>,
    /// Number of operations that the disk has.
    pub in_disk: usize,
    /// Whether the disk works while the sidecore waits.
    pub is_immediate: bool,
    /// Most bytes of a step that begins now.
    pub step_len_bytes: u32,
    /// Buffers of an operation that the disk does at once: see [`InFlight::run`].
    iov: IoVecs,
}

impl InFlight {
    /// `orphans`: the port's count of operations that outlive their queue.
    pub fn new(disk: Box<dyn Disk>, slab: Slab, bounces: Bounces, orphans: Arc<Orphans>) -> Self {
        let is_immediate = disk.is_immediate();
        let disk = ManuallyDrop::new(QueueDisks::new(disk));
        let step_len_bytes = STEP_LEN_BYTES;
        let iov = IoVecs::new();
        Self { disk, slab, bounces, orphans, in_disk: 0, is_immediate, step_len_bytes, iov }
    }

    /// Chooses the length of steps: short ones where the sidecore waits for the disk and others
    /// wait for the sidecore (`is_crowded`).
    #[inline]
    pub fn choose_step(&mut self, is_crowded: bool) {
        let is_short = self.is_immediate && is_crowded;
        self.step_len_bytes = if is_short { SHORT_STEP_LEN_BYTES } else { STEP_LEN_BYTES };
    }

    /// Whether the next operation of a request is a flush.
    #[inline]
    pub fn is_flush(&self, slot: u16) -> bool {
        self.slab.slots[usize::from(slot)].job.is_flush()
    }

    /// Whether the next operation of a request needs no charge.
    #[inline]
    pub fn is_paid(&self, slot: u16) -> bool {
        let job = &self.slab.slots[usize::from(slot)].job;
        let in_step = job.step_len > 0 && job.due_bytes == 0;
        job.paid_bytes > 0 || in_step || job.is_flush()
    }

    /// Frees a slot, its bounce buffer and its hold on guest memory.
    #[inline]
    pub fn release(&mut self, slot: u16) {
        let s = &mut self.slab.slots[usize::from(slot)];
        if std::mem::take(&mut s.has_old_table) {
            s.chain.release().into_iter().for_each(dropper::drop_table);
        } else {
            s.chain.retire();
        }
        s.iov.0.clear();
        s.is_taken = false;
        if let Some(bounce) = s.bounce.take() {
            self.bounces.give(bounce);
        }
        self.slab.narrow(slot);
        self.slab.free.push(slot);
    }

    /// Lets go of the queue's old memory table: no slot keeps it for longer than its request.
    pub fn forget_tables(&mut self) {
        self.slab.unused_chains().filter_map(ChainBuf::release).for_each(dropper::drop_table);
        for slot in self.slab.slots.iter_mut().filter(|slot| slot.is_taken) {
            slot.has_old_table = true;
        }
    }

    /// Skips ranges without bytes; true when no range is left.
    #[inline]
    pub fn skip_empty_ranges(&mut self, slot: u16) -> bool {
        let s = &mut self.slab.slots[usize::from(slot)];
        while s.job.range.len == s.job.done {
            s.job.range_index += 1;
            if s.job.range_index >= s.job.range_count {
                return true;
            }
            s.job.range = s.ranges[usize::from(s.job.range_index)];
            s.job.done = 0;
        }
        false
    }

    /// Counts the first step of a request as paid. Returns its cost.
    #[inline]
    pub fn prepay(&mut self, slot: u16, port: &PortState) -> u64 {
        let job = &mut self.slab.slots[usize::from(slot)].job;
        let len_bytes = (job.range.len - job.done).min(cost::max_step_len_bytes(
            job,
            &port.demands,
            self.step_len_bytes,
        ));
        job.paid_bytes = cost::step_charge_bytes(job, len_bytes, port.demands.within_call());
        job.paid_bytes
    }

    /// Gives the request's next operation to the disk.
    #[inline]
    pub fn issue(&mut self, slot: u16, port: &PortState) -> IssueOutcome {
        let s = &mut self.slab.slots[usize::from(slot)];
        if s.job.step_len == 0 && !s.job.is_flush() {
            if s.job.done == 0 && s.job.range_index == 0 {
                s.job.is_bouncing = needs_bounce(s, port);
            }
            if let Err(refused) = begin_step(s, &mut self.bounces, port, self.step_len_bytes) {
                return refused;
            }
            let job = &mut s.job;
            let cost =
                cost::step_charge_bytes(job, job.step_len.into(), port.demands.within_call());
            let paid = job.paid_bytes.min(cost);
            (job.paid_bytes, job.due_bytes) = (job.paid_bytes - paid, cost - paid);
        }
        let op = next_op(s, &mut self.bounces);
        let bytes = match op {
            DiskOp::Read { len_bytes, .. } | DiskOp::Write { len_bytes, .. } => {
                u64::from(len_bytes) / cost::budget_share(&port.demands, s.job.is_bouncing)
            }
            // Done while the sidecore waits: it costs what the same length of copying does.
            DiskOp::Discard { len_bytes, .. } | DiskOp::WriteZeroes { len_bytes, .. }
                if port.demands.within_call() =>
            {
                len_bytes
            }
            DiskOp::Discard { .. } | DiskOp::WriteZeroes { .. } | DiskOp::Flush => 4096,
        };
        // SAFETY: list and buffers belong to the slot: guest memory held by its `ChainBuf`, a
        // bounce buffer it has taken, or the static zeroes. None is touched or freed while
        // `in_disk` is set, and a `InFlight` that is dropped then lives on until the disk is done.
        match unsafe { self.disk.submit(u32::from(slot), op) } {
            Ok(()) => {
                s.job.is_in_disk = true;
                self.in_disk += 1;
                IssueOutcome::Sent(IssuedOp { bytes, due: std::mem::take(&mut s.job.due_bytes) })
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && self.in_disk > 0 => {
                IssueOutcome::Blocked
            }
            Err(e) => IssueOutcome::Failed(e.raw_os_error().unwrap_or(libc::EIO)),
        }
    }

    /// Has the disk move `len_bytes` of a read or write in no slot, at once. False: it did not move
    /// all of them.
    #[inline]
    pub fn run(&mut self, chain: &Chain<'_>, is_read: bool, offset: u64, len_bytes: u32) -> bool {
        let iov = &mut self.iov.0;
        iov.clear();
        let (segs, skip) =
            if is_read { (chain.writable, 0) } else { (chain.readable, HEADER_LEN_BYTES) };
        let described = queue::seg::subrange(segs, skip, len_bytes as usize, iov);
        let (bufs, count) = (iov.as_ptr(), iov.len() as u32);
        let op = match is_read {
            true => DiskOp::Read { offset, bufs, count, len_bytes },
            false => DiskOp::Write { offset, bufs, count, len_bytes },
        };
        // SAFETY: the list is ours, and its buffers are a chain's, whose batch keeps them mapped.
        described == len_bytes as usize && unsafe { self.disk.run(op) } == Ok(len_bytes)
    }

    /// Bounce buffers that no request has.
    #[cfg(test)]
    pub fn free_bounces(&self) -> usize {
        self.bounces.free_count()
    }

    /// Forgets the step in work, which will begin anew later, and frees its bounce buffer.
    pub fn rewind(&mut self, slot: u16) {
        let s = &mut self.slab.slots[usize::from(slot)];
        if let Some(bounce) = s.bounce.take() {
            self.bounces.give(bounce);
        }
        (s.job.step_len, s.job.step_done, s.job.retries) = (0, 0, 0);
        (s.job.paid_bytes, s.job.due_bytes) = (0, 0);
    }

    /// Slot of a finished operation; `None` for a token that is not with the disk.
    pub fn returned(&mut self, token: u32) -> Option<u16> {
        let slot = u16::try_from(token).ok()?;
        let job = &mut self.slab.slots.get_mut(usize::from(slot))?.job;
        if !std::mem::take(&mut job.is_in_disk) {
            return None;
        }
        self.in_disk -= 1;
        Some(slot)
    }

    /// Takes in the result of an operation.
    #[inline]
    pub fn advance(
        &mut self,
        slot: u16,
        result: Result<u32, i32>,
        port: &PortState,
        stats: &BlockStats,
        vring: &Vring,
    ) -> OpOutcome {
        let s = &mut self.slab.slots[usize::from(slot)];
        let moved = match result {
            Ok(moved) => moved,
            Err(errno) => match recover(&mut s.job, errno) {
                Recovery::Retry => return OpOutcome::Again,
                Recovery::Ignore => s.job.step_len,
                Recovery::Fail => return OpOutcome::Failed(errno),
            },
        };
        if s.job.is_flush() {
            return OpOutcome::Finished;
        }
        if let Err(errno) = move_on(s, moved, &mut self.bounces, port.demands.offset_align) {
            return OpOutcome::Failed(errno);
        }
        if s.job.step_done < s.job.step_len {
            stats.short_ops.add(1);
            return OpOutcome::Again;
        }
        if s.bounce.is_some() {
            if s.job.done == 0 {
                stats.bounced.add(1);
            }
            vring.parts.stats.copied_bytes.add(u64::from(s.job.step_len));
        }
        if !self.end_step(slot, port) {
            return OpOutcome::StageRefused;
        }
        if !self.skip_empty_ranges(slot) {
            return OpOutcome::NextStep;
        }
        let job = &mut self.slab.slots[usize::from(slot)].job;
        if job.kind != JobKind::Read && !port.writeback.load(std::sync::atomic::Ordering::Relaxed) {
            job.is_flushing = true;
            // It costs nothing, and does not wait behind what does.
            return OpOutcome::Again;
        }
        OpOutcome::Finished
    }

    /// Ends a step: bounced data reaches the guest, and the buffer is free. False when a stage does
    /// not let the data pass.
    #[inline]
    fn end_step(&mut self, slot: u16, port: &PortState) -> bool {
        let s = &mut self.slab.slots[usize::from(slot)];
        let job = &mut s.job;
        let mut pass = true;
        if let Some(bounce) = s.bounce.take() {
            if job.kind == JobKind::Read {
                let data = &mut self.bounces.bytes(bounce)[..job.step_len as usize];
                let offset = job.range.offset + job.done;
                pass = !port.has_stages || port.run_stages(Direction::ToVm, offset, data);
                if pass {
                    queue::seg::copy_in(s.chain.chain().writable, job.done as usize, data);
                }
            }
            self.bounces.give(bounce);
        }
        if !pass {
            return false;
        }
        job.done += u64::from(job.step_len);
        job.step_len = 0;
        job.step_done = 0;
        job.retries = 0;
        true
    }

    /// Waits until the disk uses no buffer any more, however long that takes.
    pub fn settle(&mut self) {
        let mut done: Vec<DiskDone> = Vec::with_capacity(self.slab.slots.len());
        self.disk.set_wakeups(true);
        while self.in_disk > 0 {
            // An error here shows as a disk that never answers.
            let _ = self.disk.flush_submissions();
            done.clear();
            self.disk.reap(&mut done);
            for d in &done {
                self.returned(d.token);
            }
            if done.is_empty() {
                wait_for(&self.disk);
            }
        }
    }
}

/// Waits until the disk's event is readable, at most for [`SETTLE_LOOK`].
fn wait_for(disk: &QueueDisks) {
    let Some(fd) = disk.event_fd() else { return std::thread::sleep(SETTLE_LOOK) };
    // SAFETY: the descriptor belongs to the disk, which is borrowed for the length of this call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let limit = Timespec { tv_sec: 0, tv_nsec: i64::from(SETTLE_LOOK.subsec_nanos()) };
    // A signal or an error only makes the caller look again.
    let _ = rustix::event::poll(&mut fds, Some(&limit));
    // The event stays readable until read; looking again at once would spin.
    let _ = rustix::io::read(fd, &mut [0u8; 8]);
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // SAFETY: taken here only, and not used afterwards.
        let disk = unsafe { ManuallyDrop::take(&mut self.disk) };
        if self.in_disk == 0 {
            return;
        }
        // The kernel may still write to these buffers. Nothing is asked of the disk here: this may
        // be a sidecore, and a disk that has just panicked.
        let rest = Self {
            disk: ManuallyDrop::new(disk),
            slab: self.slab.take(),
            bounces: std::mem::replace(&mut self.bounces, Bounces::none()),
            orphans: Arc::clone(&self.orphans),
            in_disk: self.in_disk,
            is_immediate: self.is_immediate,
            step_len_bytes: self.step_len_bytes,
            iov: IoVecs(Vec::new()),
        };
        Arc::clone(&self.orphans).adopt(self.in_disk, rest, InFlight::settle);
    }
}

enum Recovery {
    Retry,
    Ignore,
    Fail,
}

/// Chooses how a request goes on after an errno.
fn recover(job: &mut Job, errno: i32) -> Recovery {
    if is_transient(errno) && job.retries < MAX_RETRIES {
        job.retries += 1;
        return Recovery::Retry;
    }
    // EINVAL: block devices and some file systems answer so where they lack the operation.
    let missing = matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY | libc::EINVAL);
    match job.kind {
        // A discard is a hint.
        JobKind::Discard if missing && !job.is_flushing => Recovery::Ignore,
        JobKind::WriteZeroes if missing && !job.is_flushing && !job.writes_zeroes => {
            job.writes_zeroes = true;
            job.step_len = 0;
            job.step_done = 0;
            Recovery::Retry
        }
        _ => Recovery::Fail,
    }
}

/// Whether the data of a request must go through a bounce buffer.
#[inline]
fn needs_bounce(s: &Slot, port: &PortState) -> bool {
    let chain = s.chain.chain();
    let (segs, skip) = match s.job.kind {
        JobKind::Read => (chain.writable, 0),
        JobKind::Write => (chain.readable, HEADER_LEN_BYTES),
        JobKind::WriteZeroes => return port.has_stages,
        JobKind::Flush | JobKind::Discard => return false,
    };
    let demands = &port.demands;
    // More segments than an operation takes: it ends with one of them, and at a whole block then.
    let is_cut = segs.len() > MAX_OP_SEGS;
    let align =
        if is_cut { demands.mem_align.max(demands.offset_align) } else { demands.mem_align };
    port.has_stages || !aligned(segs, skip, s.job.range.len, u64::from(align))
}

/// Whether each piece of the data (`len` bytes after `skip`) starts at, and is, a multiple of
/// `align`.
fn aligned(segs: &[Seg], skip: usize, len: u64, align: u64) -> bool {
    if align <= 1 {
        return true;
    }
    let (mut skip, mut left) = (skip as u64, len);
    for iov in queue::seg::as_iovecs(segs) {
        let seg_len = iov.iov_len as u64;
        let skipped = skip.min(seg_len);
        let used = (seg_len - skipped).min(left);
        let start = iov.iov_base as u64 + skipped;
        if used > 0 && !(start | used).is_multiple_of(align) {
            return false;
        }
        skip -= skipped;
        left -= used;
    }
    true
}

/// Sets the length of the next step and prepares its bounce buffer.
fn begin_step(
    s: &mut Slot,
    bounces: &mut Bounces,
    port: &PortState,
    step_len_bytes: u32,
) -> Result<(), IssueOutcome> {
    let job = &mut s.job;
    let len = (job.range.len - job.done).min(cost::max_step_len_bytes(
        job,
        &port.demands,
        step_len_bytes,
    )) as u32;
    if job.is_bouncing && !job.is_native() {
        let bounce = bounces.take().ok_or(IssueOutcome::Blocked)?;
        s.bounce = Some(bounce);
        let data = &mut bounces.bytes(bounce)[..len as usize];
        match job.kind {
            JobKind::Write => {
                let from = HEADER_LEN_BYTES + job.done as usize;
                queue::seg::copy_out(s.chain.chain().readable, from, data);
            }
            JobKind::WriteZeroes => data.fill(0),
            _ => {}
        }
        let offset = job.range.offset + job.done;
        let write = job.kind != JobKind::Read;
        if write && port.has_stages && !port.run_stages(Direction::FromVm, offset, data) {
            return Err(IssueOutcome::StageRefused);
        }
    }
    job.step_len = len;
    job.step_done = 0;
    Ok(())
}

/// The operation that continues the step in work.
fn next_op(s: &mut Slot, bounces: &mut Bounces) -> DiskOp {
    let job = &s.job;
    if job.is_flushing {
        return DiskOp::Flush;
    }
    let offset = job.range.offset + job.done + u64::from(job.step_done);
    let left = job.step_len - job.step_done;
    let (range, may_unmap) = (u64::from(left), job.range.unmap);
    match job.kind {
        JobKind::Flush => return DiskOp::Flush,
        JobKind::Discard => return DiskOp::Discard { offset, len_bytes: range },
        JobKind::WriteZeroes if job.is_native() => {
            return DiskOp::WriteZeroes { offset, len_bytes: range, may_unmap };
        }
        _ => {}
    }
    let iov = &mut s.iov.0;
    iov.clear();
    let at = job.done as usize + job.step_done as usize;
    let chain = s.chain.chain();
    let len_bytes = match (s.bounce, job.kind) {
        (Some(bounce), _) => {
            let data = &mut bounces.bytes(bounce)[job.step_done as usize..job.step_len as usize];
            iov.push(IoSlice { iov_base: data.as_mut_ptr().cast(), iov_len: data.len() });
            left
        }
        (None, JobKind::Read) => {
            queue::seg::subrange(chain.writable, at, left as usize, iov) as u32
        }
        (None, JobKind::WriteZeroes) => ZEROES.describe(left, iov),
        (None, _) => {
            queue::seg::subrange(chain.readable, HEADER_LEN_BYTES + at, left as usize, iov) as u32
        }
    };
    let (bufs, count) = (iov.as_ptr(), iov.len() as u32);
    match job.kind {
        JobKind::Read => DiskOp::Read { offset, bufs, count, len_bytes },
        _ => DiskOp::Write { offset, bufs, count, len_bytes },
    }
}

/// Adds what an operation moved to the step. Errors are errnos.
fn move_on(s: &mut Slot, moved: u32, bounces: &mut Bounces, align: u32) -> Result<(), i32> {
    let job = &mut s.job;
    let left = job.step_len - job.step_done;
    let mut moved = moved.min(left);
    match job.kind {
        // These report no bytes.
        JobKind::Discard => moved = left,
        JobKind::WriteZeroes if !job.writes_zeroes => moved = left,
        JobKind::Read => {
            // Nothing, or an odd rest from a direct read: the file ends here, the disk does not.
            if moved < left && (moved == 0 || !moved.is_multiple_of(align)) {
                let from = job.step_done + moved;
                if let Some(bounce) = s.bounce {
                    bounces.bytes(bounce)[from as usize..job.step_len as usize].fill(0);
                } else {
                    let at = job.done as usize + from as usize;
                    queue::seg::fill_zero(s.chain.chain().writable, at, (left - moved) as usize);
                }
                moved = left;
            }
        }
        _ => {
            // A direct write goes on at a whole block; that part is written again.
            if moved < left {
                moved -= moved % align;
            }
            if moved == 0 {
                return Err(libc::EIO);
            }
        }
    }
    job.step_done += moved;
    Ok(())
}
