//! Service of a module: its thread takes connections, calls the module, and sends replies.
//!
//! # Theory of operation
//! The thread sleeps until a connection has something, or the module asked to be woken. It reads
//! what came on all of them and hands it over in one call, as one batch; so transactions that
//! commit at the same time are one batch, and the sync after it makes all of them durable at once.
//! While a sync runs, what comes next waits in the sockets and is the next batch. Replies that need
//! no sync leave before it.
//!
//! Clients whose connection goes by a ring are looked at, for a while, before the thread sleeps
//! ([`rings`]).

mod connections;
mod disk_report;
mod event_buffer;
mod eviction;
mod inbox;
mod life;
mod pausing;
mod rings;
mod spec;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::random::{OsRandom, Random};
use guest_abi::module::failure;
use guest_abi::module_call::event;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventFlags};
use wasmtime::{Linker, Module};

use self::connections::Connections;
use self::disk_report::DiskReport;
use self::life::{Life, retry_pause};
use self::pausing::Pausing;
use self::rings::Look;
use crate::budget::Purse;
use crate::control::CopyStep;
use crate::deadline::Ticker;
use crate::folder::Folder;
use crate::folder::written::Written;
use crate::instance::{Instance, Limits, StopReason};
use crate::instance_state::{ModuleReply, State};
use crate::limits::{HOLD_LEASE, MAX_FAILED_STARTS};
use crate::share::CpuShare;
use crate::{ModuleStats, ModulesError};

pub(crate) use self::inbox::{CopyAnswer, Inbox, Message};
pub(crate) use self::spec::{ReportDiskUse, ReportStart, Spec};

/// Code of a module, and what is needed to start instances of it.
struct Program {
    name: String,
    module: Module,
    linker: Arc<Linker<State>>,
    limits: Limits,
    purse: Arc<Purse>,
}

/// Event of the inbox in the kernel's set; connections have their place in the list.
const INBOX: u64 = u64::MAX;

/// Events of the kernel that are taken at a time.
const READY: usize = 256;

/// Service of a module, on a thread of its own.
pub(crate) struct Service {
    program: Program,
    report_start: ReportStart,
    inbox: Arc<Inbox>,
    life: Life,
    connections: Connections,
    pausing: Pausing,
    disk_report: DiskReport,
    ending: bool,
}

impl Service {
    /// Makes it on the thread that will run it. `epoll` is a set of its own.
    pub fn new(
        spec: Spec,
        folder: Folder,
        inbox: Arc<Inbox>,
        epoll: OwnedFd,
    ) -> Result<Self, ModulesError> {
        epoll::add(&epoll, &*inbox, epoll::EventData::new_u64(INBOX), EventFlags::IN)
            .map_err(ModulesError::io("watching the inbox"))?;
        let share = CpuShare::new(spec.cpu_percent);
        // What it looks for in vain would be taken off its share.
        let spin = spec.ring.as_ref().filter(|_| share.is_none()).map(|(_, spin)| *spin);
        // Room for counting up, and never 0.
        let instance = OsRandom.next_u64() >> 1 | 1;
        let connections = Connections::new(&spec, epoll, spin.unwrap_or_default(), instance);
        let Spec { name, module, linker, limits, purse, .. } = spec;
        Ok(Self {
            program: Program { name, module, linker, limits, purse },
            report_start: spec.report_start,
            inbox,
            life: Life::waiting(folder),
            connections,
            pausing: Pausing::new(share),
            disk_report: DiskReport::new(spec.report_disk_use),
            ending: false,
        })
    }

    /// Serves until it is told to end. An error: without deadlines nothing is run.
    pub fn run(&mut self) -> Result<(), ModulesError> {
        let _ticker = Ticker::new(self.program.module.engine())?;
        while !self.ending {
            self.end_pause();
            self.keep_alive();
            self.wait();
            self.connections.expire();
            self.collect();
            self.call();
            self.connections.flush_all();
            self.rest_between_calls();
            self.report_disk_use();
            self.connections.keep_room();
        }
        self.finish();
        Ok(())
    }

    /// Whether requests wait: there is no instance to take them, or a pause.
    fn holds_requests(&self) -> bool {
        self.pausing.until().is_some() || self.life.holds_requests()
    }

    /// Goes on after a pause.
    fn end_pause(&mut self) {
        self.connections.more |= self.pausing.end_if_over(&self.program.name);
    }

    /// Takes frames of all connections, up to what a call may have.
    fn collect(&mut self) {
        if !self.holds_requests() {
            self.connections.collect();
        }
    }

    /// Delays the next call if the thread has computed too much.
    fn rest(&mut self) {
        let rest = self.pausing.rest();
        self.count_rest(rest);
    }

    fn rest_between_calls(&mut self) {
        let rest = self.pausing.rest_between_calls();
        self.count_rest(rest);
    }

    fn count_rest(&mut self, rest: Option<Duration>) {
        if let Some(rest) = rest {
            self.connections.meter.stats.rested_ns += rest.as_nanos() as u64;
        }
    }

    /// Time at which there is something to do, whatever happens.
    fn due(&mut self) -> Option<Instant> {
        if self.connections.more && !self.holds_requests() {
            return Some(Instant::now());
        }
        let pause = self.pausing.until();
        let wake = match &mut self.life {
            _ if pause.is_some() => pause,
            Life::Running(instance) => instance.state().wake,
            Life::Waiting { until, .. } => Some(*until),
            Life::Over => None,
        };
        [wake, self.connections.expires_at].into_iter().flatten().min()
    }

    /// Sleeps until something happens, and takes it.
    fn wait(&mut self) {
        let until = self.due();
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        // In a pause rings stay awake, and are looked at after it.
        let holds = self.holds_requests();
        let timeout = match self.connections.look_at_rings(until, holds) {
            Look::No => return,
            Look::Now => Some(Duration::ZERO),
            Look::Wait => until.map(left),
        };
        // Rounded up: a moment too early would be a turn for nothing.
        let round = |t: Duration| if t.is_zero() { t } else { t + Duration::from_micros(999) };
        let timeout = timeout.map(round);
        let timeout = timeout.and_then(|t| Timespec::try_from(t).ok());
        let mut room = [const { std::mem::MaybeUninit::uninit() }; READY];
        let ready: Vec<(u64, EventFlags)> =
            match epoll::wait(self.connections.epoll(), &mut room[..], timeout.as_ref()) {
                Ok((events, _)) => events.iter().map(|e| (e.data.u64(), e.flags)).collect(),
                Err(_) => return,
            };
        for (data, flags) in ready {
            if data == INBOX {
                self.inbox.take().into_iter().for_each(|message| self.take(message));
            } else {
                self.connections.on_ready(data as usize, flags);
            }
        }
    }

    fn take(&mut self, message: Message) {
        match message {
            Message::Connection { fd, client, of_guest } => {
                self.connections.connect(fd, client, of_guest);
            }
            Message::GuestGone => self.connections.guest_gone(),
            Message::Stats(to) => {
                // Whoever asked may have given up.
                let _ = to.try_send(self.stats());
            }
            Message::Copy(step, to) => (to.0)(self.copy_step(step)),
            Message::End => self.ending = true,
        }
    }

    /// Starts an instance where there is none.
    fn keep_alive(&mut self) {
        let due = matches!(&self.life, Life::Waiting { until, .. } if *until <= Instant::now());
        if !due || self.pausing.until().is_some() {
            return;
        }
        let Life::Waiting { mut folder, .. } = std::mem::replace(&mut self.life, Life::Over) else {
            return;
        };
        if let Err(e) = folder.mend() {
            return self
                .note_failed_start(&format!("its files cannot be written anew: {e}"), folder);
        }
        let Program { name, module, linker, limits, purse } = &self.program;
        let begun = Instance::start(linker, module, name, folder, limits, purse);
        self.pausing.skip_computing();
        match begun {
            Ok(mut instance) => {
                if instance.state().folder.has_failed() {
                    return self.note_failed_start("the host's storage failed", instance.end());
                }
                self.note_start(instance);
            }
            Err((reason, folder)) => self.note_failed_start(&reason.to_string(), *folder),
        }
    }

    fn note_start(&mut self, instance: Instance) {
        self.life = Life::Running(Box::new(instance));
        self.connections.instance += 1;
        self.connections.has_instance = true;
        let failed_starts = std::mem::take(&mut self.connections.meter.stats.failed_starts);
        if failed_starts >= MAX_FAILED_STARTS.into() {
            let name = &self.program.name;
            tracing::info!(
                module = %name,
                "module {name} started after {failed_starts} failed attempts"
            );
        }
        if let Some(report) = self.report_start.take() {
            report(Ok(()));
        }
        let Connections { clients, events, .. } = &mut self.connections;
        for (number, client) in clients.iter_mut() {
            events.push(event::OPENED, 0, number, 0, &client.id);
        }
    }

    fn note_failed_start(&mut self, why: &str, folder: Folder) {
        let stats = &mut self.connections.meter.stats;
        stats.failed_starts += 1;
        let failed_starts = u32::try_from(stats.failed_starts).unwrap_or(u32::MAX);
        let (name, next) = (&self.program.name, retry_pause(failed_starts));
        tracing::error!(
            module = %name,
            failed_starts,
            ?next,
            "module {name} failed to start: {why}"
        );
        let text = format!("module {name} cannot be started: {why}");
        if let Some(report) = self.report_start.take() {
            report(Err(text.clone()));
        }
        let broken = (failed_starts >= MAX_FAILED_STARTS).then_some(text);
        self.connections.more |= broken.is_some();
        self.life = Life::Waiting { folder, until: Instant::now() + next, broken };
    }

    /// Replaces an instance that is of no use any more: all that it had not answered fails.
    fn replace(&mut self, reason: StopReason) {
        self.connections.meter.stats.stopped += 1;
        let name = &self.program.name;
        tracing::warn!(module = %name, "module {name} was stopped and is replaced: {reason}");
        let code = if reason == StopReason::Storage { failure::STORAGE } else { failure::STOPPED };
        self.connections.fail_all(code, &format!("the module was stopped: {reason}"));
        if let Life::Running(instance) = std::mem::replace(&mut self.life, Life::Over) {
            self.life = Life::waiting(instance.end());
        }
        self.connections.has_instance = false;
    }

    /// Calls the module, if there is anything for it.
    fn call(&mut self) {
        if self.pausing.until().is_some() {
            return;
        }
        let Life::Running(instance) = &mut self.life else { return self.refuse_requests() };
        let events = &mut self.connections.events;
        if events.is_empty() {
            if instance.state().wake.is_none_or(|at| Instant::now() < at) {
                return;
            }
            events.push(event::WAKE, 0, 0, 0, &[]);
        }
        self.connections.meter.stats.calls += 1;
        let served = instance.serve(events.bytes());
        events.clear();
        let replies = std::mem::take(&mut instance.state().replies);
        self.hand_out(replies);
        self.rest();
        let Life::Running(instance) = &mut self.life else { return };
        // Handed out: they count where they wait.
        instance.state().held.set(0);
        // What it believes to be in its files may not be there.
        let failed = instance.state().folder.has_failed().then_some(StopReason::Storage);
        if let Some(reason) = failed.or(served.err()) {
            self.replace(reason);
        }
    }

    /// Fails requests that no instance can take, unless they wait for the next one.
    fn refuse_requests(&mut self) {
        if let Life::Waiting { broken: Some(why), .. } = &self.life {
            self.connections.events.clear();
            self.connections.fail_all(failure::BROKEN, why);
        }
    }

    /// Sends replies: those that promise nothing first, the others when it is true.
    fn hand_out(&mut self, replies: Vec<ModuleReply>) {
        let (durable, now): (Vec<ModuleReply>, Vec<ModuleReply>) =
            replies.into_iter().partition(|reply| reply.durable);
        let waits = !durable.is_empty() && !now.is_empty();
        now.into_iter().for_each(|reply| self.connections.reply(reply));
        if durable.is_empty() {
            return;
        }
        if waits {
            self.connections.flush_all();
        }
        let Life::Running(instance) = &mut self.life else { return };
        match instance.state().folder.sync_all() {
            Ok(()) => durable.into_iter().for_each(|reply| self.connections.reply(reply)),
            Err(e) => {
                self.log_failed_sync(&e);
                let text = format!("the host's storage failed: {e}");
                for reply in durable {
                    self.connections.fail(reply.client, reply.seq, failure::STORAGE, &text);
                }
            }
        }
    }

    fn log_failed_sync(&self, error: &impl std::fmt::Display) {
        let name = &self.program.name;
        tracing::error!(module = %name, "files of module {name} cannot be made durable: {error}");
    }

    /// Reports what was done with the files, now and then.
    fn report_disk_use(&mut self) {
        let Some(now) = self.life.folder().map(|folder| folder.counts()) else { return };
        if self.disk_report.report(now, self.connections.ring_bytes) {
            self.connections.ring_bytes = 0;
        }
    }

    /// Does a step of a copy, between two calls.
    fn copy_step(&mut self, step: CopyStep) -> Result<Written, String> {
        let folder = self.life.folder().ok_or("it has ended")?;
        if folder.has_failed() && step != CopyStep::End {
            return Err("a sync of its files failed, and they are not written anew yet".into());
        }
        let nothing = Written::Extents(Vec::new());
        let missing = || "nobody has begun a copy".to_owned();
        match step {
            CopyStep::Begin => {
                folder.log_written(true);
                Ok(nothing)
            }
            CopyStep::Look => folder.take_written().ok_or_else(missing),
            CopyStep::Hold => {
                let written = folder.take_written().ok_or_else(missing)?;
                self.pausing.hold();
                Ok(written)
            }
            CopyStep::End => {
                folder.log_written(false);
                let held = self.pausing.release();
                // What came meanwhile is not told again.
                self.connections.more = true;
                held.then_some(nothing).ok_or_else(|| {
                    format!("its files were held for longer than {} ms", HOLD_LEASE.as_millis())
                })
            }
        }
    }

    fn stats(&mut self) -> ModuleStats {
        let meter = &self.connections.meter;
        let mut stats = meter.stats.clone();
        self.connections.add_to_stats(&mut stats);
        stats.state = self.life.describe(stats.failed_starts);
        if let Life::Running(instance) = &mut self.life {
            stats.memory_bytes = instance.memory_bytes();
        }
        if let Some(folder) = self.life.folder() {
            stats.stored_bytes = folder.used_bytes();
            stats.files = folder.counts();
        }
        let latency = meter.latency.snapshot();
        stats.latency_p50_ns = latency.quantile(0.5);
        stats.latency_p99_ns = latency.quantile(0.99);
        stats.latency = latency.coarse().collect();
        stats.latency_sum_ns = latency.sum();
        stats
    }

    /// Calls the module a last time, and ends all connections.
    fn finish(&mut self) {
        // Whoever copies the files sees that the process has gone.
        self.pausing.end();
        self.connections.events.push(event::ENDING, 0, 0, 0, &[]);
        self.call();
        self.connections.fail_all(failure::ENDING, "the service of modules ends");
        self.connections.end_all(failure::ENDING, "the service of modules ends");
        if let Life::Running(instance) = &mut self.life
            && let Err(e) = instance.state().folder.sync_all()
        {
            self.log_failed_sync(&e);
        }
    }
}
