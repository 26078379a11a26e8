//! Index of a table in memory: keys and the versions of their values.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, btree_map};
use alloc::vec::Vec;
use core::ops::Bound;

use crate::segment::Usage;
use crate::slot::Slot;

/// An index: number of the table, number of the index in it.
pub type IndexId = (u32, u8);

/// Memory that a key costs beside its bytes, about.
pub const ENTRY_BYTES: u64 = 72;
/// Memory that one more version costs.
const VERSION_BYTES: u64 = 32;

/// Value that a commit gave a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Number of the commit.
    pub commit: u64,
    /// Value that the commit gave.
    pub slot: Slot,
}

/// Versions of a key that a reader may still want, oldest first.
#[derive(Debug, Clone)]
pub enum Chain {
    /// One version: the usual case.
    One(Version),
    /// Two versions or more.
    Many(Vec<Version>),
}

impl Chain {
    fn versions(&self) -> &[Version] {
        match self {
            Self::One(version) => core::slice::from_ref(version),
            Self::Many(versions) => versions,
        }
    }

    /// Versions of the key, for compaction, which moves values.
    pub fn versions_mut(&mut self) -> &mut [Version] {
        match self {
            Self::One(version) => core::slice::from_mut(version),
            Self::Many(versions) => versions,
        }
    }

    /// Newest version.
    pub fn head(&self) -> Option<&Version> {
        self.versions().last()
    }

    /// Newest version that a snapshot shows.
    pub fn version_at(&self, snapshot: u64) -> Option<&Version> {
        let versions = self.versions();
        match versions.last() {
            Some(last) if last.commit <= snapshot => Some(last),
            _ => versions.get(..versions.partition_point(|v| v.commit <= snapshot))?.last(),
        }
    }

    /// Value that a snapshot shows.
    pub fn at(&self, snapshot: u64) -> Option<&Slot> {
        self.version_at(snapshot).map(|v| &v.slot).filter(|s| s.is_there())
    }

    fn push(&mut self, version: Version) {
        if let Self::One(old) = self {
            let empty = Version { commit: 0, slot: Slot::Deleted };
            *self = Self::Many(alloc::vec![core::mem::replace(old, empty)]);
        }
        if let Self::Many(versions) = self {
            versions.push(version);
        }
    }

    /// Forgets versions that no reader may want: all but the newest that `oldest` shows, and newer
    /// ones. True: nothing is left of the key.
    fn prune(&mut self, oldest: u64, usage: &mut Usage) -> bool {
        if let Self::Many(versions) = self {
            let shown = versions.partition_point(|v| v.commit <= oldest);
            let keep = shown.saturating_sub(1);
            for version in versions.drain(..keep) {
                usage.forget(&version.slot);
                usage.memory = usage.memory.saturating_sub(VERSION_BYTES);
            }
            if versions.len() == 1
                && let Some(last) = versions.pop()
            {
                *self = Self::One(last);
            }
        }
        matches!(self, Self::One(v) if v.commit <= oldest && !v.slot.is_there())
    }

    fn is_settled(&self) -> bool {
        matches!(self, Self::One(v) if v.slot.is_there())
    }
}

/// Index of a table.
#[derive(Debug, Default)]
pub struct Index {
    /// Versions by key.
    pub map: BTreeMap<Box<[u8]>, Chain>,
    /// Number of keys with a value.
    pub entries: u64,
    /// Bytes of the keys that have a value.
    pub key_bytes: u64,
    /// Bytes of the values.
    pub value_bytes: u64,
}

impl Index {
    fn count(&mut self, key: usize, old: Option<usize>, new: Option<usize>) {
        if let Some(value) = old {
            self.entries = self.entries.saturating_sub(1);
            self.key_bytes = self.key_bytes.saturating_sub(key as u64);
            self.value_bytes = self.value_bytes.saturating_sub(value as u64);
        }
        if let Some(value) = new {
            self.entries += 1;
            self.key_bytes += key as u64;
            self.value_bytes += value as u64;
        }
    }

    /// Puts a version in. True: old versions are left to be pruned later.
    pub fn install(
        &mut self,
        key: Box<[u8]>,
        version: Version,
        oldest: u64,
        usage: &mut Usage,
    ) -> bool {
        let there = |slot: &Slot| slot.is_there().then(|| slot.len());
        let (key_len, new) = (key.len(), there(&version.slot));
        usage.keep(&version.slot);
        let (old, has_garbage) = match self.map.entry(key) {
            btree_map::Entry::Vacant(_) if new.is_none() => return false,
            btree_map::Entry::Vacant(vacant) => {
                usage.memory += ENTRY_BYTES + key_len as u64;
                vacant.insert(Chain::One(version));
                (None, false)
            }
            btree_map::Entry::Occupied(mut occupied) => {
                let chain = occupied.get_mut();
                let old = chain.head().and_then(|v| there(&v.slot));
                match chain {
                    // What most updates find: nobody wants the old one.
                    Chain::One(only)
                        if version.commit <= oldest || only.commit == version.commit =>
                    {
                        usage.forget(&only.slot);
                        *only = version;
                    }
                    _ => {
                        usage.memory += VERSION_BYTES;
                        chain.push(version);
                    }
                }
                let gone = chain.prune(oldest, usage);
                let has_garbage = !gone && !chain.is_settled();
                if gone {
                    occupied.remove();
                    usage.memory = usage.memory.saturating_sub(ENTRY_BYTES + key_len as u64);
                }
                (old, has_garbage)
            }
        };
        self.count(key_len, old, new);
        has_garbage
    }

    /// Prunes a key. True: old versions are left to be pruned later.
    pub fn prune(&mut self, key: &[u8], oldest: u64, usage: &mut Usage) -> bool {
        let Some(chain) = self.map.get_mut(key) else { return false };
        if chain.prune(oldest, usage) {
            self.map.remove(key);
            usage.memory = usage.memory.saturating_sub(ENTRY_BYTES + key.len() as u64);
            return false;
        }
        !chain.is_settled()
    }

    /// Removes up to `most` keys of an index that is not in use any more, and returns their number.
    pub fn remove_some(&mut self, most: u64, usage: &mut Usage) -> u64 {
        let mut done = 0;
        while done < most
            && let Some((key, chain)) = self.map.pop_first()
        {
            usage.memory = usage.memory.saturating_sub(ENTRY_BYTES + key.len() as u64);
            for version in chain.versions() {
                usage.forget(&version.slot);
            }
            let more = chain.versions().len().saturating_sub(1) as u64;
            usage.memory = usage.memory.saturating_sub(more * VERSION_BYTES);
            done += 1;
        }
        done
    }
}

/// Write of a transaction that is not committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// Value that it gives the key.
    pub slot: Slot,
    /// Whether its key is locked.
    pub locked: bool,
}

/// Writes of a transaction in one index, by key.
pub type Writes = BTreeMap<Box<[u8]>, Write>;

/// Walk over the keys between two bounds, as a transaction sees them: committed values, and its own
/// writes over them.
pub struct Merge<'a> {
    base: Option<btree_map::Range<'a, Box<[u8]>, Chain>>,
    own: Option<btree_map::Range<'a, Box<[u8]>, Write>>,
    base_next: Option<(&'a [u8], &'a Chain)>,
    own_next: Option<(&'a [u8], &'a Write)>,
    backward: bool,
    snapshot: u64,
    /// Number of committed keys that were looked at.
    pub steps: u64,
}

/// Bounds of a walk.
pub type Bounds<'b> = (Bound<&'b [u8]>, Bound<&'b [u8]>);

impl<'a> Merge<'a> {
    /// Begins a walk. `range` must not be one that the maps panic on.
    pub fn new(
        index: &'a Index,
        own: Option<&'a Writes>,
        range: Bounds<'_>,
        backward: bool,
        snapshot: u64,
    ) -> Self {
        let base = Some(index.map.range::<[u8], _>(range));
        let own = own.map(|own| own.range::<[u8], _>(range));
        let mut merge =
            Self { base, own, base_next: None, own_next: None, backward, snapshot, steps: 0 };
        merge.step_base();
        merge.step_own();
        merge
    }

    fn step_base(&mut self) {
        self.steps += 1;
        let backward = self.backward;
        let next = self.base.as_mut().and_then(|r| if backward { r.next_back() } else { r.next() });
        self.base_next = next.map(|(k, c)| (&**k, c));
    }

    fn step_own(&mut self) {
        let backward = self.backward;
        let next = self.own.as_mut().and_then(|r| if backward { r.next_back() } else { r.next() });
        self.own_next = next.map(|(k, w)| (&**k, w));
    }

    /// Next key, with the value that the transaction sees, if there is one.
    pub fn step(&mut self) -> Option<(&'a [u8], Option<&'a Slot>)> {
        let own_first = match (self.base_next, self.own_next) {
            (None, None) => return None,
            (Some(_), None) => false,
            (None, Some(_)) => true,
            (Some((base, _)), Some((own, _))) if base == own => {
                self.step_base();
                true
            }
            (Some((base, _)), Some((own, _))) => (own < base) != self.backward,
        };
        if own_first {
            let (key, write) = self.own_next?;
            self.step_own();
            Some((key, Some(&write.slot).filter(|s| s.is_there())))
        } else {
            let (key, chain) = self.base_next?;
            self.step_base();
            Some((key, chain.at(self.snapshot)))
        }
    }
}
