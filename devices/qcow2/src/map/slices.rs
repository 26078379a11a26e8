//! Slices: the pieces of L2 tables that are in memory.
//!
//! A slice is read by any thread without a lock, and each of its entries is changed by whoever has
//! claimed that cluster. There is one at a time of each piece: who evicts one marks it as retired
//! first, and who is about to change an entry pins the slice first, so that neither misses the
//! other.

use std::collections::{HashMap, VecDeque};
use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use base::sync::lock;

use crate::format::entry;
use crate::format::geometry::Geometry;

/// A piece of an L2 table. What each look needs is in its first cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Slice {
    /// Number of the slice, counted over all tables.
    pub number: u64,
    /// A word for each cluster, or two: entry and bitmap.
    entries: Box<[AtomicU64]>,
    /// Whether the table is this image's own: its refcount is one.
    pub is_own: bool,
    /// Whether its data is known to be counted as used, see [`super::image::Image::check_counts`].
    is_counted: AtomicBool,
    is_extended: bool,
    is_retired: AtomicBool,
    /// Whether it was used since the last eviction passed by.
    is_used: AtomicBool,
    pins: AtomicU32,
    /// Offset of the slice in the file.
    pub offset: u64,
    /// Changes of extended entries, begun and done.
    changes: AtomicU64,
    changed: AtomicU64,
}

/// Slices in use that an eviction passes by: some microseconds.
const MAX_SPARED: usize = 256;

/// Set of slice numbers, a bit for each, in words of 64.
#[derive(Debug, Default)]
pub struct Numbers(HashMap<u64, u64>);

impl Numbers {
    /// Adds a number.
    pub fn add(&mut self, number: u64) {
        *self.0.entry(number / 64).or_default() |= 1 << (number % 64);
    }

    /// Whether a number was added.
    pub fn contains(&self, number: u64) -> bool {
        self.0.get(&(number / 64)).is_some_and(|bits| bits >> (number % 64) & 1 != 0)
    }

    /// Bytes of memory that this takes, about.
    pub fn memory_len(&self) -> u64 {
        self.0.capacity() as u64 * 17
    }
}

/// An entry and, in extended tables, its bitmap.
pub type Pair = (u64, u64);

impl Slice {
    /// A slice from the bytes of the table.
    pub fn new(
        number: u64,
        offset: u64,
        is_own: bool,
        bytes: &[u8],
        geometry: &Geometry,
        check: impl Fn(usize, u64) -> u64,
    ) -> Self {
        let is_extended = geometry.extended_l2;
        let words = bytes.chunks_exact(8).enumerate().map(|(n, word)| {
            let raw = word.iter().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
            let is_bitmap = is_extended && n % 2 == 1;
            AtomicU64::new(if is_bitmap {
                raw
            } else {
                check(n >> u32::from(is_extended), entry::clean(raw, geometry))
            })
        });
        Self {
            number,
            offset,
            is_own,
            is_counted: AtomicBool::new(false),
            entries: words.collect(),
            is_extended,
            changes: AtomicU64::new(0),
            changed: AtomicU64::new(0),
            is_retired: AtomicBool::new(false),
            pins: AtomicU32::new(0),
            is_used: AtomicBool::new(true),
        }
    }

    /// The entry at `index`, and its bitmap.
    #[inline]
    pub fn get(&self, index: usize) -> Pair {
        if !self.is_extended {
            return (self.entries[index].load(Ordering::Acquire), 0);
        }
        let (entry, bitmap) = (&self.entries[index * 2], &self.entries[index * 2 + 1]);
        loop {
            let changed = self.changed.load(Ordering::Acquire);
            let pair = (entry.load(Ordering::Acquire), bitmap.load(Ordering::Acquire));
            if self.changes.load(Ordering::Acquire) == changed {
                return pair;
            }
            std::hint::spin_loop();
        }
    }

    /// Address of the entry at `index`, to be prefetched.
    #[inline]
    pub fn address(&self, index: usize) -> Option<*const u8> {
        let at = self.entries.get(index << u32::from(self.is_extended))?;
        Some(std::ptr::from_ref(at).cast())
    }

    /// Sets an entry whose cluster the caller has claimed, in a slice that it has pinned.
    pub fn set(&self, index: usize, (entry, bitmap): Pair) {
        if !self.is_extended {
            self.entries[index].store(entry, Ordering::Release);
            return;
        }
        // Readers look again meanwhile: an entry with another one's bitmap is neither.
        self.changes.fetch_add(1, Ordering::AcqRel);
        self.entries[index * 2].store(entry, Ordering::Release);
        self.entries[index * 2 + 1].store(bitmap, Ordering::Release);
        self.changed.fetch_add(1, Ordering::Release);
    }

    /// Whether data may be written where the entries have it, as far as the table goes.
    #[inline]
    pub fn is_ours(&self) -> bool {
        self.is_own && self.is_counted()
    }

    /// Whether entries can be trusted for writing data where it is.
    #[inline]
    pub fn is_counted(&self) -> bool {
        self.is_counted.load(Ordering::Acquire)
    }

    pub(crate) fn set_counted(&self) {
        self.is_counted.store(true, Ordering::Release);
    }

    /// The file may have other entries than these: writing others there failed. The caller has
    /// claimed their clusters. A compressed cluster is never changed in place, so its entry is
    /// always written.
    pub fn mark_unsure(&self, indices: Range<usize>) {
        for index in indices {
            let (entry, bitmap) = self.get(index);
            if entry & entry::COMPRESSED == 0 {
                self.set(index, (entry | entry::UNSURE, bitmap));
            }
        }
    }

    /// Keeps the slice from being evicted; false when it was evicted already.
    #[inline]
    fn pin(&self) -> bool {
        self.pins.fetch_add(1, Ordering::SeqCst);
        let is_there = !self.is_retired.load(Ordering::SeqCst);
        if !is_there {
            self.unpin();
        }
        is_there
    }

    /// Ends a [`Slice::pin`].
    #[inline]
    fn unpin(&self) {
        self.pins.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether it was evicted, so that another one may stand for it.
    #[inline]
    pub fn is_retired(&self) -> bool {
        self.is_retired.load(Ordering::Acquire)
    }

    /// Marks it as looked at.
    #[inline]
    pub fn touch(&self) {
        if !self.is_used.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Relaxed);
        }
    }

    /// Retires it, unless it is pinned.
    fn retire(&self) -> bool {
        self.is_retired.store(true, Ordering::SeqCst);
        let is_free = self.pins.load(Ordering::SeqCst) == 0;
        if !is_free {
            self.is_retired.store(false, Ordering::SeqCst);
        }
        is_free
    }
}

/// A slice that is not evicted before this is dropped.
#[derive(Debug)]
pub struct Pinned(Arc<Slice>);

impl Pinned {
    /// Pins a slice; `None` where it was evicted already.
    pub fn new(slice: Arc<Slice>) -> Option<Self> {
        slice.pin().then(|| Self(slice))
    }
}

impl Deref for Pinned {
    type Target = Slice;

    fn deref(&self) -> &Slice {
        &self.0
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.0.unpin();
    }
}

/// The slices of an image that are in memory.
#[derive(Debug)]
pub struct Slices {
    state: Mutex<State>,
    capacity: usize,
}

#[derive(Debug, Default)]
struct State {
    all: HashMap<u64, Arc<Slice>>,
    /// All of them, in the order in which the evictor looks at them.
    order: VecDeque<u64>,
}

impl Slices {
    /// Room for `capacity` slices.
    pub fn new(capacity: usize) -> Self {
        Self { state: Mutex::default(), capacity: capacity.max(1) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// The slice, if it is in memory. No I/O.
    pub fn get(&self, number: u64) -> Option<Arc<Slice>> {
        let slice = self.lock().all.get(&number).cloned();
        slice.inspect(|slice| slice.touch())
    }

    /// Adds a slice that was read, unless it is there by now: returns the one that is. Makes room
    /// first, unless all others are pinned.
    pub fn add(&self, slice: Slice) -> Arc<Slice> {
        let mut state = self.lock();
        if let Some(there) = state.all.get(&slice.number) {
            return Arc::clone(there);
        }
        while state.all.len() >= self.capacity && state.evict_one() {}
        let slice = Arc::new(slice);
        state.order.push_back(slice.number);
        state.all.insert(slice.number, Arc::clone(&slice));
        slice
    }

    /// Drops the slices `numbers`, none of which is pinned: their table has moved.
    pub fn drop_all(&self, numbers: std::ops::Range<u64>) {
        let mut state = self.lock();
        for number in numbers {
            if let Some(slice) = state.all.remove(&number) {
                slice.is_retired.store(true, Ordering::SeqCst);
            }
        }
        // Their places in the order go when the evictor comes by; all of them now and then.
        let State { all, order } = &mut *state;
        if order.len() > 2 * all.len() + MAX_SPARED {
            order.retain(|number| all.contains_key(number));
        }
    }

    /// Slices in memory.
    pub fn count(&self) -> usize {
        self.lock().all.len()
    }
}

impl State {
    /// The clock: whoever was used since gets another round, but for the first after [`MAX_SPARED`]
    /// of them: a queue may wait for the lock. False when all are pinned.
    fn evict_one(&mut self) -> bool {
        for n in 0..self.order.len() * 2 {
            let Some(number) = self.order.pop_front() else { return false };
            let Some(slice) = self.all.get(&number) else { continue };
            let is_spared = slice.is_used.swap(false, Ordering::Relaxed) && n < MAX_SPARED;
            if !is_spared && slice.retire() {
                self.all.remove(&number);
                return true;
            }
            self.order.push_back(number);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::geometry::Compression;

    const GEOMETRY: Geometry = Geometry {
        version: 3,
        cluster_bits: 16,
        refcount_order: 4,
        extended_l2: false,
        data_file: false,
        compression: Compression::Zlib,
    };

    fn slice(number: u64) -> Slice {
        Slice::new(number, 0, true, &[0; 64], &GEOMETRY, |_, entry| entry)
    }

    /// A reader of an extended entry never sees one entry's cluster with another one's bitmap: it
    /// would take data for zeroes, or for what the backing file has.
    #[test]
    fn an_extended_entry_is_seen_whole() {
        let geometry = Geometry { extended_l2: true, data_file: true, ..GEOMETRY };
        let states: [Pair; 4] = [
            (0x10000 | entry::COPIED, 0x0000_00ff),
            (0, 0xffff_ffff << 32),
            (entry::COPIED, 0xff00_0000),
            (entry::COMPRESSED | 0x20000, 0),
        ];
        let slice = Slice::new(0, 0, true, &[0; 64], &geometry, |_, entry| entry);
        slice.set(1, states[0]);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                (0..20_000_000).map(|_| slice.get(1)).find(|pair| !states.contains(pair))
            });
            // A bitmap that changes alone is one store.
            let mut turns = [0, 1, 2, 3, 0, 2, 1, 3, 2, 0, 3, 1].into_iter().cycle();
            while !reader.is_finished() {
                turns.next().into_iter().for_each(|n| slice.set(1, states[n]));
            }
            assert_eq!(reader.join().unwrap(), None);
        });
    }

    #[test]
    fn the_least_used_goes_and_who_is_pinned_stays() {
        let slices = Slices::new(2);
        let first = slices.add(slice(1));
        let pinned = Pinned::new(Arc::clone(&first)).unwrap();
        slices.add(slice(2));
        slices.add(slice(3));
        assert!(slices.get(1).is_some() && slices.get(2).is_none() && slices.get(3).is_some());
        drop(pinned);
        slices.add(slice(4));
        slices.add(slice(5));
        assert!(slices.get(1).is_none());
        assert!(first.is_retired() && Pinned::new(first.clone()).is_none());
        let again = slices.add(slice(1));
        assert!(!Arc::ptr_eq(&first, &again));
        assert!(Arc::ptr_eq(&again, &slices.add(slice(1))));
        slices.drop_all(0..10);
        assert!(again.is_retired());
        assert_eq!(slices.count(), 0);
    }
}
