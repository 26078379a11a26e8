//! What a queue leaves in its disk when it ends: a thread waits for it, and nobody else does.
//!
//! A disk may hang for as long as it likes, and the kernel reads and writes guest memory until it has
//! answered. So a [`Flight`] that ends with operations in its disk hands itself, with its buffers, its
//! hold on guest memory and the open image, to a thread of its own. When the last operation is over,
//! all that is dropped, and only then the image's lock: nobody else can open the image before. No
//! sidecore and no change of the daemon waits for it.
//!
//! It takes a disk that hangs while its port is detached, or a bug of ours (a worker that panicked).

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::flight::Flight;

/// Operations left in the disks of this process.
static ALL: AtomicU64 = AtomicU64::new(0);

/// Operations that queues which ended left in the disks of this process, and that are not over yet.
/// The images of their ports stay locked meanwhile.
pub fn left_in_disks() -> u64 {
    ALL.load(Ordering::Relaxed)
}

/// Operations that the queues of one port left in its disks.
#[derive(Debug, Default)]
pub(crate) struct Left {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Left {
    /// How many there are after `limit` at most; 0: all are over.
    pub fn wait(&self, limit: Duration) -> usize {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(count, limit, |count| *count > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn add(&self, count: usize) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) += count;
        ALL.fetch_add(count as u64, Ordering::Relaxed);
    }

    fn remove(&self, count: usize) {
        *self.count.lock().unwrap_or_else(PoisonError::into_inner) -= count;
        ALL.fetch_sub(count as u64, Ordering::Relaxed);
        self.changed.notify_all();
    }
}

/// Takes over a flight with operations in its disk. Does not wait.
pub(crate) fn take_over(flight: Flight, left: Arc<Left>) {
    let count = flight.in_disk;
    left.add(count);
    tracing::warn!(
        operations = count,
        "left in a disk; its image stays locked until they are over"
    );
    // Without a thread, or if it panics, all of it is leaked: memory and a lock that are lost are better
    // than memory and an image that others use at the same time (D3).
    let mut flight = ManuallyDrop::new(flight);
    let work = move || {
        flight.settle();
        drop(ManuallyDrop::into_inner(flight));
        left.remove(count);
        tracing::info!(operations = count, "over: what was left in a disk");
    };
    if let Err(e) = std::thread::Builder::new().name("left-in-disk".into()).spawn(work) {
        tracing::error!(
            "no thread to wait for a disk; its buffers and its image's lock are leaked: {e}"
        );
    }
}
