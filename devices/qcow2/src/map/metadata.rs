//! Clusters of the file that hold metadata: no data of the guest is ever written there.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::ops::Range;

use crate::error::contradiction;

/// Clusters of metadata. Tables that were there at opening are a sorted list, 8 bytes each; those
/// that came since are few.
#[derive(Debug, Default)]
pub struct Metadata {
    /// Begin to end, of what has many clusters in a row. They do not overlap.
    ranges: BTreeMap<u64, u64>,
    sorted: Vec<u64>,
    added: HashSet<u64>,
    removed: HashSet<u64>,
}

impl Metadata {
    /// Adds clusters in a row; false when one of them is there already.
    pub fn add_range(&mut self, clusters: Range<u64>) -> bool {
        if clusters.is_empty() {
            return true;
        }
        let before = self.ranges.range(..clusters.end).next_back();
        let is_new = before.is_none_or(|(_, &end)| end <= clusters.start);
        if is_new {
            self.ranges.insert(clusters.start, clusters.end);
        }
        is_new
    }

    /// Forgets clusters that were added as one range.
    pub fn remove_range(&mut self, clusters: &Range<u64>) {
        if self.ranges.get(&clusters.start) == Some(&clusters.end) {
            self.ranges.remove(&clusters.start);
        }
    }

    /// Adds the tables that were found at opening. Returns those that were there more than once, or
    /// that lie in a range.
    pub fn add_tables(&mut self, mut tables: Vec<u64>) -> Vec<u64> {
        tables.append(&mut self.sorted);
        tables.sort_unstable();
        let mut twice: Vec<u64> =
            tables.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
        tables.dedup();
        twice.extend(tables.iter().filter(|&&table| self.in_range(table)));
        self.sorted = tables;
        twice
    }

    /// Adds a new table.
    pub fn add(&mut self, cluster: u64) {
        self.removed.remove(&cluster);
        self.added.insert(cluster);
    }

    /// Forgets a table, if the cluster held one.
    pub fn remove(&mut self, cluster: u64) {
        if !self.added.remove(&cluster) && self.sorted.binary_search(&cluster).is_ok() {
            self.removed.insert(cluster);
        }
    }

    /// Whether a cluster holds metadata.
    pub fn contains(&self, cluster: u64) -> bool {
        let is_old =
            self.sorted.binary_search(&cluster).is_ok() && !self.removed.contains(&cluster);
        is_old || self.added.contains(&cluster) || self.in_range(cluster)
    }

    /// The first of some clusters that holds metadata.
    pub fn first_of(&self, mut clusters: Range<u64>) -> Option<u64> {
        clusters.find(|&cluster| self.contains(cluster))
    }

    /// A contradiction where one of the clusters, which no block counts, holds metadata.
    pub fn check_uncounted(&self, clusters: Range<u64>) -> io::Result<()> {
        match self.first_of(clusters) {
            Some(taken) => {
                let text = format!("cluster {taken} holds metadata and has no refcount");
                Err(contradiction(text))
            }
            None => Ok(()),
        }
    }

    fn in_range(&self, cluster: u64) -> bool {
        let before = self.ranges.range(..=cluster).next_back();
        before.is_some_and(|(_, &end)| cluster < end)
    }

    /// Bytes of memory that this takes, about.
    pub fn memory_len(&self) -> u64 {
        let few = self.added.len() + self.removed.len() + self.ranges.len();
        (self.sorted.capacity() * 8 + few * 24) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_that_never_held_metadata_leave_nothing_behind() {
        let mut all = Metadata::default();
        all.add_tables(vec![5, 7]);
        let before = all.memory_len();
        (100..10_100).for_each(|cluster| all.remove(cluster));
        assert_eq!(all.memory_len(), before);
        all.remove(5);
        assert!(!all.contains(5) && all.contains(7));
    }

    #[test]
    fn ranges_do_not_overlap_and_tables_come_once() {
        let mut all = Metadata::default();
        assert!(all.add_range(0..1));
        assert!(all.add_range(5..9));
        assert!(!all.add_range(8..10));
        assert!(!all.add_range(4..6));
        assert!(!all.add_range(3..20));
        assert!(all.add_range(9..10));
        assert_eq!(all.add_tables(vec![12, 11, 12, 7]), [12, 7]);
        assert_eq!(all.add_tables(vec![30, 11]), [11, 7]);
        for (cluster, is) in [(0, true), (1, false), (5, true), (9, true), (10, false), (11, true)]
        {
            assert_eq!(all.contains(cluster), is, "{cluster}");
        }
        all.add(40);
        all.remove(11);
        all.remove(40);
        assert!(!all.contains(11) && !all.contains(40));
        all.add(11);
        assert!(all.contains(11));
        all.remove_range(&(5..9));
        assert!(!all.contains(5));
    }
}
