//! Clients: their requests, whose turn it is, where replies go.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use sdk::{Host, reply};

use crate::lock::Granted;
use crate::record_body::RequestId;
use crate::transactions::Transactions;
use crate::wire::{self, FIRST_OP, Head, Outcome, Range};

/// Request that waits for its turn.
#[derive(Debug)]
pub struct QueuedRequest {
    /// Number of the request.
    pub seq: u64,
    /// Flags: `guest_abi::module_call::event_flag`.
    pub flags: u16,
    /// Bytes of the batch.
    pub body: Vec<u8>,
    /// Whether the client gave up.
    pub cancelled: bool,
}

/// Position of a scan that goes on later.
#[derive(Debug)]
pub struct Cursor {
    /// Rest of its range.
    pub range: Range,
    /// Offset of its answer in the reply.
    pub answer_at: usize,
    /// Number of rows in the answer.
    pub rows: u32,
    /// Bytes of keys and values in the answer.
    pub bytes: u64,
    /// Number of entries that a filter was tried on.
    pub examined: u32,
}

/// Destination of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplyTo {
    /// The host's number for the client.
    pub client: u32,
    /// Count of clients when it opened: numbers are used again.
    pub epoch: u64,
    /// Number of the request.
    pub seq: u64,
    /// Whether it waits until all is durable.
    pub durable: bool,
}

/// Request that is being executed, or waits in the middle of it.
#[derive(Debug)]
pub struct ActiveRequest {
    /// Destination of its reply.
    pub to: ReplyTo,
    /// Head of the batch.
    pub head: Head,
    /// Offset of the next op in the body.
    pub at: usize,
    /// Number of the next op.
    pub op: u32,
    /// Reply so far.
    pub out: Vec<u8>,
    /// Number of answers in the reply.
    pub answers: u32,
    /// The store's number of its transaction.
    pub tx: u64,
    /// Time until which the op waits for a lock.
    pub deadline_ms: Option<u64>,
    /// Whether that time is over.
    pub timed_out: bool,
    /// Whether its transaction has the snapshot that the batch wants.
    pub has_snapshot: bool,
    /// Whether the client gave up.
    pub cancelled: bool,
    /// Position of the op, if it is a scan.
    pub cursor: Option<Cursor>,
    /// Client and number, for the log.
    pub request_id: RequestId,
    /// Bytes of the batch; empty while it is executed.
    pub body: Vec<u8>,
}

/// Client.
#[derive(Debug)]
pub struct Client {
    /// Id that it gave itself.
    pub id: [u8; 16],
    /// Count of clients when it opened.
    pub epoch: u64,
    /// Open transaction: the client's number, and the store's.
    pub tx: Option<(u64, u64)>,
    /// Requests that wait for their turn.
    pub queue: VecDeque<QueuedRequest>,
    /// Request that was begun and waits.
    pub active: Option<Box<ActiveRequest>>,
    /// Whether a commit waits for the log, or an end for its locks.
    pub busy: bool,
    /// Whether it is in the list of clients whose turn comes.
    pub is_ready: bool,
}

impl ActiveRequest {
    /// Begins a request. `out` becomes its reply.
    pub fn begin(to: ReplyTo, head: Head, request_id: RequestId, out: Vec<u8>) -> Self {
        Self {
            to,
            head,
            at: FIRST_OP,
            op: 0,
            out,
            answers: 0,
            tx: 0,
            deadline_ms: None,
            timed_out: false,
            has_snapshot: false,
            cancelled: false,
            cursor: None,
            request_id,
            body: Vec::new(),
        }
    }

    /// Outcome of a batch with so many ops done.
    pub fn outcome(&self, status: u16, done: u32, ended: bool) -> Outcome {
        Outcome { status, done, ended, replayed: false, answers: self.answers }
    }
}

impl Client {
    /// Whether it has no request that was begun, so that the next one may begin.
    pub fn is_free(&self) -> bool {
        self.active.is_none() && !self.busy
    }
}

/// Largest buffer for replies that is kept.
const KEPT_BYTES: usize = 1 << 20;

/// All clients, and whose turn it is.
#[derive(Debug, Default)]
pub struct Clients {
    /// Clients by the host's number.
    open: BTreeMap<u32, Client>,
    /// Number of clients that have opened since the start.
    epoch: u64,
    /// Clients that can get on.
    ready: VecDeque<u32>,
    /// Clients that wait for a lock, by the time at which they stop.
    timers: BTreeSet<(u64, u32)>,
    /// Buffer for the next reply.
    spare: Vec<u8>,
}

impl Clients {
    /// Adds a client.
    pub fn open(&mut self, client: u32, id: [u8; 16]) {
        self.epoch += 1;
        let (epoch, queue) = (self.epoch, VecDeque::new());
        let (tx, active, busy, is_ready) = (None, None, false, false);
        self.open.insert(client, Client { id, epoch, tx, queue, active, busy, is_ready });
    }

    /// Removes a client.
    pub fn close(&mut self, client: u32) -> Option<Client> {
        self.open.remove(&client)
    }

    /// Finds a client.
    pub fn get(&self, client: u32) -> Option<&Client> {
        self.open.get(&client)
    }

    /// Finds a client, to change it.
    pub fn get_mut(&mut self, client: u32) -> Option<&mut Client> {
        self.open.get_mut(&client)
    }

    /// Finds the client of a reply, unless another one has its number now.
    pub fn get_same(&mut self, to: ReplyTo) -> Option<&mut Client> {
        self.open.get_mut(&to.client).filter(|client| client.epoch == to.epoch)
    }

    /// Whether a client has no open transaction.
    pub fn has_no_tx(&self, client: u32) -> bool {
        self.open.get(&client).is_none_or(|client| client.tx.is_none())
    }

    /// Puts a client into the list of those whose turn comes, once.
    pub fn make_ready(&mut self, client: u32) {
        if let Some(known) = self.open.get_mut(&client).filter(|known| !known.is_ready) {
            known.is_ready = true;
            self.ready.push_back(client);
        }
    }

    /// Makes a client ready that is free and has more requests.
    pub fn make_ready_if_free(&mut self, client: u32) {
        if self.open.get(&client).is_some_and(|known| known.is_free() && !known.queue.is_empty()) {
            self.make_ready(client);
        }
    }

    /// Takes the next client whose turn it is.
    pub fn pop_ready(&mut self) -> Option<u32> {
        self.ready.pop_front()
    }

    /// Whether a client can get on.
    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Hands out locks to the transactions that waited for them: their clients go on.
    pub fn grant(&mut self, granted: Vec<Granted>, txs: &mut Transactions) {
        for lock in granted {
            if let Some(client) = txs.add_lock(lock) {
                self.make_ready(client);
            }
        }
    }

    /// Starts the timer of a request that waits for a lock.
    pub fn start_timer(&mut self, request: &ActiveRequest) {
        if let Some(deadline_ms) = request.deadline_ms {
            self.timers.insert((deadline_ms, request.to.client));
        }
    }

    /// Stops the timer of a request.
    pub fn stop_timer(&mut self, request: &ActiveRequest) {
        if let Some(deadline_ms) = request.deadline_ms {
            self.timers.remove(&(deadline_ms, request.to.client));
        }
    }

    /// First time at which a client stops waiting.
    pub fn first_deadline_ms(&self) -> Option<u64> {
        self.timers.first().map(|(deadline_ms, _)| *deadline_ms)
    }

    /// Takes the next client whose time is over.
    pub fn pop_expired(&mut self, now_ms: u64) -> Option<u32> {
        let (deadline_ms, client) = self.timers.first().copied()?;
        (deadline_ms <= now_ms).then(|| self.timers.pop_first())?;
        Some(client)
    }

    /// Buffer for a reply, with room for its head.
    pub fn take_buffer(&mut self) -> Vec<u8> {
        let mut out = core::mem::take(&mut self.spare);
        out.clear();
        out.resize(wire::REPLY_BYTES, 0);
        out
    }

    /// Keeps a buffer for the next reply, unless it is too large.
    pub fn keep_buffer(&mut self, buffer: Vec<u8>) {
        if buffer.capacity() <= KEPT_BYTES {
            self.spare = buffer;
        }
    }

    /// Keeps a buffer if it is larger than the one that is kept.
    pub fn keep_larger_buffer(&mut self, buffer: Vec<u8>) {
        if self.spare.capacity() < buffer.capacity() {
            self.keep_buffer(buffer);
        }
    }

    /// Sends a reply, unless its client is gone. The client is free for its next request.
    pub fn send(&mut self, host: &mut dyn Host, to: ReplyTo, bytes: &[u8]) {
        let Some(client) = self.get_same(to) else { return };
        client.busy = false;
        send_reply(host, to, bytes);
    }
}

/// Hands a reply to the host.
pub fn send_reply(host: &mut dyn Host, to: ReplyTo, bytes: &[u8]) {
    let flags = if to.durable { reply::DURABLE } else { 0 };
    if let Err(errno) = host.reply(to.client, to.seq, flags, bytes) {
        host.log(
            2,
            &alloc::format!("reply to request {} of client {}: {errno}", to.seq, to.client),
        );
    }
}
