//! Raw access to every field of a ring: what a hostile driver uses. Little-endian machines only.

use super::driver::ModelDriver;
use super::ram;
use super::raw::RawDesc;
use crate::setup::Layout;

/// Ring fields. Indices are taken modulo nothing: the caller is the hostile one.
impl ModelDriver {
    /// Writes descriptor `index` of the ring.
    pub fn set_desc(&self, index: u16, desc: RawDesc) {
        self.ram().store_desc(self.desc_addr(index), self.setup().layout, desc);
    }

    /// Reads descriptor `index` of the ring.
    pub fn desc(&self, index: u16) -> RawDesc {
        let (addr, ram) = (self.desc_addr(index), self.ram());
        let (at_12, at_14) = (ram.load_u16(addr + 12), ram.load_u16(addr + 14));
        let (flags, tail) = match self.setup().layout {
            Layout::Split => (at_12, at_14),
            Layout::Packed => (at_14, at_12),
        };
        let low = u64::from(ram.load_u32(addr)) | u64::from(ram.load_u32(addr + 4)) << 32;
        RawDesc { addr: low, len: ram.load_u32(addr + 8), flags, tail }
    }

    /// Guest address of descriptor `index`.
    pub fn desc_addr(&self, index: u16) -> u64 {
        self.setup().addrs.desc + 16 * u64::from(index)
    }

    /// Split: available flags. Packed: the driver's event flags.
    pub fn set_driver_flags(&self, flags: u16) {
        let at = match self.setup().layout {
            Layout::Split => 0,
            Layout::Packed => 2,
        };
        self.ram().store_u16(self.setup().addrs.driver + at, flags);
    }

    /// Split: used flags. Packed: the device's event flags.
    pub fn device_flags(&self) -> u16 {
        let at = match self.setup().layout {
            Layout::Split => 0,
            Layout::Packed => 2,
        };
        self.ram().load_u16(self.setup().addrs.device + at)
    }

    /// Split: the available index.
    pub fn avail_idx(&self) -> u16 {
        self.ram().load_u16(self.setup().addrs.driver + 2)
    }

    /// Split: sets the available index.
    pub fn set_avail_idx(&self, index: u16) {
        self.ram().store_u16(self.setup().addrs.driver + 2, index);
    }

    /// Split: sets entry `slot` of the available ring.
    pub fn set_avail_entry(&self, slot: u16, head: u16) {
        self.ram().store_u16(self.setup().addrs.driver + 4 + 2 * u64::from(slot), head);
    }

    /// Split: the used index.
    pub fn used_idx(&self) -> u16 {
        self.ram().load_u16(self.setup().addrs.device + 2)
    }

    /// Split: element `slot` of the used ring: id and length.
    pub fn used_element(&self, slot: u16) -> (u32, u32) {
        let at = self.setup().addrs.device + 4 + 8 * u64::from(slot);
        (self.ram().load_u32(at), self.ram().load_u32(at + 4))
    }

    /// Split: sets `used_event`. Packed: sets the driver's event offset and wrap.
    pub fn set_used_event(&self, value: u16) {
        let at = match self.setup().layout {
            Layout::Split => 4 + 2 * u64::from(self.setup().size),
            Layout::Packed => 0,
        };
        self.ram().store_u16(self.setup().addrs.driver + at, value);
    }

    /// Split: `avail_event`. Packed: the device's event offset and wrap.
    pub fn avail_event(&self) -> u16 {
        let at = match self.setup().layout {
            Layout::Split => 4 + 8 * u64::from(self.setup().size),
            Layout::Packed => 0,
        };
        self.ram().load_u16(self.setup().addrs.device + at)
    }

    /// An address outside the guest's memory.
    pub fn unmapped_addr(&self) -> u64 {
        ram::GUEST_BASE + self.ram().region().len_bytes + 0x1000_0000
    }
}
