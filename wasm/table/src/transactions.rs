//! Transactions that have not ended: open ones and prepared ones.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};

use guest_abi::table::MAX_PREPARED;

use crate::catalog::text;
use crate::fail::{Fail, fail};
use crate::lock::Granted;
use crate::log::Place;
use crate::tx::Tx;

/// Transactions without an end. One that is being executed is out of here.
#[derive(Debug, Default)]
pub struct Transactions {
    /// Transactions that are not executed at the moment, by the store's number.
    pub parked: BTreeMap<u64, Box<Tx>>,
    /// Highest number that a transaction has had.
    pub last: u64,
    /// Prepared transactions by name.
    pub prepared: BTreeMap<Box<[u8]>, u64>,
    /// Names of transactions whose prepare is not in memory yet.
    pub preparing: BTreeSet<Box<[u8]>>,
}

impl Transactions {
    /// Begins a transaction of a client, and returns its number.
    pub fn begin(&mut self, client: u32) -> u64 {
        self.last += 1;
        self.parked.insert(self.last, Box::new(Tx::new(self.last, client)));
        self.last
    }

    /// Takes a transaction out, to execute or end it.
    pub fn take(&mut self, tx: u64) -> Option<Box<Tx>> {
        self.parked.remove(&tx)
    }

    /// Puts a transaction back that is not executed any more.
    pub fn park(&mut self, tx: Box<Tx>) {
        self.parked.insert(tx.id, tx);
    }

    /// Takes a prepared transaction out by its name.
    pub fn take_prepared(&mut self, name: &[u8]) -> Option<Box<Tx>> {
        let tx = self.prepared.remove(name)?;
        self.take(tx)
    }

    /// Puts a prepared transaction in, or back.
    pub fn park_prepared(&mut self, name: Box<[u8]>, tx: Box<Tx>) {
        self.prepared.insert(name, tx.id);
        self.park(tx);
    }

    /// Fails if a transaction cannot be prepared with a name.
    pub fn check_prepare(&self, name: &[u8]) -> Result<(), Fail> {
        if self.prepared.contains_key(name) || self.preparing.contains(name) {
            return Err(fail!(EXISTS, "there is a prepared transaction {:?}", text(name)));
        }
        if self.prepared.len() + self.preparing.len() >= MAX_PREPARED {
            return Err(fail!(LIMIT, "prepared transactions: the limit is {MAX_PREPARED}"));
        }
        Ok(())
    }

    /// Adds a lock that was granted to the transaction that waited for it, and returns its client.
    pub fn add_lock(&mut self, (tx, resource, is_new): Granted) -> Option<u32> {
        let tx = self.parked.get_mut(&tx)?;
        if is_new {
            tx.held.push(resource);
        }
        Some(tx.client)
    }

    /// Place of the first record of a transaction that is neither prepared nor ended.
    pub fn first_begun(&self) -> Option<Place> {
        let is_prepared = |id: &u64| self.prepared.values().any(|p| p == id);
        let open = self.parked.iter().filter(|(id, _)| !is_prepared(id));
        open.filter_map(|(_, tx)| tx.begun).min()
    }
}
