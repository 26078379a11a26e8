//! Life of a module: instances, one after the other.

use std::time::{Duration, Instant};

use crate::folder::Folder;
use crate::instance::Instance;
use crate::limits::{FIRST_RETRY, LONGEST_RETRY, MAX_FAILED_STARTS};

/// Wait after each of the first instances that did not start.
const RESTART_PAUSE: Duration = Duration::from_millis(200);

/// Life of a module.
#[derive(Debug)]
pub(super) enum Life {
    /// An instance runs.
    Running(Box<Instance>),
    /// Between two instances.
    Waiting {
        folder: Folder,
        /// Time at which the next one is tried.
        until: Instant,
        /// Reason, when too many have failed: requests are told. None: they wait.
        broken: Option<String>,
    },
    /// Between two of these; and after the end.
    Over,
}

impl Life {
    /// Waits for the next instance, which begins at once.
    pub fn waiting(folder: Folder) -> Self {
        Self::Waiting { folder, until: Instant::now(), broken: None }
    }

    /// Whether requests are not taken now, and wait.
    pub fn holds_requests(&self) -> bool {
        matches!(self, Self::Waiting { broken: None, .. })
    }

    /// Folder of the module's files.
    pub fn folder(&mut self) -> Option<&mut Folder> {
        match self {
            Self::Running(instance) => Some(&mut instance.state().folder),
            Self::Waiting { folder, .. } => Some(folder),
            Self::Over => None,
        }
    }

    /// State in words, for people.
    pub fn describe(&self, failed_starts: u64) -> String {
        match self {
            Self::Running(_) => "running".into(),
            Self::Waiting { broken: Some(why), until, .. } => {
                let next = until.saturating_duration_since(Instant::now()).as_secs() + 1;
                format!("{why}; {failed_starts} starts failed, the next is within {next} s")
            }
            Self::Waiting { .. } | Self::Over => "starting".into(),
        }
    }
}

/// Pause after a number of starts that failed.
pub(super) fn retry_pause(failed_starts: u32) -> Duration {
    match failed_starts.checked_sub(MAX_FAILED_STARTS) {
        None => RESTART_PAUSE * failed_starts,
        Some(more) => FIRST_RETRY.saturating_mul(1 << more.min(16)).min(LONGEST_RETRY),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_that_fail_are_tried_again_ever_later() {
        let ms: Vec<u128> =
            [1, 2, 3, 4, 8, 9, 10, u32::MAX].map(|n| retry_pause(n).as_millis()).into();
        assert_eq!(ms, [200, 400, 1000, 2000, 32_000, 60_000, 60_000, 60_000]);
    }
}
