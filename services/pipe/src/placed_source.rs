//! A file without a lease as a pipe's source: the guest reads it, range by range, over
//! placeholders, and the bytes are copied where its disk is read. They wait in memory, as the file
//! may change at any time: what the peer has not acknowledged must not change with it, and the
//! blocks may be another file's soon.
//!
//! What did not pass such a disk (holes, what is not in whole blocks) is asked for again, as bytes.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use block::PlaceholderRequest;
use guest_abi::Reason;
use guest_abi::pipe::{Taken, take};
use rustix::net::{SendFlags, send};

use crate::job::Job;
use crate::limits::{BUFFER_BYTES, MAX_OPEN_REQUESTS, MAX_PIECES, MIN_READ_BYTES, QUANTUM_BYTES};
use crate::message::Answer;
use crate::page_cache::is_cached;
use crate::placed_request::fetch;
use crate::placeholders::PlacedFile;
use crate::range_request::{RangeRequest, next_request};
use crate::transfer::Transfer;

/// A file that the guest reads over placeholders. Offsets are those of the pipe.
pub(crate) struct PlacedSource {
    file: PlacedFile,
    /// Length of the pipe: it ends there at the latest.
    len_bytes: u64,
    /// The guest has it in memory: the host must not read its disk for it.
    is_cached: bool,
    /// The host has read something.
    has_copied: bool,
    /// Offset before which all bytes are asked for, or have gone.
    requested: u64,
    /// Pieces that were asked for and have not gone, in order and without gaps.
    pieces: VecDeque<Piece>,
    /// Bytes of the first piece that have gone.
    sent_bytes: usize,
    /// Memory of pieces that have gone.
    spare: Vec<Vec<u8>>,
    /// Reason why nothing comes behind the pieces; none: more may come.
    end_reason: Option<Reason>,
    /// More reads wait than one turn takes.
    has_more: bool,
}

/// A range that the guest was asked for, with its bytes.
struct Piece {
    request: RangeRequest,
    bytes: Vec<u8>,
    /// The guest reads it over placeholders.
    is_open: bool,
    /// Ranges that the guest is asked for as bytes: the first of them now.
    unreplaced: VecDeque<RangeRequest>,
}

impl Piece {
    fn new(request: RangeRequest, mut bytes: Vec<u8>) -> Self {
        bytes.resize(request.len_bytes() as usize, 0);
        let is_open = request.how == take::PLACES;
        let unreplaced = if is_open { VecDeque::new() } else { VecDeque::from([request.clone()]) };
        Self { request, bytes, is_open, unreplaced }
    }

    /// Memory for a range of the pipe; none: it is not in this piece.
    fn range_mut(&mut self, at: u64, len_bytes: usize) -> Option<&mut [u8]> {
        let from = usize::try_from(at.checked_sub(self.request.range.start)?).ok()?;
        self.bytes.get_mut(from..from.checked_add(len_bytes)?)
    }

    fn is_whole(&self) -> bool {
        !self.is_open && self.unreplaced.is_empty()
    }

    /// Whether the guest was asked for the range that begins there, and has not answered.
    fn awaits_answer(&self, at: u64) -> bool {
        let as_bytes = self.unreplaced.front().is_some_and(|request| request.range.start == at);
        if self.is_open { self.request.range.start == at } else { as_bytes }
    }
}

impl PlacedSource {
    /// A source of at most `len_bytes` of a file.
    pub fn new(file: PlacedFile, len_bytes: u64, is_cached: bool) -> Self {
        Self {
            file,
            len_bytes,
            is_cached,
            has_copied: false,
            requested: 0,
            pieces: VecDeque::with_capacity(MAX_PIECES),
            sent_bytes: 0,
            spare: Vec::new(),
            end_reason: None,
            has_more: false,
        }
    }

    /// Reason why it ends before the end that was asked for, if it does.
    pub fn end_reason(&self) -> Option<Reason> {
        self.end_reason
    }

    /// Whether it is to have another turn soon.
    pub fn has_more(&self) -> bool {
        self.has_more
    }

    /// Does one turn of copying, listening and asking. A guest can read the same again and again:
    /// others have their turn too.
    pub fn turn(&mut self, job: &Job) {
        let mut copied = 0;
        self.has_more = false;
        while let Some(read) = self.file.requests.next() {
            copied += read.len_bytes();
            self.copy(read);
            if copied >= QUANTUM_BYTES as u64 {
                self.has_more = true;
                break;
            }
        }
        while let Some(answer) = job.next_answer() {
            match answer {
                Answer::Read(read, bytes) => self.take_answer(&read, &bytes, job),
                Answer::Own(_) | Answer::Written(_) => self.end_at(0, Reason::Malformed),
            }
        }
        self.ask(job);
    }

    /// Copies the bytes of a read over placeholders.
    fn copy(&mut self, read: PlaceholderRequest) {
        let (at, len) = (read.at(), read.len_bytes());
        let is_first = !std::mem::replace(&mut self.has_copied, true);
        if self.is_cached && is_first && !is_any_cached(&read) {
            self.end_at(0, Reason::Cached);
            return read.complete(Ok(()));
        }
        // A read that is not asked for any more needs no bytes. What cannot be read here the
        // guest is asked for: then it is told what its disk says.
        let piece = self.pieces.iter_mut().find(|piece| piece.request.range.contains(&at));
        if let Some(piece) = piece
            && let Some(memory) = piece.range_mut(at, len as usize)
            && fetch(&read, memory).is_ok()
        {
            piece.request.add_replaced(at..at + len);
        }
        read.complete(Ok(()));
    }

    /// Takes the guest's answer: it has read a range, or could not.
    fn take_answer(&mut self, read: &Taken, bytes: &[u8], job: &Job) {
        let (at, len) = (read.at.get(), u64::from(read.len_bytes.get()));
        let Some(index) = self.pieces.iter().position(|piece| piece.awaits_answer(at)) else {
            return;
        };
        let piece = &mut self.pieces[index];
        let wanted = match piece.unreplaced.front() {
            Some(request) if !piece.is_open => request.len_bytes(),
            _ => piece.request.len_bytes(),
        };
        if read.errno.get() != 0 || len > wanted || (!piece.is_open && bytes.len() as u64 != len) {
            return self.end_at(at, Reason::DiskFailed);
        }
        if len < wanted {
            self.end_at(at + len, Reason::EndOfFile);
        }
        // It may have been all of it.
        let Some(piece) = self.pieces.get_mut(index) else { return };
        if std::mem::take(&mut piece.is_open) {
            self.file.requests.close(at);
            piece.unreplaced.extend(piece.request.unreplaced());
        } else if let Some(memory) = piece.range_mut(at, bytes.len()) {
            memory.copy_from_slice(bytes);
            piece.unreplaced.pop_front();
        }
        if let Some(request) = piece.unreplaced.front() {
            job.line.ask_read(job.id, request);
        }
    }

    /// Ends the source: nothing comes from `at` on.
    fn end_at(&mut self, at: u64, reason: Reason) {
        self.end_reason.get_or_insert(reason);
        self.requested = self.requested.min(at);
        while let Some(last) = self.pieces.back_mut() {
            let start = last.request.range.start;
            let Some(left) = at.checked_sub(start).filter(|left| *left > 0) else {
                self.file.requests.close(start);
                self.pieces.pop_back();
                continue;
            };
            if at < last.request.range.end {
                last.request.truncate(at);
                last.bytes.truncate(left as usize);
                last.unreplaced.retain(|request| request.range.start < at);
                last.unreplaced.iter_mut().for_each(|request| request.truncate(at));
            }
            return;
        }
        self.sent_bytes = 0;
    }

    /// Asks the guest for more, as far as there is room.
    fn ask(&mut self, job: &Job) {
        let unanswered = |pieces: &VecDeque<Piece>| pieces.iter().filter(|p| !p.is_whole()).count();
        while self.end_reason.is_none()
            && self.pieces.len() < MAX_PIECES
            && unanswered(&self.pieces) < MAX_OPEN_REQUESTS
        {
            let (skew, max_bytes) = (self.file.skew_bytes, BUFFER_BYTES);
            let Some(mut request) =
                next_request(self.requested, self.len_bytes, true, skew, max_bytes)
            else {
                return;
            };
            if request.len_bytes() < MIN_READ_BYTES {
                request = RangeRequest::by_bytes(request.range);
            }
            if request.how == take::PLACES {
                self.file.requests.open(request.range.start, request.len_bytes());
            }
            job.line.ask_read(job.id, &request);
            self.requested = request.range.end;
            let memory = self.spare.pop().unwrap_or_default();
            self.pieces.push_back(Piece::new(request, memory));
        }
    }

    /// Sends bytes to a connection, at most `max_bytes`.
    pub fn send(&mut self, sink: BorrowedFd<'_>, max_bytes: usize) -> Transfer {
        let Some(first) = self.pieces.front() else {
            let is_all = self.end_reason.is_some() || self.requested == self.len_bytes;
            return if is_all { Transfer::End } else { Transfer::Empty };
        };
        if !first.is_whole() {
            return Transfer::Empty;
        }
        let left = &first.bytes[self.sent_bytes..];
        let now = &left[..left.len().min(max_bytes)];
        match send(sink, now, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) => {
                self.sent_bytes += sent;
                if sent == left.len() {
                    self.sent_bytes = 0;
                    self.spare.extend(self.pieces.pop_front().map(|piece| piece.bytes));
                }
                Transfer::Bytes(sent)
            }
            Err(error) => io::Error::from(error).into(),
        }
    }
}

/// Whether some bytes of a read are in the host's page cache.
fn is_any_cached(read: &PlaceholderRequest) -> bool {
    let (file, last) = (read.file().as_fd(), read.len_bytes() - 1);
    [0, last / 2, last].iter().any(|at| is_cached(file, read.offset() + at))
}

#[cfg(test)]
mod tests;
