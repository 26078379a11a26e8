//! Link: a program's connection, and the client of a module that serves it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use guest_abi::module::failure;
use guest_abi::stream::{CHUNK_BYTES, MAX_REQUESTS, PIECE_BYTES, WINDOW_BYTES, reply_flag};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send, shutdown};

use crate::address::{Address, outcome};
use crate::client::{receive_some, send_some};
use crate::error::RelayError;
use crate::outbox::Outbox;
use crate::poller::{Poller, Ready};
use crate::session::{Event, Session};

/// Empty requests in flight while the module has more bytes.
const PULLS: usize = 4;
/// Most bytes that the program has not taken: above it, the module is not asked for more.
pub const BACKLOG_BYTES: usize = 512 << 10;
/// Pause between two tries to reach the host.
const PAUSE: Duration = Duration::from_millis(50);
/// Silence of the host, while a message is due, after which it is asked for a sign of life; after
/// twice that it counts as gone.
pub const SILENCE: Duration = Duration::from_secs(6);
/// Time after the last bytes in which a program that goes on sending is read: closing at once could
/// discard bytes that it has not read yet.
const LINGER: Duration = Duration::from_secs(2);
/// Rounds of one link before the turn of another.
const ROUNDS: usize = 8;

/// Settings that all links share.
#[derive(Debug)]
pub struct Plan {
    /// Address of the host.
    pub host: Address,
    /// Time for which connecting to the host is retried.
    pub patience: Duration,
    /// Bytes that go ahead of each program's.
    pub first_line: Vec<u8>,
    /// Whether the module speaks first: the relay asks it for bytes before the program sends any.
    pub is_greeted: bool,
    /// Time that the host may be silent; see [`SILENCE`].
    pub silence: Duration,
}

/// Context of a link's turn.
#[derive(Debug)]
pub struct Turning<'a> {
    /// Settings that all links share.
    pub plan: &'a Plan,
    /// Poller that waits for the host's side.
    pub poller: &'a Poller,
    /// Present time.
    pub now: Instant,
    /// Scratch buffer of [`CHUNK_BYTES`] to read into.
    pub scratch: &'a mut [u8],
}

/// Result of a turn.
#[derive(Debug)]
pub enum Turn {
    /// No work until a descriptor becomes ready.
    Idle,
    /// More work is left.
    Again,
    /// The link has ended in order.
    Done,
}

#[derive(Debug)]
enum HostEnd {
    /// Connects again at that time.
    Waiting(Instant),
    Connecting(OwnedFd),
    Up(OwnedFd),
}

/// Connection of a program and its client of a module.
#[derive(Debug)]
pub struct Link {
    local: OwnedFd,
    can_read: bool,
    can_write: bool,
    host: HostEnd,
    host_token: u64,
    host_can_read: bool,
    host_can_write: bool,
    session: Session,
    /// Bytes of requests without a reply, by number.
    lengths: BTreeMap<u64, usize>,
    unanswered_bytes: usize,
    /// Replies that came before that of an older request.
    early: BTreeMap<u64, Vec<u8>>,
    next_reply: u64,
    out: Outbox,
    has_more: bool,
    /// Whether the program has closed its sending side.
    has_ended: bool,
    /// Whether the program takes no more bytes.
    is_deaf: bool,
    /// Whether the module has sent its last bytes.
    is_closing: bool,
    lost_at: Option<Instant>,
    heard_at: Instant,
    was_pinged: bool,
    /// Bytes ahead of the program's first ones.
    first_line: Vec<u8>,
    closes_at: Option<Instant>,
}

impl Link {
    /// Link of a program's non-blocking connection and a client. `host_token` is for the poller.
    pub fn new(
        local: OwnedFd,
        session: Session,
        host_token: u64,
        plan: &Plan,
        now: Instant,
    ) -> Self {
        Self {
            local,
            can_read: true,
            can_write: true,
            host: HostEnd::Waiting(now),
            host_token,
            host_can_read: false,
            host_can_write: false,
            session,
            lengths: BTreeMap::new(),
            unanswered_bytes: 0,
            early: BTreeMap::new(),
            next_reply: 1,
            out: Outbox::default(),
            has_more: plan.is_greeted,
            has_ended: false,
            is_deaf: false,
            is_closing: false,
            lost_at: Some(now),
            heard_at: now,
            was_pinged: false,
            first_line: plan.first_line.clone(),
            closes_at: None,
        }
    }

    /// Notes that the program's side became ready.
    pub fn local_ready(&mut self, ready: Ready) {
        self.can_read |= ready.can_read;
        self.can_write |= ready.can_write;
    }

    /// Notes that the host's side became ready.
    pub fn host_ready(&mut self, ready: Ready) {
        self.host_can_read |= ready.can_read;
        self.host_can_write |= ready.can_write;
    }

    /// Whether the link has a timer that runs out soon.
    pub fn is_waiting(&self) -> bool {
        !self.session.is_up() || self.closes_at.is_some()
    }

    /// Moves all bytes that can be moved.
    ///
    /// # Errors
    /// The link has to end. The program sees its connection end.
    pub fn turn(&mut self, turning: &mut Turning<'_>) -> Result<Turn, RelayError> {
        let (plan, now) = (turning.plan, turning.now);
        self.dial(plan, turning.poller, now)?;
        for _ in 0..ROUNDS {
            let mut moved = self.read_local(turning)?;
            moved |= self.pull(now)?;
            moved |= self.exchange_with_host(plan, now)?;
            moved |= self.write_local();
            if self.is_done(turning) {
                self.session.goodbye();
                let _ = self.exchange_with_host(plan, now);
                return Ok(Turn::Done);
            }
            if !moved {
                return Ok(Turn::Idle);
            }
        }
        Ok(Turn::Again)
    }

    /// Checks time limits: a silent host is asked for a sign of life, or given up.
    ///
    /// # Errors
    /// Those of [`Link::turn`].
    pub fn tick(&mut self, plan: &Plan, now: Instant) -> Result<(), RelayError> {
        let silent = now.saturating_duration_since(self.heard_at);
        let is_wanted = self.session.in_flight() > 0 && self.out.len() < BACKLOG_BYTES;
        if matches!(self.host, HostEnd::Waiting(_)) || (self.session.is_up() && !is_wanted) {
            self.heard_at = now;
            return Ok(());
        }
        if silent >= 2 * plan.silence || (silent >= plan.silence && !self.session.is_up()) {
            return self.host_lost(plan, now, io::ErrorKind::TimedOut.into());
        }
        if silent >= plan.silence && !self.was_pinged {
            self.was_pinged = true;
            self.session.ping(b"relay")?;
        }
        Ok(())
    }

    /// Ends the link, as the relay stops.
    pub fn end(&mut self) {
        self.session.goodbye();
        if let HostEnd::Up(socket) = &self.host {
            let _ = send_some(socket, &mut self.session);
        }
    }

    fn is_done(&mut self, turning: &mut Turning<'_>) -> bool {
        let all_said = self.is_deaf || self.out.is_empty();
        if self.is_closing {
            return all_said && self.is_drained(turning);
        }
        if self.has_more {
            return self.is_deaf;
        }
        self.has_ended && self.session.in_flight() == 0 && all_said
    }

    /// Ends the link after the module's last bytes: later bytes of the program are dropped.
    fn is_drained(&mut self, turning: &mut Turning<'_>) -> bool {
        if self.is_deaf || self.has_ended {
            return true;
        }
        let closes_at = *self.closes_at.get_or_insert_with(|| {
            let _ = shutdown(&self.local, Shutdown::Write);
            turning.now + LINGER
        });
        for _ in 0..ROUNDS {
            match recv(&self.local, &mut *turning.scratch, RecvFlags::empty()) {
                Ok((0, _)) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(_) => return true,
            }
        }
        turning.now >= closes_at
    }

    fn depth(&self) -> usize {
        MAX_REQUESTS.min(self.session.max_in_flight())
    }

    /// Reads from the program and makes a request of the bytes.
    fn read_local(&mut self, turning: &mut Turning<'_>) -> Result<bool, RelayError> {
        let is_full = self.session.in_flight() >= self.depth()
            || self.unanswered_bytes + CHUNK_BYTES > WINDOW_BYTES
            || self.out.len() >= BACKLOG_BYTES;
        let may = self.can_read && !self.has_ended && !self.is_closing && self.session.is_up();
        if !may || is_full || self.has_more {
            return Ok(false);
        }
        let most =
            CHUNK_BYTES.min(self.session.max_body_bytes()).saturating_sub(self.first_line.len());
        let most = most.clamp(1, turning.scratch.len());
        let len = match recv(&self.local, &mut turning.scratch[..most], RecvFlags::empty()) {
            Ok((len, _)) => len,
            Err(Errno::AGAIN) => {
                self.can_read = false;
                return Ok(false);
            }
            Err(Errno::INTR) => return Ok(true),
            // A reset: the program is gone.
            Err(_) => {
                self.is_deaf = true;
                0
            }
        };
        self.has_ended = len == 0;
        if len > 0 {
            // Copied at its own length, as it stays until the reply.
            let body = [&self.first_line, &turning.scratch[..len]].concat();
            self.first_line = Vec::new();
            self.request(body, turning.now)?;
        }
        Ok(true)
    }

    fn request(&mut self, body: Vec<u8>, now: Instant) -> Result<(), RelayError> {
        if self.session.in_flight() == 0 {
            self.heard_at = now;
        }
        let len = body.len();
        let seq = self.session.request(body, false)?;
        self.lengths.insert(seq, len);
        self.unanswered_bytes += len;
        Ok(())
    }

    /// Asks the module for more bytes.
    fn pull(&mut self, now: Instant) -> Result<bool, RelayError> {
        let wanted = self.has_more && !self.is_deaf && !self.is_closing && self.session.is_up();
        let is_full = self.out.len() >= BACKLOG_BYTES
            || self.session.in_flight() >= PULLS.min(self.session.max_in_flight());
        if !wanted || is_full {
            return Ok(false);
        }
        self.request(Vec::new(), now)?;
        Ok(true)
    }

    /// Connects to the host when it is time to.
    fn dial(&mut self, plan: &Plan, poller: &Poller, now: Instant) -> Result<(), RelayError> {
        if !matches!(self.host, HostEnd::Waiting(at) if at <= now) {
            return Ok(());
        }
        let dialled = plan.host.dial().and_then(|socket| {
            poller.add(&socket, self.host_token)?;
            Ok(socket)
        });
        match dialled {
            Ok(socket) => {
                self.host = HostEnd::Connecting(socket);
                (self.host_can_read, self.host_can_write) = (false, false);
                self.heard_at = now;
                self.was_pinged = false;
                Ok(())
            }
            Err(error) => self.host_lost(plan, now, error),
        }
    }

    /// Handles the loss of the connection to the host, or a failed try.
    fn host_lost(&mut self, plan: &Plan, now: Instant, why: io::Error) -> Result<(), RelayError> {
        self.session.disconnected();
        let lost_at = *self.lost_at.get_or_insert(now);
        let linger = self.session.greeting().map(|g| Duration::from_millis(g.linger_ms.into()));
        let patience = plan.patience.min(linger.unwrap_or(plan.patience));
        if now.saturating_duration_since(lost_at) >= patience {
            return Err(RelayError::Gone { patience, source: why });
        }
        self.host = HostEnd::Waiting(now + PAUSE);
        Ok(())
    }

    /// Sends to the host and receives from it.
    fn exchange_with_host(&mut self, plan: &Plan, now: Instant) -> Result<bool, RelayError> {
        let done = self.finish_connecting().and_then(|()| self.exchange());
        match done {
            Ok(moved) => {
                if moved.1 {
                    self.heard_at = now;
                    self.was_pinged = false;
                }
                Ok(self.take_events(plan, now)? | moved.0 | moved.1)
            }
            Err(error) => {
                // Complete replies that came before the end count.
                self.take_events(plan, now)?;
                self.host_lost(plan, now, error)?;
                Ok(false)
            }
        }
    }

    fn finish_connecting(&mut self) -> io::Result<()> {
        if !self.host_can_write || !matches!(self.host, HostEnd::Connecting(_)) {
            return Ok(());
        }
        let nobody = HostEnd::Waiting(Instant::now());
        if let HostEnd::Connecting(socket) = std::mem::replace(&mut self.host, nobody) {
            outcome(&socket)?;
            self.session.connected();
            self.host = HostEnd::Up(socket);
        }
        Ok(())
    }

    /// Sends and receives. Returns whether bytes were sent, and whether bytes came.
    fn exchange(&mut self) -> io::Result<(bool, bool)> {
        let HostEnd::Up(socket) = &self.host else { return Ok((false, false)) };
        let (mut sent, mut came) = (false, false);
        if self.host_can_write && !self.session.to_send().is_empty() {
            sent = send_some(socket, &mut self.session)?;
            self.host_can_write = self.session.to_send().is_empty();
        }
        // A program that takes no bytes holds up those of its module.
        if self.host_can_read && self.out.len() < BACKLOG_BYTES {
            came = receive_some(socket, &mut self.session)?;
            self.host_can_read = came;
        }
        Ok((sent, came))
    }

    fn take_events(&mut self, plan: &Plan, now: Instant) -> Result<bool, RelayError> {
        let mut some = false;
        while let Some(event) = self.session.next_event()? {
            some = true;
            match event {
                Event::Welcome(greeting) if greeting.is_kept => self.lost_at = None,
                Event::Welcome(_) => return Err(RelayError::Forgotten),
                Event::Reply { seq, answer: Ok(body) } => self.replied(seq, body)?,
                Event::Reply { seq, answer: Err(failure) } => {
                    return Err(RelayError::Failed { seq, failure });
                }
                Event::Pong(_) => {}
                Event::Goodbye(why) if why.code == failure::ENDING => {
                    self.host_lost(plan, now, io::ErrorKind::ConnectionReset.into())?;
                }
                Event::Goodbye(why) => return Err(RelayError::Goodbye(why)),
            }
        }
        Ok(some)
    }

    /// Gives replies to the program in the order of the requests.
    fn replied(&mut self, seq: u64, body: Vec<u8>) -> Result<(), RelayError> {
        if body.is_empty() || body.len() > PIECE_BYTES + 1 {
            return Err(RelayError::TooLong { len: body.len(), limit: PIECE_BYTES + 1 });
        }
        self.unanswered_bytes -= self.lengths.remove(&seq).unwrap_or(0);
        self.early.insert(seq, body);
        while let Some(body) = self.early.remove(&self.next_reply) {
            self.next_reply += 1;
            let flags = body[0];
            if !self.is_deaf && !self.is_closing {
                self.out.end().extend_from_slice(&body[1..]);
            }
            self.has_more = flags & reply_flag::MORE != 0;
            self.is_closing |= flags & reply_flag::CLOSE != 0;
        }
        Ok(())
    }

    fn write_local(&mut self) -> bool {
        let mut some = false;
        while self.can_write && !self.is_deaf && !self.out.is_empty() {
            match send(&self.local, self.out.rest(), SendFlags::NOSIGNAL) {
                Ok(len) => {
                    self.out.sent(len);
                    some = true;
                }
                Err(Errno::AGAIN) => self.can_write = false,
                Err(Errno::INTR) => {}
                Err(_) => {
                    self.is_deaf = true;
                    some = true;
                }
            }
        }
        if self.is_deaf {
            self.out.clear();
        }
        some
    }
}
