//! Accounts: settings and use of each VM, over all sidecores.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use base::sync::lock;

use super::bucket::Bucket;
use super::{
    DEFAULT_WEIGHT, FLOOR_BURST_NS, LEAST_GRANT_BYTES, MAX_WEIGHT, MIN_WEIGHT, Spent, VmId,
};

/// Credit settings of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Share under contention: 1 to 10,000. Values beyond are taken as the nearest.
    pub weight: u32,
    /// Floor, in bytes per second: below it the weight never holds the VM back; 0: no floor.
    pub floor_bytes_per_s: u64,
    /// Ceiling, in bytes per second; 0: no ceiling.
    pub ceiling_bytes_per_s: u64,
    /// Ceiling, in requests (frames, packets, disk operations) per second; 0: no ceiling.
    pub ceiling_ops_per_s: u64,
    /// Milliseconds of both ceilings that the VM may use at once after a pause; at least 1.
    pub ceiling_burst_ms: u32,
}

impl Default for Settings {
    /// A usual VM: weight 100, no floor, no ceiling.
    fn default() -> Self {
        Self {
            weight: DEFAULT_WEIGHT,
            floor_bytes_per_s: 0,
            ceiling_bytes_per_s: 0,
            ceiling_ops_per_s: 0,
            ceiling_burst_ms: 100,
        }
    }
}

/// Counters of an account. Ledgers add to them about once a millisecond.
#[derive(Debug, Default)]
pub struct AccountStats {
    /// Bytes charged, each request counted with its minimum.
    pub charged_bytes: AtomicU64,
    /// Requests charged.
    pub charged_requests: AtomicU64,
    /// Times that the VM had credit again after it ran out.
    pub refills: AtomicU64,
    /// Times that the VM was held back for want of credit.
    pub held_by_weight: AtomicU64,
    /// Nanoseconds held back for want of credit.
    pub held_by_weight_ns: AtomicU64,
    /// Times that the VM was held back at its ceiling.
    pub held_by_ceiling: AtomicU64,
    /// Nanoseconds held back at the ceiling.
    pub held_by_ceiling_ns: AtomicU64,
    /// Nanoseconds of CPU time that threads outside of all sidecores worked for the VM.
    pub thread_ns: AtomicU64,
}

/// Bytes that may be moved for a VM outside of all sidecores, in one request: see
/// [`Account::ask`]. It goes back with [`Account::pay`].
#[derive(Debug)]
#[must_use]
pub struct Grant {
    /// Bytes that may be moved.
    pub bytes: u64,
    /// Bytes that the ceiling's bucket gave for it.
    taken_bytes: u64,
    /// Requests that the ceiling's bucket gave for it.
    taken_requests: u64,
}

/// Account of one VM; shared by all ledgers.
#[derive(Debug)]
pub struct Account {
    id: VmId,
    name: String,
    weight: AtomicU32,
    settings: Mutex<Settings>,
    pub(super) floor: Bucket,
    pub(super) bytes: Bucket,
    pub(super) requests: Bucket,
    /// Counters.
    pub stats: AccountStats,
}

impl Account {
    fn new(id: VmId, name: &str, settings: Settings) -> Arc<Self> {
        let account = Self {
            id,
            name: name.into(),
            weight: AtomicU32::new(DEFAULT_WEIGHT),
            settings: Mutex::new(settings),
            floor: Bucket::default(),
            bytes: Bucket::default(),
            requests: Bucket::default(),
            stats: AccountStats::default(),
        };
        account.set(settings);
        Arc::new(account)
    }

    /// Id of the account in ledgers.
    pub fn id(&self) -> VmId {
        self.id
    }

    /// Name of the VM.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Settings of the VM now.
    pub fn settings(&self) -> Settings {
        *lock(&self.settings)
    }

    pub(super) fn weight(&self) -> u32 {
        self.weight.load(Ordering::Relaxed)
    }

    /// Changes the settings. Each sidecore applies them at the next [`crate::Sidecore::enrol`].
    pub fn set(&self, settings: Settings) {
        let mut current = lock(&self.settings);
        *current = settings;
        let weight = settings.weight.clamp(MIN_WEIGHT, MAX_WEIGHT);
        self.weight.store(weight, Ordering::Relaxed);
        let burst_ns = u64::from(settings.ceiling_burst_ms.max(1)) * 1_000_000;
        self.floor.set(settings.floor_bytes_per_s, FLOOR_BURST_NS);
        self.bytes.set(settings.ceiling_bytes_per_s, burst_ns);
        self.requests.set(settings.ceiling_ops_per_s, burst_ns);
    }

    /// Charges bytes that were moved for the VM outside of all sidecores, such as writes of its
    /// modules to their disk. They have been moved, so nothing is refused: a sidecore on which the
    /// VM has work keeps them back from the VM's earnings there, and the ceilings are paid first,
    /// up to a second of theirs. Call it in pieces of about 1 MiB: bytes beyond four bursts at once
    /// are forgotten.
    pub fn charge(&self, spent: Spent, now_ns: u64) {
        self.stats.charged_bytes.fetch_add(spent.bytes, Ordering::Relaxed);
        self.stats.charged_requests.fetch_add(spent.requests.into(), Ordering::Relaxed);
        self.bytes.owe(spent.bytes, now_ns);
        self.requests.owe(spent.requests.into(), now_ns);
    }

    /// Asks for a request of at most `most_bytes` that is about to be done for the VM outside of
    /// all sidecores, such as a pipe's read of its disk. The ceilings are paid now, and what turns
    /// out not to be used comes back with [`Account::pay`]. `Err`: the VM is at a ceiling, until
    /// that time at least. Costs two loads where there is no ceiling.
    pub fn ask(&self, most_bytes: u64, now_ns: u64) -> Result<Grant, u64> {
        let taken_requests = match self.requests.rate() {
            Some(_) if self.requests.take(1, now_ns) == 0 => {
                return Err(self.requests.when_ns(1, now_ns));
            }
            rate => u64::from(rate.is_some()),
        };
        let Some(per_s) = self.bytes.rate() else {
            return Ok(Grant { bytes: most_bytes, taken_bytes: 0, taken_requests });
        };
        let least = LEAST_GRANT_BYTES.min(per_s / 2).max(1);
        match self.bytes.draw(least, most_bytes, now_ns) {
            0 => {
                self.requests.give_back(taken_requests);
                Err(self.bytes.when_ns(1, now_ns))
            }
            bytes => Ok(Grant { bytes, taken_bytes: bytes, taken_requests }),
        }
    }

    /// Charges what was done with a grant. A sidecore on which the VM has work keeps it back from
    /// the VM's earnings there, as with [`Account::charge`].
    pub fn pay(&self, grant: Grant, spent: Spent, now_ns: u64) {
        self.stats.charged_bytes.fetch_add(spent.bytes, Ordering::Relaxed);
        self.stats.charged_requests.fetch_add(spent.requests.into(), Ordering::Relaxed);
        let settle = |bucket: &Bucket, taken: u64, used: u64| match used.checked_sub(taken) {
            Some(more) => _ = bucket.owe(more, now_ns),
            None => bucket.give_back(taken - used),
        };
        settle(&self.bytes, grant.taken_bytes, spent.bytes);
        settle(&self.requests, grant.taken_requests, spent.requests.into());
    }

    /// Charges CPU time of a thread that worked for the VM outside of all sidecores. It counts by
    /// weight, as [`super::BYTES_PER_NS`] bytes for each nanosecond: sidecores on which the VM has
    /// work keep them back from its earnings there. Ceilings are in bytes, and do not know it.
    pub fn charge_time(&self, ns: u64) {
        self.stats.thread_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Counts a wait of something outside of all sidecores at the VM's ceiling: its beginning.
    pub fn begin_hold(&self) {
        self.stats.held_by_ceiling.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the time of such a wait.
    pub fn end_hold(&self, held_ns: u64) {
        self.stats.held_by_ceiling_ns.fetch_add(held_ns, Ordering::Relaxed);
    }
}

/// Accounts of all VMs of the process.
#[derive(Debug, Default)]
pub struct Accounts {
    list: Mutex<Vec<Option<Arc<Account>>>>,
}

impl Accounts {
    /// Opens an account. Sidecores know it after [`crate::Sidecore::enrol`].
    pub fn open(&self, name: &str, settings: Settings) -> Arc<Account> {
        let mut list = lock(&self.list);
        let at = list.iter().position(Option::is_none).unwrap_or_else(|| {
            list.push(None);
            list.len() - 1
        });
        let account = Account::new(VmId(at as u32), name, settings);
        list[at] = Some(Arc::clone(&account));
        account
    }

    /// Closes an account: its id may be given to another. Sidecores must have forgotten it
    /// ([`crate::Sidecore::expel`]).
    pub fn close(&self, id: VmId) {
        let mut list = lock(&self.list);
        if let Some(place) = list.get_mut(id.at()) {
            *place = None;
        }
    }

    /// Lists the open accounts.
    pub fn list(&self) -> Vec<Arc<Account>> {
        let list = lock(&self.list);
        list.iter().flatten().cloned().collect()
    }

    /// Finds the open account of a VM by name.
    pub fn find(&self, name: &str) -> Option<Arc<Account>> {
        lock(&self.list).iter().flatten().find(|a| a.name() == name).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_used_again_only_after_they_were_closed() {
        let accounts = Accounts::default();
        let [a, b] = ["a", "b"].map(|name| accounts.open(name, Settings::default()));
        assert_ne!(a.id(), b.id());
        accounts.close(a.id());
        let c = accounts.open("c", Settings::default());
        assert_eq!(c.id(), a.id());
        assert!(accounts.find("a").is_none() && accounts.find("c").is_some());
        accounts.close(VmId::NONE);
        assert_eq!(accounts.list().len(), 2);
    }

    #[test]
    fn weights_beyond_the_range_are_taken_as_the_nearest() {
        let accounts = Accounts::default();
        let account = accounts.open("a", Settings { weight: 0, ..Settings::default() });
        assert_eq!(account.weight(), 1);
        account.set(Settings { weight: u32::MAX, ..Settings::default() });
        assert_eq!(account.weight(), MAX_WEIGHT);
    }
}
