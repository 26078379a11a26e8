//! Clients: their requests without a reply, and the replies that may be wanted again.
//!
//! A client is known by its id and outlives its connections by [`LINGER`]. The rules are those of
//! `guest_abi::module`: numbers grow; a number that was seen is executed again only if it changes
//! nothing.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use guest_abi::module::{MAX_IN_FLIGHT, failure, flag};

use crate::budget::{Charge, Purse};
use crate::conn::Bytes;
use crate::limits::{FRAME_OVERHEAD_BYTES, KEPT_ANYWAY_BYTES, KEPT_BYTES, LINGER, MAX_CLIENTS};

/// Id that a client gave itself.
pub(crate) type ClientId = [u8; 16];

/// Request without a reply.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PendingRequest {
    /// Whether it changes nothing.
    pub repeatable: bool,
    /// Time when it came.
    pub since: Instant,
}

/// Client of a module.
#[derive(Debug)]
pub(crate) struct Client {
    pub id: ClientId,
    /// Place of its connection, if it has one.
    pub conn: Option<usize>,
    /// Whether it is a program of the guest.
    pub of_guest: bool,
    /// Time since which it has no connection.
    since: Instant,
    /// Highest number of a request that came.
    pub highest: u64,
    waiting: BTreeMap<u64, PendingRequest>,
    kept: VecDeque<(u64, Bytes)>,
    kept_bytes: usize,
    /// Memory of the process that the kept replies take.
    charge: Charge,
}

/// Verdict on a request.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// The module gets it.
    Execute,
    /// The request was answered: the reply is sent again.
    Resend(Bytes),
    /// The request is being executed.
    Wait,
    /// The request may not be executed: code and text.
    Refuse(u32, String),
    /// The client does not keep to the rules.
    Bad(String),
}

impl Client {
    fn new(id: ClientId, now: Instant, purse: &Arc<Purse>) -> Self {
        Self {
            id,
            conn: None,
            of_guest: false,
            since: now,
            highest: 0,
            waiting: BTreeMap::new(),
            kept: VecDeque::new(),
            kept_bytes: 0,
            charge: Charge::new(purse),
        }
    }

    /// Takes a request in.
    pub fn accept(&mut self, seq: u64, flags: u16, now: Instant) -> Verdict {
        let repeatable = flags & flag::REPEATABLE != 0;
        // As far as a module can count.
        if seq == 0 || seq > i64::MAX as u64 || flags & !(flag::REPEATABLE | flag::AGAIN) != 0 {
            return Verdict::Bad(format!("request {seq} with flags {flags:#x}"));
        }
        if seq <= self.highest {
            if flags & flag::AGAIN == 0 {
                return Verdict::Bad(format!("request {seq} after {}", self.highest));
            }
            if self.waiting.contains_key(&seq) {
                return Verdict::Wait;
            }
            if let Some((_, bytes)) = self.kept.iter().find(|(kept, _)| *kept == seq) {
                return Verdict::Resend(Bytes::clone(bytes));
            }
            if !repeatable {
                let text = format!("the reply to request {seq} is not kept any more");
                return Verdict::Refuse(failure::OUT_OF_ORDER, text);
            }
        }
        if self.waiting.len() >= MAX_IN_FLIGHT as usize {
            return Verdict::Bad(format!("more than {MAX_IN_FLIGHT} requests without a reply"));
        }
        self.highest = self.highest.max(seq);
        self.waiting.insert(seq, PendingRequest { repeatable, since: now });
        self.forget_old();
        Verdict::Execute
    }

    /// Forgets replies that the client must have.
    fn forget_old(&mut self) {
        while let Some((seq, _)) = self.kept.front()
            && seq.saturating_add(MAX_IN_FLIGHT.into()) <= self.highest
        {
            self.drop_first();
        }
    }

    fn drop_first(&mut self) {
        if let Some((_, bytes)) = self.kept.pop_front() {
            self.kept_bytes -= bytes.len();
            self.count();
        }
    }

    fn count(&mut self) {
        self.charge.set(self.kept_bytes + self.kept.len() * FRAME_OVERHEAD_BYTES);
    }

    /// Bytes of kept replies that could be dropped.
    pub fn spare_bytes(&self) -> usize {
        self.charge.bytes().saturating_sub(KEPT_ANYWAY_BYTES)
    }

    /// Drops kept replies, the oldest first, until there is nothing to spare.
    pub fn drop_spare(&mut self) {
        while self.spare_bytes() > 0 {
            self.drop_first();
        }
    }

    /// Takes a request that is answered. None: there is no such request.
    pub fn take_answered(&mut self, seq: u64) -> Option<PendingRequest> {
        self.waiting.remove(&seq)
    }

    /// Keeps the reply, should the connection break before the client has it.
    pub fn keep(&mut self, seq: u64, bytes: &Bytes) {
        self.kept_bytes += bytes.len();
        self.kept.push_back((seq, Bytes::clone(bytes)));
        while self.kept_bytes > KEPT_BYTES {
            self.drop_first();
        }
        self.count();
    }

    /// Whether a request is without a reply.
    pub fn waits_for(&self, seq: u64) -> bool {
        self.waiting.contains_key(&seq)
    }

    /// Numbers of the requests without a reply.
    pub fn waiting(&self) -> impl Iterator<Item = u64> + '_ {
        self.waiting.keys().copied()
    }
}

/// All clients of a module.
#[derive(Debug)]
pub(crate) struct Clients {
    purse: Arc<Purse>,
    slots: Vec<Option<Client>>,
    ids: HashMap<ClientId, u32>,
}

impl Clients {
    /// Begins without any. What is kept for them is counted in `purse`.
    pub fn new(purse: &Arc<Purse>) -> Self {
        Self { purse: Arc::clone(purse), slots: Vec::new(), ids: HashMap::new() }
    }

    /// Number of clients.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn get_mut(&mut self, number: u32) -> Option<&mut Client> {
        self.slots.get_mut(number as usize)?.as_mut()
    }

    /// Finds or makes a client: its number, and whether it is new. None: there are too many.
    pub fn find(&mut self, id: ClientId, now: Instant) -> Option<(u32, bool)> {
        if let Some(number) = self.ids.get(&id) {
            return Some((*number, false));
        }
        if self.ids.len() >= MAX_CLIENTS {
            return None;
        }
        let free = self.slots.iter().position(Option::is_none);
        let at = free.unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[at] = Some(Client::new(id, now, &self.purse));
        self.ids.insert(id, at as u32);
        Some((at as u32, true))
    }

    /// Notes that a client's connection has gone.
    pub fn disconnected(&mut self, number: u32, now: Instant) {
        if let Some(client) = self.get_mut(number) {
            (client.conn, client.since) = (None, now);
        }
    }

    /// Forgets a client.
    pub fn remove(&mut self, number: u32) -> Option<Client> {
        let client = self.slots.get_mut(number as usize)?.take()?;
        self.ids.remove(&client.id);
        Some(client)
    }

    /// Finds the client that has been without a connection for longest.
    pub fn longest_gone(&self) -> Option<u32> {
        self.gone().min_by_key(|(_, since)| *since).map(|(number, _)| number)
    }

    fn gone(&self) -> impl Iterator<Item = (u32, Instant)> + '_ {
        let gone = |client: &Client| client.conn.is_none().then_some(client.since);
        (0..).zip(&self.slots).filter_map(move |(n, c)| Some((n, gone(c.as_ref()?)?)))
    }

    /// Finds clients whose time without a connection is over, and the time at which the next one's
    /// is.
    pub fn expired(&self, now: Instant) -> (Vec<u32>, Option<Instant>) {
        let over = |since: Instant| now.saturating_duration_since(since) >= LINGER;
        let expired = self.gone().filter(|(_, since)| over(*since)).map(|(number, _)| number);
        let next = self.gone().filter(|(_, since)| !over(*since)).map(|(_, since)| since + LINGER);
        (expired.collect(), next.min())
    }

    /// Iterates over all clients, with their numbers.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (u32, &mut Client)> {
        (0..).zip(&mut self.slots).filter_map(|(number, client)| Some((number, client.as_mut()?)))
    }
}

#[cfg(test)]
mod tests;
