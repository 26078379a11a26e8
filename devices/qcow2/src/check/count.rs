//! Counting references: every table is read once for each that refers to it.

use std::collections::HashMap;

use crate::error::Error;
use crate::format::bitmap;
use crate::format::entry::{self, COMPRESSED, Kind};
use crate::format::geometry::Geometry;
use crate::format::header::Header;
use crate::limits::{MAX_CHECK_CLUSTERS, MAX_CHECK_SHARED_CLUSTERS};
use crate::map::slices::Pair;
use crate::map::tables::{Tables, read_words};
use crate::store::Store;

/// Count of references to each cluster of the file.
pub struct Counts {
    /// Counts up to 254; [`MANY`] for larger ones.
    small: Vec<u8>,
    /// Larger counts.
    large: HashMap<u64, u64>,
    /// Contradictions that cannot be mended: the first, and their number.
    damage: Option<(String, u64)>,
    /// Clusters that can be referred to.
    file_clusters: u64,
    reader: TableReader,
}

/// Mark in `small` of a count that is in `large`.
const MANY: u8 = 255;

/// Contradictions after which nothing more is counted.
const MAX_DAMAGE: u64 = 1000;

/// Tables are read up to so many bytes even where the file system says that they are holes: it had
/// better be wrong for hostile images only. It is 8 TiB of disk in clusters of 64 KiB.
const MAX_DISTRUSTED_LEN_BYTES: u64 = 1 << 30;

/// Reads tables, bounded where an image has terabytes of them that are holes.
#[derive(Debug, Default)]
pub(super) struct TableReader {
    read_len_bytes: u64,
}

impl TableReader {
    /// The words of a table; none where it is a hole, whose entries are all zero.
    pub fn read(
        &mut self,
        store: &dyn Store,
        offset: u64,
        count: u64,
        what: &'static str,
    ) -> Result<Vec<u64>, Error> {
        self.read_len_bytes += count * 8;
        let is_read = self.read_len_bytes < MAX_DISTRUSTED_LEN_BYTES;
        if is_read || store.may_have_data(offset, count * 8) {
            return read_words(store, offset, count, what);
        }
        Ok(Vec::new())
    }
}

impl Counts {
    /// Counts all references of an image.
    pub(crate) fn of(
        store: &dyn Store,
        header: &Header,
        tables: &Tables,
        progress: &mut dyn FnMut(f64),
    ) -> Result<Self, Error> {
        let file_clusters = tables.file_clusters(header);
        if file_clusters > MAX_CHECK_CLUSTERS {
            let rule =
                format!("at most {MAX_CHECK_CLUSTERS} to be checked (qemu-img check -r all)");
            return Err(Error::header("clusters of the file", file_clusters, rule));
        }
        let mut this = Self {
            small: vec![0; file_clusters as usize],
            large: HashMap::new(),
            damage: None,
            file_clusters,
            reader: TableReader::default(),
        };
        this.fixed(store, header, tables)?;
        let all = std::iter::once(&tables.l1).chain(&tables.snapshot_l1s).flatten();
        let mut all: Vec<u64> = all.map(|&l1| entry::offset(l1)).filter(|&at| at != 0).collect();
        all.sort_unstable();
        let (total, mut done) = (all.len(), 0);
        for same in all.chunk_by(|a, b| a == b) {
            if this.has_enough() {
                break;
            }
            this.table(store, &header.geometry, same[0], same.len() as u64)?;
            done += same.len();
            progress(done as f64 / total as f64);
        }
        match this.damage.take() {
            None => Ok(this),
            Some((what, count)) => Err(Error::Damaged { what, count }),
        }
    }

    /// References to a cluster.
    pub fn get(&self, cluster: u64) -> u64 {
        match self.small.get(cluster as usize) {
            None => 0,
            Some(&MANY) => self.large.get(&cluster).copied().unwrap_or(0),
            Some(&count) => count.into(),
        }
    }

    /// The first cluster that is referred to more than `max` times, and how often.
    pub fn above(&self, max: u64) -> Option<(u64, u64)> {
        let candidates = (0u64..).zip(&self.small);
        let candidates = candidates.filter(|&(_, &n)| n == MANY || u64::from(n) > max);
        candidates.map(|(cluster, _)| (cluster, self.get(cluster))).find(|&(_, n)| n > max)
    }

    /// Clusters that were counted.
    pub fn clusters(&self) -> u64 {
        self.small.len() as u64
    }

    /// Adds references to a cluster; clusters behind the end are added.
    pub fn add(&mut self, cluster: u64, times: u64) {
        if cluster >= self.clusters() {
            self.small.resize(cluster as usize + 1, 0);
        }
        let count = self.get(cluster) + times;
        let small = &mut self.small[cluster as usize];
        *small = u8::try_from(count).unwrap_or(MANY);
        if *small != MANY {
            return;
        }
        self.large.insert(cluster, count);
        if self.large.len() > MAX_CHECK_SHARED_CLUSTERS {
            let what = format!(
                "more than {MAX_CHECK_SHARED_CLUSTERS} clusters have more than 254 references \
                 (qemu-img check -r all)"
            );
            self.damage = Some((what, MAX_DAMAGE));
        }
    }

    fn damaged(&mut self, what: impl FnOnce() -> String) {
        match &mut self.damage {
            Some((_, count)) => *count += 1,
            None => self.damage = Some((what(), 1)),
        }
    }

    /// More would say nothing new, and an image can be made so that to look for more takes hours.
    fn has_enough(&self) -> bool {
        self.damage.as_ref().is_some_and(|(_, count)| *count >= MAX_DAMAGE)
    }

    /// The references of a range of bytes; false when it is not in the file.
    fn range(&mut self, what: &str, offset: u64, len: u64, bits: u32, times: u64) -> bool {
        if len == 0 {
            return true;
        }
        let (first, last) = (offset >> bits, offset.saturating_add(len - 1) >> bits);
        if last >= self.file_clusters {
            self.damaged(|| format!("{what} at {offset:#x} is not in the file"));
            return false;
        }
        (first..=last).for_each(|cluster| self.add(cluster, times));
        true
    }

    /// A table of its own: nothing else may be where it is.
    fn alone(&mut self, what: &str, offset: u64, len: u64, bits: u32) -> bool {
        if !self.range(what, offset, len, bits, 1) {
            return false;
        }
        let clusters = offset >> bits..(offset + len).div_ceil(1 << bits);
        if clusters.into_iter().any(|cluster| self.get(cluster) > 1) {
            self.damaged(|| format!("{what} at {offset:#x} is where something else is"));
            return false;
        }
        true
    }

    /// Counts everything but L2 tables and data.
    fn fixed(&mut self, store: &dyn Store, header: &Header, tables: &Tables) -> Result<(), Error> {
        let geometry = &header.geometry;
        let bits = geometry.cluster_bits;
        let cluster = geometry.cluster_len();
        self.alone("the header", 0, cluster, bits);
        self.alone("the L1 table", header.l1_offset, u64::from(header.l1_entries) * 8, bits);
        let len = u64::from(header.refcount_table_clusters) << bits;
        self.alone("the refcount table", header.refcount_table_offset, len, bits);
        let len = tables.snapshot_table_len;
        self.alone("the snapshot table", header.snapshots_offset, len, bits);
        for snapshot in &tables.snapshots {
            let len = u64::from(snapshot.l1_entries) * 8;
            self.alone("the L1 table of a snapshot", snapshot.l1_offset, len, bits);
        }
        for &entry in tables.refcount_table.iter().filter(|&&entry| entry & !0x1ff != 0) {
            let offset = entry & !0x1ff;
            if geometry.in_cluster(offset) != 0 {
                self.damaged(|| format!("a refcount block at {offset:#x}, within a cluster"));
            } else {
                self.alone("a refcount block", offset, cluster, bits);
            }
        }
        self.bitmaps(store, header, tables)
    }

    fn bitmaps(
        &mut self,
        store: &dyn Store,
        header: &Header,
        tables: &Tables,
    ) -> Result<(), Error> {
        let Some(bitmaps) = &header.bitmaps else { return Ok(()) };
        let bits = header.geometry.cluster_bits;
        self.alone("the bitmap directory", bitmaps.directory_offset, bitmaps.directory_len, bits);
        for of in &tables.bitmaps {
            if self.has_enough() {
                break;
            }
            let (offset, entries) = (of.table_offset, u64::from(of.table_entries));
            if !self.alone("the table of a bitmap", offset, entries * 8, bits) {
                continue;
            }
            let words =
                self.reader.read(store, offset, entries, "reading the table of a bitmap")?;
            for offset in words.into_iter().map(bitmap::cluster_offset).filter(|&o| o != 0) {
                self.alone("a cluster of a bitmap", offset, 1 << bits, bits);
            }
        }
        Ok(())
    }

    /// A table that so many L1 entries refer to, and all that it refers to.
    fn table(
        &mut self,
        store: &dyn Store,
        geometry: &Geometry,
        offset: u64,
        times: u64,
    ) -> Result<(), Error> {
        let bits = geometry.cluster_bits;
        if geometry.in_cluster(offset) != 0 {
            self.damaged(|| format!("an L2 table at {offset:#x}, within a cluster"));
            return Ok(());
        }
        if !self.range("an L2 table", offset, geometry.cluster_len(), bits, times) {
            return Ok(());
        }
        let words = geometry.cluster_len() / 8;
        let words = self.reader.read(store, offset, words, "reading an L2 table")?;
        for pair in words.chunks_exact(geometry.entry_len() as usize / 8) {
            let raw = entry::clean(pair[0], geometry);
            let bitmap = pair.get(1).copied().unwrap_or(0);
            self.entry(geometry, (raw, bitmap), offset, times);
        }
        Ok(())
    }

    fn entry(&mut self, geometry: &Geometry, (raw, bitmap): Pair, table: u64, times: u64) {
        let bits = geometry.cluster_bits;
        if raw & COMPRESSED != 0 {
            let (offset, len) = entry::compressed(raw, geometry);
            // The last sector of the last cluster may end behind the file.
            let end = (offset + len).min(self.file_clusters << bits);
            let len = end.saturating_sub(offset).max(1);
            self.range("a compressed cluster", offset, len, bits, times);
            return;
        }
        let subs = if geometry.extended_l2 { 32 } else { 1 };
        if (0..subs).any(|sub| entry::kind(raw, bitmap, sub, geometry) == Kind::Bad) {
            self.damaged(|| format!("an entry of the L2 table at {table:#x} contradicts itself"));
            return;
        }
        let offset = entry::offset(raw);
        if !entry::is_allocated(raw, geometry) || geometry.data_file {
            return;
        }
        if geometry.in_cluster(offset) != 0 {
            self.damaged(|| format!("data at {offset:#x}, within a cluster"));
            return;
        }
        self.range("data", offset, geometry.cluster_len(), bits, times);
    }
}
