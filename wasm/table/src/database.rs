//! Database: the state that ops of batches work on.

use alloc::boxed::Box;
use alloc::vec::Vec;

use sdk::Host;

use crate::catalog::Catalog;
use crate::clients::ActiveRequest;
use crate::config::Config;
use crate::fail::Fail;
use crate::lock::Locks;
use crate::log::{Log, Place};
use crate::map::Version;
use crate::memory::{LOCK_BYTES, MemoryLimit};
use crate::record::{TAIL_BYTES, kind};
use crate::record_body::{Change, RequestId, TxHead, change};
use crate::remembered::Remembered;
use crate::reserve::Purpose;
use crate::staging::{Ending, StagedTx, Staging};
use crate::transactions::Transactions;
use crate::tx::Tx;
use crate::versions::Versions;

/// State of the store without its clients, and without what is done beside serving.
#[derive(Debug, Default)]
pub struct Database {
    /// Limits.
    pub config: Config,
    /// Limit of memory.
    pub memory_limit: MemoryLimit,
    /// Log, with the use of its segments.
    pub log: Log,
    /// Tables and their indexes.
    pub catalog: Catalog,
    /// Locks of keys and tables.
    pub locks: Locks,
    /// Transactions without an end.
    pub txs: Transactions,
    /// Commits and snapshots.
    pub versions: Versions,
    /// Requests that were done.
    pub remembered: Remembered,
    /// Transactions on their way into the log.
    pub staging: Staging,
    /// Steps left in this call.
    pub steps: u64,
}

impl Database {
    /// Makes an empty one.
    pub fn new(config: Config) -> Self {
        let mut db = Self { config, ..Self::default() };
        db.log.segment_bytes = config.segment_bytes;
        db
    }

    /// Memory in use, about.
    pub fn memory(&self) -> u64 {
        self.log.usage.memory + self.locks.len() as u64 * LOCK_BYTES
    }

    /// Fails if so many bytes of memory more are too many.
    pub fn check_memory(&mut self, more: u64) -> Result<(), Fail> {
        self.memory_limit.check(self.memory(), more, &self.config)
    }

    /// Takes steps from those left in this call.
    pub fn spend(&mut self, steps: u64) {
        self.steps = self.steps.saturating_sub(steps);
    }

    /// Stages the record that ends or prepares a transaction.
    pub fn stage(
        &mut self,
        host: &mut dyn Host,
        request: Box<ActiveRequest>,
        tx: Box<Tx>,
        ending: Ending,
    ) -> Result<(), (StagedTx, Fail)> {
        self.versions.last_commit += u64::from(ending.is_commit());
        let commit = if ending.is_commit() { self.versions.last_commit } else { 0 };
        let request_id = request.request_id;
        let head = TxHead { commit, tx: tx.id, request_id, name: ending.name() };
        let ops_at = head.len();
        let purpose = ending.purpose(&tx);
        let result = self.log.stage(host, ending.record_kind(), purpose, |out| {
            out.reserve(ops_at + tx.ops.len() + TAIL_BYTES);
            head.put(out);
            out.extend_from_slice(&tx.ops);
        });
        if let Ending::Prepare(name) = &ending {
            self.txs.preparing.insert(name.clone());
        }
        let staged = StagedTx { request, tx, ending, commit, ops_at };
        match result {
            Ok(()) => {
                self.staging.staged.push(staged);
                Ok(())
            }
            Err(fail) => Err((staged, fail)),
        }
    }

    /// Appends all staged records to the log. Their clients are told later:
    /// `Store::answer_appended`.
    pub fn append_staged(&mut self, host: &mut dyn Host) {
        if self.staging.staged.is_empty() {
            return;
        }
        let results = self.log.flush(host);
        let staged = core::mem::take(&mut self.staging.staged);
        for (mut staged, result) in staged.into_iter().zip(results) {
            let result = result.map(|place| self.note_appended(&mut staged, place));
            self.staging.appended.push((staged, result));
        }
    }

    /// Notes that a transaction's record is in the log.
    fn note_appended(&mut self, staged: &mut StagedTx, place: Place) {
        let tx = &mut *staged.tx;
        if !tx.ops.is_empty() {
            let place = Place { offset: place.offset + staged.ops_at as u32, ..place };
            tx.move_ops_to_log(place, &mut self.log.usage);
        }
        self.versions.end_snapshot(tx);
        self.remembered.add(staged.request.request_id);
    }

    /// Puts a commit into the maps, as far as the call's steps go. `is_long`: readers may come
    /// before it is all there. True: it is.
    pub fn apply(&mut self, tx: &mut Tx, commit: u64, is_long: bool) -> bool {
        // Nobody reads before a short one is over.
        let newest = if is_long { self.versions.visible } else { commit };
        let oldest = self.versions.oldest_if(newest);
        while let Some((index, key, write)) = tx.pop_write() {
            if self.steps == 0 && is_long {
                tx.writes.entry(index).or_default().insert(key, write);
                return false;
            }
            self.spend(1);
            let version = Version { commit, slot: tx.settle(write.slot) };
            let (catalog, usage) = (&mut self.catalog, &mut self.log.usage);
            self.versions.install(catalog, usage, (index, key), version, oldest);
        }
        self.versions.visible = commit;
        true
    }

    /// Place in the log at which replay would begin after a checkpoint that began now.
    pub fn replay_would_begin(&self) -> Place {
        let end = self.log.end();
        self.txs.first_begun().map_or(end, |first| first.min(end))
    }

    /// Bytes of segments that the next checkpoint would free.
    pub fn removable_bytes(&self) -> u64 {
        let first = self.replay_would_begin().segment;
        let old = self.log.usage.segments.range(..first);
        old.filter(|(_, s)| s.is_unused()).map(|(_, s)| s.len).sum()
    }

    /// Forgets versions that nobody can read, of up to `steps` keys.
    pub fn sweep(&mut self, steps: u64) {
        self.versions.sweep(&mut self.catalog, &mut self.log.usage, steps);
    }

    /// Whether there is memory to be freed: old versions, or tables that are gone.
    pub fn has_garbage(&self) -> bool {
        self.versions.has_garbage() || !self.catalog.dropped_indexes.is_empty()
    }

    /// Frees tables that are gone, as far as the call's steps go.
    pub fn free_dropped(&mut self) {
        self.catalog.free_dropped(&mut self.log.usage, &mut self.steps);
    }

    /// Logs the counters of tables before the process ends, so that the next start gives no value
    /// of them up, and makes the log durable.
    pub fn log_counters(&mut self, host: &mut dyn Host) {
        let tables = self.catalog.tables.iter();
        let ahead = tables.filter(|(_, t)| t.next_auto < t.logged_auto);
        let changes: Vec<Change<'_>> = ahead
            .map(|(number, table)| Change {
                kind: change::AUTO,
                indexes: 0,
                table: *number,
                auto: table.next_auto,
                request_id: RequestId::default(),
                name: &[],
                definition: &[],
            })
            .collect();
        for change in changes {
            if self.log.write(host, kind::CATALOG, Purpose::Free, |out| change.put(out)).is_err() {
                return;
            }
            self.catalog.apply(&change);
        }
        let _ = self.log.sync(host);
    }
}
