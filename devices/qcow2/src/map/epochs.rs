//! Epochs: they tell when a freed cluster has no reader or writer left.
//!
//! A request that was planned before a cluster was freed may still read or write it. So requests
//! are counted by the epoch in which they were planned, each queue by itself, and the epoch
//! advances only when no request is left in the one before. A cluster freed in epoch *e* is
//! untouched from *e* + 2 on.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, Release, SeqCst},
};
use std::sync::{Arc, Mutex, Weak};

use base::sync::lock;

/// Epochs of an image.
#[derive(Debug, Default)]
pub struct Epochs {
    now: AtomicU64,
    parties: Mutex<Vec<Weak<Party>>>,
}

/// Planner of requests: a queue, or a helper thread. Written by one thread.
#[derive(Debug, Default)]
pub struct Party {
    /// Requests planned in even and in odd epochs.
    active: [AtomicU64; 2],
}

impl Party {
    /// Count of odd epochs, or of even ones.
    #[inline]
    fn side(&self, is_odd: bool) -> &AtomicU64 {
        &self.active[usize::from(is_odd)]
    }
}

/// The epoch in which a request was planned; to be given back.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub struct Stay(bool);

impl Epochs {
    /// Adds a party; it ends with the last reference to it.
    pub fn join(&self) -> Arc<Party> {
        let party = Arc::new(Party::default());
        let mut parties = lock(&self.parties);
        parties.retain(|party| party.strong_count() > 0);
        parties.push(Arc::downgrade(&party));
        party
    }

    /// Enters the current epoch, before a request looks at the map. For the party's own thread.
    #[inline]
    pub fn enter(&self, party: &Party) -> Stay {
        loop {
            let now = self.now.load(SeqCst);
            let is_odd = now & 1 == 1;
            let side = party.side(is_odd);
            let others = side.load(Relaxed);
            if others > 0 {
                // They hold up this epoch already, so it cannot end between two looks at it.
                side.store(others + 1, Relaxed);
                return Stay(is_odd);
            }
            side.store(1, SeqCst);
            if self.now.load(SeqCst) == now {
                return Stay(is_odd);
            }
            side.store(0, Release);
        }
    }

    /// Leaves an epoch, when the request's last operation is done. For the party's own thread.
    #[inline]
    pub fn leave(&self, party: &Party, stay: Stay) {
        let side = party.side(stay.0);
        side.store(side.load(Relaxed) - 1, Release);
    }

    /// The epoch that a cluster is freed in.
    pub fn now(&self) -> u64 {
        self.now.load(SeqCst)
    }

    /// Goes on by as many epochs as it can, up to two, and returns the epoch. Callers take turns.
    pub fn advance(&self) -> u64 {
        for _ in 0..2 {
            let now = self.now.load(SeqCst);
            let was_odd = (now + 1) & 1 == 1;
            let parties = lock(&self.parties);
            let is_clear = |party: &Arc<Party>| party.side(was_odd).load(SeqCst) == 0;
            if !parties.iter().filter_map(Weak::upgrade).all(|party| is_clear(&party)) {
                break;
            }
            self.now.store(now + 1, SeqCst);
        }
        self.now()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_holds_up_the_second_epoch_after_it() {
        let epochs = Epochs::default();
        let (a, b) = (epochs.join(), epochs.join());
        let old = epochs.enter(&a);
        let freed = epochs.now();
        assert_eq!(epochs.advance(), freed + 1);
        let new = epochs.enter(&b);
        assert_eq!(epochs.advance(), freed + 1);
        epochs.leave(&a, old);
        assert_eq!(epochs.advance(), freed + 2, "those that came after it do not count");
        epochs.leave(&b, new);
        drop(a);
        assert_eq!(epochs.advance(), freed + 4);
    }
}
