//! Entries in checkpoints: keys with their values, or the places of these.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::record::{u32_at, u64_at};
use crate::slot::{Loc, Slot};

const DELETED: u8 = 0;
const INLINE: u8 = 1;
const AT: u8 = 2;
const HEAD_BYTES: usize = 18;
const LOC_BYTES: usize = 12;

/// Entry of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry<'a> {
    /// Key.
    pub key: &'a [u8],
    /// Number of the commit.
    pub commit: u64,
    /// Whether the key is locked, in a prepared transaction.
    pub locked: bool,
    /// Value.
    pub slot: Slot,
}

/// Appends an entry.
pub fn put(out: &mut Vec<u8>, key: &[u8], commit: u64, locked: bool, slot: &Slot) {
    let (kind, len) = match slot {
        Slot::Deleted | Slot::Own { .. } => (DELETED, 0),
        Slot::Inline(bytes) => (INLINE, bytes.len()),
        Slot::At(_) => (AT, LOC_BYTES),
    };
    out.extend_from_slice(&[kind, u8::from(locked)]);
    out.extend_from_slice(&(key.len() as u32).to_le_bytes());
    out.extend_from_slice(&(len as u32).to_le_bytes());
    out.extend_from_slice(&commit.to_le_bytes());
    out.extend_from_slice(key);
    match slot {
        Slot::Inline(bytes) => out.extend_from_slice(bytes),
        Slot::At(loc) => {
            for part in [loc.segment, loc.offset, loc.len] {
                out.extend_from_slice(&part.to_le_bytes());
            }
        }
        Slot::Deleted | Slot::Own { .. } => {}
    }
}

/// Reads the entry at `at`; with it the offset of the next one.
pub fn read(bytes: &[u8], at: usize) -> Option<(Entry<'_>, usize)> {
    let head = bytes.get(at..)?.get(..HEAD_BYTES)?;
    let (key_len, len) = (u32_at(head, 2) as usize, u32_at(head, 6) as usize);
    let key = bytes.get(at + HEAD_BYTES..)?.get(..key_len)?;
    let value = bytes.get(at + HEAD_BYTES + key_len..)?.get(..len)?;
    let slot = match head[0] {
        DELETED => Slot::Deleted,
        INLINE => Slot::Inline(Box::from(value)),
        AT if len == LOC_BYTES => {
            let (segment, offset, len) = (u32_at(value, 0), u32_at(value, 4), u32_at(value, 8));
            Slot::At(Loc { segment, offset, len })
        }
        _ => return None,
    };
    let entry = Entry { key, commit: u64_at(head, 10), locked: head[1] != 0, slot };
    Some((entry, at + HEAD_BYTES + key_len + len))
}
