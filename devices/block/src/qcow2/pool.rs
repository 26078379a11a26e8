//! Helper threads of a qcow2 image, for operations that have to wait for the disk.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use base::event::Event;
use base::io::{DiskDone, DiskOp};
use base::sync::{lock, wait, wait_timeout};
use qcow2::{Chain, ChainView, Clear, Scratch};
use queue::iovec::{gather, scatter};

use crate::error::errno;
use crate::image_file::ImageFile;

/// Number of helpers of one image: enough to keep a disk busy, few enough for many images.
const HELPERS: usize = 4;

/// Time for which freed clusters wait for a FLUSH of the guest before a helper syncs for them.
const RELEASE_AFTER: Duration = Duration::from_secs(1);

/// Operation on its way to a helper.
pub(super) struct HelperJob {
    pub token: u32,
    pub op: DiskOp,
    pub results: Arc<Results>,
}

// SAFETY: the addresses in `op` are valid on any thread until its result has been reaped; that is
// the contract of `Disk::submit`.
unsafe impl Send for HelperJob {}

/// Results of one queue's operations on their way back.
pub(super) struct Results {
    list: Mutex<Vec<DiskDone>>,
    /// Length of the list, so that looking at an empty one takes no lock.
    count: AtomicUsize,
    wakeups: AtomicBool,
    /// Whether a claim that the queue wanted is free.
    is_woken: AtomicBool,
    pub event: Arc<Event>,
}

impl Results {
    pub fn new(depth: u16) -> io::Result<Self> {
        Ok(Self {
            list: Mutex::new(Vec::with_capacity(usize::from(depth))),
            count: AtomicUsize::new(0),
            wakeups: AtomicBool::new(true),
            is_woken: AtomicBool::new(false),
            event: Arc::new(Event::new()?),
        })
    }

    fn add(&self, done: DiskDone) {
        let mut list = lock(&self.list);
        list.push(done);
        self.count.store(list.len(), Ordering::SeqCst);
        drop(list);
        self.ring();
    }

    fn ring(&self) {
        if self.wakeups.load(Ordering::SeqCst) {
            // An eventfd that cannot be written to does not exist: it is ours and non-blocking.
            let _ = self.event.signal();
        }
    }

    /// Wakes the queue: a claim is free.
    pub fn wake(&self) {
        self.is_woken.store(true, Ordering::SeqCst);
        self.ring();
    }

    /// Whether the queue was woken since the last call.
    pub fn take_woken(&self) -> bool {
        self.is_woken.swap(false, Ordering::SeqCst)
    }

    /// Moves results into `done`, up to its spare capacity.
    pub fn reap(&self, done: &mut Vec<DiskDone>) {
        if self.count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut list = lock(&self.list);
        let n = list.len().min(done.capacity() - done.len());
        done.extend(list.drain(..n));
        self.count.store(list.len(), Ordering::SeqCst);
    }

    pub fn set_wakeups(&self, on: bool) {
        self.wakeups.store(on, Ordering::SeqCst);
    }
}

/// State that the helpers share.
struct Shared {
    jobs: Mutex<JobQueue>,
    changed: Condvar,
    chain: Chain,
    /// Whether the last upkeep of the map failed: logged once.
    is_failing: AtomicBool,
    /// Files of the image and its backing files, with their locks.
    _images: Vec<Arc<ImageFile>>,
}

#[derive(Default)]
struct JobQueue {
    queue: VecDeque<HelperJob>,
    /// Whether upkeep of the map is due.
    maintain: bool,
    is_closing: bool,
}

/// Helpers of an image. Dropping it ends them and closes the image.
pub(super) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

impl Pool {
    pub fn start(chain: Chain, images: Vec<Arc<ImageFile>>) -> io::Result<Self> {
        let jobs = Mutex::new(JobQueue { maintain: true, ..JobQueue::default() });
        let (changed, is_failing) = (Condvar::new(), AtomicBool::new(false));
        let shared = Arc::new(Shared { jobs, changed, chain, is_failing, _images: images });
        let mut pool = Self { shared, helpers: Vec::with_capacity(HELPERS) };
        for i in 0..HELPERS {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("qcow2-{i}"));
            pool.helpers.push(builder.spawn(move || run_helper(&shared))?);
        }
        Ok(pool)
    }

    #[inline]
    pub fn chain(&self) -> &Chain {
        &self.shared.chain
    }

    /// Gives a batch to the helpers.
    pub fn hand_over(&self, batch: &mut Vec<HelperJob>) {
        let many = batch.len() > 1;
        lock(&self.shared.jobs).queue.extend(batch.drain(..));
        if many {
            self.shared.changed.notify_all();
        } else {
            self.shared.changed.notify_one();
        }
    }

    /// Asks for upkeep of the map.
    pub fn maintain(&self) {
        lock(&self.shared.jobs).maintain = true;
        self.shared.changed.notify_one();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.jobs).is_closing = true;
        self.shared.changed.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper cannot panic: its work runs in `catch_panic`.
            let _ = helper.join();
        }
        let image = self.shared.chain.top();
        if let Err(e) = image.close() {
            tracing::error!(
                image = image.name(),
                "qcow2 image not closed: {e}; the next opening checks it"
            );
        }
    }
}

/// Task of a helper.
enum HelperTask {
    Run(HelperJob),
    Maintain,
    /// Freed clusters have waited long enough.
    Sync,
}

/// Runs a helper until the pool closes.
fn run_helper(shared: &Shared) {
    let mut state = HelperState {
        view: shared.chain.view(Arc::new(|| {})),
        scratch: Scratch::default(),
        buffer: Vec::new(),
    };
    while let Some(work) = wait_for_task(shared) {
        match work {
            HelperTask::Run(job) => {
                let result = catch_panic(shared, || state.run(&shared.chain, job.op));
                job.results
                    .add(DiskDone { token: job.token, result: result.map_err(|e| errno(&e)) });
            }
            HelperTask::Maintain => {
                report_upkeep(shared, catch_panic(shared, || shared.chain.top().maintain()))
            }
            HelperTask::Sync => {
                let image = shared.chain.top();
                report_upkeep(
                    shared,
                    catch_panic(shared, || image.sync().and_then(|()| image.maintain())),
                );
            }
        }
    }
}

/// Runs a task; a panic is its error, and not an operation that never ends.
fn catch_panic<T>(shared: &Shared, run: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
        shared.chain.top().panicked();
        Err(io::Error::other("it panicked, which is a bug"))
    })
}

/// Logs the first failure of upkeep. Requests that depend on it get the same error.
fn report_upkeep(shared: &Shared, result: io::Result<()>) {
    let was_failing = shared.is_failing.swap(result.is_err(), Ordering::Relaxed);
    if let Err(e) = result
        && !was_failing
    {
        tracing::warn!(image = shared.chain.top().name(), "looking after a qcow2 image's map: {e}");
    }
}

/// Waits for a task; `None` when the pool closes.
fn wait_for_task(shared: &Shared) -> Option<HelperTask> {
    let mut jobs = lock(&shared.jobs);
    loop {
        if std::mem::take(&mut jobs.maintain) {
            return Some(HelperTask::Maintain);
        }
        if let Some(job) = jobs.queue.pop_front() {
            return Some(HelperTask::Run(job));
        }
        if jobs.is_closing {
            return None;
        }
        if shared.chain.has_pending() {
            let (guard, timeout) = wait_timeout(&shared.changed, jobs, RELEASE_AFTER);
            jobs = guard;
            if timeout.timed_out() && jobs.queue.is_empty() && shared.chain.has_pending() {
                return Some(HelperTask::Sync);
            }
        } else {
            jobs = wait(&shared.changed, jobs);
        }
    }
}

/// View and buffers of a helper.
struct HelperState {
    view: ChainView,
    scratch: Scratch,
    buffer: Vec<u8>,
}

impl HelperState {
    fn run(&mut self, chain: &Chain, op: DiskOp) -> io::Result<u32> {
        let Self { view, scratch, buffer } = self;
        match op {
            DiskOp::Read { offset, bufs, count, len_bytes } => {
                buffer.resize(len_bytes as usize, 0);
                chain.read(view, scratch, buffer, offset)?;
                // SAFETY: the list and its buffers (together `len_bytes`) are valid until the
                // result is reaped; `buffer` is ours.
                unsafe { scatter(buffer.as_ptr(), bufs, count) };
                Ok(len_bytes)
            }
            DiskOp::Write { offset, bufs, count, len_bytes } => {
                buffer.resize(len_bytes as usize, 0);
                // SAFETY: as for reads.
                unsafe { gather(bufs, count, buffer.as_mut_ptr()) };
                chain.write(view, scratch, buffer, offset)?;
                Ok(len_bytes)
            }
            DiskOp::Flush => chain.top().sync().map(|()| 0),
            DiskOp::Discard { offset, len_bytes } => {
                let range = offset..offset.saturating_add(len_bytes);
                chain.clear(view, scratch, range, Clear::Discard).map(|()| 0)
            }
            DiskOp::WriteZeroes { offset, len_bytes, may_unmap } => {
                let range = offset..offset.saturating_add(len_bytes);
                chain.clear(view, scratch, range, Clear::Zero { may_unmap }).map(|()| 0)
            }
        }
    }
}
