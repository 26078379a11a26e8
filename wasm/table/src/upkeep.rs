//! Upkeep: what is done a piece at a time beside serving. Old versions, tables that are gone,
//! checkpoints, compaction, the reserve for a full disk.

use sdk::Host;

use crate::checkpoint::Checkpoints;
use crate::compact::Compactor;
use crate::database::Database;

/// Keys that one call may do of each chore: when requests came with it, and when none came.
const STEPS: [u64; 2] = [256, 4096];
/// Bytes that one call may read of a segment that is compacted.
const BYTES: [u64; 2] = [32 << 10, 1 << 20];

/// State of the chores.
#[derive(Debug, Default)]
pub struct Upkeep {
    /// Checkpoints.
    pub checkpoints: Checkpoints,
    /// Compaction.
    pub compactor: Compactor,
}

impl Upkeep {
    /// Whether there is something to do now. `has_applies`: commits are in the log and not in
    /// memory.
    pub fn is_due(&self, host: &mut dyn Host, db: &Database, has_applies: bool) -> bool {
        db.has_garbage()
            || self.checkpoints.current.is_some()
            || self.compactor.current.is_some()
            || self.checkpoints.is_due(host, db, has_applies)
    }

    /// Does some of it.
    pub fn work(
        &mut self,
        host: &mut dyn Host,
        db: &mut Database,
        has_applies: bool,
        is_idle: bool,
    ) {
        let steps = STEPS[usize::from(is_idle)].min(db.config.steps);
        db.steps = steps;
        let had_garbage = db.has_garbage();
        db.sweep(steps);
        db.free_dropped();
        if had_garbage && !db.has_garbage() {
            // Segments may be needless now that were not when they were looked at last.
            self.checkpoints.want_if_worth(db);
            self.compactor.look_again();
        }
        if self.checkpoints.current.is_some() {
            self.checkpoints.go_on(host, db, self.compactor.segment(), steps);
        } else if self.checkpoints.is_due(host, db, has_applies) {
            self.checkpoints.begin(host, db);
        }
        self.keep_reserve(host, db);
        if db.log.check_writable().is_err() {
            self.compactor.current = None;
            return;
        }
        if self.compactor.current.is_some() {
            if self.compactor.go_on(host, db, BYTES[usize::from(is_idle)]) {
                self.checkpoints.want_if_worth(db);
            }
        } else if self.checkpoints.replay_from.segment > 0 {
            self.compactor.begin(host, db, self.checkpoints.replay_from);
        }
    }

    /// Keeps the reserve as large as it must be.
    fn keep_reserve(&mut self, host: &mut dyn Host, db: &mut Database) {
        if db.log.reserve_due_ms().is_none_or(|due_ms| host.now_ms() < due_ms) {
            return;
        }
        if db.log.reserve.is_pressed() {
            let checkpoints = &mut self.checkpoints;
            checkpoints.is_wanted |= db.removable_bytes() > 0;
            // What frees space comes first.
            if checkpoints.is_wanted
                || checkpoints.current.is_some()
                || self.compactor.current.is_some()
            {
                db.log.reserve.postpone(host.now_ms());
                return;
            }
        }
        let Database { log, config, .. } = db;
        log.keep_reserve(host, config);
    }
}
