//! The driver's books for a packed ring.

use super::ram::GuestRam;
use super::raw::RawDesc;
use crate::setup::{Layout, RingSetup};

const AVAIL: u16 = 1 << 7;
const USED: u16 = 1 << 15;

#[derive(Debug)]
pub(super) struct PackedSide {
    size: u16,
    ids: Vec<u16>,
    /// Descriptors of the chain with each id; 0 when the driver owns it.
    lengths: Vec<u16>,
    free: u16,
    /// Descriptors made available since the beginning, and used ones.
    avail: u64,
    used: u64,
    /// The first staged descriptor, whose flags are written last.
    first: Option<(u64, u16)>,
    kicked_at: u64,
}

impl PackedSide {
    pub fn new(size: u16) -> Self {
        Self {
            size,
            ids: (0..size).rev().collect(),
            lengths: vec![0; usize::from(size)],
            free: size,
            avail: 0,
            used: 0,
            first: None,
            kicked_at: 0,
        }
    }

    pub fn free(&self) -> usize {
        usize::from(self.free)
    }

    /// Offset in the ring and wrap counter of a running count.
    fn place(&self, count: u64) -> (u16, bool) {
        let size = u64::from(self.size);
        ((count % size) as u16, (count / size).is_multiple_of(2))
    }

    pub fn stage(&mut self, ram: &GuestRam, setup: &RingSetup, descs: &[RawDesc]) -> u16 {
        assert!(!descs.is_empty() && descs.len() <= self.free(), "model ring is full");
        let id = self.ids.pop().unwrap();
        for desc in descs {
            let (at, wrap) = self.place(self.avail);
            let addr = setup.addrs.desc + 16 * u64::from(at);
            let flags = desc.flags & !(AVAIL | USED) | if wrap { AVAIL } else { USED };
            if self.first.is_none() {
                // Everything but the flags: they stay as they are, "not available".
                let old = ram.load_u16(addr + 14);
                let hidden = RawDesc { flags: old, tail: id, ..*desc };
                ram.store_desc(addr, Layout::Packed, hidden);
                self.first = Some((addr + 14, flags));
            } else {
                ram.store_desc(addr, Layout::Packed, RawDesc { flags, tail: id, ..*desc });
            }
            self.avail += 1;
        }
        self.free -= descs.len() as u16;
        self.lengths[usize::from(id)] = descs.len() as u16;
        id
    }

    pub fn publish(&mut self, ram: &GuestRam, _setup: &RingSetup) {
        if let Some((addr, flags)) = self.first.take() {
            ram.store_u16(addr, flags);
        }
    }

    pub fn used(&mut self, ram: &GuestRam, setup: &RingSetup) -> Option<(u16, u32)> {
        let (at, wrap) = self.place(self.used);
        let addr = setup.addrs.desc + 16 * u64::from(at);
        let flags = ram.load_u16(addr + 14);
        if (flags & AVAIL != 0) != wrap || (flags & USED != 0) != wrap {
            return None;
        }
        let (len, id) = (ram.load_u32(addr + 8), ram.load_u16(addr + 12));
        let count = std::mem::take(&mut self.lengths[usize::from(id)]);
        assert!(count > 0, "the device used chain {id}, which it did not have");
        self.used += u64::from(count);
        self.free += count;
        self.ids.push(id);
        Some((id, len))
    }

    pub fn set_event(&self, ram: &GuestRam, setup: &RingSetup, wanted: bool) {
        let (at, wrap) = self.place(self.used);
        ram.store_u16(setup.addrs.driver, at | u16::from(wrap) << 15);
        let flags = match (wanted, setup.event_idx) {
            (false, _) => 1,
            (true, false) => 0,
            (true, true) => 2,
        };
        ram.store_u16(setup.addrs.driver + 2, flags);
    }

    pub fn kick_needed(&mut self, ram: &GuestRam, setup: &RingSetup) -> bool {
        let old = std::mem::replace(&mut self.kicked_at, self.avail);
        let off_wrap = ram.load_u16(setup.addrs.device);
        match ram.load_u16(setup.addrs.device + 2) {
            0 => old != self.avail,
            1 => false,
            _ => (old..self.avail).any(|count| {
                let (at, wrap) = self.place(count);
                off_wrap == at | u16::from(wrap) << 15
            }),
        }
    }
}
