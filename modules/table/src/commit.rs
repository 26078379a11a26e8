//! How transactions end.
//!
//! A commit is staged in the log with those of the same call; once they are appended, in one piece, each
//! is applied to the maps, in the log's order, and then seen. A large one is applied over several calls,
//! and those behind it wait.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use guest_abi::table::{MAX_PREPARED, op, op_flag, status};
use sdk::Host;

use crate::catalog::text;
use crate::clients::{Running, To};
use crate::deed::Deed;
use crate::fail::{Fail, fail};
use crate::log::Place;
use crate::map::Version;
use crate::record::{self, kind};
use crate::reserve::Purpose;
use crate::store::{Garbage, Store};
use crate::tx::{Tx, Where};
use crate::wire::{self, OpRef, Outcome};

/// When so much is staged, it is appended before the call's end.
const STAGED_BYTES: usize = 4 << 20;

/// What the log's record does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The transaction is committed.
    Commit,
    /// It is prepared, with this name.
    Prepare(Box<[u8]>),
    /// A prepared one is committed.
    CommitPrepared(Box<[u8]>),
    /// A prepared one is undone.
    RollbackPrepared(Box<[u8]>),
    /// It is undone: nothing is in the log.
    Rollback,
}

/// A transaction whose record is staged.
#[derive(Debug)]
pub struct Pending {
    run: Box<Running>,
    tx: Box<Tx>,
    end: End,
    commit: u64,
    /// Where in the record's body its ops begin.
    ops_at: usize,
}

/// A transaction that ends.
#[derive(Debug)]
pub struct Job {
    tx: Box<Tx>,
    end: End,
    commit: u64,
    /// It took more than one call: readers may want what it replaces.
    long: bool,
    reply: Option<(To, Vec<u8>)>,
}

impl Job {
    /// A transaction that only has to give back what it holds.
    pub fn release(tx: Box<Tx>, reply: Option<(To, Vec<u8>)>) -> Self {
        Self { tx, end: End::Rollback, commit: 0, long: false, reply }
    }
}

impl Store {
    /// COMMIT, ROLLBACK, PREPARE: the last op of a batch.
    pub(crate) fn conclude(
        &mut self,
        host: &mut dyn Host,
        mut run: Box<Running>,
        tx: Box<Tx>,
        op: &OpRef<'_>,
    ) {
        let end = match op.kind {
            op::PREPARE => End::Prepare(op.key.into()),
            op::ROLLBACK => End::Rollback,
            _ if tx.has_writes() => End::Commit,
            // Nothing to commit: nothing to wait for.
            _ => End::Rollback,
        };
        if end == End::Rollback {
            run.op += 1;
            let outcome = Outcome {
                status: status::OK,
                done: run.op,
                ended: true,
                replayed: false,
                answers: run.answers,
            };
            self.end(host, run, tx, outcome, "");
            return;
        }
        if let Err(fail) = self.check_prepare(&end) {
            self.failed(host, run, tx, &fail);
            return;
        }
        run.to.durable = !op.has(op_flag::RELAXED);
        self.stage(host, run, tx, end);
    }

    fn check_prepare(&self, end: &End) -> Result<(), Fail> {
        let End::Prepare(name) = end else { return Ok(()) };
        if self.prepared.contains_key(name) || self.preparing.contains(name) {
            return Err(fail!(EXISTS, "there is a prepared transaction {:?}", text(name)));
        }
        if self.prepared.len() + self.preparing.len() >= MAX_PREPARED {
            return Err(fail!(LIMIT, "prepared transactions: the limit is {MAX_PREPARED}"));
        }
        Ok(())
    }

    /// COMMIT_PREPARED, ROLLBACK_PREPARED.
    pub(crate) fn end_prepared(
        &mut self,
        host: &mut dyn Host,
        mut run: Box<Running>,
        own: Box<Tx>,
        op: &OpRef<'_>,
    ) {
        let found = self.prepared.remove(op.key);
        let Some(tx) = found.and_then(|tx| self.txs.remove(&tx)) else {
            let fail = fail!(NOT_FOUND, "there is no prepared transaction {:?}", text(op.key));
            self.failed(host, run, own, &fail);
            return;
        };
        self.prepared_ends(host, tx.id);
        // The batch's own transaction has done nothing.
        if run.head.tx == 0 {
            self.releases.push_back(Job::release(own, None));
        } else {
            self.txs.insert(own.id, own);
        }
        let end = match op.kind {
            op::COMMIT_PREPARED => End::CommitPrepared(op.key.into()),
            _ => End::RollbackPrepared(op.key.into()),
        };
        run.to.durable = !op.has(op_flag::RELAXED);
        self.stage(host, run, tx, end);
    }

    fn stage(&mut self, host: &mut dyn Host, run: Box<Running>, tx: Box<Tx>, end: End) {
        if self.log.staged_bytes() > STAGED_BYTES {
            self.flush(host);
        }
        let (record, name): (u32, &[u8]) = match &end {
            End::Commit | End::Rollback => (kind::COMMIT, &[]),
            End::Prepare(name) => (kind::PREPARE, name),
            End::CommitPrepared(name) => (kind::COMMIT_PREPARED, name),
            End::RollbackPrepared(name) => (kind::ROLLBACK_PREPARED, name),
        };
        let has_commit = matches!(end, End::Commit | End::CommitPrepared(_));
        self.last_commit += u64::from(has_commit);
        let commit = if has_commit { self.last_commit } else { 0 };
        let deed = Deed { commit, tx: tx.id, note: run.note, name };
        let ops_at = deed.len();
        let purpose = match end {
            End::Commit | End::Prepare(_) => tx.purpose(),
            _ => Purpose::Free,
        };
        let staged = self.log.stage(host, record, purpose, |out| {
            out.reserve(ops_at + tx.ops.len() + record::TAIL_BYTES);
            deed.put(out);
            out.extend_from_slice(&tx.ops);
        });
        if let End::Prepare(name) = &end {
            self.preparing.insert(name.clone());
        }
        if let Some(client) = self.clients.get_mut(&run.to.client) {
            client.busy = true;
        }
        let pending = Pending { run, tx, end, commit, ops_at };
        match staged {
            Ok(()) => self.pending.push(pending),
            Err(fail) => self.not_logged(host, pending, &fail),
        }
    }

    /// Appends all that is staged.
    pub(crate) fn flush(&mut self, host: &mut dyn Host) {
        if self.pending.is_empty() {
            return;
        }
        let results = self.log.flush(host);
        let pending = core::mem::take(&mut self.pending);
        for (pending, result) in pending.into_iter().zip(results) {
            match result {
                Ok(place) => self.logged(pending, place),
                Err(fail) => self.not_logged(host, pending, &fail),
            }
        }
    }

    fn logged(&mut self, pending: Pending, place: Place) {
        let Pending { mut run, mut tx, end, commit, ops_at } = pending;
        if !tx.ops.is_empty() {
            let place = Place { offset: place.offset + ops_at as u32, ..place };
            tx.spilled(place, &mut self.log.books);
        }
        self.end_snapshot(&mut tx);
        self.remembered.add(run.note);
        let own = !matches!(end, End::CommitPrepared(_) | End::RollbackPrepared(_));
        let client = self.clients.get_mut(&run.to.client).filter(|c| c.epoch == run.to.epoch);
        let mut ended = true;
        if let Some(client) = client {
            if own {
                client.tx = client.tx.filter(|(_, open)| *open != tx.id);
            }
            ended = client.tx.is_none();
        }
        let mut out = core::mem::take(&mut run.out);
        let (done, answers) = (run.op + 1, run.answers);
        let outcome = Outcome { status: status::OK, done, ended, replayed: false, answers };
        wire::finish(&mut out, outcome, "");
        let reply = Some((run.to, out));
        self.applies.push_back(Job { tx, end, commit, long: false, reply });
    }

    /// A record is not in the log: the transaction is what it was before.
    fn not_logged(&mut self, host: &mut dyn Host, pending: Pending, fail: &Fail) {
        let Pending { mut run, tx, end, .. } = pending;
        run.to.durable = false;
        if let End::Prepare(name) = &end {
            self.preparing.remove(name);
        }
        if let End::CommitPrepared(name) | End::RollbackPrepared(name) = end {
            self.prepared.insert(name, tx.id);
            self.txs.insert(tx.id, tx);
            self.refuse(host, *run, fail);
        } else if self.clients.get(&run.to.client).is_some_and(|c| c.epoch == run.to.epoch) {
            self.failed(host, run, tx, fail);
        } else {
            self.releases.push_back(Job::release(tx, None));
        }
    }

    /// Applies what is in the log, and ends what has ended, as far as the call's steps go.
    pub(crate) fn work(&mut self, host: &mut dyn Host) {
        while let Some(mut job) = self.applies.pop_front() {
            if !self.apply(&mut job) {
                self.applies.push_front(job);
                break;
            }
            match core::mem::replace(&mut job.end, End::Rollback) {
                End::Prepare(name) => self.keep_prepared(host, job, name),
                _ => self.releases.push_back(job),
            }
        }
        while let Some(mut job) = self.releases.pop_front() {
            if !self.release(host, &mut job) {
                self.releases.push_front(job);
                break;
            }
        }
    }

    fn keep_prepared(&mut self, host: &mut dyn Host, mut job: Job, name: Box<[u8]>) {
        self.end_snapshot(&mut job.tx);
        self.preparing.remove(&name);
        self.prepared.insert(name, job.tx.id);
        self.txs.insert(job.tx.id, job.tx);
        if let Some((to, out)) = job.reply {
            self.send(host, to, &out);
            self.next_of(to.client);
        }
    }

    /// Puts a commit into the maps. True: all of it is there.
    fn apply(&mut self, job: &mut Job) -> bool {
        if job.commit == 0 {
            return true;
        }
        let entries: usize = job.tx.writes.values().map(BTreeMap::len).sum();
        job.long |= entries as u64 > self.steps;
        // Nobody reads before a short one is over.
        let newest = if job.long { self.visible } else { job.commit };
        let oldest = self.snapshots.keys().next().map_or(newest, |first| newest.min(*first));
        while let Some((place, key, slot)) = pop_write(&mut job.tx) {
            if self.steps == 0 && job.long {
                job.tx.writes.entry(place).or_default().insert(key, slot);
                return false;
            }
            self.steps = self.steps.saturating_sub(1);
            let slot = job.tx.settle(slot.slot);
            self.install(place, key, Version { commit: job.commit, slot }, oldest);
        }
        self.visible = job.commit;
        true
    }

    /// Puts a version into its map.
    pub(crate) fn install(&mut self, place: Where, key: Box<[u8]>, version: Version, oldest: u64) {
        let commit = version.commit;
        let Some(index) = self.catalog.index_mut(place.0, place.1) else { return };
        let simple = oldest >= commit;
        let copy = (!simple).then(|| key.clone());
        let left = index.install(key, version, oldest, &mut self.log.books);
        if left && let Some(key) = copy {
            self.log.books.memory += key.len() as u64 + 64;
            self.garbage.push_back(Garbage { commit, place, key });
        }
    }

    /// Gives back what a transaction holds. True: it is over, and was answered.
    pub(crate) fn release(&mut self, host: &mut dyn Host, job: &mut Job) -> bool {
        let tx = &mut *job.tx;
        let few = tx.held.len() < 64;
        let mut granted = Vec::new();
        while let Some(resource) = tx.held.pop() {
            self.locks.release(tx.id, resource, &mut granted);
            self.steps = self.steps.saturating_sub(1);
            if self.steps == 0 && !few {
                break;
            }
        }
        self.granted(granted);
        let tx = &mut *job.tx;
        let mut some = self.steps.max(64);
        let gone = tx.wither(&mut some);
        self.steps = self.steps.min(some);
        if !gone || !tx.held.is_empty() {
            return false;
        }
        self.end_snapshot(&mut job.tx);
        for spill in &job.tx.spills {
            self.log.books.unpin(spill.place.segment);
        }
        self.log.books.memory = self.log.books.memory.saturating_sub(job.tx.memory);
        if let Some((to, out)) = job.reply.take() {
            self.send(host, to, &out);
            self.next_of(to.client);
            if self.spare.capacity() < out.capacity() && out.capacity() <= 1 << 20 {
                self.spare = out;
            }
        }
        true
    }
}

/// Takes one of a transaction's writes.
fn pop_write(tx: &mut Tx) -> Option<(Where, Box<[u8]>, crate::map::Write)> {
    loop {
        let mut first = tx.writes.first_entry()?;
        let place = *first.key();
        match first.get_mut().pop_first() {
            Some((key, write)) => return Some((place, key, write)),
            None => drop(first.remove()),
        }
    }
}
