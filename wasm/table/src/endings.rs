//! Ends of transactions: commits applied to the maps, and locks given back.
//!
//! A commit is staged in the log with those of the same call ([`crate::staging`]); once they are
//! appended, in one piece, each is applied to the maps, in the log's order, and then seen. A large
//! one is applied over several calls, and those behind it wait.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use sdk::Host;

use crate::clients::{Clients, ReplyTo};
use crate::database::Database;
use crate::staging::Ending;
use crate::tx::Tx;

/// Locks up to which all are given back in one step.
const FEW_LOCKS: usize = 64;
/// Least number of writes that are forgotten in one step.
const LEAST_STEPS: u64 = 64;

/// Transaction that ends.
#[derive(Debug)]
pub struct EndedTx {
    tx: Box<Tx>,
    ending: Ending,
    commit: u64,
    /// Whether applying it takes more than one call: readers may want what it replaces.
    is_long: bool,
    reply: Option<(ReplyTo, Vec<u8>)>,
}

impl EndedTx {
    /// Transaction whose record is in the log.
    pub fn logged(tx: Box<Tx>, ending: Ending, commit: u64, reply: (ReplyTo, Vec<u8>)) -> Self {
        Self { tx, ending, commit, is_long: false, reply: Some(reply) }
    }

    /// Transaction that only has to give back what it holds.
    pub fn undone(tx: Box<Tx>, reply: Option<(ReplyTo, Vec<u8>)>) -> Self {
        Self { tx, ending: Ending::Rollback, commit: 0, is_long: false, reply }
    }
}

/// Transactions that have ended, and are not over.
#[derive(Debug, Default)]
pub struct Endings {
    /// Transactions that are in the log and not in memory yet, in its order.
    pub applies: VecDeque<EndedTx>,
    /// Transactions that still hold locks or memory.
    releases: VecDeque<EndedTx>,
}

impl Endings {
    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.applies.is_empty() && self.releases.is_empty()
    }

    /// Adds a transaction that is in the log.
    pub fn apply_later(&mut self, ended: EndedTx) {
        self.applies.push_back(ended);
    }

    /// Adds a transaction that gives back what it holds, and is answered by nobody.
    pub fn release_later(&mut self, tx: Box<Tx>) {
        self.releases.push_back(EndedTx::undone(tx, None));
    }

    /// Gives back what a transaction holds: almost always at once, else later.
    pub fn release(
        &mut self,
        host: &mut dyn Host,
        db: &mut Database,
        clients: &mut Clients,
        mut ended: EndedTx,
    ) {
        if !release_some(host, db, clients, &mut ended) {
            self.releases.push_back(ended);
        }
    }

    /// Applies commits, and ends transactions, as far as the call's steps go.
    pub fn work(&mut self, host: &mut dyn Host, db: &mut Database, clients: &mut Clients) {
        while let Some(mut ended) = self.applies.pop_front() {
            if !apply(db, &mut ended) {
                self.applies.push_front(ended);
                break;
            }
            match core::mem::replace(&mut ended.ending, Ending::Rollback) {
                Ending::Prepare(name) => keep_prepared(host, db, clients, ended, name),
                _ => self.releases.push_back(ended),
            }
        }
        while let Some(mut ended) = self.releases.pop_front() {
            if !release_some(host, db, clients, &mut ended) {
                self.releases.push_front(ended);
                break;
            }
        }
    }
}

/// Applies a commit. True: all of it is there.
fn apply(db: &mut Database, ended: &mut EndedTx) -> bool {
    if ended.commit == 0 {
        return true;
    }
    let entries: usize = ended.tx.writes.values().map(BTreeMap::len).sum();
    ended.is_long |= entries as u64 > db.steps;
    db.apply(&mut ended.tx, ended.commit, ended.is_long)
}

fn keep_prepared(
    host: &mut dyn Host,
    db: &mut Database,
    clients: &mut Clients,
    mut ended: EndedTx,
    name: Box<[u8]>,
) {
    db.versions.end_snapshot(&mut ended.tx);
    db.txs.preparing.remove(&name);
    db.txs.park_prepared(name, ended.tx);
    if let Some((to, out)) = ended.reply {
        clients.send(host, to, &out);
        clients.make_ready_if_free(to.client);
    }
}

/// Gives back what a transaction holds. True: it is over, and was answered.
fn release_some(
    host: &mut dyn Host,
    db: &mut Database,
    clients: &mut Clients,
    ended: &mut EndedTx,
) -> bool {
    let tx = &mut *ended.tx;
    let few = tx.held.len() < FEW_LOCKS;
    let mut granted = Vec::new();
    while let Some(resource) = tx.held.pop() {
        db.locks.release(tx.id, resource, &mut granted);
        db.spend(1);
        if db.steps == 0 && !few {
            break;
        }
    }
    clients.grant(granted, &mut db.txs);
    let mut steps = db.steps.max(LEAST_STEPS);
    let is_empty = tx.forget_writes(&mut steps);
    db.steps = db.steps.min(steps);
    if !is_empty || !tx.held.is_empty() {
        return false;
    }
    db.versions.end_snapshot(tx);
    let usage = &mut db.log.usage;
    for spill in &tx.spills {
        usage.unpin(spill.place.segment);
    }
    usage.memory = usage.memory.saturating_sub(tx.memory);
    if let Some((to, out)) = ended.reply.take() {
        clients.send(host, to, &out);
        clients.make_ready_if_free(to.client);
        clients.keep_larger_buffer(out);
    }
    true
}
