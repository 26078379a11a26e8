//! Making the refcounts, and the marks that follow from them, say what was counted.

use super::count::{Counts, TableReader};
use crate::error::Error;
use crate::format::entry::{self, COMPRESSED, COPIED};
use crate::format::geometry::Geometry;
use crate::format::header::Header;
use crate::format::refcount;
use crate::map::tables::Tables;
use crate::store::Store;

/// Errors that a check found and mended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Refcounts that were too low: raised.
    pub errors: u64,
    /// Clusters that nothing refers to, and refcounts that were too high: lowered.
    pub leaks: u64,
    /// Entries whose mark of sole ownership was wrong: set right.
    pub marks: u64,
}

/// Mends the image and makes it durable. Counts go up before marks are set, and nothing is freed
/// that is referred to, so that a kill in between leaves what the next opening mends.
pub(super) fn mend(
    store: &dyn Store,
    header: &Header,
    tables: &Tables,
    mut counts: Counts,
) -> Result<Outcome, Error> {
    let io = |what| Error::io(what);
    check_metadata(header, tables, &counts)?;
    let mut outcome = Outcome::default();
    let mut blocks: Vec<u64> = tables.refcount_table.iter().map(|&entry| entry & !0x1ff).collect();
    let fresh = new_blocks(header, &mut blocks, &mut counts)?;
    let geometry = &header.geometry;
    // Last of what may refuse the image: from here on it is changed.
    if let Some((cluster, count)) = counts.above(geometry.max_refcount()) {
        let what = format!("cluster {cluster} is referred to {count} times");
        return Err(Error::Damaged { what, count: 1 });
    }
    for (index, &offset) in blocks.iter().enumerate().filter(|&(_, &offset)| offset != 0) {
        let first = index as u64 * geometry.block_entries();
        let is_fresh = fresh.binary_search(&index).is_ok();
        let mut block = vec![0; geometry.cluster_len() as usize];
        if !is_fresh {
            store.read_padded(&mut block, offset).map_err(io("reading a refcount block"))?;
        }
        if set_block(&mut block, geometry, first, &counts, &mut outcome) || is_fresh {
            store.write_at(&block, offset).map_err(io("writing a refcount block"))?;
        }
    }
    if !fresh.is_empty() {
        store.sync().map_err(io("syncing refcount blocks"))?;
        for index in fresh {
            let at = header.refcount_table_offset + index as u64 * 8;
            store
                .write_at(&blocks[index].to_be_bytes(), at)
                .map_err(io("writing the refcounts"))?;
        }
    }
    mend_marks(store, header, tables, &counts, &mut outcome)?;
    store.sync().map_err(io("syncing the mended image"))?;
    Ok(outcome)
}

/// Tables that data lies over cannot be mended: whichever was written last has destroyed the other.
fn check_metadata(header: &Header, tables: &Tables, counts: &Counts) -> Result<(), Error> {
    let geometry = &header.geometry;
    let bits = geometry.cluster_bits;
    let mut count = 0;
    let mut first = None;
    let mut look = |what: &'static str, offset: u64, len: u64| {
        let clusters = offset >> bits..(offset + len).div_ceil(1 << bits);
        for cluster in clusters.filter(|&cluster| counts.get(cluster) > 1) {
            count += 1;
            first.get_or_insert((what, cluster << bits));
        }
    };
    look("the header", 0, geometry.cluster_len());
    look("the L1 table", header.l1_offset, u64::from(header.l1_entries) * 8);
    let len = u64::from(header.refcount_table_clusters) << bits;
    look("the refcount table", header.refcount_table_offset, len);
    look("the snapshot table", header.snapshots_offset, tables.snapshot_table_len);
    for snapshot in &tables.snapshots {
        look("a snapshot's L1 table", snapshot.l1_offset, u64::from(snapshot.l1_entries) * 8);
    }
    for &block in tables.refcount_table.iter().filter(|&&entry| entry & !0x1ff != 0) {
        look("a refcount block", block & !0x1ff, geometry.cluster_len());
    }
    let mut own: Vec<u64> = tables.l1.iter().map(|&e| entry::offset(e)).collect();
    own.sort_unstable();
    if let Some(twice) = own.windows(2).find(|pair| pair[0] == pair[1] && pair[0] != 0) {
        count += 1;
        first.get_or_insert(("an L2 table that is used twice", twice[0]));
    }
    // L2 tables: as often as L1 tables refer to them, and no more.
    let mut all: Vec<u64> = own;
    all.extend(tables.snapshot_l1s.iter().flatten().map(|&e| entry::offset(e)));
    all.sort_unstable();
    for same in all.chunk_by(|a, b| a == b).filter(|same| same[0] != 0) {
        if counts.get(same[0] >> bits) > same.len() as u64 {
            count += 1;
            first.get_or_insert(("an L2 table", same[0]));
        }
    }
    match first {
        None => Ok(()),
        Some((what, offset)) => {
            let what = format!("{what} at {offset:#x} is where something else is");
            Err(Error::Damaged { what, count })
        }
    }
}

/// Finds places for the blocks that are missing. Returns the indexes of those, ascending.
fn new_blocks(
    header: &Header,
    blocks: &mut [u64],
    counts: &mut Counts,
) -> Result<Vec<usize>, Error> {
    let geometry = &header.geometry;
    let entries = geometry.block_entries();
    let mut fresh = Vec::new();
    let mut index = 0;
    // Blocks that are added may lie behind the end, and need a block for themselves then.
    while index * entries < counts.clusters() {
        let clusters = index * entries..((index + 1) * entries).min(counts.clusters());
        let is_used = clusters.clone().any(|cluster| counts.get(cluster) > 0);
        let Some(block) = blocks.get_mut(index as usize) else {
            if !is_used {
                break;
            }
            return Err(Error::Damaged {
                what: "the refcount table does not reach the end of the file".into(),
                count: 1,
            });
        };
        if is_used && *block == 0 {
            let free = clusters.clone().find(|&cluster| counts.get(cluster) == 0);
            let place = free.unwrap_or(counts.clusters());
            counts.add(place, 1);
            *block = place << geometry.cluster_bits;
            fresh.push(index as usize);
        }
        index += 1;
    }
    Ok(fresh)
}

/// Sets a block's counts; true when one was different.
fn set_block(
    block: &mut [u8],
    geometry: &Geometry,
    first: u64,
    counts: &Counts,
    outcome: &mut Outcome,
) -> bool {
    let order = geometry.refcount_order;
    let mut is_changed = false;
    for n in 0..geometry.block_entries() {
        let (is, should) = (refcount::get(block, order, n), counts.get(first + n));
        if is == should {
            continue;
        }
        if is < should {
            outcome.errors += 1;
        } else {
            outcome.leaks += 1;
        }
        refcount::set(block, order, n, should);
        is_changed = true;
    }
    is_changed
}

/// The image's own tables say which clusters are its alone.
fn mend_marks(
    store: &dyn Store,
    header: &Header,
    tables: &Tables,
    counts: &Counts,
    outcome: &mut Outcome,
) -> Result<(), Error> {
    let geometry = &header.geometry;
    let bits = geometry.cluster_bits;
    let right = |raw: u64| match counts.get(entry::offset(raw) >> bits) {
        1 => raw | COPIED,
        _ => raw & !COPIED,
    };
    let mut reader = TableReader::default();
    for (n, &l1) in tables.l1.iter().enumerate() {
        let offset = entry::offset(l1);
        if offset == 0 {
            continue;
        }
        if right(l1) != l1 {
            outcome.marks += 1;
            let at = header.l1_offset + n as u64 * 8;
            store
                .write_at(&right(l1).to_be_bytes(), at)
                .map_err(Error::io("mending the L1 table"))?;
        }
        if geometry.data_file {
            continue;
        }
        let words = geometry.cluster_len() / 8;
        let words = reader.read(store, offset, words, "reading an L2 table")?;
        let step = geometry.entry_len() as usize / 8;
        for (n, &raw) in words.iter().enumerate().step_by(step) {
            let is_data = raw & COMPRESSED == 0 && entry::offset(raw) != 0;
            if is_data && right(raw) != raw {
                outcome.marks += 1;
                let at = offset + n as u64 * 8;
                let bytes = right(raw).to_be_bytes();
                store.write_at(&bytes, at).map_err(Error::io("mending an L2 table"))?;
            }
        }
    }
    Ok(())
}
