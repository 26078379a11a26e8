//! Pipes whose sink is a connection.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use guest_abi::Reason;
use rustix::pipe::PipeFlags;

use crate::buffer_slot::BufferSlot;
use crate::connection::Connection;
use crate::copy::kernel_pipe;
use crate::epoll_set::EpollSet;
use crate::gated_file::GatedFile;
use crate::job::{Job, Side, StepOutcome, Work};
use crate::limits::{MAX_DETACHED, OWN_BYTES_TIMEOUT, QUANTUM_BYTES, RECHECK_PERIOD};
use crate::message::Answer;
use crate::placed_source::PlacedSource;
use crate::socket_sink::{DrainState, SocketSink};
use crate::socket_source::SocketSource;
use crate::stream_source::{SplicedSocket, StreamSource};
use crate::transfer::Transfer;

/// Stage of a pipe.
enum State {
    /// The connection that is read has to be taken over.
    Starting(Connection),
    /// The guest moves the bytes that came before the daemon's, since then.
    AwaitingOwnBytes(SplicedSocket, Instant),
    /// The guest's last bytes to the sink may still be on their way.
    Settling(StreamSource),
    /// The twin gets bytes.
    Moving(StreamSource),
    /// The twin has all that it will get, and the peer has not acknowledged all of that. A file may
    /// be needed once more. A connection goes back only when nothing of it can be lost any more.
    /// None: the twin has copies.
    Draining(Option<StreamSource>),
    Over,
}

/// A pipe into a connection.
pub(crate) struct PipeToSocket {
    state: State,
    sink: SocketSink,
    /// Bytes that the sink is to get.
    len_bytes: u64,
    /// Reason for its end.
    reason: Reason,
    /// Held to the end by a pipe whose bytes are in memory, here or as the twin's copies.
    _slot: Option<BufferSlot>,
}

impl PipeToSocket {
    /// A pipe from a file.
    pub fn from_file(source: GatedFile, sink: SocketSink, len_bytes: u64) -> Self {
        let state = State::Settling(StreamSource::File(source));
        Self { state, sink, len_bytes, reason: Reason::Complete, _slot: None }
    }

    /// A pipe from a file that the guest reads.
    pub fn from_placed(
        source: PlacedSource,
        sink: SocketSink,
        len_bytes: u64,
        slot: BufferSlot,
    ) -> Self {
        let state = State::Settling(StreamSource::Placed(Box::new(source)));
        Self { state, sink, len_bytes, reason: Reason::Complete, _slot: Some(slot) }
    }

    /// A pipe from another connection.
    pub fn from_socket(source: Connection, sink: SocketSink, len_bytes: u64) -> Self {
        let state = State::Starting(source);
        Self { state, sink, len_bytes, reason: Reason::Complete, _slot: None }
    }

    /// Takes the source over.
    fn start(&mut self, source: Connection, job: &Job, epoll: &EpollSet) -> StepOutcome {
        let Ok(pipe) = kernel_pipe(PipeFlags::NONBLOCK) else {
            source.release_source();
            return self.hand_back(Reason::TwinFailed);
        };
        match SocketSource::start(source, self.len_bytes, epoll) {
            Ok(source) => {
                self.len_bytes = source.len_bytes;
                job.line.send_begun(job.id, source.own_bytes);
                if self.len_bytes == 0 {
                    return self.hand_back(Reason::Complete);
                }
                job.stats.started.fetch_add(1, Ordering::Relaxed);
                self.state =
                    State::AwaitingOwnBytes(SplicedSocket::new(source, pipe), Instant::now());
                StepOutcome::Wait(Instant::now() + OWN_BYTES_TIMEOUT)
            }
            Err(reason) => self.hand_back(reason),
        }
    }

    /// Waits until the guest has moved its own bytes to the sink.
    fn await_own_bytes(&mut self, socket: SplicedSocket, since: Instant, job: &Job) -> StepOutcome {
        match job.next_answer() {
            Some(Answer::Own(Some(end))) if self.sink.update(end) => {
                socket.source.report_own_bytes_read();
                self.state = State::Settling(StreamSource::Socket(socket));
                StepOutcome::Again
            }
            None if since.elapsed() < OWN_BYTES_TIMEOUT => {
                self.state = State::AwaitingOwnBytes(socket, since);
                StepOutcome::Wait(since + OWN_BYTES_TIMEOUT)
            }
            _ => self.lose(Some(StreamSource::Socket(socket)), Reason::TimedOut),
        }
    }

    /// Waits until the sink can be taken over, and does it.
    fn settle(&mut self, source: StreamSource, job: &Job, epoll: &EpollSet) -> StepOutcome {
        match self.sink.settle(self.len_bytes, epoll) {
            Ok(None) => {
                job.stats.hand_over(self.sink.handover);
                self.state = State::Moving(source);
                StepOutcome::Again
            }
            Ok(Some(at)) => {
                self.state = State::Settling(source);
                StepOutcome::Wait(at)
            }
            Err(reason) => self.refuse(source, reason),
        }
    }

    /// Ends the pipe before a byte is moved: the connections go back as they were, if that is
    /// possible.
    fn refuse(&mut self, source: StreamSource, reason: Reason) -> StepOutcome {
        if let StreamSource::Socket(mut socket) = source {
            socket.source.refuse();
        }
        self.hand_back(reason)
    }

    /// Ends the pipe with the sink handed back without a byte.
    fn hand_back(&mut self, reason: Reason) -> StepOutcome {
        match self.sink.finish() {
            Ok(()) => StepOutcome::Over(0, reason),
            Err(lost) => StepOutcome::Over(0, lost),
        }
    }

    /// Gives the twin bytes until it takes no more, there are none, or others are to have their
    /// turn. `at_end`: the reason for the end when there will be none.
    fn give(
        &mut self,
        mut source: StreamSource,
        at_end: Reason,
        job: &Job,
        epoll: &EpollSet,
    ) -> StepOutcome {
        let mut given = 0;
        while given < QUANTUM_BYTES {
            let Some(twin) = self.sink.fd() else {
                return self.lose(Some(source), Reason::TwinFailed);
            };
            match source.send(twin, QUANTUM_BYTES - given, job) {
                Transfer::Bytes(n) => {
                    given += n;
                    self.sink.given_bytes += n as u64;
                    job.moved_bytes.store(self.sink.given_bytes, Ordering::Relaxed);
                }
                Transfer::End => {
                    let reason = source.end_reason().unwrap_or(at_end);
                    return self.stop(source, reason);
                }
                Transfer::Full if !self.sink.is_peer_alive() => {
                    return self.lose(Some(source), Reason::PeerSilent);
                }
                // It may take bytes again already: then the pool hears at once.
                Transfer::Full if !source.has_more() && self.sink.arm(epoll) => {
                    return self.wait(source);
                }
                Transfer::Empty if source.arm(epoll) => return self.wait(source),
                Transfer::Full | Transfer::Empty => break,
                Transfer::Held(at) => {
                    self.state = State::Moving(source);
                    return StepOutcome::Wait(at);
                }
                Transfer::Failed(error) => return self.failed(source, &error),
            }
        }
        self.state = State::Moving(source);
        StepOutcome::Again
    }

    fn wait(&mut self, source: StreamSource) -> StepOutcome {
        self.state = State::Moving(source);
        StepOutcome::Wait(Instant::now() + RECHECK_PERIOD)
    }

    fn failed(&mut self, source: StreamSource, error: &io::Error) -> StepOutcome {
        if !self.sink.is_established() {
            return self.lose(Some(source), Reason::PeerSilent);
        }
        let sink = self.sink.key();
        tracing::warn!(?sink, "reading the source of a pipe to a connection: {error}");
        match source {
            StreamSource::File(_) | StreamSource::Placed(_) => {
                self.stop(source, Reason::DiskFailed)
            }
            StreamSource::Socket(_) => self.lose(Some(source), Reason::TwinFailed),
        }
    }

    /// Gives the twin no more.
    fn stop(&mut self, mut source: StreamSource, reason: Reason) -> StepOutcome {
        source.end_hold();
        let is_whole = self.sink.given_bytes == self.len_bytes;
        self.reason = if is_whole { Reason::Complete } else { reason };
        self.sink.stop();
        // Copies are needed no longer than until the twin has its own.
        let source = Some(source).filter(|source| !matches!(source, StreamSource::Placed(_)));
        self.state = State::Draining(source);
        StepOutcome::Again
    }

    /// Goes on to the nearest end: nobody wants more of it, or no more will come. What the source's
    /// peer believes to have arrived is still moved.
    fn end_soon(
        &mut self,
        mut source: StreamSource,
        reason: Reason,
        job: &Job,
        epoll: &EpollSet,
    ) -> StepOutcome {
        let StreamSource::Socket(socket) = &mut source else { return self.stop(source, reason) };
        if socket.source.stop().is_err() || job.is_overdue() {
            return self.lose(Some(source), Reason::FlowReset);
        }
        if socket.source.left_bytes() == 0 && socket.held_bytes() == 0 {
            return self.stop(source, reason);
        }
        self.give(source, reason, job, epoll)
    }

    /// Waits until the peer has acknowledged everything.
    fn drain(&mut self, source: Option<StreamSource>, job: &Job, epoll: &EpollSet) -> StepOutcome {
        match self.sink.drain(epoll) {
            DrainState::Done => self.finish(source, job),
            DrainState::Pending(at) => self.drain_on(source, at, job, epoll),
            DrainState::Failed => {
                self.undo_detached(job);
                self.lose(source, Reason::PeerSilent)
            }
        }
    }

    /// Goes on waiting: what the twin has sent is not all acknowledged, and may have to be sent
    /// once more.
    fn drain_on(
        &mut self,
        source: Option<StreamSource>,
        at: Instant,
        job: &Job,
        epoll: &EpollSet,
    ) -> StepOutcome {
        match source {
            Some(StreamSource::File(mut file)) => match job.has_lost_file() {
                Some(reason) => return self.lose(None, reason),
                None if job.wants_release() => return self.release(&mut file, job, epoll),
                None => self.state = State::Draining(Some(StreamSource::File(file))),
            },
            Some(StreamSource::Socket(_)) if job.is_overdue() => {
                return self.lose(source, Reason::PeerSilent);
            }
            None => {
                // The twin has all of it.
                if job.wants_release() {
                    job.answer(self.sink.given_bytes, self.reason);
                }
                self.state = State::Draining(None);
            }
            source => self.state = State::Draining(source),
        }
        StepOutcome::Wait(at)
    }

    /// Hands both connections back: the peer has everything.
    fn finish(&mut self, source: Option<StreamSource>, job: &Job) -> StepOutcome {
        self.undo_detached(job);
        if let Some(StreamSource::Socket(mut socket)) = source
            && let Err(reason) = socket.source.finish()
        {
            // What was given is the sink's all the same.
            self.reason = reason;
        }
        match self.sink.finish() {
            Ok(()) => StepOutcome::Over(self.sink.given_bytes, self.reason),
            Err(lost) => StepOutcome::Over(0, lost),
        }
    }

    /// Lets go of a file, which can be written then: the peer gets copies of what it has not
    /// acknowledged, and the guest goes on.
    fn release(&mut self, file: &mut GatedFile, job: &Job, epoll: &EpollSet) -> StepOutcome {
        let count = &job.stats.detached;
        if count.fetch_add(1, Ordering::Relaxed) >= MAX_DETACHED {
            count.fetch_sub(1, Ordering::Relaxed);
            return self.lose(None, Reason::PeerSilent);
        }
        if let Err(reason) = self.sink.detach(|at, len| file.copy(at, len), epoll) {
            count.fetch_sub(1, Ordering::Relaxed);
            return self.lose(None, reason);
        }
        job.answer(self.sink.given_bytes, self.reason);
        self.state = State::Draining(None);
        StepOutcome::Again
    }

    fn undo_detached(&self, job: &Job) {
        if self.sink.is_detached {
            job.stats.detached.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Resets the connections: nobody knows which of the bytes arrived.
    fn lose(&mut self, source: Option<StreamSource>, reason: Reason) -> StepOutcome {
        if let Some(StreamSource::Socket(mut socket)) = source {
            socket.source.reset();
        }
        self.sink.reset();
        StepOutcome::Over(0, reason)
    }

    /// Goes on without a source that was reset: what came of it before is the sink's.
    fn source_lost(&mut self, mut source: StreamSource) -> StepOutcome {
        if let StreamSource::Socket(socket) = &mut source {
            socket.source.reset();
        }
        self.stop(source, Reason::FlowReset)
    }
}

impl Work for PipeToSocket {
    fn step(&mut self, job: &Job, epoll: &EpollSet) -> StepOutcome {
        let state = std::mem::replace(&mut self.state, State::Over);
        if job.is_reset(Side::Sink) {
            self.undo_detached(job);
            if let State::Starting(source) = &state {
                source.release_source();
            }
            return self.lose(state.into_source(), Reason::FlowReset);
        }
        let stop_reason = job.cancelled().or(job.has_ended().then_some(Reason::EndOfFile));
        match (state, stop_reason) {
            (State::Starting(source), Some(reason)) => {
                source.release_source();
                self.hand_back(reason)
            }
            (State::Starting(source), None) => self.start(source, job, epoll),
            (State::AwaitingOwnBytes(socket, _), _) if job.is_reset(Side::Source) => {
                self.refuse(StreamSource::Socket(socket), Reason::FlowReset)
            }
            (State::AwaitingOwnBytes(socket, since), None | Some(Reason::EndOfFile)) => {
                self.await_own_bytes(socket, since, job)
            }
            (State::AwaitingOwnBytes(socket, _), Some(reason)) => {
                self.refuse(StreamSource::Socket(socket), reason)
            }
            (State::Settling(source), Some(reason)) if reason != Reason::EndOfFile => {
                self.refuse(source, reason)
            }
            (State::Settling(source), _) => self.settle(source, job, epoll),
            (State::Moving(source), _) if job.is_reset(Side::Source) => self.source_lost(source),
            (State::Moving(source), Some(reason)) => self.end_soon(source, reason, job, epoll),
            (State::Moving(source), None) => self.give(source, Reason::Complete, job, epoll),
            (State::Draining(source), _) => self.drain(source, job, epoll),
            (State::Over, _) => StepOutcome::Over(0, Reason::Unknown),
        }
    }

    fn state(&self) -> &'static str {
        match &self.state {
            State::Starting(_) | State::AwaitingOwnBytes(..) => "starting",
            State::Settling(_) => "settling",
            State::Moving(source) if source.is_held() => "held",
            State::Moving(_) => "moving",
            State::Draining(_) => "draining",
            State::Over => "over",
        }
    }
}

impl State {
    fn into_source(self) -> Option<StreamSource> {
        match self {
            Self::AwaitingOwnBytes(socket, _) => Some(StreamSource::Socket(socket)),
            Self::Settling(source) | Self::Moving(source) => Some(source),
            Self::Draining(source) => source,
            Self::Starting(_) | Self::Over => None,
        }
    }
}
