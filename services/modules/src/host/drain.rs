//! Drain: modules that are to have no process for a while. Their folders are copied back, or handed
//! to another host.

use std::sync::mpsc::SyncSender;
use std::time::Instant;

use crate::control::FromProcess;
use crate::limits::{END_TIMEOUT, KILL_TIMEOUT, LOAD_TIMEOUT};

/// Answer to who asked for a drain, or for its end.
type Answer = SyncSender<Result<(), String>>;

/// Wait for the modules' start after a drain.
struct Resume {
    to: Answer,
    until: Instant,
    /// Number of modules that have started.
    started: usize,
    is_ready: bool,
}

/// State of a drain.
pub(super) struct Drain {
    /// Whether no process is started.
    pub is_on: bool,
    /// Answers to who waits for the folders to be free, each with the time until which it waits.
    waiting: Vec<(Answer, Instant)>,
    /// Wait for the start after the drain.
    resume: Option<Resume>,
}

impl Drain {
    /// Begins with none, or drained.
    pub fn new(is_on: bool) -> Self {
        Self { is_on, waiting: Vec::new(), resume: None }
    }

    /// Begins a drain: `to` is answered once the folders are free.
    pub fn begin(&mut self, to: Answer, now: Instant) {
        self.is_on = true;
        if let Some(resume) = self.resume.take() {
            // Whoever asked may have given up: so may all answers here.
            let _ = resume.to.try_send(Err("they are drained again".into()));
        }
        self.waiting.push((to, now + END_TIMEOUT + KILL_TIMEOUT));
    }

    /// Answers who waits for the folders, which the processes `pids` still lock. A process that
    /// hangs in the kernel keeps them: then all is as if nobody had asked.
    pub fn check_folders(&mut self, now: Instant, pids: impl Iterator<Item = u32>) {
        let pids: Vec<u32> = pids.collect();
        if pids.is_empty() {
            self.answer(&Ok(()));
        } else if self.waiting.iter().any(|(_, until)| *until <= now) {
            self.is_on = false;
            self.answer(&Err(format!("process {pids:?} does not end: the folders stay locked")));
        }
    }

    fn answer(&mut self, result: &Result<(), String>) {
        self.waiting.drain(..).for_each(|(to, _)| drop(to.try_send(result.clone())));
    }

    /// Ends the drain: `to` is answered once all modules have started. False: there was none, and
    /// it is answered.
    pub fn end(&mut self, to: Answer) -> bool {
        if !self.is_on {
            let _ = to.try_send(Ok(()));
            return false;
        }
        self.is_on = false;
        self.answer(&Err("they are resumed".into()));
        let until = Instant::now() + LOAD_TIMEOUT;
        self.resume = Some(Resume { to, until, started: 0, is_ready: false });
        true
    }

    /// Takes a message of the process that starts after a drain. It has `modules` of them.
    pub fn take(&mut self, message: &FromProcess, modules: usize) {
        let Some(resume) = &mut self.resume else { return };
        match message {
            FromProcess::Started { failed: None, .. } => resume.started += 1,
            FromProcess::Ready => resume.is_ready = true,
            FromProcess::Started { failed: Some(why), .. } | FromProcess::Failed(why) => {
                return self.finish_resume(Err(why.clone()));
            }
            _ => return,
        }
        if resume.is_ready && resume.started == modules {
            self.finish_resume(Ok(()));
        }
    }

    /// Answers who waits for the start after the drain.
    pub fn finish_resume(&mut self, result: Result<(), String>) {
        if let Some(resume) = self.resume.take() {
            let _ = resume.to.try_send(result);
        }
    }

    /// Gives the start up if it takes too long.
    pub fn check_resume(&mut self, now: Instant) {
        if self.resume.as_ref().is_some_and(|resume| resume.until <= now) {
            let limit = LOAD_TIMEOUT.as_secs();
            self.finish_resume(Err(format!("they did not start within {limit} s")));
        }
    }

    /// Time at which somebody has waited for too long.
    pub fn due(&self) -> Option<Instant> {
        let folders = self.waiting.iter().map(|(_, until)| *until).min();
        self.resume.as_ref().map(|resume| resume.until).into_iter().chain(folders).min()
    }
}
