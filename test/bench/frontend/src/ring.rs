//! The driver's side of a virtqueue, built to be fast: what a guest's driver does for each buffer,
//! and nothing else. Independent of the device's side in the crate `queue`.

mod descriptor;
mod packed;
mod split;

use crate::error::FrontendError;
use crate::memory::Memory;

pub use descriptor::{Buf, MAX_CHAIN, RingShape, Used};
use packed::Packed;
use split::Split;

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

#[cfg(test)]
mod tests;
