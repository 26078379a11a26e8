//! Instances of a module, one after the other.

use std::time::{Duration, Instant};

use guest_abi::module::failure;
use guest_abi::module_call::event;

use super::{Service, Spec, push_event};
use crate::folder::Folder;
use crate::instance::{Instance, Stopped};
use crate::limits::{FIRST_RETRY, LONGEST_RETRY, MAX_FAILED_STARTS};

/// How long the next instance waits after one of the first that did not start.
const RESTART_PAUSE: Duration = Duration::from_millis(200);

/// The module's life.
#[derive(Debug)]
pub(super) enum Life {
    Running(Box<Instance>),
    /// Between two instances.
    Waiting {
        folder: Folder,
        /// When the next one is tried.
        until: Instant,
        /// Too many have failed: requests are told why. None: they wait.
        broken: Option<String>,
    },
    /// Between two of these; and after the end.
    Over,
}

impl Life {
    /// The next instance begins at once.
    pub fn soon(folder: Folder) -> Self {
        Self::Waiting { folder, until: Instant::now(), broken: None }
    }

    /// Whether requests are not taken now, and wait.
    pub fn holds_requests(&self) -> bool {
        matches!(self, Self::Waiting { broken: None, .. })
    }
}

/// The pause after so many starts that failed.
fn pause(failed_starts: u32) -> Duration {
    match failed_starts.checked_sub(MAX_FAILED_STARTS) {
        None => RESTART_PAUSE * failed_starts,
        Some(more) => FIRST_RETRY.saturating_mul(1 << more.min(16)).min(LONGEST_RETRY),
    }
}

impl Service {
    /// Starts an instance where there is none.
    pub(super) fn keep_alive(&mut self) {
        let due = matches!(&self.life, Life::Waiting { until, .. } if *until <= Instant::now());
        if !due || self.pause().is_some() {
            return;
        }
        let Life::Waiting { mut folder, .. } = std::mem::replace(&mut self.life, Life::Over) else {
            return;
        };
        if let Err(e) = folder.mend() {
            return self.start_failed(&format!("its files cannot be written anew: {e}"), folder);
        }
        let Spec { name, module, linker, limits, purse, .. } = &self.spec;
        let begun = Instance::start(linker, module, name, folder, limits, purse);
        if let Some(share) = &mut self.share {
            share.skip(base::cpu::thread_time());
        }
        match begun {
            Ok(mut instance) => {
                if instance.state().folder.has_failed() {
                    return self.start_failed("the host's storage failed", instance.end());
                }
                self.started(instance);
            }
            Err((stopped, folder)) => self.start_failed(&stopped.to_string(), *folder),
        }
    }

    fn started(&mut self, instance: Instance) {
        self.life = Life::Running(Box::new(instance));
        self.instance += 1;
        if std::mem::take(&mut self.meter.told.failed_starts) >= MAX_FAILED_STARTS.into() {
            tracing::info!(module = %self.spec.name, "it has started after all");
        }
        if let Some(tell) = self.spec.started.take() {
            tell(Ok(()));
        }
        for (number, client) in self.clients.iter_mut() {
            push_event(&mut self.events, event::OPENED, 0, number, 0, &client.id);
        }
    }

    fn start_failed(&mut self, why: &str, folder: Folder) {
        self.meter.told.failed_starts += 1;
        let failed_starts = u32::try_from(self.meter.told.failed_starts).unwrap_or(u32::MAX);
        let (name, next) = (&self.spec.name, pause(failed_starts));
        tracing::error!(module = %name, failed_starts, ?next, "it did not start: {why}");
        let text = format!("module {name} cannot be started: {why}");
        if let Some(tell) = self.spec.started.take() {
            tell(Err(text.clone()));
        }
        let broken = (failed_starts >= MAX_FAILED_STARTS).then_some(text);
        self.more |= broken.is_some();
        self.life = Life::Waiting { folder, until: Instant::now() + next, broken };
    }

    /// The instance is of no use any more: all that it had not answered fails, and the next one begins.
    pub(super) fn stopped(&mut self, stopped: Stopped) {
        self.meter.told.stopped += 1;
        tracing::warn!(module = %self.spec.name, "stopped: {stopped}; replaced");
        let code = if stopped == Stopped::Storage { failure::STORAGE } else { failure::STOPPED };
        self.fail_all(code, &format!("the module was stopped: {stopped}"));
        if let Life::Running(instance) = std::mem::replace(&mut self.life, Life::Over) {
            self.life = Life::soon(instance.end());
        }
    }

    /// How it stands, for people.
    pub(super) fn state(&self) -> String {
        match &self.life {
            Life::Running(_) => "running".into(),
            Life::Waiting { broken: Some(why), until, .. } => {
                let next = until.saturating_duration_since(Instant::now()).as_secs() + 1;
                let failed = self.meter.told.failed_starts;
                format!("{why}; {failed} starts failed, the next is within {next} s")
            }
            Life::Waiting { .. } | Life::Over => "starting".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_that_fail_are_tried_again_ever_later() {
        let ms: Vec<u128> = [1, 2, 3, 4, 8, 9, 10, u32::MAX].map(|n| pause(n).as_millis()).into();
        assert_eq!(ms, [200, 400, 1000, 2000, 32_000, 60_000, 60_000, 60_000]);
    }
}
