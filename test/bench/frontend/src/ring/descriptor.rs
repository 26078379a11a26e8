//! Ground of both ring formats: shape, chains of buffers, and their descriptors in memory.

use crate::error::FrontendError;
use crate::memory::Memory;

/// The buffer continues in the next descriptor (virtio 1.2, 2.7.5).
pub(super) const F_NEXT: u16 = 1;
/// The device writes.
const F_WRITE: u16 = 2;
/// The buffer is a table of descriptors.
pub(super) const F_INDIRECT: u16 = 4;

/// Most buffers of one chain: 64 KiB in 4 KiB pieces, a header and a spare.
pub const MAX_CHAIN: usize = 32;

/// Shape of a ring: size, format and features.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingShape {
    /// Number of descriptors, a power of two.
    pub size: u16,
    /// Packed (virtio 1.2, 2.8) or split (2.7).
    pub packed: bool,
    /// VIRTIO_F_IN_ORDER.
    pub in_order: bool,
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC: chains of several buffers go through a table.
    pub indirect: bool,
}

impl RingShape {
    /// All formats with this number of descriptors: for tests.
    pub fn all(size: u16) -> impl Iterator<Item = Self> {
        (0..16).map(move |bits| Self {
            size,
            packed: bits & 1 != 0,
            in_order: bits & 2 != 0,
            event_idx: bits & 4 != 0,
            indirect: bits & 8 != 0,
        })
    }
}

/// One buffer of a chain, by its guest address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buf {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// The device writes it. Buffers that it reads come first.
    pub write: bool,
}

impl Buf {
    pub(super) fn flags(self) -> u16 {
        if self.write { F_WRITE } else { 0 }
    }
}

/// A chain that the device has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Token that was passed to [`super::Ring::post`].
    pub token: u16,
    /// Bytes that the device wrote; none where an in-order device skipped the entry.
    pub written: Option<u32>,
}

/// Note of the driver on a descriptor (split) or a buffer id (packed).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Slot {
    pub(super) token: u16,
    /// Descriptors of the chain that has it; 0: none is out.
    pub(super) count: u16,
    /// The next free one, or the next of a split chain.
    pub(super) next: u16,
}

/// Slots of an empty ring: all are free, each followed by the next.
pub(super) fn free_slots(shape: RingShape) -> Box<[Slot]> {
    let next = |index: u16| (index + 1) % shape.size;
    (0..shape.size).map(|index| Slot { next: next(index), ..Slot::default() }).collect()
}

#[cold]
pub(super) fn broken(what: &str, value: u64) -> FrontendError {
    FrontendError::Ring(format!("{what} {value}"))
}

/// Room for one indirect table per descriptor.
pub(super) fn tables(memory: &mut Memory, shape: RingShape) -> Result<Tables, FrontendError> {
    let count = if shape.indirect { usize::from(shape.size) } else { 0 };
    let ptr = memory.alloc((count * MAX_CHAIN * 16).max(16), 64)?;
    Ok(Tables { ptr, addr: memory.guest_addr(ptr) })
}

/// The indirect tables of a ring.
#[derive(Debug)]
pub(super) struct Tables {
    ptr: *mut u8,
    addr: u64,
}

impl Tables {
    /// Address of table `index`: ours, and the guest's.
    #[inline]
    pub(super) fn at(&self, index: u16) -> (*mut u8, u64) {
        let offset = usize::from(index) * MAX_CHAIN * 16;
        (self.ptr.wrapping_add(offset), self.addr + offset as u64)
    }
}

/// Writes one descriptor. `rest` is length, then two 16-bit fields, as they lie in memory.
///
/// # Safety
/// `ptr` has 16 mapped bytes, aligned to 8.
#[inline]
pub(super) unsafe fn write_desc(ptr: *mut u8, addr: u64, rest: u64) {
    // SAFETY: by the contract.
    unsafe {
        ptr.cast::<u64>().write_volatile(addr.to_le());
        ptr.add(8).cast::<u64>().write_volatile(rest.to_le());
    }
}

/// Length, first and second 16-bit field of a descriptor as one word.
#[inline]
pub(super) fn rest(len: u32, first: u16, second: u16) -> u64 {
    u64::from(len) | u64::from(first) << 32 | u64::from(second) << 48
}
