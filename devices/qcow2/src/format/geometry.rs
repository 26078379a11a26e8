//! The sizes that follow from a header: clusters, tables, slices.

use crate::limits::SLICE_LEN_BYTES;

/// Compression of the clusters of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Raw deflate with a window of 4 KiB.
    Zlib,
    /// Zstandard frames.
    Zstd,
}

/// Sizes and features that do not change while an image is open, resizing included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// 2 or 3.
    pub version: u32,
    /// Log2 of a cluster's bytes.
    pub cluster_bits: u32,
    /// Log2 of a refcount's bits.
    pub refcount_order: u32,
    /// Whether entries have 16 bytes and clusters 32 subclusters.
    pub extended_l2: bool,
    /// Whether data is in another file, each cluster at its own offset.
    pub data_file: bool,
    /// Format of compressed clusters.
    pub compression: Compression,
}

impl Geometry {
    /// Bytes of a cluster.
    #[inline]
    pub fn cluster_len(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Log2 of the bytes of the least that is mapped by itself: a cluster, or a 32nd of one.
    #[inline]
    pub fn sub_bits(&self) -> u32 {
        if self.extended_l2 { self.cluster_bits - 5 } else { self.cluster_bits }
    }

    /// Bytes of an entry of an L2 table.
    #[inline]
    pub fn entry_len(&self) -> u64 {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// Log2 of the entries of an L2 table.
    #[inline]
    pub fn l2_bits(&self) -> u32 {
        self.cluster_bits - if self.extended_l2 { 4 } else { 3 }
    }

    /// Bytes of the disk that an L2 table maps.
    pub fn table_span(&self) -> u64 {
        1 << (self.l2_bits() + self.cluster_bits)
    }

    /// Log2 of the entries of a slice.
    #[inline]
    pub fn slice_bits(&self) -> u32 {
        let page = SLICE_LEN_BYTES.trailing_zeros() - self.entry_len().trailing_zeros();
        page.min(self.l2_bits())
    }

    /// Bytes of a slice.
    pub fn slice_len(&self) -> u64 {
        self.entry_len() << self.slice_bits()
    }

    /// The guest cluster at an offset of the disk.
    #[inline]
    pub fn cluster_of(&self, offset: u64) -> u64 {
        offset >> self.cluster_bits
    }

    /// The slice (numbered over all tables) that maps a guest cluster.
    #[inline]
    pub fn slice_of(&self, cluster: u64) -> u64 {
        cluster >> self.slice_bits()
    }

    /// The L1 entry that maps a slice.
    #[inline]
    pub fn l1_index_of(&self, slice: u64) -> u64 {
        slice >> (self.l2_bits() - self.slice_bits())
    }

    /// The offset of a slice within its table, in bytes.
    #[inline]
    pub fn offset_in_table(&self, slice: u64) -> u64 {
        let mask = (1 << (self.l2_bits() - self.slice_bits())) - 1;
        (slice & mask) * self.slice_len()
    }

    /// The index of a cluster within its slice.
    #[inline]
    pub fn index_in_slice(&self, cluster: u64) -> usize {
        (cluster & ((1 << self.slice_bits()) - 1)) as usize
    }

    /// The offset of a byte within its cluster.
    #[inline]
    pub fn in_cluster(&self, offset: u64) -> u64 {
        offset & (self.cluster_len() - 1)
    }

    /// Entries of an L1 table for a disk of `len_bytes`.
    pub fn l1_entries(&self, len_bytes: u64) -> u64 {
        len_bytes.div_ceil(self.table_span())
    }

    /// Refcounts in a refcount block.
    pub fn block_entries(&self) -> u64 {
        1 << (self.cluster_bits + 3 - self.refcount_order)
    }

    /// The largest refcount that can be said.
    pub fn max_refcount(&self) -> u64 {
        match self.refcount_order {
            6 => u64::MAX,
            order => (1 << (1 << order)) - 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(cluster_bits: u32, extended_l2: bool) -> Geometry {
        let compression = Compression::Zlib;
        Geometry {
            version: 3,
            cluster_bits,
            refcount_order: 4,
            extended_l2,
            data_file: false,
            compression,
        }
    }

    #[test]
    fn the_usual_image_maps_512_mib_with_a_table_and_a_table_has_16_slices() {
        let g = geometry(16, false);
        assert_eq!((g.cluster_len(), g.table_span()), (64 << 10, 512 << 20));
        assert_eq!((g.slice_bits(), g.slice_len()), (9, 4096));
        let cluster = g.cluster_of((512 << 20) + (32 << 20) + 1);
        let slice = g.slice_of(cluster);
        assert_eq!((slice, g.l1_index_of(slice), g.offset_in_table(slice)), (17, 1, 4096));
        assert_eq!(g.index_in_slice(cluster), 0);
        assert_eq!((g.block_entries(), g.max_refcount()), (32_768, 65_535));
    }

    #[test]
    fn small_tables_are_one_slice_and_extended_entries_are_twice_as_long() {
        let g = geometry(9, false);
        assert_eq!((g.slice_bits(), g.slice_len(), g.table_span()), (6, 512, 32 << 10));
        assert_eq!(g.l1_index_of(g.slice_of(64)), 1);
        let g = geometry(16, true);
        assert_eq!((g.slice_bits(), g.slice_len(), g.sub_bits()), (8, 4096, 11));
        assert_eq!(g.table_span(), 256 << 20);
        for (order, max) in [(0, 1), (1, 3), (3, 255), (6, u64::MAX)] {
            assert_eq!(Geometry { refcount_order: order, ..g }.max_refcount(), max);
        }
    }
}
