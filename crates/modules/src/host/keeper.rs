//! The thread that keeps a VM's process of modules. It never waits for a process: all that it waits for
//! is one `poll`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::SendFlags;

use super::child::{Copying, Ending, Process};
use super::pause::Waiting;
use super::{Asked, Inbox, MAX_WAITING, ModuleConfig, Prepared, VmModulesConfig, prepare};
use crate::control::{self, FromProcess, Step, ToProcess};
use crate::folder::written::Written;
use crate::limits::{END_TIMEOUT, KILL_TIMEOUT, LOAD_TIMEOUT, LOG_LINE_BYTES};
use crate::{ModuleStats, ModulesError};

/// Pause in front of a new process after one that ended soon; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Modules whose counters a process tells: more than there can be.
const MAX_TOLD: usize = 64;

/// A process that lived so long did not end soon.
const LONG_LIFE: Duration = Duration::from_millis(500);

/// Other modules that are to take the place of those that run.
pub(super) struct Swap {
    process: Process,
    modules: Vec<ModuleConfig>,
    prepared: Vec<Prepared>,
    /// Who asked for it.
    to: SyncSender<Result<(), String>>,
    until: Instant,
    /// The old process was told to end: connections are for this one.
    took_over: bool,
    /// Modules that have started.
    started: usize,
}

pub(super) struct Keeper {
    pub config: VmModulesConfig,
    pub prepared: Vec<Prepared>,
    pub inbox: Arc<Inbox>,
    pub asked: Receiver<Asked>,
    pub(super) current: Option<Process>,
    pub(super) swap: Option<Box<Swap>>,
    pub(super) ending: Vec<Ending>,
    /// Each with whether it is the guest's.
    waiting: Vec<(OwnedFd, bool)>,
    pub(super) pause: Duration,
    pub(super) not_before: Instant,
    /// No process is started.
    pub(super) drained: bool,
    /// Who waits for that the folders are free, and until when.
    pub(super) draining: Vec<(SyncSender<Result<(), String>>, Instant)>,
    pub(super) resuming: Option<Waiting>,
    /// Steps of copies that were asked for.
    turns: u64,
}

/// What there is to hear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heard {
    Current,
    Next,
    Else,
}

impl Keeper {
    pub fn new(
        config: VmModulesConfig,
        prepared: Vec<Prepared>,
        inbox: Arc<Inbox>,
        asked: Receiver<Asked>,
    ) -> Self {
        Self {
            drained: config.drained,
            config,
            prepared,
            inbox,
            asked,
            current: None,
            swap: None,
            ending: Vec::new(),
            waiting: Vec::new(),
            pause: Duration::ZERO,
            not_before: Instant::now(),
            draining: Vec::new(),
            resuming: None,
            turns: 0,
        }
    }

    pub fn run(mut self) {
        while !self.inbox.is_stopping() {
            self.keep_alive();
            self.wait();
            while let Ok(asked) = self.asked.try_recv() {
                self.take(asked);
            }
        }
        self.end();
    }

    fn keep_alive(&mut self) {
        let busy = self.current.is_some() || self.swap.is_some() || self.drained;
        if busy || Instant::now() < self.not_before {
            return;
        }
        match Process::spawn(&self.config, &self.prepared, &self.inbox.dropped) {
            Ok(process) => self.current = Some(process),
            Err(e) => {
                tracing::error!(vm = %self.config.vm, "starting its process of modules: {e}");
                self.inbox.note(Some(e.to_string()));
                self.resumed(Err(e.to_string()));
                self.delay();
            }
        }
    }

    fn delay(&mut self) {
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.not_before = Instant::now() + self.pause;
    }

    /// When there is something to do, whatever is heard.
    fn due(&self) -> Option<Instant> {
        let next = self.swap.as_ref().map(|swap| swap.until);
        let starts = self.current.is_none() && self.swap.is_none() && !self.drained;
        let start = starts.then_some(self.not_before);
        let logs = self.processes().filter_map(|process| process.log.due());
        let ends = self.ending.iter().map(Ending::due);
        let resume = self.resuming.as_ref().map(Waiting::due);
        next.into_iter()
            .chain(start)
            .chain(resume)
            .chain(self.drain_due())
            .chain(logs)
            .chain(ends)
            .min()
    }

    fn processes(&self) -> impl Iterator<Item = &Process> {
        let next = self.swap.as_ref().map(|swap| &swap.process);
        self.current.iter().chain(next).chain(self.ending.iter().map(|ending| &ending.process))
    }

    /// Waits until something happens, and hears it.
    fn wait(&mut self) {
        let timeout = self.due().and_then(|at| {
            // Rounded up: a moment too early would be a turn for nothing.
            let left = at.saturating_duration_since(Instant::now()) + Duration::from_micros(999);
            Timespec::try_from(left).ok()
        });
        let mut watched: Vec<(Heard, BorrowedFd<'_>)> =
            vec![(Heard::Else, self.inbox.event.as_fd())];
        watched.extend(self.current.iter().map(|p| (Heard::Current, p.control.as_fd())));
        watched.extend(self.swap.iter().map(|s| (Heard::Next, s.process.control.as_fd())));
        watched.extend(self.processes().filter_map(|p| Some((Heard::Else, p.log.watched()?))));
        watched.extend(self.ending.iter().map(|ending| (Heard::Else, ending.pidfd())));
        let mut fds: Vec<PollFd<'_>> =
            watched.iter().map(|(_, fd)| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        let _ = poll(&mut fds, timeout.as_ref());
        let heard: Vec<Heard> = watched
            .iter()
            .zip(&fds)
            .filter(|(_, fd)| !fd.revents().is_empty())
            .map(|((heard, _), _)| *heard)
            .collect();
        let _ = rustix::io::read(&self.inbox.event, &mut [0u8; 8]);
        // What a process says last explains its end.
        self.read_logs();
        if heard.contains(&Heard::Current) {
            self.hear_current();
        }
        if heard.contains(&Heard::Next) {
            self.hear_next();
        }
        self.look_at_time();
    }

    fn read_logs(&mut self) {
        let now = Instant::now();
        let next = self.swap.as_mut().map(|swap| &mut swap.process);
        let ending = self.ending.iter_mut().map(|ending| &mut ending.process);
        self.current.iter_mut().chain(next).chain(ending).for_each(|p| p.log.read(now));
    }

    fn look_at_time(&mut self) {
        let now = Instant::now();
        if self.swap.as_ref().is_some_and(|swap| swap.until <= now) {
            self.swap_failed(&format!("they did not start within {} s", LOAD_TIMEOUT.as_secs()));
        }
        let (vm, inbox) = (&self.config.vm, &self.inbox);
        self.ending.retain_mut(|ending| {
            let Some(ended) = ending.look(vm, now) else { return true };
            let status = ended.map_or_else(|e| e.to_string(), |status| status.to_string());
            tracing::info!(%vm, pid = ending.process.pid(), "a process of modules ended: {status}");
            // What it said itself says more.
            if !ending.process.ready && inbox.trouble().is_none() {
                inbox.note(Some(format!("its process ended: {status}")));
            }
            false
        });
        self.look_at_drain(now);
        self.look_at_resume(now);
    }

    fn hear_current(&mut self) {
        let Some(process) = &mut self.current else { return };
        let told: Result<Option<(FromProcess, _)>, ModulesError> =
            control::receive(&process.control);
        if let Ok(Some((told, _))) = &told {
            self.hear_of_start(told);
        }
        let Some(process) = &mut self.current else { return };
        match told {
            Ok(Some((FromProcess::Loaded | FromProcess::Started { .. }, _))) => {}
            Ok(Some((FromProcess::Copied { turn, written }, _))) => copied(process, turn, written),
            Ok(Some((FromProcess::Ready, _))) => self.is_ready(),
            Ok(Some((FromProcess::Stats { stats, last }, _))) => answer(process, stats, last),
            Ok(Some((FromProcess::Used(used), _))) => (self.config.charge.0)(used),
            Ok(Some((FromProcess::Failed(why), _))) => {
                tracing::error!(vm = %self.config.vm, "its process of modules: {why}");
                self.inbox.note(Some(why));
            }
            Ok(None) => self.ended(),
            Err(e) => {
                tracing::error!(vm = %self.config.vm, "{e}");
                self.ended();
            }
        }
    }

    /// The process that connections are for.
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
        tracing::info!(%vm, pid = process.pid(), "modules are ready");
        self.inbox.note(None);
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_iter().for_each(|(fd, of_guest)| self.connect(fd, of_guest));
    }

    /// The process has gone, or is of no use.
    fn ended(&mut self) {
        let Some(process) = self.current.take() else { return };
        let lived = process.since.elapsed();
        tracing::warn!(vm = %self.config.vm, pid = process.pid(), ?lived, "its process of modules has gone");
        self.give_up(process);
        self.resumed(Err("their process has ended".into()));
        if lived >= LONG_LIFE {
            self.pause = Duration::ZERO;
            self.not_before = Instant::now();
        } else {
            self.delay();
        }
    }

    /// It is killed, unless it has ended.
    fn give_up(&mut self, process: Process) {
        let _ = rustix::net::shutdown(&process.control, rustix::net::Shutdown::Both);
        self.ending.push(process.end());
    }

    fn take(&mut self, asked: Asked) {
        match asked {
            Asked::Connection(fd, of_guest) => self.connect(fd, of_guest),
            Asked::GuestGone => self.guest_gone(),
            Asked::Stats(to) => self.ask_stats(to),
            Asked::Load(modules, to) => self.load(modules, to),
            Asked::Copy(module, step, to) => self.copy(module, step, to),
            Asked::Drain(to) => self.drain(to),
            Asked::Resume(to) => self.resume(to),
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
            tracing::warn!(vm = %self.config.vm, "handing a connection to its modules: {e}");
        }
    }

    /// In the order of what is told: connections that come later are the next guest's.
    fn guest_gone(&mut self) {
        self.waiting.retain(|(_, of_guest)| !of_guest);
        let Some(process) = self.serving().filter(|process| process.ready) else { return };
        let flags = SendFlags::DONTWAIT;
        if let Err(e) = control::send(&process.control, &ToProcess::GuestGone, &[], flags) {
            tracing::warn!(vm = %self.config.vm, "telling its modules that the guest has gone: {e}");
        }
    }

    fn ask_stats(&mut self, to: SyncSender<Vec<ModuleStats>>) {
        let Some(process) = self.serving().filter(|process| process.ready) else { return };
        let asked = control::send(&process.control, &ToProcess::Stats, &[], SendFlags::DONTWAIT);
        if asked.is_ok() {
            process.asked.push(to);
        }
    }

    /// A process that is being replaced is not copied: its files change hands.
    fn copy(&mut self, module: String, step: Step, to: SyncSender<Result<Written, String>>) {
        if self.swap.is_some() {
            let _ = to.try_send(Err("other modules are being loaded".into()));
            return;
        }
        let Some(process) = self.current.as_mut().filter(|p| p.ready) else { return };
        self.turns += 1;
        let turn = self.turns;
        let asked = ToProcess::Copy { module, turn, step };
        if control::send(&process.control, &asked, &[], SendFlags::DONTWAIT).is_ok() {
            process.copying = Some(Copying { turn, to });
        }
    }

    /// Begins to replace the modules: the old ones go on until the new ones are loaded.
    fn load(&mut self, modules: Vec<ModuleConfig>, to: SyncSender<Result<(), String>>) {
        // Whoever asked may have given up: so may all answers here.
        if self.swap.is_some() {
            let _ = to.try_send(Err("other modules are being loaded".into()));
            return;
        }
        if self.drained {
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

    fn hear_next(&mut self) {
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
                answer(&mut swap.process, stats, last);
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
        tracing::info!(vm = %self.config.vm, pid = process.pid(), "modules replaced");
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
        tracing::error!(vm = %self.config.vm, "new modules: {text}");
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
            let pid = ending.process.pid();
            tracing::error!(vm = %self.config.vm, pid, "a process of modules is left: it does not end");
        }
    }
}

/// What a step said goes to whoever waits for it.
fn copied(process: &mut Process, turn: u64, written: Result<Written, String>) {
    if let Some(copying) = process.copying.take_if(|copying| copying.turn == turn) {
        // Whoever asked may have given up.
        let _ = copying.to.try_send(written.map_err(|why| plain(&why)));
    }
}

/// What a process says, fit to be shown: no longer than a line, and without what moves cursors.
fn plain(text: &str) -> String {
    let shown = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(LOG_LINE_BYTES / 4).map(shown).collect()
}

fn answer(process: &mut Process, stats: Vec<ModuleStats>, last: bool) {
    // A process says no more than it has modules.
    process.told.extend(stats);
    if !last {
        process.told.truncate(MAX_TOLD);
        return;
    }
    let told = std::mem::take(&mut process.told);
    for asked in process.asked.drain(..) {
        // Whoever asked may have given up.
        let _ = asked.try_send(told.clone());
    }
}
