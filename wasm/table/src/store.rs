//! Store: the module. It takes events, executes batches op by op, and answers them.

use alloc::boxed::Box;
use alloc::vec::Vec;

use guest_abi::module_call::{event_flag, log as level};
use guest_abi::table::{batch_flag, op, op_flag, status};
use sdk::{Errno, Event, Events, Host, Module};

use crate::catalog::text;
use crate::clients::{ActiveRequest, Clients, QueuedRequest, ReplyTo, send_reply};
use crate::config::Config;
use crate::database::Database;
use crate::endings::{EndedTx, Endings};
use crate::exec::{self, Execution, OpProgress};
use crate::fail::{Fail, fail};
use crate::op::{OpRef, op_at};
use crate::record_body::RequestId;
use crate::replay;
use crate::staging::{Ending, StagedTx};
use crate::tx::Tx;
use crate::upkeep::Upkeep;
use crate::wire::{self, Outcome};

/// Bytes of staged records from which on they are appended before the call's end.
const STAGED_BYTES: usize = 4 << 20;

/// Table store.
#[derive(Debug, Default)]
pub struct Store {
    /// State that ops work on.
    pub(crate) db: Database,
    /// Clients and their requests.
    pub(crate) clients: Clients,
    /// Transactions that have ended, and are not over.
    pub(crate) endings: Endings,
    /// Checkpoints and compaction.
    pub(crate) upkeep: Upkeep,
}

impl Module for Store {
    fn start(host: &mut dyn Host) -> Result<Self, Errno> {
        Self::start_with(host, Config::default())
    }

    fn serve(&mut self, host: &mut dyn Host, events: Events<'_>) -> Result<(), Errno> {
        // What was begun before gets on, however much comes now.
        let all = self.db.config.steps;
        self.db.steps = all.div_ceil(4);
        self.settle(host);
        self.db.steps += all - all.div_ceil(4);
        let mut requests = 0;
        for event in events {
            requests += u64::from(matches!(event, Event::Request { .. }));
            self.take(host, event);
        }
        if self.clients.first_deadline_ms().is_some() {
            let now_ms = host.now_ms();
            self.expire(now_ms);
        }
        self.settle(host);
        let has_applies = !self.endings.applies.is_empty();
        self.upkeep.work(host, &mut self.db, has_applies, requests == 0);
        self.wake(host);
        Ok(())
    }
}

/// Events, and whose turn it is.
impl Store {
    /// Starts with what the files say.
    pub fn start_with(host: &mut dyn Host, config: Config) -> Result<Self, Errno> {
        match replay::start(host, config) {
            Ok((db, checkpoints)) => {
                let upkeep = Upkeep { checkpoints, ..Upkeep::default() };
                Ok(Self { db, upkeep, ..Self::default() })
            }
            Err(error) => {
                host.log(
                    level::ERROR,
                    &alloc::format!("the table store cannot start: {}", error.text),
                );
                Err(error.errno)
            }
        }
    }

    fn take(&mut self, host: &mut dyn Host, event: Event<'_>) {
        match event {
            Event::Opened { client, id } => {
                self.close(client);
                self.clients.open(client, id);
            }
            Event::Request { client, seq, flags, body } => {
                let queued = QueuedRequest { seq, flags, body: Vec::new(), cancelled: false };
                self.take_request(host, client, queued, body);
            }
            Event::Cancel { client, seq } => self.cancel(client, seq),
            Event::Closed { client } => self.close(client),
            Event::Wake => {}
            Event::Ending => {
                self.settle(host);
                self.db.log_counters(host);
            }
        }
    }

    /// Executes a request if it can begin now, else puts it into its client's queue.
    fn take_request(
        &mut self,
        host: &mut dyn Host,
        client: u32,
        mut queued: QueuedRequest,
        body: &[u8],
    ) {
        let Some(known) = self.clients.get(client) else {
            let fail = fail!(BAD_REQUEST, "client {client} was not announced");
            let _ = host.reply(client, queued.seq, 0, &refusal(&fail, true));
            return;
        };
        let idle = known.is_free() && known.queue.is_empty();
        if idle && self.db.steps > 0 {
            if let Some(request) = self.begin(host, client, &queued, body) {
                self.go_on(host, request, body);
            }
            return;
        }
        let to = ReplyTo { client, epoch: known.epoch, seq: queued.seq, durable: false };
        let ended = known.tx.is_none();
        if let Err(fail) = self.db.check_memory(body.len() as u64) {
            send_reply(host, to, &refusal(&fail, ended));
            return;
        }
        let Some(known) = self.clients.get_mut(client) else { return };
        queued.body = body.to_vec();
        self.db.log.usage.memory += body.len() as u64;
        known.queue.push_back(queued);
        if idle {
            self.clients.make_ready(client);
        }
    }

    /// Begins a request. None: it was answered at once.
    fn begin(
        &mut self,
        host: &mut dyn Host,
        client: u32,
        queued: &QueuedRequest,
        body: &[u8],
    ) -> Option<Box<ActiveRequest>> {
        let known = self.clients.get(client)?;
        let to = ReplyTo { client, epoch: known.epoch, seq: queued.seq, durable: false };
        let request_id = RequestId { client: known.id, seq: queued.seq };
        let ended = known.tx.is_none();
        self.db.spend(1);
        let head = match wire::check(body) {
            Ok(head) => head,
            Err(fail) => {
                self.clients.send(host, to, &refusal(&fail, ended));
                return None;
            }
        };
        let out = self.clients.take_buffer();
        let mut request = Box::new(ActiveRequest::begin(to, head, request_id, out));
        request.cancelled = queued.cancelled;
        let again = queued.flags & event_flag::AGAIN != 0;
        if again && head.is_logged() && self.db.remembered.has(request_id) {
            request.to.durable = true;
            let outcome =
                Outcome { status: status::OK, done: head.ops, ended, replayed: true, answers: 0 };
            self.reply(host, *request, outcome, "");
            return None;
        }
        if let Err(fail) = self.enter(&mut request) {
            self.refuse(host, *request, &fail);
            return None;
        }
        Some(request)
    }

    /// Executes a request that was begun, and keeps it with a copy of its body if it has to wait.
    fn go_on(&mut self, host: &mut dyn Host, request: Box<ActiveRequest>, body: &[u8]) {
        let client = request.to.client;
        if let Some(mut request) = self.run(host, request, body) {
            request.body = body.to_vec();
            self.db.log.usage.memory += body.len() as u64;
            if let Some(known) = self.clients.get_mut(client) {
                known.active = Some(request);
            }
        }
    }

    /// Goes on with a client whose turn it is.
    fn resume(&mut self, host: &mut dyn Host, client: u32) {
        let Some(known) = self.clients.get_mut(client) else { return };
        known.is_ready = false;
        if known.busy {
            return;
        }
        if let Some(mut request) = known.active.take() {
            if self.db.locks.is_waiting(request.tx) {
                known.active = Some(request);
                return;
            }
            self.clients.stop_timer(&request);
            let body = core::mem::take(&mut request.body);
            if let Some(mut request) = self.run(host, request, &body) {
                request.body = body;
                if let Some(known) = self.clients.get_mut(client) {
                    known.active = Some(request);
                }
            } else {
                self.forget_body(body.len());
            }
        } else if let Some(queued) = known.queue.pop_front() {
            self.forget_body(queued.body.len());
            if let Some(request) = self.begin(host, client, &queued, &queued.body) {
                self.go_on(host, request, &queued.body);
            }
        }
        self.clients.make_ready_if_free(client);
    }

    /// Discounts the memory of requests that are not kept any more.
    fn forget_body(&mut self, bytes: usize) {
        let memory = &mut self.db.log.usage.memory;
        *memory = memory.saturating_sub(bytes as u64);
    }

    fn cancel(&mut self, client: u32, seq: u64) {
        let Some(known) = self.clients.get_mut(client) else { return };
        if let Some(queued) = known.queue.iter_mut().find(|q| q.seq == seq) {
            queued.cancelled = true;
        }
        let Some(request) = known.active.as_mut().filter(|r| r.to.seq == seq) else { return };
        request.cancelled = true;
        let tx = request.tx;
        self.stop_waiting(tx);
        self.clients.make_ready(client);
    }

    fn stop_waiting(&mut self, tx: u64) {
        let mut granted = Vec::new();
        self.db.locks.give_up(tx, &mut granted);
        self.clients.grant(granted, &mut self.db.txs);
    }

    fn close(&mut self, client: u32) {
        let Some(known) = self.clients.close(client) else { return };
        let mut bytes: usize = known.queue.iter().map(|q| q.body.len()).sum();
        if let Some(request) = &known.active {
            bytes += request.body.len();
            self.clients.stop_timer(request);
            self.stop_waiting(request.tx);
            self.undo(request.tx);
        }
        self.forget_body(bytes);
        if let Some((_, tx)) = known.tx {
            self.undo(tx);
        }
    }

    /// Undoes a transaction whose client is gone.
    fn undo(&mut self, tx: u64) {
        if let Some(tx) = self.db.txs.take(tx) {
            self.endings.release_later(tx);
        }
    }

    fn expire(&mut self, now_ms: u64) {
        while let Some(client) = self.clients.pop_expired(now_ms) {
            let active = self.clients.get_mut(client).and_then(|c| c.active.as_mut());
            if let Some(request) = active {
                request.timed_out = true;
                let tx = request.tx;
                self.stop_waiting(tx);
                self.clients.make_ready(client);
            }
        }
    }

    /// Does all that can be done, until the call's steps are used up.
    fn settle(&mut self, host: &mut dyn Host) {
        loop {
            while self.db.steps > 0
                && let Some(client) = self.clients.pop_ready()
            {
                self.resume(host, client);
            }
            self.append_staged(host);
            self.endings.work(host, &mut self.db, &mut self.clients);
            let is_done = !self.clients.has_ready() && self.db.staging.staged.is_empty();
            if self.db.steps == 0 || is_done {
                break;
            }
        }
    }

    /// Asks the host for the next call: at once, or when a time is over.
    fn wake(&mut self, host: &mut dyn Host) {
        let has_applies = !self.endings.applies.is_empty();
        let busy = self.clients.has_ready() || !self.endings.is_empty();
        if busy || self.upkeep.is_due(host, &self.db, has_applies) {
            host.wake_after(0);
            return;
        }
        let deadline_ms = self.clients.first_deadline_ms();
        let reserve_ms = self.db.log.reserve_due_ms();
        if let Some(at_ms) = deadline_ms.into_iter().chain(reserve_ms).min() {
            let left_ms = at_ms.saturating_sub(host.now_ms());
            host.wake_after(u32::try_from(left_ms).unwrap_or(u32::MAX));
        }
    }
}

/// Batches: their transaction, their ops one after the other, how they end.
impl Store {
    /// Finds or begins the transaction of a batch.
    fn enter(&mut self, request: &mut ActiveRequest) -> Result<(), Fail> {
        let (number, begins) = (request.head.tx, request.head.has(batch_flag::BEGIN));
        let Some(client) = self.clients.get_mut(request.to.client) else {
            return Err(fail!(LOST, "the client is gone"));
        };
        match client.tx {
            _ if number == 0 => {}
            Some((open, _)) if begins => {
                return Err(fail!(BAD_REQUEST, "transaction {open} is still open"));
            }
            Some((open, tx)) if open == number => {
                request.tx = tx;
                return Ok(());
            }
            _ if !begins => return Err(fail!(LOST, "there is no transaction {number}")),
            _ => {}
        }
        request.tx = self.db.txs.begin(request.to.client);
        if number != 0 {
            client.tx = Some((number, request.tx));
        }
        Ok(())
    }

    /// Executes a batch from where it is. A request that it returns has to wait.
    fn run(
        &mut self,
        host: &mut dyn Host,
        mut request: Box<ActiveRequest>,
        body: &[u8],
    ) -> Option<Box<ActiveRequest>> {
        let Some(mut tx) = self.db.txs.take(request.tx) else {
            self.refuse(host, *request, &fail!(LOST, "the transaction is gone"));
            return None;
        };
        if !request.has_snapshot {
            request.has_snapshot = true;
            self.begin_snapshot(&request, &mut tx);
        }
        while request.op < request.head.ops {
            let Some((op, next)) = op_at(body, request.at) else { break };
            if self.db.steps == 0 {
                return self.park(request, tx);
            }
            self.db.steps -= 1;
            if matches!(op.kind, op::COMMIT | op::ROLLBACK | op::PREPARE) {
                self.conclude(host, request, tx, &op);
                return None;
            }
            if matches!(op.kind, op::COMMIT_PREPARED | op::ROLLBACK_PREPARED) {
                self.end_prepared(host, request, tx, &op);
                return None;
            }
            let progress = {
                let (db, request, tx) = (&mut self.db, &mut *request, &mut *tx);
                exec::execute(&mut Execution { host: &mut *host, db, request, tx }, &op)
            };
            self.answer_appended(host);
            match progress {
                Ok(OpProgress::Done) => {
                    request.op += 1;
                    request.at = next;
                    (request.deadline_ms, request.timed_out, request.cursor) = (None, false, None);
                }
                Ok(OpProgress::Wait) => {
                    self.clients.start_timer(&request);
                    self.db.txs.park(tx);
                    return Some(request);
                }
                Ok(OpProgress::Later) if request.cancelled => {
                    if let Some(cursor) = request.cursor.take() {
                        request.out.truncate(cursor.answer_at);
                    }
                    self.fail(host, request, tx, &fail!(CANCELLED, "the client cancelled it"));
                    return None;
                }
                Ok(OpProgress::Later) => return self.park(request, tx),
                Err(fail) => {
                    self.fail(host, request, tx, &fail);
                    return None;
                }
            }
        }
        self.finish(host, request, tx);
        None
    }

    /// Keeps a batch that goes on in another call.
    fn park(&mut self, request: Box<ActiveRequest>, tx: Box<Tx>) -> Option<Box<ActiveRequest>> {
        self.clients.make_ready(request.to.client);
        self.db.txs.park(tx);
        Some(request)
    }

    fn begin_snapshot(&mut self, request: &ActiveRequest, tx: &mut Tx) {
        if request.head.has(batch_flag::NEW_SNAPSHOT) {
            self.db.versions.end_snapshot(tx);
            self.db.versions.snapshot(tx);
        } else if request.head.has(batch_flag::STRICT) {
            self.db.versions.snapshot(tx);
        }
    }

    /// Finishes a batch whose ops were all done, and of which none ended the transaction.
    fn finish(&mut self, host: &mut dyn Host, request: Box<ActiveRequest>, tx: Box<Tx>) {
        let own = request.head.tx == 0;
        let outcome = request.outcome(status::OK, request.op, own);
        self.end_or_park(host, request, tx, outcome, "");
    }

    /// Finishes a batch of which an op failed.
    fn fail(&mut self, host: &mut dyn Host, request: Box<ActiveRequest>, tx: Box<Tx>, fail: &Fail) {
        let head = &request.head;
        let ended = fail.ends() || head.tx == 0 || head.has(batch_flag::ALL_OR_NOTHING);
        let outcome = request.outcome(fail.status, request.op, ended);
        self.end_or_park(host, request, tx, outcome, &fail.text);
    }

    fn end_or_park(
        &mut self,
        host: &mut dyn Host,
        request: Box<ActiveRequest>,
        tx: Box<Tx>,
        outcome: Outcome,
        text: &str,
    ) {
        if outcome.ended {
            self.end(host, request, tx, outcome, text);
        } else {
            self.db.txs.park(tx);
            self.reply(host, *request, outcome, text);
        }
    }

    /// Ends a transaction without a trace, and replies.
    fn end(
        &mut self,
        host: &mut dyn Host,
        mut request: Box<ActiveRequest>,
        tx: Box<Tx>,
        outcome: Outcome,
        text: &str,
    ) {
        if let Some(client) = self.clients.get_mut(request.to.client) {
            client.tx = client.tx.filter(|(_, open)| *open != tx.id);
            client.busy = true;
        }
        let mut out = core::mem::take(&mut request.out);
        wire::finish(&mut out, outcome, text);
        let ended = EndedTx::undone(tx, Some((request.to, out)));
        self.endings.release(host, &mut self.db, &mut self.clients, ended);
    }

    /// Finishes a request, and leaves the client's transaction as it is.
    fn reply(&mut self, host: &mut dyn Host, request: ActiveRequest, outcome: Outcome, text: &str) {
        let mut out = request.out;
        wire::finish(&mut out, Outcome { answers: request.answers, ..outcome }, text);
        self.clients.send(host, request.to, &out);
        self.clients.keep_buffer(out);
    }

    /// Finishes a request that failed, and leaves the client's transaction as it is.
    fn refuse(&mut self, host: &mut dyn Host, request: ActiveRequest, fail: &Fail) {
        let ended = self.clients.has_no_tx(request.to.client);
        let outcome = request.outcome(fail.status, request.op, ended);
        self.reply(host, request, outcome, &fail.text);
    }
}

/// Ends of transactions: the last op of a batch.
impl Store {
    /// Executes COMMIT, ROLLBACK, or PREPARE.
    fn conclude(
        &mut self,
        host: &mut dyn Host,
        mut request: Box<ActiveRequest>,
        tx: Box<Tx>,
        op: &OpRef<'_>,
    ) {
        let ending = match op.kind {
            op::PREPARE => Ending::Prepare(op.key.into()),
            op::ROLLBACK => Ending::Rollback,
            _ if tx.has_writes() => Ending::Commit,
            // Nothing to commit: nothing to wait for.
            _ => Ending::Rollback,
        };
        if ending == Ending::Rollback {
            request.op += 1;
            let outcome = request.outcome(status::OK, request.op, true);
            self.end(host, request, tx, outcome, "");
            return;
        }
        if let Ending::Prepare(name) = &ending
            && let Err(fail) = self.db.txs.check_prepare(name)
        {
            self.fail(host, request, tx, &fail);
            return;
        }
        request.to.durable = !op.has(op_flag::RELAXED);
        self.stage(host, request, tx, ending);
    }

    /// Executes COMMIT_PREPARED or ROLLBACK_PREPARED.
    fn end_prepared(
        &mut self,
        host: &mut dyn Host,
        mut request: Box<ActiveRequest>,
        own: Box<Tx>,
        op: &OpRef<'_>,
    ) {
        let Some(tx) = self.db.txs.take_prepared(op.key) else {
            let fail = fail!(NOT_FOUND, "there is no prepared transaction {:?}", text(op.key));
            self.fail(host, request, own, &fail);
            return;
        };
        self.upkeep.checkpoints.end_prepared(host, tx.id);
        // The batch's own transaction has done nothing.
        if request.head.tx == 0 {
            self.endings.release_later(own);
        } else {
            self.db.txs.park(own);
        }
        let ending = match op.kind {
            op::COMMIT_PREPARED => Ending::CommitPrepared(op.key.into()),
            _ => Ending::RollbackPrepared(op.key.into()),
        };
        request.to.durable = !op.has(op_flag::RELAXED);
        self.stage(host, request, tx, ending);
    }

    fn stage(
        &mut self,
        host: &mut dyn Host,
        request: Box<ActiveRequest>,
        tx: Box<Tx>,
        ending: Ending,
    ) {
        if self.db.log.staged_bytes() > STAGED_BYTES {
            self.append_staged(host);
        }
        if let Some(client) = self.clients.get_mut(request.to.client) {
            client.busy = true;
        }
        if let Err((staged, fail)) = self.db.stage(host, request, tx, ending) {
            self.not_logged(host, staged, &fail);
        }
    }

    /// Appends all that is staged to the log, and goes on with what was appended.
    fn append_staged(&mut self, host: &mut dyn Host) {
        self.db.append_staged(host);
        self.answer_appended(host);
    }

    /// Goes on with transactions whose record was appended, or could not be.
    fn answer_appended(&mut self, host: &mut dyn Host) {
        if self.db.staging.appended.is_empty() {
            return;
        }
        for (staged, result) in core::mem::take(&mut self.db.staging.appended) {
            match result {
                Ok(()) => self.logged(staged),
                Err(fail) => self.not_logged(host, staged, &fail),
            }
        }
    }

    /// Goes on with a transaction whose record is in the log: it is applied next.
    fn logged(&mut self, staged: StagedTx) {
        let StagedTx { mut request, tx, ending, commit, .. } = staged;
        let mut ended = true;
        if let Some(client) = self.clients.get_same(request.to) {
            if !ending.is_of_prepared() {
                client.tx = client.tx.filter(|(_, open)| *open != tx.id);
            }
            ended = client.tx.is_none();
        }
        let mut out = core::mem::take(&mut request.out);
        wire::finish(&mut out, request.outcome(status::OK, request.op + 1, ended), "");
        self.endings.apply_later(EndedTx::logged(tx, ending, commit, (request.to, out)));
    }

    /// Goes on with a transaction whose record is not in the log: it is what it was before.
    fn not_logged(&mut self, host: &mut dyn Host, staged: StagedTx, fail: &Fail) {
        let StagedTx { mut request, tx, ending, .. } = staged;
        request.to.durable = false;
        if let Ending::Prepare(name) = &ending {
            self.db.txs.preparing.remove(name);
        }
        if let Ending::CommitPrepared(name) | Ending::RollbackPrepared(name) = ending {
            self.db.txs.park_prepared(name, tx);
            self.refuse(host, *request, fail);
        } else if self.clients.get_same(request.to).is_some() {
            self.fail(host, request, tx, fail);
        } else {
            self.endings.release_later(tx);
        }
    }
}

/// Reply to a request that was not begun.
fn refusal(fail: &Fail, ended: bool) -> Vec<u8> {
    let mut out = Vec::new();
    let outcome = Outcome { status: fail.status, done: 0, ended, replayed: false, answers: 0 };
    wire::finish(&mut out, outcome, &fail.text);
    out
}
