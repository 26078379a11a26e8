//! The helper threads of a qcow2 image.

use std::collections::VecDeque;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;

use base::event::Event;
use base::io::{DiskDone, DiskOp};
use imago::FormatAccess;
use imago::file::File;

use crate::bytes::{gather, scatter};
use crate::error::errno;
use crate::file::Image;
use crate::limits::STEP_LEN_BYTES;

/// Helpers of one image: enough to keep a disk busy, few enough for many images.
const HELPERS: usize = 4;

/// One operation on its way to a helper.
pub(super) struct Job {
    pub token: u32,
    pub op: DiskOp,
    pub results: Arc<Results>,
}

// SAFETY: the addresses in `op` are valid on any thread until its result has been reaped; that is
// the contract of `Disk::submit`.
unsafe impl Send for Job {}

/// Where the results of one queue's operations come back.
pub(super) struct Results {
    list: Mutex<Vec<DiskDone>>,
    /// Length of the list, so that looking at an empty one takes no lock.
    count: AtomicUsize,
    wakeups: AtomicBool,
    pub event: Event,
}

impl Results {
    pub fn new(depth: u16) -> io::Result<Self> {
        Ok(Self {
            list: Mutex::new(Vec::with_capacity(usize::from(depth))),
            count: AtomicUsize::new(0),
            wakeups: AtomicBool::new(true),
            event: Event::new()?,
        })
    }

    fn add(&self, done: DiskDone) {
        let mut list = guard(&self.list);
        list.push(done);
        self.count.store(list.len(), Ordering::SeqCst);
        drop(list);
        if self.wakeups.load(Ordering::SeqCst) {
            // An eventfd that cannot be written to does not exist: it is ours and non-blocking.
            let _ = self.event.signal();
        }
    }

    /// Moves results into `done`, up to its spare capacity; returns how many.
    pub fn reap(&self, done: &mut Vec<DiskDone>) -> usize {
        if self.count.load(Ordering::SeqCst) == 0 {
            return 0;
        }
        let mut list = guard(&self.list);
        let n = list.len().min(done.capacity() - done.len());
        done.extend(list.drain(..n));
        self.count.store(list.len(), Ordering::SeqCst);
        n
    }

    pub fn set_wakeups(&self, on: bool) {
        self.wakeups.store(on, Ordering::SeqCst);
    }
}

fn guard<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the helpers share.
struct Shared {
    jobs: Mutex<(VecDeque<Job>, bool)>,
    some: Condvar,
    /// Discards change mappings that other operations hold: they run alone.
    access: RwLock<FormatAccess<File>>,
    /// The locks of the image and its backing files.
    _images: Vec<Image>,
}

/// The helpers; they end with it.
pub(super) struct Pool {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

impl Pool {
    pub fn start(access: FormatAccess<File>, images: Vec<Image>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            jobs: Mutex::default(),
            some: Condvar::new(),
            access: RwLock::new(access),
            _images: images,
        });
        let mut pool = Self { shared, helpers: Vec::with_capacity(HELPERS) };
        for i in 0..HELPERS {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("qcow2-{i}"));
            pool.helpers.push(builder.spawn(move || help(&shared))?);
        }
        Ok(pool)
    }

    /// Gives a batch to the helpers.
    pub fn hand_over(&self, batch: &mut Vec<Job>) {
        let many = batch.len() > 1;
        guard(&self.shared.jobs).0.extend(batch.drain(..));
        if many {
            self.shared.some.notify_all();
        } else {
            self.shared.some.notify_one();
        }
    }

    /// Makes everything durable, on the caller's thread.
    pub fn sync(&self) -> io::Result<()> {
        flush(&self.shared)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        guard(&self.shared.jobs).1 = true;
        self.shared.some.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper cannot panic: `run` catches what the library does.
            let _ = helper.join();
        }
    }
}

/// A helper's life.
fn help(shared: &Shared) {
    let mut buffer = vec![0u8; STEP_LEN_BYTES as usize];
    while let Some(job) = next(shared) {
        // A panic of the library is an I/O error of one request, not a request that never ends.
        let run = AssertUnwindSafe(|| run(shared, job.op, &mut buffer));
        let result = match catch_unwind(run) {
            Ok(Ok(bytes)) => Ok(bytes),
            Ok(Err(e)) => Err(errno(&e)),
            Err(_) => Err(libc::EIO),
        };
        job.results.add(DiskDone { token: job.token, result });
    }
}

/// Waits for a job; none at the end.
fn next(shared: &Shared) -> Option<Job> {
    let mut jobs = guard(&shared.jobs);
    loop {
        if let Some(job) = jobs.0.pop_front() {
            return Some(job);
        }
        if jobs.1 {
            return None;
        }
        jobs = shared.some.wait(jobs).unwrap_or_else(PoisonError::into_inner);
    }
}

fn run(shared: &Shared, op: DiskOp, buffer: &mut [u8]) -> io::Result<u32> {
    let read = || shared.access.read().unwrap_or_else(PoisonError::into_inner);
    match op {
        DiskOp::Read { offset, bufs, count, len_bytes } => {
            let data = &mut buffer[..len_bytes as usize];
            read().read(&mut *data, offset)?;
            // SAFETY: the list and its buffers (together `len_bytes`) are valid until the result is
            // reaped; `data` is ours.
            unsafe { scatter(data.as_ptr(), bufs, count) };
            Ok(len_bytes)
        }
        DiskOp::Write { offset, bufs, count, len_bytes } => {
            let data = &mut buffer[..len_bytes as usize];
            // SAFETY: as for reads.
            unsafe { gather(bufs, count, data.as_mut_ptr()) };
            read().write(&*data, offset)?;
            Ok(len_bytes)
        }
        DiskOp::Flush => flush(shared).map(|()| 0),
        DiskOp::Discard { offset, len_bytes } => {
            let mut access = shared.access.write().unwrap_or_else(PoisonError::into_inner);
            access.discard_to_any(offset, len_bytes).map(|()| 0)
        }
        DiskOp::WriteZeroes { offset, len_bytes, .. } => {
            read().write_zeroes(offset, len_bytes).map(|()| 0)
        }
    }
}

/// The library's caches to the file, the file to the disk.
fn flush(shared: &Shared) -> io::Result<()> {
    let access = shared.access.read().unwrap_or_else(PoisonError::into_inner);
    access.flush()?;
    access.sync()
}
