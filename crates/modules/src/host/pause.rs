//! Modules that are to have no process for a while: their folders are copied back, or handed to another host.

use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use super::keeper::Keeper;
use crate::control::FromProcess;
use crate::limits::{END_TIMEOUT, KILL_TIMEOUT, LOAD_TIMEOUT};

/// Who waits for the modules' start after a pause.
pub(super) struct Waiting {
    to: SyncSender<Result<(), String>>,
    until: Instant,
    started: usize,
    ready: bool,
}

impl Waiting {
    pub fn due(&self) -> Instant {
        self.until
    }
}

impl Keeper {
    /// Ends the process, and starts no other one. It is told once the folders are free.
    pub(super) fn drain(&mut self, to: SyncSender<Result<(), String>>) {
        // Whoever asked may have given up: so may all answers here.
        if self.swap.is_some() {
            let _ = to.try_send(Err("other modules are being loaded".into()));
            return;
        }
        self.drained = true;
        if let Some(waiting) = self.resuming.take() {
            let _ = waiting.to.try_send(Err("they are drained again".into()));
        }
        self.ending.extend(self.current.take().map(super::child::Process::end));
        let now = Instant::now();
        self.draining.push((to, now + END_TIMEOUT + KILL_TIMEOUT));
        self.look_at_drain(now);
    }

    /// Tells whoever waits for that the folders are free. A process that hangs in the kernel keeps them: then all
    /// is as if nobody had asked.
    pub(super) fn look_at_drain(&mut self, now: Instant) {
        if self.ending.is_empty() {
            self.tell_drained(&Ok(()));
        } else if self.draining.iter().any(|(_, until)| *until <= now) {
            let pids: Vec<u32> = self.ending.iter().map(|ending| ending.process.pid()).collect();
            self.drained = false;
            self.tell_drained(&Err(format!(
                "process {pids:?} does not end: the folders stay locked"
            )));
        }
    }

    fn tell_drained(&mut self, went: &Result<(), String>) {
        self.draining.drain(..).for_each(|(to, _)| drop(to.try_send(went.clone())));
    }

    /// When somebody has waited for too long.
    pub(super) fn drain_due(&self) -> Option<Instant> {
        self.draining.iter().map(|(_, until)| *until).min()
    }

    /// Starts the process again.
    pub(super) fn resume(&mut self, to: SyncSender<Result<(), String>>) {
        if !self.drained {
            let _ = to.try_send(Ok(()));
            return;
        }
        self.drained = false;
        self.tell_drained(&Err("they are resumed".into()));
        (self.pause, self.not_before) = (Duration::ZERO, Instant::now());
        self.resuming =
            Some(Waiting { to, until: Instant::now() + LOAD_TIMEOUT, started: 0, ready: false });
    }

    /// What a process says that is to go on after a pause.
    pub(super) fn hear_of_start(&mut self, told: &FromProcess) {
        let Some(waiting) = &mut self.resuming else { return };
        match told {
            FromProcess::Started { failed: None, .. } => waiting.started += 1,
            FromProcess::Ready => waiting.ready = true,
            FromProcess::Started { failed: Some(why), .. } | FromProcess::Failed(why) => {
                return self.resumed(Err(why.clone()));
            }
            _ => return,
        }
        if waiting.ready && waiting.started == self.prepared.len() {
            self.resumed(Ok(()));
        }
    }

    /// How it went.
    pub(super) fn resumed(&mut self, went: Result<(), String>) {
        if let Some(waiting) = self.resuming.take() {
            let _ = waiting.to.try_send(went);
        }
    }

    pub(super) fn look_at_resume(&mut self, now: Instant) {
        if self.resuming.as_ref().is_some_and(|waiting| waiting.until <= now) {
            self.resumed(Err(format!("they did not start within {} s", LOAD_TIMEOUT.as_secs())));
        }
    }
}
