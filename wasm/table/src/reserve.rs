//! Space that is kept for when the disk is full: without it nothing could be done that frees some.
//!
//! Three files hold it, each for one purpose: records of deletions and the like, compaction, a
//! checkpoint. The first has its bytes written, so that blocks are there for it. The others are
//! holes: they count against what the host allows the module, and cost no writing. Where it is the
//! host's own disk that is full, they are worth nothing.
//!
//! When one of these finds no room its file is emptied, and then those before it. From then on, and
//! where a file cannot grow, the store is *short*: changes that need space fail until all files
//! have their lengths again, which is tried every second. What was given to a checkpoint is not for
//! compaction, and what was given to that not for deletions: they wait until a checkpoint is made,
//! which frees more than was taken.

use alloc::vec::Vec;

use guest_abi::module_call::log as level;
use sdk::{Errno, File, Host, open};

use crate::config::Config;
use crate::fail::{Fail, fail};

/// Purpose of what is written: the higher, the longer it may go on when the disk is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// Change that needs space.
    Change,
    /// Deletion, or the end of a prepared transaction: it frees space.
    Free,
    /// Compaction.
    Move,
    /// Checkpoint.
    Checkpoint,
}

/// Names of the files, in the order of [`Purpose`].
const NAMES: [&str; 3] = ["reserve-log", "reserve-moved", "reserve-checkpoint"];
const LOG: usize = 0;
const MOVED: usize = 1;
const CHECKPOINT: usize = 2;
/// Size of the log by that of the log's part.
const SHARE: u64 = 16;
/// Largest length of the log's part by the unit of all lengths.
const UNITS: u64 = 64;
/// Limit of bytes that are written at a time.
const PIECE_BYTES: u64 = 64 << 10;
/// Wait for the next try after a failure.
const PAUSE_MS: u64 = 1000;

/// File of the reserve.
#[derive(Debug, Default)]
struct Part {
    file: Option<File>,
    len: u64,
    /// Length that it is to have.
    want: u64,
    /// Whether it was given away, and what it was given for is not done.
    is_given: bool,
}

/// Size of the store, from which the lengths of the parts follow.
#[derive(Debug, Clone, Copy)]
pub struct StoreSize {
    /// Bytes appended to the log since the start.
    pub appended: u64,
    /// Bytes of all segments of the log.
    pub log: u64,
    /// Whether there are segments beside the one that is written.
    pub has_old_segments: bool,
    /// Bytes of memory in use.
    pub memory: u64,
}

/// Reserve of space.
#[derive(Debug, Default)]
pub struct Reserve {
    parts: [Part; 3],
    /// Whether the disk was full, and not all of the reserve is there again.
    is_short: bool,
    /// Whether a record did not fit: perhaps something can be removed.
    was_full: bool,
    /// Whether its files failed: there is no reserve.
    is_off: bool,
    /// Time before which nothing is tried.
    after_ms: u64,
    /// Bytes appended to the log from which on the lengths are computed again.
    resize_at: u64,
}

impl Reserve {
    /// Fails if the disk is full and the purpose has to wait.
    pub fn check(&self, purpose: Purpose) -> Result<(), Fail> {
        let given = self.parts.iter().rposition(|part| part.is_given).map_or(0, |part| part + 1);
        if purpose as usize >= given && (purpose > Purpose::Change || !self.is_short) {
            return Ok(());
        }
        let missing = self.missing();
        Err(fail!(
            NO_SPACE,
            "the disk is full: until {missing} bytes are free for the reserve, only reads, deletions and what \
             else frees space go on"
        ))
    }

    fn missing(&self) -> u64 {
        self.parts.iter().map(|part| part.want.saturating_sub(part.len)).sum()
    }

    /// Gives space to a record that did not fit, from its own part first. True: there was some.
    pub fn give(&mut self, host: &mut dyn Host, purpose: Purpose) -> bool {
        self.was_full = true;
        let parts = self.parts.get_mut(..purpose as usize).unwrap_or(&mut []);
        let Some(part) = parts.iter_mut().rev().find(|part| part.len > 0) else { return false };
        if part.file.is_none_or(|file| host.truncate(file, 0).is_err()) {
            return false;
        }
        part.len = 0;
        if let Some(own) = parts.last_mut() {
            own.is_given = true;
        }
        self.become_short(host);
        true
    }

    fn become_short(&mut self, host: &mut dyn Host) {
        if !core::mem::replace(&mut self.is_short, true) {
            host.log(level::WARN, "the disk is full: only what frees space is written from now on");
        }
        self.after_ms = host.now_ms() + PAUSE_MS;
    }

    /// Ends what parts were given for: it is done, or they do not suffice. Free space is for all
    /// again that free some.
    pub fn take_back(&mut self) {
        self.parts.iter_mut().for_each(|part| part.is_given = false);
    }

    /// Time at which something is to be done, if there is anything.
    pub fn due_ms(&self, appended: u64) -> Option<u64> {
        let changed = self.was_full || appended >= self.resize_at;
        let is_due = self.is_short || self.missing() > 0 || changed;
        (is_due && !self.is_off).then_some(self.after_ms)
    }

    /// Takes some of what is missing of the parts.
    fn take(&mut self, host: &mut dyn Host) -> Result<(), Errno> {
        for (which, part) in self.parts.iter_mut().enumerate().rev() {
            let file = match part.file {
                Some(file) => file,
                None => {
                    let file = host.open(NAMES[which], open::CREATE)?;
                    part.file = Some(file);
                    part.len = host.len(file)?;
                    file
                }
            };
            if part.len > 2 * part.want || (which != LOG && part.len < part.want) {
                host.truncate(file, part.want)?;
                part.len = part.want;
            } else if part.len < part.want {
                let piece = noise(part.len, (part.want - part.len).min(PIECE_BYTES));
                host.append(file, &piece)?;
                part.len += piece.len() as u64;
            }
            part.is_given &= part.len < part.want;
        }
        Ok(())
    }

    /// Whether a record did not fit lately, or the reserve is short. The first is asked once.
    pub fn is_pressed(&mut self) -> bool {
        core::mem::take(&mut self.was_full) || self.is_short
    }

    /// Waits before the next try.
    pub fn postpone(&mut self, now_ms: u64) {
        self.after_ms = now_ms + PAUSE_MS;
    }

    /// Computes the lengths of the parts, and takes some of what is missing.
    pub fn keep(&mut self, host: &mut dyn Host, size: &StoreSize, config: &Config) {
        let most = config.reserve_bytes;
        let unit = (most / UNITS).max(1);
        self.resize_at = size.appended + unit;
        if most > 0 {
            self.parts[LOG].want = (size.log / SHARE).next_multiple_of(unit).clamp(unit, most);
            // Of a segment that is compacted, less than half is copied. The last one never is.
            let half = config.segment_bytes / 2;
            self.parts[MOVED].want = if size.has_old_segments { half } else { 0 };
            // An entry is shorter in a checkpoint than what it costs in memory.
            let step = unit.max(size.memory.next_power_of_two() / SHARE);
            self.parts[CHECKPOINT].want = size.memory.next_multiple_of(step).max(unit);
        }
        match self.take(host) {
            Ok(()) if self.missing() > 0 => {}
            Ok(()) => {
                if core::mem::take(&mut self.is_short) {
                    host.log(level::INFO, "there is space on the disk again");
                }
            }
            Err(Errno::NOSPC) => self.become_short(host),
            Err(errno) => {
                *self = Self { is_off: true, ..Self::default() };
                let text = alloc::format!("there is no reserve for a full disk: {errno}");
                host.log(level::WARN, &text);
            }
        }
    }
}

/// Bytes that no disk can compress.
fn noise(from: u64, len: u64) -> Vec<u8> {
    let words = (from..from + len).step_by(8);
    let bytes = words.flat_map(|at| xxhash_rust::xxh3::xxh3_64(&at.to_le_bytes()).to_le_bytes());
    bytes.take(len as usize).collect()
}
