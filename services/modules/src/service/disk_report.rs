//! Reports of what a module did with its disk, for its VM's account.

use std::time::Instant;

use super::spec::ReportDiskUse;
use crate::control::DiskUse;
use crate::folder::Counts;
use crate::limits::{USED_BYTES, USED_INTERVAL};

/// Reports, now and then: what is left is reported with what comes next.
pub(super) struct DiskReport {
    report: ReportDiskUse,
    /// Counters when the last report was made, and its time.
    reported: (Counts, Instant),
}

impl DiskReport {
    /// Begins with nothing used.
    pub fn new(report: ReportDiskUse) -> Self {
        Self { report, reported: (Counts::default(), Instant::now()) }
    }

    /// Makes a report if there is enough to tell. `ring_bytes` went by rings since the last one.
    /// True: it was made.
    pub fn report(&mut self, now: Counts, ring_bytes: u64) -> bool {
        let (before, at) = self.reported;
        let mut used = DiskUse::between(before, now);
        // What goes by sockets the vsock device charges.
        used.bytes = used.bytes.saturating_add(ring_bytes);
        let much = used.bytes >= USED_BYTES || at.elapsed() >= USED_INTERVAL;
        let is_made = used.bytes > 0 && much && (self.report)(used);
        if is_made {
            self.reported = (now, Instant::now());
        }
        is_made
    }
}
