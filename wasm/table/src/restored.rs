//! State that a start has restored so far, by the last checkpoint and the log behind it.

use alloc::boxed::Box;

use crate::checkpoint::Checkpoints;
use crate::config::Config;
use crate::database::Database;
use crate::fail::StartError;
use crate::log::Place;
use crate::map::{ENTRY_BYTES, IndexId, Version, Write};
use crate::tx::Tx;

/// State of the store while it starts.
#[derive(Debug)]
pub struct Restored {
    /// Database.
    pub db: Database,
    /// Last checkpoint.
    pub checkpoints: Checkpoints,
    /// End of the log when the checkpoint began: its statistics know the values before.
    pub captured: Place,
    /// Number of the first record behind that.
    pub captured_number: u64,
}

impl Restored {
    /// Begins with nothing.
    pub fn new(config: Config) -> Self {
        let (db, checkpoints) = (Database::new(config), Checkpoints::default());
        Self { db, checkpoints, captured: Place::default(), captured_number: 0 }
    }

    /// Fails if the memory in use is too much.
    pub fn check_memory(&mut self) -> Result<(), StartError> {
        let db = &mut self.db;
        db.memory_limit.check_start(db.log.usage.memory, &db.config)
    }

    /// Puts a version in, unless a newer one is there already.
    pub fn put(&mut self, index: IndexId, key: Box<[u8]>, version: Version) {
        let Some(entries) = self.db.catalog.index_mut(index.0, index.1) else { return };
        let head = entries.map.get(&key).and_then(|chain| chain.head());
        if head.is_none_or(|head| head.commit <= version.commit) {
            let oldest = version.commit;
            entries.install(key, version, oldest, &mut self.db.log.usage);
        }
    }

    /// Puts a prepared transaction in, if it is not there.
    pub fn put_prepared(&mut self, tx: u64, name: &[u8]) -> &mut Tx {
        self.db.txs.prepared.insert(name.into(), tx);
        let new = || Box::new(Tx::new(tx, 0));
        self.db.txs.parked.entry(tx).or_insert_with(new)
    }

    /// Adds a write to a prepared transaction.
    pub fn put_prepared_write(
        &mut self,
        (tx, name): (u64, &[u8]),
        index: IndexId,
        key: Box<[u8]>,
        write: Write,
    ) {
        let cost = ENTRY_BYTES + key.len() as u64;
        self.db.log.usage.memory += cost;
        let tx = self.put_prepared(tx, name);
        tx.memory += cost;
        tx.writes.entry(index).or_default().insert(key, write);
    }
}
