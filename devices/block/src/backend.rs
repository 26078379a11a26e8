//! The seam below a port: a back end gives each queue a [`Disk`] over the same bytes.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use base::io::Disk;

use crate::error::BlockError;
use crate::gate::Gate;

/// Demands of a back end's disks on those who use them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demands {
    /// Alignment of the addresses and lengths of buffers; 1: no demand. Data that a guest did not
    /// align so goes through bounce buffers.
    pub mem_align: u32,
    /// Alignment of offsets and lengths; never more than the port's block size.
    pub offset_align: u32,
    /// Most bytes of one DISCARD or WRITE ZEROES operation. Disks that do them while the sidecore
    /// waits name a small number.
    pub max_range_bytes: u64,
    /// Whether each operation copies data with the CPU (for the counters).
    pub copies: bool,
    /// Most guest memory that the disks register ([`Disk::set_memory`]); 0: they register none. A
    /// queue whose memory table changes gets a new disk.
    pub max_registered_bytes: u64,
}

impl Demands {
    /// Whether DISCARD and WRITE ZEROES are done while the sidecore waits.
    pub fn within_call(&self) -> bool {
        self.max_range_bytes != u64::MAX
    }

    /// Whether a device reads and writes guest memory itself.
    pub fn is_direct(&self) -> bool {
        self.mem_align.max(self.offset_align) > 1
    }

    /// No demands at all.
    pub const NONE: Self = Self {
        mem_align: 1,
        offset_align: 1,
        max_range_bytes: u64::MAX,
        copies: false,
        max_registered_bytes: 0,
    };
}

/// State of an image that has a map (qcow2), for the administrator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ImageState {
    /// Whether the image was not closed before this opening, and so was checked.
    pub was_checked: bool,
    /// Reference counts that the check raised: they were too low.
    pub mended_counts: u64,
    /// Clusters that the check freed: nothing referred to them.
    pub freed_leaks: u64,
    /// Whether the image's tables contradict each other: nothing is written any more.
    pub is_damaged: bool,
    /// Memory that the map takes now, in bytes.
    pub map_len_bytes: u64,
}

/// The bytes of a disk, shared by all queues of a port. Called from the session's thread, never
/// from a sidecore.
pub trait Backend: Send + Sync {
    /// `raw`, `qcow2`, `memory`, `null`.
    fn kind(&self) -> &'static str;

    /// A disk for one queue, with room for `depth` operations at a time.
    fn open_queue(&self, depth: u16) -> Result<Box<dyn Disk>, BlockError>;

    /// Size in bytes.
    fn len_bytes(&self) -> u64;

    /// Demands of the disks made by [`Backend::open_queue`].
    fn demands(&self) -> Demands {
        Demands::NONE
    }

    /// The gate of the device below, where requests wait in one.
    fn gate(&self) -> Option<Arc<Gate>> {
        None
    }

    /// The file that holds the disk byte by byte, where there is one.
    fn in_place(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// State of the image, where it has a map.
    fn image_state(&self) -> Option<ImageState> {
        None
    }

    /// Looks at the size again (`None`), or changes it, where the back end can. Returns the size.
    fn resize(&self, new_len_bytes: Option<u64>) -> Result<u64, BlockError>;

    /// Makes all completed writes durable; waits for it.
    fn sync(&self) -> Result<(), BlockError>;

    /// Whether the bytes began as zeroes with this daemon: a driver that was served by an earlier
    /// one has lost what it wrote.
    fn began_empty(&self) -> bool {
        false
    }
}
