//! The operations, and how one is chosen.

use std::fmt;
use std::ops::Range;

use base::random::{Random, Seeded};

use crate::sys::PAGE_BYTES;

/// Most bytes of one read or write.
pub const MAX_IO_BYTES: u64 = 256 << 10;
/// Alignment of offsets and lengths for `O_DIRECT`: the block size of the disks under test.
pub const SECTOR_BYTES: u64 = 512;
/// The usual cluster size of disk images.
const CLUSTER_BYTES: u64 = 64 << 10;
/// Size of the window that half of all ranges lie in, so that they overlap.
const WINDOW_BYTES: u64 = 1 << 20;
/// Operations after which the window moves.
const WINDOW_OPERATIONS: u32 = 64;

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Write by pwrite(2).
    Write,
    /// Write by pwrite(2) with `O_DIRECT`.
    WriteDirect,
    /// Bytes stored into a mapping, with or without msync(2).
    WriteMapped,
    /// Read by pread(2), checked.
    Read,
    /// Read by pread(2) with `O_DIRECT`, checked.
    ReadDirect,
    /// Bytes loaded from a mapping, checked.
    ReadMapped,
    /// Change of the length by ftruncate(2), up or down.
    Truncate,
    /// Allocation by fallocate(2): blocks, and a longer file.
    Allocate,
    /// The same with `FALLOC_FL_KEEP_SIZE`.
    AllocateKeep,
    /// `FALLOC_FL_PUNCH_HOLE`.
    Punch,
    /// `FALLOC_FL_ZERO_RANGE`.
    Zero,
    /// The same with `FALLOC_FL_KEEP_SIZE`.
    ZeroKeep,
    /// Copy by copy_file_range(2).
    Copy,
    /// Write-back by sync_file_range(2), without a flush.
    WriteBack,
    /// Flush by fsync(2).
    Sync,
    /// Flush by fdatasync(2).
    DataSync,
    /// Eviction by sync_file_range(2) and `POSIX_FADV_DONTNEED`, and a checked read of the range.
    Evict,
    /// Reopening by close(2) and open(2).
    Reopen,
    /// New file in the old one's place: unlink(2) and a new file.
    Recreate,
    /// `BLKDISCARD`, and a read of what is there now.
    Discard,
    /// `BLKZEROOUT`.
    ZeroOut,
    /// `FITRIM` of the whole file system.
    Trim,
}

/// A kind, its weight in busy chapters and its weight in calm ones.
type Weight = (Kind, u32, u32);

/// For files. In a calm chapter nothing asks the disk for a flush.
const OF_FILES: [Weight; 20] = [
    (Kind::Write, 16, 16),
    (Kind::WriteDirect, 16, 20),
    (Kind::WriteMapped, 8, 8),
    (Kind::Read, 10, 10),
    (Kind::ReadDirect, 10, 12),
    (Kind::ReadMapped, 6, 6),
    (Kind::Truncate, 3, 3),
    (Kind::Allocate, 3, 3),
    (Kind::AllocateKeep, 2, 2),
    (Kind::Punch, 4, 4),
    (Kind::Zero, 3, 3),
    (Kind::ZeroKeep, 2, 2),
    (Kind::Copy, 4, 4),
    (Kind::WriteBack, 3, 4),
    (Kind::Sync, 2, 0),
    (Kind::DataSync, 2, 0),
    (Kind::Evict, 6, 10),
    (Kind::Reopen, 1, 1),
    (Kind::Recreate, 1, 0),
    (Kind::Trim, 1, 0),
];

/// For disks.
const OF_DISKS: [Weight; 12] = [
    (Kind::Write, 16, 16),
    (Kind::WriteDirect, 18, 24),
    (Kind::WriteMapped, 6, 6),
    (Kind::Read, 10, 10),
    (Kind::ReadDirect, 10, 12),
    (Kind::ReadMapped, 6, 6),
    (Kind::WriteBack, 3, 4),
    (Kind::Sync, 2, 0),
    (Kind::DataSync, 2, 0),
    (Kind::Evict, 6, 10),
    (Kind::Discard, 5, 5),
    (Kind::ZeroOut, 4, 4),
];

/// One operation.
#[derive(Clone, Debug)]
pub struct Op {
    /// Kind of operation.
    pub kind: Kind,
    /// On which of the worker's targets.
    pub target: usize,
    /// Range; for [`Kind::Truncate`] the begin is the new length.
    pub range: Range<u64>,
    /// For [`Kind::Copy`]: which target's bytes, from where.
    pub source: Option<(usize, u64)>,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.range;
        write!(f, "{:?} target {} {start:#x}..{end:#x}", self.kind, self.target)?;
        match self.source {
            Some((target, at)) => write!(f, " from target {target} {at:#x}"),
            None => Ok(()),
        }
    }
}

/// Length of a target, as a choice needs it.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Length now.
    pub len_bytes: u64,
    /// The longest that it may get.
    pub max_len_bytes: u64,
}

/// Chooses operations: a seed's sequence.
#[derive(Debug)]
pub struct Chooser {
    random: Seeded,
    weights: Vec<Weight>,
    window: u64,
    chosen: u32,
}

impl Chooser {
    /// For files (which may be trimmed) or for parts of disks.
    #[must_use]
    pub fn new(seed: u64, is_disk: bool, trims: bool) -> Self {
        let all: &[Weight] = if is_disk { &OF_DISKS } else { &OF_FILES };
        let is_used = |(kind, ..): &&Weight| *kind != Kind::Trim || trims;
        let weights = all.iter().filter(is_used).copied().collect();
        Self { random: Seeded::new(seed), weights, window: 0, chosen: 0 }
    }

    /// A number below a bound.
    pub fn below(&mut self, bound: u64) -> u64 {
        let bound = u32::try_from(bound).unwrap_or(u32::MAX);
        u64::from(self.random.below(bound))
    }

    /// True with a chance of one in `times`.
    pub fn one_in(&mut self, times: u32) -> bool {
        self.random.below(times) == 0
    }

    fn kind(&mut self, calm: bool) -> Kind {
        let weight = |(_, busy, when_calm): &Weight| if calm { *when_calm } else { *busy };
        let sum = self.weights.iter().map(weight).sum();
        let mut left = self.random.below(sum);
        for entry in &self.weights {
            let of_kind = weight(entry);
            if left < of_kind {
                return entry.0;
            }
            left -= of_kind;
        }
        Kind::Read
    }

    /// A range below a limit, in steps.
    fn range(&mut self, limit: u64, step: u64) -> Range<u64> {
        if self.chosen.is_multiple_of(WINDOW_OPERATIONS) {
            self.window = self.below(limit);
        }
        self.chosen += 1;
        let len = match self.below(4) {
            0 | 1 => 1 + self.below(PAGE_BYTES),
            2 => 1 + self.below(CLUSTER_BYTES),
            _ => 1 + self.below(MAX_IO_BYTES),
        };
        let at = match self.below(2) {
            0 => self.window + self.below(WINDOW_BYTES),
            _ => self.below(limit),
        };
        // Of operations that may be anywhere, half are at borders of sectors, pages or clusters.
        let align = match self.below(8) {
            0 => SECTOR_BYTES,
            1 | 2 => PAGE_BYTES,
            3 => CLUSTER_BYTES,
            _ => 1,
        }
        .max(step);
        let at = at % limit / align * align;
        let len = len.next_multiple_of(align).min(MAX_IO_BYTES);
        at..(at + len).min(limit / step * step)
    }

    /// The next operation. `extents` are the worker's targets.
    pub fn next(&mut self, extents: &[Extent], calm: bool) -> Op {
        let target = self.below(extents.len() as u64) as usize;
        let Extent { len_bytes, max_len_bytes } = extents[target];
        let mut kind = self.kind(calm);
        let wants_bytes = [Kind::Read, Kind::ReadDirect, Kind::ReadMapped, Kind::WriteMapped];
        if wants_bytes.contains(&kind) && len_bytes < SECTOR_BYTES {
            kind = Kind::Write;
        }
        let (limit, step) = match kind {
            Kind::Read | Kind::ReadMapped | Kind::WriteMapped => (len_bytes, 1),
            Kind::ReadDirect => (len_bytes.next_multiple_of(SECTOR_BYTES), SECTOR_BYTES),
            Kind::WriteDirect => (max_len_bytes, SECTOR_BYTES),
            // The kernel drops whole pages, or parts of them wrongly.
            Kind::Discard | Kind::ZeroOut => (max_len_bytes, PAGE_BYTES),
            _ => (max_len_bytes, 1),
        };
        let mut range = self.range(limit, step);
        let mut source = None;
        match kind {
            // Mostly a little shorter or longer, or new clusters would be rare.
            Kind::Truncate if !self.one_in(8) => {
                let to = (len_bytes + self.below(MAX_IO_BYTES)).saturating_sub(MAX_IO_BYTES / 2);
                range = to.min(max_len_bytes)..to.min(max_len_bytes);
            }
            Kind::Copy => source = self.source(extents, target, &range),
            _ => (),
        }
        if kind == Kind::Copy && source.is_none() {
            kind = Kind::Write;
        }
        Op { kind, target, range, source }
    }

    /// Picks the begin of a range that bytes may be copied from: not beyond a file's end, and not
    /// the range itself.
    fn source(
        &mut self,
        extents: &[Extent],
        to: usize,
        range: &Range<u64>,
    ) -> Option<(usize, u64)> {
        let from = self.below(extents.len() as u64) as usize;
        let len = range.end - range.start;
        let last = extents[from].len_bytes.checked_sub(len)?;
        let mut at = self.below(last + 1);
        if self.one_in(2) {
            // File systems that share blocks do so for whole ones.
            at = at / PAGE_BYTES * PAGE_BYTES + range.start % PAGE_BYTES;
        }
        let overlaps = from == to && at < range.end && range.start < at + len;
        (at <= last && !overlaps).then_some((from, at))
    }
}
