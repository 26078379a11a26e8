//! Exchange of messages with the daemon about a running pipe, and the guest's part of its work.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::pipe::{Done, SocketEnd};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::ends::{Sink, Source};
use crate::line::{Call, Event, WriteRequest};
use crate::outcome::PipeOutcome;
use crate::socket::{SocketSink, UNSENT_PAUSE};
use crate::watch::Watch;

/// Bytes of a connection that the guest moves itself in one step.
const OWN_PIECE_BYTES: usize = 64 << 10;
/// Time that the guest's own bytes may stay unsent, as when the peer does not read.
pub const OWN_UNSENT_TIME: Duration = Duration::from_secs(30);
/// Longest pause between two checks of unsent bytes: pauses grow with the time waited.
const MAX_UNSENT_PAUSE: Duration = Duration::from_millis(16);

/// Bytes of a source that the guest moves itself.
#[derive(Debug, Default)]
struct OwnBytes {
    /// Number of them. None: the daemon has not sent it yet.
    wanted: Option<u64>,
    moved: u64,
    /// Whether the agent has reported to the daemon that all are moved.
    is_reported: bool,
}

/// Reason why the guest's own bytes are not all moved.
enum Stop {
    /// A message of the daemon waits; it ends the guest's part.
    Message,
    /// The pipe is to end.
    Ends(Reason),
}

/// A pipe that the daemon was asked for, with both its ends.
pub struct Exchange<'a> {
    watch: &'a Watch<'a>,
    call: Call,
    source: Source,
    sink: Sink,
    len_bytes: u64,
    own: OwnBytes,
    /// Reason for which the agent has asked for the end.
    ended: Option<Reason>,
    /// Whether the daemon has broken the protocol: its stream ends.
    is_protocol_broken: bool,
}

impl<'a> Exchange<'a> {
    /// Exchange about a pipe that the daemon was asked for.
    pub fn new(
        watch: &'a Watch<'a>,
        call: Call,
        (source, sink): (Source, Sink),
        len_bytes: u64,
    ) -> Self {
        let own = OwnBytes::default();
        Self { watch, call, source, sink, len_bytes, own, ended: None, is_protocol_broken: false }
    }

    /// Runs until the last message of the daemon, or until that is lost; asks it to end the pipe
    /// when there is a reason.
    pub fn run(mut self) -> PipeOutcome {
        loop {
            match self.call.next() {
                Some(Event::Done(done)) => return self.finish(Some(&done)),
                Some(Event::Lost) => return self.finish(None),
                Some(event) => {
                    if !self.is_protocol_broken && !self.handle(event) {
                        self.is_protocol_broken = true;
                        self.call.give_up();
                    }
                    self.check_end();
                }
                None => {
                    self.check_end();
                    self.watch.wait(self.ended.is_none(), &self.call, None, None);
                }
            }
        }
    }

    /// Asks for the end of the pipe if there is a reason.
    fn check_end(&mut self) {
        if self.ended.is_none()
            && let Some(reason) = self.watch.end_reason(&self.source)
        {
            self.end(reason);
        }
    }

    fn end(&mut self, reason: Reason) {
        self.ended = Some(reason);
        self.call.cancel(reason);
    }

    /// Handles a message of the daemon. Returns false when it breaks the protocol.
    fn handle(&mut self, event: Event) -> bool {
        match event {
            Event::Begun(own_bytes) => self.begun(own_bytes),
            Event::Write(request) => self.serve_write(&request),
            Event::Read(request) => {
                let answer = self.source.file_mut().and_then(|file| file.serve(&request));
                answer.inspect(|answer| self.call.answer_read(&request, answer)).is_some()
            }
            Event::Probed(_) | Event::Done(_) | Event::Lost => false,
        }
    }

    /// Writes a range to the file, also after the agent has asked for the end: the peer of a source
    /// connection believes that its bytes have arrived.
    fn serve_write(&mut self, request: &WriteRequest) -> bool {
        let is_begun = self.source.socket().is_none() || self.own.is_reported;
        let Sink::File(file) = &mut self.sink else { return false };
        if !is_begun || request.at < self.own.moved {
            return false;
        }
        let errno = file.serve(request, self.len_bytes);
        errno.inspect(|errno| self.call.answer_write(request, *errno)).is_some()
    }

    fn begun(&mut self, own_bytes: u64) -> bool {
        let is_first = self.source.socket().is_some() && self.own.wanted.is_none();
        if !is_first || own_bytes > self.len_bytes {
            return false;
        }
        self.own.wanted = Some(own_bytes);
        if self.ended.is_some() {
            return true;
        }
        match self.move_own(own_bytes).and_then(|()| self.report_own_bytes(own_bytes)) {
            Ok(()) | Err(Stop::Message) => {}
            Err(Stop::Ends(reason)) => self.end(reason),
        }
        true
    }

    /// Whether all bytes of the pipe are the guest's: then the daemon has no more part in it.
    fn is_all_own(&self) -> bool {
        self.own.wanted == Some(self.len_bytes)
    }

    /// Moves the bytes that came to the guest before the pipe. Takes them out of the source only
    /// when they are in the sink: none is lost when the pipe ends in between.
    fn move_own(&mut self, own_bytes: u64) -> Result<(), Stop> {
        let mut buffer = vec![0; own_bytes.min(OWN_PIECE_BYTES as u64) as usize];
        while self.own.moved < own_bytes {
            let left = (own_bytes - self.own.moved).min(buffer.len() as u64) as usize;
            let source = self.source.socket().ok_or(Stop::Ends(Reason::Unknown))?;
            match recv(source, &mut buffer[..left], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Stop::Ends(Reason::EndOfFile)),
                Ok((there, _)) => {
                    let put = self.put(&buffer[..there])?;
                    let source = self.source.socket().ok_or(Stop::Ends(Reason::Unknown))?;
                    let flags = RecvFlags::TRUNC | RecvFlags::DONTWAIT;
                    let taken = recv(source, &mut buffer[..put], flags);
                    self.own.moved += put as u64;
                    if taken.map_or(true, |(_, taken)| taken != put) {
                        // The connection was reset just now, or another process reads it.
                        return Err(Stop::Ends(Reason::FlowReset));
                    }
                }
                Err(Errno::AGAIN) => {
                    self.watch.wait(true, &self.call, Some((source, PollFlags::IN)), None)
                }
                Err(Errno::INTR) => {}
                Err(_) => return Err(Stop::Ends(Reason::FlowReset)),
            }
            self.check_own_part()?;
        }
        Ok(())
    }

    /// Checks that the guest's own part goes on.
    fn check_own_part(&self) -> Result<(), Stop> {
        if !self.is_all_own() && self.call.has_next() {
            return Err(Stop::Message);
        }
        self.watch.end_reason(&self.source).map_or(Ok(()), |reason| Err(Stop::Ends(reason)))
    }

    /// Gives bytes to the sink. Returns the number that it took, at least one.
    fn put(&mut self, bytes: &[u8]) -> Result<usize, Stop> {
        let at = self.own.moved;
        if let Sink::File(file) = &mut self.sink {
            return file.write(at, bytes).map_err(|_| Stop::Ends(Reason::SinkFailed));
        }
        loop {
            let Sink::Socket(socket) = &self.sink else { return Err(Stop::Ends(Reason::Unknown)) };
            match send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) => return Ok(sent),
                Err(Errno::AGAIN) => {
                    let room = (socket.as_fd(), PollFlags::OUT);
                    self.watch.wait(true, &self.call, Some(room), None);
                }
                Err(Errno::INTR) => {}
                Err(_) => return Err(Stop::Ends(Reason::FlowReset)),
            }
            self.check_own_part()?;
        }
    }

    /// Reports to the daemon that the guest's own bytes are moved, once all of them are sent: then
    /// the daemon's may follow.
    fn report_own_bytes(&mut self, own_bytes: u64) -> Result<(), Stop> {
        if self.is_all_own() {
            return Ok(());
        }
        let end = self.settle_socket()?;
        self.call.answer_own(own_bytes, end.as_ref());
        self.own.is_reported = true;
        Ok(())
    }

    /// Waits until a socket has no unsent bytes. Returns its state then.
    fn settle_socket(&mut self) -> Result<Option<SocketEnd>, Stop> {
        let (until, mut pause) = (Instant::now() + OWN_UNSENT_TIME, UNSENT_PAUSE);
        loop {
            let Sink::Socket(socket) = &mut self.sink else { return Ok(None) };
            if let Some(end) = SocketSink::try_settle(socket).map_err(Stop::Ends)? {
                return Ok(Some(end));
            }
            if Instant::now() >= until {
                return Err(Stop::Ends(Reason::Unsent));
            }
            self.watch.wait(true, &self.call, None, Some(pause));
            pause = (pause * 2).min(MAX_UNSENT_PAUSE);
            self.check_own_part()?;
        }
    }

    /// Ends the exchange by the daemon's last message. None: the daemon is lost.
    fn finish(mut self, done: Option<&Done>) -> PipeOutcome {
        let len = self.len_bytes;
        let theirs = match done {
            _ if self.is_all_own() => Some(0),
            // Bytes behind a gap do not count.
            Some(_) if self.source.socket().is_some() && !self.own.is_reported => Some(0),
            Some(done) => Some(done.moved_bytes.get().min(len - self.own.moved)),
            // The daemon's part has not begun.
            None if self.source.socket().is_some() && !self.own.is_reported => Some(0),
            None => None,
        };
        let total = theirs.map(|theirs| self.own.moved + theirs);
        let (bytes, errno) = match &mut self.sink {
            Sink::File(file) => (file.settle(total, self.source.file()), file.errno()),
            Sink::Socket(_) => (total.unwrap_or(0), None),
        };
        let reason = match done.map(|done| Reason::from_number(done.reason.get())) {
            _ if bytes == len => self.source.complete_reason(),
            _ if errno.is_some() => Reason::SinkFailed,
            // The agent has cancelled the pipe, for this reason.
            Some(Reason::Cancelled) => self.ended.unwrap_or(Reason::Cancelled),
            Some(Reason::Complete) => self.ended.unwrap_or(Reason::Unknown),
            Some(reason) => reason,
            None if self.is_all_own() => self.ended.unwrap_or(Reason::HostGone),
            None => Reason::Lost,
        };
        self.source.finish(bytes);
        self.sink.finish(bytes);
        let errno = errno.map_or(reason.errno(), |errno| errno.raw_os_error() as u32);
        PipeOutcome { bytes, reason, errno }
    }
}
