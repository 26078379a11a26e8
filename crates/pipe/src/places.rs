//! Placeholders that a VM's guest may write, or read over: what they stand for, and who is told when that
//! is done.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use block::{Placed, Placeholders, Way};
use guest_abi::pipe::{PROBE_BLOCK_BYTES, ProbePlaces};

use crate::copy::{read_all, write_all};
use crate::limits::{MAX_WAITING, MIN_READ_BYTES, PROBE_TIMEOUT};
use crate::page_cache::drop_cached;
use crate::pool::Pool;

/// Name of a pipe in its placeholders.
pub(crate) type Tag = [u8; 16];

/// All of a VM.
pub(crate) struct Places {
    /// How many pipes: disks do not look while there is none.
    count: AtomicUsize,
    pipes: Mutex<HashMap<Tag, Arc<Placing>>>,
    probe: Mutex<Option<Probe>>,
    /// Milliseconds of `clock` until which the probe is waited for; 0: it is not.
    probe_until_ms: AtomicU64,
    clock: Instant,
    pool: Weak<Pool>,
}

/// A self-test.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Probe {
    /// Of reading; else of writing.
    pub reads: bool,
    pub asked: ProbePlaces,
}

/// One pipe's.
#[derive(Debug)]
pub(crate) struct Placing {
    token: u64,
    /// The guest reads; else it writes.
    reads: bool,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Ranges of the pipe that may be written, or read, now: offset and length.
    open: Vec<(u64, u64)>,
    /// Requests that wait for the pipe.
    waiting: Vec<Placed>,
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
    /// With none; the pool's pipes are told.
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
    fn add(&self, tag: Tag, token: u64, reads: bool) -> Option<Arc<Placing>> {
        let mut pipes = lock(&self.pipes);
        if pipes.contains_key(&tag) {
            return None;
        }
        let inner = Inner { open: Vec::new(), waiting: Vec::with_capacity(MAX_WAITING) };
        let placing = Arc::new(Placing { token, reads, inner: Mutex::new(inner) });
        pipes.insert(tag, Arc::clone(&placing));
        self.count.fetch_add(1, Ordering::Release);
        Some(placing)
    }

    /// Forgets a pipe. Writes that wait for it fail; of reads nobody wants the bytes any more.
    fn remove(&self, tag: &Tag) {
        let Some(placing) = lock(&self.pipes).remove(tag) else { return };
        self.count.fetch_sub(1, Ordering::Release);
        let waiting = {
            let mut inner = lock(&placing.inner);
            inner.open.clear();
            std::mem::take(&mut inner.waiting)
        };
        if placing.reads {
            waiting.into_iter().for_each(|read| read.complete(Ok(())));
        }
    }

    /// The self-test that is expected now, instead of the last one, for [`PROBE_TIMEOUT`]; none: none is.
    pub fn expect(&self, probe: Option<Probe>) {
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
    fn take_probe(&self, tag: &Tag, reads: bool) -> Option<Probe> {
        let is_it = |probe: &Probe| probe.reads == reads && probe.asked.tag == *tag;
        let mut expected = lock(&self.probe);
        let probe = expected.take_if(|probe| self.is_probe_due() && is_it(probe))?;
        self.probe_until_ms.store(0, Ordering::Release);
        Some(probe)
    }
}

impl Placeholders for Places {
    fn are_any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0 || self.is_probe_due()
    }

    fn take(&self, placed: Placed) -> Option<Placed> {
        let (tag, reads) = (placed.tag(), placed.way() == Way::Read);
        let Some(pool) = self.pool.upgrade() else { return Some(placed) };
        let placing = lock(&self.pipes).get(&tag).cloned();
        if let Some(placing) = placing {
            let mut inner = lock(&placing.inner);
            let has_room = inner.waiting.len() < inner.waiting.capacity();
            let is_open = inner.is_open(placed.at(), placed.len_bytes());
            let is_short = reads && placed.len_bytes() < MIN_READ_BYTES;
            if placing.reads != reads || !has_room || !is_open || is_short {
                return Some(placed);
            }
            inner.waiting.push(placed);
            drop(inner);
            pool.nudge(placing.token);
            return None;
        }
        match self.take_probe(&tag, reads) {
            Some(probe) => {
                pool.run(Box::new(move || answer_probe(&probe, placed)));
                None
            }
            None => Some(placed),
        }
    }
}

/// Writes what a self-test expects, or looks whether it is there.
fn answer_probe(probe: &Probe, placed: Placed) {
    let secret = probe.asked.secret;
    let block = secret.repeat(PROBE_BLOCK_BYTES / secret.len());
    let range = usize::try_from(placed.at())
        .ok()
        .and_then(|at| block.get(at..at.checked_add(usize::try_from(placed.len_bytes()).ok()?)?));
    let done = match range {
        Some(bytes) if probe.reads => {
            let mut found = vec![0; bytes.len()];
            let read = fetch(&placed, &mut found);
            let wrong = || io::ErrorKind::InvalidData.into();
            read.and_then(|()| if found == bytes { Ok(()) } else { Err(wrong()) })
        }
        Some(bytes) => fill(&placed, |file, offset| write_all(file, offset, bytes)),
        None => Err(io::ErrorKind::InvalidInput.into()),
    };
    placed.complete(done);
}

/// Has the bytes of a write put into their place, and made durable if that is wanted.
pub(crate) fn fill(
    write: &Placed,
    put: impl FnOnce(BorrowedFd<'_>, u64) -> io::Result<()>,
) -> io::Result<()> {
    put(write.file().as_fd(), write.offset())?;
    match write.way() {
        Way::Write { sync: true } => Ok(rustix::fs::fdatasync(write.file())?),
        _ => Ok(()),
    }
}

/// Copies the bytes of a read; as many as it is of.
pub(crate) fn fetch(read: &Placed, into: &mut [u8]) -> io::Result<()> {
    let file = read.file().as_fd();
    if read.may_lag() {
        drop_cached(file, read.offset(), read.len_bytes());
    }
    read_all(file, read.offset(), into)
}

impl Inner {
    fn is_open(&self, at: u64, len: u64) -> bool {
        let Some(end) = at.checked_add(len) else { return false };
        self.open.iter().any(|&(from, len)| from <= at && end <= from + len)
    }
}

impl Placing {
    /// The guest is about to write, or read, this range.
    pub fn open(&self, at: u64, len_bytes: u64) {
        lock(&self.inner).open.push((at, len_bytes));
    }

    /// It has: whatever comes of it later is none of ours.
    pub fn close(&self, at: u64) {
        lock(&self.inner).open.retain(|(from, _)| *from != at);
    }

    /// A request that waits.
    pub fn next(&self) -> Option<Placed> {
        lock(&self.inner).waiting.pop()
    }
}

/// A pipe's file, as its disk sees it: the guest reads or writes it by placeholders.
pub(crate) struct PlacedFile {
    places: Arc<Places>,
    pub placing: Arc<Placing>,
    tag: Tag,
    /// Where the pipe's first byte lies in its block.
    pub skew_bytes: u64,
}

impl PlacedFile {
    /// That the guest writes. None: the tag is in use.
    pub fn written(places: &Arc<Places>, tag: Tag, skew_bytes: u64, token: u64) -> Option<Self> {
        Self::new(places, (tag, skew_bytes), token, false)
    }

    /// That the guest reads. None: the tag is in use.
    pub fn read(places: &Arc<Places>, tag: Tag, skew_bytes: u64, token: u64) -> Option<Self> {
        Self::new(places, (tag, skew_bytes), token, true)
    }

    fn new(
        places: &Arc<Places>,
        (tag, skew_bytes): (Tag, u64),
        token: u64,
        reads: bool,
    ) -> Option<Self> {
        let placing = places.add(tag, token, reads)?;
        Some(Self { places: Arc::clone(places), placing, tag, skew_bytes })
    }
}

impl Drop for PlacedFile {
    fn drop(&mut self) {
        self.places.remove(&self.tag);
    }
}
