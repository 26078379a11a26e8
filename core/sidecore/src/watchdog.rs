//! Detection of sidecores that hang, and their interruption.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::core::Sidecore;
use crate::interrupt;
use crate::worker::SidecoreError;

/// Time between two looks at all sidecores: two wake-ups a second for the whole daemon.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Looks without a sign of life that make a stall: a second, which no round takes, and which is
/// less than a guest's own time-outs. Looks are counted, not time: a process that was stopped has
/// no stall.
const STALLED_LOOKS: u32 = 2;

/// A thread that looks after sidecores, until dropped.
///
/// A worker must not block: all VMs of its sidecore would stand still. Doorbells cannot make it
/// block ([`base::doorbell`]); but where the kernel gives no context for them, or by a bug, a
/// system call may sleep. So a sidecore that has neither slept nor finished a round for about a
/// second gets a signal with a handler that does nothing: the call fails with `EINTR`. The signal
/// comes again with each look, since one that arrives before the call does nothing. What no signal
/// ends (a page of a file whose server is gone) is said in the log, counted, and shown by
/// [`Sidecore::is_stalled`], for systemd's watchdog.
#[derive(Debug)]
pub struct Watchdog {
    /// Never used; its drop tells the thread to end.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Starts it for `cores`.
    pub fn start(cores: Vec<Sidecore>) -> Result<Self, SidecoreError> {
        Self::with_interval(cores, LOOK_EVERY)
    }

    fn with_interval(cores: Vec<Sidecore>, every: Duration) -> Result<Self, SidecoreError> {
        let io = |what| move |source| SidecoreError::Io { what, source };
        interrupt::install().map_err(io("installing the watchdog's signal handler"))?;
        let (stop, stopped) = mpsc::channel();
        let mut all: Vec<Watch> = cores.into_iter().map(Watch::new).collect();
        let run = move || {
            while stopped.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                all.iter_mut().for_each(Watch::look);
            }
        };
        let thread = std::thread::Builder::new()
            .name("watchdog".into())
            .spawn(run)
            .map_err(io("starting the watchdog's thread"))?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop = None;
        // It ends at once; one that panicked has ended already.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// One sidecore under watch.
struct Watch {
    core: Sidecore,
    /// Rounds and sleeps of the sidecore at the last look that found it alive.
    seen: u64,
    /// Number of looks since then without progress.
    looks: u32,
}

impl Watch {
    fn new(core: Sidecore) -> Self {
        Self { core, seen: 0, looks: 0 }
    }

    fn look(&mut self) {
        let (stats, pulse) = (self.core.stats(), self.core.pulse());
        let progress = stats.rounds.get().wrapping_add(stats.sleeps.get());
        let sidecore = self.core.index();
        if progress != self.seen || pulse.rests.load(Ordering::Relaxed) {
            if pulse.stalled.swap(false, Ordering::Relaxed) {
                tracing::warn!(sidecore, "sidecore that hung goes on");
            }
            (self.seen, self.looks) = (progress, 0);
            return;
        }
        self.looks = self.looks.saturating_add(1);
        if self.looks < STALLED_LOOKS {
            return;
        }
        if !pulse.stalled.swap(true, Ordering::Relaxed) {
            stats.stalls.add(1);
            tracing::error!(
                sidecore,
                "sidecore has neither slept nor finished a round for about a second, all VMs on it \
                 stand still; interrupting the system call it may be in"
            );
        }
        interrupt::send(pulse.thread.load(Ordering::Relaxed));
    }
}

#[cfg(test)]
mod tests;
