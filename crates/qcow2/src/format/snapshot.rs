//! The table of internal snapshots: only where their L1 tables are.

use super::{u16_at, u32_at, u64_at};
use crate::error::Error;

/// Bytes of the fixed part of an entry.
const FIXED_LEN_BYTES: usize = 40;

/// An internal snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Snapshot {
    /// Where its L1 table is.
    pub l1_offset: u64,
    /// Entries of it.
    pub l1_entries: u32,
}

/// The bytes of the entry that begins `bytes`, and the bytes that it takes; none: more are needed.
pub fn entry(bytes: &[u8]) -> Option<(Snapshot, usize)> {
    let l1_offset = u64_at(bytes, 0)?;
    let l1_entries = u32_at(bytes, 8)?;
    let (id_len, name_len) = (u16_at(bytes, 12)?, u16_at(bytes, 14)?);
    let extra_len = u32_at(bytes, 36)?;
    let len =
        FIXED_LEN_BYTES as u64 + u64::from(extra_len) + u64::from(id_len) + u64::from(name_len);
    let len = usize::try_from(len.next_multiple_of(8)).ok()?;
    Some((Snapshot { l1_offset, l1_entries }, len))
}

/// All `count` entries of a table; `bytes` begins with it. Returns the table's length too.
pub fn table(bytes: &[u8], count: u32) -> Result<(Vec<Snapshot>, u64), Error> {
    let mut all = Vec::new();
    let mut at = 0;
    for n in 0..count {
        let rest = bytes.get(at..).unwrap_or(&[]);
        let Some((snapshot, len)) = entry(rest).filter(|(_, len)| *len <= rest.len() + 7) else {
            let rule = format!("{count}: it ends within entry {n}");
            return Err(Error::header("the number of snapshots in the table", n.into(), rule));
        };
        all.push(snapshot);
        at += len;
    }
    Ok((all, at as u64))
}
