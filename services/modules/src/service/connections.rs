//! Connections of a module's clients: frames in, frames out.
//!
//! A client is known by its id and outlives its connections. Connections have places in a list,
//! which the kernel's events name. Frames that are requests become events for the next call of the
//! module.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_abi::module::{FRAME_BYTES, Frame, MAX_PING_BYTES, failure, flag, kind};
use guest_abi::module_call::{event, event_flag};
use guest_abi::module_ring::{RingGranted, RingWanted};
use rustix::event::epoll::{self, EventFlags};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, IntoBytes};

use super::event_buffer::EventBuffer;
use super::eviction::{Holding, find_largest};
use super::rings::{GLANCES, LOOK, Look, Rings};
use super::spec::Spec;
use crate::budget::Purse;
use crate::clients::{Client, ClientId, Clients, PendingRequest, Verdict};
use crate::conn::{
    BadFrame, Bytes, Conn, Lost, failure as failed, finish, frame, is_clients, last_words, welcome,
};
use crate::instance_state::ModuleReply;
use crate::limits::{LINGER, READ_BYTES, ROOM_BYTES};
use crate::ring::Slots;
use crate::stats::Meter;

/// Text for a connection without a ring that ends for it, where there are rings.
const RING_ONLY: &str = "this VM's modules take requests by shared memory alone, \
                         and this program has none: it may not open the device, \
                         or does not use it, or all rings are taken";
/// Text for a connection without a ring that ends for it, where there are none.
const NO_RINGS: &str =
    "this VM's modules take requests by shared memory alone, and the host could not make it";

/// Outcome of a frame.
enum FrameOutcome {
    /// Nothing more is to be done.
    Nothing,
    /// The frame is answered by this one.
    Say(Bytes),
    /// The frame is bad: the connection ends.
    Bad(BadFrame),
    /// The frame asks for a ring; with its body.
    Ring(Vec<u8>),
    /// The connection must have a ring first.
    RingOnly,
    /// The client has finished.
    Close,
}

/// Connections and clients of a module.
pub(super) struct Connections {
    /// Name of the module.
    name: String,
    /// Modules of this VM, as a welcome lists them.
    list: Arc<Vec<u8>>,
    /// Memory that clients may use in place of their sockets.
    slots: Option<Arc<Slots>>,
    /// Whether requests of the guest are taken by rings alone.
    needs_ring: bool,
    /// Set of what the thread waits for.
    epoll: OwnedFd,
    conns: Vec<Option<Conn>>,
    rings: Rings,
    pub clients: Clients,
    /// Place of the connection whose frames are taken first.
    first: usize,
    /// Whether connections have frames which did not fit into the last call.
    pub more: bool,
    /// Time at which a client may have been without a connection for too long.
    pub expires_at: Option<Instant>,
    /// Events for the next call.
    pub events: EventBuffer,
    /// Whether an instance runs: the next one is told at its start which clients there are.
    pub has_instance: bool,
    /// Instance id: random at the start, one more for each instance, never 0.
    pub instance: u64,
    /// Budget of what clients make the process hold.
    purse: Arc<Purse>,
    /// Buffer that a connection is read into at first.
    read: Box<[u8]>,
    pub meter: Meter,
    /// Bytes that went by rings, and were not reported yet.
    pub ring_bytes: u64,
}

impl Connections {
    /// Begins without any. `epoll` is a set of the thread's own; `instance` is the first id.
    pub fn new(spec: &Spec, epoll: OwnedFd, spin: Duration, instance: u64) -> Self {
        let mut meter = Meter::default();
        meter.stats.name.clone_from(&spec.name);
        Self {
            name: spec.name.clone(),
            list: Arc::clone(&spec.list),
            slots: spec.ring.as_ref().map(|(slots, _)| Arc::clone(slots)),
            needs_ring: spec.needs_ring,
            epoll,
            conns: Vec::new(),
            rings: Rings::new(spin),
            clients: Clients::new(&spec.purse),
            first: 0,
            more: false,
            expires_at: None,
            events: EventBuffer::default(),
            has_instance: false,
            instance,
            purse: Arc::clone(&spec.purse),
            read: vec![0; READ_BYTES].into(),
            meter,
            ring_bytes: 0,
        }
    }

    /// Set of what the thread waits for.
    pub fn epoll(&self) -> &OwnedFd {
        &self.epoll
    }

    /// Adds the counters of connections that are open to the module's.
    pub fn add_to_stats(&self, stats: &mut crate::ModuleStats) {
        stats.clients = self.clients.len() as u64;
        let by_ring = || self.conns.iter().flatten().filter(|conn| conn.has_ring());
        stats.rings = by_ring().count() as u64;
        stats.bells += by_ring().map(|conn| conn.bells).sum::<u64>();
    }

    /// Ends all connections.
    pub fn end_all(&mut self, code: u32, text: &str) {
        for at in 0..self.conns.len() {
            self.goodbye(at, code, text);
        }
    }

    /// Takes what the kernel reports of a connection.
    pub fn on_ready(&mut self, at: usize, flags: EventFlags) {
        let Some(Some(conn)) = self.conns.get_mut(at) else { return };
        let readable = flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR);
        if conn.has_ring() {
            return self.on_bell(at);
        }
        self.more = true;
        if readable {
            self.fill(at);
        }
    }

    /// Adds a connection that said hello.
    pub fn connect(&mut self, fd: OwnedFd, id: ClientId, of_guest: bool) {
        let now = Instant::now();
        let found = self.clients.find(id, now).or_else(|| {
            let oldest = self.clients.longest_gone()?;
            self.close_client(oldest);
            self.clients.find(id, now)
        });
        let Some((number, new)) = found else {
            let text = "too many clients of this module are connected";
            let _ = last_words(&fd, &failed(kind::GOODBYE, 0, failure::LIMIT, text));
            return;
        };
        if let Some(old) = self.clients.get_mut(number).and_then(|c| c.conn) {
            self.goodbye(old, failure::REPLACED, "the same client has connected again");
        }
        let at = self.conns.iter().position(Option::is_none).unwrap_or(self.conns.len());
        let data = epoll::EventData::new_u64(at as u64);
        if let Err(e) = epoll::add(&self.epoll, &fd, data, EventFlags::IN) {
            if new {
                // Nobody was told of it.
                self.clients.remove(number);
            }
            return tracing::warn!(module = %self.name, "a connection cannot be watched: {e}");
        }
        let mut conn = Conn::new(fd, number, &self.purse);
        conn.needs_ring = self.needs_ring && of_guest;
        let Some(client) = self.clients.get_mut(number) else { return };
        (client.conn, client.of_guest) = (Some(at), of_guest);
        conn.push(welcome(self.instance, client.highest, &self.list));
        match self.conns.get_mut(at) {
            Some(free) => *free = Some(conn),
            None => self.conns.push(Some(conn)),
        }
        if new {
            self.tell(event::OPENED, number, 0, &id);
        }
    }

    /// Sends a reason, as far as it can be written at once, and closes.
    pub fn goodbye(&mut self, at: usize, code: u32, text: &str) {
        if let Some(conn) = self.conns.get_mut(at).and_then(Option::as_mut) {
            conn.push(failed(kind::GOODBYE, 0, code, text));
            let _ = conn.flush();
        }
        self.disconnect(at);
    }

    /// Closes a connection. Its client stays for a while.
    fn disconnect(&mut self, at: usize) {
        let Some(conn) = self.conns.get_mut(at).and_then(Option::take) else { return };
        self.rings.forget(at);
        self.meter.stats.bells += conn.bells;
        self.ring_bytes += conn.ring_bytes;
        let _ = epoll::delete(&self.epoll, conn.as_fd());
        let now = Instant::now();
        self.clients.disconnected(conn.client, now);
        self.expires_at.get_or_insert(now + LINGER);
    }

    /// Closes all clients of the guest: what they have ends with it, locks of transactions, too.
    pub fn guest_gone(&mut self) {
        let of_guest = |(number, client): (u32, &mut Client)| client.of_guest.then_some(number);
        let gone: Vec<u32> = self.clients.iter_mut().filter_map(of_guest).collect();
        for number in gone {
            if let Some(at) = self.clients.get_mut(number).and_then(|client| client.conn) {
                self.disconnect(at);
            }
            self.close_client(number);
        }
    }

    /// Forgets a client for good.
    pub fn close_client(&mut self, number: u32) {
        if self.clients.remove(number).is_some() {
            self.tell(event::CLOSED, number, 0, &[]);
        }
    }

    /// Tells an instance of a client, if there is one: the next one is told which clients there
    /// are.
    fn tell(&mut self, kind: u16, client: u32, seq: u64, body: &[u8]) {
        if self.has_instance {
            self.events.push(kind, 0, client, seq, body);
        }
    }

    /// Closes clients that have been without a connection for too long.
    pub fn expire(&mut self) {
        let now = Instant::now();
        if self.expires_at.is_none_or(|at| now < at) {
            return;
        }
        let (expired, next) = self.clients.expired(now);
        expired.into_iter().for_each(|number| self.close_client(number));
        self.expires_at = next;
    }

    /// Writes what clients take, and watches connections for what they are to do next.
    pub fn flush_all(&mut self) {
        for at in 0..self.conns.len() {
            let Some(conn) = &mut self.conns[at] else { continue };
            let had_output = conn.has_output();
            if had_output && let Err(lost) = conn.flush() {
                self.end_lost(at, &lost);
                continue;
            }
            self.ring_bytes += std::mem::take(&mut conn.ring_bytes);
            if conn.has_ring() && (had_output || conn.has_ring_input()) {
                self.rings.wake(at);
            }
            self.watch(at);
        }
    }

    /// Watches a connection for what it is to do next.
    fn watch(&mut self, at: usize) {
        let Some(conn) = &mut self.conns[at] else { return };
        if conn.ended {
            // It would be ready for ever, and may have to wait until its last frames are taken.
            if !std::mem::replace(&mut conn.forgotten, true) {
                let _ = epoll::delete(&self.epoll, conn.as_fd());
            }
            return;
        }
        // Bells are heard in any case.
        let by_ring = conn.has_ring();
        let wanted = (by_ring || conn.may_read(), !by_ring && conn.has_output());
        if wanted == conn.watched {
            return;
        }
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN, wanted.0);
        flags.set(EventFlags::OUT, wanted.1);
        let data = epoll::EventData::new_u64(at as u64);
        if epoll::modify(&self.epoll, conn.as_fd(), data, flags).is_ok() {
            conn.watched = wanted;
        } else {
            self.disconnect(at);
        }
    }

    /// Takes frames of all connections, up to what a call may have.
    pub fn collect(&mut self) {
        if !std::mem::take(&mut self.more) {
            return;
        }
        let now = Instant::now();
        // Each is the first one in turn: what a call may have is not for the first few alone.
        let count = self.conns.len();
        self.first = (self.first + 1) % count.max(1);
        for at in (self.first..count).chain(0..self.first) {
            self.collect_of(at, now);
        }
    }

    /// Takes frames of one connection.
    fn collect_of(&mut self, at: usize, now: Instant) {
        loop {
            if self.events.is_full() {
                self.more = true;
                return;
            }
            // Taken out while it is looked at: what it says may be about any client.
            let Some(mut conn) = self.conns[at].take() else { return };
            let next = if conn.asks_too_early() {
                Some((0, FrameOutcome::RingOnly))
            } else {
                match conn.next() {
                    Ok(Some((head, body))) => {
                        let done = self.on_frame(&conn, &head, body, now);
                        Some((body.len(), done))
                    }
                    Ok(None) => None,
                    Err(bad) => Some((0, FrameOutcome::Bad(bad))),
                }
            };
            let Some((len, done)) = next else {
                let over = conn.ended;
                self.conns[at] = Some(conn);
                if over {
                    self.disconnect(at);
                }
                return;
            };
            conn.advance(len);
            self.meter.stats.received_bytes += (FRAME_BYTES + len) as u64;
            let number = conn.client;
            if let FrameOutcome::Say(bytes) = &done {
                conn.push(Bytes::clone(bytes));
            }
            self.conns[at] = Some(conn);
            match done {
                FrameOutcome::Nothing | FrameOutcome::Say(_) => {}
                FrameOutcome::Bad(BadFrame(text)) => self.end_bad(at, &text),
                FrameOutcome::Ring(wanted) => self.grant_ring(at, &wanted),
                FrameOutcome::RingOnly => {
                    self.meter.stats.bad += 1;
                    let why = if self.slots.is_some() { RING_ONLY } else { NO_RINGS };
                    self.goodbye(at, failure::RING_ONLY, why);
                }
                FrameOutcome::Close => {
                    self.disconnect(at);
                    self.close_client(number);
                }
            }
        }
    }

    fn on_frame(&mut self, conn: &Conn, head: &Frame, body: &[u8], now: Instant) -> FrameOutcome {
        let (kind, seq, number) = (head.kind.get(), head.seq.get(), conn.client);
        if !is_clients(kind) {
            return FrameOutcome::Bad(BadFrame(format!(
                "a frame of kind {kind}, which clients do not send"
            )));
        }
        match kind {
            kind::REQUEST => self.on_request(number, seq, head.flags.get(), body, now),
            kind::CANCEL => {
                let waits = self.clients.get_mut(number).is_some_and(|c| c.waits_for(seq));
                if waits {
                    self.tell(event::CANCEL, number, seq, &[]);
                }
                FrameOutcome::Nothing
            }
            kind::PING if body.len() <= MAX_PING_BYTES => {
                FrameOutcome::Say(frame(kind::PONG, 0, seq, &[body]))
            }
            kind::PING => FrameOutcome::Bad(BadFrame(format!("a ping of {} bytes", body.len()))),
            kind::RING => FrameOutcome::Ring(body.to_vec()),
            _ => FrameOutcome::Close,
        }
    }

    fn on_request(
        &mut self,
        number: u32,
        seq: u64,
        flags: u16,
        body: &[u8],
        now: Instant,
    ) -> FrameOutcome {
        let Some(client) = self.clients.get_mut(number) else { return FrameOutcome::Nothing };
        self.meter.stats.requests += 1;
        match client.accept(seq, flags, now) {
            Verdict::Execute => {
                let mut event_flags = 0;
                if flags & flag::AGAIN != 0 {
                    event_flags |= event_flag::AGAIN;
                }
                if flags & flag::REPEATABLE != 0 {
                    event_flags |= event_flag::REPEATABLE;
                }
                self.events.push(event::REQUEST, event_flags, number, seq, body);
                FrameOutcome::Nothing
            }
            Verdict::Resend(bytes) => {
                self.meter.stats.again += 1;
                FrameOutcome::Say(bytes)
            }
            Verdict::Wait => {
                self.meter.stats.again += 1;
                FrameOutcome::Nothing
            }
            Verdict::Refuse(code, text) => FrameOutcome::Say(failed(kind::REPLY, seq, code, &text)),
            Verdict::Bad(text) => FrameOutcome::Bad(BadFrame(text)),
        }
    }

    /// Ends a connection that sent something that is no frame, or not one that may be sent.
    fn end_bad(&mut self, at: usize, text: &str) {
        self.meter.stats.bad += 1;
        let by_ring = self.conns.get(at).and_then(Option::as_ref).is_some_and(Conn::has_ring);
        // Another program of the guest may have written there.
        self.goodbye(at, if by_ring { failure::RING } else { failure::BAD_FRAME }, text);
    }

    /// Ends a connection that is of no use any more.
    fn end_lost(&mut self, at: usize, lost: &Lost) {
        match lost {
            Lost::Gone => self.disconnect(at),
            Lost::Damaged(damaged) => self.end_bad(at, &damaged.to_string()),
        }
    }

    /// Looks at rings, for a while, before the thread sleeps. Past `until` there is other work.
    pub fn look_at_rings(&mut self, until: Option<Instant>, holds: bool) -> Look {
        // In a pause they stay awake, and are looked at after it.
        if self.rings.is_asleep() || holds {
            return Look::Wait;
        }
        let mut now = Instant::now();
        if until.is_some_and(|until| until <= now) {
            self.take_from_rings();
            return self.looks_at_sockets(now);
        }
        if std::mem::take(&mut self.rings.busy) {
            self.rings.idle_since = now;
            self.rings.spin.begin();
        }
        loop {
            for _ in 0..GLANCES {
                if self.take_from_rings() {
                    let look = now >= self.rings.looked + LOOK;
                    return if look { self.looks_at_sockets(now) } else { Look::No };
                }
                std::hint::spin_loop();
            }
            if !self.rings.spin.time().is_zero() {
                let before = Instant::now();
                std::thread::yield_now();
                now = Instant::now();
                self.rings.spin.gave_way(now - before, now - self.rings.idle_since);
            }
            let end = self.rings.idle_since + self.rings.spin.time();
            if now >= end || until.is_some_and(|until| now >= until) {
                return if self.rings.put_to_sleep(&self.conns) {
                    Look::Wait
                } else {
                    self.looks_at_sockets(now)
                };
            }
            if now >= self.rings.looked + LOOK {
                return self.looks_at_sockets(now);
            }
        }
    }

    /// Notes the time of a look at the sockets.
    fn looks_at_sockets(&mut self, now: Instant) -> Look {
        self.rings.looked = now;
        Look::Now
    }

    /// Takes what is in rings that are awake. True: there was something.
    fn take_from_rings(&mut self) -> bool {
        let mut some = false;
        for place in (0..self.rings.awake.len()).rev() {
            // One that is read may end others, for want of room.
            let Some(&at) = self.rings.awake.get(place) else { continue };
            let ready = self.conns[at].as_ref().is_some_and(|conn| conn.has_ring_input());
            if ready {
                some = true;
                self.fill(at);
            }
        }
        some
    }

    /// Gives a client the ring that it asks for.
    fn grant_ring(&mut self, at: usize, wanted: &[u8]) {
        let Some(conn) = &mut self.conns[at] else { return };
        let wanted = RingWanted::read_from_bytes(wanted).ok();
        let is_ours = |slots: &&Arc<Slots>| wanted.is_some_and(|wanted| slots.is(&wanted.id));
        let ours = self.slots.as_ref().filter(is_ours);
        let found = match ours {
            None => Err("the memory before you is not that of this module's process"),
            Some(_) if !conn.may_change_over() => {
                Err("a ring is asked for once, and while nothing is on its way")
            }
            Some(slots) => slots.take().ok_or("all rings of this VM are taken"),
        };
        let (slot, ring) = match found {
            Ok(found) => found,
            Err(why) => return conn.push(failed(kind::RING, 0, failure::RING, why)),
        };
        let stamp = U64::new(ring.stamp);
        let granted = RingGranted { slot: U32::new(slot), reserved: U32::ZERO, stamp };
        let answer = frame(kind::RING, 0, 0, &[granted.as_bytes()]);
        // The socket has taken all that was in front of this.
        if last_words(conn.socket(), &answer).is_ok_and(|n| n == answer.len()) {
            conn.change_over(ring);
            self.rings.wake(at);
        } else {
            self.disconnect(at);
        }
    }

    /// Takes a bell of a client, or the end of its socket.
    fn on_bell(&mut self, at: usize) {
        let Some(conn) = &mut self.conns[at] else { return };
        let may_read = conn.may_read();
        conn.hear_bells(&mut self.read);
        self.rings.note_bell();
        // What was written before the socket's end counts.
        if may_read {
            self.fill(at);
        }
        if self.conns[at].is_some() {
            self.rings.wake(at);
        }
        self.more = true;
    }

    /// Reads a connection, once there is room for what it may send.
    fn fill(&mut self, at: usize) {
        let growth =
            |connections: &Self| connections.conns[at].as_ref().map_or(0, |c| c.growth_bytes());
        self.make_room(growth(self));
        if self.purse.room_bytes() < growth(self) {
            self.evict(at);
        }
        // It may have been the one that made room.
        let Some(conn) = &mut self.conns[at] else { return };
        match conn.fill(&mut self.read) {
            Ok(()) if conn.has_ring() => self.rings.wake(at),
            Ok(()) => {}
            Err(lost) => self.end_lost(at, &lost),
        }
        self.more = true;
    }

    /// Makes room for the replies of the next call.
    pub fn keep_room(&mut self) {
        self.make_room(ROOM_BYTES);
    }

    /// Makes room: whoever holds most lets go of it. Kept replies are dropped but for the small
    /// ones, connections end.
    fn make_room(&mut self, wanted: usize) {
        while self.purse.room_bytes() < wanted {
            match find_largest(&self.conns, &mut self.clients) {
                Some(Holding::Replies(number)) => {
                    if let Some(client) = self.clients.get_mut(number) {
                        client.drop_spare();
                    }
                }
                Some(Holding::Conn(at)) => self.evict(at),
                None => return,
            }
        }
    }

    /// Ends a connection for want of room.
    fn evict(&mut self, at: usize) {
        let bytes = self.conns[at].as_ref().map_or(0, |conn| conn.charged_bytes());
        self.meter.stats.crowded += 1;
        tracing::debug!(module = %self.name, bytes, "a connection ends for want of room");
        let text = format!(
            "no room: requests and replies of this client take {bytes} bytes of the host, those of all \
             clients of this module {}; connect again and send less at once",
            self.purse.used_bytes()
        );
        self.goodbye(at, failure::LIMIT, &text);
    }

    /// Takes a request that is answered, and records its latency.
    fn take_answered(&mut self, number: u32, seq: u64) -> Option<PendingRequest> {
        let waiting = self.clients.get_mut(number)?.take_answered(seq)?;
        self.meter.latency.record(waiting.since.elapsed().as_nanos() as u64);
        Some(waiting)
    }

    /// Sends a reply that the module gave.
    pub fn reply(&mut self, reply: ModuleReply) {
        let ModuleReply { client, seq, frame, flags, .. } = reply;
        let Some(waiting) = self.take_answered(client, seq) else {
            let module = &self.name;
            return tracing::debug!(%module, client, seq, "the module replied to no request");
        };
        if flags & flag::FAILED != 0 {
            self.meter.stats.failed += 1;
            self.meter.stats.crowded += 1;
        }
        let bytes = finish(frame, kind::REPLY, flags, seq);
        self.send(client, seq, &bytes, !waiting.repeatable);
    }

    /// Fails a request.
    pub fn fail(&mut self, number: u32, seq: u64, code: u32, text: &str) {
        if self.take_answered(number, seq).is_some() {
            self.meter.stats.failed += 1;
            let bytes = failed(kind::REPLY, seq, code, text);
            self.send(number, seq, &bytes, true);
        }
    }

    fn send(&mut self, number: u32, seq: u64, bytes: &Bytes, keep: bool) {
        let Some(client) = self.clients.get_mut(number) else { return };
        if keep {
            client.keep(seq, bytes);
        }
        let conn = client.conn.and_then(|at| self.conns.get_mut(at)?.as_mut());
        if let Some(conn) = conn {
            self.meter.stats.sent_bytes += bytes.len() as u64;
            conn.push(Bytes::clone(bytes));
        }
    }

    /// Fails all requests that have no reply.
    pub fn fail_all(&mut self, code: u32, text: &str) {
        let waiting: Vec<(u32, u64)> = self
            .clients
            .iter_mut()
            .flat_map(|(number, client)| client.waiting().map(move |seq| (number, seq)))
            .collect();
        waiting.into_iter().for_each(|(number, seq)| self.fail(number, seq, code, text));
    }
}
