//! A disk without bytes, for measurements of everything around it: writes vanish, reads give
//! zeroes (a buffer that keeps its old bytes would break the promise of `written`).

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::io::{Disk, DiskDone, DiskOp};
use queue::iovec::zero_all;

use crate::backend::Backend;
use crate::done::DoneList;
use crate::error::BlockError;
use crate::limits::MAX_DISK_LEN_BYTES;

/// See the module's text.
#[derive(Debug)]
pub struct NullBackend {
    len_bytes: Arc<AtomicU64>,
}

impl NullBackend {
    /// A disk of that size.
    pub fn new(len_bytes: u64) -> Result<Self, BlockError> {
        check_len(len_bytes)?;
        Ok(Self { len_bytes: Arc::new(AtomicU64::new(len_bytes)) })
    }
}

fn check_len(len_bytes: u64) -> Result<(), BlockError> {
    if len_bytes > MAX_DISK_LEN_BYTES {
        let reason = format!("the limit is {MAX_DISK_LEN_BYTES}");
        return Err(BlockError::Resize { len_bytes, reason });
    }
    Ok(())
}

impl Backend for NullBackend {
    fn kind(&self) -> &'static str {
        "null"
    }

    fn open_queue(&self, depth: u16) -> Result<Box<dyn Disk>, BlockError> {
        let len_bytes = Arc::clone(&self.len_bytes);
        Ok(Box::new(NullDisk { len_bytes, done: DoneList::new(depth) }))
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Relaxed)
    }

    fn resize(&self, new_len_bytes: Option<u64>) -> Result<u64, BlockError> {
        if let Some(len_bytes) = new_len_bytes {
            check_len(len_bytes)?;
            self.len_bytes.store(len_bytes, Ordering::Relaxed);
        }
        Ok(self.len_bytes())
    }

    fn sync(&self) -> Result<(), BlockError> {
        Ok(())
    }
}

/// One queue's view.
struct NullDisk {
    len_bytes: Arc<AtomicU64>,
    done: DoneList,
}

impl Disk for NullDisk {
    unsafe fn submit(&mut self, token: u32, op: DiskOp) -> io::Result<()> {
        self.done.check_room()?;
        let result = match op {
            DiskOp::Read { bufs, count, len_bytes, .. } => {
                // SAFETY: the caller vouches for the list and its buffers until the operation is
                // reaped, which is after this.
                unsafe { zero_all(bufs, count) };
                len_bytes
            }
            DiskOp::Write { len_bytes, .. } => len_bytes,
            DiskOp::Flush | DiskOp::Discard { .. } | DiskOp::WriteZeroes { .. } => 0,
        };
        self.done.push(DiskDone { token, result: Ok(result) });
        Ok(())
    }

    fn flush_submissions(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn reap(&mut self, done: &mut Vec<DiskDone>) {
        self.done.reap(done);
    }

    fn event_fd(&self) -> Option<RawFd> {
        None
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Relaxed)
    }
}
