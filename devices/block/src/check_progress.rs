//! Progress of the check of an image, shared between its back end and those who wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Progress of the check of an image that was not closed, shared with whoever waits for it.
#[derive(Debug, Clone, Default)]
pub struct CheckProgress(Arc<AtomicU32>);

impl CheckProgress {
    /// Percent of the image's tables that were counted; 100 also while their errors are mended.
    pub fn percent(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Stores the share that is done, from 0 to 1.
    pub(crate) fn set(&self, share: f64) {
        self.0.store((share * 100.0) as u32, Ordering::Relaxed);
    }
}
