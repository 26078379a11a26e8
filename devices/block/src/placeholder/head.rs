//! Parser of placeholder sectors: the one place that reads them.

use guest_abi::pipe::{PLACEHOLDER_MAGIC, Placeholder, SECTOR_BYTES};
use queue::Seg;
use zerocopy::FromBytes;

/// Head of a request: its first sector's tag and offset, copied once. All other sectors are
/// compared with it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PlaceholderHead {
    pub tag: [u8; 16],
    /// Offset in the pipe's file; any number, since a pipe may begin anywhere.
    pub at: u64,
}

impl PlaceholderHead {
    /// Reads the head of a request of `len_bytes`, which begins after `skip` bytes of the segments;
    /// `None` when its first sector is no placeholder.
    pub fn read_first(segs: &[Seg], skip: usize, len_bytes: u64) -> Option<Self> {
        let sector = SECTOR_BYTES as u64;
        if len_bytes == 0 || !len_bytes.is_multiple_of(sector) {
            return None;
        }
        let head = placeholder(segs, skip)?;
        let at = head.at.get();
        at.checked_add(len_bytes)?;
        Some(Self { tag: head.tag, at })
    }
}

/// Whether the sectors in `from..from + len_bytes` of a request continue its head. The first sector
/// is not read again: the guest may have changed it. One cache line is read for each sector.
pub(crate) fn are_placeholders(
    segs: &[Seg],
    skip: usize,
    head: &PlaceholderHead,
    from: u64,
    len_bytes: u64,
) -> bool {
    let sector = SECTOR_BYTES as u64;
    let (mut segs, mut offset) = (segs, skip + from as usize);
    let first = if from == 0 { sector } else { from };
    offset += (first - from) as usize;
    (first..from + len_bytes).step_by(SECTOR_BYTES).all(|done| {
        // Each segment is passed once, however many there are.
        while let Some((passed, rest)) = segs.split_first()
            && offset >= passed.len()
        {
            offset -= passed.len();
            segs = rest;
        }
        let found = placeholder(segs, offset);
        offset += SECTOR_BYTES;
        // No overflow: all of the write's length was added to `at` before.
        found.is_some_and(|p| p.tag == head.tag && p.at.get() == head.at + done)
    })
}

/// Copies the beginning of a sector, if it is a placeholder. It may lie in several segments.
fn placeholder(segs: &[Seg], offset: usize) -> Option<Placeholder> {
    let mut bytes = [0u8; size_of::<Placeholder>()];
    if queue::seg::copy_out(segs, offset, &mut bytes) < bytes.len() {
        return None;
    }
    let found = Placeholder::read_from_bytes(&bytes).ok()?;
    (found.magic.get() == PLACEHOLDER_MAGIC).then_some(found)
}
