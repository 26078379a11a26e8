//! Times when nothing is called: files are held still for a copy of them, or the module has computed more than
//! its share of a core. Requests wait meanwhile, as far as there is room for them.

use std::time::{Duration, Instant};

use super::Service;
use crate::control::Step;
use crate::folder::written::Written;
use crate::limits::HOLD_LEASE;

/// How often what the thread computed is looked at between calls: that is a system call.
const SHARE_LOOK: Duration = Duration::from_millis(1);

impl Service {
    /// When the next call may be; none: now.
    pub(super) fn pause(&self) -> Option<Instant> {
        self.held_until.max(self.rests_until)
    }

    /// Whether requests wait: there is no instance to take them, or a pause.
    pub(super) fn holds_requests(&self) -> bool {
        self.pause().is_some() || self.life.holds_requests()
    }

    /// Goes on after a pause.
    pub(super) fn end_pause(&mut self) {
        // Most turns have none: they need not know the time.
        if self.pause().is_none() {
            return;
        }
        let now = Instant::now();
        let over = |until: &mut Instant| *until <= now;
        if self.held_until.take_if(over).is_some() {
            tracing::warn!(module = %self.spec.name, "a copy held its files for {} ms: it goes on", HOLD_LEASE.as_millis());
            self.more = true;
        }
        if self.rests_until.take_if(over).is_some() {
            self.more = true;
        }
    }

    /// The next call waits if the thread has computed too much.
    pub(super) fn rest(&mut self) {
        let Some(share) = &mut self.share else { return };
        let now = Instant::now();
        self.share_at = now;
        if let Some(rest) = share.rest(now, base::cpu::thread_time()) {
            self.rests_until = Some(now + rest);
            self.meter.told.rested_ns += rest.as_nanos() as u64;
        }
    }

    /// What is done without a call counts as well.
    pub(super) fn rest_between_calls(&mut self) {
        if self.share.is_some()
            && self.rests_until.is_none()
            && self.share_at.elapsed() >= SHARE_LOOK
        {
            self.rest();
        }
    }

    /// A step of a copy, between two calls.
    pub(super) fn copy_step(&mut self, step: Step) -> Result<Written, String> {
        let folder = self.folder().ok_or("it has ended")?;
        if folder.has_failed() && step != Step::End {
            return Err("a sync of its files failed, and they are not written anew yet".into());
        }
        let nothing = Written::Extents(Vec::new());
        let missing = || "nobody has begun a copy".to_owned();
        match step {
            Step::Begin => {
                folder.log_written(true);
                Ok(nothing)
            }
            Step::Look => folder.take_written().ok_or_else(missing),
            Step::Hold => {
                let written = folder.take_written().ok_or_else(missing)?;
                self.held_until = Some(Instant::now() + HOLD_LEASE);
                Ok(written)
            }
            Step::End => {
                folder.log_written(false);
                let held = self.held_until.take().is_some_and(|until| Instant::now() < until);
                // What came meanwhile is not told again.
                self.more = true;
                held.then_some(nothing).ok_or_else(|| {
                    format!("its files were held for longer than {} ms", HOLD_LEASE.as_millis())
                })
            }
        }
    }
}
