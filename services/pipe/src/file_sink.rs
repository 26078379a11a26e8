//! A file as a pipe's sink: the guest is asked, range by range, to write placeholders, and the
//! pipe's bytes are put in their place where its disk is written. What has not passed that disk is
//! sent to the guest as bytes.

use std::collections::VecDeque;
use std::io;

use guest_abi::pipe::{Taken, take};

use crate::job::Job;
use crate::limits::{MAX_OPEN_REQUESTS, QUANTUM_BYTES};
use crate::placed_request::fill;
use crate::placeholders::PlacedFile;
use crate::range_request::{RangeRequest, next_request};
use crate::range_source::RangeSource;

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
    /// Offset from which on the file could not be written, or the source not be read.
    failed_at: Option<u64>,
}

impl FileSink {
    /// A file of which nothing is written.
    pub fn new(file: PlacedFile) -> Self {
        let (open, unreplaced) = (VecDeque::new(), VecDeque::new());
        let (first, requested, written, failed_at) = (0, 0, 0, None);
        Self { file, first, requested, written, open, unreplaced, failed_at }
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

    /// Puts bytes where the guest has written placeholders. True: there was something to do.
    pub fn put_in_place(&mut self, source: &RangeSource) -> bool {
        let mut moved = 0;
        while moved < QUANTUM_BYTES
            && let Some(write) = self.file.requests.next()
        {
            let (at, len) = (write.at(), write.len_bytes());
            let done = fill(&write, |file, offset| source.put(at, len, file, offset));
            if done.is_ok()
                && let Some(open) = self.open.iter_mut().find(|open| open.range.contains(&at))
            {
                open.add_replaced(at..at + len);
            }
            write.complete(done);
            moved += len as usize;
        }
        moved > 0
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
        source: &RangeSource,
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

    fn send(&self, request: &RangeRequest, source: &RangeSource, job: &Job) -> io::Result<()> {
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
