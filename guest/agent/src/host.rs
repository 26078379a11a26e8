//! The stream to the host's daemon: made again whenever it ends, shared by all requests.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use guest_abi::Reason;
use guest_abi::frame::{HEADER_BYTES, Header};
use guest_abi::pipe::{Cancel, Done, Hello, MAGIC, PORT, Probed, VERSION, Welcome, kind};
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use socket2::{Domain, SockAddr, Socket, Type};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::wake::Wake;

/// Between two tries to reach the daemon.
const PAUSE: Duration = Duration::from_secs(1);
/// A daemon that takes no bytes, or does not answer the hello, for so long is gone.
const PATIENCE: Duration = Duration::from_secs(5);
/// Highest source port that only root's programs get.
const HIGHEST_PRIVILEGED_PORT: u32 = 1023;

/// How the daemon is reached.
pub trait Dial: Send + 'static {
    /// A connected byte stream.
    ///
    /// # Errors
    /// Nobody answers.
    fn dial(&self) -> io::Result<OwnedFd>;
}

/// The daemon of the VM's host, over vsock.
#[derive(Debug)]
pub struct Vsock;

impl Dial for Vsock {
    fn dial(&self) -> io::Result<OwnedFd> {
        let domain = Domain::from(libc::AF_VSOCK);
        for port in (1..=HIGHEST_PRIVILEGED_PORT).rev() {
            let socket = Socket::new(domain, Type::STREAM, None)?;
            match socket.bind(&SockAddr::vsock(libc::VMADDR_CID_ANY, port)) {
                // A stream that has just ended keeps its port for a while.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => continue,
                other => other?,
            }
            socket.connect(&SockAddr::vsock(libc::VMADDR_CID_HOST, PORT))?;
            return Ok(socket.into());
        }
        Err(io::ErrorKind::AddrInUse.into())
    }
}

/// A daemon's Unix socket, for tests.
#[derive(Debug)]
pub struct Unix(pub std::path::PathBuf);

impl Dial for Unix {
    fn dial(&self) -> io::Result<OwnedFd> {
        std::os::unix::net::UnixStream::connect(&self.0).map(OwnedFd::from)
    }
}

/// What became of a message that is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Of a probe.
    Probed(Probed),
    /// Of a pipe.
    Done(Done),
    /// The stream ended before.
    Lost,
}

/// Calls that are not answered; none when the stream has ended.
type Calls = Option<HashMap<u64, Waiting>>;

#[derive(Debug)]
struct Waiting {
    answer: u16,
    outcome: Arc<Mutex<Option<Outcome>>>,
    wake: Arc<Wake>,
}

/// One stream that is up.
#[derive(Debug)]
pub struct Line {
    stream: OwnedFd,
    /// Held while a message is written, so that messages stay whole.
    writing: Mutex<()>,
    calls: Mutex<Calls>,
    next_id: AtomicU64,
    /// Different for each stream: what was learned over one does not hold for the next.
    pub generation: u64,
    /// Most bytes of one pipe.
    pub max_len_bytes: u64,
}

/// A message that will be answered.
#[derive(Debug)]
pub struct Call {
    line: Arc<Line>,
    id: u64,
    outcome: Arc<Mutex<Option<Outcome>>>,
}

impl Call {
    /// The answer, when it has come. Whoever asked is woken then.
    pub fn outcome(&self) -> Option<Outcome> {
        *lock(&self.outcome)
    }

    /// Asks for the end of a pipe; its answer is still to come.
    pub fn cancel(&self, reason: Reason) {
        let cancel = Cancel { reason: U16::new(reason as u16), reserved: [0; 6] };
        self.line.write(kind::CANCEL, self.id, cancel.as_bytes());
    }
}

impl Line {
    fn calls(&self) -> MutexGuard<'_, Calls> {
        lock(&self.calls)
    }

    /// Sends a message whose answer is of kind `answer`; `wake` is rung when it is there.
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
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let outcome = Arc::new(Mutex::new(None));
        let waiting = Waiting { answer, outcome: outcome.clone(), wake: wake.clone() };
        self.calls().as_mut().ok_or(Reason::HostGone)?.insert(id, waiting);
        if self.write(kind, id, body) {
            Ok(Call { line: self.clone(), id, outcome })
        } else {
            Err(Reason::HostGone)
        }
    }

    /// True when all of the message was taken by the kernel; else the stream ends.
    fn write(&self, kind: u16, id: u64, body: &[u8]) -> bool {
        let mut message = Vec::with_capacity(HEADER_BYTES + body.len());
        message.extend_from_slice(Header::new(kind, id, body.len()).as_bytes());
        message.extend_from_slice(body);
        let _whole = lock(&self.writing);
        let written = write_all(&self.stream, &message).is_ok();
        if !written {
            self.end();
        }
        written
    }

    /// The reader notices and does the rest.
    fn end(&self) {
        // Fails only when it has ended already.
        let _ = shutdown(&self.stream, Shutdown::Both);
    }

    /// Takes answers until the stream ends or makes no sense.
    fn read(&self) -> io::Result<()> {
        loop {
            let mut header = Header::new_zeroed();
            read_all(&self.stream, header.as_mut_bytes())?;
            let mut body = [0; size_of::<Probed>()];
            let body =
                header.body_len().and_then(|len| body.get_mut(..len)).ok_or_else(senseless)?;
            read_all(&self.stream, body)?;
            let outcome = match header.kind.get() {
                kind::PROBED => Probed::read_from_bytes(body).ok().map(Outcome::Probed),
                kind::DONE => Done::read_from_bytes(body).ok().map(Outcome::Done),
                _ => None,
            };
            let outcome = outcome.ok_or_else(senseless)?;
            let (id, kind) = (header.id.get(), header.kind.get());
            let mut calls = self.calls();
            // One that waits for another answer stays, and is told of the loss.
            let fits = |calls: &&mut HashMap<_, Waiting>| {
                calls.get(&id).is_some_and(|waiting| waiting.answer == kind)
            };
            let waiting = calls.as_mut().filter(fits).and_then(|calls| calls.remove(&id));
            drop(calls);
            waiting.ok_or_else(senseless)?.tell(outcome);
        }
    }

    /// Tells everybody who waits.
    fn lose(&self) {
        for waiting in self.calls().take().into_iter().flatten().map(|(_, waiting)| waiting) {
            waiting.tell(Outcome::Lost);
        }
    }
}

impl Waiting {
    fn tell(self, outcome: Outcome) {
        *lock(&self.outcome) = Some(outcome);
        self.wake.ring();
    }
}

/// The way to the daemon, up or down.
#[derive(Debug, Clone)]
pub struct Host(Arc<Mutex<State>>);

#[derive(Debug)]
enum State {
    Up(Arc<Line>),
    Down(Reason),
    /// The agent stops: no further tries.
    Stopped,
}

impl Host {
    /// Begins to connect, in a thread of its own.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(dial: impl Dial) -> io::Result<Self> {
        let host = Self(Arc::new(Mutex::new(State::Down(Reason::NotOffered))));
        let shared = host.clone();
        thread::Builder::new().name("host".into()).spawn(move || shared.keep(&dial))?;
        Ok(host)
    }

    /// The stream, or why there is none.
    ///
    /// # Errors
    /// [`Reason::NotOffered`]: nobody answered; [`Reason::HostGone`]: somebody did before.
    pub fn line(&self) -> Result<Arc<Line>, Reason> {
        match &*lock(&self.0) {
            State::Up(line) => Ok(line.clone()),
            State::Down(reason) => Err(*reason),
            State::Stopped => Err(Reason::HostGone),
        }
    }

    /// Ends the stream for good.
    pub fn stop(&self) {
        if let State::Up(line) = std::mem::replace(&mut *lock(&self.0), State::Stopped) {
            line.end();
        }
    }

    fn keep(&self, dial: &impl Dial) {
        let (mut told, mut generation) = (String::new(), 0);
        loop {
            generation += 1;
            let begun = Instant::now();
            let (text, reason) = match connect(dial, generation) {
                Ok(line) => {
                    eprintln!("connected to the host");
                    if !self.set(State::Up(line.clone())) {
                        return;
                    }
                    let ended = line.read().err().map_or_else(String::new, |e| e.to_string());
                    line.end();
                    line.lose();
                    (format!("the host went: {ended}"), Reason::HostGone)
                }
                Err(error) => (format!("no pipes from the host: {error}"), self.refusal()),
            };
            // Once, not each second.
            if text != told {
                eprintln!("{text}");
                told = text;
            }
            if !self.set(State::Down(reason)) {
                return;
            }
            // A daemon that took another's place is there at once.
            if reason != Reason::HostGone || begun.elapsed() < PAUSE {
                thread::sleep(PAUSE);
            }
        }
    }

    /// A host that was there and is gone stays that, until it answers.
    fn refusal(&self) -> Reason {
        self.line().err().unwrap_or(Reason::NotOffered)
    }

    /// False when the agent stops.
    fn set(&self, state: State) -> bool {
        let mut now = lock(&self.0);
        let goes_on = !matches!(*now, State::Stopped);
        if goes_on {
            *now = state;
        }
        goes_on
    }
}

/// Connects and agrees on a version.
fn connect(dial: &impl Dial, generation: u64) -> io::Result<Arc<Line>> {
    let stream = dial.dial()?;
    let timeout = rustix::net::sockopt::set_socket_timeout;
    for direction in [rustix::net::sockopt::Timeout::Recv, rustix::net::sockopt::Timeout::Send] {
        timeout(&stream, direction, Some(PATIENCE))?;
    }
    let hello = Hello {
        magic: U64::new(MAGIC),
        lowest: U16::new(VERSION),
        highest: U16::new(VERSION),
        reserved: U32::ZERO,
    };
    let header = Header::new(kind::HELLO, 0, size_of::<Hello>());
    write_all(&stream, &[header.as_bytes(), hello.as_bytes()].concat())?;
    let (mut header, mut welcome) = (Header::new_zeroed(), Welcome::new_zeroed());
    read_all(&stream, header.as_mut_bytes())?;
    if header.kind.get() != kind::WELCOME || header.body_len() != Some(size_of::<Welcome>()) {
        return Err(senseless());
    }
    read_all(&stream, welcome.as_mut_bytes())?;
    if welcome.magic.get() != MAGIC || welcome.version.get() != VERSION {
        return Err(senseless());
    }
    // Answers may take as long as pipes.
    timeout(&stream, rustix::net::sockopt::Timeout::Recv, None)?;
    Ok(Arc::new(Line {
        stream,
        writing: Mutex::new(()),
        calls: Mutex::new(Some(HashMap::new())),
        next_id: AtomicU64::new(1),
        generation,
        max_len_bytes: welcome.max_len_bytes.get(),
    }))
}

fn senseless() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "an answer of the daemon that makes no sense")
}

fn write_all(stream: impl AsFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match send(&stream, bytes, SendFlags::NOSIGNAL) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn read_all(stream: impl AsFd, mut bytes: &mut [u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match recv(&stream, &mut *bytes, RecvFlags::empty()) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((got, _)) => bytes = &mut bytes[got..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// A panic elsewhere does not spoil what is kept here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
