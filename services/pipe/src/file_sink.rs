//! A file as a pipe's sink: the guest is asked, range by range, to write placeholders, and the
//! pipe's bytes are put in their place where its disk is written. What has not passed that disk is
//! sent to the guest as bytes.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use block::PlaceholderRequest;
use guest_abi::pipe::{Taken, take};

use crate::job::Job;
use crate::limits::{MAX_OPEN_REQUESTS, QUANTUM_BYTES};
use crate::placed_request::make_durable;
use crate::placeholders::PlacedFile;
use crate::range_request::{RangeRequest, next_request};
use crate::range_source::RangeSource;
use crate::transfer::Transfer;

/// Outcome of a turn of [`FileSink::put_in_place`].
pub(crate) enum Put {
    /// Nothing was to do.
    Nothing,
    /// Bytes were put in place, and there may be more.
    Some,
    /// The VM is at its ceiling: look again then.
    Held(Instant),
}

/// A file that the guest writes. Offsets are those of the pipe.
pub(crate) struct FileSink {
    file: PlacedFile,
    /// Offset of the first byte that the daemon moves: the guest moves those before.
    first: u64,
    /// Offset before which all bytes are asked for.
    requested: u64,
    /// Offset before which all bytes are in the file.
    written: u64,
    /// Requests that the guest has not answered.
    open: VecDeque<RangeRequest>,
    /// Requests, by bytes, for what the guest has written elsewhere than on the disk that is known.
    unreplaced: VecDeque<RangeRequest>,
    /// The guest's write whose bytes are being put in place, and how many are.
    current: Option<(PlaceholderRequest, u64)>,
    /// Offset from which on the file could not be written, or the source not be read.
    failed_at: Option<u64>,
}

impl FileSink {
    /// A file of which nothing is written.
    pub fn new(file: PlacedFile) -> Self {
        let (open, unreplaced, current) = (VecDeque::new(), VecDeque::new(), None);
        let (first, requested, written, failed_at) = (0, 0, 0, None);
        Self { file, first, requested, written, open, unreplaced, current, failed_at }
    }

    /// Begins at that offset: the guest moves the bytes before it.
    pub fn start_at(&mut self, first: u64) {
        (self.first, self.requested, self.written) = (first, first, first);
    }

    /// Bytes that the daemon has moved into the file.
    pub fn moved_bytes(&self) -> u64 {
        self.written - self.first
    }

    /// Offset before which all bytes are in the file.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Offset before which all bytes are asked for.
    pub fn requested(&self) -> u64 {
        self.requested
    }

    /// Whether the guest has requests that it has not answered.
    pub fn has_open_requests(&self) -> bool {
        !self.open.is_empty()
    }

    /// Whether the file could not be written, or the source not be read.
    pub fn has_failed(&self) -> bool {
        self.failed_at.is_some()
    }

    /// Gives up what is not written yet.
    pub fn fail(&mut self) {
        self.fail_at(self.written);
    }

    fn fail_at(&mut self, at: u64) {
        self.failed_at = Some(self.failed_at.map_or(at, |failed| failed.min(at)));
    }

    /// Puts bytes where the guest has written placeholders. `is_urgent`: the guest's writes are not
    /// to wait for the source's gate.
    pub fn put_in_place(&mut self, source: &mut RangeSource, is_urgent: bool) -> Put {
        let mut moved = 0;
        while moved < QUANTUM_BYTES
            && let Some((write, put)) =
                self.current.take().or_else(|| self.file.requests.next().map(|write| (write, 0)))
        {
            let range = (write.at() + put, write.len_bytes() - put);
            let place = (write.file().as_fd(), write.offset() + put);
            match source.put(range, place, is_urgent) {
                Transfer::Held(at) => {
                    self.current = Some((write, put));
                    return Put::Held(at);
                }
                Transfer::Bytes(n) => {
                    moved += n;
                    let put = put + n as u64;
                    if put < write.len_bytes() {
                        self.current = Some((write, put));
                    } else {
                        let done = make_durable(&write);
                        self.complete(write, done);
                    }
                }
                Transfer::Failed(error) => self.complete(write, Err(error)),
                Transfer::End | Transfer::Empty | Transfer::Full => {
                    self.complete(write, Err(io::ErrorKind::UnexpectedEof.into()));
                }
            }
        }
        if moved > 0 { Put::Some } else { Put::Nothing }
    }

    /// Answers a write of the guest.
    fn complete(&mut self, write: PlaceholderRequest, done: io::Result<()>) {
        let (at, len) = (write.at(), write.len_bytes());
        if done.is_ok()
            && let Some(open) = self.open.iter_mut().find(|open| open.range.contains(&at))
        {
            open.add_replaced(at..at + len);
        }
        write.complete(done);
    }

    /// Takes the guest's answer: it has written a range, or could not. False: it was not asked for
    /// that range.
    pub fn take_answer(&mut self, answer: &Taken) -> bool {
        let at = answer.at.get();
        let Some(index) = self.open.iter().position(|open| open.range.start == at) else {
            return false;
        };
        let Some(request) = self.open.remove(index) else { return false };
        if request.how == take::PLACES {
            self.file.requests.close(at);
        }
        match answer.errno.get() {
            // Placeholders that have not passed the disk that is known are replaced by bytes.
            0 => self.unreplaced.extend(request.unreplaced()),
            _ => self.fail_at(at),
        }
        let starts = self.open.iter().chain(&self.unreplaced).map(|request| request.range.start);
        self.written = starts.chain(self.failed_at).min().unwrap_or(self.requested);
        true
    }

    /// Asks the guest to write what the source has, up to `end`, in ranges of at most `max_bytes`.
    /// `is_end`: there will be no more.
    pub fn ask(
        &mut self,
        source: &mut RangeSource,
        (end, is_end): (u64, bool),
        max_bytes: usize,
        job: &Job,
    ) {
        while self.open.len() < MAX_OPEN_REQUESTS && self.failed_at.is_none() {
            let again = self.unreplaced.pop_front();
            let skew = self.file.skew_bytes;
            let Some(request) =
                again.or_else(|| next_request(self.requested, end, is_end, skew, max_bytes))
            else {
                return;
            };
            self.requested = self.requested.max(request.range.end);
            match self.send(&request, source, job) {
                Ok(()) => self.open.push_back(request),
                Err(error) => {
                    tracing::warn!("reading a pipe's source for its file: {error}");
                    self.fail_at(request.range.start);
                    self.written = self.written.min(request.range.start);
                }
            }
        }
    }

    fn send(&self, request: &RangeRequest, source: &mut RangeSource, job: &Job) -> io::Result<()> {
        let bytes = match request.how {
            take::BYTES => source.copy(request.range.start, request.len_bytes())?,
            _ => {
                self.file.requests.open(request.range.start, request.len_bytes());
                Vec::new()
            }
        };
        job.line.ask_write(job.id, request, &bytes);
        Ok(())
    }
}
