//! Pipes whose sink is a connection.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use guest_abi::Reason;
use rustix::pipe::PipeFlags;

use crate::connection::Connection;
use crate::copy::kernel_pipe;
use crate::feed::{Fed, Feed, Splice};
use crate::file::Source;
use crate::given::Given;
use crate::job::{Job, Next, Side, Work};
use crate::limits::{MAX_DETACHED, OWN_TIMEOUT, QUANTUM_BYTES, RECHECK};
use crate::message::Said;
use crate::pool::Pool;
use crate::receiving::Receiving;
use crate::sending::{Drained, Sending};
use crate::supply::Room;

/// Where a pipe is.
enum State {
    /// The connection that is read has to be taken over.
    Starting(Connection),
    /// The guest moves the bytes that came before, since then.
    Own(Splice, Instant),
    /// The guest's last bytes to the sink may still be on their way.
    Settling(Feed),
    /// The twin is fed.
    Moving(Feed),
    /// The twin has all that it will get, and the peer has not acknowledged all of that. A file may be
    /// needed once more. A connection goes back only when nothing of it can be lost any more. None: the
    /// twin has copies.
    Draining(Option<Feed>),
    Over,
}

/// See the module's text.
pub(crate) struct ToSocket {
    state: State,
    sink: Sending,
    /// How many bytes the sink is to get.
    len_bytes: u64,
    /// Why it ends.
    reason: Reason,
    /// Of one whose bytes are in memory, here or in the twin's. Held to the end.
    _room: Option<Room>,
}

impl ToSocket {
    /// From a file.
    pub fn from_file(source: Source, sink: Sending, len_bytes: u64) -> Self {
        let state = State::Settling(Feed::File(source));
        Self { state, sink, len_bytes, reason: Reason::Complete, _room: None }
    }

    /// From a file that the guest reads.
    pub fn from_given(source: Given, sink: Sending, len_bytes: u64, room: Room) -> Self {
        let state = State::Settling(Feed::Given(Box::new(source)));
        Self { state, sink, len_bytes, reason: Reason::Complete, _room: Some(room) }
    }

    /// From another connection.
    pub fn from_socket(source: Connection, sink: Sending, len_bytes: u64) -> Self {
        let state = State::Starting(source);
        Self { state, sink, len_bytes, reason: Reason::Complete, _room: None }
    }

    /// Takes the source over.
    fn start(&mut self, source: Connection, job: &Job, pool: &Pool) -> Next {
        let Ok(pipe) = kernel_pipe(PipeFlags::NONBLOCK) else {
            source.release();
            return self.hand_back(Reason::TwinFailed);
        };
        match Receiving::begin(source, self.len_bytes, pool) {
            Ok(source) => {
                self.len_bytes = source.len_bytes;
                job.agent.begun(job.id, source.own_bytes);
                if self.len_bytes == 0 {
                    return self.hand_back(Reason::Complete);
                }
                job.stats.started.fetch_add(1, Ordering::Relaxed);
                self.state = State::Own(Splice::new(source, pipe), Instant::now());
                Next::Wait(Instant::now() + OWN_TIMEOUT)
            }
            Err(reason) => self.hand_back(reason),
        }
    }

    /// Waits for the guest's own bytes to have gone before.
    fn await_own(&mut self, splice: Splice, since: Instant, job: &Job) -> Next {
        match job.heard() {
            Some(Said::Own(Some(end))) if self.sink.renew(end) => {
                splice.source.own_read();
                self.state = State::Settling(Feed::Socket(splice));
                Next::Again
            }
            None if since.elapsed() < OWN_TIMEOUT => {
                self.state = State::Own(splice, since);
                Next::Wait(since + OWN_TIMEOUT)
            }
            _ => self.lose(Some(Feed::Socket(splice)), Reason::TimedOut),
        }
    }

    fn settle(&mut self, feed: Feed, job: &Job, pool: &Pool) -> Next {
        match self.sink.settle(self.len_bytes, pool) {
            Ok(None) => {
                job.stats.hand_over(self.sink.handover);
                self.state = State::Moving(feed);
                Next::Again
            }
            Ok(Some(at)) => {
                self.state = State::Settling(feed);
                Next::Wait(at)
            }
            Err(reason) => self.refuse(feed, reason),
        }
    }

    /// Nothing was moved: the connections go back as they were, if that is possible.
    fn refuse(&mut self, feed: Feed, reason: Reason) -> Next {
        if let Feed::Socket(mut splice) = feed {
            splice.source.refuse();
        }
        self.hand_back(reason)
    }

    /// The sink goes back without a byte.
    fn hand_back(&mut self, reason: Reason) -> Next {
        match self.sink.finish() {
            Ok(()) => Next::Over(0, reason),
            Err(lost) => Next::Over(0, lost),
        }
    }

    /// Gives the twin bytes until it takes no more, there are none, or others are to have their turn.
    /// `at_end`: what it means when there will be none.
    fn give(&mut self, mut feed: Feed, at_end: Reason, job: &Job, pool: &Pool) -> Next {
        let mut given = 0;
        while given < QUANTUM_BYTES {
            let Some(twin) = self.sink.fd() else {
                return self.lose(Some(feed), Reason::TwinFailed);
            };
            match feed.give(twin, QUANTUM_BYTES - given, job) {
                Fed::Bytes(n) => {
                    given += n;
                    self.sink.given_bytes += n as u64;
                    job.moved_bytes.store(self.sink.given_bytes, Ordering::Relaxed);
                }
                Fed::End => {
                    let reason = feed.ended().unwrap_or(at_end);
                    return self.stop(feed, reason);
                }
                Fed::Full if !self.sink.is_heard() => {
                    return self.lose(Some(feed), Reason::PeerSilent);
                }
                // It may go on already: then the pool hears at once.
                Fed::Full if !feed.has_more() && self.sink.arm(pool) => return self.wait(feed),
                Fed::Empty if feed.arm(pool) => return self.wait(feed),
                Fed::Full | Fed::Empty => break,
                Fed::Failed(error) => return self.failed(feed, &error),
            }
        }
        self.state = State::Moving(feed);
        Next::Again
    }

    fn wait(&mut self, feed: Feed) -> Next {
        self.state = State::Moving(feed);
        Next::Wait(Instant::now() + RECHECK)
    }

    fn failed(&mut self, feed: Feed, error: &io::Error) -> Next {
        if !self.sink.is_well() {
            return self.lose(Some(feed), Reason::PeerSilent);
        }
        tracing::warn!(sink = ?self.sink.socket().key, "reading for a pipe: {error}");
        match feed {
            Feed::File(_) | Feed::Given(_) => self.stop(feed, Reason::DiskFailed),
            Feed::Socket(_) => self.lose(Some(feed), Reason::TwinFailed),
        }
    }

    /// The twin gets no more.
    fn stop(&mut self, feed: Feed, reason: Reason) -> Next {
        let is_whole = self.sink.given_bytes == self.len_bytes;
        self.reason = if is_whole { Reason::Complete } else { reason };
        self.sink.stop();
        // Copies are needed no longer than until the twin has its own.
        let feed = Some(feed).filter(|feed| !matches!(feed, Feed::Given(_)));
        self.state = State::Draining(feed);
        Next::Again
    }

    /// Nobody wants more of it, or no more will come: what the source's peer believes to have arrived is
    /// still moved.
    fn end_soon(&mut self, mut feed: Feed, reason: Reason, job: &Job, pool: &Pool) -> Next {
        let Feed::Socket(splice) = &mut feed else { return self.stop(feed, reason) };
        if splice.source.stop().is_err() || job.is_overdue() {
            return self.lose(Some(feed), Reason::FlowReset);
        }
        if splice.source.left_bytes() == 0 && splice.held_bytes() == 0 {
            return self.stop(feed, reason);
        }
        self.give(feed, reason, job, pool)
    }

    /// Waits until the peer has acknowledged everything.
    fn drain(&mut self, feed: Option<Feed>, job: &Job, pool: &Pool) -> Next {
        match self.sink.drain(pool) {
            Drained::Yes => self.finish(feed, job),
            Drained::Not(at) => self.drain_on(feed, at, job, pool),
            Drained::Failed => {
                self.undo_detached(job);
                self.lose(feed, Reason::PeerSilent)
            }
        }
    }

    /// What has left is not all acknowledged, and may have to be sent once more.
    fn drain_on(&mut self, feed: Option<Feed>, at: Instant, job: &Job, pool: &Pool) -> Next {
        match feed {
            Some(Feed::File(file)) => match job.has_lost_file() {
                Some(reason) => return self.lose(None, reason),
                None if job.wants_release() => return self.release(&file, job, pool),
                None => self.state = State::Draining(Some(Feed::File(file))),
            },
            Some(Feed::Socket(_)) if job.is_overdue() => {
                return self.lose(feed, Reason::PeerSilent);
            }
            None => {
                // The twin has all of it.
                if job.wants_release() {
                    job.answer(self.sink.given_bytes, self.reason);
                }
                self.state = State::Draining(None);
            }
            feed => self.state = State::Draining(feed),
        }
        Next::Wait(at)
    }

    /// The peer has everything: both connections go back.
    fn finish(&mut self, feed: Option<Feed>, job: &Job) -> Next {
        self.undo_detached(job);
        if let Some(Feed::Socket(mut splice)) = feed
            && let Err(reason) = splice.source.finish()
        {
            // What was given is the sink's all the same.
            self.reason = reason;
        }
        match self.sink.finish() {
            Ok(()) => Next::Over(self.sink.given_bytes, self.reason),
            Err(lost) => Next::Over(0, lost),
        }
    }

    /// The file can be written again: the peer gets copies of what it has not acknowledged, and the guest
    /// goes on.
    fn release(&mut self, file: &Source, job: &Job, pool: &Pool) -> Next {
        let count = &job.stats.detached;
        if count.fetch_add(1, Ordering::Relaxed) >= MAX_DETACHED {
            count.fetch_sub(1, Ordering::Relaxed);
            return self.lose(None, Reason::PeerSilent);
        }
        if let Err(reason) = self.sink.detach(|at, len| file.copy(at, len), pool) {
            count.fetch_sub(1, Ordering::Relaxed);
            return self.lose(None, reason);
        }
        job.answer(self.sink.given_bytes, self.reason);
        self.state = State::Draining(None);
        Next::Again
    }

    fn undo_detached(&self, job: &Job) {
        if self.sink.is_detached {
            job.stats.detached.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Nobody knows what of the bytes arrived: the connections end.
    fn lose(&mut self, feed: Option<Feed>, reason: Reason) -> Next {
        if let Some(Feed::Socket(mut splice)) = feed {
            splice.source.reset();
        }
        self.sink.reset();
        Next::Over(0, reason)
    }

    /// The source was reset: what came of it before is the sink's.
    fn source_lost(&mut self, mut feed: Feed) -> Next {
        if let Feed::Socket(splice) = &mut feed {
            splice.source.reset();
        }
        self.stop(feed, Reason::FlowReset)
    }
}

impl Work for ToSocket {
    fn step(&mut self, job: &Job, pool: &Pool) -> Next {
        let state = std::mem::replace(&mut self.state, State::Over);
        if job.is_reset(Side::Sink) {
            self.undo_detached(job);
            if let State::Starting(source) = &state {
                source.release();
            }
            return self.lose(state.into_feed(), Reason::FlowReset);
        }
        let why = job.cancelled().or(job.has_ended().then_some(Reason::EndOfFile));
        match (state, why) {
            (State::Starting(source), Some(reason)) => {
                source.release();
                self.hand_back(reason)
            }
            (State::Starting(source), None) => self.start(source, job, pool),
            (State::Own(splice, _), _) if job.is_reset(Side::Source) => {
                self.refuse(Feed::Socket(splice), Reason::FlowReset)
            }
            (State::Own(splice, since), None | Some(Reason::EndOfFile)) => {
                self.await_own(splice, since, job)
            }
            (State::Own(splice, _), Some(reason)) => self.refuse(Feed::Socket(splice), reason),
            (State::Settling(feed), Some(reason)) if reason != Reason::EndOfFile => {
                self.refuse(feed, reason)
            }
            (State::Settling(feed), _) => self.settle(feed, job, pool),
            (State::Moving(feed), _) if job.is_reset(Side::Source) => self.source_lost(feed),
            (State::Moving(feed), Some(reason)) => self.end_soon(feed, reason, job, pool),
            (State::Moving(feed), None) => self.give(feed, Reason::Complete, job, pool),
            (State::Draining(feed), _) => self.drain(feed, job, pool),
            (State::Over, _) => Next::Over(0, Reason::Unknown),
        }
    }

    fn state(&self) -> &'static str {
        match self.state {
            State::Starting(_) | State::Own(..) => "starting",
            State::Settling(_) => "settling",
            State::Moving(_) => "moving",
            State::Draining(_) => "draining",
            State::Over => "over",
        }
    }
}

impl State {
    fn into_feed(self) -> Option<Feed> {
        match self {
            Self::Own(splice, _) => Some(Feed::Socket(splice)),
            Self::Settling(feed) | Self::Moving(feed) => Some(feed),
            Self::Draining(feed) => feed,
            Self::Starting(_) | Self::Over => None,
        }
    }
}
