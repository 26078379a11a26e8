//! The table of internal snapshots: only where their L1 tables are.

use super::{u16_at, u32_at, u64_at};
use crate::error::Error;

/// Bytes of the fixed part of an entry.
const FIXED_LEN_BYTES: usize = 40;

/// An internal snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Snapshot {
    /// Offset of its L1 table.
    pub l1_offset: u64,
    /// Entries of that table.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn one(l1_offset: u64, l1_entries: u32, extra: usize, id: &str, name: &str) -> Vec<u8> {
        let mut bytes = l1_offset.to_be_bytes().to_vec();
        bytes.extend(l1_entries.to_be_bytes());
        bytes.extend((id.len() as u16).to_be_bytes());
        bytes.extend((name.len() as u16).to_be_bytes());
        bytes.extend([0; 20]);
        bytes.extend((extra as u32).to_be_bytes());
        bytes.extend(vec![0xff; extra]);
        bytes.extend(id.bytes().chain(name.bytes()));
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    #[test]
    fn entries_have_their_own_lengths() {
        let all = [one(0x10000, 1, 16, "1", "first"), one(0x20000, 7, 0, "", ""), {
            one(0x30000, u32::MAX, 24, "12345678", &"n".repeat(65_535))
        }];
        let (found, len) = table(&all.concat(), 3).unwrap();
        let places: Vec<_> = found.iter().map(|s| (s.l1_offset, s.l1_entries)).collect();
        assert_eq!(places, [(0x10000, 1), (0x20000, 7), (0x30000, u32::MAX)]);
        assert_eq!(len, all.concat().len() as u64);
        assert_eq!(table(&[], 0).unwrap(), (Vec::new(), 0));
    }

    #[test]
    fn a_table_that_ends_early_is_an_error_that_names_the_entry() {
        let (first, second) = (one(1 << 16, 1, 16, "1", "a"), one(2 << 16, 1, 16, "2", "b"));
        let whole = [&first[..], &second[..]].concat();
        // The padding of the last entry need not be there.
        let least = whole.len() - 6;
        for len in 0..whole.len() {
            let found = table(&whole[..len], 2);
            assert_eq!(found.is_ok(), len >= least - 1, "{len}");
            if let Err(e) = found {
                let n = usize::from(len >= first.len() - 7);
                assert!(e.to_string().contains(&format!("within entry {n}")), "{len}: {e}");
            }
        }
        let mut huge = one(1 << 16, 1, 0, "1", "a");
        huge[36..40].fill(0xff);
        table(&huge, 1).unwrap_err();
    }
}
