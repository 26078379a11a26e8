//! Space that is kept for when the disk is full: without it nothing could be done that frees some.
//!
//! Three files hold it, each for one purpose: records of deletions and the like, compaction, a checkpoint.
//! The first has its bytes written, so that blocks are there for it. The others are holes: they count
//! against what the host allows the module, and cost no writing. Where it is the host's own disk that is
//! full, they are worth nothing.
//!
//! When one of these finds no room its file is emptied, and then those before it. From then on, and where a
//! file cannot grow, the store is *short*: changes that need space fail until all files have their lengths
//! again, which is tried every second. What was given to a checkpoint is not for compaction, and what was
//! given to that not for deletions: they wait until a checkpoint is made, which frees more than was taken.

use alloc::vec::Vec;

use guest_abi::module_call::log as level;
use sdk::{Errno, File, Host, open};

use crate::fail::{Fail, fail};
use crate::store::Store;

/// What is written, and how long it may go on when the disk is full: the longer the higher.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// A change that needs space.
    Change,
    /// A deletion, the end of a prepared transaction: what frees space.
    Free,
    /// Compaction.
    Move,
    /// A checkpoint.
    Checkpoint,
}

/// The files, in the order of [`Purpose`].
const NAMES: [&str; 3] = ["reserve-log", "reserve-moved", "reserve-checkpoint"];
const LOG: usize = 0;
const MOVED: usize = 1;
const CHECKPOINT: usize = 2;
/// The log's part is a sixteenth of the log.
const SHARE: u64 = 16;
/// Lengths are multiples of such a part of the largest that the log's part may have.
const UNITS: u64 = 64;
/// Most bytes that are written at a time.
const PIECE_BYTES: u64 = 64 << 10;
/// After a failure the next try waits.
const PAUSE_MS: u64 = 1000;

/// One of the files.
#[derive(Debug, Default)]
struct Part {
    file: Option<File>,
    len: u64,
    want: u64,
    /// It was given away, and what it was given for is not done.
    is_given: bool,
}

/// The reserve.
#[derive(Debug, Default)]
pub struct Reserve {
    parts: [Part; 3],
    /// The disk was full, and not all of it is there again.
    is_short: bool,
    /// A record did not fit: perhaps something can be removed.
    was_full: bool,
    /// Its files fail: there is none.
    is_off: bool,
    /// Not before this time.
    after_ms: u64,
    /// How long the parts must be is looked at again when so much is in the log.
    look_at: u64,
}

impl Reserve {
    /// Fails if the disk is full, as far as that purpose goes.
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

    /// Something did not fit. True: some of the reserve is there for it now, its own part first.
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
        self.falls_short(host);
        true
    }

    fn falls_short(&mut self, host: &mut dyn Host) {
        if !core::mem::replace(&mut self.is_short, true) {
            host.log(level::WARN, "the disk is full: only what frees space is written from now on");
        }
        self.after_ms = host.now_ms() + PAUSE_MS;
    }

    /// What was given away has done its work, or is not enough: what is free is for all again that free space.
    pub fn take_back(&mut self) {
        self.parts.iter_mut().for_each(|part| part.is_given = false);
    }

    /// When something is to be done, if anything.
    pub fn due_ms(&self, appended: u64) -> Option<u64> {
        let changed = self.was_full || appended >= self.look_at;
        let wants = self.is_short || self.missing() > 0 || changed;
        (wants && !self.is_off).then_some(self.after_ms)
    }

    /// Takes some of what is missing.
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
}

/// Bytes that no disk makes smaller.
fn noise(from: u64, len: u64) -> Vec<u8> {
    let words = (from..from + len).step_by(8);
    let bytes = words.flat_map(|at| xxhash_rust::xxh3::xxh3_64(&at.to_le_bytes()).to_le_bytes());
    bytes.take(len as usize).collect()
}

impl Store {
    /// Sees to it that the reserve is as large as it must be.
    pub(crate) fn keep_reserve(&mut self, host: &mut dyn Host) {
        let appended = self.log.appended;
        if self.log.reserve_due_ms().is_none_or(|due_ms| host.now_ms() < due_ms) {
            return;
        }
        if core::mem::take(&mut self.log.reserve.was_full) || self.log.reserve.is_short {
            self.checkpoint_wanted |= self.removable_bytes() > 0;
            // What frees space comes first.
            if self.checkpoint_wanted || self.checkpoint.is_some() || self.compaction.is_some() {
                self.log.reserve.after_ms = host.now_ms() + PAUSE_MS;
                return;
            }
        }
        let most = self.config.reserve_bytes;
        let unit = (most / UNITS).max(1);
        let is_long = self.log.books.segments.len() > 1;
        let log: u64 = self.log.books.segments.values().map(|s| s.len).sum();
        let memory = self.log.books.memory;
        let reserve = &mut self.log.reserve;
        reserve.look_at = appended + unit;
        if most > 0 {
            reserve.parts[LOG].want = (log / SHARE).next_multiple_of(unit).clamp(unit, most);
            // Of a segment that is compacted, less than half is copied. The last one never is.
            let half = self.config.segment_bytes / 2;
            reserve.parts[MOVED].want = if is_long { half } else { 0 };
            // What a checkpoint has of an entry is less than what the entry costs in memory.
            let step = unit.max(memory.next_power_of_two() / SHARE);
            reserve.parts[CHECKPOINT].want = memory.next_multiple_of(step).max(unit);
        }
        match reserve.take(host) {
            Ok(()) if reserve.missing() > 0 => {}
            Ok(()) => {
                if core::mem::take(&mut reserve.is_short) {
                    host.log(level::INFO, "there is space on the disk again");
                }
            }
            Err(Errno::NOSPC) => reserve.falls_short(host),
            Err(errno) => {
                *reserve = Reserve { is_off: true, ..Reserve::default() };
                let text = alloc::format!("there is no reserve for a full disk: {errno}");
                host.log(level::WARN, &text);
            }
        }
    }

    /// What the next checkpoint would free.
    fn removable_bytes(&self) -> u64 {
        let first = self.replay_would_begin().segment;
        let old = self.log.books.segments.range(..first);
        old.filter(|(_, s)| s.live == 0 && s.pins == 0).map(|(_, s)| s.len).sum()
    }
}
