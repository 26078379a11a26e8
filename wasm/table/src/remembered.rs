//! Memory of requests that were done, so that none is done twice.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use guest_abi::table::MAX_REMEMBERED;

use crate::record_body::RequestId;

/// Requests of a client, of its last 64, that were done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DoneRequests {
    /// Highest number of a request that was done.
    pub highest: u64,
    /// Requests that were done: bit n stands for `highest - n`.
    pub mask: u64,
    /// When the last of them was done; a higher number is later.
    pub stamp: u64,
}

impl DoneRequests {
    /// Adds a request.
    pub fn add(&mut self, seq: u64) {
        if seq > self.highest {
            let shift = u32::try_from(seq - self.highest).unwrap_or(u32::MAX);
            self.mask = self.mask.checked_shl(shift).unwrap_or(0) | 1;
            self.highest = seq;
        } else if let Ok(bit @ 0..64) = u32::try_from(self.highest - seq) {
            self.mask |= 1 << bit;
        }
    }

    /// Whether a request was done.
    pub fn has(&self, seq: u64) -> bool {
        let bit = self.highest.checked_sub(seq).and_then(|bit| u32::try_from(bit).ok());
        bit.is_some_and(|bit| bit < 64 && self.mask >> bit & 1 == 1)
    }
}

/// Requests that were done, of the clients that did something last.
#[derive(Debug, Default)]
pub struct Remembered {
    /// Requests by the client's own id.
    pub clients: BTreeMap<[u8; 16], DoneRequests>,
    stamp: u64,
}

/// Clients that may be known beyond the limit before the oldest are forgotten.
const SPARE: usize = 256;

impl Remembered {
    /// Adds a request that was done.
    pub fn add(&mut self, request_id: RequestId) {
        self.stamp += 1;
        let done = self.clients.entry(request_id.client).or_default();
        done.add(request_id.seq);
        done.stamp = self.stamp;
        self.trim();
    }

    /// Puts back a client that a checkpoint knows.
    pub fn put(&mut self, client: [u8; 16], done: DoneRequests) {
        self.stamp = self.stamp.max(done.stamp);
        self.clients.insert(client, done);
        self.trim();
    }

    fn trim(&mut self) {
        if self.clients.len() <= MAX_REMEMBERED + SPARE {
            return;
        }
        let mut stamps: Vec<u64> = self.clients.values().map(|d| d.stamp).collect();
        stamps.sort_unstable();
        let from = stamps.get(stamps.len() - MAX_REMEMBERED).copied().unwrap_or(0);
        self.clients.retain(|_, d| d.stamp >= from);
    }

    /// Whether a request was done.
    pub fn has(&self, request_id: RequestId) -> bool {
        self.clients.get(&request_id.client).is_some_and(|done| done.has(request_id.seq))
    }
}
