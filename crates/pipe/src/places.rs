//! Placeholders that a VM's guest may write: what they stand for, and who is told when one is written.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use block::{PlacedWrite, Placeholders};
use guest_abi::pipe::{PROBE_BLOCK_BYTES, ProbeWrite};

use crate::copy::write_all;
use crate::limits::{MAX_WRITES, PROBE_TIMEOUT};
use crate::pool::Pool;

/// Name of a pipe in its placeholders.
pub(crate) type Tag = [u8; 16];

/// All of a VM.
pub(crate) struct Places {
    /// How many pipes: disks do not look while there is none.
    count: AtomicUsize,
    pipes: Mutex<HashMap<Tag, Arc<Placing>>>,
    probe: Mutex<Option<ProbeWrite>>,
    /// Milliseconds of `clock` until which the probe is waited for; 0: it is not.
    probe_until_ms: AtomicU64,
    clock: Instant,
    pool: Weak<Pool>,
}

/// One pipe's.
#[derive(Debug)]
pub(crate) struct Placing {
    token: u64,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Ranges of the pipe that may be written now: offset and length.
    open: Vec<(u64, u64)>,
    /// Writes that wait for their bytes.
    writes: Vec<PlacedWrite>,
}

impl std::fmt::Debug for Places {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Places").field("count", &self.count).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Places {
    /// With none; the pool's pipes write.
    pub fn new(pool: &Arc<Pool>) -> Self {
        Self {
            count: AtomicUsize::new(0),
            pipes: Mutex::default(),
            probe: Mutex::default(),
            probe_until_ms: AtomicU64::new(0),
            clock: Instant::now(),
            pool: Arc::downgrade(pool),
        }
    }

    /// A pipe's; none: another has that tag.
    pub fn add(&self, tag: Tag, token: u64) -> Option<Arc<Placing>> {
        let mut pipes = lock(&self.pipes);
        if pipes.contains_key(&tag) {
            return None;
        }
        let inner = Inner { open: Vec::new(), writes: Vec::with_capacity(MAX_WRITES) };
        let placing = Arc::new(Placing { token, inner: Mutex::new(inner) });
        pipes.insert(tag, Arc::clone(&placing));
        self.count.fetch_add(1, Ordering::Release);
        Some(placing)
    }

    /// Forgets a pipe; writes that wait for it fail.
    pub fn remove(&self, tag: &Tag) {
        let Some(placing) = lock(&self.pipes).remove(tag) else { return };
        self.count.fetch_sub(1, Ordering::Release);
        let writes = {
            let mut inner = lock(&placing.inner);
            inner.open.clear();
            std::mem::take(&mut inner.writes)
        };
        drop(writes);
    }

    /// The self-test that is expected now, instead of the last one, for [`PROBE_TIMEOUT`]; none: none is.
    pub fn expect(&self, probe: Option<ProbeWrite>) {
        let until =
            if probe.is_some() { self.now_ms() + PROBE_TIMEOUT.as_millis() as u64 } else { 0 };
        let mut expected = lock(&self.probe);
        *expected = probe;
        self.probe_until_ms.store(until, Ordering::Release);
    }

    fn now_ms(&self) -> u64 {
        self.clock.elapsed().as_millis() as u64
    }

    /// Whether a self-test is expected. One that does not come is forgotten.
    fn is_probe_due(&self) -> bool {
        let until = self.probe_until_ms.load(Ordering::Acquire);
        until > 0 && self.now_ms() < until
    }

    /// The expected self-test, if it has this tag: it comes once.
    fn take_probe(&self, tag: &Tag) -> Option<ProbeWrite> {
        let mut expected = lock(&self.probe);
        let probe = expected.take_if(|probe| self.is_probe_due() && probe.tag == *tag)?;
        self.probe_until_ms.store(0, Ordering::Release);
        Some(probe)
    }
}

impl Placeholders for Places {
    fn are_any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0 || self.is_probe_due()
    }

    fn take(&self, write: PlacedWrite) -> Option<PlacedWrite> {
        let tag = write.tag();
        let Some(pool) = self.pool.upgrade() else { return Some(write) };
        let placing = lock(&self.pipes).get(&tag).cloned();
        if let Some(placing) = placing {
            let mut inner = lock(&placing.inner);
            let has_room = inner.writes.len() < inner.writes.capacity();
            if !has_room || !inner.is_open(write.at(), write.len_bytes()) {
                return Some(write);
            }
            inner.writes.push(write);
            drop(inner);
            pool.nudge(placing.token);
            return None;
        }
        match self.take_probe(&tag) {
            Some(probe) => {
                pool.run(Box::new(move || answer_probe(&probe, write)));
                None
            }
            None => Some(write),
        }
    }
}

/// Writes what a self-test expects.
fn answer_probe(probe: &ProbeWrite, write: PlacedWrite) {
    let block = probe.secret.repeat(PROBE_BLOCK_BYTES / probe.secret.len());
    let range = usize::try_from(write.at())
        .ok()
        .and_then(|at| block.get(at..at.checked_add(usize::try_from(write.len_bytes()).ok()?)?));
    let done = match range {
        Some(bytes) => fill(&write, |file, offset| write_all(file, offset, bytes)),
        None => Err(io::ErrorKind::InvalidInput.into()),
    };
    write.complete(done);
}

/// Has the bytes of a write put into their place, and made durable if that is wanted.
pub(crate) fn fill(
    write: &PlacedWrite,
    put: impl FnOnce(BorrowedFd<'_>, u64) -> io::Result<()>,
) -> io::Result<()> {
    put(write.file().as_fd(), write.offset())?;
    if write.wants_sync() { Ok(rustix::fs::fdatasync(write.file())?) } else { Ok(()) }
}

impl Inner {
    fn is_open(&self, at: u64, len: u64) -> bool {
        let Some(end) = at.checked_add(len) else { return false };
        self.open.iter().any(|&(from, len)| from <= at && end <= from + len)
    }
}

impl Placing {
    /// The guest is about to write this range.
    pub fn open(&self, at: u64, len_bytes: u64) {
        lock(&self.inner).open.push((at, len_bytes));
    }

    /// It has: whatever comes of it later is none of ours.
    pub fn close(&self, at: u64) {
        lock(&self.inner).open.retain(|(from, _)| *from != at);
    }

    /// A write that waits.
    pub fn next(&self) -> Option<PlacedWrite> {
        lock(&self.inner).writes.pop()
    }
}
