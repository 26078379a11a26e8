//! The driver's side of a virtqueue, built to be fast: what a guest's driver does for each buffer,
//! and nothing else. Independent of the device's side in the crate `queue`.

mod packed;
mod split;

use crate::error::FrontendError;
use crate::memory::Memory;

use packed::Packed;
use split::Split;

/// The buffer continues in the next descriptor (virtio 1.2, 2.7.5).
const F_NEXT: u16 = 1;
/// The device writes.
const F_WRITE: u16 = 2;
/// The buffer is a table of descriptors.
const F_INDIRECT: u16 = 4;

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
    fn flags(self) -> u16 {
        if self.write { F_WRITE } else { 0 }
    }
}

/// A chain that the device has used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    /// Token that was passed to [`Ring::post`].
    pub token: u16,
    /// Bytes that the device wrote; none where an in-order device skipped the entry.
    pub written: Option<u32>,
}

/// A virtqueue of either format.
#[derive(Debug)]
pub enum Ring {
    /// Split.
    Split(Split),
    /// Packed.
    Packed(Packed),
}

impl Ring {
    /// A ring in `memory`, interrupts off.
    pub fn new(memory: &mut Memory, shape: RingShape) -> Result<Self, FrontendError> {
        if !shape.size.is_power_of_two() || shape.size > 1024 {
            let text = format!("queue size {}: a power of two up to 1024", shape.size);
            return Err(FrontendError::Usage(text));
        }
        Ok(if shape.packed {
            Self::Packed(Packed::new(memory, shape)?)
        } else {
            Self::Split(Split::new(memory, shape)?)
        })
    }

    /// Shape of the ring.
    pub fn shape(&self) -> RingShape {
        match self {
            Self::Split(r) => r.shape,
            Self::Packed(r) => r.shape,
        }
    }

    /// Addresses (ours) of descriptors, driver part and device part.
    pub fn parts(&self) -> [*mut u8; 3] {
        match self {
            Self::Split(r) => r.parts(),
            Self::Packed(r) => r.parts(),
        }
    }

    /// Whether a chain of `count` buffers can be posted now.
    #[inline]
    pub fn has_room(&self, count: usize) -> bool {
        match self {
            Self::Split(r) => r.has_room(count),
            Self::Packed(r) => r.has_room(count),
        }
    }

    /// Writes a chain's descriptors; visible to a split device with the next [`Ring::publish`], to
    /// a packed one at once. There must be room.
    #[inline]
    pub fn post(&mut self, bufs: &[Buf], token: u16) {
        match self {
            Self::Split(r) => r.post(bufs, token),
            Self::Packed(r) => r.post(bufs, token),
        }
    }

    /// Makes what was posted visible; true when the device wants a kick.
    #[inline]
    pub fn publish(&mut self) -> bool {
        match self {
            Self::Split(r) => r.publish(),
            Self::Packed(r) => r.publish(),
        }
    }

    /// The next chain that the device has used.
    #[inline]
    pub fn used(&mut self) -> Result<Option<Used>, FrontendError> {
        match self {
            Self::Split(r) => r.used(),
            Self::Packed(r) => r.used(),
        }
    }

    /// Asks for an interrupt at the next used chain, or for none. True when one is there already.
    pub fn set_interrupts(&mut self, wanted: bool) -> bool {
        match self {
            Self::Split(r) => r.set_interrupts(wanted),
            Self::Packed(r) => r.set_interrupts(wanted),
        }
    }
}

#[cold]
fn broken(what: &str, value: u64) -> FrontendError {
    FrontendError::Ring(format!("{what} {value}"))
}

/// Room for one indirect table per descriptor.
fn tables(memory: &mut Memory, shape: RingShape) -> Result<Tables, FrontendError> {
    let count = if shape.indirect { usize::from(shape.size) } else { 0 };
    let ptr = memory.alloc((count * MAX_CHAIN * 16).max(16), 64)?;
    Ok(Tables { ptr, addr: memory.guest_addr(ptr) })
}

/// The indirect tables of a ring.
#[derive(Debug)]
struct Tables {
    ptr: *mut u8,
    addr: u64,
}

impl Tables {
    /// Address of table `index`: ours, and the guest's.
    #[inline]
    fn at(&self, index: u16) -> (*mut u8, u64) {
        let offset = usize::from(index) * MAX_CHAIN * 16;
        (self.ptr.wrapping_add(offset), self.addr + offset as u64)
    }
}

/// Writes one descriptor. `rest` is length, then two 16-bit fields, as they lie in memory.
///
/// # Safety
/// `ptr` has 16 mapped bytes, aligned to 8.
#[inline]
unsafe fn write_desc(ptr: *mut u8, addr: u64, rest: u64) {
    // SAFETY: by the contract.
    unsafe {
        ptr.cast::<u64>().write_volatile(addr.to_le());
        ptr.add(8).cast::<u64>().write_volatile(rest.to_le());
    }
}

/// Length, first and second 16-bit field of a descriptor as one word.
#[inline]
fn rest(len: u32, first: u16, second: u16) -> u64 {
    u64::from(len) | u64::from(first) << 32 | u64::from(second) << 48
}

#[cfg(test)]
mod tests;
