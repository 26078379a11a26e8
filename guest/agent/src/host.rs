//! Stream to the host's daemon: connected again whenever it ends, shared by all requests.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use base::sync::lock;
use guest_abi::Reason;
use guest_abi::frame::Header;
use guest_abi::pipe::{Hello, MAGIC, PORT, VERSION, Welcome, kind};
use rustix::net::{RecvFlags, recv};
use socket2::{Domain, SockAddr, Socket, Type};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromZeros, IntoBytes};

use crate::line::{Heartbeat, Line, broken_protocol, write_all};
use crate::log::log;

/// Pause between two tries to reach the daemon.
const PAUSE: Duration = Duration::from_secs(1);
/// Time after which a daemon counts as gone that takes no bytes, or does not answer the hello.
const PATIENCE: Duration = Duration::from_secs(5);
/// Highest source port that only programs of root can bind.
const HIGHEST_PRIVILEGED_PORT: u32 = 1023;

/// Method to reach the daemon.
pub trait Dial: Send + 'static {
    /// Connects a byte stream.
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
                // The port of a stream that has just ended stays in use for a while.
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

/// Connection to the daemon, up or down.
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
    pub fn start(dial: impl Dial, heartbeat: Heartbeat, secret: Vec<u8>) -> io::Result<Self> {
        let host = Self(Arc::new(Mutex::new(State::Down(Reason::NotOffered))));
        let shared = host.clone();
        thread::Builder::new()
            .name("host".into())
            .spawn(move || shared.run(&dial, heartbeat, &secret))?;
        Ok(host)
    }

    /// The current line, or the reason why there is none.
    ///
    /// # Errors
    /// [`Reason::NotOffered`]: no daemon has answered yet; [`Reason::HostGone`]: one had answered
    /// before.
    pub fn line(&self) -> Result<Arc<Line>, Reason> {
        match &*lock(&self.0) {
            State::Up(line) => Ok(line.clone()),
            State::Down(reason) => Err(*reason),
            State::Stopped => Err(Reason::HostGone),
        }
    }

    /// Ends the line for good.
    pub fn stop(&self) {
        if let State::Up(line) = std::mem::replace(&mut *lock(&self.0), State::Stopped) {
            line.end();
        }
    }

    /// Connects again and again, until the agent stops.
    fn run(&self, dial: &impl Dial, heartbeat: Heartbeat, secret: &[u8]) {
        let (mut last_text, mut generation) = (String::new(), 0);
        loop {
            generation += 1;
            let begun = Instant::now();
            let (text, reason) = match connect(dial, generation, heartbeat, secret) {
                Ok(line) => {
                    if !self.set(State::Up(line.clone())) {
                        return;
                    }
                    // Only now: a reader of this log line may ask for a pipe at once.
                    log(format_args!("connected to the host"));
                    let ended = line.read().err().map_or_else(String::new, |e| e.to_string());
                    line.end();
                    line.fail_calls();
                    (format!("the stream to the host ended: {ended}"), Reason::HostGone)
                }
                Err(error) => (format!("no pipes from the host: {error}"), self.refusal()),
            };
            // Logged once, not each second.
            if text != last_text {
                log(format_args!("{text}"));
                last_text = text;
            }
            if !self.set(State::Down(reason)) {
                return;
            }
            // A daemon that takes another's place answers at once.
            if reason != Reason::HostGone || begun.elapsed() < PAUSE {
                thread::sleep(PAUSE);
            }
        }
    }

    /// Reason for refusals without a daemon: [`Reason::HostGone`] stays until a daemon answers.
    fn refusal(&self) -> Reason {
        self.line().err().unwrap_or(Reason::NotOffered)
    }

    /// Sets the state. Returns false when the agent stops.
    fn set(&self, state: State) -> bool {
        let mut now = lock(&self.0);
        let goes_on = !matches!(*now, State::Stopped);
        if goes_on {
            *now = state;
        }
        goes_on
    }
}

/// Connects, sends the VM's secret if there is one, and agrees on a version.
fn connect(
    dial: &impl Dial,
    generation: u64,
    heartbeat: Heartbeat,
    secret: &[u8],
) -> io::Result<Arc<Line>> {
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
    let header = Header::new(kind::HELLO, 0, size_of::<Hello>() + secret.len());
    write_all(&stream, &[header.as_bytes(), hello.as_bytes(), secret].concat())?;
    let (mut header, mut welcome) = (Header::new_zeroed(), Welcome::new_zeroed());
    read_all(&stream, header.as_mut_bytes())?;
    if header.kind.get() != kind::WELCOME || header.body_len() != Some(size_of::<Welcome>()) {
        return Err(broken_protocol());
    }
    read_all(&stream, welcome.as_mut_bytes())?;
    if welcome.magic.get() != MAGIC || welcome.version.get() != VERSION {
        return Err(broken_protocol());
    }
    // Answers may take as long as pipes do.
    timeout(&stream, rustix::net::sockopt::Timeout::Recv, None)?;
    Ok(Line::new(stream, generation, welcome.max_len_bytes.get(), heartbeat))
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

#[cfg(test)]
mod tests;
