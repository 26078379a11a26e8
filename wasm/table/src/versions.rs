//! Commits and the versions that they leave: which a reader sees, and which nobody reads any more.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};

use crate::catalog::Catalog;
use crate::fail::{Fail, fail};
use crate::map::{IndexId, Version};
use crate::segment::Usage;
use crate::tx::Tx;

/// Memory that an entry of [`Versions::garbage`] costs beside its key, about.
const GARBAGE_BYTES: u64 = 64;

/// Key with old versions that a reader may still want.
#[derive(Debug)]
pub struct Garbage {
    /// Commit that replaced them: once no snapshot is older, nobody wants them.
    commit: u64,
    index: IndexId,
    key: Box<[u8]>,
}

/// Numbers of commits, snapshots of readers, and the keys with old versions.
#[derive(Debug, Default)]
pub struct Versions {
    /// Number of transactions that use each snapshot.
    pub snapshots: BTreeMap<u64, u32>,
    /// Last commit that readers see.
    pub visible: u64,
    /// Last commit that has a number.
    pub last_commit: u64,
    /// Keys with old versions, in the order of the commits.
    pub garbage: VecDeque<Garbage>,
}

impl Versions {
    /// Snapshot of a transaction's reads: from the first one on the last commit then.
    pub fn snapshot(&mut self, tx: &mut Tx) -> u64 {
        if let Some(snapshot) = tx.snapshot {
            return snapshot;
        }
        let users = self.snapshots.entry(self.visible).or_default();
        *users = users.saturating_add(1);
        tx.snapshot = Some(self.visible);
        self.visible
    }

    /// Gives a transaction's snapshot back.
    pub fn end_snapshot(&mut self, tx: &mut Tx) {
        let Some(snapshot) = tx.snapshot.take() else { return };
        if let Some(users) = self.snapshots.get_mut(&snapshot) {
            *users -= 1;
            if *users == 0 {
                self.snapshots.remove(&snapshot);
            }
        }
    }

    /// Oldest commit whose versions a reader may want, if new readers see `newest`.
    pub fn oldest_if(&self, newest: u64) -> u64 {
        self.snapshots.keys().next().map_or(newest, |first| newest.min(*first))
    }

    fn oldest(&self) -> u64 {
        self.oldest_if(self.visible)
    }

    /// Whether there are old versions that nobody wants.
    pub fn has_garbage(&self) -> bool {
        self.garbage.front().is_some_and(|first| first.commit <= self.oldest())
    }

    /// Fails if a key was changed after the snapshot of a transaction.
    pub fn check_unchanged(
        &self,
        catalog: &Catalog,
        tx: &Tx,
        (table, index): IndexId,
        key: &[u8],
    ) -> Result<(), Fail> {
        let Some(snapshot) = tx.snapshot else { return Ok(()) };
        let chain = catalog.index(table, index)?.map.get(key);
        match chain.and_then(|chain| chain.version_at(self.visible)) {
            Some(version) if version.commit > snapshot => Err(fail!(
                CONFLICT,
                "table {table}, index {index}: a key was changed by commit {}, after snapshot {snapshot}",
                version.commit
            )),
            _ => Ok(()),
        }
    }

    /// Puts a version into its index. `oldest` is the oldest commit whose versions a reader may
    /// want.
    pub fn install(
        &mut self,
        catalog: &mut Catalog,
        usage: &mut Usage,
        (index, key): (IndexId, Box<[u8]>),
        version: Version,
        oldest: u64,
    ) {
        let commit = version.commit;
        let Some(entries) = catalog.index_mut(index.0, index.1) else { return };
        let is_newest_wanted = oldest >= commit;
        let copy = (!is_newest_wanted).then(|| key.clone());
        let has_garbage = entries.install(key, version, oldest, usage);
        if has_garbage && let Some(key) = copy {
            usage.memory += key.len() as u64 + GARBAGE_BYTES;
            self.garbage.push_back(Garbage { commit, index, key });
        }
    }

    /// Forgets versions that nobody can read any more, of up to `steps` keys.
    pub fn sweep(&mut self, catalog: &mut Catalog, usage: &mut Usage, steps: u64) {
        for _ in 0..steps {
            if !self.has_garbage() {
                return;
            }
            let Some(Garbage { index, key, .. }) = self.garbage.pop_front() else { return };
            let cost = key.len() as u64 + GARBAGE_BYTES;
            usage.memory = usage.memory.saturating_sub(cost);
            let oldest = self.oldest();
            if let Some(entries) = catalog.index_mut(index.0, index.1) {
                entries.prune(&key, oldest, usage);
            }
        }
    }
}
