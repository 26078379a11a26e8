//! Syncs of the file, shared by all that need one at the same time.
//!
//! A sync that failed stays failed: the kernel has dropped what it could not write, and the next one
//! would say that all is well.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Condvar, Mutex, PoisonError};

use crate::store::Store;

/// See the module's text.
#[derive(Debug, Default)]
pub struct Syncs {
    /// Counts who asked.
    asked: AtomicU64,
    has_failed: AtomicBool,
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Whoever asked up to here has it.
    done: u64,
    is_running: bool,
}

impl Syncs {
    /// Makes durable what the caller wrote before.
    pub fn sync(&self, stores: &[&dyn Store]) -> io::Result<()> {
        let mine = self.asked.fetch_add(1, SeqCst) + 1;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
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
            state = self.over.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.is_running = true;
        let covers = self.asked.load(SeqCst);
        drop(state);
        let result = stores.iter().try_for_each(|store| store.sync());
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_running = false;
        match result {
            Ok(()) => state.done = covers,
            Err(_) => self.fail(),
        }
        self.over.notify_all();
        // Another way may have found meanwhile that it cannot be synced.
        if self.has_failed() { result.and(Err(failed())) } else { result }
    }

    /// Another way than this one found that the file cannot be synced.
    pub fn fail(&self) {
        self.has_failed.store(true, SeqCst);
    }

    /// Whether one failed.
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(SeqCst)
    }
}

fn failed() -> io::Error {
    io::Error::from_raw_os_error(libc::EIO)
}
