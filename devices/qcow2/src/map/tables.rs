//! Tables of an image as they are in its file: all but L2 tables and refcount blocks.

use super::metadata::Metadata;
use crate::error::Error;
use crate::format::bitmap::{self, Bitmap};
use crate::format::header::Header;
use crate::format::snapshot::{self, Snapshot};
use crate::format::u64_at;
use crate::limits::{MAX_BITMAP_LEN_BYTES, MAX_SNAPSHOT_TABLE_LEN_BYTES, MAX_SNAPSHOT_TABLES};
use crate::store::Store;

/// The tables of an image, as they are in the file.
#[derive(Debug)]
pub(crate) struct Tables {
    pub l1: Vec<u64>,
    pub refcount_table: Vec<u64>,
    pub snapshots: Vec<Snapshot>,
    pub snapshot_table_len: u64,
    /// L1 tables of the snapshots.
    pub snapshot_l1s: Vec<Vec<u64>>,
    pub bitmaps: Vec<Bitmap>,
    pub file_len: u64,
}

/// `count` big endian numbers.
pub(crate) fn read_words(
    store: &dyn Store,
    offset: u64,
    count: u64,
    what: &'static str,
) -> Result<Vec<u64>, Error> {
    let mut bytes = vec![0; count as usize * 8];
    store.read_padded(&mut bytes, offset).map_err(Error::io(what))?;
    Ok((0..count as usize).filter_map(|n| u64_at(&bytes, n * 8)).collect())
}

impl Tables {
    /// Reads all but the L2 tables and the counts.
    pub fn read(store: &dyn Store, header: &Header) -> Result<Self, Error> {
        let words = |offset, count, what| read_words(store, offset, count, what);
        let clusters = u64::from(header.refcount_table_clusters);
        let counts = (clusters << header.geometry.cluster_bits) / 8;
        let (snapshots, snapshot_table_len) = read_snapshots(store, header)?;
        let total: u64 = snapshots.iter().map(|s| u64::from(s.l1_entries)).sum();
        if total > MAX_SNAPSHOT_TABLES {
            let rule = format!("at most {MAX_SNAPSHOT_TABLES}");
            return Err(Error::header("entries of all snapshots' L1 tables", total, rule));
        }
        let mut snapshot_l1s = Vec::new();
        for s in &snapshots {
            let len = u64::from(s.l1_entries) * 8;
            header.check_table("the offset of a snapshot's L1 table", s.l1_offset, len)?;
            snapshot_l1s.push(words(s.l1_offset, s.l1_entries.into(), "reading a snapshot")?);
        }
        let bitmaps = read_bitmaps(store, header)?;
        Ok(Self {
            l1: words(header.l1_offset, header.l1_entries.into(), "reading the L1 table")?,
            refcount_table: words(header.refcount_table_offset, counts, "reading the refcounts")?,
            snapshots,
            snapshot_table_len,
            snapshot_l1s,
            bitmaps,
            file_len: store.len().map_err(Error::io("reading the file's length"))?,
        })
    }

    /// Clusters of the file, the last one perhaps in part.
    pub fn file_clusters(&self, header: &Header) -> u64 {
        self.file_len.div_ceil(header.geometry.cluster_len())
    }

    /// Adds all metadata but L2 tables and refcount blocks. False with a contradiction.
    pub fn add_ranges(&self, header: &Header, all: &mut Metadata) -> bool {
        let bits = header.geometry.cluster_bits;
        let mut add = |offset: u64, len: u64| {
            let first = offset >> bits;
            all.add_range(first..first + len.div_ceil(1 << bits))
        };
        let mut is_right = add(0, 1);
        is_right &= add(header.l1_offset, u64::from(header.l1_entries) * 8);
        let clusters = u64::from(header.refcount_table_clusters);
        is_right &= add(header.refcount_table_offset, clusters << bits);
        is_right &= add(header.snapshots_offset, self.snapshot_table_len);
        for snapshot in &self.snapshots {
            is_right &= add(snapshot.l1_offset, u64::from(snapshot.l1_entries) * 8);
        }
        if let Some(bitmaps) = &header.bitmaps {
            is_right &= add(bitmaps.directory_offset, bitmaps.directory_len);
            for bitmap in &self.bitmaps {
                is_right &= add(bitmap.table_offset, u64::from(bitmap.table_entries) * 8);
            }
        }
        is_right
    }
}

fn read_snapshots(store: &dyn Store, header: &Header) -> Result<(Vec<Snapshot>, u64), Error> {
    if header.snapshots == 0 {
        return Ok((Vec::new(), 0));
    }
    let file_len = store.len().map_err(Error::io("reading the file's length"))?;
    let len = file_len.saturating_sub(header.snapshots_offset).min(MAX_SNAPSHOT_TABLE_LEN_BYTES);
    // Most tables are small: a page for each snapshot is plenty, more is read where it is not.
    let mut want = (u64::from(header.snapshots) * 4096).min(len);
    loop {
        let mut bytes = vec![0; want as usize];
        store
            .read_padded(&mut bytes, header.snapshots_offset)
            .map_err(Error::io("reading the snapshot table"))?;
        match snapshot::table(&bytes, header.snapshots) {
            Err(_) if want < len => want = (want * 4).min(len),
            other => return other,
        }
    }
}

fn read_bitmaps(store: &dyn Store, header: &Header) -> Result<Vec<Bitmap>, Error> {
    let Some(bitmaps) = &header.bitmaps else { return Ok(Vec::new()) };
    header.check_table("the offset of the bitmap directory", bitmaps.directory_offset, 1)?;
    let end = bitmaps.directory_offset.saturating_add(bitmaps.directory_len);
    let file_len = store.len().map_err(Error::io("reading the file's length"))?;
    if end > file_len {
        let rule = format!("at most the file's, {file_len}");
        return Err(Error::header("the end of the bitmap directory", end, rule));
    }
    let mut bytes = vec![0; bitmaps.directory_len as usize];
    store
        .read_padded(&mut bytes, bitmaps.directory_offset)
        .map_err(Error::io("reading the bitmap directory"))?;
    let all = bitmap::directory(&bytes, bitmaps.count).ok_or_else(|| {
        let rule = format!("enough for its {} bitmaps", bitmaps.count);
        Error::header("the length of the bitmap directory", bitmaps.directory_len, rule)
    })?;
    let limit = MAX_BITMAP_LEN_BYTES >> header.geometry.cluster_bits;
    match all.iter().position(|bitmap| u64::from(bitmap.table_entries) > limit) {
        None => Ok(all),
        Some(n) => {
            let rule = format!("at most {limit} in the table of bitmap {n}");
            Err(Error::header("entries of a bitmap's table", all[n].table_entries.into(), rule))
        }
    }
}
