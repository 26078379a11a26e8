//! A disk without bytes, for measurements of everything around it: writes vanish, reads give
//! zeroes (a buffer that keeps its old bytes would break the promise of `written`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::io::{Disk, DiskOp};

use crate::backend::Backend;
use crate::error::BlockError;
use crate::immediate::{Executor, ImmediateDisk};
use crate::limits::MAX_DISK_LEN_BYTES;
use queue::iovec::zero_all;

/// The null back end of a port: only the size of its disk.
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
        Ok(Box::new(ImmediateDisk::new(NullQueue(Arc::clone(&self.len_bytes)), depth)))
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

/// Null disk of one queue: its size.
struct NullQueue(Arc<AtomicU64>);

impl Executor for NullQueue {
    const BATCHES: bool = false;

    #[inline]
    unsafe fn execute(&self, op: DiskOp) -> Result<u32, i32> {
        Ok(match op {
            DiskOp::Read { bufs, count, len_bytes, .. } => {
                // SAFETY: the caller vouches for the list and its buffers until the operation is
                // reaped, which is after this.
                unsafe { zero_all(bufs, count) };
                len_bytes
            }
            DiskOp::Write { len_bytes, .. } => len_bytes,
            DiskOp::Flush | DiskOp::Discard { .. } | DiskOp::WriteZeroes { .. } => 0,
        })
    }

    fn len_bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
