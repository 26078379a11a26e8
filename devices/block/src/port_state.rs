//! State that all queues of a port share.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::sync::lock;

use crate::stage::{BlockStage, Direction, Verdict};
use sidecore::VmId;

use crate::backend::Demands;
use crate::config::OnError;
use crate::gate::Gate;
use crate::orphans::Orphans;
use crate::request::Geometry;
use crate::slab::Serial;

/// State of a port, written by the session's thread and read by sidecores.
pub(crate) struct PortState {
    /// VM whose account is charged for requests.
    pub vm: VmId,
    /// Gate of the device below.
    pub gate: Option<Arc<Gate>>,
    /// Size of the disk.
    pub len_bytes: AtomicU64,
    /// Whether the write cache is on: then writes are durable after a flush only.
    pub writeback: AtomicBool,
    pub read_only: bool,
    /// Whether DISCARD was negotiated.
    pub discard: AtomicBool,
    /// Whether WRITE ZEROES was negotiated.
    pub write_zeroes: AtomicBool,
    pub block_size: u32,
    pub serial: Serial,
    pub demands: Demands,
    /// Stages, first to last on the way from the VM. All queues of a port with stages are on one
    /// sidecore, so this lock is never waited for; ports without stages never take it.
    pub stages: Mutex<Vec<Box<dyn BlockStage>>>,
    pub has_stages: bool,
    /// Policy for requests that the storage fails.
    pub on_error: OnError,
    /// The errno of the first flush that failed; 0: none did. See [`PortState::flush_failure`].
    pub flush_errno: AtomicI32,
    /// Operations that queues which ended left in the disk.
    pub orphans: Arc<Orphans>,
}

impl PortState {
    pub fn geometry(&self) -> Geometry {
        Geometry {
            len_bytes: self.len_bytes.load(Ordering::Relaxed),
            block_size: self.block_size,
            read_only: self.read_only,
            discard: self.discard.load(Ordering::Relaxed),
            write_zeroes: self.write_zeroes.load(Ordering::Relaxed),
        }
    }

    /// Errno of the first failed flush: since then no flush of the image succeeds.
    ///
    /// Linux marks pages that it could not write as clean: a later fsync(2) has nothing left to
    /// write, and returns 0. So one failure holds for all queues until the image is opened anew.
    #[inline]
    pub fn flush_failure(&self) -> Option<i32> {
        // A driver that learns of the failure from one queue gets it from every queue: the flag is
        // written before the answer.
        match self.flush_errno.load(Ordering::Relaxed) {
            0 => None,
            errno => Some(errno),
        }
    }

    /// Records a failed flush. True for the first one.
    pub fn fail_flushes(&self, errno: i32) -> bool {
        let errno = if errno == 0 { libc::EIO } else { errno };
        self.flush_errno.compare_exchange(0, errno, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// Shows `data` to all stages; false when one refuses it.
    pub fn run_stages(&self, direction: Direction, offset: u64, data: &mut [u8]) -> bool {
        let mut stages = lock(&self.stages);
        let mut pass =
            |stage: &mut Box<dyn BlockStage>| stage.push(direction, offset, data) == Verdict::Pass;
        match direction {
            Direction::FromVm => stages.iter_mut().all(&mut pass),
            Direction::ToVm => stages.iter_mut().rev().all(&mut pass),
        }
    }
}
