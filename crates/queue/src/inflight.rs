//! The inflight region of vhost-user (`GET_INFLIGHT_FD` / `SET_INFLIGHT_FD`): which requests were
//! taken and not completed when a back end died. Layouts as in the specification ("inflight I/O
//! tracking"), split and packed.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::error::RingError;
use crate::ring::Layout;

/// The mapped region for all queues of a port.
#[derive(Debug)]
pub struct InflightRegion {
    // (private)
}

impl InflightRegion {
    /// A new zeroed memfd region for `num_queues` queues of `queue_size`.
    pub fn new(num_queues: u16, queue_size: u16, layout: Layout) -> Result<Arc<Self>, RingError> {
        let _ = (num_queues, queue_size, layout);
        unimplemented!("owner of crate queue")
    }

    /// Maps a region that the front end kept (checked against the limits before use).
    pub fn from_fd(
        fd: OwnedFd,
        mmap_size: u64,
        mmap_offset: u64,
        num_queues: u16,
        queue_size: u16,
        layout: Layout,
    ) -> Result<Arc<Self>, RingError> {
        let _ = (fd, mmap_size, mmap_offset, num_queues, queue_size, layout);
        unimplemented!("owner of crate queue")
    }

    /// The file, its size and offset: what goes to the front end and to the holder.
    pub fn as_parts(&self) -> (BorrowedFd<'_>, u64, u64) {
        unimplemented!("owner of crate queue")
    }
}
