//! Entries of L1 and L2 tables.
//!
//! In memory an entry is as it is in the file, without its reserved bits, three of which are used
//! for what we know of it: [`BAD`], [`NO_WRITE`] and [`UNSURE`].

use super::geometry::Geometry;

/// The cluster's refcount is exactly one: it may be written in place.
pub const COPIED: u64 = 1 << 63;
/// The cluster is compressed.
pub const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeroes (version 3, standard entries).
pub const ZERO: u64 = 1;
/// Mark, in memory only: the entry is invalid, neither reads nor writes go there.
pub const BAD: u64 = 1 << 1;
/// Mark, in memory only: the entry points at metadata. Reads are harmless, writes are not done.
pub const NO_WRITE: u64 = 1 << 2;
/// Mark, in memory only: the entry in the file may differ, since writing another entry there
/// failed. An operation that changes the cluster, or finds it as it should be already, writes the
/// entry first.
pub const UNSURE: u64 = 1 << 3;

/// Bits 9 to 55: an offset in the file.
const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;

/// The offset that a standard L1 or L2 entry says.
#[inline]
pub fn offset(entry: u64) -> u64 {
    entry & OFFSET_MASK
}

/// Whether data may be overwritten where this entry, of a table of the image's own, has it.
#[inline]
pub(crate) fn may_write(entry: u64) -> bool {
    entry & (COPIED | NO_WRITE | UNSURE) == COPIED
}

/// An entry as read from a table, without the bits that mean nothing.
pub fn clean(raw: u64, geometry: &Geometry) -> u64 {
    if raw & COMPRESSED != 0 {
        return raw & !COPIED;
    }
    let zero = if geometry.extended_l2 { 0 } else { ZERO };
    raw & (OFFSET_MASK | COPIED | zero)
}

/// Kind of a piece of a cluster: of a subcluster, or of the whole cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// No data here: the backing file shows, or zeroes.
    Unallocated,
    /// The piece reads as zeroes.
    Zero,
    /// The data is in the cluster.
    Data,
    /// The data is in a compressed cluster.
    Compressed,
    /// The entry contradicts itself.
    Bad,
}

/// Kind of piece `sub` of a cluster with this entry. `bitmap` is that of an extended entry.
#[inline]
pub fn kind(entry: u64, bitmap: u64, sub: u32, geometry: &Geometry) -> Kind {
    // All other bits of a compressed entry are its offset and length.
    if entry & COMPRESSED != 0 {
        return Kind::Compressed;
    }
    if entry & BAD != 0 {
        return Kind::Bad;
    }
    let is_here = is_allocated(entry, geometry);
    if !geometry.extended_l2 {
        return match (entry & ZERO != 0, is_here) {
            (true, _) => Kind::Zero,
            (false, true) => Kind::Data,
            (false, false) => Kind::Unallocated,
        };
    }
    let (alloc, zero) = (bitmap >> sub & 1 != 0, bitmap >> (32 + sub) & 1 != 0);
    match (is_here, alloc, zero) {
        (true, true, true) | (false, true, _) => Kind::Bad,
        (true, true, false) => Kind::Data,
        (_, false, true) => Kind::Zero,
        (_, false, false) => Kind::Unallocated,
    }
}

/// Whether an uncompressed entry names a cluster. In a data file the first one is at offset 0, and
/// [`COPIED`] tells it from none.
#[inline]
pub fn is_allocated(entry: u64, geometry: &Geometry) -> bool {
    offset(entry) != 0 || (geometry.data_file && entry & COPIED != 0)
}

/// Whether a write must not go where the entry points: it makes no sense, or tables are there.
#[inline]
pub fn is_forbidden(entry: u64) -> bool {
    entry & COMPRESSED == 0 && entry & (BAD | NO_WRITE) != 0
}

/// The bytes of a compressed cluster: the offset, and the most that there can be.
pub fn compressed(entry: u64, geometry: &Geometry) -> (u64, u64) {
    let offset_bits = 62 - (geometry.cluster_bits - 8);
    let at = entry & ((1 << offset_bits) - 1);
    let sectors = ((entry & !(COPIED | COMPRESSED)) >> offset_bits) + 1;
    (at, sectors * 512 - (at & 511))
}

#[cfg(test)]
mod tests {
    use super::super::geometry::Compression;
    use super::*;

    fn geometry(extended_l2: bool) -> Geometry {
        let compression = Compression::Zlib;
        Geometry {
            version: 3,
            cluster_bits: 16,
            refcount_order: 4,
            extended_l2,
            data_file: false,
            compression,
        }
    }

    #[test]
    fn standard_entries_are_what_the_specification_says() {
        let g = geometry(false);
        let of = |entry| kind(clean(entry, &g), 0, 0, &g);
        assert_eq!(of(0), Kind::Unallocated);
        assert_eq!(of(1), Kind::Zero);
        assert_eq!(of(0x10000 | COPIED), Kind::Data);
        assert_eq!(of(0x10001 | COPIED), Kind::Zero);
        assert_eq!(of(COMPRESSED | 0x12345), Kind::Compressed);
        assert_eq!(clean(0x7f00_0000_0001_01fe | COPIED, &g) & COMPRESSED, COMPRESSED);
        assert_eq!(clean(0x3f00_0000_0001_01fe, &g), 0x10000);
    }

    #[test]
    fn pieces_of_extended_entries_have_a_kind_each() {
        let g = geometry(true);
        let here = 0x10000 | COPIED;
        assert_eq!(kind(here, 0b01, 0, &g), Kind::Data);
        assert_eq!(kind(here, 0b01, 1, &g), Kind::Unallocated);
        assert_eq!(kind(here, 1 << 33, 1, &g), Kind::Zero);
        assert_eq!(kind(here, 1 << 33 | 2, 1, &g), Kind::Bad);
        assert_eq!(kind(0, 1 << 63, 31, &g), Kind::Zero);
        assert_eq!(kind(0, 1, 0, &g), Kind::Bad);
        assert_eq!(kind(0, 1, 1, &g), Kind::Unallocated);
    }

    #[test]
    fn a_compressed_cluster_ends_with_a_sector() {
        let g = geometry(false);
        let offset_bits = 62 - 8;
        let entry = COMPRESSED | 2 << offset_bits | 0x12345;
        assert_eq!(compressed(entry, &g), (0x12345, 3 * 512 - 0x145));
    }
}
