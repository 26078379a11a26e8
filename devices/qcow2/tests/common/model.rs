//! Model of a disk: the states that each sector may have after a death.

use std::collections::BTreeMap;

/// Bytes of a sector: what a disk writes at once.
pub const SECTOR: u64 = 512;

/// One state of a sector, by who wrote it: the bytes follow from the number and the place.
pub type Value = u32;

/// Nothing but zeroes.
pub const ZEROES: Value = 0;

/// A change that an operation made, at a place in the log.
#[derive(Debug, Clone)]
struct Change {
    value: Value,
    /// The operation that made it.
    op: usize,
}

/// Place of an operation in the log of the file.
#[derive(Debug, Clone, Copy)]
pub struct Op {
    pub begin: usize,
    /// Answered when so many events were there.
    pub end: usize,
    pub is_flush: bool,
}

/// All changes of a disk.
#[derive(Debug, Default)]
pub struct Model {
    changes: BTreeMap<u64, Vec<Change>>,
    /// Sizes of the disk, and the operations that made them: each value is an index.
    lens_bytes: Vec<u64>,
    lens: Vec<Change>,
    pub ops: Vec<Op>,
}

impl Model {
    /// An operation begins; returns its number.
    pub fn begin(&mut self, at: usize) -> usize {
        self.ops.push(Op { begin: at, end: usize::MAX, is_flush: false });
        self.ops.len() - 1
    }

    pub fn end(&mut self, op: usize, at: usize, is_flush: bool) {
        (self.ops[op].end, self.ops[op].is_flush) = (at, is_flush);
    }

    pub fn set_len(&mut self, op: usize, len_bytes: u64) {
        self.lens.push(Change { value: self.lens_bytes.len() as Value, op });
        self.lens_bytes.push(len_bytes);
    }

    /// Sizes that the disk may have after a death, in bytes.
    pub fn lens(&self, first: u64, at: usize, is_kill: bool) -> Vec<u64> {
        let lens = match is_kill {
            true => self.since(&self.lens, at, |op| op.end <= at),
            false => self.since_flush(&self.lens, at),
        };
        lens.into_iter().map(|n| n.map_or(first, |n| self.lens_bytes[n as usize])).collect()
    }

    pub fn set(&mut self, op: usize, sectors: std::ops::Range<u64>, value: Value) {
        for sector in sectors {
            self.changes.entry(sector).or_default().push(Change { value, op });
        }
    }

    /// Sectors that were changed.
    pub fn sectors(&self) -> Vec<u64> {
        self.changes.keys().copied().collect()
    }

    /// The state of a sector when all is answered; none: as at the beginning.
    pub fn now(&self, sector: u64) -> Option<Value> {
        self.changes.get(&sector)?.last().map(|change| change.value)
    }

    /// States that a sector may have after a kill at `at`: the last answered one, or of those under
    /// way. None stands for that of the beginning.
    pub fn after_kill(&self, sector: u64, at: usize) -> Vec<Option<Value>> {
        self.since(self.of(sector), at, |op| op.end <= at)
    }

    fn of(&self, sector: u64) -> &[Change] {
        self.changes.get(&sector).map_or(&[], Vec::as_slice)
    }

    /// After a power cut: the last flushed one, or any later one.
    pub fn after_cut(&self, sector: u64, at: usize) -> Vec<Option<Value>> {
        self.since_flush(self.of(sector), at)
    }

    fn since_flush(&self, changes: &[Change], at: usize) -> Vec<Option<Value>> {
        let flushed =
            self.ops.iter().filter(|op| op.is_flush && op.end <= at).map(|op| op.begin).max();
        let Some(flushed) = flushed else { return self.since(changes, at, |_| false) };
        self.since(changes, at, |op| op.end <= flushed)
    }

    fn since(
        &self,
        changes: &[Change],
        at: usize,
        is_sure: impl Fn(&Op) -> bool,
    ) -> Vec<Option<Value>> {
        let mut all = vec![None];
        for change in changes {
            let op = &self.ops[change.op];
            if op.begin > at {
                continue;
            }
            if is_sure(op) {
                all.clear();
            }
            all.push(Some(change.value));
        }
        all
    }
}

/// The bytes of a sector in a state.
pub fn bytes_of(value: Value, sector: u64, out: &mut [u8]) {
    if value == ZEROES {
        return out.fill(0);
    }
    let seed = u64::from(value) << 32 | (sector & 0xffff_ffff);
    for (n, bytes) in out.chunks_exact_mut(8).enumerate() {
        let word = (seed ^ (n as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        bytes.copy_from_slice(&word.to_le_bytes());
    }
}
