//! Placeholders that a VM's guest may write, or read over, and the pipes whose bytes they stand
//! for.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use base::sync::lock;
use block::{BlockPort, PlaceholderHandler, PlaceholderRequest};
use guest_abi::Reason;

use crate::limits::{MAX_WAITING_REQUESTS, MIN_READ_BYTES};
use crate::placed_request::{Direction, Tag};
use crate::pool::Pool;
use crate::self_test::{ExpectedSelfTest, SelfTest};

/// The placeholders of a VM: by tag, the pipe that they belong to.
pub(crate) struct PlaceholderTable {
    /// Number of pipes: disks look for no placeholder while there is none.
    count: AtomicUsize,
    pipes: Mutex<HashMap<Tag, Arc<PlaceholderQueue>>>,
    self_test: ExpectedSelfTest,
    pool: Weak<Pool>,
}

/// Requests over one pipe's placeholders.
#[derive(Debug)]
pub(crate) struct PlaceholderQueue {
    /// Token of the pipe, which is woken for each request.
    token: u64,
    direction: Direction,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// Ranges of the pipe that may be written, or read, now: offset and length.
    open: Vec<(u64, u64)>,
    /// Requests that wait for the pipe.
    waiting: Vec<PlaceholderRequest>,
}

impl std::fmt::Debug for PlaceholderTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PlaceholderTable").field("count", &self.count).finish_non_exhaustive()
    }
}

impl PlaceholderTable {
    /// An empty table; the pool's pipes are woken.
    pub fn new(pool: &Arc<Pool>) -> Self {
        Self {
            count: AtomicUsize::new(0),
            pipes: Mutex::default(),
            self_test: ExpectedSelfTest::new(),
            pool: Arc::downgrade(pool),
        }
    }

    /// Has a disk look for these placeholders from now on.
    pub fn serve(self: &Arc<Self>, disk: &BlockPort) -> Result<(), Reason> {
        let table = Arc::clone(self) as Arc<dyn PlaceholderHandler>;
        disk.set_placeholder_handler(table).map_err(|_| Reason::DiskFormat)
    }

    /// Adds a pipe. None: another has that tag.
    fn add(&self, tag: Tag, token: u64, direction: Direction) -> Option<Arc<PlaceholderQueue>> {
        let mut pipes = lock(&self.pipes);
        if pipes.contains_key(&tag) {
            return None;
        }
        let inner = Inner { open: Vec::new(), waiting: Vec::with_capacity(MAX_WAITING_REQUESTS) };
        let queue = Arc::new(PlaceholderQueue { token, direction, inner: Mutex::new(inner) });
        pipes.insert(tag, Arc::clone(&queue));
        self.count.fetch_add(1, Ordering::Release);
        Some(queue)
    }

    /// Removes a pipe. Writes that wait for it fail. Reads succeed: nobody wants their bytes any
    /// more.
    fn remove(&self, tag: &Tag) {
        let Some(queue) = lock(&self.pipes).remove(tag) else { return };
        self.count.fetch_sub(1, Ordering::Release);
        let waiting = {
            let mut inner = lock(&queue.inner);
            inner.open.clear();
            std::mem::take(&mut inner.waiting)
        };
        if queue.direction == Direction::Read {
            waiting.into_iter().for_each(|read| read.complete(Ok(())));
        }
    }

    /// Expects this self-test: see [`ExpectedSelfTest::expect`].
    pub fn expect_self_test(&self, test: Option<SelfTest>) {
        self.self_test.expect(test);
    }
}

impl PlaceholderHandler for PlaceholderTable {
    fn has_any(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0 || self.self_test.is_due()
    }

    fn take(&self, placed: PlaceholderRequest) -> Option<PlaceholderRequest> {
        let (tag, direction) = (placed.tag(), Direction::from(placed.op()));
        let Some(pool) = self.pool.upgrade() else { return Some(placed) };
        let queue = lock(&self.pipes).get(&tag).cloned();
        if let Some(queue) = queue {
            let mut inner = lock(&queue.inner);
            let has_room = inner.waiting.len() < inner.waiting.capacity();
            let is_open = inner.is_open(placed.at(), placed.len_bytes());
            let is_short = direction == Direction::Read && placed.len_bytes() < MIN_READ_BYTES;
            if queue.direction != direction || !has_room || !is_open || is_short {
                return Some(placed);
            }
            inner.waiting.push(placed);
            drop(inner);
            pool.nudge(queue.token);
            return None;
        }
        match self.self_test.take(&tag, direction) {
            Some(test) => {
                pool.run(Box::new(move || test.complete(placed)));
                None
            }
            None => Some(placed),
        }
    }
}

impl Inner {
    fn is_open(&self, at: u64, len: u64) -> bool {
        let Some(end) = at.checked_add(len) else { return false };
        self.open.iter().any(|&(from, len)| from <= at && end <= from + len)
    }
}

impl PlaceholderQueue {
    /// Opens a range of the pipe: the guest is about to write, or read, it.
    pub fn open(&self, at: u64, len_bytes: u64) {
        lock(&self.inner).open.push((at, len_bytes));
    }

    /// Closes the range that begins there: the guest has done it, and later requests are ordinary
    /// ones.
    pub fn close(&self, at: u64) {
        lock(&self.inner).open.retain(|(from, _)| *from != at);
    }

    /// Takes a request that waits.
    pub fn next(&self) -> Option<PlaceholderRequest> {
        lock(&self.inner).waiting.pop()
    }
}

/// A pipe's file as its disk sees it: the guest reads or writes it by placeholders.
pub(crate) struct PlacedFile {
    table: Arc<PlaceholderTable>,
    pub requests: Arc<PlaceholderQueue>,
    tag: Tag,
    /// Offset of the pipe's first byte in its block of the file.
    pub skew_bytes: u64,
}

impl PlacedFile {
    /// A file of the pipe with that token. None: the tag is in use.
    pub fn new(
        table: &Arc<PlaceholderTable>,
        (tag, skew_bytes): (Tag, u64),
        token: u64,
        direction: Direction,
    ) -> Option<Self> {
        let requests = table.add(tag, token, direction)?;
        Some(Self { table: Arc::clone(table), requests, tag, skew_bytes })
    }
}

impl Drop for PlacedFile {
    fn drop(&mut self) {
        self.table.remove(&self.tag);
    }
}
