//! Client that waits: for programs with a thread, and for tests.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use guest_abi::module::{MAX_NAME_BYTES, failure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::address::{Address, module_name};
use crate::error::{Failure, RelayError};
use crate::raw::{timespec, wait_until_connected};
use crate::session::{Event, Greeting, Session};

/// Pause between two tries to connect.
const PAUSE: Duration = Duration::from_millis(50);

/// Settings of a client.
#[derive(Debug, Clone)]
pub struct Config {
    /// Address of the host.
    pub address: Address,
    /// Name of the module; none: only the list of modules.
    pub module: Option<String>,
    /// Id of the client; none: a new one.
    pub id: Option<[u8; 16]>,
    /// Time for which connecting is retried.
    pub patience: Duration,
    /// Time limit of a call.
    pub timeout: Duration,
}

impl Config {
    /// Settings for a module, with patience and timeout of 30 seconds.
    pub fn new(address: Address, module: &str) -> Self {
        let time = Duration::from_secs(30);
        let module = Some(module.into());
        Self { address, module, id: None, patience: time, timeout: time }
    }
}

/// Makes an id that is hard to guess.
///
/// # Errors
/// The kernel has no random bytes.
pub fn new_id() -> io::Result<[u8; 16]> {
    let mut id = [0; 16];
    getrandom(&mut id, GetRandomFlags::empty())?;
    // An id of zeroes is invalid.
    id[0] |= 1;
    Ok(id)
}

/// Reply to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reply {
    /// Number of the request.
    pub seq: u64,
    /// Answer of the module, or failure reported by the host.
    pub answer: Result<Vec<u8>, Failure>,
}

/// Client of a module. When the connection breaks, connects again and repeats the requests without
/// a reply; [`Client::lives`] shows whether the module has lost state meanwhile.
#[derive(Debug)]
pub struct Client {
    config: Config,
    session: Session,
    socket: Option<OwnedFd>,
    dialled: Option<Instant>,
    replies: VecDeque<Reply>,
    pongs: VecDeque<Vec<u8>>,
    lives: u64,
    connections: u64,
}

impl Client {
    /// Connects, and waits for the host's welcome.
    ///
    /// # Errors
    /// No answer comes in time, or the host refuses.
    pub fn connect(config: Config) -> Result<Self, RelayError> {
        let module = match &config.module {
            Some(name) => module_name(name)?,
            None => [0; MAX_NAME_BYTES],
        };
        let id = match config.id {
            Some(id) => id,
            None => new_id().map_err(RelayError::io("make an id"))?,
        };
        let mut client = Self {
            config,
            session: Session::new(id, module),
            socket: None,
            dialled: None,
            replies: VecDeque::new(),
            pongs: VecDeque::new(),
            lives: 0,
            connections: 0,
        };
        client.pump(|client| client.session.is_up().then_some(()))?;
        Ok(client)
    }

    /// Latest greeting of the host.
    pub fn greeting(&self) -> Option<&Greeting> {
        self.session.greeting()
    }

    /// Number of times that the module, or the host, has lost this client's state.
    pub fn lives(&self) -> u64 {
        self.lives
    }

    /// Number of welcomed connections.
    pub fn connections(&self) -> u64 {
        self.connections
    }

    /// Sends a request; waits while too many have no reply.
    ///
    /// # Errors
    /// It is too long, or the connection is lost.
    pub fn send(&mut self, body: &[u8], repeatable: bool) -> Result<u64, RelayError> {
        self.pump(|c| (c.session.in_flight() < c.session.max_in_flight()).then_some(()))?;
        let seq = self.session.request(body.to_vec(), repeatable)?;
        self.pump(|c| c.session.to_send().is_empty().then_some(()))?;
        Ok(seq)
    }

    /// Receives the next reply, of any request.
    ///
    /// # Errors
    /// None came in time, or the connection is lost.
    pub fn receive(&mut self) -> Result<Reply, RelayError> {
        self.pump(|c| c.replies.pop_front())
    }

    /// Waits for the reply to a request. Other replies stay for later calls.
    ///
    /// # Errors
    /// Those of [`Client::receive`]; and [`RelayError::Failed`].
    pub fn wait_for(&mut self, seq: u64) -> Result<Vec<u8>, RelayError> {
        let reply = self.pump(|c| {
            let at = c.replies.iter().position(|r| r.seq == seq)?;
            c.replies.remove(at)
        })?;
        reply.answer.map_err(|failure| RelayError::Failed { seq, failure })
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// Those of [`Client::wait_for`].
    pub fn call(&mut self, body: &[u8]) -> Result<Vec<u8>, RelayError> {
        let seq = self.send(body, false)?;
        self.wait_for(seq)
    }

    /// Cancels a request in the host. Its reply still comes.
    ///
    /// # Errors
    /// It has its reply, or the connection is lost.
    pub fn cancel(&mut self, seq: u64) -> Result<(), RelayError> {
        self.session.cancel(seq)?;
        self.pump(|c| c.session.to_send().is_empty().then_some(()))
    }

    /// Waits until the same bytes come back.
    ///
    /// # Errors
    /// They do not, or not in time; the connection may have broken meanwhile.
    pub fn ping(&mut self, body: &[u8]) -> Result<(), RelayError> {
        self.session.ping(body)?;
        self.pump(|c| c.pongs.pop_front().filter(|b| b == body)).map(drop)
    }

    /// Ends the client for good.
    ///
    /// # Errors
    /// The connection is lost: the host keeps the client until its time limit.
    pub fn goodbye(mut self) -> Result<(), RelayError> {
        self.session.goodbye();
        self.pump(|c| c.session.to_send().is_empty().then_some(()))
    }

    /// Breaks the connection, as a network would. For tests.
    pub fn break_connection(&mut self) {
        if let Some(socket) = self.socket.take() {
            let _ = shutdown(&socket, Shutdown::Both);
        }
        self.session.disconnected();
    }

    /// Sends and receives until `done` returns a value.
    fn pump<T>(&mut self, mut done: impl FnMut(&mut Self) -> Option<T>) -> Result<T, RelayError> {
        let until = Instant::now() + self.config.timeout;
        loop {
            self.take_events()?;
            if let Some(done) = done(self) {
                return Ok(done);
            }
            if Instant::now() >= until {
                return Err(RelayError::Timeout(self.config.timeout));
            }
            match &self.socket {
                None => self.connect_again()?,
                Some(_) => match self.exchange(until) {
                    Ok(true) => {}
                    Ok(false) => return Err(RelayError::Timeout(self.config.timeout)),
                    Err(_) => self.break_connection(),
                },
            }
        }
    }

    fn take_events(&mut self) -> Result<(), RelayError> {
        while let Some(event) = self.session.next_event()? {
            match event {
                Event::Welcome(greeting) => {
                    self.connections += 1;
                    self.lives += u64::from(!greeting.is_kept);
                }
                Event::Reply { seq, answer } => self.replies.push_back(Reply { seq, answer }),
                Event::Pong(body) => self.pongs.push_back(body),
                // Another service takes this one's place.
                Event::Goodbye(why) if why.code == failure::ENDING => self.break_connection(),
                Event::Goodbye(why) => return Err(RelayError::Goodbye(why)),
            }
        }
        Ok(())
    }

    /// Sends and receives one round. Returns false at the time limit.
    fn exchange(&mut self, until: Instant) -> io::Result<bool> {
        let Some(socket) = &self.socket else { return Ok(true) };
        let left = until.saturating_duration_since(Instant::now());
        let send_flags =
            if self.session.to_send().is_empty() { PollFlags::empty() } else { PollFlags::OUT };
        let mut polled = [PollFd::new(socket, PollFlags::IN | send_flags)];
        match poll(&mut polled, Some(&timespec(left))) {
            Ok(0) => return Ok(false),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        send_some(socket, &mut self.session)?;
        receive_some(socket, &mut self.session)?;
        Ok(true)
    }

    fn connect_again(&mut self) -> Result<(), RelayError> {
        let (begun, patience, timeout) =
            (Instant::now(), self.config.patience, self.config.timeout);
        // A host that accepts connections and ends them is tried only after pauses.
        if self.dialled.is_some_and(|at| at.elapsed() < PAUSE) {
            thread::sleep(PAUSE);
        }
        loop {
            self.dialled = Some(Instant::now());
            let dialled = self.config.address.dial().and_then(|socket| {
                wait_until_connected(&socket, timeout)?;
                Ok(socket)
            });
            match dialled {
                Ok(socket) => {
                    self.socket = Some(socket);
                    self.session.connected();
                    return Ok(());
                }
                Err(source) if begun.elapsed() >= patience => {
                    return Err(RelayError::Gone { patience, source });
                }
                Err(_) => thread::sleep(PAUSE),
            }
        }
    }
}

/// Sends as much as the socket takes. Returns true if that was something.
pub(crate) fn send_some(socket: impl AsFd, session: &mut Session) -> io::Result<bool> {
    let mut some = false;
    while !session.to_send().is_empty() {
        match send(&socket, session.to_send(), SendFlags::NOSIGNAL) {
            Ok(len) => session.sent(len),
            Err(Errno::AGAIN) => break,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        some = true;
    }
    Ok(some)
}

/// Receives once from the socket. Returns false when no bytes are there.
pub(crate) fn receive_some(socket: impl AsFd, session: &mut Session) -> io::Result<bool> {
    loop {
        match recv(&socket, session.room(), RecvFlags::empty()) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((len, _)) => {
                session.filled(len);
                return Ok(true);
            }
            Err(Errno::AGAIN) => return Ok(false),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Lists the modules of this VM.
///
/// # Errors
/// Those of [`Client::connect`].
pub fn list(address: Address, timeout: Duration) -> Result<Greeting, RelayError> {
    let config = Config { address, module: None, id: None, patience: Duration::ZERO, timeout };
    let client = Client::connect(config)?;
    let greeting = client.greeting().cloned();
    greeting.ok_or(RelayError::Timeout(timeout))
}
