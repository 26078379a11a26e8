//! Log: records staged, appended, made durable.

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use guest_abi::table::status;
use sdk::{Errno, File, Host, open};

use crate::config::Config;
use crate::fail::{Fail, fail};
use crate::record::{self, HEAD_BYTES, TAIL_BYTES, kind};
use crate::record_body::CHECK_BYTES;
use crate::reserve::{Purpose, Reserve, StoreSize};
use crate::segment::{Usage, name};
use crate::slot::Loc;

/// Place in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Place {
    /// Number of the segment.
    pub segment: u32,
    /// Byte of the segment.
    pub offset: u32,
}

/// Log.
#[derive(Debug, Default)]
pub struct Log {
    /// Use of its segments, and of memory.
    pub usage: Usage,
    /// Records that are not appended yet.
    staged: Vec<u8>,
    /// Range of each staged record in `staged`, and its purpose.
    ranges: Vec<(Range<usize>, Purpose)>,
    /// Number of the segment that is appended to.
    current: u32,
    /// Length of the current segment in bytes.
    len: u64,
    /// Bytes of the current segment that are durable for certain.
    synced: u64,
    /// Number of the next record.
    number: u64,
    /// Bytes appended since the start.
    pub appended: u64,
    /// Reason why nothing can be written any more.
    failed: Option<String>,
    /// Length of the current segment from which on another one is begun.
    pub segment_bytes: u64,
    /// Space for records that free space on a full disk.
    pub reserve: Reserve,
}

impl Log {
    /// Goes on after a segment that was read at the start.
    pub fn resume(&mut self, segment: u32, len: u64, number: u64) {
        (self.current, self.len, self.synced, self.number) = (segment, len, len, number);
    }

    /// Place of the next record, once all staged ones are appended.
    pub fn end(&self) -> Place {
        Place { segment: self.current, offset: self.len as u32 }
    }

    /// Number of the next record.
    pub fn next_number(&self) -> u64 {
        self.number
    }

    /// Fails if nothing can be written any more.
    pub fn check_writable(&self) -> Result<(), Fail> {
        match &self.failed {
            Some(why) => Err(fail!(STORAGE, "the log cannot be written since: {why}")),
            None => Ok(()),
        }
    }

    /// Time at which something is to be done for the reserve, if there is anything.
    pub fn reserve_due_ms(&self) -> Option<u64> {
        self.reserve.due_ms(self.appended).filter(|_| self.failed.is_none())
    }

    /// Bytes of the staged records.
    pub fn staged_bytes(&self) -> usize {
        self.staged.len()
    }

    fn failed(&mut self, what: &str, errno: Errno) -> Fail {
        let fail = Fail::storage(what, errno);
        if errno != Errno::NOSPC {
            self.failed.get_or_insert_with(|| fail.text.clone());
        }
        fail
    }

    /// Begins a segment, once the last one is durable: so only the last one can be torn.
    pub fn rotate(&mut self, host: &mut dyn Host) -> Result<(), Fail> {
        if self.current > 0 {
            self.sync(host)?;
        }
        let next = self.current + 1;
        let made = self.make(host, next);
        let file = match made {
            Ok(file) => file,
            Err(errno) => {
                let _ = host.remove(&name(next));
                return Err(self.failed("a new segment of the log", errno));
            }
        };
        self.usage.add(host, next, file);
        (self.current, self.synced) = (next, 0);
        self.len = (HEAD_BYTES + TAIL_BYTES) as u64;
        self.number += 1;
        self.set_len();
        Ok(())
    }

    fn make(&mut self, host: &mut dyn Host, segment: u32) -> Result<File, Errno> {
        let file = host.open(&name(segment), open::CREATE | open::TRUNCATE)?;
        let mut head = Vec::new();
        let at = record::begin(&mut head);
        record::seal(&mut head, at, kind::SEGMENT, segment, 0, self.number);
        match host.append(file, &head) {
            Ok(0) => Ok(file),
            Ok(_) => Err(Errno::IO),
            Err(errno) => {
                host.close(file);
                Err(errno)
            }
        }
    }

    fn set_len(&mut self) {
        let (current, len) = (self.current, self.len);
        self.usage.segments.entry(current).or_default().len = len;
    }

    /// Makes the current segment durable.
    pub fn sync(&mut self, host: &mut dyn Host) -> Result<(), Fail> {
        self.check_writable()?;
        let current = self.current;
        let synced = self.usage.file(host, current).and_then(|file| host.sync(file));
        synced.map_err(|errno| self.failed("the log's sync", errno))?;
        self.synced = self.len;
        Ok(())
    }

    /// Stages a record. `body` appends its body.
    pub fn stage(
        &mut self,
        host: &mut dyn Host,
        kind: u32,
        purpose: Purpose,
        body: impl FnOnce(&mut Vec<u8>),
    ) -> Result<(), Fail> {
        self.check_writable()?;
        self.reserve.check(purpose)?;
        if self.staged.is_empty() && (self.current == 0 || self.len >= self.segment_bytes) {
            let rotated = self.rotate(host);
            // Without room for another one this one goes on, for a while.
            if self.current == 0
                || self.check_writable().is_err()
                || self.len > u64::from(u32::MAX / 2)
            {
                rotated?;
            }
        }
        let at = record::begin(&mut self.staged);
        body(&mut self.staged);
        record::seal(&mut self.staged, at, kind, self.current, self.synced as u32, self.number);
        self.number += 1;
        self.ranges.push((at..self.staged.len(), purpose));
        Ok(())
    }

    /// Appends all staged records, and returns for each the place of its body, or why it is not
    /// there. If they do not fit together, each is tried alone.
    pub fn flush(&mut self, host: &mut dyn Host) -> Vec<Result<Place, Fail>> {
        let mut staged = core::mem::take(&mut self.staged);
        let ranges = core::mem::take(&mut self.ranges);
        let first = self.number.saturating_sub(ranges.len() as u64);
        let mut results = Vec::with_capacity(ranges.len());
        if ranges.len() > 1
            && let Ok(at) = self.append(host, &staged)
        {
            let place = |range: &Range<usize>| Ok(self.body_place(at, range.start));
            results.extend(ranges.iter().map(|(range, _)| place(range)));
        } else {
            self.number = first;
            for (range, purpose) in &ranges {
                let number = self.number;
                let record = staged.get_mut(range.clone()).unwrap_or(&mut []);
                // Some before it may be missing.
                record::renumber(record, number);
                let appended = self.append_alone(host, record, *purpose);
                self.number = number + u64::from(appended.is_ok());
                results.push(appended.map(|at| self.body_place(at, 0)));
            }
        }
        staged.clear();
        if staged.capacity() <= 4 << 20 {
            self.staged = staged;
        }
        results
    }

    fn body_place(&self, at: u64, start: usize) -> Place {
        let offset = at as u32 + (start + HEAD_BYTES) as u32;
        Place { segment: self.current, offset }
    }

    /// Stages and appends one record; nothing else may be staged.
    pub fn write(
        &mut self,
        host: &mut dyn Host,
        kind: u32,
        purpose: Purpose,
        body: impl FnOnce(&mut Vec<u8>),
    ) -> Result<Place, Fail> {
        self.stage(host, kind, purpose, body)?;
        self.flush(host).pop().unwrap_or_else(|| Err(fail!(STORAGE, "the log: nothing staged")))
    }

    fn append_alone(
        &mut self,
        host: &mut dyn Host,
        record: &[u8],
        purpose: Purpose,
    ) -> Result<u64, Fail> {
        self.reserve.check(purpose)?;
        let appended = self.append(host, record);
        match &appended {
            Err(fail) if fail.status == status::NO_SPACE => {}
            _ => return appended,
        }
        if self.reserve.give(host, purpose) { self.append(host, record) } else { appended }
    }

    fn append(&mut self, host: &mut dyn Host, bytes: &[u8]) -> Result<u64, Fail> {
        self.check_writable()?;
        let current = self.current;
        let file = self.usage.file(host, current);
        let file = file.map_err(|errno| self.failed("the log", errno))?;
        match host.append(file, bytes) {
            Ok(at) if at == self.len => {
                self.len += bytes.len() as u64;
                self.appended += bytes.len() as u64;
                self.set_len();
                Ok(at)
            }
            Ok(at) => {
                self.failed.get_or_insert_with(|| {
                    alloc::format!("segment {current} was {at} bytes long, not {}", self.len)
                });
                Err(fail!(STORAGE, "the log: somebody else writes to it ({at}, not {})", self.len))
            }
            Err(errno) => {
                let fail = self.failed("the log", errno);
                self.cut(host, file);
                Err(fail)
            }
        }
    }

    /// Cuts off what an append that failed may have left.
    fn cut(&mut self, host: &mut dyn Host, file: File) {
        let len = self.len;
        let cut = match host.len(file) {
            Ok(there) if there == len => Ok(()),
            Ok(_) => host.truncate(file, len).and_then(|()| host.sync(file)),
            Err(errno) => Err(errno),
        };
        if let Err(errno) = cut {
            self.failed.get_or_insert_with(|| alloc::format!("the log's tail: {errno}"));
        }
    }

    /// Adjusts the reserve to the store's size, and takes some of what is missing of it.
    pub fn keep_reserve(&mut self, host: &mut dyn Host, config: &Config) {
        let size = StoreSize {
            appended: self.appended,
            log: self.usage.segments.values().map(|s| s.len).sum(),
            has_old_segments: self.usage.segments.len() > 1,
            memory: self.usage.memory,
        };
        self.reserve.keep(host, &size, config);
    }
}

/// Failure to read a value.
pub fn unreadable(loc: Loc, errno: Errno) -> Fail {
    let Loc { segment, offset, len } = loc;
    let why = if errno == Errno::BADMSG { "its bytes were changed" } else { "it cannot be read" };
    fail!(STORAGE, "value of {len} bytes at byte {offset} of {}: {why} ({errno})", name(segment))
}

/// Whether a value and the check behind it belong together.
pub fn is_intact(bytes: &[u8]) -> bool {
    let Some((value, check)) = bytes.split_last_chunk::<CHECK_BYTES>() else { return false };
    crate::record_body::check_value(value) == *check
}
