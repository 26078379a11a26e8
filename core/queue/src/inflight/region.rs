//! The mapped inflight region, and typed access to each queue's part of it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use base::limits::{MAX_QUEUE_SIZE, MAX_QUEUES};
use base::peer_fd::PeerFd;
use rustix::fs::{MemfdFlags, SealFlags};

use crate::crash;
use crate::error::{MemoryError, RingError};
use crate::mapping::Mapping;
use crate::queue::Queue;
use crate::setup::Layout;

/// Version of the layouts; 0 is a region that was never used.
pub(super) const VERSION: u16 = 1;

/// Header fields that both layouts have.
pub(super) const AT_VERSION: usize = 8;
pub(super) const AT_DESC_NUM: usize = 10;

/// Header and entry of a split ring (`QueueRegionSplit` and `DescStateSplit`).
pub(super) const SPLIT_HEADER_BYTES: usize = 16;
pub(super) const SPLIT_ENTRY_BYTES: usize = 16;

/// Header and entry of a packed ring (`QueueRegionPacked` and `DescStatePacked`).
pub(super) const PACKED_HEADER_BYTES: usize = 32;
pub(super) const PACKED_ENTRY_BYTES: usize = 32;

/// Alignment of the queues' parts.
const REGION_ALIGN: usize = 64;

/// The mapped region for all queues of a port.
#[derive(Debug)]
pub struct InflightRegion {
    mapping: Mapping,
    fd: PeerFd,
    mmap_size: u64,
    mmap_offset: u64,
    num_queues: u16,
    queue_size: u16,
    layout: Layout,
}

impl InflightRegion {
    /// A new zeroed memfd region for `num_queues` queues of `queue_size`.
    pub fn new(num_queues: u16, queue_size: u16, layout: Layout) -> Result<Arc<Self>, RingError> {
        let size = region_len(num_queues, queue_size, layout)?;
        let fd = make_file(size).map_err(|e| unmappable(size, 0, e.to_string()))?;
        Self::from_fd(fd, size, 0, num_queues, queue_size, layout)
    }

    /// Maps a region that the front end kept (checked against the limits before use).
    pub fn from_fd(
        fd: impl Into<PeerFd>,
        mmap_size: u64,
        mmap_offset: u64,
        num_queues: u16,
        queue_size: u16,
        layout: Layout,
    ) -> Result<Arc<Self>, RingError> {
        let fd = fd.into();
        let needed = region_len(num_queues, queue_size, layout)?;
        if mmap_size < needed {
            return Err(RingError::BadInflight(format!(
                "{mmap_size} bytes for {num_queues} queues of {queue_size}; {needed} are needed"
            )));
        }
        // Only the part in use: the rest of a larger region stays unmapped.
        let mapping = Mapping::new(fd.as_fd(), mmap_offset, needed, None)
            .map_err(|reason| unmappable(needed, mmap_offset, reason))?;
        let fd = fd.checked();
        Ok(Arc::new(Self { mapping, fd, mmap_size, mmap_offset, num_queues, queue_size, layout }))
    }

    /// File, size and offset, as they go to the front end and to the holder.
    pub fn as_parts(&self) -> (BorrowedFd<'_>, u64, u64) {
        (self.fd.as_fd(), self.mmap_size, self.mmap_offset)
    }

    /// Number of queues, their size and their layout.
    pub fn shape(&self) -> (u16, u16, Layout) {
        (self.num_queues, self.queue_size, self.layout)
    }
}

fn make_file(size: u64) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("inflight", flags)?;
    rustix::fs::ftruncate(&fd, size)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::SEAL)?;
    Ok(fd)
}

fn unmappable(len: u64, addr: u64, reason: String) -> RingError {
    let source = MemoryError::Unmappable { addr, len, reason };
    RingError::Memory { place: "inflight region", source }
}

/// Most descriptors of a region, in all its queues together. The region is our memory, and the
/// front end chooses its size: 32 queues of 4,096 descriptors, or four of the largest.
pub const MAX_INFLIGHT_DESCS: u32 = 131_072;

/// Bytes of one queue's region.
fn queue_len(queue_size: u16, layout: Layout) -> usize {
    let (header, entry) = match layout {
        Layout::Split => (SPLIT_HEADER_BYTES, SPLIT_ENTRY_BYTES),
        Layout::Packed => (PACKED_HEADER_BYTES, PACKED_ENTRY_BYTES),
    };
    (header + entry * usize::from(queue_size)).next_multiple_of(REGION_ALIGN)
}

/// Bytes of all queues' regions, with the counts checked.
fn region_len(num_queues: u16, queue_size: u16, layout: Layout) -> Result<u64, RingError> {
    if num_queues == 0 || num_queues > MAX_QUEUES {
        return Err(RingError::BadInflight(format!(
            "{num_queues} queues; must be above 0 and at most {MAX_QUEUES}"
        )));
    }
    if queue_size == 0 || queue_size > MAX_QUEUE_SIZE {
        let (size, limit) = (u32::from(queue_size), MAX_QUEUE_SIZE);
        return Err(RingError::BadSize { size, rule: "above 0", limit });
    }
    let descs = u32::from(num_queues) * u32::from(queue_size);
    if descs > MAX_INFLIGHT_DESCS {
        return Err(RingError::BadInflight(format!(
            "{num_queues} queues of size {queue_size} are {descs} descriptors; at most \
             {MAX_INFLIGHT_DESCS}"
        )));
    }
    Ok((queue_len(queue_size, layout) * usize::from(num_queues)) as u64)
}

/// One queue's part of the region: typed access by offset.
#[derive(Debug)]
pub(super) struct QueueRegion {
    region: Arc<InflightRegion>,
    start: usize,
    len: usize,
}

impl QueueRegion {
    /// The part of queue `index`, which must be of `size` descriptors.
    pub(super) fn new(
        region: Arc<InflightRegion>,
        index: u16,
        queue: &Queue,
    ) -> Result<Self, RingError> {
        let (size, layout) = (queue.size(), queue.layout());
        if index >= region.num_queues || size > region.queue_size || layout != region.layout {
            return Err(RingError::BadInflight(format!(
                "{layout:?} queue {index} of size {size} is not in a region for {} {:?} queues of \
                 size {}",
                region.num_queues, region.layout, region.queue_size
            )));
        }
        let len = queue_len(region.queue_size, layout);
        Ok(Self { region, start: usize::from(index) * len, len })
    }

    #[inline]
    fn at(&self, offset: usize, bytes: usize) -> *mut u8 {
        assert!(offset + bytes <= self.len && offset.is_multiple_of(bytes));
        self.region.mapping.as_ptr().wrapping_add(self.start + offset)
    }

    pub(super) fn u8(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: `at` checks the range, which is mapped while `self` lives.
        unsafe { AtomicU8::from_ptr(self.at(offset, 1)) }
    }

    pub(super) fn u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: as above; the region is page aligned and `at` checks the offset's alignment.
        unsafe { AtomicU16::from_ptr(self.at(offset, 2).cast()) }
    }

    pub(super) fn u32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as for `u16`.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    pub(super) fn u64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as for `u16`.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }

    // All stores are Release: whoever reads the region after our death sees them in order.

    pub(super) fn set_u8(&self, offset: usize, value: u8) {
        crash::point();
        self.u8(offset).store(value, Ordering::Release);
    }

    pub(super) fn set_u16(&self, offset: usize, value: u16) {
        crash::point();
        self.u16(offset).store(value, Ordering::Release);
    }

    pub(super) fn set_u32(&self, offset: usize, value: u32) {
        crash::point();
        self.u32(offset).store(value, Ordering::Release);
    }

    pub(super) fn set_u64(&self, offset: usize, value: u64) {
        crash::point();
        self.u64(offset).store(value, Ordering::Release);
    }

    /// Whether an earlier back end used the region. An unknown version, or one made for another
    /// size, is an error: its entries cannot be read, and ignoring them would lose requests.
    pub(super) fn is_used(&self, size: u16) -> Result<bool, RingError> {
        let version = self.u16(AT_VERSION).load(Ordering::Acquire);
        let desc_num = self.u16(AT_DESC_NUM).load(Ordering::Acquire);
        match version {
            0 => Ok(false),
            // Front ends write the size before first use, or leave it to us.
            VERSION if desc_num == size => Ok(true),
            VERSION => Err(RingError::BadInflight(format!(
                "made for {desc_num} descriptors; the queue has {size}"
            ))),
            _ => Err(RingError::BadInflight(format!(
                "version {version}; the one known is {VERSION}"
            ))),
        }
    }

    /// Whether the front end truncated the region.
    pub(super) fn was_truncated(&self) -> bool {
        self.region.mapping.was_truncated()
    }
}

/// The error of a driver that offers a chain which the device still has.
pub(super) fn offered_twice(head: u16) -> RingError {
    RingError::BadRequest { head, what: "the chain is in flight already" }
}
