//! Random operations on files of a mounted file system, or on a bare disk, every byte read compared
//! with a model: for disks that must lose nothing, whatever dies below them.
//!
//! # Theory of operation
//! A run has workers, each with files of its own or an equal part of the disk, so that what they do
//! together is in flight together, and what each one does depends on the seed alone. A worker does
//! one operation after another ([`op`]): writes and reads through the page cache, past it and
//! through mappings, lengths, holes, copies, discards. It remembers for each range which operation
//! wrote it ([`model`]) and compares what it reads.
//!
//! What is written names file, operation and place in each word ([`pattern`]), so that a report
//! ([`report`]) tells old bytes from those of another place and from zeroes.
//!
//! Reads must come from the disk, and must not make it safe before: a range's pages are written
//! back by sync_file_range(2), which asks for no flush, and dropped. Operations come in chapters,
//! which all workers begin together. In three of four, the calm ones, nobody asks for a flush, so
//! that a disk whose writes count only after one is found out when it dies.
//!
//! After the last operation all is flushed, dropped, read and checked. The models can be saved, for
//! [`verify`] in another process and after another mount.
//!
//! ```text
//! fsx run folder /mnt seed=7 seconds=20 trim=true save=/tmp/model
//! umount /mnt; mount /dev/vda /mnt; fsx verify /tmp/model
//! fsx run disk /dev/vda seed=7 operations=5000
//! fsx digest /dev/vda
//! ```
//!
//! Seeds give the same operations each time. What the run leaves to chance is when they happen, and
//! so how many there are before its time is over.
//!
//! # Limits
//! | what | number | why |
//! | --- | --- | --- |
//! | files of all workers | 254 | their numbers are a byte, one is the backing file's |
//! | a file or disk | 2 GiB | places in patterns have 28 bits |
//! | operations of a worker | 2^28 | the same |
//! | one read or write | 256 KiB | |
//! | discards | whole pages | Linux keeps parts of pages in its cache |

mod error;

pub mod backing;
pub mod digest;
pub mod model;
pub mod op;
pub mod pattern;
pub mod report;
pub mod sys;
pub mod target;
pub mod worker;

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use error::FsxError;

use crate::model::{Content, Model};
use crate::sys::PAGE_BYTES;
use crate::target::Target;
use crate::worker::Worker;

/// Operations of a chapter.
const CHAPTER: u32 = 128;
/// Every fourth chapter is busy: its operations ask for flushes. The others are calm.
const BUSY_ONE_IN: u64 = 4;

/// Target of a run.
#[derive(Clone, Debug)]
pub enum Place {
    /// Files in a folder.
    Folder {
        /// The folder.
        path: PathBuf,
        /// Whether its file system may be trimmed.
        trim: bool,
    },
    /// A disk, all of it.
    Disk {
        /// The device.
        path: PathBuf,
        /// Content in the beginning.
        ground: Content,
    },
}

/// Settings of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Files or disk to work on.
    pub place: Place,
    /// The seed of all choices.
    pub seed: u64,
    /// Threads at work.
    pub workers: u8,
    /// Files of each, in a folder.
    pub files: u8,
    /// Longest that a file may get.
    pub file_bytes: u64,
    /// When it ends.
    pub time: Option<Duration>,
    /// Operations of each worker after which it ends.
    pub operations: Option<u32>,
    /// File that the models are saved to in the end.
    pub save: Option<PathBuf>,
}

/// A target as it is saved.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    path: PathBuf,
    number: u8,
    begin: Option<u64>,
    max_len_bytes: u64,
    model: Model,
}

/// State shared by the workers of a run.
#[derive(Debug)]
struct Shared {
    barrier: Barrier,
    /// Flag of the end: time is over, a signal came, or a byte was wrong.
    stop: Arc<AtomicBool>,
    /// Flag of the last chapter: all operations are done.
    is_last: AtomicBool,
    /// All have agreed on it, at the end of a chapter.
    is_over: AtomicBool,
    end: Option<Instant>,
}

fn refused<T>(text: String) -> Result<T, FsxError> {
    Err(FsxError::Refused(text))
}

/// The workers with their targets, files made anew.
fn workers(plan: &Plan) -> Result<Vec<Worker>, FsxError> {
    let (workers, files) = (usize::from(plan.workers), usize::from(plan.files));
    let is_disk = matches!(plan.place, Place::Disk { .. });
    if workers == 0 || files == 0 || workers * files > 254 {
        return refused(format!("{workers} workers with {files} files: 1 to 254 files together"));
    }
    let limits = PAGE_BYTES..=pattern::MAX_LEN_BYTES;
    if !is_disk && !limits.contains(&plan.file_bytes) {
        return refused(format!("files of {} bytes: {limits:?} allowed", plan.file_bytes));
    }
    (0..workers).map(|index| worker(plan, index)).collect()
}

fn worker(plan: &Plan, index: usize) -> Result<Worker, FsxError> {
    let mut targets = Vec::new();
    let mut folder = None;
    match &plan.place {
        Place::Folder { path, trim } => {
            for file in 0..usize::from(plan.files) {
                let number = index * usize::from(plan.files) + file;
                // Folders of their own: file systems put files of one folder together.
                let own = path.join(format!("worker{index}"));
                fs::create_dir_all(&own).map_err(FsxError::file("make folder", &own))?;
                let path = own.join(format!("file{number}"));
                File::create(&path).map_err(FsxError::file("make", &path))?;
                let model = Model::new(0, Content::Zero);
                let target = Target::open(&path, number as u8, None, plan.file_bytes, model);
                targets.push(target.map_err(FsxError::file("open", path))?);
            }
            if *trim {
                folder = Some(File::open(path).map_err(FsxError::file("open folder", path))?);
            }
        }
        Place::Disk { path, ground } => {
            let len = digest::len_of(path)?;
            let mib = (len / u64::from(plan.workers)) >> 20;
            let part = mib << 20;
            if part == 0 || part > pattern::MAX_LEN_BYTES {
                return refused(format!(
                    "{} has {len} bytes: 1 MiB to 2 GiB a worker",
                    path.display()
                ));
            }
            let begin = part * index as u64;
            // A disk's first places are its first worker's; patterns count from each part's begin.
            let model = Model::new(part, ground.seen_from(begin));
            let target = Target::open(path, index as u8, Some(begin), part, model);
            targets.push(target.map_err(FsxError::file("open", path))?);
        }
    }
    Ok(Worker::new(index, plan.seed, targets, folder))
}

/// Whether a chapter is calm, the same for all workers.
fn is_calm(seed: u64, chapter: u64) -> bool {
    !seed.wrapping_add(chapter).is_multiple_of(BUSY_ONE_IN)
}

/// One worker's whole run. It goes on to the end of chapters after a failure, for the others wait
/// there.
fn work(worker: &mut Worker, plan: &Plan, shared: &Shared) -> Result<(), FsxError> {
    let mut result = Ok(());
    for chapter in 0.. {
        let left = plan.operations.unwrap_or(pattern::MAX_GENERATION - 1) - worker.number();
        if result.is_ok() {
            let calm = is_calm(plan.seed, chapter);
            result = worker.chapter(left.min(CHAPTER), calm, &shared.stop);
        }
        if result.is_err() || shared.end.is_some_and(|end| Instant::now() > end) {
            shared.stop.store(true, Ordering::SeqCst);
        }
        if left <= CHAPTER {
            shared.is_last.store(true, Ordering::SeqCst);
        }
        // One decides for all: somebody may ask for the end at any moment.
        if shared.barrier.wait().is_leader() {
            let ends = [&*shared.stop, &shared.is_last].map(|flag| flag.load(Ordering::SeqCst));
            shared.is_over.store(ends.contains(&true), Ordering::SeqCst);
        }
        shared.barrier.wait();
        if shared.is_over.load(Ordering::SeqCst) {
            break;
        }
    }
    result.and_then(|()| worker.check_all())
}

/// Runs a plan to its end, or until `stop` is set. Returns the counts as JSON.
///
/// # Errors
/// Wrong bytes; an operation that failed; numbers that do not fit.
pub fn run(plan: &Plan, stop: Arc<AtomicBool>) -> Result<Value, FsxError> {
    let mut workers = workers(plan)?;
    let begin = Instant::now();
    let shared = Shared {
        barrier: Barrier::new(workers.len()),
        stop,
        is_last: AtomicBool::new(false),
        is_over: AtomicBool::new(false),
        end: plan.time.map(|time| begin + time),
    };
    let results: Vec<Result<(), FsxError>> = std::thread::scope(|scope| {
        let start = |worker| scope.spawn(|| work(worker, plan, &shared));
        let threads: Vec<_> = workers.iter_mut().map(start).collect();
        let died = || FsxError::Refused("a worker panicked".into());
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(died()))).collect()
    });
    let failures: Vec<String> =
        results.iter().filter_map(|result| Some(result.as_ref().err()?.to_string())).collect();
    if !failures.is_empty() {
        return Err(FsxError::Mismatch(failures.join("\n")));
    }
    if let Some(path) = &plan.save {
        save(path, &workers)?;
    }
    Ok(summary(plan.seed, begin.elapsed(), &workers))
}

fn summary(seed: u64, time: Duration, workers: &[Worker]) -> Value {
    let mut counts = serde_json::Map::new();
    for (kind, count) in workers.iter().flat_map(|worker| &worker.counts.kinds) {
        let entry = counts.entry(format!("{kind:?}")).or_insert(0.into());
        *entry = (entry.as_u64().unwrap_or(0) + count).into();
    }
    let sum = |of: fn(&Worker) -> u64| workers.iter().map(of).sum::<u64>();
    json!({
        "seed": seed,
        "seconds": time.as_secs_f64(),
        "operations": sum(|worker| worker.number().into()),
        "written_bytes": sum(|worker| worker.counts.written_bytes),
        "checked_bytes": sum(|worker| worker.counts.checked_bytes),
        "kinds": counts,
    })
}

fn save(path: &Path, workers: &[Worker]) -> Result<(), FsxError> {
    let targets = workers.iter().flat_map(|worker| &worker.targets);
    let saved = targets.map(|it| Saved {
        path: it.path.clone(),
        number: it.number,
        begin: it.begin(),
        max_len_bytes: it.max_len_bytes,
        model: it.model.clone(),
    });
    let text = serde_json::to_vec(&saved.collect::<Vec<Saved>>());
    let text = text.map_err(|source| FsxError::Model { path: path.into(), source })?;
    fs::write(path, text).map_err(FsxError::file("write", path))
}

/// Reads and checks all files or disks of a saved model. Returns the counts as JSON.
///
/// # Errors
/// Wrong bytes; a file that is gone or has another length; no saved model.
pub fn verify(path: &Path) -> Result<Value, FsxError> {
    let text = fs::read(path).map_err(FsxError::file("read", path))?;
    let saved: Vec<Saved> = serde_json::from_slice(&text)
        .map_err(|source| FsxError::Model { path: path.into(), source })?;
    let mut targets = Vec::new();
    for Saved { path, number, begin, max_len_bytes, model } in saved {
        // Opening makes a file that is gone; its length is wrong then.
        let target = Target::open(&path, number, begin, max_len_bytes, model);
        targets.push(target.map_err(FsxError::file("open", path))?);
    }
    let mut worker = Worker::new(0, 0, targets, None);
    let begin = Instant::now();
    worker.check_all()?;
    Ok(summary(0, begin.elapsed(), &[worker]))
}
