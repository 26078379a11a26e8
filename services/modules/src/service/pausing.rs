//! Pauses: times when the module is not called. Its files are held still for a copy of them, or it
//! has computed more than its share of a core. Requests wait meanwhile, as far as there is room for
//! them.

use std::time::{Duration, Instant};

use crate::limits::HOLD_LEASE;
use crate::share::CpuShare;

/// Time between two looks at what the thread computed between calls: each is a system call.
const SHARE_LOOK: Duration = Duration::from_millis(1);

/// Pauses of a module.
#[derive(Debug)]
pub(super) struct Pausing {
    /// End of the pause for a copy of the files.
    held_until: Option<Instant>,
    share: Option<CpuShare>,
    /// End of the pause for computing too much.
    rests_until: Option<Instant>,
    /// Time when the thread's computing was last looked at.
    looked: Instant,
}

impl Pausing {
    /// Begins without a pause.
    pub fn new(share: Option<CpuShare>) -> Self {
        Self { held_until: None, share, rests_until: None, looked: Instant::now() }
    }

    /// Time of the next call; none: now.
    pub fn until(&self) -> Option<Instant> {
        self.held_until.max(self.rests_until)
    }

    /// Ends pauses that are over. True: one was.
    pub fn end_if_over(&mut self, module: &str) -> bool {
        // Most turns have none: they need not know the time.
        if self.until().is_none() {
            return false;
        }
        let now = Instant::now();
        let over = |until: &mut Instant| *until <= now;
        let was_held = self.held_until.take_if(over).is_some();
        if was_held {
            let ms = HOLD_LEASE.as_millis();
            tracing::warn!(%module, "module {module} goes on: a copy held its files for {ms} ms");
        }
        self.rests_until.take_if(over).is_some() || was_held
    }

    /// Ends all pauses.
    pub fn end(&mut self) {
        (self.held_until, self.rests_until) = (None, None);
    }

    /// Holds the files still for a copy.
    pub fn hold(&mut self) {
        self.held_until = Some(Instant::now() + HOLD_LEASE);
    }

    /// Ends the hold. False: there was none, or it was over.
    pub fn release(&mut self) -> bool {
        self.held_until.take().is_some_and(|until| Instant::now() < until)
    }

    /// Leaves computing out of the share that was no call's: the start of an instance.
    pub fn skip_computing(&mut self) {
        if let Some(share) = &mut self.share {
            share.skip(base::cpu::thread_time());
        }
    }

    /// Delays the next call if the thread has computed too much. Returns the time that it rests.
    pub fn rest(&mut self) -> Option<Duration> {
        let share = self.share.as_mut()?;
        let now = Instant::now();
        self.looked = now;
        let rest = share.rest(now, base::cpu::thread_time())?;
        self.rests_until = Some(now + rest);
        Some(rest)
    }

    /// Delays the next call for computing without a call, which counts as well.
    pub fn rest_between_calls(&mut self) -> Option<Duration> {
        let is_due = self.share.is_some()
            && self.rests_until.is_none()
            && self.looked.elapsed() >= SHARE_LOOK;
        if is_due { self.rest() } else { None }
    }
}
