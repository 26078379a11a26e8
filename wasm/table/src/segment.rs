//! Segments of the log: their files, and how much of each is still in use.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;

use sdk::{Errno, File, Host};

use crate::slot::{Loc, Slot};

/// Limit of segments that are open at a time.
const MAX_OPEN: usize = 128;

/// Segment: one file of the log.
#[derive(Debug, Default)]
pub struct Segment {
    file: Option<File>,
    /// When it was used last, by `Usage::clock`.
    used: u64,
    /// Length of the file in bytes.
    pub len: u64,
    /// Bytes of all values in it that are not in memory.
    pub values: u64,
    /// Bytes of the values that a key still refers to.
    pub live: u64,
    /// Number of transactions without an end that have values in it.
    pub pins: u32,
}

impl Segment {
    /// Whether nothing refers to it.
    pub fn is_unused(&self) -> bool {
        self.live == 0 && self.pins == 0
    }
}

/// Use of the log's segments and of memory.
#[derive(Debug, Default)]
pub struct Usage {
    /// Segments by number.
    pub segments: BTreeMap<u32, Segment>,
    /// Estimate of the memory in use, in bytes, without locks.
    pub memory: u64,
    open: usize,
    clock: u64,
}

/// Name of a segment's file.
pub fn name(segment: u32) -> String {
    format!("log-{segment:016x}")
}

impl Usage {
    /// Counts the value of a version that is there now.
    pub fn keep(&mut self, slot: &Slot) {
        match slot {
            Slot::At(loc) => {
                self.segments.entry(loc.segment).or_default().live += u64::from(loc.len)
            }
            Slot::Inline(bytes) => self.memory += bytes.len() as u64 + 16,
            Slot::Deleted | Slot::Own { .. } => {}
        }
    }

    /// Discounts the value of a version that is gone.
    pub fn forget(&mut self, slot: &Slot) {
        match slot {
            Slot::At(loc) => {
                if let Some(segment) = self.segments.get_mut(&loc.segment) {
                    segment.live = segment.live.saturating_sub(u64::from(loc.len));
                }
            }
            Slot::Inline(bytes) => {
                self.memory = self.memory.saturating_sub(bytes.len() as u64 + 16);
            }
            Slot::Deleted | Slot::Own { .. } => {}
        }
    }

    /// Keeps a segment from removal: a transaction without an end has values in it.
    pub fn pin(&mut self, segment: u32) {
        let pins = &mut self.segments.entry(segment).or_default().pins;
        *pins = pins.saturating_add(1);
    }

    /// Takes one pin of a segment back: the transaction has ended.
    pub fn unpin(&mut self, segment: u32) {
        if let Some(segment) = self.segments.get_mut(&segment) {
            segment.pins = segment.pins.saturating_sub(1);
        }
    }

    /// Opens a segment's file, if it is not open.
    pub fn file(&mut self, host: &mut dyn Host, number: u32) -> Result<File, Errno> {
        self.clock += 1;
        let clock = self.clock;
        let segment = self.segments.get_mut(&number).ok_or(Errno::NOENT)?;
        segment.used = clock;
        if let Some(file) = segment.file {
            return Ok(file);
        }
        let file = host.open(&name(number), 0)?;
        segment.file = Some(file);
        self.opened(host, number);
        Ok(file)
    }

    /// Adds a new segment, whose file is open.
    pub fn add(&mut self, host: &mut dyn Host, number: u32, file: File) {
        self.clock += 1;
        let segment = self.segments.entry(number).or_default();
        (segment.file, segment.used) = (Some(file), self.clock);
        self.opened(host, number);
    }

    /// Counts one more open file, and closes another one if there are too many.
    fn opened(&mut self, host: &mut dyn Host, number: u32) {
        self.open += 1;
        if self.open > MAX_OPEN {
            self.close_one(host, number);
        }
    }

    fn close_one(&mut self, host: &mut dyn Host, but: u32) {
        let last = self.segments.last_key_value().map(|(n, _)| *n);
        let others = self.segments.iter_mut().filter(|(n, _)| **n != but && Some(**n) != last);
        let open = others.filter(|(_, s)| s.file.is_some());
        if let Some((_, segment)) = open.min_by_key(|(_, s)| s.used)
            && let Some(file) = segment.file.take()
        {
            host.close(file);
            self.open = self.open.saturating_sub(1);
        }
    }

    /// Removes a segment's file.
    pub fn remove(&mut self, host: &mut dyn Host, number: u32) -> Result<(), Errno> {
        if let Some(file) = self.segments.remove(&number).and_then(|s| s.file) {
            host.close(file);
            self.open = self.open.saturating_sub(1);
        }
        host.remove(&name(number))
    }

    /// Reads bytes of a segment: all of `into`, or it fails.
    pub fn read(&mut self, host: &mut dyn Host, loc: Loc, into: &mut [u8]) -> Result<(), Errno> {
        let file = self.file(host, loc.segment)?;
        let read = host.read(file, u64::from(loc.offset), into)?;
        if read == into.len() { Ok(()) } else { Err(Errno::BADMSG) }
    }
}
