//! Notices to the guest that its disk has a new size.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use base::sync::lock;
use vhost_user::{ConfigNotifier, ConfigNotifyError};

/// The way to the front end for a port's notices.
#[derive(Default)]
pub(super) struct SizeNotice {
    notifier: Mutex<Option<Arc<dyn ConfigNotifier>>>,
    /// Whether a front end is connected.
    is_connected: AtomicBool,
    /// Whether the front end was not told of the disk's current size.
    is_pending: AtomicBool,
}

impl SizeNotice {
    /// Sets the session's notifier; `None` where it has no channel for notices.
    pub fn set_notifier(&self, notifier: Option<Arc<dyn ConfigNotifier>>) {
        *lock(&self.notifier) = notifier;
    }

    /// Notes that a front end connected, or went.
    pub fn set_connected(&self, up: bool) {
        self.is_connected.store(up, Ordering::SeqCst);
        // The next front end reads the size first.
        self.is_pending.fetch_and(up, Ordering::SeqCst);
    }

    /// Whether the last notice failed.
    pub fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::SeqCst)
    }

    /// Makes the guest read its config space again. Without a front end there is nobody to tell.
    pub fn send(&self) -> Result<(), ConfigNotifyError> {
        let notifier = lock(&self.notifier).clone();
        let told = match notifier {
            Some(notifier) => notifier.config_changed(),
            None if self.is_connected.load(Ordering::SeqCst) => Err(ConfigNotifyError::NoChannel),
            None => Ok(()),
        };
        self.is_pending.store(told.is_err(), Ordering::SeqCst);
        told
    }
}
