//! A batch: its transaction, its ops one after the other, how it ends.

use alloc::boxed::Box;

use guest_abi::table::{batch_flag, op, op_flag, status};
use sdk::Host;

use crate::clients::Running;
use crate::commit::Job;
use crate::fail::{Fail, fail};
use crate::lock::{Asked, Resource, mode};
use crate::memory::LOCK_BYTES;
use crate::store::Store;
use crate::tx::{Tx, Where};
use crate::wire::{self, OpRef, Outcome};

/// What comes after an op, or after a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The next one.
    Op,
    /// This one again, once a lock is there.
    Wait,
    /// This one again, in another call.
    Later,
}

/// What an op that uses a transaction works with.
pub struct Act<'a> {
    /// The request.
    pub run: &'a mut Running,
    /// Its transaction.
    pub tx: &'a mut Tx,
}

impl Store {
    /// Finds or begins the transaction of a batch.
    pub(crate) fn enter(&mut self, run: &mut Running) -> Result<(), Fail> {
        let (number, begins) = (run.head.tx, run.head.has(batch_flag::BEGIN));
        let Some(client) = self.clients.get_mut(&run.to.client) else {
            return Err(fail!(LOST, "the client is gone"));
        };
        let open = client.tx;
        match open {
            _ if number == 0 => {}
            Some((open, _)) if begins => {
                return Err(fail!(BAD_REQUEST, "transaction {open} is still open"));
            }
            Some((open, tx)) if open == number => {
                run.tx = tx;
                return Ok(());
            }
            _ if !begins => return Err(fail!(LOST, "there is no transaction {number}")),
            _ => {}
        }
        self.next_tx += 1;
        run.tx = self.next_tx;
        if number != 0 {
            client.tx = Some((number, run.tx));
        }
        self.txs.insert(run.tx, Box::new(Tx::new(run.tx, run.to.client)));
        Ok(())
    }

    /// Executes a batch from where it is. What it returns has to wait.
    pub(crate) fn run(
        &mut self,
        host: &mut dyn Host,
        mut run: Box<Running>,
        body: &[u8],
    ) -> Option<Box<Running>> {
        let Some(mut tx) = self.txs.remove(&run.tx) else {
            self.refuse(host, *run, &fail!(LOST, "the transaction is gone"));
            return None;
        };
        if !run.begun {
            run.begun = true;
            self.begin_snapshot(&run, &mut tx);
        }
        while run.op < run.head.ops {
            let Some((op, next)) = wire::op_at(body, run.at) else { break };
            if self.steps == 0 {
                return self.park(run, tx);
            }
            self.steps -= 1;
            if matches!(op.kind, op::COMMIT | op::ROLLBACK | op::PREPARE) {
                self.conclude(host, run, tx, &op);
                return None;
            }
            if matches!(op.kind, op::COMMIT_PREPARED | op::ROLLBACK_PREPARED) {
                self.end_prepared(host, run, tx, &op);
                return None;
            }
            match self.exec(host, &mut Act { run: &mut run, tx: &mut tx }, &op) {
                Ok(Next::Op) => {
                    run.op += 1;
                    run.at = next;
                    (run.deadline_ms, run.timed_out, run.cursor) = (None, false, None);
                }
                Ok(Next::Wait) => {
                    self.txs.insert(tx.id, tx);
                    return Some(run);
                }
                Ok(Next::Later) if run.cancelled => {
                    if let Some(cursor) = run.cursor.take() {
                        run.out.truncate(cursor.answer_at);
                    }
                    self.failed(host, run, tx, &fail!(CANCELLED, "the client cancelled it"));
                    return None;
                }
                Ok(Next::Later) => return self.park(run, tx),
                Err(fail) => {
                    self.failed(host, run, tx, &fail);
                    return None;
                }
            }
        }
        self.done(host, run, tx);
        None
    }

    fn park(&mut self, run: Box<Running>, tx: Box<Tx>) -> Option<Box<Running>> {
        self.make_ready(run.to.client);
        self.txs.insert(tx.id, tx);
        Some(run)
    }

    fn begin_snapshot(&mut self, run: &Running, tx: &mut Tx) {
        if run.head.has(batch_flag::NEW_SNAPSHOT) {
            self.end_snapshot(tx);
            self.snapshot(tx);
        } else if run.head.has(batch_flag::STRICT) {
            self.snapshot(tx);
        }
    }

    /// What a transaction's reads see: from the first one on.
    pub(crate) fn snapshot(&mut self, tx: &mut Tx) -> u64 {
        if let Some(snapshot) = tx.snapshot {
            return snapshot;
        }
        let users = self.snapshots.entry(self.visible).or_default();
        *users = users.saturating_add(1);
        tx.snapshot = Some(self.visible);
        self.visible
    }

    /// It reads no more.
    pub(crate) fn end_snapshot(&mut self, tx: &mut Tx) {
        let Some(snapshot) = tx.snapshot.take() else { return };
        if let Some(users) = self.snapshots.get_mut(&snapshot) {
            *users -= 1;
            if *users == 0 {
                self.snapshots.remove(&snapshot);
            }
        }
    }

    /// All ops of a batch were done, and none ended the transaction.
    fn done(&mut self, host: &mut dyn Host, run: Box<Running>, tx: Box<Tx>) {
        let own = run.head.tx == 0;
        let outcome = Outcome {
            status: status::OK,
            done: run.op,
            ended: own,
            replayed: false,
            answers: run.answers,
        };
        if own {
            self.end(host, run, tx, outcome, "");
        } else {
            self.txs.insert(tx.id, tx);
            self.reply(host, *run, outcome, "");
        }
    }

    /// An op failed.
    pub(crate) fn failed(
        &mut self,
        host: &mut dyn Host,
        run: Box<Running>,
        tx: Box<Tx>,
        fail: &Fail,
    ) {
        let ended = fail.ends() || run.head.tx == 0 || run.head.has(batch_flag::ALL_OR_NOTHING);
        let outcome = Outcome {
            status: fail.status,
            done: run.op,
            ended,
            replayed: false,
            answers: run.answers,
        };
        if ended {
            self.end(host, run, tx, outcome, &fail.text);
        } else {
            self.txs.insert(tx.id, tx);
            self.reply(host, *run, outcome, &fail.text);
        }
    }

    /// Ends a transaction without a trace, and replies.
    pub(crate) fn end(
        &mut self,
        host: &mut dyn Host,
        mut run: Box<Running>,
        tx: Box<Tx>,
        outcome: Outcome,
        text: &str,
    ) {
        if let Some(client) = self.clients.get_mut(&run.to.client) {
            client.tx = client.tx.filter(|(_, open)| *open != tx.id);
            client.busy = true;
        }
        let mut out = core::mem::take(&mut run.out);
        wire::finish(&mut out, Outcome { answers: run.answers, ..outcome }, text);
        let mut job = Job::release(tx, Some((run.to, out)));
        // Almost always it is over at once.
        if !self.release(host, &mut job) {
            self.releases.push_back(job);
        }
    }

    fn exec(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
    ) -> Result<Next, Fail> {
        match op.kind {
            op::INSERT | op::PUT | op::UPDATE | op::DELETE => self.write(host, act, op),
            op::GET => self.get(host, act, op),
            op::SCAN if op.locks() => self.scan_locking(host, act, op),
            op::SCAN => self.scan(host, act, op),
            op::ESTIMATE => self.estimate(act, op),
            op::LOCK => self.lock_op(host, act, op),
            op::SAVEPOINT => {
                self.check_memory(64)?;
                act.tx.save(op.extra, &mut self.steps, &mut self.log.books);
                Ok(Next::Op)
            }
            op::RELEASE => {
                let released = act.tx.release(op.extra, &mut self.steps, &mut self.log.books);
                let fail = || fail!(BAD_REQUEST, "there is no savepoint {}", op.extra);
                released.then_some(Next::Op).ok_or_else(fail)
            }
            op::ROLLBACK_TO => match act.tx.roll_back_to(op.extra, &mut self.steps) {
                None => Err(fail!(BAD_REQUEST, "there is no savepoint {}", op.extra)),
                Some(true) => Ok(Next::Op),
                Some(false) => Ok(Next::Later),
            },
            _ => self.exec_alone(host, act, op),
        }
    }

    fn lock_op(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
    ) -> Result<Next, Fail> {
        self.catalog.table(op.table)?;
        let exclusive = op.has(op_flag::EXCLUSIVE);
        let want = if exclusive { mode::EXCLUSIVE } else { mode::SHARED };
        let got = self.lock_table(host, act, op, want)?;
        Ok(if got { Next::Op } else { Next::Wait })
    }

    /// Locks a table; false: it waits.
    pub(crate) fn lock_table(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
        want: u8,
    ) -> Result<bool, Fail> {
        if act.tx.has_table(op.table, want) {
            return Ok(true);
        }
        let got = self.lock(host, act, op, Resource::Table(op.table), want)?;
        if got {
            act.tx.locked_table(op.table, want);
        }
        Ok(got)
    }

    /// Locks a key and proves that it may be; false: it waits.
    pub(crate) fn lock_key(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
        (index, key): (u8, &[u8]),
        want: u8,
    ) -> Result<bool, Fail> {
        if !act.tx.has_table(op.table, want)
            && !self.lock(host, act, op, Resource::key(op.table, index, key), want)?
        {
            return Ok(false);
        }
        if act.run.head.has(batch_flag::STRICT) {
            self.check_unchanged(act.tx, (op.table, index), key)?;
        }
        Ok(true)
    }

    fn check_unchanged(&self, tx: &Tx, place: Where, key: &[u8]) -> Result<(), Fail> {
        let Some(snapshot) = tx.snapshot else { return Ok(()) };
        let chain = self.catalog.index(place.0, place.1)?.map.get(key);
        match chain.and_then(|chain| chain.version_at(self.visible)) {
            Some(version) if version.commit > snapshot => Err(fail!(
                CONFLICT,
                "table {}, index {}: a key was changed by commit {}, after snapshot {snapshot}",
                place.0,
                place.1,
                version.commit
            )),
            _ => Ok(()),
        }
    }

    fn lock(
        &mut self,
        host: &mut dyn Host,
        act: &mut Act<'_>,
        op: &OpRef<'_>,
        resource: Resource,
        want: u8,
    ) -> Result<bool, Fail> {
        self.check_memory(LOCK_BYTES)?;
        let (run, tx) = (&mut *act.run, &mut *act.tx);
        match self.locks.ask(tx.id, resource, want) {
            Asked::Held => return Ok(true),
            Asked::New => {
                tx.held.push(resource);
                return Ok(true);
            }
            Asked::Busy => {}
        }
        let (i, table) = (run.op, op.table);
        if run.cancelled {
            return Err(fail!(CANCELLED, "op {i}: cancelled while it waited in table {table}"));
        }
        if run.timed_out || run.head.wait_ms == 0 || op.has(op_flag::NO_WAIT) {
            let ms = if op.has(op_flag::NO_WAIT) { 0 } else { run.head.wait_ms };
            return Err(fail!(TIMEOUT, "op {i}: a lock in table {table} was not free in {ms} ms"));
        }
        if !self.locks.wait(tx.id, resource, want) {
            return Err(fail!(DEADLOCK, "op {i}: a lock in table {table} would never be free"));
        }
        let until_ms = host.now_ms().saturating_add(u64::from(run.head.wait_ms));
        let until_ms = *run.deadline_ms.get_or_insert(until_ms);
        self.timers.insert((until_ms, run.to.client));
        Ok(false)
    }
}
