//! The account of a VM, as its pipes spend from it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::clock::Clock;
use block::limits::MIN_CHARGE_BYTES;
use sidecore::{Account, Grant, Spent};

use crate::metrics::PipeStats;

/// A VM's account, and the counters of its pipes.
pub(crate) struct Purse {
    /// None: nobody is charged.
    account: Option<Arc<Account>>,
    clock: Arc<dyn Clock>,
    pub stats: Arc<PipeStats>,
}

impl Purse {
    /// A purse of a VM.
    pub fn new(
        account: Option<Arc<Account>>,
        stats: Arc<PipeStats>,
        clock: Arc<dyn Clock>,
    ) -> Self {
        Self { account, clock, stats }
    }

    /// Time by the clock of the account.
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Asks for a read of at most so many bytes: see [`Account::ask`]. None: nobody is charged.
    pub fn ask(&self, most_bytes: u64, now_ns: u64) -> Result<Option<Grant>, u64> {
        self.account.as_ref().map(|account| account.ask(most_bytes, now_ns)).transpose()
    }

    /// Charges a read that was asked for. One that read nothing costs nothing.
    pub fn pay(&self, grant: Option<Grant>, read_bytes: u64, now_ns: u64) {
        let spent = self.count(read_bytes);
        if let (Some(account), Some(grant)) = (&self.account, grant) {
            account.pay(grant, spent, now_ns);
        }
    }

    /// Charges a read that nobody asked for: it was short, or could not wait.
    pub fn charge(&self, read_bytes: u64) {
        let spent = self.count(read_bytes);
        if let Some(account) = &self.account {
            account.charge(spent, self.clock.now_ns());
        }
    }

    /// Charges CPU time of a thread.
    pub fn charge_time(&self, ns: u64) {
        if let Some(account) = &self.account {
            account.charge_time(ns);
        }
    }

    /// Counts a pipe that begins to wait at the VM's ceiling. Returns the number of those that do.
    pub fn begin_hold(&self) -> u64 {
        self.account.iter().for_each(|account| account.begin_hold());
        self.stats.held.fetch_add(1, Ordering::Relaxed);
        self.stats.held_now.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Number of pipes that wait at the VM's ceiling.
    pub fn held(&self) -> u64 {
        self.stats.held_now.load(Ordering::Relaxed)
    }

    /// Ends such a wait.
    pub fn end_hold(&self, held_ns: u64) {
        self.account.iter().for_each(|account| account.end_hold(held_ns));
        self.stats.held_now.fetch_sub(1, Ordering::Relaxed);
    }

    fn count(&self, read_bytes: u64) -> Spent {
        let mut spent = Spent::default();
        if read_bytes > 0 {
            spent.add(read_bytes, MIN_CHARGE_BYTES);
            self.stats.reads.fetch_add(1, Ordering::Relaxed);
            self.stats.read_bytes.fetch_add(read_bytes, Ordering::Relaxed);
        }
        spent
    }
}
