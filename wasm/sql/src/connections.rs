//! Clients and their streams: bytes in, packets, bytes out (`guest_abi::stream`).
//!
//! # Theory of operation
//! Unlike the streams of `sdk::stream`, these may answer later: a statement may wait for who
//! writes, or take several calls. A client's requests stay without a reply meanwhile, and the relay
//! with them. Who has more to do is served in turn, a statement or a piece of its rows at a time,
//! until the call has done enough; then the module asks to be woken at once.
//!
//! What was committed is durable once the host has synced, so from a commit on all replies of the
//! call wait for that: also those of clients that may have read what was committed.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use guest_abi::stream::{PIECE_BYTES, WINDOW_BYTES, reply_flag};
use sdk::{Event, reply};

use crate::errors::{SqlError, code};
use crate::packet::{self, HEAD_BYTES, MAX_PAYLOAD_BYTES};
use crate::session::{Phase, Session};
use crate::shared::Shared;
use crate::statement::Progress;

/// Limit of clients.
pub const MAX_CLIENTS: usize = 256;
/// Limit of bytes of all clients that wait: statements that have not come in whole, and rows that
/// were not taken.
const MAX_HELD_BYTES: usize = 64 << 20;
/// Limit of bytes of one client that wait to be taken.
const MAX_INPUT_BYTES: usize = MAX_PAYLOAD_BYTES + HEAD_BYTES + WINDOW_BYTES;

#[derive(Debug, Default)]
struct Connection {
    session: Session,
    last_seq: u64,
    input: Vec<u8>,
    out: Vec<u8>,
    /// Requests without a reply.
    unanswered: VecDeque<u64>,
    /// Whether it waits in the line of those that have something to do.
    is_queued: bool,
    /// Whether it waits for another client that writes.
    is_blocked: bool,
}

/// All clients.
#[derive(Debug, Default)]
pub struct Connections {
    conns: BTreeMap<u32, Connection>,
    ready: VecDeque<u32>,
    blocked: VecDeque<u32>,
    held_bytes: usize,
    /// A reply of this call waits for a sync.
    said_durable: bool,
}

impl Connection {
    fn held_bytes(&self) -> usize {
        let work = self.session.statement().map_or(0, |statement| statement.held_bytes());
        self.input.len() + self.out.len() + work
    }

    fn is_over(&self) -> bool {
        self.session.phase == Phase::Over
    }

    /// Whether there is something to do for it.
    fn has_work(&self) -> bool {
        let may_say = self.out.len() <= PIECE_BYTES && !self.is_over();
        may_say
            && (self.session.statement().is_some()
                || self.session.phase == Phase::New
                || packet::take(&self.input).is_some()
                || packet::is_too_long(&self.input))
    }

    /// Executes one statement, or a piece of its rows.
    fn turn(&mut self, shared: &mut Shared) {
        if self.session.phase == Phase::New {
            return self.session.greet(shared, &mut self.out);
        }
        if self.session.statement().is_none() {
            if packet::is_too_long(&self.input) {
                let text = "Got a packet bigger than 'max_allowed_packet' bytes (16777214)";
                let error = SqlError::new(code::PACKET_TOO_LARGE, text);
                return self.session.refuse(&error, &mut self.out);
            }
            let Some((number, payload, used)) = packet::take(&self.input) else { return };
            self.session.take(shared, number, payload, &mut self.out);
            self.input.drain(..used);
            // A long statement was the exception.
            if self.input.capacity() > 2 * WINDOW_BYTES {
                self.input.shrink_to_fit();
            }
        }
        if self.session.statement().is_some() {
            self.is_blocked = self.session.go_on(shared, &mut self.out) == Progress::Blocked;
        }
    }
}

impl Connections {
    /// Takes what came.
    pub fn take(&mut self, shared: &mut Shared, event: Event<'_>) {
        match event {
            Event::Opened { client, .. } => {
                self.remove(shared, client);
                let mut conn = Connection::default();
                if self.conns.len() >= MAX_CLIENTS {
                    let text = alloc::format!("Too many connections: {MAX_CLIENTS} is the most");
                    let error = SqlError::new(code::TOO_MANY_CONNECTIONS, text);
                    conn.session.refuse(&error, &mut conn.out);
                }
                // Each has an end of its own: one too many is told so, and takes no more than that.
                self.held_bytes += conn.held_bytes();
                self.conns.insert(client, conn);
            }
            Event::Closed { client } => self.remove(shared, client),
            Event::Request { client, seq, body, .. } => self.request(shared, client, seq, body),
            Event::Cancel { client, .. } => self.answer_all(shared, client),
            Event::Wake | Event::Ending => {}
        }
    }

    fn remove(&mut self, shared: &mut Shared, client: u32) {
        if let Some(mut conn) = self.conns.remove(&client) {
            self.held_bytes -= conn.held_bytes();
            self.ready.retain(|c| *c != client);
            self.blocked.retain(|c| *c != client);
            conn.session.end(shared);
        }
    }

    fn request(&mut self, shared: &mut Shared, client: u32, seq: u64, body: &[u8]) {
        let close = [reply_flag::CLOSE];
        let Some(conn) = self.conns.get_mut(&client) else {
            // One that has gone needs none.
            let _ = shared.disk.call(|host| host.reply(client, seq, 0, &close));
            return;
        };
        conn.unanswered.push_back(seq);
        if seq != conn.last_seq + 1 {
            // An earlier life of the module began it.
            return self.end(shared, client);
        }
        conn.last_seq = seq;
        if !conn.is_over() {
            conn.input.extend_from_slice(body);
            self.held_bytes += body.len();
        }
        if conn.input.len() > MAX_INPUT_BYTES || self.held_bytes > MAX_HELD_BYTES {
            return self.end(shared, client);
        }
        if !conn.is_queued && !conn.is_blocked {
            conn.is_queued = true;
            self.ready.push_back(client);
        }
    }

    /// Ends a connection at once: there is nothing more to say.
    fn end(&mut self, shared: &mut Shared, client: u32) {
        let Some(conn) = self.conns.get_mut(&client) else { return };
        self.held_bytes -= conn.held_bytes();
        conn.session.end(shared);
        (conn.input, conn.out) = (Vec::new(), Vec::new());
        conn.is_blocked = false;
        self.blocked.retain(|c| *c != client);
        self.answer_all(shared, client);
    }

    /// Serves those that have something to do, until the call has done enough.
    pub fn serve(&mut self, shared: &mut Shared) {
        self.said_durable = false;
        loop {
            self.free_blocked(shared);
            let Some(client) = self.ready.pop_front() else { break };
            self.turn(shared, client);
            if shared.is_late() {
                break;
            }
        }
        self.time_out(shared);
        if self.said_durable {
            shared.is_dirty = false;
        }
        self.ask_to_be_woken(shared);
    }

    fn turn(&mut self, shared: &mut Shared, client: u32) {
        let Some(conn) = self.conns.get_mut(&client) else { return };
        let before = conn.held_bytes();
        conn.is_queued = false;
        if conn.has_work() {
            conn.turn(shared);
        }
        if conn.is_over() {
            conn.session.end(shared);
            conn.input = Vec::new();
        }
        if conn.is_blocked {
            self.blocked.push_back(client);
        } else if conn.has_work() {
            conn.is_queued = true;
            self.ready.push_back(client);
        }
        self.held_bytes = self.held_bytes - before + conn.held_bytes();
        self.answer(shared, client, false);
    }

    /// Lets clients go on that wait for one that wrote, in the order in which they came.
    fn free_blocked(&mut self, shared: &mut Shared) {
        if !core::mem::take(&mut shared.is_freed) {
            return;
        }
        while let Some(client) = self.blocked.pop_back() {
            if let Some(conn) = self.conns.get_mut(&client) {
                (conn.is_blocked, conn.is_queued) = (false, true);
                self.ready.push_front(client);
            }
        }
    }

    fn time_out(&mut self, shared: &mut Shared) {
        let now_ms = shared.disk.now_ms();
        let is_late = |conns: &BTreeMap<u32, Connection>, client: &u32| {
            let work = conns.get(client).and_then(|conn| conn.session.statement());
            work.is_some_and(|work| work.gives_up_ms() <= now_ms)
        };
        while let Some(at) = self.blocked.iter().position(|client| is_late(&self.conns, client)) {
            let Some(client) = self.blocked.remove(at) else { return };
            let Some(conn) = self.conns.get_mut(&client) else { continue };
            let before = conn.held_bytes();
            conn.is_blocked = false;
            conn.session.give_up(shared, &mut conn.out);
            if conn.has_work() {
                conn.is_queued = true;
                self.ready.push_back(client);
            }
            self.held_bytes = self.held_bytes - before + conn.held_bytes();
            self.answer(shared, client, false);
        }
    }

    fn ask_to_be_woken(&mut self, shared: &mut Shared) {
        let now_ms = shared.disk.now_ms();
        let work = |client| self.conns.get(client).and_then(|conn| conn.session.statement());
        let first = self.blocked.iter().filter_map(work).map(|work| work.gives_up_ms()).min();
        let wait_ms = match first {
            _ if !self.ready.is_empty() || shared.is_freed => Some(0),
            Some(at_ms) => Some(at_ms.saturating_sub(now_ms).min(u64::from(u32::MAX)) as u32),
            None => None,
        };
        if let Some(ms) = wait_ms {
            let _ = shared.disk.call(|host| {
                host.wake_after(ms);
                Ok(())
            });
        }
    }

    /// Answers what a client has asked, also if there is nothing to say.
    fn answer_all(&mut self, shared: &mut Shared, client: u32) {
        self.answer(shared, client, true);
    }

    /// Replies with what there is to say. As long as something is under way and nothing to say,
    /// requests wait.
    fn answer(&mut self, shared: &mut Shared, client: u32, also_empty: bool) {
        let Some(conn) = self.conns.get_mut(&client) else { return };
        loop {
            let is_busy = conn.is_queued || conn.is_blocked;
            if conn.unanswered.is_empty() || (conn.out.is_empty() && is_busy && !also_empty) {
                return;
            }
            let Some(seq) = conn.unanswered.pop_front() else { return };
            let len = conn.out.len().min(PIECE_BYTES);
            let mut body = Vec::with_capacity(len + 1);
            body.push(0);
            body.extend(conn.out.drain(..len));
            self.held_bytes -= len;
            conn.out.shrink_to(PIECE_BYTES);
            // A piece was taken: there may be room for more.
            if !conn.is_queued && !conn.is_blocked && conn.has_work() {
                conn.is_queued = true;
                self.ready.push_back(client);
            }
            let is_more = !conn.out.is_empty() || conn.is_queued || conn.is_blocked;
            body[0] = match (is_more, conn.is_over()) {
                (true, _) => reply_flag::MORE,
                (false, true) => reply_flag::CLOSE,
                (false, false) => 0,
            };
            let flags = if shared.is_dirty { reply::DURABLE } else { 0 };
            self.said_durable |= shared.is_dirty;
            // One that has gone needs none.
            let _ = shared.disk.call(|host| host.reply(client, seq, flags, &body));
        }
    }
}
