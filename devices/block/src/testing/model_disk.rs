//! Model of a disk whose misdeeds a test chooses: order, short operations, errors, a volatile
//! cache.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard};

use base::io::{Disk, DiskDone, DiskOp};
use base::random::{Random, Seeded};
use queue::iovec::{gather, scatter};

/// State of a model disk, for tests to look at and change.
#[derive(Default)]
pub(crate) struct State {
    /// Bytes that reads give.
    pub cache: Vec<u8>,
    /// Bytes that a power cut leaves.
    pub durable: Vec<u8>,
    /// Ranges that are in the cache only. As Linux does with pages that it could not write, a flush
    /// that fails forgets them: the next one finds nothing to do.
    dirty: Vec<(usize, usize)>,
    /// Operations that were started and are held.
    pub held: Vec<(u32, DiskOp)>,
    /// Results for the next operations to finish, before anything else.
    pub script: VecDeque<Result<u32, i32>>,
    /// Every operation that was submitted: `read`, `write`, …, with offset and length.
    pub log: Vec<(&'static str, u64, u64)>,
    /// Does operations within the call, too: [`Disk::run`].
    pub runs: bool,
    /// Operations that were done so.
    pub ran: usize,
    /// Hold operations until [`ModelDisk::finish_one`].
    pub hold: bool,
    /// Whether the next end that is opened panics at its first reap.
    pub panics: bool,
    /// Errno of all operations but flushes; [`libc::ENOSPC`] and [`libc::EDQUOT`] spare reads.
    pub full: Option<i32>,
    /// Errno of the back end's own sync.
    pub sync_error: Option<i32>,
    /// Move only part of what is asked, in multiples of 512 bytes.
    pub short: Option<Seeded>,
    /// Whether the engine dropped the disk while operations were held.
    pub abandoned: bool,
    done: Vec<DiskDone>,
}

// SAFETY: the addresses in held operations are used under the contract of `Disk::submit` only.
unsafe impl Send for State {}

#[derive(Clone)]
pub(crate) struct ModelDisk(Arc<Mutex<State>>);

impl ModelDisk {
    pub fn new(len: usize) -> Self {
        let state = State { cache: vec![0; len], durable: vec![0; len], ..State::default() };
        Self(Arc::new(Mutex::new(state)))
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// The engine's end of it.
    pub fn boxed(&self) -> Box<dyn Disk> {
        Box::new(EngineSide(self.clone()))
    }

    /// Finishes the held operation at `index`.
    pub fn finish_one(&self, index: usize) {
        let mut state = self.state();
        let (token, op) = state.held.swap_remove(index);
        state.finish(token, op);
    }

    /// Ends of it that engines have.
    pub fn ends(&self) -> usize {
        Arc::strong_count(&self.0) - 1
    }

    /// Has the next one to look find this result.
    pub fn give_back(&self, done: DiskDone) {
        self.state().done.push(done);
    }

    /// Stops holding, and finishes what is held.
    pub fn let_go(&self) {
        self.state().hold = false;
        while !self.state().held.is_empty() {
            self.finish_one(0);
        }
    }
}

impl State {
    fn finish(&mut self, token: u32, op: DiskOp) {
        let result = self.outcome(op);
        self.done.push(DiskDone { token, result });
    }

    fn outcome(&mut self, op: DiskOp) -> Result<u32, i32> {
        match self.script.pop_front() {
            Some(Err(errno)) => {
                if matches!(op, DiskOp::Flush) && errno != libc::EINTR && errno != libc::EAGAIN {
                    self.dirty.clear();
                }
                Err(errno)
            }
            Some(Ok(limit)) => Ok(self.perform(op, Some(limit))),
            None if self.is_full_for(op) => Err(self.full.unwrap_or(0)),
            None => {
                let limit = self.short_limit(op);
                Ok(self.perform(op, limit))
            }
        }
    }

    fn note(&mut self, op: DiskOp) {
        self.log.push(match op {
            DiskOp::Read { offset, len_bytes, .. } => ("read", offset, len_bytes.into()),
            DiskOp::Write { offset, len_bytes, .. } => ("write", offset, len_bytes.into()),
            DiskOp::Flush => ("flush", 0, 0),
            DiskOp::Discard { offset, len_bytes } => ("discard", offset, len_bytes),
            DiskOp::WriteZeroes { offset, len_bytes, .. } => ("zeroes", offset, len_bytes),
        });
    }

    fn is_full_for(&self, op: DiskOp) -> bool {
        match op {
            DiskOp::Flush => false,
            DiskOp::Read { .. } => !matches!(self.full, None | Some(libc::ENOSPC | libc::EDQUOT)),
            _ => self.full.is_some(),
        }
    }

    fn short_limit(&mut self, op: DiskOp) -> Option<u32> {
        let random = self.short.as_mut()?;
        match op {
            DiskOp::Read { len_bytes, .. } | DiskOp::Write { len_bytes, .. } => {
                Some((1 + random.below(len_bytes / 512)) * 512)
            }
            _ => None,
        }
    }

    fn perform(&mut self, op: DiskOp, limit: Option<u32>) -> u32 {
        match op {
            DiskOp::Read { offset, bufs, count, len_bytes } => {
                let n = len_bytes.min(limit.unwrap_or(len_bytes)) as usize;
                let mut data = vec![0u8; len_bytes as usize];
                // SAFETY: valid until reaped, by the contract of `submit`.
                unsafe { gather(bufs, count, data.as_mut_ptr()) };
                data[..n].copy_from_slice(&self.cache[offset as usize..][..n]);
                // SAFETY: as above.
                unsafe { scatter(data.as_ptr(), bufs, count) };
                n as u32
            }
            DiskOp::Write { offset, bufs, count, len_bytes } => {
                let n = len_bytes.min(limit.unwrap_or(len_bytes)) as usize;
                let mut data = vec![0u8; len_bytes as usize];
                // SAFETY: as above.
                unsafe { gather(bufs, count, data.as_mut_ptr()) };
                self.cache[offset as usize..][..n].copy_from_slice(&data[..n]);
                self.dirty.push((offset as usize, n));
                n as u32
            }
            DiskOp::Flush => {
                for (offset, len) in self.dirty.drain(..) {
                    self.durable[offset..][..len].copy_from_slice(&self.cache[offset..][..len]);
                }
                0
            }
            DiskOp::Discard { .. } => 0,
            DiskOp::WriteZeroes { offset, len_bytes, .. } => {
                self.cache[offset as usize..][..len_bytes as usize].fill(0);
                self.dirty.push((offset as usize, len_bytes as usize));
                0
            }
        }
    }
}

/// The engine's end of a model disk; notes when it is dropped too early.
struct EngineSide(ModelDisk);

impl Drop for EngineSide {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.abandoned = !state.held.is_empty();
    }
}

impl Disk for EngineSide {
    unsafe fn submit(&mut self, token: u32, op: DiskOp) -> io::Result<()> {
        let mut state = self.0.state();
        state.note(op);
        if state.hold {
            state.held.push((token, op));
        } else {
            state.finish(token, op);
        }
        Ok(())
    }

    fn runs_within_call(&self, _count: usize) -> bool {
        self.0.state().runs
    }

    unsafe fn run(&mut self, op: DiskOp) -> Result<u32, i32> {
        let mut state = self.0.state();
        state.note(op);
        state.ran += 1;
        state.outcome(op)
    }

    fn flush_submissions(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<DiskDone>) {
        let mut state = self.0.state();
        let n = state.done.len().min(done.capacity() - done.len());
        done.extend(state.done.drain(..n));
    }

    fn event_fd(&self) -> Option<RawFd> {
        None
    }

    fn len_bytes(&self) -> u64 {
        self.0.state().cache.len() as u64
    }
}
