//! Counters of requests that the agent has refused itself; the daemon gets them for its metrics.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use base::sync::lock;
use guest_abi::Reason;
use guest_abi::pipe::{MAX_REFUSALS, Refusal};
use zerocopy::little_endian::{U16, U32};

use crate::host::Host;

/// Pause between two messages: a program may repeat a refused request without end.
pub const PAUSE: Duration = Duration::from_secs(1);

const _: () = assert!(Reason::ALL.len() <= MAX_REFUSALS);

/// Counts of refused requests since the last report to the daemon.
#[derive(Debug)]
pub struct Refusals {
    /// Counts in the order of [`Reason::ALL`].
    counts: Box<[AtomicU32]>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    is_new: bool,
    is_over: bool,
}

impl Refusals {
    /// Starts a thread that reports to the daemon. Without a daemon the counts are kept until one
    /// is there and another request is refused.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(host: Host) -> io::Result<Arc<Self>> {
        let refusals = Arc::new(Self {
            counts: Reason::ALL.iter().map(|_| AtomicU32::default()).collect(),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let telling = refusals.clone();
        thread::Builder::new().name("refusals".into()).spawn(move || {
            while telling.wait() {
                telling.report(&host);
                telling.pause();
            }
        })?;
        Ok(refusals)
    }

    /// Counts a refused request. Reasons that are no refusal (the end of the file, success) are not
    /// counted.
    pub fn count(&self, reason: Reason) {
        let at = Reason::ALL.iter().position(|&r| r == reason);
        let Some(at) = at.filter(|_| reason.errno() != 0) else { return };
        self.counts[at].fetch_add(1, Ordering::Relaxed);
        lock(&self.state).is_new = true;
        self.changed.notify_one();
    }

    /// Ends the thread.
    pub fn stop(&self) {
        lock(&self.state).is_over = true;
        self.changed.notify_one();
    }

    /// Waits for a refused request. Returns false at the end.
    fn wait(&self) -> bool {
        let idle = |state: &mut State| !state.is_new && !state.is_over;
        let waited = self.changed.wait_while(lock(&self.state), idle);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        state.is_new = false;
        !state.is_over
    }

    fn pause(&self) {
        let goes_on = |state: &mut State| !state.is_over;
        drop(self.changed.wait_timeout_while(lock(&self.state), PAUSE, goes_on));
    }

    fn report(&self, host: &Host) {
        let Ok(line) = host.line() else { return };
        let taken: Vec<_> = Reason::ALL.iter().zip(&self.counts).filter_map(take_count).collect();
        if !taken.is_empty() && !line.report_refusals(&taken) {
            // Counted for the next stream. A daemon ignores half a message: nothing is counted
            // twice.
            for (reason, count) in Reason::ALL.iter().zip(&self.counts) {
                let lost = taken.iter().find(|lost| lost.reason.get() == *reason as u16);
                count.fetch_add(lost.map_or(0, |lost| lost.count.get()), Ordering::Relaxed);
            }
        }
    }
}

fn take_count((reason, count): (&Reason, &AtomicU32)) -> Option<Refusal> {
    let count = count.swap(0, Ordering::Relaxed);
    let (reason, reserved) = (U16::new(*reason as u16), U16::ZERO);
    (count > 0).then_some(Refusal { reason, reserved, count: U32::new(count) })
}
