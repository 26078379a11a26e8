//! Reference counts: which clusters of the file are in use, and how often.
//!
//! Blocks of counts are kept in memory, a few at a time, and each change is in the file when the
//! call returns: so a block can be forgotten at any time. What a block says is checked against what
//! else is known before a cluster is handed out.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::metadata::Metadata;
use crate::error::contradiction;
use crate::format::geometry::Geometry;
use crate::format::header::place;
use crate::format::refcount;
use crate::limits::{MAX_REFCOUNT_TABLE_LEN_BYTES, REFCOUNT_CACHE_LEN_BYTES};
use crate::store::Store;

/// Mark, in memory only, of an invalid entry of the table.
const BAD: u64 = 1;

/// A refcount block in memory.
struct Block {
    index: u64,
    bytes: Box<[u8]>,
}

/// Refcounts of an image: the table, and some blocks in memory.
pub struct Refcounts {
    store: Arc<dyn Store>,
    geometry: Geometry,
    /// Offsets of blocks; 0: no block.
    table: Vec<u64>,
    table_offset: u64,
    table_clusters: u64,
    /// Index below which the table has no gap. Blocks come and do not go.
    full_upto: usize,
    /// Cached blocks, the least recently used first.
    blocks: VecDeque<Block>,
    max_blocks: usize,
}

impl std::fmt::Debug for Refcounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Refcounts")
            .field("table_offset", &self.table_offset)
            .finish_non_exhaustive()
    }
}

impl Refcounts {
    /// Refcounts of a table that was read and checked ([`check_table`]).
    pub fn new(store: Arc<dyn Store>, geometry: Geometry, offset: u64, table: Vec<u64>) -> Self {
        let max_blocks = (REFCOUNT_CACHE_LEN_BYTES >> geometry.cluster_bits).max(2) as usize;
        let table_clusters = (table.len() as u64 * 8) >> geometry.cluster_bits;
        let blocks = VecDeque::with_capacity(max_blocks);
        Self {
            store,
            geometry,
            table,
            table_offset: offset,
            table_clusters,
            full_upto: 0,
            blocks,
            max_blocks,
        }
    }

    fn block_of(&self, cluster: u64) -> (u64, u64) {
        let entries = self.geometry.block_entries();
        (cluster / entries, cluster % entries)
    }

    /// The first cluster that no block counts.
    pub fn first_without_block(&mut self) -> Option<u64> {
        let rest = self.table.get(self.full_upto..).unwrap_or(&[]);
        self.full_upto += rest.iter().take_while(|&&offset| offset != 0).count();
        (self.full_upto as u64).checked_mul(self.geometry.block_entries())
    }

    /// Whether there is a block for the counts of `cluster`.
    pub fn has_block(&self, cluster: u64) -> bool {
        self.table.get(self.block_of(cluster).0 as usize).is_some_and(|&offset| offset != 0)
    }

    /// The block at `index`, read if need be; none where there is none.
    fn block(&mut self, index: u64) -> io::Result<Option<&mut Block>> {
        let offset = match self.table.get(index as usize) {
            None | Some(0) => return Ok(None),
            Some(&BAD) => {
                let text = format!("entry {index} of the refcount table points at no block");
                return Err(contradiction(text));
            }
            Some(&offset) => offset,
        };
        match self.blocks.iter().position(|block| block.index == index) {
            Some(at) if at + 1 == self.blocks.len() => {}
            Some(at) => {
                let block = self.blocks.remove(at);
                self.blocks.extend(block);
            }
            None => {
                let mut bytes = vec![0; self.geometry.cluster_len() as usize].into_boxed_slice();
                self.store.read_padded(&mut bytes, offset)?;
                self.keep(Block { index, bytes });
            }
        }
        Ok(self.blocks.back_mut())
    }

    fn keep(&mut self, block: Block) {
        if self.blocks.len() >= self.max_blocks {
            self.blocks.pop_front();
        }
        self.blocks.push_back(block);
    }

    /// The refcount of a cluster.
    pub fn get(&mut self, cluster: u64) -> io::Result<u64> {
        let (index, at) = self.block_of(cluster);
        let order = self.geometry.refcount_order;
        Ok(self.block(index)?.map_or(0, |block| refcount::get(&block.bytes, order, at)))
    }

    /// The first of some clusters, in their order, that is not counted as used. Reads these counts,
    /// with what is between them, and keeps none: they are of places all over the file.
    pub fn first_uncounted(&self, clusters: &[u64]) -> io::Result<Option<u64>> {
        let (entries, order) = (self.geometry.block_entries(), self.geometry.refcount_order);
        for same in clusters.chunk_by(|a, b| a / entries == b / entries) {
            let index = same[0] / entries;
            let last = same[same.len() - 1] % entries;
            let range = refcount::bytes_of(order, same[0] % entries, last + 1);
            let first = (range.start as u64 * 8) >> order;
            // Where there is no block, or one that cannot be, nothing is counted.
            let place = self.table.get(index as usize).filter(|&&offset| offset > BAD);
            let mut counts = vec![0; range.len()];
            if let Some(cached) = self.blocks.iter().find(|block| block.index == index) {
                counts.copy_from_slice(&cached.bytes[range]);
            } else if let Some(place) = place {
                self.store.read_padded(&mut counts, place + range.start as u64)?;
            }
            let is_free = |&&c: &&u64| refcount::get(&counts, order, c % entries - first) == 0;
            if let Some(&free) = same.iter().find(is_free) {
                return Ok(Some(free));
            }
        }
        Ok(None)
    }

    /// Sets the refcounts of clusters in a row, in memory and in the file. There is a block for
    /// each.
    pub fn set(&mut self, clusters: Range<u64>, value: u64) -> io::Result<()> {
        let order = self.geometry.refcount_order;
        let mut at = clusters.start;
        while at < clusters.end {
            let (index, first) = self.block_of(at);
            let n = (clusters.end - at).min(self.geometry.block_entries() - first);
            let offset = self.table.get(index as usize).copied().unwrap_or(0);
            let Some(block) = self.block(index)? else {
                return Err(contradiction(format!("cluster {at} has no refcount block")));
            };
            (first..first + n).for_each(|i| refcount::set(&mut block.bytes, order, i, value));
            let range = refcount::bytes_of(order, first, first + n);
            let written = self
                .store
                .write_at(&block_bytes(&self.blocks)[range.clone()], offset + range.start as u64);
            if let Err(e) = written {
                // What the file says now is not known: it is read again when it is needed.
                self.blocks.pop_back();
                return Err(e);
            }
            at += n;
        }
        Ok(())
    }

    /// The first clusters within `within` that are free, up to `max` in a row, and no metadata.
    pub fn find_free(
        &mut self,
        within: Range<u64>,
        max: u64,
        metadata: &Metadata,
    ) -> io::Result<Option<Range<u64>>> {
        let (entries, order) = (self.geometry.block_entries(), self.geometry.refcount_order);
        let mut found: Option<Range<u64>> = None;
        let mut at = within.start;
        while at < within.end {
            let (index, first) = self.block_of(at);
            let n = (within.end - at).min(entries - first);
            let Some(block) = self.block(index)? else {
                // Clusters without a block are taken at the end of the file only.
                if found.is_some() {
                    break;
                }
                at += n;
                continue;
            };
            for i in first..first + n {
                let cluster = at + i - first;
                if refcount::get(&block.bytes, order, i) != 0 {
                    if found.is_some() {
                        return Ok(found);
                    }
                    continue;
                }
                if metadata.contains(cluster) {
                    let text = format!("cluster {cluster} holds metadata and has the refcount 0");
                    return Err(contradiction(text));
                }
                let range = found.get_or_insert(cluster..cluster);
                range.end = cluster + 1;
                if range.end - range.start >= max {
                    return Ok(found);
                }
            }
            at += n;
        }
        Ok(found)
    }

    /// Makes a block for the counts of `cluster` and its neighbours, none of which is in use. Its
    /// place is the first of them. `sync` is called before the table refers to it.
    pub fn make_block(
        &mut self,
        cluster: u64,
        metadata: &mut Metadata,
        sync: &mut dyn FnMut() -> io::Result<()>,
    ) -> io::Result<()> {
        let (index, _) = self.block_of(cluster);
        let (order, bits) = (self.geometry.refcount_order, self.geometry.cluster_bits);
        let place = index * self.geometry.block_entries();
        metadata.check_uncounted(place..place + 1)?;
        let mut bytes = vec![0; 1 << bits].into_boxed_slice();
        refcount::set(&mut bytes, order, 0, 1);
        self.store.write_at(&bytes, place << bits)?;
        sync()?;
        self.store.write_at(&(place << bits).to_be_bytes(), self.table_offset + index * 8)?;
        self.table[index as usize] = place << bits;
        metadata.add(place);
        self.keep(Block { index, bytes });
        Ok(())
    }

    /// Whether the table has an entry for the counts of `cluster`.
    pub fn reaches(&self, cluster: u64) -> bool {
        self.block_of(cluster).0 < self.table.len() as u64
    }

    /// The clusters that a larger table takes: blocks for itself, then the table. It begins with
    /// the first cluster that the table of today does not reach.
    pub fn larger_table(&self) -> io::Result<LargerTable> {
        let entries = self.geometry.block_entries();
        let clusters = (self.table_clusters * 2).max(self.table_clusters + 1);
        if clusters << self.geometry.cluster_bits > MAX_REFCOUNT_TABLE_LEN_BYTES {
            return Err(io::Error::from_raw_os_error(libc::EFBIG));
        }
        let mut blocks = 1;
        while blocks * entries < blocks + clusters {
            blocks += 1;
        }
        Ok(LargerTable { begin: self.table.len() as u64 * entries, blocks, clusters })
    }

    /// Moves to a larger table, in clusters of the file that exist. Returns where the old one was.
    pub fn grow(
        &mut self,
        new: LargerTable,
        metadata: &mut Metadata,
        sync: &mut dyn FnMut() -> io::Result<()>,
    ) -> io::Result<Range<u64>> {
        let (bits, order) = (self.geometry.cluster_bits, self.geometry.refcount_order);
        let entries = self.geometry.block_entries();
        let end = new.begin + new.blocks + new.clusters;
        if self.table.contains(&BAD) {
            return Err(contradiction("the refcount table is full, and damaged"));
        }
        metadata.check_uncounted(new.begin..end)?;
        let mut table = self.table.clone();
        table.resize((new.clusters << bits) as usize / 8, 0);
        for n in 0..new.blocks {
            let mut bytes = vec![0; 1 << bits];
            let used = (end - new.begin - (n * entries).min(end - new.begin)).min(entries);
            (0..used).for_each(|i| refcount::set(&mut bytes, order, i, 1));
            let place = (new.begin + n) << bits;
            self.store.write_at(&bytes, place)?;
            table[self.table.len() + n as usize] = place;
        }
        let offset = (new.begin + new.blocks) << bits;
        let bytes: Vec<u8> = table.iter().flat_map(|e| e.to_be_bytes()).collect();
        self.store.write_at(&bytes, offset)?;
        sync()?;
        let mut field = [0u8; 12];
        field[..8].copy_from_slice(&offset.to_be_bytes());
        field[8..].copy_from_slice(&(new.clusters as u32).to_be_bytes());
        self.store.write_at(&field, place::REFCOUNT_TABLE)?;
        sync()?;
        let first = self.table_offset >> bits;
        let old = first..first + self.table_clusters;
        metadata.remove_range(&old);
        (new.begin..new.begin + new.blocks).for_each(|block| metadata.add(block));
        metadata.add_range(new.begin + new.blocks..end);
        (self.table, self.table_offset, self.table_clusters) = (table, offset, new.clusters);
        Ok(old)
    }
}

fn block_bytes(blocks: &VecDeque<Block>) -> &[u8] {
    blocks.back().map_or(&[], |block| &block.bytes)
}

/// Place and size of a larger table: see [`Refcounts::larger_table`].
#[derive(Debug, Clone, Copy)]
pub struct LargerTable {
    /// First cluster.
    pub begin: u64,
    /// Blocks, which come first.
    pub blocks: u64,
    /// Clusters of the table.
    pub clusters: u64,
}

/// Reads a refcount table and marks what cannot be: returns it, and the places of the blocks.
pub fn check_table(raw: &[u64], geometry: &Geometry, file_clusters: u64) -> (Vec<u64>, Vec<u64>) {
    let mut places = Vec::new();
    let check = |&entry: &u64| {
        let offset = entry & !0x1ff;
        if offset == 0 {
            return 0;
        }
        let cluster = offset >> geometry.cluster_bits;
        if geometry.in_cluster(offset) != 0 || cluster >= file_clusters {
            return BAD;
        }
        places.push(cluster);
        offset
    };
    let table = raw.iter().map(check).collect();
    (table, places)
}

/// Marks the entries of a checked table whose block is one of `clusters`, sorted.
pub fn mark_bad(table: &mut [u64], geometry: &Geometry, clusters: &[u64]) {
    for entry in table.iter_mut().filter(|entry| **entry > BAD) {
        if clusters.binary_search(&(*entry >> geometry.cluster_bits)).is_ok() {
            *entry = BAD;
        }
    }
}
