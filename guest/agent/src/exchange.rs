//! A pipe under way: what the daemon says of it, and what is done then.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::pipe::{Done, SocketEnd};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::ends::{Sink, Source};
use crate::line::{Call, Event, Taking};
use crate::pipe::Moved;
use crate::socket::{SocketSink, UNSENT_PAUSE};
use crate::watch::Watch;

/// Bytes of a connection that the guest moves itself at a time.
const OWN_PIECE_BYTES: usize = 64 << 10;
/// What of them waits to be sent may take so long: until then the peer has not read.
pub const OWN_UNSENT_TIME: Duration = Duration::from_secs(30);
/// Looks at that come the less often, the longer it takes.
const MAX_UNSENT_PAUSE: Duration = Duration::from_millis(16);

/// Bytes of a source that the guest moves itself.
#[derive(Debug, Default)]
struct Own {
    /// How many, when the daemon has said it.
    wanted: Option<u64>,
    moved: u64,
    /// The daemon knows that it is done.
    said: bool,
}

/// Why the guest's own bytes are not all moved.
enum Stop {
    /// The daemon has something to say, which ends it.
    Heard,
    /// The pipe is to end.
    Ends(Reason),
}

/// See the module's text.
pub struct Exchange<'a> {
    watch: &'a Watch<'a>,
    call: Call,
    source: Source,
    sink: Sink,
    len_bytes: u64,
    own: Own,
    /// Why we have asked for the end.
    ended: Option<Reason>,
    /// The daemon does not make sense: its stream ends.
    is_senseless: bool,
}

impl<'a> Exchange<'a> {
    /// Of a pipe that was asked for.
    pub fn new(
        watch: &'a Watch<'a>,
        call: Call,
        (source, sink): (Source, Sink),
        len_bytes: u64,
    ) -> Self {
        let own = Own::default();
        Self { watch, call, source, sink, len_bytes, own, ended: None, is_senseless: false }
    }

    /// Until the daemon has said its last, or is lost; asks it to end the pipe when there is a reason.
    pub fn run(mut self) -> Moved {
        loop {
            match self.call.next() {
                Some(Event::Done(done)) => return self.over(Some(&done)),
                Some(Event::Lost) => return self.over(None),
                Some(event) => {
                    if !self.is_senseless && !self.hear(event) {
                        self.is_senseless = true;
                        self.call.give_up();
                    }
                    self.look();
                }
                None => {
                    self.look();
                    self.watch.wait(self.ended.is_none(), &self.call, None, None);
                }
            }
        }
    }

    /// Asks for the end when there is a reason.
    fn look(&mut self) {
        if self.ended.is_none()
            && let Some(reason) = self.watch.ends(&self.source)
        {
            self.end(reason);
        }
    }

    fn end(&mut self, reason: Reason) {
        self.ended = Some(reason);
        self.call.cancel(reason);
    }

    /// False when it makes no sense.
    fn hear(&mut self, event: Event) -> bool {
        match event {
            Event::Begun(own_bytes) => self.begun(own_bytes),
            Event::Take(taking) => self.take(&taking),
            Event::Give(giving) => {
                let given = self.source.file_mut().and_then(|file| file.give(&giving));
                given.inspect(|given| self.call.given(&giving, given)).is_some()
            }
            Event::Probed(_) | Event::Done(_) | Event::Lost => false,
        }
    }

    /// Writes to the file. Also when the end is asked for: of what a connection has brought the peer
    /// believes that it has arrived.
    fn take(&mut self, taking: &Taking) -> bool {
        let is_begun = self.source.socket().is_none() || self.own.said;
        let Sink::File(file) = &mut self.sink else { return false };
        if !is_begun || taking.at < self.own.moved {
            return false;
        }
        let errno = file.take(taking, self.len_bytes);
        errno.inspect(|errno| self.call.taken(taking, *errno)).is_some()
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
        match self.move_own(own_bytes).and_then(|()| self.say_own(own_bytes)) {
            Ok(()) | Err(Stop::Heard) => {}
            Err(Stop::Ends(reason)) => self.end(reason),
        }
        true
    }

    /// All of the pipe is the guest's: the daemon has no part in it any more.
    fn is_all_own(&self) -> bool {
        self.own.wanted == Some(self.len_bytes)
    }

    /// Moves the bytes that have come to the guest. They are taken out of the source only when they are
    /// in the sink: none is lost when the pipe ends in between.
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
                        // Reset just now, or somebody else reads.
                        return Err(Stop::Ends(Reason::FlowReset));
                    }
                }
                Err(Errno::AGAIN) => {
                    self.watch.wait(true, &self.call, Some((source, PollFlags::IN)), None)
                }
                Err(Errno::INTR) => {}
                Err(_) => return Err(Stop::Ends(Reason::FlowReset)),
            }
            self.still()?;
        }
        Ok(())
    }

    /// Whether the guest's own part goes on.
    fn still(&self) -> Result<(), Stop> {
        if !self.is_all_own() && self.call.has_next() {
            return Err(Stop::Heard);
        }
        self.watch.ends(&self.source).map_or(Ok(()), |reason| Err(Stop::Ends(reason)))
    }

    /// Gives bytes to the sink; how many it took, at least one.
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
            self.still()?;
        }
    }

    /// Tells the daemon that its own bytes may follow, when nothing is in front of them.
    fn say_own(&mut self, own_bytes: u64) -> Result<(), Stop> {
        if self.is_all_own() {
            return Ok(());
        }
        let end = self.settle_socket()?;
        self.call.own(own_bytes, end.as_ref());
        self.own.said = true;
        Ok(())
    }

    /// Waits until nothing of a socket is unsent; how it stands then.
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
            self.still()?;
        }
    }

    /// The daemon's word, or none: how many bytes arrived, and why not more.
    fn over(mut self, done: Option<&Done>) -> Moved {
        let len = self.len_bytes;
        let theirs = match done {
            _ if self.is_all_own() => Some(0),
            // What is behind bytes that are missing does not count.
            Some(_) if self.source.socket().is_some() && !self.own.said => Some(0),
            Some(done) => Some(done.moved_bytes.get().min(len - self.own.moved)),
            // It has not begun.
            None if self.source.socket().is_some() && !self.own.said => Some(0),
            None => None,
        };
        let total = theirs.map(|theirs| self.own.moved + theirs);
        let (bytes, errno) = match &mut self.sink {
            Sink::File(file) => (file.settle(total, self.source.file()), file.errno()),
            Sink::Socket(_) => (total.unwrap_or(0), None),
        };
        let reason = match done.map(|done| Reason::from_number(done.reason.get())) {
            _ if bytes == len => self.source.complete(),
            _ if errno.is_some() => Reason::SinkFailed,
            // It was us who knew why.
            Some(Reason::Cancelled) => self.ended.unwrap_or(Reason::Cancelled),
            Some(Reason::Complete) => self.ended.unwrap_or(Reason::Unknown),
            Some(reason) => reason,
            None if self.is_all_own() => self.ended.unwrap_or(Reason::HostGone),
            None => Reason::Lost,
        };
        self.source.finish(bytes);
        self.sink.finish(bytes);
        let errno = errno.map_or(reason.errno(), |errno| errno.raw_os_error() as u32);
        Moved { bytes, reason, errno }
    }
}
