//! The directory of dirty bitmaps: kept, and marked as not to be trusted.

use super::{u16_at, u32_at, u64_at};

/// Bytes of the fixed part of a directory entry.
const FIXED_LEN_BYTES: u64 = 24;

/// Where in an entry its flags are.
pub const FLAGS_AT: usize = 12;

/// Flag: the bitmap may not be right (QEMU calls it inconsistent).
pub const IN_USE: u32 = 1;

/// A bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bitmap {
    /// Where its directory entry is, in the directory.
    pub at: usize,
    /// Where its table is.
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
