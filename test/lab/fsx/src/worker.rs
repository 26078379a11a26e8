//! One worker: it does operations on its own targets and checks all that it reads.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use base::random::{Random, Seeded};
use rustix::fs::{FallocateFlags, copy_file_range, fallocate, ftruncate};

use crate::FsxError;
use crate::model::Content;
use crate::op::{Chooser, Extent, Kind, MAX_IO_BYTES, Op};
use crate::report::{self, Record};
use crate::sys::{self, PAGE_BYTES};
use crate::target::{Target, Way};

/// Operations that a worker remembers for its report.
const HISTORY: usize = 16384;

/// Page-aligned memory, for `O_DIRECT`.
#[derive(Debug)]
struct Buffer {
    memory: Vec<u8>,
    skip: usize,
}

impl Buffer {
    fn new() -> Self {
        let memory = vec![0; (MAX_IO_BYTES + PAGE_BYTES) as usize];
        let skip = memory.as_ptr().align_offset(PAGE_BYTES as usize);
        Self { memory, skip }
    }

    fn get(&mut self, len: usize) -> &mut [u8] {
        &mut self.memory[self.skip..self.skip + len]
    }
}

/// Counts of a worker.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// How often each kind.
    pub kinds: BTreeMap<Kind, u64>,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Bytes that were read and right.
    pub checked_bytes: u64,
}

/// A worker with its targets.
#[derive(Debug)]
pub struct Worker {
    index: usize,
    seed: u64,
    /// Files or parts of a disk.
    pub targets: Vec<Target>,
    chooser: Chooser,
    /// The folder that it trims.
    folder: Option<File>,
    got: Buffer,
    want: Vec<u8>,
    history: VecDeque<Record>,
    number: u32,
    begin: Instant,
    /// Counts of its operations.
    pub counts: Counts,
}

/// The seed of a worker: a number of the run's own sequence. Seeds that differ by the generator's
/// step would give all workers the same choices.
fn own_seed(seed: u64, index: usize) -> u64 {
    let mut seeds = Seeded::new(seed);
    (0..=index).map(|_| seeds.next_u64()).last().unwrap_or(seed)
}

impl Worker {
    /// A worker; `folder` is one of the file system that it may trim.
    #[must_use]
    pub fn new(index: usize, seed: u64, targets: Vec<Target>, folder: Option<File>) -> Self {
        let is_disk = targets.iter().any(|target| target.begin().is_some());
        Self {
            index,
            seed,
            targets,
            chooser: Chooser::new(own_seed(seed, index), is_disk, folder.is_some()),
            folder,
            got: Buffer::new(),
            want: Vec::new(),
            history: VecDeque::with_capacity(HISTORY),
            number: 0,
            begin: Instant::now(),
            counts: Counts::default(),
        }
    }

    /// Number of its last operation.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Does a number of operations, fewer once `stop` is set.
    ///
    /// # Errors
    /// A wrong byte, or an operation that failed.
    pub fn chapter(
        &mut self,
        operations: u32,
        calm: bool,
        stop: &AtomicBool,
    ) -> Result<(), FsxError> {
        for _ in 0..operations {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            let extent = |target: &Target| Extent {
                len_bytes: target.model.len_bytes(),
                max_len_bytes: target.max_len_bytes,
            };
            let extents: Vec<Extent> = self.targets.iter().map(extent).collect();
            let op = self.chooser.next(&extents, calm);
            self.number += 1;
            *self.counts.kinds.entry(op.kind).or_default() += 1;
            if self.history.len() == HISTORY {
                self.history.pop_front();
            }
            let begin_ms = self.begin.elapsed().as_millis() as u64;
            self.history.push_back(Record { number: self.number, begin_ms, op: op.clone() });
            self.apply(&op)?;
        }
        Ok(())
    }

    fn apply(&mut self, op: &Op) -> Result<(), FsxError> {
        let answer = match op.kind {
            Kind::Read => return self.read(op, Way::Buffered),
            Kind::ReadDirect => return self.read(op, Way::Direct),
            Kind::ReadMapped => return self.read(op, Way::Mapped),
            Kind::Discard => return self.discard(op),
            Kind::Evict => {
                let (first, last) = (op.range.start, op.range.end);
                let pages = first / PAGE_BYTES * PAGE_BYTES..last.next_multiple_of(PAGE_BYTES);
                let evicted = self.targets[op.target].evict(pages);
                self.done(op, evicted)?;
                return self.read(op, Way::Buffered);
            }
            Kind::Write => self.write(op, Way::Buffered),
            Kind::WriteDirect => self.write(op, Way::Direct),
            Kind::WriteMapped => self.write(op, Way::Mapped),
            Kind::Copy => self.copy(op),
            Kind::Reopen => self.targets[op.target].reopen(),
            Kind::Recreate => self.targets[op.target].recreate(),
            Kind::Trim => self.folder.as_ref().map_or(Ok(()), sys::trim),
            _ => change(&mut self.targets[op.target], op),
        };
        self.done(op, answer)
    }

    /// Turns a failure into one that tells what was done before.
    fn done(&self, op: &Op, answer: io::Result<()>) -> Result<(), FsxError> {
        answer.map_err(|source| FsxError::Operation {
            worker: self.index,
            number: self.number,
            what: op.to_string(),
            source,
            history: report::history(&self.history, op.target, &op.range),
        })
    }

    fn write(&mut self, op: &Op, way: Way) -> io::Result<()> {
        let target = &mut self.targets[op.target];
        let len = op.range.end - op.range.start;
        let content = Content::Written { file: target.number, generation: self.number, shift: 0 };
        let bytes = self.got.get(len as usize);
        content.fill(bytes, op.range.start);
        let sync = way == Way::Mapped && self.chooser.one_in(4);
        target.write(way, op.range.start, bytes, sync)?;
        target.model.set(op.range.clone(), content);
        self.counts.written_bytes += len;
        Ok(())
    }

    fn copy(&mut self, op: &Op) -> io::Result<()> {
        let Some((from, from_at)) = op.source else { return Ok(()) };
        let (source, target) = (&self.targets[from], &self.targets[op.target]);
        let (mut in_at, mut out_at) = (from_at, op.range.start);
        while out_at < op.range.end {
            let left = (op.range.end - out_at) as usize;
            let (file, to) = (source.file(), target.file());
            match copy_file_range(file, Some(&mut in_at), to, Some(&mut out_at), left)? {
                0 => return Err(io::Error::other("copied nothing before the source's end")),
                _ => continue,
            }
        }
        let len = op.range.end - op.range.start;
        let pieces = source.model.pieces(from_at..from_at + len);
        let model = &mut self.targets[op.target].model;
        model.copy(pieces, from_at, op.range.start);
        model.resize(model.len_bytes().max(op.range.end));
        self.counts.written_bytes += len;
        Ok(())
    }

    /// Reads a range and compares each byte.
    fn read(&mut self, op: &Op, way: Way) -> Result<(), FsxError> {
        let target = &self.targets[op.target];
        let got = self.got.get((op.range.end - op.range.start) as usize);
        let answer = target.read(way, op.range.start, got);
        let len = match answer {
            Ok(len) => len as u64,
            Err(error) => return self.done(op, Err(error)),
        };
        let end = op.range.end.min(target.model.len_bytes()).max(op.range.start);
        if op.range.start + len != end {
            let text = format!("read {len} bytes, there are {}", end - op.range.start);
            return self.done(op, Err(io::Error::other(text)));
        }
        self.compare(op, len as usize)
    }

    /// Compares what was read last with what must be there.
    fn compare(&mut self, op: &Op, len: usize) -> Result<(), FsxError> {
        let target = &self.targets[op.target];
        self.want.resize(len, 0);
        target.model.fill(&mut self.want, op.range.start);
        let got = &self.got.get(len)[..];
        if got == self.want {
            self.counts.checked_bytes += len as u64;
            return Ok(());
        }
        let run = report::Run { worker: self.index, seed: self.seed, number: self.number };
        let text = report::mismatch(&run, op, target, got, &self.want, &self.history);
        Err(FsxError::Mismatch(text))
    }

    /// Discards a range and looks at what is there now: each sector zeroes, or what was there
    /// before. Either must stay. Linux drops the range's dirty pages, so that they are written back
    /// first.
    fn discard(&mut self, op: &Op) -> Result<(), FsxError> {
        let len = (op.range.end - op.range.start) as usize;
        let target = &mut self.targets[op.target];
        let at = target.offset(op.range.start);
        let got = self.got.get(len);
        let answer = sys::write_back(target.file(), at, len as u64)
            .and_then(|()| sys::discard(target.file(), at, len as u64))
            .and_then(|()| target.read(Way::Direct, op.range.start, got).map(drop));
        for (index, sector) in got.chunks(crate::op::SECTOR_BYTES as usize).enumerate() {
            if sector.iter().all(|byte| *byte == 0) {
                let begin = op.range.start + index as u64 * crate::op::SECTOR_BYTES;
                target.model.set(begin..begin + sector.len() as u64, Content::Zero);
            }
        }
        self.done(op, answer)?;
        self.compare(op, len)
    }

    /// Flushes all targets, drops them from the page cache, and reads and checks all of them.
    ///
    /// # Errors
    /// As [`Worker::chapter`].
    pub fn check_all(&mut self) -> Result<(), FsxError> {
        self.number += 1;
        for target in 0..self.targets.len() {
            let len = self.targets[target].model.len_bytes();
            let whole = Op { kind: Kind::Read, target, range: 0..len, source: None };
            let it = &self.targets[target];
            let ready = it.file().sync_all().and_then(|()| it.evict(0..len));
            self.done(&whole, ready.and_then(|()| it.check_len()))?;
            for at in (0..len).step_by(MAX_IO_BYTES as usize) {
                let range = at..(at + MAX_IO_BYTES).min(len);
                self.read(&Op { range, ..whole.clone() }, Way::Buffered)?;
            }
        }
        Ok(())
    }
}

/// Changes a file or disk without bytes of ours.
fn change(target: &mut Target, op: &Op) -> io::Result<()> {
    let Range { start, end } = op.range;
    let (at, len) = (target.offset(start), end - start);
    let inside = start..end.min(target.model.len_bytes()).max(start);
    let keep = FallocateFlags::KEEP_SIZE;
    let file = target.file();
    match op.kind {
        Kind::Truncate => {
            ftruncate(file, start)?;
            target.model.resize(start);
            target.check_len()
        }
        Kind::Allocate => {
            fallocate(file, FallocateFlags::empty(), at, len)?;
            target.model.resize(target.model.len_bytes().max(end));
            target.check_len()
        }
        Kind::AllocateKeep => Ok(fallocate(file, keep, at, len)?),
        Kind::Punch => {
            fallocate(file, FallocateFlags::PUNCH_HOLE | keep, at, len)?;
            target.model.set(inside, Content::Zero);
            Ok(())
        }
        Kind::Zero => {
            fallocate(file, FallocateFlags::ZERO_RANGE, at, len)?;
            target.model.set(op.range.clone(), Content::Zero);
            Ok(())
        }
        Kind::ZeroKeep => {
            fallocate(file, FallocateFlags::ZERO_RANGE | keep, at, len)?;
            target.model.set(inside, Content::Zero);
            Ok(())
        }
        Kind::ZeroOut => {
            sys::zero_out(file, at, len)?;
            target.model.set(op.range.clone(), Content::Zero);
            Ok(())
        }
        Kind::WriteBack => sys::write_back(file, at, len),
        Kind::Sync => file.sync_all(),
        _ => file.sync_data(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_share_no_choices() {
        for seed in 0..8 {
            let mut all = std::collections::HashSet::new();
            for index in 0..8 {
                let mut random = Seeded::new(own_seed(seed, index));
                assert!((0..100).all(|_| all.insert(random.next_u64())), "seed {seed}, {index}");
            }
        }
    }
}
