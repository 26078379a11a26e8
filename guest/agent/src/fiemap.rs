//! Extents of a file on its disk (FIEMAP).

use std::io;
use std::os::fd::BorrowedFd;

use guest_abi::Reason;
use guest_abi::pipe::{Extent, HOLE};
use zerocopy::little_endian::U64;

use crate::sys::{self, FIEMAP_EXTENTS, FiemapExtent};

// `FIEMAP_EXTENT_*` of the kernel.
const LAST: u32 = 0x1;
const UNKNOWN: u32 = 0x2;
const DELALLOC: u32 = 0x4;
const ENCODED: u32 = 0x8;
const DATA_ENCRYPTED: u32 = 0x80;
const NOT_ALIGNED: u32 = 0x100;
const DATA_INLINE: u32 = 0x200;
const DATA_TAIL: u32 = 0x400;
const UNWRITTEN: u32 = 0x800;
/// Flags of extents whose bytes are not in their blocks, or not as they are.
const REFUSED: u32 =
    UNKNOWN | DELALLOC | ENCODED | DATA_ENCRYPTED | NOT_ALIGNED | DATA_INLINE | DATA_TAIL;

/// The extents of a range from `start` on, at most `len_bytes` long and `max` in number: they cover
/// the range without a gap, and less of it when there would be more of them. `base` is where the
/// file system begins on the disk. The file's dirty pages are written first.
///
/// # Errors
/// [`Reason::Extents`]: a part has no place of its own, or the file system does not say.
pub fn extents(
    file: BorrowedFd<'_>,
    start: u64,
    len_bytes: u64,
    base: u64,
    max: usize,
) -> Result<Vec<Extent>, Reason> {
    collect(|from, len| sys::fiemap(file, from, len), start, len_bytes, base, max)
}

fn collect(
    mut ask: impl FnMut(u64, u64) -> io::Result<Vec<FiemapExtent>>,
    start: u64,
    len_bytes: u64,
    base: u64,
    max: usize,
) -> Result<Vec<Extent>, Reason> {
    let end = start.checked_add(len_bytes).ok_or(Reason::Malformed)?;
    let mut list = List { extents: Vec::new(), at: start, end, max };
    'whole: while list.at < end {
        let found = ask(list.at, end - list.at).map_err(|_| Reason::Extents)?;
        let (mut last, before) = (found.len() < FIEMAP_EXTENTS, list.at);
        for extent in found {
            last |= extent.flags & LAST != 0;
            if !list.take(&extent, base)? {
                break 'whole;
            }
        }
        if last {
            // Nothing behind it: a hole to the end.
            list.push(HOLE, end);
            break;
        }
        if list.at == before {
            return Err(Reason::Extents);
        }
    }
    Ok(list.extents)
}

struct List {
    extents: Vec<Extent>,
    at: u64,
    end: u64,
    max: usize,
}

impl List {
    /// Adds one of the kernel's extents and the hole before it; false when no more fits.
    fn take(&mut self, extent: &FiemapExtent, base: u64) -> Result<bool, Reason> {
        let until = extent.logical.checked_add(extent.len_bytes).ok_or(Reason::Extents)?;
        if until <= self.at || extent.logical >= self.end {
            return Ok(true);
        }
        if extent.flags & REFUSED != 0 {
            return Err(Reason::Extents);
        }
        if extent.logical > self.at && !self.push(HOLE, extent.logical) {
            return Ok(false);
        }
        let offset = if extent.flags & UNWRITTEN != 0 {
            HOLE
        } else {
            let place = extent.physical.checked_add(self.at - extent.logical);
            place.and_then(|place| place.checked_add(base)).ok_or(Reason::Extents)?
        };
        Ok(self.push(offset, until.min(self.end)))
    }

    /// Adds the bytes up to `until`, which lie at `offset`, to the last extent if they follow it
    /// there.
    fn push(&mut self, offset: u64, until: u64) -> bool {
        let len = until.saturating_sub(self.at);
        if len == 0 {
            return true;
        }
        let full = self.extents.len() >= self.max;
        match self.extents.last_mut() {
            Some(last) if follows(last, offset) => last.len_bytes += len,
            _ if full => return false,
            _ => self.extents.push(Extent { offset: U64::new(offset), len_bytes: U64::new(len) }),
        }
        self.at = until;
        true
    }
}

fn follows(last: &Extent, offset: u64) -> bool {
    let before = last.offset.get();
    match (before, offset) {
        (HOLE, HOLE) => true,
        (HOLE, _) | (_, HOLE) => false,
        _ => before.checked_add(last.len_bytes.get()) == Some(offset),
    }
}

/// Length of all extents together.
pub fn len_bytes(extents: &[Extent]) -> u64 {
    extents.iter().map(|extent| extent.len_bytes.get()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(logical: u64, physical: u64, len_bytes: u64, flags: u32) -> FiemapExtent {
        let (reserved, reserved2) = ([0; 2], [0; 3]);
        FiemapExtent { logical, physical, len_bytes, reserved, flags, reserved2 }
    }

    fn map(
        file: &[FiemapExtent],
        start: u64,
        len: u64,
        max: usize,
    ) -> Result<Vec<(u64, u64)>, Reason> {
        let ask = |from: u64, len: u64| {
            let inside =
                |e: &&FiemapExtent| e.logical + e.len_bytes > from && e.logical < from + len;
            Ok(file.iter().filter(inside).take(FIEMAP_EXTENTS).copied().collect())
        };
        let pairs = |e: &Extent| (e.offset.get(), e.len_bytes.get());
        Ok(collect(ask, start, len, 1000, max)?.iter().map(pairs).collect())
    }

    #[test]
    fn ranges_are_cut_and_gaps_are_holes() {
        let file =
            [found(0, 500, 100, 0), found(200, 700, 100, 0), found(300, 900, 100, UNWRITTEN)];
        let whole = [(1500, 100), (HOLE, 100), (1700, 100), (HOLE, 150)];
        assert_eq!(map(&file, 0, 450, 9).unwrap(), whole);
        assert_eq!(map(&file, 50, 200, 9).unwrap(), [(1550, 50), (HOLE, 100), (1700, 50)]);
        assert_eq!(map(&file, 110, 20, 9).unwrap(), [(HOLE, 20)]);
        assert_eq!(map(&file, 0, 450, 2).unwrap(), whole[..2]);
        assert_eq!(map(&file, 1000, 5, 9).unwrap(), [(HOLE, 5)]);
    }

    #[test]
    fn neighbours_become_one_and_many_are_asked_for_again() {
        let neighbours: Vec<_> = (0..1000).map(|n| found(n * 10, n * 10, 10, 0)).collect();
        assert_eq!(map(&neighbours, 5, 9000, 1).unwrap(), [(1005, 9000)]);
        let apart: Vec<_> = (0..1000).map(|n| found(n * 10, n * 20, 10, 0)).collect();
        let got = map(&apart, 0, 10_000, 2048).unwrap();
        assert_eq!((got.len(), got[999]), (1000, (1000 + 19_980, 10)));
        assert_eq!(map(&apart, 0, 10_000, 300).unwrap().len(), 300);
    }

    #[test]
    fn bytes_without_a_place_are_refused_only_inside_the_range() {
        for flag in
            [UNKNOWN, DELALLOC, ENCODED, DATA_ENCRYPTED, NOT_ALIGNED, DATA_INLINE, DATA_TAIL]
        {
            let file = [found(0, 0, 100, 0), found(100, 0, 100, flag | LAST)];
            assert_eq!(map(&file, 0, 101, 9), Err(Reason::Extents));
            assert_eq!(map(&file, 0, 100, 9).unwrap(), [(1000, 100)]);
        }
        let wrapped = [found(0, u64::MAX - 10, 100, 0)];
        assert_eq!(map(&wrapped, 0, 100, 9), Err(Reason::Extents));
        assert_eq!(map(&wrapped, u64::MAX, 2, 9), Err(Reason::Malformed));
    }
}
