//! Line to the daemon: a connected stream with its messages, the calls that wait for them, and the
//! heartbeat that notices a lost daemon.

use std::collections::{HashMap, VecDeque};
use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::frame::{HEADER_BYTES, Header};
use guest_abi::pipe::{
    Begun, Cancel, Done, MAX_TAKE_BYTES, Own, Probed, Refusal, SocketEnd, Take, Taken, kind, take,
};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::log::log;
use crate::wake::Wake;
use base::sync::lock;

/// Most messages of a pipe that wait for its thread. A daemon asks for two writes or reads at a
/// time; one that sends more than this ignores the answers.
pub const MAX_EVENTS: usize = 16;
/// Most bytes of write requests that wait.
pub const MAX_EVENT_BYTES: usize = 4 * MAX_TAKE_BYTES;
/// Bytes that are read from the stream at a time: the longest message.
const READ_BYTES: usize = HEADER_BYTES + size_of::<Take>() + MAX_TAKE_BYTES;

/// Heartbeat for a daemon that is lost without a message: vsock reports nothing when the host's
/// side is just not served any more.
#[derive(Debug, Clone, Copy)]
pub struct Heartbeat {
    /// Period of the checks of the stream while a call waits. When no message came since the last
    /// check, the daemon is pinged.
    pub period: Duration,
    /// Checks in silence after that until the daemon counts as lost. Checks and not time: a guest
    /// that was stopped for a while says nothing about its daemon.
    pub misses: u32,
}

impl Default for Heartbeat {
    /// 10 s of silence. A daemon needs a thread of its own to answer, and no disk.
    fn default() -> Self {
        Self { period: Duration::from_secs(2), misses: 5 }
    }
}

/// A message of the daemon to a call, or the loss of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Answers a probe: the last event.
    Probed(Probed),
    /// Reports how many bytes of the source are the guest's to read.
    Begun(u64),
    /// Asks for a range to be written.
    Write(WriteRequest),
    /// Asks for a range to be read.
    Read(ReadRequest),
    /// Ends a pipe: the last event.
    Done(Done),
    /// Reports that the stream has ended before: the last event.
    Lost,
}

/// Range of a pipe that is to be written: a [`Take`] with its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WriteRequest {
    /// Offset in the pipe.
    pub at: u64,
    /// Length of the range, at least 1.
    pub len_bytes: u32,
    /// Bytes to write; none: placeholders.
    pub bytes: Option<Vec<u8>>,
}

/// Range of a pipe that is to be read: a [`Take`] of [`kind::GIVE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadRequest {
    /// Offset in the pipe.
    pub at: u64,
    /// Length of the range, at least 1.
    pub len_bytes: u32,
    /// Whether the range is read over placeholders. Else the bytes are sent.
    pub by_placeholders: bool,
}

/// Answer to a [`ReadRequest`].
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ReadAnswer {
    /// Number of bytes that were read. Less than asked for: the file ends there.
    pub len_bytes: u32,
    /// Error of the file system; 0: none.
    pub errno: u32,
    /// Bytes, if they were read without placeholders.
    pub bytes: Vec<u8>,
}

impl Event {
    fn read(kind: u16, body: &[u8]) -> Option<Self> {
        match kind {
            kind::PROBED => Probed::read_from_bytes(body).ok().map(Self::Probed),
            kind::DONE => Done::read_from_bytes(body).ok().map(Self::Done),
            kind::BEGUN => {
                Begun::read_from_bytes(body).ok().map(|begun| Self::Begun(begun.own_bytes.get()))
            }
            kind::TAKE => {
                let (head, bytes) = Take::read_from_prefix(body).ok()?;
                let (at, len_bytes) = (head.at.get(), head.len_bytes.get());
                let bytes = match head.how {
                    take::PLACES if bytes.is_empty() => None,
                    take::BYTES if bytes.len() == len_bytes as usize => Some(bytes.to_vec()),
                    _ => return None,
                };
                (len_bytes > 0).then_some(Self::Write(WriteRequest { at, len_bytes, bytes }))
            }
            kind::GIVE => {
                let wanted = Take::read_from_bytes(body).ok()?;
                let (at, len_bytes) = (wanted.at.get(), wanted.len_bytes.get());
                let by_placeholders = match wanted.how {
                    take::PLACES => true,
                    take::BYTES => false,
                    _ => return None,
                };
                let request = ReadRequest { at, len_bytes, by_placeholders };
                (len_bytes > 0).then_some(Self::Read(request))
            }
            _ => None,
        }
    }

    fn is_last(&self) -> bool {
        matches!(self, Self::Probed(_) | Self::Done(_) | Self::Lost)
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Write(request) => request.bytes.as_ref().map_or(0, Vec::len),
            _ => 0,
        }
    }
}

/// Longest body of a kind of message.
fn longest(kind: u16) -> usize {
    match kind {
        kind::TAKE => size_of::<Take>() + MAX_TAKE_BYTES,
        _ => size_of::<Probed>(),
    }
}

/// Events for one call.
#[derive(Debug, Default)]
struct Inbox {
    events: VecDeque<Event>,
    bytes: usize,
}

impl Inbox {
    /// Adds an event. Returns false when there is no room.
    fn push(&mut self, event: Event) -> bool {
        let bytes = self.bytes + event.bytes();
        let fits = self.events.len() < MAX_EVENTS && bytes <= MAX_EVENT_BYTES;
        // The last event always fits.
        if fits || event.is_last() {
            self.bytes = bytes;
            self.events.push_back(event);
        }
        fits
    }
}

/// Calls that are not answered; none when the stream has ended.
type Calls = Option<HashMap<u64, Waiter>>;

/// Waiting side of a call.
#[derive(Debug)]
struct Waiter {
    /// Kind of the last message.
    answer: u16,
    inbox: Arc<Mutex<Inbox>>,
    wake: Arc<Wake>,
}

impl Waiter {
    fn expects(&self, kind: u16) -> bool {
        kind == self.answer
            || (self.answer == kind::DONE && matches!(kind, kind::BEGUN | kind::TAKE | kind::GIVE))
    }

    fn deliver(&self, event: Event) -> bool {
        let fits = lock(&self.inbox).push(event);
        self.wake.ring();
        fits
    }
}

/// State of the [`Heartbeat`].
#[derive(Debug)]
struct Beat {
    last_check: Instant,
    has_heard: bool,
    misses: u32,
    /// Id of a ping that is not answered.
    ping: Option<u64>,
}

/// Connected stream to the daemon.
#[derive(Debug)]
pub struct Line {
    stream: OwnedFd,
    /// Held while a message is written, so that messages stay whole.
    writing: Mutex<()>,
    calls: Mutex<Calls>,
    next_id: AtomicU64,
    beat: Mutex<Beat>,
    heartbeat: Heartbeat,
    /// Number of the stream, different for each: facts learned over one do not hold for the next.
    pub generation: u64,
    /// Most bytes of one pipe.
    pub max_len_bytes: u64,
}

/// Message that will be answered.
#[derive(Debug)]
pub struct Call {
    line: Arc<Line>,
    id: u64,
    inbox: Arc<Mutex<Inbox>>,
}

impl Call {
    /// Takes the oldest event. The thread that made the call is woken for each.
    pub fn next(&self) -> Option<Event> {
        let mut inbox = lock(&self.inbox);
        let event = inbox.events.pop_front()?;
        inbox.bytes -= event.bytes();
        Some(event)
    }

    /// Whether an event waits.
    pub fn has_next(&self) -> bool {
        !lock(&self.inbox).events.is_empty()
    }

    /// Asks for the end of a pipe; the last event is still to come.
    pub fn cancel(&self, reason: Reason) {
        let cancel = Cancel { reason: U16::new(reason as u16), reserved: [0; 6] };
        self.line.write(kind::CANCEL, self.id, &[cancel.as_bytes()]);
    }

    /// Answers that the guest has moved its own bytes to the sink. `sink` is the sink's state, if
    /// it is a socket.
    pub fn answer_own(&self, own_bytes: u64, sink: Option<&SocketEnd>) {
        let own = Own { own_bytes: U64::new(own_bytes) };
        let sink = sink.map_or(&[][..], |sink| sink.as_bytes());
        self.line.write(kind::OWN, self.id, &[own.as_bytes(), sink]);
    }

    /// Answers that a range is written, or with the errno.
    pub fn answer_write(&self, request: &WriteRequest, errno: u32) {
        let (at, len_bytes) = (U64::new(request.at), U32::new(request.len_bytes));
        let taken = Taken { at, len_bytes, errno: U32::new(errno) };
        self.line.write(kind::TAKEN, self.id, &[taken.as_bytes()]);
    }

    /// Answers that a range is read, or with the errno.
    pub fn answer_read(&self, request: &ReadRequest, answer: &ReadAnswer) {
        let len_bytes = U32::new(answer.len_bytes);
        let head = Taken { at: U64::new(request.at), len_bytes, errno: U32::new(answer.errno) };
        self.line.write(kind::GIVEN, self.id, &[head.as_bytes(), &answer.bytes]);
    }

    /// Ends the stream to a daemon that breaks the protocol; [`Event::Lost`] follows.
    pub fn give_up(&self) {
        log(format_args!("the host's daemon broke the protocol with a message about a pipe"));
        self.line.end();
    }

    /// Checks for signs of life of the daemon, see [`Heartbeat`]. A waiting thread calls it again
    /// after the returned time at the latest.
    pub fn beat(&self) -> Duration {
        self.line.beat()
    }
}

impl Line {
    /// Line over a stream on which the handshake is done.
    pub fn new(
        stream: OwnedFd,
        generation: u64,
        max_len_bytes: u64,
        heartbeat: Heartbeat,
    ) -> Arc<Self> {
        let beat = Beat { last_check: Instant::now(), has_heard: false, misses: 0, ping: None };
        Arc::new(Self {
            stream,
            writing: Mutex::new(()),
            calls: Mutex::new(Some(HashMap::new())),
            next_id: AtomicU64::new(1),
            beat: Mutex::new(beat),
            heartbeat,
            generation,
            max_len_bytes,
        })
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        lock(&self.calls)
    }

    fn new_id(&self) -> u64 {
        self.next_id.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a message whose last answer is of kind `answer`. Each event rings `wake`.
    ///
    /// # Errors
    /// The stream has ended, and the message did not arrive as a whole.
    pub fn call(
        self: &Arc<Self>,
        kind: u16,
        answer: u16,
        body: &[u8],
        wake: &Arc<Wake>,
    ) -> Result<Call, Reason> {
        let (id, inbox) = (self.new_id(), Arc::default());
        let waiting = Waiter { answer, inbox: Arc::clone(&inbox), wake: wake.clone() };
        self.calls().as_mut().ok_or(Reason::HostGone)?.insert(id, waiting);
        self.restart_heartbeat();
        if self.write(kind, id, &[body]) {
            Ok(Call { line: self.clone(), id, inbox })
        } else {
            Err(Reason::HostGone)
        }
    }

    /// Reports to the daemon how many requests the agent has refused itself. Returns false when the
    /// stream has ended.
    pub fn report_refusals(&self, refusals: &[Refusal]) -> bool {
        self.write(kind::REFUSALS, 0, &[refusals.as_bytes()])
    }

    /// Writes a message. Returns true when the kernel has taken all of it; else the stream ends.
    fn write(&self, kind: u16, id: u64, parts: &[&[u8]]) -> bool {
        let len = parts.iter().map(|part| part.len()).sum();
        let mut message = Vec::with_capacity(HEADER_BYTES + len);
        message.extend_from_slice(Header::new(kind, id, len).as_bytes());
        parts.iter().for_each(|part| message.extend_from_slice(part));
        let _whole = lock(&self.writing);
        let written = write_all(&self.stream, &message).is_ok();
        if !written {
            self.end();
        }
        written
    }

    /// Ends the stream; its reader notices and cleans up.
    pub fn end(&self) {
        // Fails only when it has ended already.
        let _ = shutdown(&self.stream, Shutdown::Both);
    }

    /// Receives messages until the stream ends or the daemon breaks the protocol. Never waits for
    /// the threads that they are for.
    ///
    /// # Errors
    /// Always: the cause of the end.
    pub fn read(&self) -> io::Result<std::convert::Infallible> {
        let mut stream = BufReader::with_capacity(READ_BYTES, Stream(self.stream.as_fd()));
        let mut body = Vec::new();
        loop {
            let mut header = Header::new_zeroed();
            stream.read_exact(header.as_mut_bytes())?;
            let len = header.body_len().filter(|len| *len <= longest(header.kind.get()));
            body.resize(len.ok_or_else(broken_protocol)?, 0);
            stream.read_exact(&mut body)?;
            self.receive(&header, &body).filter(|fits| *fits).ok_or_else(broken_protocol)?;
        }
    }

    fn receive(&self, header: &Header, body: &[u8]) -> Option<bool> {
        let (id, kind) = (header.id.get(), header.kind.get());
        {
            let mut beat = lock(&self.beat);
            beat.has_heard = true;
            if kind == kind::PONG {
                return Some(body.is_empty() && beat.ping.take() == Some(id));
            }
        }
        let event = Event::read(kind, body)?;
        let mut calls = self.calls();
        // A call that waits for another answer stays, and gets [`Event::Lost`].
        let waiting = calls.as_mut()?.get(&id).filter(|waiting| waiting.expects(kind))?;
        let is_last = event.is_last();
        let fits = waiting.deliver(event);
        if is_last {
            calls.as_mut()?.remove(&id);
        }
        Some(fits || is_last)
    }

    /// Gives [`Event::Lost`] to all calls.
    pub fn fail_calls(&self) {
        for waiting in self.calls().take().into_iter().flatten().map(|(_, waiting)| waiting) {
            waiting.deliver(Event::Lost);
        }
    }

    /// Restarts the heartbeat if no call has waited for a period: that time says nothing about the
    /// daemon.
    fn restart_heartbeat(&self) {
        let mut beat = lock(&self.beat);
        if beat.last_check.elapsed() >= self.heartbeat.period {
            (beat.last_check, beat.misses) = (Instant::now(), 0);
        }
    }

    fn beat(&self) -> Duration {
        let period = self.heartbeat.period;
        let ping = {
            let mut beat = lock(&self.beat);
            let since = beat.last_check.elapsed();
            if since < period {
                return period - since;
            }
            beat.last_check = Instant::now();
            if std::mem::take(&mut beat.has_heard) {
                beat.misses = 0;
                return period;
            }
            beat.misses += 1;
            if beat.misses > self.heartbeat.misses {
                log(format_args!("the host's daemon is silent: its stream ends"));
                self.end();
                return period;
            }
            match beat.ping {
                Some(_) => return period,
                None => *beat.ping.insert(self.new_id()),
            }
        };
        self.write(kind::PING, ping, &[]);
        period
    }
}

/// Stream as a reader of the standard library.
struct Stream<'a>(BorrowedFd<'a>);

impl Read for Stream<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(recv(self.0, into, RecvFlags::empty())?.0)
    }
}

pub(crate) fn broken_protocol() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "a message of the daemon that makes no sense")
}

pub(crate) fn write_all(stream: impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(&stream, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
