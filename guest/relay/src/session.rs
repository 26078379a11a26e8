//! Client side of the protocol, without sockets: frames to send, events, requests without a reply.

use std::collections::VecDeque;

use guest_abi::module::{
    Failure as Code, Hello, MAGIC, MAX_BODY_BYTES, MAX_IN_FLIGHT, MAX_MODULES, MAX_NAME_BYTES,
    MAX_PING_BYTES, ModuleInfo, VERSION, Welcome, flag, kind,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::error::{Failure, RelayError, WireError};
use crate::outbox::Outbox;
use crate::raw::{self, Inbox, Received};

/// Module that the VM may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleName {
    /// Name of the module.
    pub name: String,
    /// SHA-256 of the module's file.
    pub hash: [u8; 32],
}

/// Greeting of the host at the start of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    /// Most requests without a reply.
    pub max_in_flight: u32,
    /// Longest body.
    pub max_body_bytes: u32,
    /// Time that the client outlives its connection, in milliseconds.
    pub linger_ms: u32,
    /// Number of the module's instance.
    pub instance: u64,
    /// Highest number of the client's requests that the host has received.
    pub known_seq: u64,
    /// Modules that the VM may use.
    pub modules: Vec<ModuleName>,
    /// Whether the module still has this client's state: it is the first connection, or neither the
    /// module nor the client was forgotten since.
    pub is_kept: bool,
}

/// Event of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The connection can be used.
    Welcome(Greeting),
    /// Answer of the module or, failing, of the host.
    Reply {
        /// Number of the request.
        seq: u64,
        /// Answer to the request.
        answer: Result<Vec<u8>, Failure>,
    },
    /// Body of a ping that came back.
    Pong(Vec<u8>),
    /// The host ends the connection.
    Goodbye(Failure),
}

/// Request without a reply, or one behind it.
#[derive(Debug)]
struct Asked {
    seq: u64,
    flags: u16,
    /// Body of the request; none: it has its reply.
    body: Option<Vec<u8>>,
    was_sent: bool,
    is_cancelled: bool,
}

/// State of the present connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Down,
    Greeting,
    Up,
}

/// Client side of the protocol.
#[derive(Debug)]
pub struct Session {
    hello: Hello,
    stage: Stage,
    greeting: Option<Greeting>,
    asked: VecDeque<Asked>,
    next_seq: u64,
    inbox: Inbox,
    out: Outbox,
}

impl Session {
    /// Session of a client with that id, for a module; all zeroes: for the list of modules only.
    pub fn new(client: [u8; 16], module: [u8; MAX_NAME_BYTES]) -> Self {
        Self {
            hello: raw::hello(client, module),
            stage: Stage::Down,
            greeting: None,
            asked: VecDeque::new(),
            next_seq: 1,
            inbox: Inbox::default(),
            out: Outbox::default(),
        }
    }

    /// Begins a new connection: sends hello.
    pub fn connected(&mut self) {
        self.disconnected();
        self.stage = Stage::Greeting;
        raw::put(self.out.end(), kind::HELLO, 0, 0, self.hello.as_bytes());
    }

    /// Notes that the connection has ended. Requests without a reply are sent again on the next.
    pub fn disconnected(&mut self) {
        self.stage = Stage::Down;
        self.inbox = Inbox::default();
        self.out.clear();
    }

    /// Whether the host has welcomed this connection.
    pub fn is_up(&self) -> bool {
        self.stage == Stage::Up
    }

    /// Latest greeting of the host.
    pub fn greeting(&self) -> Option<&Greeting> {
        self.greeting.as_ref()
    }

    /// Most requests without a reply.
    pub fn max_in_flight(&self) -> usize {
        self.greeting.as_ref().map_or(1, |g| g.max_in_flight as usize)
    }

    /// Longest body of a request.
    pub fn max_body_bytes(&self) -> usize {
        self.greeting.as_ref().map_or(0, |g| g.max_body_bytes as usize)
    }

    /// Number of request slots in use: from the oldest request without a reply on.
    pub fn in_flight(&self) -> usize {
        self.asked.len()
    }

    /// Makes a request. Its reply comes as an event with the returned number.
    ///
    /// # Errors
    /// There are too many, or it is too long.
    pub fn request(&mut self, body: Vec<u8>, repeatable: bool) -> Result<u64, RelayError> {
        let limit = self.max_body_bytes();
        if body.len() > limit {
            return Err(RelayError::TooLong { len: body.len(), limit });
        }
        if self.asked.len() >= self.max_in_flight() {
            return Err(RelayError::Full(self.max_in_flight() as u32));
        }
        let (seq, flags) = (self.next_seq, if repeatable { flag::REPEATABLE } else { 0 });
        let was_sent = self.is_up();
        if was_sent {
            raw::put(self.out.end(), kind::REQUEST, flags, seq, &body);
        }
        self.next_seq += 1;
        self.asked.push_back(Asked { seq, flags, body: Some(body), was_sent, is_cancelled: false });
        Ok(seq)
    }

    /// Cancels a request in the host. Its reply still comes.
    ///
    /// # Errors
    /// There is no such request.
    pub fn cancel(&mut self, seq: u64) -> Result<(), RelayError> {
        let is_up = self.is_up();
        let asked = self.find(seq).filter(|a| a.body.is_some()).ok_or(RelayError::Unknown(seq))?;
        asked.is_cancelled = true;
        if is_up {
            raw::put(self.out.end(), kind::CANCEL, 0, seq, &[]);
        }
        Ok(())
    }

    /// Sends a ping. Lost if the connection breaks.
    ///
    /// # Errors
    /// The body is too long.
    pub fn ping(&mut self, body: &[u8]) -> Result<(), RelayError> {
        if body.len() > MAX_PING_BYTES {
            return Err(RelayError::TooLong { len: body.len(), limit: MAX_PING_BYTES });
        }
        raw::put(self.out.end(), kind::PING, 0, 0, body);
        Ok(())
    }

    /// Ends the client for good.
    pub fn goodbye(&mut self) {
        if self.stage == Stage::Up {
            raw::put(self.out.end(), kind::GOODBYE, 0, 0, &[]);
        }
    }

    /// Bytes to send.
    pub fn to_send(&self) -> &[u8] {
        self.out.rest()
    }

    /// Notes that `len` bytes were sent.
    pub fn sent(&mut self, len: usize) {
        self.out.sent(len);
    }

    /// Room for received bytes; report their number to [`Session::filled`].
    pub fn room(&mut self) -> &mut [u8] {
        self.inbox.room()
    }

    /// Notes that `len` bytes were received.
    pub fn filled(&mut self, len: usize) {
        self.inbox.filled(len);
    }

    /// Returns the next event. After an error the connection is useless.
    ///
    /// # Errors
    /// The bytes are not as `guest_abi::module` describes.
    pub fn next_event(&mut self) -> Result<Option<Event>, WireError> {
        let max_body = match self.stage {
            Stage::Up => self.max_body_bytes() as u32,
            _ => (size_of::<Welcome>() + MAX_MODULES * size_of::<ModuleInfo>()) as u32,
        };
        let Some(frame) = self.inbox.next(max_body)? else { return Ok(None) };
        let unexpected =
            WireError::Unexpected { kind: frame.kind, seq: frame.seq, len: frame.body.len() };
        match (self.stage, frame.kind) {
            (Stage::Greeting, kind::WELCOME) => self.welcomed(&frame).map(Some),
            (Stage::Up, kind::REPLY) => self.replied(frame).ok_or(unexpected).map(Some),
            (Stage::Up, kind::PONG) => Ok(Some(Event::Pong(frame.body))),
            (Stage::Up | Stage::Greeting, kind::GOODBYE) => {
                failure(&frame.body).ok_or(unexpected).map(|f| Some(Event::Goodbye(f)))
            }
            _ => Err(unexpected),
        }
    }

    fn find(&mut self, seq: u64) -> Option<&mut Asked> {
        let first = self.asked.front()?.seq;
        self.asked.get_mut(usize::try_from(seq.checked_sub(first)?).ok()?)
    }

    fn replied(&mut self, frame: Received) -> Option<Event> {
        let Received { seq, flags, body, .. } = frame;
        let answer = if flags & flag::FAILED != 0 { Err(failure(&body)?) } else { Ok(body) };
        self.find(seq)?.body.take()?;
        while self.asked.front().is_some_and(|a| a.body.is_none()) {
            self.asked.pop_front();
        }
        Some(Event::Reply { seq, answer })
    }

    fn welcomed(&mut self, frame: &Received) -> Result<Event, WireError> {
        let mut greeting = parse_welcome(&frame.body)?;
        if let Some(before) = &self.greeting {
            let is_new = self.next_seq == 1;
            let same = before.instance == greeting.instance;
            greeting.is_kept = is_new || (same && greeting.known_seq > 0);
        }
        if (greeting.max_in_flight as usize) < self.asked.len() {
            return Err(WireError::Welcome("fewer requests than before"));
        }
        self.greeting = Some(greeting.clone());
        self.stage = Stage::Up;
        self.send_again();
        Ok(Event::Welcome(greeting))
    }

    /// Sends again all requests without a reply, in order, and the cancels.
    fn send_again(&mut self) {
        for asked in &mut self.asked {
            let Some(body) = &asked.body else { continue };
            let again = if asked.was_sent { flag::AGAIN } else { 0 };
            asked.was_sent = true;
            raw::put(self.out.end(), kind::REQUEST, asked.flags | again, asked.seq, body);
            if asked.is_cancelled {
                raw::put(self.out.end(), kind::CANCEL, 0, asked.seq, &[]);
            }
        }
    }
}

fn parse_welcome(body: &[u8]) -> Result<Greeting, WireError> {
    let wrong = WireError::Welcome;
    let (welcome, rest) = Welcome::read_from_prefix(body).map_err(|_| wrong("it is cut short"))?;
    if welcome.magic.get() != MAGIC {
        return Err(wrong("its magic is another one"));
    }
    if welcome.version.get() != VERSION {
        return Err(wrong("its version was not offered"));
    }
    if !(1..=MAX_IN_FLIGHT).contains(&welcome.max_in_flight.get()) {
        return Err(wrong("requests in flight beyond the limit"));
    }
    if welcome.max_body_bytes.get() > MAX_BODY_BYTES {
        return Err(wrong("bodies beyond the limit"));
    }
    let count = usize::from(welcome.modules.get());
    if count > MAX_MODULES || rest.len() != count * size_of::<ModuleInfo>() {
        return Err(wrong("modules that are not there"));
    }
    let infos = <[ModuleInfo]>::ref_from_bytes(rest).map_err(|_| wrong("its modules"))?;
    Ok(Greeting {
        max_in_flight: welcome.max_in_flight.get(),
        max_body_bytes: welcome.max_body_bytes.get(),
        linger_ms: welcome.linger_ms.get(),
        instance: welcome.instance.get(),
        known_seq: welcome.known_seq.get(),
        modules: infos.iter().map(module).collect(),
        is_kept: true,
    })
}

fn module(info: &ModuleInfo) -> ModuleName {
    let name = info.name.split(|&b| b == 0).next().unwrap_or_default();
    ModuleName { name: String::from_utf8_lossy(name).into_owned(), hash: info.hash }
}

fn failure(body: &[u8]) -> Option<Failure> {
    let (code, text) = Code::read_from_prefix(body).ok()?;
    // The text goes to logs and terminals.
    let text = String::from_utf8_lossy(text).replace(char::is_control, " ");
    Some(Failure { code: code.code.get(), text })
}

#[cfg(test)]
mod tests;
