//! Locks of keys and tables.
//!
//! A key's lock is found by a hash of table, index and key; two keys with the same hash share one,
//! which costs a wait that was not needed and nothing else. Who comes first is served first, but
//! for those who hold a lock already and want more of it.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Resource of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// Table, by its number.
    Table(u32),
    /// Key, by its hash.
    Key(u64),
}

impl Resource {
    /// Resource of a key of an index.
    pub fn key(table: u32, index: u8, key: &[u8]) -> Self {
        Self::Key(xxh3_64_with_seed(key, u64::from(table) << 8 | u64::from(index)))
    }
}

/// Modes of locks; a holder may have several.
pub mod mode {
    /// Keys of the table are to be locked shared.
    pub const INTEND_SHARED: u8 = 1;
    /// Keys of the table are to be locked exclusive.
    pub const INTEND_EXCLUSIVE: u8 = 2;
    /// No other transaction may change the resource.
    pub const SHARED: u8 = 4;
    /// No other transaction may read or change the resource.
    pub const EXCLUSIVE: u8 = 8;
}

/// Modes that a lock of some modes implies.
fn implied(held: u8) -> u8 {
    let mut all = held;
    if held & mode::EXCLUSIVE != 0 {
        all |= mode::SHARED | mode::INTEND_EXCLUSIVE | mode::INTEND_SHARED;
    }
    if held & (mode::SHARED | mode::INTEND_EXCLUSIVE) != 0 {
        all |= mode::INTEND_SHARED;
    }
    all
}

/// Whether the modes that are held suffice.
pub fn covers(held: u8, want: u8) -> bool {
    want & !implied(held) == 0
}

/// Modes that others must not have.
fn conflicts(want: u8) -> u8 {
    let mut with = 0;
    if want & mode::INTEND_SHARED != 0 {
        with |= mode::EXCLUSIVE;
    }
    if want & mode::INTEND_EXCLUSIVE != 0 {
        with |= mode::SHARED | mode::EXCLUSIVE;
    }
    if want & mode::SHARED != 0 {
        with |= mode::INTEND_EXCLUSIVE | mode::EXCLUSIVE;
    }
    if want & mode::EXCLUSIVE != 0 {
        with |= mode::INTEND_SHARED | mode::INTEND_EXCLUSIVE | mode::SHARED | mode::EXCLUSIVE;
    }
    with
}

#[derive(Debug, Default)]
struct Lock {
    holders: Vec<(u64, u8)>,
    queue: VecDeque<(u64, u8)>,
}

impl Lock {
    fn held(&self, tx: u64) -> u8 {
        self.holders.iter().find(|(t, _)| *t == tx).map_or(0, |(_, m)| *m)
    }

    fn is_free(&self, tx: u64, want: u8) -> bool {
        let with = conflicts(want);
        self.holders.iter().all(|(t, m)| *t == tx || m & with == 0)
    }

    /// Grants it. True: it is new to the holder.
    fn grant(&mut self, tx: u64, want: u8) -> bool {
        if let Some((_, held)) = self.holders.iter_mut().find(|(t, _)| *t == tx) {
            *held |= want;
            return false;
        }
        self.holders.push((tx, want));
        true
    }
}

/// Result of asking for a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// The lock was held before.
    Held,
    /// The lock is held now.
    New,
    /// Others have the lock, or wait for it already.
    Busy,
}

/// Lock that a waiter has got: the transaction, the lock, whether it is new to the transaction.
pub type Granted = (u64, Resource, bool);

/// Locks of all transactions.
#[derive(Debug, Default)]
pub struct Locks {
    locks: BTreeMap<Resource, Lock>,
    waits: BTreeMap<u64, Resource>,
}

impl Locks {
    /// Number of resources that are locked or waited for.
    pub fn len(&self) -> usize {
        self.locks.len()
    }

    /// Whether anybody has a lock there, or waits for one.
    pub fn is_used(&self, resource: Resource) -> bool {
        self.locks.contains_key(&resource)
    }

    /// Takes a lock if that is possible at once.
    pub fn ask(&mut self, tx: u64, resource: Resource, want: u8) -> Asked {
        let lock = self.locks.entry(resource).or_default();
        let held = lock.held(tx);
        if covers(held, want) {
            return Asked::Held;
        }
        if lock.is_free(tx, want) && (held != 0 || lock.queue.is_empty()) {
            return if lock.grant(tx, want) { Asked::New } else { Asked::Held };
        }
        Asked::Busy
    }

    /// Waits for a lock, after [`Asked::Busy`]. False: that would be a deadlock, so it does not
    /// wait.
    pub fn wait(&mut self, tx: u64, resource: Resource, want: u8) -> bool {
        let lock = self.locks.entry(resource).or_default();
        if lock.held(tx) != 0 {
            lock.queue.push_front((tx, want));
        } else {
            lock.queue.push_back((tx, want));
        }
        self.waits.insert(tx, resource);
        if self.is_deadlock(tx) {
            self.give_up(tx, &mut Vec::new());
            return false;
        }
        true
    }

    /// Whether a transaction waits for itself, through others.
    fn is_deadlock(&self, tx: u64) -> bool {
        let mut seen = BTreeSet::new();
        let mut next = self.blockers(tx);
        while let Some(other) = next.pop() {
            if other == tx {
                return true;
            }
            if seen.insert(other) {
                next.extend(self.blockers(other));
            }
        }
        false
    }

    /// Transactions that one waits for: those that hold the lock, and the one before it in the
    /// queue.
    fn blockers(&self, tx: u64) -> Vec<u64> {
        let lock = self.waits.get(&tx).and_then(|resource| self.locks.get(resource));
        let Some(lock) = lock else { return Vec::new() };
        let Some(place) = lock.queue.iter().position(|(t, _)| *t == tx) else { return Vec::new() };
        let with = conflicts(lock.queue[place].1);
        let holders = lock.holders.iter().filter(|(t, m)| *t != tx && m & with != 0);
        let before = place.checked_sub(1).map(|before| lock.queue[before].0);
        holders.map(|(t, _)| *t).chain(before).collect()
    }

    /// Stops waiting. Others may get on by that.
    pub fn give_up(&mut self, tx: u64, granted: &mut Vec<Granted>) {
        let Some(resource) = self.waits.remove(&tx) else { return };
        if let Some(lock) = self.locks.get_mut(&resource) {
            lock.queue.retain(|(t, _)| *t != tx);
        }
        self.serve(resource, granted);
    }

    /// Whether a transaction waits.
    pub fn is_waiting(&self, tx: u64) -> bool {
        self.waits.contains_key(&tx)
    }

    /// Gives a lock back.
    pub fn release(&mut self, tx: u64, resource: Resource, granted: &mut Vec<Granted>) {
        if let Some(lock) = self.locks.get_mut(&resource) {
            lock.holders.retain(|(t, _)| *t != tx);
        }
        self.serve(resource, granted);
    }

    fn serve(&mut self, resource: Resource, granted: &mut Vec<Granted>) {
        let Some(lock) = self.locks.get_mut(&resource) else { return };
        while let Some((tx, want)) = lock.queue.front().copied() {
            if !lock.is_free(tx, want) {
                break;
            }
            lock.queue.pop_front();
            self.waits.remove(&tx);
            granted.push((tx, resource, lock.grant(tx, want)));
        }
        if lock.holders.is_empty() && lock.queue.is_empty() {
            self.locks.remove(&resource);
        }
    }
}
