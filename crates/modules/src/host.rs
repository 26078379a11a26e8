//! Host's side of modules: a VM's process, started, watched, replaced.
//!
//! One thread per VM does it all ([`supervisor`]). It starts the process, hands it the guest's
//! connections, and starts another one when it ends. Connections that come while there is none
//! wait, a bounded number of them. What the process logs comes by a pipe ([`log`]).
//!
//! A process that is to end and does not is killed, and never waited for: the folders are locked
//! until the kernel has done away with it, so that the next one cannot serve them too early.

mod child;
mod drain;
mod log;
mod supervisor;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use self::supervisor::Supervisor;
use crate::control::{CopyStep, DiskUse, ModuleSetup, RingSetup};
use crate::engine::{self, Hash};
use crate::folder::written::Written;
use crate::limits::STEP_TIMEOUT;
use crate::{ModuleStats, ModulesError};

/// Limit of connections that wait for a process.
const MAX_WAITING: usize = 256;

/// Limit of the wait for counters.
const STATS_TIMEOUT: Duration = Duration::from_secs(2);

/// Module as the config has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleConfig {
    /// Name.
    pub name: String,
    /// File with its WebAssembly.
    pub path: PathBuf,
    /// SHA-256 that the file must have.
    pub hash: Hash,
    /// Limit of the CPU time of a call.
    pub deadline_ms: u32,
    /// Share of a core that its thread may take, in percent.
    pub cpu_percent: u32,
    /// Limit of its memory.
    pub memory_bytes: u64,
    /// Limit of the bytes of its files.
    pub disk_bytes: u64,
}

/// Charge of a VM for what its modules did with their files.
#[derive(Clone)]
pub struct Charge(pub Arc<dyn Fn(DiskUse) + Send + Sync>);

impl std::fmt::Debug for Charge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Charge")
    }
}

impl Default for Charge {
    /// Charges nobody.
    fn default() -> Self {
        Self(Arc::new(|_| {}))
    }
}

/// Memory that a VM and its modules share.
#[derive(Debug, Clone)]
pub struct RingConfig {
    /// File with it, as [`crate::ring::open`] makes it.
    pub file: Arc<OwnedFd>,
    /// Setup of its use.
    pub setup: RingSetup,
}

/// Modules of a VM, as the config has them.
#[derive(Debug, Clone)]
pub struct VmModulesConfig {
    /// Name of the VM.
    pub vm: String,
    /// Modules.
    pub modules: Vec<ModuleConfig>,
    /// Folder of this VM's files, with one folder for each module.
    pub state_dir: PathBuf,
    /// Folder of native code, for all VMs.
    pub code_dir: PathBuf,
    /// Command that runs a process: program and arguments. Its standard input is the socket.
    pub command: Vec<String>,
    /// Charge for what the disk had to do.
    pub charge: Charge,
    /// Memory for rings, if clients may use them.
    pub ring: Option<RingConfig>,
    /// Whether clients of the guest must use rings: requests by their sockets are not taken, also
    /// if there are no rings.
    pub needs_ring: bool,
    /// Whether no process is started before [`VmModules::resume`].
    pub drained: bool,
}

/// Request to the thread.
#[derive(Debug)]
enum Request {
    /// Whether it is the guest's.
    Connection(OwnedFd, bool),
    GuestGone,
    Stats(SyncSender<Vec<ModuleStats>>),
    Load(Vec<ModuleConfig>, SyncSender<Result<(), String>>),
    Copy(String, CopyStep, SyncSender<Result<Written, String>>),
    Drain(SyncSender<Result<(), String>>),
    Resume(SyncSender<Result<(), String>>),
}

#[derive(Debug)]
struct Inbox {
    requests: SyncSender<Request>,
    event: OwnedFd,
    /// Reason why no process is ready, when the last one ended before that.
    trouble: Mutex<Option<String>>,
    stopping: AtomicBool,
    /// Number of lines of processes that were not logged.
    dropped: Arc<AtomicU64>,
}

impl Inbox {
    fn trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn ring(&self) {
        // Full: then it is told already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    fn note(&self, trouble: Option<String>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// Waits for room, however many connections come: the thread takes all that there is with each
    /// turn.
    fn ask_surely(&self, request: Request) -> Result<(), ModulesError> {
        self.ring();
        self.requests.send(request).map_err(|_| ModulesError::Control("it has ended".into()))?;
        self.ring();
        Ok(())
    }

    /// False: there is no room.
    fn ask(&self, request: Request) -> bool {
        let taken = self.requests.try_send(request).is_ok();
        self.ring();
        taken
    }
}

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
        let (requests, receiver) = sync_channel(MAX_WAITING);
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(ModulesError::io("making an event"))?;
        let inbox = Arc::new(Inbox {
            requests,
            event,
            trouble: Mutex::default(),
            stopping: AtomicBool::new(false),
            dropped: Arc::default(),
        });
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
        self.inbox.stopping.store(true, Ordering::Release);
        self.inbox.ring();
    }

    /// Ends the process, once it has finished what it does; one that does not end is killed, and
    /// left if even that does not end it.
    pub fn stop(&self) {
        self.begin_stop();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
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

/// Module whose native code is there.
#[derive(Debug)]
struct Prepared {
    setup: ModuleSetup,
    code: PathBuf,
    folder: PathBuf,
}

fn prepare(
    config: &VmModulesConfig,
    modules: &[ModuleConfig],
) -> Result<Vec<Prepared>, ModulesError> {
    let one = |module: &ModuleConfig| {
        let (wasm, hash) = engine::read_wasm(&module.name, &module.path)?;
        if hash != module.hash {
            return Err(ModulesError::Hash {
                name: module.name.clone(),
                path: module.path.clone(),
                found: engine::hex(&hash),
                wanted: engine::hex(&module.hash),
            });
        }
        let code = engine::compile(&module.name, &wasm, &hash, &config.code_dir)?;
        let folder = config.state_dir.join(&module.name);
        engine::private_folder(&folder)?;
        let setup = ModuleSetup {
            name: module.name.clone(),
            hash: engine::hex(&hash),
            deadline_ms: module.deadline_ms,
            cpu_percent: module.cpu_percent,
            memory_bytes: module.memory_bytes,
            disk_bytes: module.disk_bytes,
        };
        Ok(Prepared { setup, code, folder })
    };
    modules.iter().map(one).collect()
}
