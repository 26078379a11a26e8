//! Pipes whose sink is a file.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use guest_abi::Reason;

use crate::buffer_slot::BufferSlot;
use crate::connection::Connection;
use crate::epoll_set::EpollSet;
use crate::file_sink::{FileSink, Put};
use crate::gated_file::GatedFile;
use crate::job::{Job, Side, StepOutcome, Work};
use crate::limits::{
    BUFFER_BYTES, OWN_BYTES_TIMEOUT, QUANTUM_BYTES, RECHECK_PERIOD, WRITE_REQUEST_BYTES,
};
use crate::message::Answer;
use crate::placeholders::PlacedFile;
use crate::range_source::{BufferedSocket, RangeSource};
use crate::socket_source::SocketSource;

/// Stage of a pipe.
enum State {
    /// The connection that is read has to be taken over.
    Starting(Connection),
    /// The guest writes the bytes that came before the daemon's, since then.
    AwaitingOwnBytes(BufferedSocket, Instant),
    /// Bytes come and are written.
    Moving(RangeSource),
    Over,
}

/// A pipe into a file.
pub(crate) struct PipeToFile {
    state: State,
    sink: FileSink,
    /// Bytes that were asked for at the beginning.
    len_bytes: u64,
    /// Held to the end by a pipe from a connection.
    _slot: Option<BufferSlot>,
}

impl PipeToFile {
    /// A pipe from another file.
    pub fn from_file(source: GatedFile, sink: PlacedFile, len_bytes: u64) -> Self {
        let state = State::Moving(RangeSource::File(source, len_bytes));
        Self { state, sink: FileSink::new(sink), len_bytes, _slot: None }
    }

    /// A pipe from a connection.
    pub fn from_socket(
        source: Connection,
        sink: PlacedFile,
        len_bytes: u64,
        slot: BufferSlot,
    ) -> Self {
        let state = State::Starting(source);
        Self { state, sink: FileSink::new(sink), len_bytes, _slot: Some(slot) }
    }

    /// Takes the source over.
    fn start(&mut self, source: Connection, job: &Job, epoll: &EpollSet) -> StepOutcome {
        match SocketSource::start(source, self.len_bytes, epoll) {
            Ok(source) => {
                let own_bytes = source.own_bytes;
                job.line.send_begun(job.id, own_bytes);
                if source.len_bytes == 0 {
                    return StepOutcome::Over(0, Reason::Complete);
                }
                job.stats.started.fetch_add(1, Ordering::Relaxed);
                self.sink.start_at(own_bytes);
                let source = BufferedSocket::new(source, own_bytes);
                self.state = State::AwaitingOwnBytes(source, Instant::now());
                StepOutcome::Wait(Instant::now() + OWN_BYTES_TIMEOUT)
            }
            Err(reason) => StepOutcome::Over(0, reason),
        }
    }

    /// Waits until the guest has written its own bytes to the file.
    fn await_own_bytes(
        &mut self,
        mut from: BufferedSocket,
        since: Instant,
        job: &Job,
    ) -> StepOutcome {
        match job.next_answer() {
            Some(Answer::Own(None)) => {
                from.source.report_own_bytes_read();
                self.state = State::Moving(RangeSource::Socket(from));
                StepOutcome::Again
            }
            None if since.elapsed() < OWN_BYTES_TIMEOUT => {
                self.state = State::AwaitingOwnBytes(from, since);
                StepOutcome::Wait(since + OWN_BYTES_TIMEOUT)
            }
            _ => {
                from.source.reset();
                StepOutcome::Over(0, Reason::TimedOut)
            }
        }
    }

    /// Does one turn of putting in place, taking in and asking for. `stop_reason`: nobody wants
    /// more of it.
    fn turn(
        &mut self,
        mut source: RangeSource,
        stop_reason: Option<Reason>,
        job: &Job,
        epoll: &EpollSet,
    ) -> StepOutcome {
        let put = self.sink.put_in_place(&mut source, stop_reason.is_some());
        while let Some(answer) = job.next_answer() {
            match answer {
                Answer::Written(written) => {
                    if self.sink.take_answer(&written) {
                        job.moved_bytes.store(self.sink.moved_bytes(), Ordering::Relaxed);
                    }
                }
                Answer::Own(_) | Answer::Read(..) => self.sink.fail(),
            }
        }
        source.release(self.sink.written());
        let filled = match take_in(&mut source, stop_reason, job) {
            Ok(filled) => filled,
            Err(reason) => return self.lose(source, reason),
        };
        if let Some(over) = self.try_end(&mut source, stop_reason) {
            return over;
        }
        if job.is_overdue() || job.line.is_closed() {
            return self.lose(source, stop_reason.unwrap_or(Reason::HostGone));
        }
        let max_bytes = match &source {
            RangeSource::File(..) => WRITE_REQUEST_BYTES,
            RangeSource::Socket(_) => BUFFER_BYTES,
        };
        let end = self.end(&source, stop_reason);
        self.sink.ask(&mut source, end, max_bytes, job);
        let goes_on = matches!(put, Put::Some) || filled >= QUANTUM_BYTES;
        let next = match put {
            Put::Held(at) => StepOutcome::Wait(at),
            _ if goes_on || !source.arm(epoll) => StepOutcome::Again,
            _ => StepOutcome::Wait(Instant::now() + RECHECK_PERIOD),
        };
        self.state = State::Moving(source);
        next
    }

    /// Offset of the pipe's end as far as it is known, and whether it is the last word.
    fn end(&self, source: &RangeSource, stop_reason: Option<Reason>) -> (u64, bool) {
        match source {
            RangeSource::File(_, len_bytes) if stop_reason.is_none() => (*len_bytes, true),
            RangeSource::File(..) => (self.sink.requested(), true),
            RangeSource::Socket(from) => (source.until(), from.source.left_bytes() == 0),
        }
    }

    /// Ends the pipe if everything is in the file, or the file has failed.
    fn try_end(
        &self,
        source: &mut RangeSource,
        stop_reason: Option<Reason>,
    ) -> Option<StepOutcome> {
        let moved = self.sink.moved_bytes();
        let has_open_requests = self.sink.has_open_requests();
        if self.sink.has_failed() {
            if let RangeSource::Socket(from) = source {
                // Nobody can have what its peer believes to have arrived.
                from.source.reset();
            }
            return (!has_open_requests).then_some(StepOutcome::Over(moved, Reason::SinkFailed));
        }
        let (end, is_known) = self.end(source, stop_reason);
        if !is_known || self.sink.written() < end || has_open_requests {
            return None;
        }
        // Only now: until the file has them, bytes that the peer believes to have arrived may be
        // lost.
        if let RangeSource::Socket(from) = source
            && let Err(reason) = from.source.finish()
        {
            return Some(StepOutcome::Over(moved, reason));
        }
        let is_whole = end == self.len_bytes;
        let reason =
            if is_whole { Reason::Complete } else { stop_reason.unwrap_or(Reason::Complete) };
        Some(StepOutcome::Over(moved, reason))
    }

    /// Ends a pipe that cannot go on: a connection whose bytes are lost is reset.
    fn lose(&mut self, source: RangeSource, reason: Reason) -> StepOutcome {
        if let RangeSource::Socket(mut from) = source {
            from.source.reset();
        }
        StepOutcome::Over(self.sink.moved_bytes(), reason)
    }
}

/// Takes in what a connection has brought; how many bytes. Also when the connection is to go back:
/// what its peer believes to have arrived is written.
fn take_in(
    source: &mut RangeSource,
    stop_reason: Option<Reason>,
    job: &Job,
) -> Result<usize, Reason> {
    let RangeSource::Socket(from) = source else { return Ok(0) };
    if stop_reason.is_some() && !job.is_reset(Side::Source) {
        from.source.stop()?;
    }
    let mut filled = 0;
    while from.has_room() && filled < QUANTUM_BYTES && from.source.left_bytes() > 0 {
        match from.fill() {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Err(Reason::TwinFailed),
        }
    }
    if job.is_reset(Side::Source) && from.has_room() {
        // What came before is here.
        from.source.reset();
    }
    Ok(filled)
}

impl Work for PipeToFile {
    fn step(&mut self, job: &Job, epoll: &EpollSet) -> StepOutcome {
        let state = std::mem::replace(&mut self.state, State::Over);
        let is_reset = job.is_reset(Side::Source).then_some(Reason::FlowReset);
        let ended = job.has_ended().then_some(Reason::EndOfFile);
        let stop_reason = job.cancelled().or(is_reset).or(ended);
        match (state, stop_reason) {
            (State::Starting(source), None) => self.start(source, job, epoll),
            (State::Starting(source), Some(reason)) => {
                source.release_source();
                StepOutcome::Over(0, reason)
            }
            (State::AwaitingOwnBytes(from, since), None | Some(Reason::EndOfFile)) => {
                self.await_own_bytes(from, since, job)
            }
            (State::AwaitingOwnBytes(mut from, _), Some(reason)) => {
                // The guest did not get its own bytes to the file.
                from.source.refuse();
                StepOutcome::Over(0, reason)
            }
            (State::Moving(source), stop_reason) => self.turn(source, stop_reason, job, epoll),
            (State::Over, _) => StepOutcome::Over(0, Reason::Unknown),
        }
    }

    fn state(&self) -> &'static str {
        match &self.state {
            State::Starting(_) | State::AwaitingOwnBytes(..) => "starting",
            State::Moving(source) if source.is_held() => "held",
            State::Moving(_) => "moving",
            State::Over => "over",
        }
    }
}

#[cfg(test)]
mod tests;
