//! What is done a piece at a time beside serving: old versions, tables that are gone, checkpoints,
//! compaction.

use alloc::vec::Vec;

use sdk::Host;

use crate::deed::{Change, Note, change};
use crate::record::kind;
use crate::reserve::Purpose;
use crate::store::Store;

/// What a call may do of each chore when requests came with it, and when not: keys.
const STEPS: [u64; 2] = [256, 4096];
/// Bytes of a segment that is compacted.
const BYTES: [u64; 2] = [32 << 10, 1 << 20];

impl Store {
    /// The oldest commit whose versions somebody may read.
    fn oldest(&self) -> u64 {
        self.snapshots.keys().next().map_or(self.visible, |first| self.visible.min(*first))
    }

    fn has_garbage(&self) -> bool {
        self.garbage.front().is_some_and(|first| first.commit <= self.oldest())
    }

    /// Whether there is something to do now.
    pub(crate) fn has_chores(&mut self, host: &mut dyn Host) -> bool {
        !self.catalog.graves.is_empty()
            || self.has_garbage()
            || self.checkpoint.is_some()
            || self.compaction.is_some()
            || self.wants_checkpoint(host)
    }

    /// Does some of it.
    pub(crate) fn chores(&mut self, host: &mut dyn Host, idle: bool) {
        let steps = STEPS[usize::from(idle)].min(self.config.steps);
        self.steps = steps;
        let much = self.has_garbage() || !self.catalog.graves.is_empty();
        self.sweep(steps);
        self.bury();
        if much && !self.has_garbage() && self.catalog.graves.is_empty() {
            // Segments may be needless now that were not when somebody looked last.
            self.want_checkpoint();
            self.compact_at = 0;
        }
        if self.checkpoint.is_some() {
            self.go_on_checkpoint(host, steps);
        } else if self.wants_checkpoint(host) {
            self.begin_checkpoint(host);
        }
        self.keep_reserve(host);
        if self.log.writable().is_err() {
            self.compaction = None;
            return;
        }
        if self.compaction.is_some() {
            self.go_on_compaction(host, BYTES[usize::from(idle)]);
        } else if self.replay_from.segment > 0 {
            self.begin_compaction(host);
        }
    }

    /// Forgets versions that nobody can read any more.
    fn sweep(&mut self, steps: u64) {
        for _ in 0..steps {
            if !self.has_garbage() {
                return;
            }
            let Some(garbage) = self.garbage.pop_front() else { return };
            let cost = garbage.key.len() as u64 + 64;
            self.log.books.memory = self.log.books.memory.saturating_sub(cost);
            let oldest = self.oldest();
            if let Some(index) = self.catalog.index_mut(garbage.place.0, garbage.place.1) {
                index.prune(&garbage.key, oldest, &mut self.log.books);
            }
        }
    }

    /// Forgets what is left of tables that are gone.
    pub(crate) fn bury(&mut self) {
        while self.steps > 0
            && let Some(index) = self.catalog.graves.last_mut()
        {
            let done = index.wither(self.steps, &mut self.log.books);
            self.steps = self.steps.saturating_sub(done.max(1));
            if index.map.is_empty() {
                self.catalog.graves.pop();
            }
        }
    }

    /// The process is about to end: what is known better than the log says is logged, and all is durable.
    pub(crate) fn ending(&mut self, host: &mut dyn Host) {
        self.settle(host);
        let tables = self.catalog.tables.iter();
        let ahead = tables.filter(|(_, t)| t.next_auto < t.logged_auto);
        let changes: Vec<Change<'_>> = ahead
            .map(|(number, table)| Change {
                kind: change::AUTO,
                indexes: 0,
                table: *number,
                auto: table.next_auto,
                note: Note::default(),
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
