//! Disk of one queue on a qcow2 image, over the disks of the image's files.
//!
//! Reads and writes of mapped clusters go straight to the file's own disk (`raw.rs`,
//! `resident.rs`): no copy, no thread. A write into new clusters is two operations there, the data
//! and then its entries, and is answered after the second. Everything else is a helper's: slices
//! that are not in memory, compressed clusters, writes that replace clusters, discards and zeroes.
//!
//! Operations are begun when their batch is handed over: until then the cache fetches their
//! entries, which the data of earlier ones drove out of it.
//!
//! The pieces of an operation that are in several places of the files are moved at the same time.
//! An operation whose rest must be done in another way than its beginning comes back short: the
//! engine goes on with the rest.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use base::io::{Disk, DiskDone, DiskOp, IoSlice};
use qcow2::chain::plan::MAX_ENTRIES_LEN_BYTES;
use qcow2::map::epochs::Stay;
use qcow2::{Allocation, ChainView, Place, Plan};
use queue::iovec::zero_all;
use queue::seg::prefetch;

use super::files::Files;
use super::pieces::{MAX_SPARE, Pieces, cut};
use super::pool::{HelperJob, Pool, Results};
use crate::error::is_transient;

/// State of an operation.
#[derive(Clone, Copy)]
enum OpState {
    Free,
    /// Submitted and not begun.
    Waiting,
    /// Data in one piece under way; its bytes.
    Mapped(u32),
    /// Data in several pieces under way.
    Pieces,
    /// Data on its way into new clusters; bytes written.
    Data(u32),
    /// Entries on their way; bytes written.
    Entries(u32),
    /// Flush of the files from this one on, and the count of `flush_begins` that it covers.
    Flush(u32, u64),
    /// Operation with a helper thread.
    WithHelper,
    /// Waiting: another operation changes the same entry.
    Blocked,
}

/// Operation of the queue: the part that every operation needs, in one cache line.
#[repr(align(64))]
struct Slot {
    token: u32,
    op: DiskOp,
    state: OpState,
    stay: Option<Stay>,
}

/// Part of a slot for operations that are not one piece of mapped data.
struct SlotExtra {
    /// New clusters, while data or entries are on their way.
    allocation: Option<Allocation>,
    /// Buffers of a part of the operation, or of the entries.
    bufs: Vec<IoSlice>,
    pieces: Pieces,
    entries: [u8; MAX_ENTRIES_LEN_BYTES],
}

/// Disk of one queue on a qcow2 image.
pub(super) struct Qcow2Disk {
    // Dropped before the buffers that it uses.
    files: Files,
    pool: Arc<Pool>,
    view: ChainView,
    results: Arc<Results>,
    slots: Vec<Slot>,
    extras: Vec<SlotExtra>,
    free: Vec<u16>,
    /// Submitted and not begun.
    waiting: VecDeque<u16>,
    /// Operation that is being begun, for the case of a panic.
    starting: Option<u16>,
    /// Number of pieces after the first that the disks have room for.
    free_pieces: u16,
    blocked: Vec<u16>,
    /// Operations for helpers that were not handed over yet.
    jobs: Vec<HelperJob>,
    /// Whether operations of the files were begun, or are for helpers, since the last
    /// [`Qcow2Disk::start`].
    has_begun: bool,
    done: Vec<DiskDone>,
    /// Finished operations of the files and helpers, while they are taken in.
    finished: Vec<DiskDone>,
}

// SAFETY: the addresses in slots are used under the contract of `Disk::submit`, on any thread.
unsafe impl Send for Qcow2Disk {}

impl Qcow2Disk {
    /// A disk with room for `depth` operations; the disks in `files` have room for [`MAX_SPARE`]
    /// more.
    pub fn new(pool: Arc<Pool>, files: Files, results: Arc<Results>, depth: u16) -> Self {
        let slot = |_| Slot { token: 0, op: DiskOp::Flush, state: OpState::Free, stay: None };
        let extra = |_| SlotExtra {
            allocation: None,
            bufs: Vec::with_capacity(crate::limits::MAX_OP_SEGS),
            pieces: Pieces::new(),
            entries: [0; MAX_ENTRIES_LEN_BYTES],
        };
        let waker = Arc::clone(&results);
        let room = usize::from(depth);
        let finished = Vec::with_capacity(room + usize::from(MAX_SPARE));
        Self {
            view: pool.chain().view(Arc::new(move || waker.wake())),
            files,
            pool,
            results,
            slots: (0..depth).map(slot).collect(),
            extras: (0..depth).map(extra).collect(),
            free: (0..depth).rev().collect(),
            waiting: VecDeque::with_capacity(room),
            starting: None,
            free_pieces: MAX_SPARE,
            blocked: Vec::with_capacity(room),
            jobs: Vec::with_capacity(room),
            has_begun: false,
            done: Vec::with_capacity(room),
            finished,
        }
    }

    /// Begins what was submitted.
    #[inline]
    fn begin_waiting(&mut self) {
        if let Some(at) = self.starting.take() {
            self.end_panicked(at);
        }
        while let Some(at) = self.waiting.pop_front() {
            self.starting = Some(at);
            let stay = self.pool.chain().enter(&mut self.view);
            self.slots[usize::from(at)].stay = stay;
            self.begin(at);
            self.starting = None;
        }
    }

    /// Ends an operation whose beginning panicked: the queue's owner waits for it. An operation
    /// that got to a file ends by itself.
    #[cold]
    fn end_panicked(&mut self, at: u16) {
        if matches!(self.slots[usize::from(at)].state, OpState::Waiting) {
            self.finish(at, Err(libc::EIO));
        }
    }

    /// Begins an operation, or begins it again.
    #[inline]
    fn begin(&mut self, at: u16) {
        match self.slots[usize::from(at)].op {
            DiskOp::Read { offset, len_bytes, .. } => self.begin_read(at, offset, len_bytes),
            DiskOp::Write { offset, len_bytes, .. } => self.begin_write(at, offset, len_bytes),
            DiskOp::Flush => self.begin_flush(at, 0, self.pool.chain().flush_begins()),
            DiskOp::Discard { .. } | DiskOp::WriteZeroes { .. } => self.send_to_helper(at),
        }
    }

    #[inline]
    fn begin_read(&mut self, at: u16, offset: u64, len: u32) {
        if len == 0 {
            return self.finish(at, Ok(0));
        }
        if !self.files.fits(offset, len.into()) {
            return self.send_to_helper(at);
        }
        match self.pool.chain().find(&mut self.view, offset, len.into()) {
            Place::Zero(n) | Place::File { len: n, .. } if n < len.into() => {
                self.begin_pieces(at, offset, len);
            }
            Place::Zero(_) => {
                let (bufs, count) = self.buffers(at, 0, len);
                // SAFETY: the buffers of an operation that is not done.
                unsafe { zero_all(bufs, count) };
                self.finish(at, Ok(len));
            }
            Place::File { layer, host, len: n } if self.files.fits(host, n) => {
                self.slots[usize::from(at)].state = OpState::Mapped(len);
                let (bufs, count) = self.buffers(at, 0, len);
                let op = DiskOp::Read { offset: host, bufs, count, len_bytes: len };
                self.submit_to(self.files.of_layer(layer), at.into(), op);
            }
            Place::File { .. }
            | Place::Compressed { .. }
            | Place::Miss { .. }
            | Place::Bad { .. } => self.send_to_helper(at),
        }
    }

    #[inline]
    fn begin_write(&mut self, at: u16, offset: u64, len: u32) {
        if len == 0 {
            return self.finish(at, Ok(0));
        }
        if !self.files.fits(offset, len.into()) {
            return self.send_to_helper(at);
        }
        match self.pool.chain().plan(&mut self.view, offset, len.into()) {
            Plan::InPlace { len: n, .. } if n < len.into() => self.begin_pieces(at, offset, len),
            Plan::InPlace { host, len: n } if self.files.fits(host, n) => {
                self.slots[usize::from(at)].state = OpState::Mapped(len);
                self.write_data(at, 0, len, host);
            }
            Plan::Allocate(allocation) => {
                self.extras[usize::from(at)].allocation = Some(allocation);
                self.write_new_clusters(at, 0);
            }
            Plan::Busy => {
                self.slots[usize::from(at)].state = OpState::Blocked;
                self.blocked.push(at);
            }
            Plan::InPlace { .. } | Plan::Slow => self.send_to_helper(at),
        }
    }

    /// Begins as many pieces of an operation as can be moved as they are.
    fn begin_pieces(&mut self, at: u16, offset: u64, len: u32) {
        self.slots[usize::from(at)].state = OpState::Pieces;
        self.extras[usize::from(at)].pieces.begin();
        while self.begin_piece(at, offset, len) {}
        let pieces = &mut self.extras[usize::from(at)].pieces;
        if pieces.len_bytes() == 0 {
            return self.send_to_helper(at);
        }
        if let Some(result) = pieces.all_begun() {
            self.finish(at, result);
        }
    }

    /// Begins the next piece of an operation; false where there is none, or no room for it.
    fn begin_piece(&mut self, at: u16, offset: u64, len: u32) -> bool {
        let done = self.extras[usize::from(at)].pieces.len_bytes();
        if done >= len || done > 0 && self.free_pieces == 0 {
            return false;
        }
        let op = self.slots[usize::from(at)].op;
        let (DiskOp::Read { bufs, count, .. } | DiskOp::Write { bufs, count, .. }) = op else {
            return false;
        };
        let is_read = matches!(op, DiskOp::Read { .. });
        let Some((place, len)) = self.place(is_read, offset + u64::from(done), len - done) else {
            return false;
        };
        // SAFETY: the list stays until the operation is done.
        let all = unsafe { std::slice::from_raw_parts(bufs, count as usize) };
        let pieces = &mut self.extras[usize::from(at)].pieces;
        let Some(n) = pieces.add(all, len) else { return false };
        let (bufs, count) = pieces.bufs(n);
        let Some((disk, offset)) = place else {
            // SAFETY: the buffers of an operation that is not done.
            unsafe { zero_all(bufs, count) };
            pieces.end(n, Ok(len));
            return true;
        };
        self.free_pieces -= u16::from(n > 0);
        let op = match is_read {
            true => DiskOp::Read { offset, bufs, count, len_bytes: len },
            false => DiskOp::Write { offset, bufs, count, len_bytes: len },
        };
        self.submit_to(disk, u32::from(at) | (n as u32) << 16, op);
        // A piece that was refused took itself back, and no other follows.
        self.extras[usize::from(at)].pieces.len_bytes() > done
    }

    /// Finds the next bytes: their file and offset (`None`: they are zero) and their number. `None`
    /// at all where they cannot be moved as they are.
    fn place(
        &mut self,
        is_read: bool,
        offset: u64,
        max: u32,
    ) -> Option<(Option<(usize, u64)>, u32)> {
        let chain = self.pool.chain();
        let (disk, host, len) = match is_read {
            true => match chain.find(&mut self.view, offset, max.into()) {
                Place::Zero(len) => return Some((None, len as u32)),
                Place::File { layer, host, len } => (self.files.of_layer(layer), host, len),
                _ => return None,
            },
            false => {
                let (host, len) = chain.find_in_place(&mut self.view, offset, max.into())?;
                (self.files.data(), host, len)
            }
        };
        self.files.fits(host, len).then_some((Some((disk, host)), len as u32))
    }

    /// Ends a piece. A file that ends within a cluster has zeroes there.
    fn end_piece(&mut self, at: u16, n: usize, mut result: Result<u32, i32>) {
        self.free_pieces += u16::from(n > 0);
        let pieces = &mut self.extras[usize::from(at)].pieces;
        if result == Ok(0) && matches!(self.slots[usize::from(at)].op, DiskOp::Read { .. }) {
            let (bufs, count) = pieces.bufs(n);
            // SAFETY: the buffers of an operation that is not done.
            unsafe { zero_all(bufs, count) };
            result = Ok(pieces.piece_len(n));
        }
        if let Some(result) = pieces.end(n, result) {
            self.finish(at, result);
        }
    }

    /// Writes bytes `from..to` of an operation's data to `host`.
    fn write_data(&mut self, at: u16, from: u32, to: u32, host: u64) {
        let (bufs, count) = self.buffers(at, from, to);
        let op = DiskOp::Write { offset: host, bufs, count, len_bytes: to - from };
        self.submit_to(self.files.data(), at.into(), op);
    }

    /// Writes the data of new clusters from byte `done` on, or their entries after the last.
    fn write_new_clusters(&mut self, at: u16, done: u32) {
        let Some(allocation) = &self.extras[usize::from(at)].allocation else { return };
        let (len, host) = (allocation.len as u32, allocation.host + u64::from(done));
        if done < len {
            self.slots[usize::from(at)].state = OpState::Data(done);
            self.write_data(at, done, len, host);
        } else {
            self.write_entries(at, 0);
        }
    }

    /// Writes the entries of new clusters from byte `from` on, or ends the operation after the
    /// last.
    fn write_entries(&mut self, at: u16, from: u32) {
        let SlotExtra { allocation, bufs, entries, .. } = &mut self.extras[usize::from(at)];
        let Some(allocation) = allocation else { return };
        let len = allocation.encode(entries) as u32;
        if from >= len {
            return self.commit(at);
        }
        let offset = allocation.entries_offset() + u64::from(from);
        self.slots[usize::from(at)].state = OpState::Entries(from);
        bufs.clear();
        let base = entries[from as usize..].as_mut_ptr().cast();
        bufs.push(IoSlice { iov_base: base, iov_len: (len - from) as usize });
        let op = DiskOp::Write { offset, bufs: bufs.as_ptr(), count: 1, len_bytes: len - from };
        self.submit_to(self.files.map(), at.into(), op);
    }

    fn commit(&mut self, at: u16) {
        let Some(allocation) = self.extras[usize::from(at)].allocation.take() else { return };
        let len = allocation.len as u32;
        self.pool.chain().commit(allocation);
        self.finish(at, Ok(len));
    }

    fn begin_flush(&mut self, at: u16, file: u32, covers: u64) {
        self.slots[usize::from(at)].state = OpState::Flush(file, covers);
        match self.files.to_sync(file as usize) {
            Some(disk) => self.submit_to(disk, at.into(), DiskOp::Flush),
            None if !self.pool.chain().flush_ended(covers) => self.fail(at, libc::EIO),
            None => {
                // The map may have to look after clusters that were freed before.
                self.has_begun = true;
                self.finish(at, Ok(0));
            }
        }
    }

    /// `token`: the slot, and the number of a piece above it.
    #[inline(always)]
    fn submit_to(&mut self, disk: usize, token: u32, op: DiskOp) {
        self.has_begun = true;
        // SAFETY: buffers and their list belong to the caller of `submit`, or to the slot, and stay
        // until the operation is done.
        let submitted = unsafe { self.files.disk(disk).submit(token, op) };
        if let Err(e) = submitted {
            self.end_file_op(token, Err(e.raw_os_error().unwrap_or(libc::EIO)));
        }
    }

    /// Hands an operation to a helper.
    fn send_to_helper(&mut self, at: u16) {
        let slot = &mut self.slots[usize::from(at)];
        slot.state = OpState::WithHelper;
        self.has_begun = true;
        let results = Arc::clone(&self.results);
        self.jobs.push(HelperJob { token: at.into(), op: slot.op, results });
    }

    /// Takes in a finished operation of a file's disk, or of a helper.
    fn end_file_op(&mut self, token: u32, result: Result<u32, i32>) {
        let at = token as u16;
        if matches!(self.slots[usize::from(at)].state, OpState::Pieces) {
            return self.end_piece(at, (token >> 16) as usize, result);
        }
        let moved = match result {
            Ok(moved) => moved,
            Err(errno) => return self.fail(at, errno),
        };
        match self.slots[usize::from(at)].state {
            OpState::Mapped(len) => self.end_mapped(at, moved, len),
            OpState::Data(_) | OpState::Entries(_) if moved == 0 => self.fail(at, libc::EIO),
            OpState::Data(before) => self.write_new_clusters(at, before + moved),
            OpState::Entries(before) => self.write_entries(at, before + moved),
            OpState::Flush(file, covers) => self.begin_flush(at, file + 1, covers),
            OpState::WithHelper => self.finish(at, Ok(moved)),
            OpState::Free | OpState::Waiting | OpState::Blocked | OpState::Pieces => {}
        }
    }

    /// Ends data in one piece. A file that ends within a cluster has zeroes there.
    fn end_mapped(&mut self, at: u16, moved: u32, len: u32) {
        if moved == 0 && matches!(self.slots[usize::from(at)].op, DiskOp::Read { .. }) {
            let (bufs, count) = self.buffers(at, 0, len);
            // SAFETY: the buffers of an operation that is not done.
            unsafe { zero_all(bufs, count) };
            return self.finish(at, Ok(len));
        }
        self.finish(at, Ok(moved.min(len)));
    }

    fn fail(&mut self, at: u16, errno: i32) {
        match self.slots[usize::from(at)].state {
            OpState::Data(_) => self.abandon(at, false),
            OpState::Entries(_) => self.abandon(at, true),
            // The engine tries it again: nothing is lost yet.
            OpState::Flush(..) if is_transient(errno) => {}
            OpState::Flush(..) => self.pool.chain().flush_failed(),
            _ => {}
        }
        self.finish(at, Err(errno));
    }

    fn abandon(&mut self, at: u16, entries_tried: bool) {
        if let Some(allocation) = self.extras[usize::from(at)].allocation.take() {
            self.pool.chain().abandon(allocation, entries_tried);
        }
    }

    /// Buffers of bytes `from..to` of an operation's data: a list that stays until it is done.
    #[inline]
    fn buffers(&mut self, at: u16, from: u32, to: u32) -> (*const IoSlice, u32) {
        match self.slots[usize::from(at)].op {
            DiskOp::Read { bufs, count, len_bytes, .. }
            | DiskOp::Write { bufs, count, len_bytes, .. } => {
                if from == 0 && to == len_bytes {
                    return (bufs, count);
                }
                // SAFETY: the list stays until the operation is done.
                let all = unsafe { std::slice::from_raw_parts(bufs, count as usize) };
                let list = &mut self.extras[usize::from(at)].bufs;
                list.clear();
                cut(all, from as usize, (to - from) as usize, list);
                (list.as_ptr(), list.len() as u32)
            }
            _ => (std::ptr::null(), 0),
        }
    }

    #[inline]
    fn finish(&mut self, at: u16, result: Result<u32, i32>) {
        let slot = &mut self.slots[usize::from(at)];
        slot.state = OpState::Free;
        self.pool.chain().leave(&mut self.view, slot.stay.take());
        self.done.push(DiskDone { token: slot.token, result });
        self.free.push(at);
    }

    /// Takes in finished operations of files and helpers, and begins blocked ones again.
    #[inline]
    fn collect(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        for disk in 0..self.files.count() {
            self.files.disk(disk).reap(&mut finished);
        }
        self.results.reap(&mut finished);
        for DiskDone { token, result } in finished.drain(..) {
            self.end_file_op(token, result);
        }
        self.finished = finished;
        if !self.blocked.is_empty() && self.results.take_woken() {
            let blocked = std::mem::take(&mut self.blocked);
            blocked.iter().for_each(|&at| self.begin(at));
            self.recycle(blocked);
        }
    }

    /// Keeps the memory of a list whose operations were begun again; some may be blocked once more.
    fn recycle(&mut self, mut list: Vec<u16>) {
        list.clear();
        list.append(&mut self.blocked);
        self.blocked = list;
    }

    /// Begins waiting operations, starts those of the files, and hands over those for helpers.
    #[inline]
    fn start(&mut self) -> io::Result<()> {
        self.begin_waiting();
        self.has_begun = false;
        if !self.jobs.is_empty() {
            self.pool.hand_over(&mut self.jobs);
        }
        if self.pool.chain().take_work() {
            self.pool.maintain();
        }
        for disk in 0..self.files.count() {
            while let Some(DiskDone { token, result }) = self.files.disk(disk).run_next() {
                self.end_file_op(token, result);
            }
        }
        self.files.flush_submissions()
    }
}

impl Disk for Qcow2Disk {
    unsafe fn submit(&mut self, token: u32, op: DiskOp) -> io::Result<()> {
        let at = self.free.pop().ok_or(io::ErrorKind::WouldBlock)?;
        if let DiskOp::Read { offset, .. } | DiskOp::Write { offset, .. } = op
            && let Some(entry) = self.pool.chain().entry_address(&mut self.view, offset)
        {
            prefetch(entry);
        }
        let slot = &mut self.slots[usize::from(at)];
        (slot.token, slot.op, slot.state) = (token, op, OpState::Waiting);
        self.waiting.push_back(at);
        self.has_begun = true;
        Ok(())
    }

    fn flush_submissions(&mut self) -> io::Result<()> {
        self.start()
    }

    fn reap(&mut self, done: &mut Vec<DiskDone>) {
        self.collect();
        while self.has_begun {
            // Operations that go on must not wait for the next round: the owner may sleep before
            // that. An error comes again, and is returned, at the next start.
            let _ = self.start();
            self.collect();
        }
        let n = self.done.len().min(done.capacity() - done.len());
        done.extend(self.done.drain(..n));
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.results.event.as_raw_fd())
    }

    /// True also with helpers: few operations need one.
    fn is_immediate(&self) -> bool {
        self.files.are_immediate()
    }

    fn set_wakeups(&mut self, on: bool) {
        self.results.set_wakeups(on);
        self.files.set_wakeups(on);
    }

    fn keep_open(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.files.keep_open(file)
    }

    fn len_bytes(&self) -> u64 {
        self.pool.chain().top().len_bytes()
    }
}

impl Drop for Qcow2Disk {
    fn drop(&mut self) {
        // The owner has waited for its operations: nothing is claimed any more.
        for slot in &mut self.slots {
            self.pool.chain().leave(&mut self.view, slot.stay.take());
        }
    }
}
