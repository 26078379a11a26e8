//! Syncs of the file, shared by all that need one at the same time.
//!
//! A sync that failed stays failed: the kernel has dropped the pages that it could not write, and
//! the next one would succeed.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Condvar, Mutex};

use base::sync::{lock, wait};

use crate::store::Store;

/// Syncs of an image's files.
#[derive(Debug, Default)]
pub struct Syncs {
    /// Number of requests for a sync.
    asked: AtomicU64,
    has_failed: AtomicBool,
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the last request that a sync has covered.
    done: u64,
    is_running: bool,
}

impl Syncs {
    /// Makes all earlier writes of the caller durable.
    pub fn sync(&self, stores: &[&dyn Store]) -> io::Result<()> {
        let mine = self.asked.fetch_add(1, SeqCst) + 1;
        let mut state = lock(&self.state);
        loop {
            if self.has_failed() {
                return Err(failed());
            }
            if state.done >= mine {
                return Ok(());
            }
            if !state.is_running {
                break;
            }
            state = wait(&self.over, state);
        }
        state.is_running = true;
        let covers = self.asked.load(SeqCst);
        drop(state);
        let result = stores.iter().try_for_each(|store| store.sync());
        let mut state = lock(&self.state);
        state.is_running = false;
        match result {
            Ok(()) => state.done = covers,
            Err(_) => self.fail(),
        }
        self.over.notify_all();
        // A flush of a queue may have failed meanwhile.
        if self.has_failed() { result.and(Err(failed())) } else { result }
    }

    /// Notes that the file cannot be synced, found by a flush of a queue.
    pub fn fail(&self) {
        self.has_failed.store(true, SeqCst);
    }

    /// Whether a sync failed.
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(SeqCst)
    }
}

fn failed() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}
