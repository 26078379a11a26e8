//! The directory of dirty bitmaps: kept, and marked as not to be trusted.

use super::{u16_at, u32_at, u64_at};

/// Bytes of the fixed part of a directory entry.
const FIXED_LEN_BYTES: u64 = 24;

/// Offset of the flags in a directory entry.
pub const FLAGS_AT: usize = 12;

/// Flag: the bitmap may not be right (QEMU calls it inconsistent).
pub const IN_USE: u32 = 1;

/// A bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bitmap {
    /// Offset of its entry in the directory.
    pub at: usize,
    /// Offset of its table.
    pub table_offset: u64,
    /// Entries of the table, of 8 bytes.
    pub table_entries: u32,
    /// Flags.
    pub flags: u32,
}

/// Bits 9 to 55 of a bitmap table's entry: the cluster, if any.
pub fn cluster_offset(entry: u64) -> u64 {
    entry & 0x00ff_ffff_ffff_fe00
}

/// All bitmaps of a directory; none when it ends within one.
pub fn directory(bytes: &[u8], count: u32) -> Option<Vec<Bitmap>> {
    let mut all = Vec::new();
    let mut at = 0usize;
    for _ in 0..count {
        let rest = bytes.get(at..)?;
        let bitmap = Bitmap {
            at,
            table_offset: u64_at(rest, 0)?,
            table_entries: u32_at(rest, 8)?,
            flags: u32_at(rest, FLAGS_AT)?,
        };
        let (name_len, extra_len) = (u16_at(rest, 18)?, u32_at(rest, 20)?);
        let len = FIXED_LEN_BYTES + u64::from(name_len) + u64::from(extra_len);
        let len = usize::try_from(len.next_multiple_of(8)).ok()?;
        if len > rest.len() {
            return None;
        }
        all.push(bitmap);
        at += len;
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(table_offset: u64, table_entries: u32, extra: usize, name: &str) -> Vec<u8> {
        let mut bytes = table_offset.to_be_bytes().to_vec();
        bytes.extend(table_entries.to_be_bytes());
        bytes.extend(2u32.to_be_bytes());
        bytes.extend([1, 16]);
        bytes.extend((name.len() as u16).to_be_bytes());
        bytes.extend((extra as u32).to_be_bytes());
        bytes.extend(vec![0xff; extra]);
        bytes.extend(name.bytes());
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    #[test]
    fn a_directory_is_read_entry_by_entry_and_never_beyond_its_end() {
        let all = [one(0x10000, 1, 0, "b0"), one(0x20000, 7, 9, &"n".repeat(1023))];
        let whole = all.concat();
        let found = directory(&whole, 2).unwrap();
        let places: Vec<_> =
            found.iter().map(|b| (b.at, b.table_offset, b.table_entries)).collect();
        assert_eq!(places, [(0, 0x10000, 1), (all[0].len(), 0x20000, 7)]);
        assert!(found.iter().all(|b| b.flags == 2));
        assert_eq!(u32_at(&whole, found[1].at + FLAGS_AT), Some(2));
        assert!((0..whole.len()).all(|len| directory(&whole[..len], 2).is_none()));
        assert!(directory(&whole, 3).is_none());
        assert_eq!(directory(&[], 0), Some(Vec::new()));
        let mut huge = all[0].clone();
        huge[20..24].fill(0xff);
        assert!(directory(&huge, 1).is_none());
    }

    #[test]
    fn a_tables_entry_is_an_offset_or_none() {
        assert_eq!(cluster_offset(0xff00_0000_0001_01ff), 0x10000);
        assert_eq!(cluster_offset(1), 0);
    }
}
