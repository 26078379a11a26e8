//! qcow2 images, through the crate `imago`, on helper threads.
//!
//! This is the slow way: a batch is handed over under a lock and wakes a helper, results come back
//! under a lock and ring an event, and data is copied once more, because the library works on
//! buffers of its own threads. A sidecore only ever waits for the length of a list operation.

mod open;
mod pool;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use base::io::{Disk, DiskDone, DiskOp};

use self::open::Opened;
use self::pool::{Job, Pool, Results};
use crate::backend::{Backend, Demands};
use crate::error::BlockError;
use crate::file;
use crate::gate::Gate;

/// See the module's text.
pub struct Qcow2Backend {
    pool: Arc<Pool>,
    path: PathBuf,
    len_bytes: u64,
    gate: Option<Arc<Gate>>,
}

impl Qcow2Backend {
    /// Opens the image and, below `backing_dir`, what it stands on; starts the helpers.
    pub fn open(
        path: &Path,
        backing_dir: Option<&Path>,
        direct: bool,
        read_only: bool,
    ) -> Result<Self, BlockError> {
        let Opened { access, images, len_bytes } =
            open::open(path, backing_dir, direct, read_only)?;
        // The image's own device: all writes go there, and reads of what was written. As with raw
        // images, a tmpfs is none.
        let own = images.first().map(file::Image::get).filter(|file| !file::is_resident(file));
        let gate = own.and_then(|file| Gate::of(file).ok());
        let pool = Pool::start(access, images)
            .map_err(BlockError::resource("starting the qcow2 helper threads"))?;
        Ok(Self { pool: Arc::new(pool), path: path.to_path_buf(), len_bytes, gate })
    }
}

impl Backend for Qcow2Backend {
    fn kind(&self) -> &'static str {
        "qcow2"
    }

    fn open_queue(&self, depth: u16) -> Result<Box<dyn Disk>, BlockError> {
        let results = Results::new(depth).map_err(BlockError::resource("making an event"))?;
        Ok(Box::new(Qcow2Disk {
            pool: Arc::clone(&self.pool),
            results: Arc::new(results),
            waiting: Vec::with_capacity(usize::from(depth)),
            in_flight: 0,
            depth: usize::from(depth),
            len_bytes: self.len_bytes,
        }))
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn demands(&self) -> Demands {
        Demands { copies: true, ..Demands::NONE }
    }

    fn gate(&self) -> Option<Arc<Gate>> {
        self.gate.clone()
    }

    fn resize(&self, new_len_bytes: Option<u64>) -> Result<u64, BlockError> {
        match new_len_bytes {
            Some(len_bytes) if len_bytes != self.len_bytes => {
                let reason = "a qcow2 image is resized while no daemon serves it (qemu-img resize)";
                Err(BlockError::Resize { len_bytes, reason: reason.into() })
            }
            _ => Ok(self.len_bytes),
        }
    }

    fn sync(&self) -> Result<(), BlockError> {
        self.pool.sync().map_err(BlockError::file("cannot sync", &self.path))
    }
}

/// One queue's view.
struct Qcow2Disk {
    pool: Arc<Pool>,
    results: Arc<Results>,
    /// Submitted, not yet handed over.
    waiting: Vec<Job>,
    in_flight: usize,
    depth: usize,
    len_bytes: u64,
}

impl Disk for Qcow2Disk {
    unsafe fn submit(&mut self, token: u32, op: DiskOp) -> io::Result<()> {
        if self.in_flight >= self.depth {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.in_flight += 1;
        self.waiting.push(Job { token, op, results: Arc::clone(&self.results) });
        Ok(())
    }

    fn flush_submissions(&mut self) -> io::Result<()> {
        if !self.waiting.is_empty() {
            self.pool.hand_over(&mut self.waiting);
        }
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<DiskDone>) {
        self.in_flight -= self.results.reap(done);
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.results.event.as_raw_fd())
    }

    fn set_wakeups(&mut self, on: bool) {
        self.results.set_wakeups(on);
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }
}

#[cfg(test)]
mod malformed;
#[cfg(test)]
pub(crate) mod tests;
