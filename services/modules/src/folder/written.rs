//! Log of the parts of files that are written: those that a copy which is being made has to take
//! again.
//!
//! A hypervisor logs dirty pages so while it moves a VM. The log is bounded: when it has too many
//! extents it tells blocks that are twice as long, which is more than was written and never less;
//! and when that does not help, it tells that all must be taken again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Extents of a log: a message of them, as text, stays below the longest there may be.
pub const MAX_EXTENTS: usize = 512;

/// Length of the smallest part that is told. Smaller writes are mostly appended next to each other.
const BLOCK_BYTES: u64 = 4096;

/// Blocks get no longer than this: a file that has one of them is told whole, or nearly.
const MAX_BLOCK_BYTES: u64 = 1 << 40;

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Extent {
    /// The file's inode.
    #[serde(rename = "i")]
    pub inode: u64,
    /// Byte at which it begins.
    #[serde(rename = "a")]
    pub at: u64,
    /// Length in bytes; it may reach beyond the file's end.
    #[serde(rename = "n")]
    pub len_bytes: u64,
}

/// Parts that were written since they were told last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Written {
    /// Extents.
    Extents(Vec<Extent>),
    /// The parts are not known: all must be taken again.
    All,
}

/// The log.
#[derive(Debug)]
pub(super) struct WrittenLog {
    /// Ends, by inode and beginning: in blocks, none touching another one of the same inode.
    extents: BTreeMap<(u64, u64), u64>,
    block_bytes: u64,
    all: bool,
}

impl WrittenLog {
    pub fn new() -> Self {
        Self { extents: BTreeMap::new(), block_bytes: BLOCK_BYTES, all: false }
    }

    /// A part of a file is written.
    pub fn mark(&mut self, inode: u64, at: u64, len_bytes: u64) {
        if self.all || len_bytes == 0 {
            return;
        }
        let first = at / self.block_bytes;
        let end = at.saturating_add(len_bytes).div_ceil(self.block_bytes);
        self.add(inode, first, end);
        while self.extents.len() > MAX_EXTENTS {
            if self.block_bytes >= MAX_BLOCK_BYTES {
                return self.mark_all();
            }
            self.coarsen();
        }
    }

    /// Nothing is known any more.
    pub fn mark_all(&mut self) {
        self.all = true;
        self.extents.clear();
    }

    /// Joins a run of blocks with those that it touches.
    fn add(&mut self, inode: u64, mut first: u64, mut end: u64) {
        let before = self.extents.range((inode, 0)..=(inode, first)).next_back();
        if let Some((&(_, before), &to)) = before
            && to >= first
        {
            (first, end) = (before, end.max(to));
        }
        while let Some((&key, &to)) = self.extents.range((inode, first)..=(inode, end)).next() {
            end = end.max(to);
            self.extents.remove(&key);
        }
        self.extents.insert((inode, first), end);
    }

    fn coarsen(&mut self) {
        self.block_bytes *= 2;
        for ((inode, first), end) in std::mem::take(&mut self.extents) {
            self.add(inode, first / 2, end.div_ceil(2));
        }
    }

    /// Takes what is in it.
    pub fn take(&mut self) -> Written {
        let log = std::mem::replace(self, Self::new());
        if log.all {
            return Written::All;
        }
        let extent = |((inode, first), end): ((u64, u64), u64)| Extent {
            inode,
            at: first.saturating_mul(log.block_bytes),
            len_bytes: (end - first).saturating_mul(log.block_bytes),
        };
        Written::Extents(log.extents.into_iter().map(extent).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn extents(log: &mut WrittenLog) -> Vec<(u64, u64, u64)> {
        match log.take() {
            Written::Extents(all) => all.iter().map(|e| (e.inode, e.at, e.len_bytes)).collect(),
            Written::All => panic!("all"),
        }
    }

    #[test]
    fn what_is_appended_is_one_extent() {
        let mut log = WrittenLog::new();
        (0..10_000).for_each(|n| log.mark(7, n * 100, 100));
        log.mark(8, 5, 0);
        assert_eq!(extents(&mut log), [(7, 0, 245 * 4096)]);
        assert_eq!(extents(&mut log), []);
    }

    #[test]
    fn too_many_extents_become_longer_ones_and_too_many_files_all() {
        let mut log = WrittenLog::new();
        (0..4096).for_each(|n| log.mark(7, n * 12_288, 1));
        let told = extents(&mut log);
        assert!(told.len() <= MAX_EXTENTS, "{}", told.len());
        let mut log = WrittenLog::new();
        (0..=MAX_EXTENTS as u64).for_each(|inode| log.mark(inode, 0, 1));
        assert_eq!(log.take(), Written::All);
        assert_eq!(extents(&mut log), []);
    }

    #[test]
    fn the_end_of_all_numbers_is_no_trouble() {
        let mut log = WrittenLog::new();
        log.mark(1, u64::MAX - 1, u64::MAX);
        (0..1000).for_each(|n| log.mark(1, n * 8192, 1));
        assert!(!extents(&mut log).is_empty());
    }

    proptest! {
        #[test]
        fn every_byte_that_was_written_is_told(
            writes in proptest::collection::vec((0u64..4, 0u64..1 << 24, 0u64..20_000), 1..900),
        ) {
            let mut log = WrittenLog::new();
            writes.iter().for_each(|(inode, at, len)| log.mark(*inode, *at, *len));
            let told = extents(&mut log);
            prop_assert!(told.len() <= MAX_EXTENTS);
            for (inode, at, len) in writes.into_iter().filter(|w| w.2 > 0) {
                let covers = |e: &&(u64, u64, u64)| {
                    e.0 == inode && e.1 <= at && at + len <= e.1 + e.2
                };
                prop_assert_eq!(told.iter().filter(covers).count(), 1);
            }
            for pair in told.windows(2) {
                prop_assert!(pair[0].0 < pair[1].0 || pair[0].1 + pair[0].2 < pair[1].1);
            }
        }
    }
}
