//! Supervisor: the thread that keeps a VM's process of modules alive. It never waits for a process:
//! it waits in one `poll` for all of them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;

use super::child::{EndingProcess, PendingCopy, Process};
use super::config::{ModuleConfig, VmModulesConfig};
use super::drain::Drain;
use super::inbox::{Inbox, MAX_WAITING, Request};
use super::prepared::{Prepared, prepare};
use crate::control::{self, CopyStep, FromProcess, ToProcess};
use crate::folder::written::Written;
use crate::limits::{END_TIMEOUT, KILL_TIMEOUT, LOAD_TIMEOUT, LOG_LINE_BYTES};
use crate::{ModuleStats, ModulesError};

/// Pause before a new process after one that ended soon; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// Limit of that pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Limit of modules whose counters a process tells: more than there can be.
const MAX_TOLD: usize = 64;

/// Life from which on a process did not end soon.
const LONG_LIFE: Duration = Duration::from_millis(500);

/// Swap: other modules that are to take the place of those that run.
pub(super) struct Swap {
    process: Process,
    modules: Vec<ModuleConfig>,
    prepared: Vec<Prepared>,
    /// Answer to who asked for it.
    to: SyncSender<Result<(), String>>,
    until: Instant,
    /// Whether the old process was told to end: connections are for this one.
    took_over: bool,
    /// Number of modules that have started.
    started: usize,
}

/// Supervisor of a VM's process of modules.
pub(super) struct Supervisor {
    pub config: VmModulesConfig,
    pub prepared: Vec<Prepared>,
    pub inbox: Arc<Inbox>,
    requests: Receiver<Request>,
    /// Process that serves.
    current: Option<Process>,
    /// Process that is to take its place.
    swap: Option<Box<Swap>>,
    /// Processes that are to end.
    ending: Vec<EndingProcess>,
    /// Connections that wait for a process, each with whether it is the guest's.
    waiting: Vec<(OwnedFd, bool)>,
    /// Pause before the next process.
    pause: Duration,
    /// Time before which none is started.
    not_before: Instant,
    drain: Drain,
    /// Number of steps of copies that were asked for.
    turns: u64,
}

/// Source of what `poll` reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// Process that serves.
    Current,
    /// Process that is to take its place.
    Next,
    /// Inbox, logs, or the end of a process.
    Other,
}

impl Supervisor {
    pub fn new(
        config: VmModulesConfig,
        prepared: Vec<Prepared>,
        inbox: Arc<Inbox>,
        requests: Receiver<Request>,
    ) -> Self {
        Self {
            drain: Drain::new(config.drained),
            config,
            prepared,
            inbox,
            requests,
            current: None,
            swap: None,
            ending: Vec::new(),
            waiting: Vec::new(),
            pause: Duration::ZERO,
            not_before: Instant::now(),
            turns: 0,
        }
    }

    pub fn run(mut self) {
        while !self.inbox.is_stopping() {
            self.keep_alive();
            self.wait();
            while let Ok(request) = self.requests.try_recv() {
                self.take(request);
            }
        }
        self.end();
    }

    fn keep_alive(&mut self) {
        let busy = self.current.is_some() || self.swap.is_some() || self.drain.is_on;
        if busy || Instant::now() < self.not_before {
            return;
        }
        match Process::spawn(&self.config, &self.prepared, &self.inbox.dropped) {
            Ok(process) => self.current = Some(process),
            Err(e) => {
                let vm = &self.config.vm;
                tracing::error!(%vm, "process of modules of {vm} failed to start: {e}");
                self.inbox.note(Some(e.to_string()));
                self.drain.finish_resume(Err(e.to_string()));
                self.delay();
            }
        }
    }

    fn delay(&mut self) {
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.not_before = Instant::now() + self.pause;
    }

    /// Time at which there is something to do, whatever is ready.
    fn due(&self) -> Option<Instant> {
        let next = self.swap.as_ref().map(|swap| swap.until);
        let starts = self.current.is_none() && self.swap.is_none() && !self.drain.is_on;
        let start = starts.then_some(self.not_before);
        let logs = self.processes().filter_map(|process| process.log.due());
        let ends = self.ending.iter().map(EndingProcess::due);
        next.into_iter().chain(start).chain(self.drain.due()).chain(logs).chain(ends).min()
    }

    fn processes(&self) -> impl Iterator<Item = &Process> {
        let next = self.swap.as_ref().map(|swap| &swap.process);
        self.current.iter().chain(next).chain(self.ending.iter().map(|ending| &ending.process))
    }

    /// Waits until something happens, and takes it.
    fn wait(&mut self) {
        let timeout = self.due().and_then(|at| {
            // Rounded up: a moment too early would be a turn for nothing.
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_micros(999);
            Timespec::try_from(left).ok()
        });
        let mut watched: Vec<(Source, BorrowedFd<'_>)> =
            vec![(Source::Other, self.inbox.event.as_fd())];
        watched.extend(self.current.iter().map(|p| (Source::Current, p.control.as_fd())));
        watched.extend(self.swap.iter().map(|s| (Source::Next, s.process.control.as_fd())));
        watched.extend(self.processes().filter_map(|p| Some((Source::Other, p.log.watched()?))));
        watched.extend(self.ending.iter().map(|ending| (Source::Other, ending.pidfd())));
        let mut fds: Vec<PollFd<'_>> =
            watched.iter().map(|(_, fd)| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        let _ = poll(&mut fds, timeout.as_ref());
        let ready: Vec<Source> = watched
            .iter()
            .zip(&fds)
            .filter(|(_, fd)| !fd.revents().is_empty())
            .map(|((ready, _), _)| *ready)
            .collect();
        let _ = rustix::io::read(&self.inbox.event, &mut [0u8; 8]);
        // What a process says last explains its end.
        self.read_logs();
        if ready.contains(&Source::Current) {
            self.take_from_current();
        }
        if ready.contains(&Source::Next) {
            self.take_from_next();
        }
        self.check_times();
    }

    fn read_logs(&mut self) {
        let now = Instant::now();
        let next = self.swap.as_mut().map(|swap| &mut swap.process);
        let ending = self.ending.iter_mut().map(|ending| &mut ending.process);
        self.current.iter_mut().chain(next).chain(ending).for_each(|p| p.log.read(now));
    }

    fn check_times(&mut self) {
        let now = Instant::now();
        if self.swap.as_ref().is_some_and(|swap| swap.until <= now) {
            self.swap_failed(&format!("they did not start within {} s", LOAD_TIMEOUT.as_secs()));
        }
        let (vm, inbox) = (&self.config.vm, &self.inbox);
        self.ending.retain_mut(|ending| {
            let Some(ended) = ending.poll_status(vm, now) else { return true };
            let status = ended.map_or_else(|e| e.to_string(), |status| status.to_string());
            let pid = ending.process.pid();
            tracing::info!(%vm, pid, "process of modules of {vm} ended: {status}");
            // What it said itself says more.
            if !ending.process.ready && inbox.trouble().is_none() {
                inbox.note(Some(format!("its process ended: {status}")));
            }
            false
        });
        self.drain.check_folders(now, self.ending.iter().map(|ending| ending.process.pid()));
        self.drain.check_resume(now);
    }

    fn take_from_current(&mut self) {
        let Some(process) = &mut self.current else { return };
        let told: Result<Option<(FromProcess, _)>, ModulesError> =
            control::receive(&process.control);
        if let Ok(Some((told, _))) = &told {
            self.drain.take(told, self.prepared.len());
        }
        let Some(process) = &mut self.current else { return };
        match told {
            Ok(Some((FromProcess::Loaded | FromProcess::Started { .. }, _))) => {}
            Ok(Some((FromProcess::Copied { turn, written }, _))) => {
                answer_copy(process, turn, written)
            }
            Ok(Some((FromProcess::Ready, _))) => self.is_ready(),
            Ok(Some((FromProcess::Stats { stats, last }, _))) => answer_stats(process, stats, last),
            Ok(Some((FromProcess::Used(used), _))) => (self.config.charge.0)(used),
            Ok(Some((FromProcess::Failed(why), _))) => {
                let vm = &self.config.vm;
                tracing::error!(%vm, "process of modules of {vm} failed: {why}");
                self.inbox.note(Some(why));
            }
            Ok(None) => self.ended(),
            Err(e) => {
                let vm = &self.config.vm;
                tracing::error!(%vm, "process of modules of {vm} sent no message: {e}");
                self.ended();
            }
        }
    }

    /// Process that connections are for.
    fn serving(&mut self) -> Option<&mut Process> {
        match &mut self.swap {
            Some(swap) if swap.took_over => Some(&mut swap.process),
            _ => self.current.as_mut(),
        }
    }

    fn is_ready(&mut self) {
        let vm = self.config.vm.clone();
        let Some(process) = self.serving() else { return };
        process.ready = true;
        tracing::info!(%vm, pid = process.pid(), "modules of {vm} are ready");
        self.inbox.note(None);
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_iter().for_each(|(fd, of_guest)| self.connect(fd, of_guest));
    }

    /// Gives up the process that serves: it has gone, or is of no use.
    fn ended(&mut self) {
        let Some(process) = self.current.take() else { return };
        let lived = process.since.elapsed();
        let vm = &self.config.vm;
        tracing::warn!(%vm, pid = process.pid(), ?lived, "process of modules of {vm} has gone");
        self.give_up(process);
        self.drain.finish_resume(Err("their process has ended".into()));
        if lived >= LONG_LIFE {
            self.pause = Duration::ZERO;
            self.not_before = Instant::now();
        } else {
            self.delay();
        }
    }

    /// Kills a process, unless it has ended.
    fn give_up(&mut self, process: Process) {
        let _ = rustix::net::shutdown(&process.control, rustix::net::Shutdown::Both);
        self.ending.push(process.end());
    }

    /// Ends the process, and starts no other one. `to` is answered once the folders are free.
    fn begin_drain(&mut self, to: SyncSender<Result<(), String>>) {
        if self.swap.is_some() {
            let _ = to.try_send(Err("other modules are being loaded".into()));
            return;
        }
        self.ending.extend(self.current.take().map(Process::end));
        let now = Instant::now();
        self.drain.begin(to, now);
        self.drain.check_folders(now, self.ending.iter().map(|ending| ending.process.pid()));
    }

    /// Starts the process again.
    fn end_drain(&mut self, to: SyncSender<Result<(), String>>) {
        if self.drain.end(to) {
            (self.pause, self.not_before) = (Duration::ZERO, Instant::now());
        }
    }

    fn take(&mut self, request: Request) {
        match request {
            Request::Connection(fd, of_guest) => self.connect(fd, of_guest),
            Request::GuestGone => self.guest_gone(),
            Request::Stats(to) => self.ask_stats(to),
            Request::Load(modules, to) => self.load(modules, to),
            Request::Copy(module, step, to) => self.copy(module, step, to),
            Request::Drain(to) => self.begin_drain(to),
            Request::Resume(to) => self.end_drain(to),
        }
    }

    fn connect(&mut self, fd: OwnedFd, of_guest: bool) {
        let Some(process) = self.serving().filter(|process| process.ready) else {
            if self.waiting.len() < MAX_WAITING {
                self.waiting.push((fd, of_guest));
            }
            return;
        };
        // It reads at once, whatever its modules do: a full socket means that it hangs.
        let (message, fds) = (ToProcess::Connection { of_guest }, [fd.as_fd()]);
        let sent = control::send(&process.control, &message, &fds, SendFlags::DONTWAIT);
        if let Err(e) = sent {
            tracing::warn!(vm = %self.config.vm, "a connection cannot be handed to modules: {e}");
        }
    }

    /// Tells the process that the guest has gone: connections that come later are the next guest's.
    fn guest_gone(&mut self) {
        self.waiting.retain(|(_, of_guest)| !of_guest);
        let Some(process) = self.serving().filter(|process| process.ready) else { return };
        let flags = SendFlags::DONTWAIT;
        if let Err(e) = control::send(&process.control, &ToProcess::GuestGone, &[], flags) {
            let vm = &self.config.vm;
            tracing::warn!(%vm, "modules cannot be told that the guest has gone: {e}");
        }
    }

    fn ask_stats(&mut self, to: SyncSender<Vec<ModuleStats>>) {
        let Some(process) = self.serving().filter(|process| process.ready) else { return };
        let asked = control::send(&process.control, &ToProcess::Stats, &[], SendFlags::DONTWAIT);
        if asked.is_ok() {
            process.stats_requests.push(to);
        }
    }

    /// Asks for a step of a copy. A process that is being replaced is not copied: its files change
    /// hands.
    fn copy(&mut self, module: String, step: CopyStep, to: SyncSender<Result<Written, String>>) {
        if self.swap.is_some() {
            let _ = to.try_send(Err("other modules are being loaded".into()));
            return;
        }
        let Some(process) = self.current.as_mut().filter(|p| p.ready) else { return };
        self.turns += 1;
        let turn = self.turns;
        let asked = ToProcess::Copy { module, turn, step };
        if control::send(&process.control, &asked, &[], SendFlags::DONTWAIT).is_ok() {
            process.pending_copy = Some(PendingCopy { turn, to });
        }
    }

    /// Begins to replace the modules: the old ones go on until the new ones are loaded.
    fn load(&mut self, modules: Vec<ModuleConfig>, to: SyncSender<Result<(), String>>) {
        // Whoever asked may have given up: so may all answers here.
        if self.swap.is_some() {
            let _ = to.try_send(Err("other modules are being loaded".into()));
            return;
        }
        if self.drain.is_on {
            let _ = to.try_send(Err("the modules are drained: resume them first".into()));
            return;
        }
        let spawned = prepare(&self.config, &modules).and_then(|prepared| {
            Ok((Process::spawn(&self.config, &prepared, &self.inbox.dropped)?, prepared))
        });
        match spawned {
            Ok((process, prepared)) => {
                let until = Instant::now() + LOAD_TIMEOUT;
                let (took_over, started) = (false, 0);
                let swap = Swap { process, modules, prepared, to, until, took_over, started };
                self.swap = Some(Box::new(swap));
            }
            Err(e) => drop(to.try_send(Err(e.to_string()))),
        }
    }

    fn take_from_next(&mut self) {
        let Some(swap) = &mut self.swap else { return };
        let told: Result<Option<(FromProcess, _)>, ModulesError> =
            control::receive(&swap.process.control);
        match told {
            Ok(Some((FromProcess::Loaded, _))) => {
                swap.took_over = true;
                if let Some(old) = self.current.take() {
                    self.ending.push(old.end());
                }
            }
            Ok(Some((FromProcess::Ready, _))) => self.is_ready(),
            Ok(Some((FromProcess::Stats { stats, last }, _))) => {
                answer_stats(&mut swap.process, stats, last);
            }
            // Nobody has asked it.
            Ok(Some((FromProcess::Copied { .. }, _))) => {}
            Ok(Some((FromProcess::Used(used), _))) => (self.config.charge.0)(used),
            Ok(Some((FromProcess::Started { failed: None, .. }, _))) => {
                swap.started += 1;
                if swap.started == swap.prepared.len() {
                    self.swapped();
                }
            }
            Ok(Some((
                FromProcess::Started { failed: Some(why), .. } | FromProcess::Failed(why),
                _,
            ))) => {
                self.swap_failed(&why);
            }
            Ok(None) => self.swap_failed("the new process ended"),
            Err(e) => self.swap_failed(&e.to_string()),
        }
    }

    fn swapped(&mut self) {
        let Some(swap) = self.swap.take() else { return };
        let Swap { process, modules, prepared, to, .. } = *swap;
        let vm = &self.config.vm;
        tracing::info!(%vm, pid = process.pid(), "modules of the VM were replaced");
        (self.config.modules, self.prepared) = (modules, prepared);
        self.current = Some(process);
        let _ = to.try_send(Ok(()));
    }

    /// The old modules go on, or begin again if they had ended for the new ones.
    fn swap_failed(&mut self, why: &str) {
        let Some(swap) = self.swap.take() else { return };
        let Swap { process, to, took_over, .. } = *swap;
        let what = if took_over { "are started again" } else { "go on" };
        let text = format!("{why}; the modules from before {what}");
        let vm = &self.config.vm;
        tracing::error!(%vm, "new modules of {vm} failed to start: {text}");
        // Nobody has been promised anything that is not on the disk.
        self.give_up(process);
        (self.pause, self.not_before) = (Duration::ZERO, Instant::now());
        let _ = to.try_send(Err(text));
    }

    /// Ends all processes, and waits for that, but not for ever.
    fn end(mut self) {
        if let Some(swap) = self.swap.take() {
            let _ = swap.to.try_send(Err("the modules end".into()));
            self.give_up(swap.process);
        }
        self.ending.extend(self.current.take().map(Process::end));
        // No new one begins.
        self.not_before = Instant::now() + END_TIMEOUT + KILL_TIMEOUT;
        while !self.ending.is_empty() && Instant::now() < self.not_before {
            self.wait();
        }
        for ending in &self.ending {
            let (vm, pid) = (&self.config.vm, ending.process.pid());
            tracing::error!(%vm, pid, "a process of modules is left behind: it does not end");
        }
    }
}

/// Answers who waits for a step of a copy.
fn answer_copy(process: &mut Process, turn: u64, written: Result<Written, String>) {
    if let Some(copy) = process.pending_copy.take_if(|copy| copy.turn == turn) {
        // Whoever asked may have given up.
        let _ = copy.to.try_send(written.map_err(|why| plain(&why)));
    }
}

/// Makes a process's text fit to be shown: no longer than a line, and without control characters.
fn plain(text: &str) -> String {
    let shown = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(LOG_LINE_BYTES / 4).map(shown).collect()
}

/// Adds counters that came, and answers who waits for them once all are there.
fn answer_stats(process: &mut Process, stats: Vec<ModuleStats>, last: bool) {
    // A process says no more than it has modules.
    process.stats.extend(stats);
    if !last {
        process.stats.truncate(MAX_TOLD);
        return;
    }
    let stats = std::mem::take(&mut process.stats);
    for to in process.stats_requests.drain(..) {
        // Whoever asked may have given up.
        let _ = to.try_send(stats.clone());
    }
}
