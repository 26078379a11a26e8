//! Items within a bounded memory, by S3-FIFO (see the crate).

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::hash::Hasher;

use hashbrown::HashTable;
use siphasher::sip::SipHasher13;

use crate::list::{Linked, Links, List};

/// Memory that an item costs beside its key and value: its slot, its place in the table, the
/// allocator's headers, and the hash that is left when it has gone.
pub const ITEM_BYTES: usize = 128;
/// The small queue's share.
const SMALL_SHARE: usize = 10;
/// An item's counter goes so far.
const MOST_HITS: u8 = 3;

/// Item: the value of a key.
#[derive(Debug)]
pub struct Item {
    key: Box<[u8]>,
    /// The value.
    pub value: Vec<u8>,
    /// The client's.
    pub flags: u32,
    /// Another one after each change.
    pub cas: u64,
    /// 0: never.
    expires_ms: u64,
    hash: u64,
    epoch: u32,
    hits: u8,
    is_main: bool,
    links: Links,
}

impl Item {
    fn bytes(&self) -> usize {
        self.key.len() + self.value.len() + ITEM_BYTES
    }
}

#[derive(Debug, Default)]
struct Slots {
    /// In boxes: a longer vector is a copy of the shorter one.
    items: Vec<Option<Box<Item>>>,
    free: Vec<u32>,
}

impl Linked for Slots {
    fn links(&mut self, slot: u32) -> &mut Links {
        &mut self.item_mut(slot).links
    }
}

impl Slots {
    fn item(&self, slot: u32) -> &Item {
        self.items[slot as usize].as_deref().expect("a slot in use")
    }

    fn item_mut(&mut self, slot: u32) -> &mut Item {
        self.items[slot as usize].as_deref_mut().expect("a slot in use")
    }

    fn put(&mut self, item: Item) -> u32 {
        match self.free.pop() {
            Some(slot) => {
                self.items[slot as usize] = Some(Box::new(item));
                slot
            }
            None => {
                self.items.push(Some(Box::new(item)));
                self.items.len() as u32 - 1
            }
        }
    }

    fn take(&mut self, slot: u32) -> Option<Box<Item>> {
        self.free.push(slot);
        self.items[slot as usize].take()
    }
}

/// Hashes of keys that have left the small queue, oldest first; those that came back are left out
/// when they are found.
#[derive(Debug, Default)]
struct Ghosts {
    order: VecDeque<u64>,
    known: HashTable<u64>,
}

impl Ghosts {
    fn remember(&mut self, hash: u64, most: usize) {
        while self.order.len() >= most.max(1) {
            if let Some(old) = self.order.pop_front() {
                self.forget(old);
            }
        }
        self.order.push_back(hash);
        if self.known.find(hash, |&h| h == hash).is_none() {
            self.known.insert_unique(hash, hash, |&h| h);
        }
    }

    fn forget(&mut self, hash: u64) -> bool {
        self.known.find_entry(hash, |&h| h == hash).map(|found| found.remove()).is_ok()
    }
}

/// Numbers for `stats`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Items stored, ever.
    pub stored: u64,
    /// Items that went as there was no room.
    pub evicted: u64,
    /// Items found to have expired.
    pub expired: u64,
}

/// The cache.
#[derive(Debug)]
pub struct Cache {
    limit_bytes: usize,
    secret: [u8; 16],
    slots: Slots,
    table: HashTable<u32>,
    small: List,
    main: List,
    ghosts: Ghosts,
    epoch: u32,
    live: usize,
    next_cas: u64,
    /// Counters.
    pub counters: Counters,
}

/// An item is larger than the whole cache, or there is no memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoRoom;

impl Cache {
    /// Makes a cache of a number of bytes. The secret keeps others from choosing keys with the same
    /// hash.
    pub fn new(limit_bytes: usize, secret: [u8; 16]) -> Self {
        Self {
            limit_bytes,
            secret,
            slots: Slots::default(),
            table: HashTable::new(),
            small: List::default(),
            main: List::default(),
            ghosts: Ghosts::default(),
            epoch: 0,
            live: 0,
            next_cas: 1,
            counters: Counters::default(),
        }
    }

    /// Limit of its bytes.
    pub fn limit_bytes(&self) -> usize {
        self.limit_bytes
    }

    /// Bytes of all items.
    pub fn bytes(&self) -> usize {
        self.small.bytes + self.main.bytes
    }

    /// Number of items.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.live == 0
    }

    fn hash(&self, key: &[u8]) -> u64 {
        let mut hasher = SipHasher13::new_with_key(&self.secret);
        hasher.write(key);
        hasher.finish()
    }

    /// The slot of a key whose item is there and has not expired.
    fn find(&mut self, key: &[u8], now_ms: u64) -> Option<u32> {
        let hash = self.hash(key);
        let slot = *self.table.find(hash, |&s| *self.slots.item(s).key == *key)?;
        let item = self.slots.item(slot);
        let has_expired = item.expires_ms != 0 && item.expires_ms <= now_ms;
        if item.epoch == self.epoch && !has_expired {
            return Some(slot);
        }
        self.counters.expired += u64::from(item.epoch == self.epoch);
        self.drop_slot(slot);
        None
    }

    /// The item of a key, which is a hit.
    pub fn get(&mut self, key: &[u8], now_ms: u64) -> Option<&Item> {
        let slot = self.find(key, now_ms)?;
        let item = self.slots.item_mut(slot);
        item.hits = (item.hits + 1).min(MOST_HITS);
        Some(item)
    }

    /// Puts an item there, or another in its place; says its number. A key that is known stays
    /// where it is in its queue.
    ///
    /// # Errors
    /// There is no room for it. Then the key has no item.
    pub fn set(
        &mut self,
        key: &[u8],
        value: Vec<u8>,
        flags: u32,
        expires_ms: u64,
        now_ms: u64,
    ) -> Result<u64, NoRoom> {
        let cas = self.next_cas;
        let mut item = Item {
            key: key.into(),
            value,
            flags,
            cas,
            expires_ms,
            hash: self.hash(key),
            epoch: self.epoch,
            hits: 0,
            is_main: false,
            links: Links::default(),
        };
        // A key that changes is in use.
        let before = self.find(key, now_ms);
        let old = before.and_then(|slot| self.drop_slot(slot));
        if let Some(old) = &old {
            item.hits = (old.hits + 1).min(MOST_HITS);
        }
        item.is_main = old.is_some_and(|o| o.is_main) || self.ghosts.forget(item.hash);
        let bytes = item.bytes();
        if bytes > self.limit_bytes {
            return Err(NoRoom);
        }
        while self.bytes() + bytes > self.limit_bytes {
            self.evict();
        }
        self.insert(item);
        self.next_cas += 1;
        self.counters.stored += 1;
        Ok(cas)
    }

    fn insert(&mut self, item: Item) {
        let (hash, bytes, is_main) = (item.hash, item.bytes(), item.is_main);
        let slot = self.slots.put(item);
        let slots = &self.slots;
        self.table.insert_unique(hash, slot, |&s| slots.item(s).hash);
        self.live += 1;
        let queue = if is_main { &mut self.main } else { &mut self.small };
        queue.push(&mut self.slots, slot, bytes);
    }

    /// Removes an item.
    pub fn remove(&mut self, key: &[u8], now_ms: u64) -> bool {
        let slot = self.find(key, now_ms);
        slot.and_then(|slot| self.drop_slot(slot)).is_some()
    }

    /// Another time to expire at, which is a hit.
    pub fn touch(&mut self, key: &[u8], expires_ms: u64, now_ms: u64) -> bool {
        let Some(slot) = self.find(key, now_ms) else { return false };
        let item = self.slots.item_mut(slot);
        item.expires_ms = expires_ms;
        item.hits = (item.hits + 1).min(MOST_HITS);
        true
    }

    /// Time at which an item expires; 0: never.
    pub fn expires_ms(&mut self, key: &[u8], now_ms: u64) -> u64 {
        self.find(key, now_ms).map_or(0, |slot| self.slots.item(slot).expires_ms)
    }

    /// No item is there any more. Their memory goes when it is needed: all at once could take
    /// longer than a module may.
    pub fn flush(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        self.live = 0;
    }

    fn drop_slot(&mut self, slot: u32) -> Option<Box<Item>> {
        let item = self.slots.item(slot);
        let (hash, bytes, is_main) = (item.hash, item.bytes(), item.is_main);
        self.live -= usize::from(item.epoch == self.epoch);
        if let Ok(found) = self.table.find_entry(hash, |&s| s == slot) {
            found.remove();
        }
        let queue = if is_main { &mut self.main } else { &mut self.small };
        queue.remove(&mut self.slots, slot, bytes);
        self.slots.take(slot)
    }

    /// Does one step towards room: an item goes, or moves on.
    fn evict(&mut self) {
        let is_small_full = self.small.bytes > self.limit_bytes / SMALL_SHARE;
        match (self.small.head(), self.main.head()) {
            (Some(slot), main) if is_small_full || main.is_none() => self.evict_small(slot),
            (_, Some(slot)) => self.evict_main(slot),
            _ => {}
        }
    }

    fn evict_small(&mut self, slot: u32) {
        let item = self.slots.item_mut(slot);
        let is_live = item.epoch == self.epoch;
        if is_live && item.hits > 1 {
            item.hits = 0;
            item.is_main = true;
            let bytes = item.bytes();
            self.small.remove(&mut self.slots, slot, bytes);
            self.main.push(&mut self.slots, slot, bytes);
        } else if let Some(item) = self.drop_slot(slot)
            && is_live
        {
            self.counters.evicted += 1;
            let most = self.table.len();
            self.ghosts.remember(item.hash, most);
        }
    }

    fn evict_main(&mut self, slot: u32) {
        let item = self.slots.item_mut(slot);
        let is_live = item.epoch == self.epoch;
        if is_live && item.hits > 0 {
            item.hits -= 1;
            let bytes = item.bytes();
            self.main.remove(&mut self.slots, slot, bytes);
            self.main.push(&mut self.slots, slot, bytes);
        } else if self.drop_slot(slot).is_some() && is_live {
            self.counters.evicted += 1;
        }
    }
}

#[cfg(test)]
mod tests;
