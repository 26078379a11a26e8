//! A file without a lease as a pipe's source: the guest reads it, range by range, over placeholders, and
//! the bytes are copied where its disk is read. They wait in memory, as the file may change at any time:
//! what the peer has not acknowledged must not change with it, and the blocks may be another file's soon.
//!
//! What did not pass such a disk (holes, what is not in whole blocks) is asked for again, as bytes.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use block::Placed;
use guest_abi::Reason;
use guest_abi::pipe::{Taken, take};
use rustix::net::{SendFlags, send};

use crate::feed::Fed;
use crate::job::Job;
use crate::limits::{BUFFER_BYTES, MAX_PIECES, MIN_READ_BYTES, OPEN_TAKES, QUANTUM_BYTES};
use crate::message::Said;
use crate::page_cache::is_cached;
use crate::places::{PlacedFile, fetch};
use crate::takes::{self, Take};

/// See the module's text. Offsets are those of the pipe.
pub(crate) struct Given {
    file: PlacedFile,
    /// How far the pipe goes at most.
    len_bytes: u64,
    /// The guest has it in memory: the host must not read its disk for it.
    is_cached: bool,
    /// The host has read something.
    has_copied: bool,
    /// Bytes before are asked for, or have gone.
    asked: u64,
    /// What was asked for and has not gone, in order and without gaps.
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that have gone.
    gone_bytes: usize,
    /// Memory of pieces that have gone.
    spare: Vec<Vec<u8>>,
    /// Why nothing comes behind the pieces.
    ended: Option<Reason>,
    /// More reads wait than there was time for.
    has_more: bool,
}

/// A range that was asked for.
struct Piece {
    /// What is there of it.
    take: Take,
    bytes: Vec<u8>,
    /// The guest reads it over placeholders.
    is_open: bool,
    /// What the guest is asked for as bytes: the first of them now.
    missed: VecDeque<Take>,
}

impl Piece {
    fn new(take: Take, mut bytes: Vec<u8>) -> Self {
        bytes.resize(take.len_bytes() as usize, 0);
        let is_open = take.how == take::PLACES;
        let missed = if is_open { VecDeque::new() } else { VecDeque::from([take.clone()]) };
        Self { take, bytes, is_open, missed }
    }

    /// Where a range of the pipe is put; none: it is not of this piece.
    fn room(&mut self, at: u64, len_bytes: usize) -> Option<&mut [u8]> {
        let from = usize::try_from(at.checked_sub(self.take.range.start)?).ok()?;
        self.bytes.get_mut(from..from.checked_add(len_bytes)?)
    }

    fn is_whole(&self) -> bool {
        !self.is_open && self.missed.is_empty()
    }

    /// Whether the guest was asked for what begins there, and has not answered.
    fn awaits(&self, at: u64) -> bool {
        let of_bytes = self.missed.front().is_some_and(|missed| missed.range.start == at);
        if self.is_open { self.take.range.start == at } else { of_bytes }
    }
}

impl Given {
    /// At most so many bytes of a file.
    pub fn new(file: PlacedFile, len_bytes: u64, is_cached: bool) -> Self {
        Self {
            file,
            len_bytes,
            is_cached,
            has_copied: false,
            asked: 0,
            pieces: VecDeque::with_capacity(MAX_PIECES),
            gone_bytes: 0,
            spare: Vec::new(),
            ended: None,
            has_more: false,
        }
    }

    /// Why it ends before its end, if it does.
    pub fn ended(&self) -> Option<Reason> {
        self.ended
    }

    /// Whether it is to have another turn soon.
    pub fn has_more(&self) -> bool {
        self.has_more
    }

    /// One turn of copying, listening and asking. A guest can read the same again and again: others have
    /// their turn too.
    pub fn turn(&mut self, job: &Job) {
        let mut copied = 0;
        self.has_more = false;
        while let Some(read) = self.file.placing.next() {
            copied += read.len_bytes();
            self.copy(read);
            if copied >= QUANTUM_BYTES as u64 {
                self.has_more = true;
                break;
            }
        }
        while let Some(said) = job.heard() {
            match said {
                Said::Given(given, bytes) => self.hear(&given, &bytes, job),
                Said::Own(_) | Said::Taken(_) => self.end(0, Reason::Malformed),
            }
        }
        self.ask(job);
    }

    /// Copies what the guest reads over placeholders.
    fn copy(&mut self, read: Placed) {
        let (at, len) = (read.at(), read.len_bytes());
        let is_first = !std::mem::replace(&mut self.has_copied, true);
        if self.is_cached && is_first && !is_any_cached(&read) {
            self.end(0, Reason::Cached);
            return read.complete(Ok(()));
        }
        // One that is not asked for any more nobody misses. What cannot be read here the guest is asked for:
        // then it is told what its disk says.
        let piece = self.pieces.iter_mut().find(|piece| piece.take.range.contains(&at));
        if let Some(piece) = piece
            && let Some(room) = piece.room(at, len as usize)
            && fetch(&read, room).is_ok()
        {
            piece.take.see(at..at + len);
        }
        read.complete(Ok(()));
    }

    /// The guest has read what it was asked for.
    fn hear(&mut self, given: &Taken, bytes: &[u8], job: &Job) {
        let (at, len) = (given.at.get(), u64::from(given.len_bytes.get()));
        let Some(index) = self.pieces.iter().position(|piece| piece.awaits(at)) else { return };
        let piece = &mut self.pieces[index];
        let wanted = match piece.missed.front() {
            Some(missed) if !piece.is_open => missed.len_bytes(),
            _ => piece.take.len_bytes(),
        };
        if given.errno.get() != 0 || len > wanted || (!piece.is_open && bytes.len() as u64 != len) {
            return self.end(at, Reason::DiskFailed);
        }
        if len < wanted {
            self.end(at + len, Reason::EndOfFile);
        }
        // It may have been all of it.
        let Some(piece) = self.pieces.get_mut(index) else { return };
        if std::mem::take(&mut piece.is_open) {
            self.file.placing.close(at);
            piece.missed.extend(piece.take.missed());
        } else if let Some(room) = piece.room(at, bytes.len()) {
            room.copy_from_slice(bytes);
            piece.missed.pop_front();
        }
        if let Some(missed) = piece.missed.front() {
            job.agent.give(job.id, missed);
        }
    }

    /// Nothing comes from `at` on.
    fn end(&mut self, at: u64, reason: Reason) {
        self.ended.get_or_insert(reason);
        self.asked = self.asked.min(at);
        while let Some(last) = self.pieces.back_mut() {
            let Some(left) = at.checked_sub(last.take.range.start).filter(|left| *left > 0) else {
                let start = last.take.range.start;
                self.file.placing.close(start);
                self.pieces.pop_back();
                continue;
            };
            if at < last.take.range.end {
                last.take.cut(at);
                last.bytes.truncate(left as usize);
                last.missed.retain(|missed| missed.range.start < at);
                last.missed.iter_mut().for_each(|missed| missed.cut(at));
            }
            return;
        }
        self.gone_bytes = 0;
    }

    /// Asks the guest for more, as far as there is room.
    fn ask(&mut self, job: &Job) {
        let unanswered = |pieces: &VecDeque<Piece>| pieces.iter().filter(|p| !p.is_whole()).count();
        while self.ended.is_none()
            && self.pieces.len() < MAX_PIECES
            && unanswered(&self.pieces) < OPEN_TAKES
        {
            let (skew, max_bytes) = (self.file.skew_bytes, BUFFER_BYTES);
            let Some(mut take) = takes::next(self.asked, self.len_bytes, true, skew, max_bytes)
            else {
                return;
            };
            if take.len_bytes() < MIN_READ_BYTES {
                take = Take::bytes(take.range);
            }
            if take.how == take::PLACES {
                self.file.placing.open(take.range.start, take.len_bytes());
            }
            job.agent.give(job.id, &take);
            self.asked = take.range.end;
            let memory = self.spare.pop().unwrap_or_default();
            self.pieces.push_back(Piece::new(take, memory));
        }
    }

    /// Gives bytes to a connection.
    pub fn give(&mut self, sink: BorrowedFd<'_>, max_bytes: usize) -> Fed {
        let Some(first) = self.pieces.front() else {
            let is_all = self.ended.is_some() || self.asked == self.len_bytes;
            return if is_all { Fed::End } else { Fed::Empty };
        };
        if !first.is_whole() {
            return Fed::Empty;
        }
        let left = &first.bytes[self.gone_bytes..];
        let now = &left[..left.len().min(max_bytes)];
        match send(sink, now, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => {
                self.gone_bytes += sent;
                if sent == left.len() {
                    self.gone_bytes = 0;
                    self.spare.extend(self.pieces.pop_front().map(|piece| piece.bytes));
                }
                Fed::Bytes(sent)
            }
            Err(error) => io::Error::from(error).into(),
        }
    }
}

/// Whether some of what is read is in the host's page cache.
fn is_any_cached(read: &Placed) -> bool {
    let (file, last) = (read.file().as_fd(), read.len_bytes() - 1);
    [0, last / 2, last].iter().any(|at| is_cached(file, read.offset() + at))
}

#[cfg(test)]
mod tests;
