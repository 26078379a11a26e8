//! An index in memory: keys and the versions of their values.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, btree_map};
use alloc::vec::Vec;
use core::ops::Bound;

use crate::segment::Books;

/// Values up to so many bytes stay in memory.
pub const INLINE_BYTES: usize = 64;

/// What a key costs beside its bytes, about.
pub const ENTRY_BYTES: u64 = 72;
/// What one more version costs.
const VERSION_BYTES: u64 = 32;

/// Where a value is in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loc {
    /// Which segment.
    pub segment: u32,
    /// Where in it.
    pub offset: u32,
    /// How long.
    pub len: u32,
}

/// A value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Slot {
    /// There is none.
    Deleted,
    /// A small one.
    Inline(Box<[u8]>),
    /// In the log.
    At(Loc),
    /// Among the ops that a transaction has written, by the byte of all of them.
    Own {
        /// Where.
        at: u64,
        /// How long.
        len: u32,
    },
}

impl Slot {
    /// Bytes of the value.
    pub fn len(&self) -> usize {
        match self {
            Self::Deleted => 0,
            Self::Inline(bytes) => bytes.len(),
            Self::At(Loc { len, .. }) | Self::Own { len, .. } => *len as usize,
        }
    }

    /// Whether there is a value.
    pub fn is_there(&self) -> bool {
        !matches!(self, Self::Deleted)
    }
}

/// What a commit made of a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// The commit.
    pub commit: u64,
    /// The value.
    pub slot: Slot,
}

/// All versions of a key that somebody may want, oldest first.
#[derive(Debug, Clone)]
pub enum Chain {
    /// The usual case.
    One(Version),
    /// At least two.
    Many(Vec<Version>),
}

impl Chain {
    fn versions(&self) -> &[Version] {
        match self {
            Self::One(version) => core::slice::from_ref(version),
            Self::Many(versions) => versions,
        }
    }

    /// For compaction: a value that moves.
    pub fn versions_mut(&mut self) -> &mut [Version] {
        match self {
            Self::One(version) => core::slice::from_mut(version),
            Self::Many(versions) => versions,
        }
    }

    /// The newest of all.
    pub fn head(&self) -> Option<&Version> {
        self.versions().last()
    }

    /// The newest that a snapshot shows.
    pub fn version_at(&self, snapshot: u64) -> Option<&Version> {
        let versions = self.versions();
        match versions.last() {
            Some(last) if last.commit <= snapshot => Some(last),
            _ => versions.get(..versions.partition_point(|v| v.commit <= snapshot))?.last(),
        }
    }

    /// The value that a snapshot shows.
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

    /// Forgets what nobody may want: all but the newest that `oldest` shows, and newer ones. True: nothing
    /// is left of the key.
    fn prune(&mut self, oldest: u64, books: &mut Books) -> bool {
        if let Self::Many(versions) = self {
            let shown = versions.partition_point(|v| v.commit <= oldest);
            let keep = shown.saturating_sub(1);
            for version in versions.drain(..keep) {
                books.forget(&version.slot);
                books.memory = books.memory.saturating_sub(VERSION_BYTES);
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

/// One index.
#[derive(Debug, Default)]
pub struct Index {
    /// Its keys.
    pub map: BTreeMap<Box<[u8]>, Chain>,
    /// Keys with a value.
    pub entries: u64,
    /// Bytes of these keys.
    pub key_bytes: u64,
    /// Bytes of their values.
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

    /// Puts a version in. True: something is left to be pruned later.
    pub fn install(
        &mut self,
        key: Box<[u8]>,
        version: Version,
        oldest: u64,
        books: &mut Books,
    ) -> bool {
        let there = |slot: &Slot| slot.is_there().then(|| slot.len());
        let (key_len, new) = (key.len(), there(&version.slot));
        books.keep(&version.slot);
        let (old, left) = match self.map.entry(key) {
            btree_map::Entry::Vacant(_) if new.is_none() => return false,
            btree_map::Entry::Vacant(vacant) => {
                books.memory += ENTRY_BYTES + key_len as u64;
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
                        books.forget(&only.slot);
                        *only = version;
                    }
                    _ => {
                        books.memory += VERSION_BYTES;
                        chain.push(version);
                    }
                }
                let gone = chain.prune(oldest, books);
                let left = !gone && !chain.is_settled();
                if gone {
                    occupied.remove();
                    books.memory = books.memory.saturating_sub(ENTRY_BYTES + key_len as u64);
                }
                (old, left)
            }
        };
        self.count(key_len, old, new);
        left
    }

    /// Prunes a key. True: something is left to be pruned later.
    pub fn prune(&mut self, key: &[u8], oldest: u64, books: &mut Books) -> bool {
        let Some(chain) = self.map.get_mut(key) else { return false };
        if chain.prune(oldest, books) {
            self.map.remove(key);
            books.memory = books.memory.saturating_sub(ENTRY_BYTES + key.len() as u64);
            return false;
        }
        !chain.is_settled()
    }

    /// Removes up to so many keys; for an index that is not in use any more. How many there were.
    pub fn wither(&mut self, most: u64, books: &mut Books) -> u64 {
        let mut done = 0;
        while done < most
            && let Some((key, chain)) = self.map.pop_first()
        {
            books.memory = books.memory.saturating_sub(ENTRY_BYTES + key.len() as u64);
            for version in chain.versions() {
                books.forget(&version.slot);
            }
            let more = chain.versions().len().saturating_sub(1) as u64;
            books.memory = books.memory.saturating_sub(more * VERSION_BYTES);
            done += 1;
        }
        done
    }
}

/// A transaction's own write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Write {
    /// The value.
    pub slot: Slot,
    /// Whether its key is locked.
    pub locked: bool,
}

/// A transaction's own writes in one index.
pub type Writes = BTreeMap<Box<[u8]>, Write>;

/// Keys between two bounds, as a transaction sees them: what is committed, and its own writes over it.
pub struct Merge<'a> {
    base: Option<btree_map::Range<'a, Box<[u8]>, Chain>>,
    own: Option<btree_map::Range<'a, Box<[u8]>, Write>>,
    base_next: Option<(&'a [u8], &'a Chain)>,
    own_next: Option<(&'a [u8], &'a Write)>,
    backward: bool,
    snapshot: u64,
    /// Keys that were looked at.
    pub steps: u64,
}

/// Borrowed bounds.
pub type Bounds<'b> = (Bound<&'b [u8]>, Bound<&'b [u8]>);

impl<'a> Merge<'a> {
    /// Begins. `range` must not be one that the maps panic on.
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

    /// The next key, with the value that is seen, if one is.
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
