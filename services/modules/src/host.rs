//! Host's side of modules: a VM's process, started, watched, replaced.
//!
//! One thread per VM does it all ([`supervisor`]). It starts the process, hands it the guest's
//! connections, and starts another one when it ends. Connections that come while there is none
//! wait, a bounded number of them. What the process logs comes by a pipe ([`log`]).
//!
//! A process that is to end and does not is killed, and never waited for: the folders are locked
//! until the kernel has done away with it, so that the next one cannot serve them too early.

mod child;
mod config;
mod drain;
mod inbox;
mod log;
mod prepared;
mod supervisor;

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use base::sync::lock;

pub use self::config::{Charge, ModuleConfig, RingConfig, VmModulesConfig};
use self::inbox::{Inbox, Request};
use self::prepared::prepare;
use self::supervisor::Supervisor;
use crate::control::CopyStep;
use crate::folder::written::Written;
use crate::limits::STEP_TIMEOUT;
use crate::{ModuleStats, ModulesError};

/// Limit of the wait for counters.
const STATS_TIMEOUT: Duration = Duration::from_secs(2);

/// Modules of one VM.
#[derive(Debug)]
pub struct VmModules {
    inbox: Arc<Inbox>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl VmModules {
    /// Checks the modules, and starts their process.
    ///
    /// # Errors
    /// A module's file is not there, not the one of the config, or no module.
    pub fn start(config: VmModulesConfig) -> Result<Arc<Self>, ModulesError> {
        let prepared = prepare(&config, &config.modules)?;
        let (inbox, receiver) = Inbox::new()?;
        let inbox = Arc::new(inbox);
        let supervisor = Supervisor::new(config, prepared, Arc::clone(&inbox), receiver);
        let thread = std::thread::Builder::new()
            .name(format!("modules-{}", supervisor.config.vm))
            .spawn(move || supervisor.run())
            .map_err(ModulesError::io("starting a thread for modules"))?;
        Ok(Arc::new(Self { inbox, thread: Mutex::new(Some(thread)) }))
    }

    /// Takes a connection, of the guest or else of a program of the host; never blocks.
    pub fn connect(&self, fd: OwnedFd, of_guest: bool) {
        // One that finds no room is closed: its program connects again.
        self.inbox.ask(Request::Connection(fd, of_guest));
    }

    /// The guest has gone, or begun anew: its clients do not linger. Never blocks; where there is
    /// no room to be told so, they linger after all.
    pub fn guest_gone(&self) {
        self.inbox.ask(Request::GuestGone);
    }

    /// Counters of the modules; empty while there is no process, or a busy one.
    #[must_use]
    pub fn stats(&self) -> Vec<ModuleStats> {
        self.ask_stats().recv_timeout(STATS_TIMEOUT).unwrap_or_default()
    }

    /// Asks for [`VmModules::stats`] without waiting, to ask several at a time. The receiver ends
    /// at once while there is no process that is ready.
    #[must_use]
    pub fn ask_stats(&self) -> Receiver<Vec<ModuleStats>> {
        let (sender, receiver) = sync_channel(1);
        // No room: the sender goes, and the receiver ends.
        self.inbox.ask(Request::Stats(sender));
        receiver
    }

    /// Reason why no process is ready, when the last one ended before that.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.inbox.trouble()
    }

    /// Number of lines of the processes' log that were too many for the daemon's.
    #[must_use]
    pub fn dropped_lines(&self) -> u64 {
        self.inbox.dropped.load(Ordering::Relaxed)
    }

    /// Replaces all modules by these, and returns once all have started: a new process takes the
    /// place of the old one. On error the old modules go on; they begin again if they had ended for
    /// the new ones.
    ///
    /// # Errors
    /// See [`VmModules::start`]; the new process ended, or a module did not start, or not in time.
    pub fn load(&self, modules: Vec<ModuleConfig>) -> Result<(), ModulesError> {
        self.ask_and_wait(|to| Request::Load(modules, to))
    }

    /// Ends the process, once it has finished what it does, and starts no other one before
    /// [`VmModules::resume`]; returns once it has gone. Connections that come meanwhile wait.
    ///
    /// # Errors
    /// Other modules are being loaded, or all is to end.
    pub fn drain(&self) -> Result<(), ModulesError> {
        self.ask_and_wait(Request::Drain)
    }

    /// Starts the process again, and returns once all modules have started.
    ///
    /// # Errors
    /// A module did not start, or not in time; it is tried again all the same.
    pub fn resume(&self) -> Result<(), ModulesError> {
        self.ask_and_wait(Request::Resume)
    }

    /// Begins [`VmModules::resume`], and does not wait: a folder that another process has may take
    /// long.
    pub fn begin_resume(&self) {
        // Who has ended does not go on.
        let _ = self.inbox.ask_surely(Request::Resume(sync_channel(1).0));
    }

    fn ask_and_wait(
        &self,
        request: impl FnOnce(SyncSender<Result<(), String>>) -> Request,
    ) -> Result<(), ModulesError> {
        let (sender, receiver) = sync_channel(1);
        self.inbox.ask_surely(request(sender))?;
        let told = receiver.recv().map_err(|_| ModulesError::Control("it has ended".into()))?;
        told.map_err(ModulesError::Control)
    }

    /// Does a step of a copy of a module's files, after the call that it is in.
    ///
    /// # Errors
    /// There is no process, or it ends; its files cannot be copied now.
    pub fn copy_step(&self, module: &str, step: CopyStep) -> Result<Written, ModulesError> {
        let (sender, receiver) = sync_channel(1);
        self.inbox.ask_surely(Request::Copy(module.into(), step, sender))?;
        let told = receiver.recv_timeout(STEP_TIMEOUT).map_err(|e| {
            ModulesError::Control(match e {
                RecvTimeoutError::Timeout => {
                    format!("module {module} was in one call for {} s", STEP_TIMEOUT.as_secs())
                }
                RecvTimeoutError::Disconnected => "there is no process, or it has ended".into(),
            })
        })?;
        told.map_err(|why| ModulesError::Control(format!("module {module}: {why}")))
    }

    /// Begins [`VmModules::stop`], and does not wait. Whoever waits in [`VmModules::load`] is told.
    pub fn begin_stop(&self) {
        self.inbox.begin_stop();
    }

    /// Ends the process, once it has finished what it does; one that does not end is killed, and
    /// left if even that does not end it.
    pub fn stop(&self) {
        self.begin_stop();
        let thread = lock(&self.thread).take();
        let Some(thread) = thread else { return };
        if thread.join().is_err() {
            tracing::error!("the thread that supervises modules panicked");
        }
    }
}

impl Drop for VmModules {
    fn drop(&mut self) {
        self.stop();
    }
}
