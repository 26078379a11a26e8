//! Orphaned operations: a queue that ends with operations in its disk leaves them to a thread.
//!
//! A disk may hang for as long as it likes, and the kernel reads and writes guest memory until it
//! has answered. So a queue that ends early hands the rest of its requests
//! ([`crate::in_flight::InFlight`]: their buffers, their hold on guest memory and the open image)
//! to a thread of its own. The thread drops all of it after the last operation, and the image's
//! lock goes last: nobody else can open the image before. Neither a sidecore nor a change of the
//! daemon waits for it.
//!
//! It takes a disk that hangs while its port is detached, or a bug of ours (a worker that
//! panicked).

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use base::sync::lock;

/// Orphaned operations of all ports of this process.
static TOTAL: AtomicU64 = AtomicU64::new(0);

/// Operations of this process whose queues ended while their disks had not answered. The images of
/// their ports stay locked until they are over.
pub fn orphaned_operations() -> u64 {
    TOTAL.load(Ordering::Relaxed)
}

/// Count of one port's orphaned operations.
#[derive(Debug, Default)]
pub(crate) struct Orphans {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Orphans {
    /// Waits until none is left, at most for `limit`. Returns how many are left.
    pub fn wait(&self, limit: Duration) -> usize {
        let count = lock(&self.count);
        let waited = self.changed.wait_timeout_while(count, limit, |count| *count > 0);
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    fn add(&self, count: usize) {
        *lock(&self.count) += count;
        TOTAL.fetch_add(count as u64, Ordering::Relaxed);
    }

    fn remove(&self, count: usize) {
        *lock(&self.count) -= count;
        TOTAL.fetch_sub(count as u64, Ordering::Relaxed);
        self.changed.notify_all();
    }

    /// Gives `count` operations, with `owner` of all that they use, to a thread, which drops the
    /// owner when `settle` has waited for them. Does not wait.
    pub fn adopt<T: Send + 'static>(
        self: Arc<Self>,
        count: usize,
        owner: T,
        settle: impl FnOnce(&mut T) + Send + 'static,
    ) {
        self.add(count);
        tracing::warn!(
            operations = count,
            "left in a disk; its image stays locked until they are over"
        );
        // Without a thread, or if it panics, all of it is leaked: memory and a lock that are lost
        // are better than memory and an image that others use at the same time (D3).
        let mut owner = ManuallyDrop::new(owner);
        let work = move || {
            settle(&mut owner);
            drop(ManuallyDrop::into_inner(owner));
            self.remove(count);
            tracing::info!(operations = count, "over: what was left in a disk");
        };
        if let Err(e) = std::thread::Builder::new().name("left-in-disk".into()).spawn(work) {
            tracing::error!(
                "no thread to wait for a disk; its buffers and its image's lock are leaked: {e}"
            );
        }
    }
}
