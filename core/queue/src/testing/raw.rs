//! Raw access to guest memory by field: descriptors and integers. Little-endian machines only.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::ram::GuestRam;
use crate::setup::Layout;

/// A descriptor as the driver writes it. `tail` is `next` (split, indirect tables) or `id`
/// (packed).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RawDesc {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// NEXT 1, WRITE 2, INDIRECT 4; packed: AVAIL 0x80, USED 0x8000.
    pub flags: u16,
    /// `next` or `id`.
    pub tail: u16,
}

impl GuestRam {
    /// A u16 in guest memory.
    pub fn load_u16(&self, addr: u64) -> u16 {
        // SAFETY: `host` checks the range; ring fields are aligned.
        unsafe { AtomicU16::from_ptr(self.host(addr, 2).cast()) }.load(Ordering::SeqCst)
    }

    /// Sets a u16 in guest memory.
    pub fn store_u16(&self, addr: u64, value: u16) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU16::from_ptr(self.host(addr, 2).cast()) }.store(value, Ordering::SeqCst);
    }

    /// A u32 in guest memory.
    pub fn load_u32(&self, addr: u64) -> u32 {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU32::from_ptr(self.host(addr, 4).cast()) }.load(Ordering::SeqCst)
    }

    /// Sets a u32 in guest memory.
    pub fn store_u32(&self, addr: u64, value: u32) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU32::from_ptr(self.host(addr, 4).cast()) }.store(value, Ordering::SeqCst);
    }

    /// Sets a u64 in guest memory.
    pub fn store_u64(&self, addr: u64, value: u64) {
        // SAFETY: as in `load_u16`.
        unsafe { AtomicU64::from_ptr(self.host(addr, 8).cast()) }.store(value, Ordering::SeqCst);
    }

    /// Writes a descriptor of a split ring or an indirect table of either layout.
    pub fn store_desc(&self, addr: u64, layout: Layout, desc: RawDesc) {
        self.store_u64(addr, desc.addr);
        self.store_u32(addr + 8, desc.len);
        let (at_12, at_14) = match layout {
            Layout::Split => (desc.flags, desc.tail),
            Layout::Packed => (desc.tail, desc.flags),
        };
        self.store_u16(addr + 12, at_12);
        self.store_u16(addr + 14, at_14);
    }

    /// Writes a table of descriptors and returns its address (for indirect descriptors).
    pub fn table(&self, layout: Layout, descs: &[RawDesc]) -> u64 {
        let addr = self.alloc(descs.len() * 16);
        for (i, desc) in descs.iter().enumerate() {
            self.store_desc(addr + 16 * i as u64, layout, *desc);
        }
        addr
    }
}
