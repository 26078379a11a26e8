//! Memory of a process that its clients can make it hold: requests that have not come in whole,
//! replies that are not taken, replies that are kept.
//!
//! Each module has a share of its own, and all have one pot for what goes beyond: however many
//! clients a guest opens, and of whatever modules, the process keeps within its bounds. Who finds
//! no room makes some, at the cost of the client that holds most (`service::room`).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::limits::{POT_BYTES, SHARE_BYTES};

/// Pot that all modules of a process share.
#[derive(Debug)]
pub(crate) struct Pot {
    used_bytes: AtomicUsize,
    limit_bytes: usize,
}

impl Pot {
    pub fn new(limit_bytes: usize) -> Arc<Self> {
        Arc::new(Self { used_bytes: AtomicUsize::new(0), limit_bytes })
    }
}

/// Purse of one module: its share, and what it takes of the pot. Only the module's thread changes
/// it.
#[derive(Debug)]
pub(crate) struct Purse {
    used_bytes: AtomicUsize,
    share_bytes: usize,
    pot: Arc<Pot>,
}

impl Purse {
    pub fn new(pot: &Arc<Pot>, share_bytes: usize) -> Arc<Self> {
        let pot = Arc::clone(pot);
        Arc::new(Self { used_bytes: AtomicUsize::new(0), share_bytes, pot })
    }

    /// Makes a purse as if there were one module.
    pub fn alone() -> Arc<Self> {
        Self::new(&Pot::new(POT_BYTES), SHARE_BYTES)
    }

    /// Bytes that are in use.
    pub fn used_bytes(&self) -> usize {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// Bytes that may still be had. Two modules may be told of the same ones: what they take is a
    /// few buffers more, at most.
    pub fn room_bytes(&self) -> usize {
        let pot = self.pot.limit_bytes.saturating_sub(self.pot.used_bytes.load(Ordering::Relaxed));
        self.share_bytes.saturating_sub(self.used_bytes()) + pot
    }

    fn change(&self, before: usize, now: usize) {
        let old = self.used_bytes();
        let new = (old + now).saturating_sub(before);
        self.used_bytes.store(new, Ordering::Relaxed);
        let beyond = |bytes: usize| bytes.saturating_sub(self.share_bytes);
        match (beyond(old), beyond(new)) {
            (old, new) if old < new => {
                self.pot.used_bytes.fetch_add(new - old, Ordering::Relaxed);
            }
            (old, new) if new < old => {
                self.pot.used_bytes.fetch_sub(old - new, Ordering::Relaxed);
            }
            _ => {}
        }
    }
}

/// Bytes that something holds; given back with it.
#[derive(Debug)]
pub(crate) struct Charge {
    purse: Arc<Purse>,
    bytes: usize,
}

impl Charge {
    pub fn new(purse: &Arc<Purse>) -> Self {
        Self { purse: Arc::clone(purse), bytes: 0 }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Sets the bytes that are held. Whether there is room is asked before.
    pub fn set(&mut self, bytes: usize) {
        if bytes != self.bytes {
            self.purse.change(std::mem::replace(&mut self.bytes, bytes), bytes);
        }
    }

    pub fn purse(&self) -> &Purse {
        &self.purse
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_ones_own_and_the_pot_is_everybodys() {
        let pot = Pot::new(100);
        let (a, b) = (Purse::new(&pot, 10), Purse::new(&pot, 10));
        let (mut first, mut second) = (Charge::new(&a), Charge::new(&b));
        assert_eq!((a.room_bytes(), b.room_bytes()), (110, 110));
        first.set(10);
        assert_eq!((a.room_bytes(), b.room_bytes()), (100, 110));
        first.set(105);
        assert_eq!((a.room_bytes(), b.room_bytes()), (5, 15));
        second.set(30);
        // A little beyond is taken, and counted.
        assert_eq!((a.room_bytes(), b.room_bytes()), (0, 0));
        first.set(0);
        assert_eq!((a.room_bytes(), b.room_bytes()), (90, 80));
        drop(second);
        let another = Charge::new(&b);
        assert_eq!((b.room_bytes(), b.used_bytes(), another.bytes()), (110, 0, 0));
    }
}
