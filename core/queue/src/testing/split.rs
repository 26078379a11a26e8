//! The driver's books for a split ring.

use super::ram::GuestRam;
use super::raw::RawDesc;
use crate::setup::{Layout, RingSetup};

#[derive(Debug)]
pub(super) struct SplitSide {
    size: u16,
    free: Vec<u16>,
    /// Descriptors of the chain at each head; empty when the driver owns it.
    chains: Vec<Vec<u16>>,
    avail: u16,
    staged: u16,
    last_used: u16,
    kicked_at: u16,
}

impl SplitSide {
    pub fn new(size: u16) -> Self {
        Self {
            size,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); usize::from(size)],
            avail: 0,
            staged: 0,
            last_used: 0,
            kicked_at: 0,
        }
    }

    pub fn free(&self) -> usize {
        self.free.len()
    }

    pub fn stage(&mut self, ram: &GuestRam, setup: &RingSetup, descs: &[RawDesc]) -> u16 {
        assert!(!descs.is_empty() && descs.len() <= self.free.len(), "model ring is full");
        let chain: Vec<u16> = descs.iter().map(|_| self.free.pop().unwrap()).collect();
        for (i, desc) in descs.iter().enumerate() {
            let tail = chain.get(i + 1).copied().unwrap_or(0);
            let at = setup.addrs.desc + 16 * u64::from(chain[i]);
            ram.store_desc(at, Layout::Split, RawDesc { tail, ..*desc });
        }
        let head = chain[0];
        let slot = self.avail.wrapping_add(self.staged) % self.size;
        ram.store_u16(setup.addrs.driver + 4 + 2 * u64::from(slot), head);
        self.staged += 1;
        self.chains[usize::from(head)] = chain;
        head
    }

    pub fn publish(&mut self, ram: &GuestRam, setup: &RingSetup) {
        self.avail = self.avail.wrapping_add(std::mem::take(&mut self.staged));
        ram.store_u16(setup.addrs.driver + 2, self.avail);
    }

    pub fn used(&mut self, ram: &GuestRam, setup: &RingSetup) -> Option<(u16, u32)> {
        if ram.load_u16(setup.addrs.device + 2) == self.last_used {
            return None;
        }
        let at = setup.addrs.device + 4 + 8 * u64::from(self.last_used % self.size);
        let (id, len) = (ram.load_u32(at), ram.load_u32(at + 4));
        let chain = std::mem::take(&mut self.chains[id as usize]);
        assert!(!chain.is_empty(), "the device used chain {id}, which it did not have");
        self.free.extend(chain.into_iter().rev());
        self.last_used = self.last_used.wrapping_add(1);
        Some((id as u16, len))
    }

    pub fn set_event(&self, ram: &GuestRam, setup: &RingSetup, wanted: bool) {
        if setup.event_idx {
            // Just behind: the device would have to go once around to pass it.
            let event = if wanted { self.last_used } else { self.last_used.wrapping_sub(1) };
            let at = setup.addrs.driver + 4 + 2 * u64::from(self.size);
            ram.store_u16(at, event);
        } else {
            ram.store_u16(setup.addrs.driver, u16::from(!wanted));
        }
    }

    pub fn kick_needed(&mut self, ram: &GuestRam, setup: &RingSetup) -> bool {
        let old = std::mem::replace(&mut self.kicked_at, self.avail);
        if !setup.event_idx {
            return old != self.avail && ram.load_u16(setup.addrs.device) & 1 == 0;
        }
        let at = setup.addrs.device + 4 + 8 * u64::from(self.size);
        let event = ram.load_u16(at);
        self.avail.wrapping_sub(event).wrapping_sub(1) < self.avail.wrapping_sub(old)
    }
}
