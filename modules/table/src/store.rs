//! The store: who takes which event, and what is done in which order.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use guest_abi::module_call::event_flag;
use guest_abi::table::status;
use sdk::{Errno, Event, Events, Host, Module, reply};

use crate::catalog::Catalog;
use crate::checkpoint::Checkpoint;
use crate::clients::{Client, Queued, Remembered, Running, To};
use crate::commit::{Job, Pending};
use crate::compact::Compaction;
use crate::deed::Note;
use crate::fail::{Fail, fail};
use crate::lock::{Granted, Locks};
use crate::log::{Log, Place};
use crate::tx::{Tx, Where};
use crate::wire::{self, FIRST_OP, Outcome, REPLY_BYTES};

/// What a store may use.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// A segment of the log that is longer is not appended to any more.
    pub segment_bytes: u64,
    /// A transaction with more ops than this puts them into the log before its commit.
    pub spill_bytes: usize,
    /// After so many bytes of log, at least, another checkpoint is made.
    pub checkpoint_bytes: u64,
    /// The estimate of memory above which writes fail, should the host allow more.
    pub memory_bytes: u64,
    /// Whether the allocator has so many bytes more.
    pub has_room: fn(usize) -> bool,
    /// The largest reserve for records of what frees space on a full disk. 0: there is no reserve.
    pub reserve_bytes: u64,
    /// What one call may do: ops, keys that are looked at, pages that are read.
    pub steps: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            segment_bytes: 64 << 20,
            spill_bytes: 1 << 20,
            checkpoint_bytes: 64 << 20,
            memory_bytes: u64::MAX,
            has_room: crate::memory::has_room,
            reserve_bytes: 4 << 20,
            steps: 16_384,
        }
    }
}

/// A key with versions that somebody still wants: when they are not wanted any more.
#[derive(Debug)]
pub struct Garbage {
    /// Once no snapshot is older than this commit.
    pub commit: u64,
    /// The index.
    pub place: Where,
    /// The key.
    pub key: Box<[u8]>,
}

/// The table store.
#[derive(Debug, Default)]
pub struct Store {
    pub(crate) config: Config,
    /// So much memory may be in use without another question to the allocator.
    pub(crate) proven_bytes: u64,
    /// What was in use when the allocator had no more.
    pub(crate) found_bytes: Option<u64>,
    pub(crate) log: Log,
    pub(crate) catalog: Catalog,
    pub(crate) locks: Locks,
    /// Those that are not executed at the moment, by the store's own number.
    pub(crate) txs: BTreeMap<u64, Box<Tx>>,
    pub(crate) next_tx: u64,
    pub(crate) clients: BTreeMap<u32, Client>,
    pub(crate) epoch: u64,
    pub(crate) remembered: Remembered,
    /// Prepared transactions by name.
    pub(crate) prepared: BTreeMap<Box<[u8]>, u64>,
    /// Names that a prepare uses which is not in the log yet.
    pub(crate) preparing: BTreeSet<Box<[u8]>>,
    /// How many transactions use each snapshot.
    pub(crate) snapshots: BTreeMap<u64, u32>,
    /// The last commit that readers see.
    pub(crate) visible: u64,
    /// The last commit that has a number.
    pub(crate) last_commit: u64,
    /// What is staged in the log, in its order.
    pub(crate) pending: Vec<Pending>,
    /// What is in the log and not in memory yet, in its order.
    pub(crate) applies: VecDeque<Job>,
    /// Transactions that are over and still hold something.
    pub(crate) releases: VecDeque<Job>,
    /// Clients that can get on.
    pub(crate) ready: VecDeque<u32>,
    /// Clients that wait, by when they stop.
    pub(crate) timers: BTreeSet<(u64, u32)>,
    pub(crate) garbage: VecDeque<Garbage>,
    pub(crate) checkpoint: Option<Box<Checkpoint>>,
    /// Where replay begins, by the last checkpoint.
    pub(crate) replay_from: Place,
    /// Of the last checkpoint: its number, its bytes, and the log's bytes when it began.
    pub(crate) checkpoint_number: u64,
    pub(crate) checkpoint_len: u64,
    pub(crate) checkpoint_at: u64,
    /// A checkpoint would make segments removable.
    pub(crate) checkpoint_wanted: bool,
    /// Not before this time, since the last try failed.
    pub(crate) checkpoint_after_ms: u64,
    pub(crate) compaction: Option<Box<Compaction>>,
    /// None is looked for before the log has so many bytes, and before this time.
    pub(crate) compact_at: u64,
    pub(crate) compact_after_ms: u64,
    /// Steps left in this call.
    pub(crate) steps: u64,
    /// A buffer for replies.
    pub(crate) spare: Vec<u8>,
}

/// Largest buffer for replies that stays.
const KEPT_BYTES: usize = 1 << 20;

impl Store {
    fn take(&mut self, host: &mut dyn Host, event: Event<'_>) {
        match event {
            Event::Opened { client, id } => {
                self.close(client);
                self.epoch += 1;
                let (epoch, queue) = (self.epoch, VecDeque::new());
                let new = Client {
                    id,
                    epoch,
                    tx: None,
                    queue,
                    active: None,
                    busy: false,
                    is_ready: false,
                };
                self.clients.insert(client, new);
            }
            Event::Request { client, seq, flags, body } => {
                self.request(
                    host,
                    client,
                    Queued { seq, flags, body: Vec::new(), cancelled: false },
                    body,
                );
            }
            Event::Cancel { client, seq } => self.cancel(client, seq),
            Event::Closed { client } => self.close(client),
            Event::Wake => {}
            Event::Ending => self.ending(host),
        }
    }

    fn request(&mut self, host: &mut dyn Host, client: u32, mut queued: Queued, body: &[u8]) {
        let Some(known) = self.clients.get_mut(&client) else {
            let to = To { client, epoch: 0, seq: queued.seq, durable: false };
            let fail = fail!(BAD_REQUEST, "client {client} was not announced");
            let bytes = refusal(&fail, true);
            let _ = host.reply(to.client, to.seq, 0, &bytes);
            return;
        };
        let idle = known.active.is_none() && !known.busy && known.queue.is_empty();
        if idle && self.steps > 0 {
            let run = self.begin(host, client, &queued, body);
            if let Some(run) = run {
                self.go_on(host, run, body, true);
            }
            return;
        }
        let to = To { client, epoch: known.epoch, seq: queued.seq, durable: false };
        let ended = known.tx.is_none();
        if let Err(fail) = self.check_memory(body.len() as u64) {
            self.tell(host, to, &refusal(&fail, ended));
            return;
        }
        let Some(known) = self.clients.get_mut(&client) else { return };
        queued.body = body.to_vec();
        self.log.books.memory += body.len() as u64;
        known.queue.push_back(queued);
        if idle {
            self.make_ready(client);
        }
    }

    /// Begins a request; None: it was answered at once.
    fn begin(
        &mut self,
        host: &mut dyn Host,
        client: u32,
        queued: &Queued,
        body: &[u8],
    ) -> Option<Box<Running>> {
        let known = self.clients.get(&client)?;
        let to = To { client, epoch: known.epoch, seq: queued.seq, durable: false };
        let note = Note { client: known.id, seq: queued.seq };
        self.steps = self.steps.saturating_sub(1);
        let head = match wire::check(body) {
            Ok(head) => head,
            Err(fail) => {
                let ended = known.tx.is_none();
                self.send(host, to, &refusal(&fail, ended));
                return None;
            }
        };
        let mut out = core::mem::take(&mut self.spare);
        out.clear();
        out.resize(REPLY_BYTES, 0);
        let mut run = Box::new(Running {
            to,
            head,
            at: FIRST_OP,
            op: 0,
            out,
            answers: 0,
            tx: 0,
            deadline_ms: None,
            timed_out: false,
            begun: false,
            cancelled: queued.cancelled,
            cursor: None,
            note,
            body: Vec::new(),
        });
        let again = queued.flags & event_flag::AGAIN != 0;
        if again && head.is_deed() && self.remembered.has(note) {
            run.to.durable = true;
            let ended = known.tx.is_none();
            let outcome =
                Outcome { status: status::OK, done: head.ops, ended, replayed: true, answers: 0 };
            self.reply(host, *run, outcome, "");
            return None;
        }
        if let Err(fail) = self.enter(&mut run) {
            self.refuse(host, *run, &fail);
            return None;
        }
        Some(run)
    }

    /// Executes a request that was begun, and keeps it if it has to wait.
    fn go_on(&mut self, host: &mut dyn Host, run: Box<Running>, body: &[u8], copy: bool) {
        let client = run.to.client;
        if let Some(mut run) = self.run(host, run, body) {
            if copy {
                run.body = body.to_vec();
                self.log.books.memory += body.len() as u64;
            }
            if let Some(known) = self.clients.get_mut(&client) {
                known.active = Some(run);
            }
        }
    }

    /// A client may have something to do.
    fn resume(&mut self, host: &mut dyn Host, client: u32) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        known.is_ready = false;
        if known.busy {
            return;
        }
        if let Some(mut run) = known.active.take() {
            if self.locks.is_waiting(run.tx) {
                known.active = Some(run);
                return;
            }
            self.stop_timer(&run);
            let body = core::mem::take(&mut run.body);
            let len = body.len() as u64;
            if let Some(mut run) = self.run(host, run, &body) {
                run.body = body;
                if let Some(known) = self.clients.get_mut(&client) {
                    known.active = Some(run);
                }
            } else {
                self.log.books.memory = self.log.books.memory.saturating_sub(len);
            }
        } else if let Some(queued) = known.queue.pop_front() {
            self.log.books.memory = self.log.books.memory.saturating_sub(queued.body.len() as u64);
            if let Some(run) = self.begin(host, client, &queued, &queued.body) {
                self.go_on(host, run, &queued.body, true);
            }
        }
        self.next_of(client);
    }

    /// If a client is idle and has more to do, its turn comes.
    pub(crate) fn next_of(&mut self, client: u32) {
        if let Some(known) = self.clients.get(&client)
            && known.active.is_none()
            && !known.busy
            && !known.queue.is_empty()
        {
            self.make_ready(client);
        }
    }

    pub(crate) fn stop_timer(&mut self, run: &Running) {
        if let Some(deadline_ms) = run.deadline_ms {
            self.timers.remove(&(deadline_ms, run.to.client));
        }
    }

    fn cancel(&mut self, client: u32, seq: u64) {
        let Some(known) = self.clients.get_mut(&client) else { return };
        if let Some(queued) = known.queue.iter_mut().find(|q| q.seq == seq) {
            queued.cancelled = true;
        }
        let Some(run) = known.active.as_mut().filter(|run| run.to.seq == seq) else { return };
        run.cancelled = true;
        let tx = run.tx;
        self.stop_waiting(tx);
        self.make_ready(client);
    }

    fn stop_waiting(&mut self, tx: u64) {
        let mut granted = Vec::new();
        self.locks.give_up(tx, &mut granted);
        self.granted(granted);
    }

    /// Others have got locks: they go on.
    pub(crate) fn granted(&mut self, granted: Vec<Granted>) {
        for (tx, resource, new) in granted {
            let Some(tx) = self.txs.get_mut(&tx) else { continue };
            if new {
                tx.held.push(resource);
            }
            let client = tx.client;
            self.make_ready(client);
        }
    }

    /// A client's turn comes, once.
    pub(crate) fn make_ready(&mut self, client: u32) {
        if let Some(known) = self.clients.get_mut(&client).filter(|known| !known.is_ready) {
            known.is_ready = true;
            self.ready.push_back(client);
        }
    }

    fn close(&mut self, client: u32) {
        let Some(known) = self.clients.remove(&client) else { return };
        let mut bytes: usize = known.queue.iter().map(|q| q.body.len()).sum();
        if let Some(run) = &known.active {
            bytes += run.body.len();
            self.stop_timer(run);
            self.stop_waiting(run.tx);
            if let Some(tx) = self.txs.remove(&run.tx) {
                self.releases.push_back(Job::release(tx, None));
            }
        }
        self.log.books.memory = self.log.books.memory.saturating_sub(bytes as u64);
        if let Some((_, tx)) = known.tx
            && let Some(tx) = self.txs.remove(&tx)
        {
            self.releases.push_back(Job::release(tx, None));
        }
    }

    fn expire(&mut self, now_ms: u64) {
        while let Some((deadline_ms, client)) = self.timers.first().copied()
            && deadline_ms <= now_ms
        {
            self.timers.pop_first();
            let active = self.clients.get_mut(&client).and_then(|c| c.active.as_mut());
            if let Some(run) = active {
                run.timed_out = true;
                let tx = run.tx;
                self.stop_waiting(tx);
                self.make_ready(client);
            }
        }
    }

    /// Does all that can be done, until the call's steps are used up.
    pub(crate) fn settle(&mut self, host: &mut dyn Host) {
        loop {
            while self.steps > 0
                && let Some(client) = self.ready.pop_front()
            {
                self.resume(host, client);
            }
            self.flush(host);
            self.work(host);
            if self.steps == 0 || (self.ready.is_empty() && self.pending.is_empty()) {
                break;
            }
        }
    }

    fn wake(&mut self, host: &mut dyn Host) {
        let busy = !self.ready.is_empty() || !self.applies.is_empty() || !self.releases.is_empty();
        if busy || self.has_chores(host) {
            host.wake_after(0);
            return;
        }
        let deadline_ms = self.timers.first().map(|(deadline_ms, _)| *deadline_ms);
        let reserve_ms = self.log.reserve_due_ms();
        if let Some(at_ms) = deadline_ms.into_iter().chain(reserve_ms).min() {
            let left_ms = at_ms.saturating_sub(host.now_ms());
            host.wake_after(u32::try_from(left_ms).unwrap_or(u32::MAX));
        }
    }

    /// Sends a reply and goes on with the client's next request.
    pub(crate) fn send(&mut self, host: &mut dyn Host, to: To, bytes: &[u8]) {
        let Some(known) = self.clients.get_mut(&to.client) else { return };
        if known.epoch != to.epoch {
            return;
        }
        known.busy = false;
        self.tell(host, to, bytes);
    }

    fn tell(&self, host: &mut dyn Host, to: To, bytes: &[u8]) {
        let flags = if to.durable { reply::DURABLE } else { 0 };
        if let Err(errno) = host.reply(to.client, to.seq, flags, bytes) {
            host.log(
                2,
                &alloc::format!("reply to request {} of client {}: {errno}", to.seq, to.client),
            );
        }
    }

    /// Finishes a request.
    pub(crate) fn reply(
        &mut self,
        host: &mut dyn Host,
        run: Running,
        outcome: Outcome,
        text: &str,
    ) {
        let mut out = run.out;
        wire::finish(&mut out, Outcome { answers: run.answers, ..outcome }, text);
        self.send(host, run.to, &out);
        if out.capacity() <= KEPT_BYTES {
            self.spare = out;
        }
    }

    /// Finishes a request that failed and left the client's transaction as it is.
    pub(crate) fn refuse(&mut self, host: &mut dyn Host, run: Running, fail: &Fail) {
        let ended = self.clients.get(&run.to.client).is_none_or(|c| c.tx.is_none());
        let (status, done, answers) = (fail.status, run.op, run.answers);
        let outcome = Outcome { status, done, ended, replayed: false, answers };
        self.reply(host, run, outcome, &fail.text);
    }
}

fn refusal(fail: &Fail, ended: bool) -> Vec<u8> {
    let mut out = Vec::new();
    let outcome = Outcome { status: fail.status, done: 0, ended, replayed: false, answers: 0 };
    wire::finish(&mut out, outcome, &fail.text);
    out
}

impl Module for Store {
    fn start(host: &mut dyn Host) -> Result<Self, Errno> {
        Self::start_with(host, Config::default())
    }

    fn serve(&mut self, host: &mut dyn Host, events: Events<'_>) -> Result<(), Errno> {
        // What was begun before gets on, however much comes now.
        let all = self.config.steps;
        self.steps = all.div_ceil(4);
        self.settle(host);
        self.steps += all - all.div_ceil(4);
        let mut requests = 0;
        for event in events {
            requests += u64::from(matches!(event, Event::Request { .. }));
            self.take(host, event);
        }
        if !self.timers.is_empty() {
            let now_ms = host.now_ms();
            self.expire(now_ms);
        }
        self.settle(host);
        self.chores(host, requests == 0);
        self.wake(host);
        Ok(())
    }
}
