//! The daemon's side: a VM's process of modules, started, watched, replaced.
//!
//! One thread per VM does it all. It starts the process, hands it the guest's connections, and starts
//! another one when it ends. Connections that come while there is none wait, a bounded number of them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, socketpair};

use crate::control::{self, FromProcess, ModuleSetup, ToProcess};
use crate::engine::{self, Hash};
use crate::{ModuleStats, ModulesError};

/// Connections that wait for a process.
const MAX_WAITING: usize = 256;

/// Pause in front of a new process after one that ended soon; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// A process that lived so long did not end soon.
const LONG_LIFE: Duration = Duration::from_millis(500);

/// How long a process may take to end once it was told to.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// How long whoever asks for counters waits.
const STATS_TIMEOUT: Duration = Duration::from_secs(2);

/// A module as the config has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModuleConfig {
    /// Its name.
    pub name: String,
    /// Its WebAssembly.
    pub path: PathBuf,
    /// What the file's SHA-256 must be.
    pub hash: Hash,
    /// CPU time of a call.
    pub deadline_ms: u32,
    /// Most memory.
    pub memory_bytes: u64,
    /// Most bytes of files.
    pub disk_bytes: u64,
}

/// A VM's modules.
#[derive(Debug, Clone)]
pub struct VmModulesConfig {
    /// The VM.
    pub vm: String,
    /// Its modules.
    pub modules: Vec<ModuleConfig>,
    /// The folder of this VM's files: one below for each module.
    pub state_dir: PathBuf,
    /// Where native code is kept, for all VMs.
    pub code_dir: PathBuf,
    /// The command that runs a process: program and arguments. Its standard input is the socket.
    pub command: Vec<String>,
}

/// What the thread is asked.
#[derive(Debug)]
enum Asked {
    Connection(OwnedFd),
    Stats(SyncSender<Vec<ModuleStats>>),
    Load(Vec<ModuleConfig>, SyncSender<Result<(), String>>),
    Stop,
}

#[derive(Debug)]
struct Inbox {
    asked: SyncSender<Asked>,
    event: OwnedFd,
    /// Why no process is ready, when the last one ended in front of that.
    trouble: Mutex<Option<String>>,
}

impl Inbox {
    fn note(&self, trouble: Option<String>) {
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// False: there is no room.
    fn ask(&self, asked: Asked) -> bool {
        let taken = self.asked.try_send(asked).is_ok();
        // Full: then it is told already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        taken
    }
}

/// The modules of one VM.
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
        let (asked, answers) = sync_channel(MAX_WAITING);
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(ModulesError::io("making an event"))?;
        let inbox = Arc::new(Inbox { asked, event, trouble: Mutex::default() });
        let keeper = Keeper {
            config,
            prepared,
            inbox: Arc::clone(&inbox),
            asked: answers,
            process: None,
            waiting: Vec::new(),
            pause: Duration::ZERO,
            not_before: Instant::now(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("modules-{}", keeper.config.vm))
            .spawn(move || keeper.run())
            .map_err(ModulesError::io("starting a thread for modules"))?;
        Ok(Arc::new(Self { inbox, thread: Mutex::new(Some(thread)) }))
    }

    /// Takes the guest's connections; never blocks.
    #[must_use]
    pub fn sink(&self) -> Arc<dyn Fn(OwnedFd) + Send + Sync> {
        let inbox = Arc::clone(&self.inbox);
        Arc::new(move |fd| {
            // One that finds no room is closed: its program connects again.
            inbox.ask(Asked::Connection(fd));
        })
    }

    /// What the modules did; empty while there is no process, or a busy one.
    #[must_use]
    pub fn stats(&self) -> Vec<ModuleStats> {
        self.ask_stats().recv_timeout(STATS_TIMEOUT).unwrap_or_default()
    }

    /// As [`VmModules::stats`], for who asks several and waits then: the answer, or nothing, comes here. It
    /// ends at once while there is no process that is ready.
    #[must_use]
    pub fn ask_stats(&self) -> Receiver<Vec<ModuleStats>> {
        let (sender, receiver) = sync_channel(1);
        // No room: the sender goes, and the receiver ends.
        self.inbox.ask(Asked::Stats(sender));
        receiver
    }

    /// Why there is no process that is ready, when the last one ended in front of that.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        self.inbox.trouble.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces all modules by these: a new process takes the place of the old one. On error the old one
    /// stays.
    ///
    /// # Errors
    /// As of [`VmModules::start`].
    pub fn load(&self, modules: Vec<ModuleConfig>) -> Result<(), ModulesError> {
        let (sender, receiver) = sync_channel(1);
        let busy = || ModulesError::Control("it is busy".into());
        if !self.inbox.ask(Asked::Load(modules, sender)) {
            return Err(busy());
        }
        let told = receiver.recv().map_err(|_| ModulesError::Control("it has ended".into()))?;
        told.map_err(ModulesError::Control)
    }

    /// Ends the process, once it has finished what it does.
    pub fn stop(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(thread) = thread else { return };
        while !self.inbox.ask(Asked::Stop) && !thread.is_finished() {
            std::thread::yield_now();
        }
        if thread.join().is_err() {
            tracing::error!("a thread of modules panicked");
        }
    }
}

impl Drop for VmModules {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A module whose native code is there.
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
            memory_bytes: module.memory_bytes,
            disk_bytes: module.disk_bytes,
        };
        Ok(Prepared { setup, code, folder })
    };
    modules.iter().map(one).collect()
}

/// A process that runs.
#[derive(Debug)]
struct Process {
    child: Child,
    control: OwnedFd,
    since: Instant,
    ready: bool,
    /// Who waits for counters.
    asked: Vec<SyncSender<Vec<ModuleStats>>>,
}

/// The thread.
struct Keeper {
    config: VmModulesConfig,
    prepared: Vec<Prepared>,
    inbox: Arc<Inbox>,
    asked: Receiver<Asked>,
    process: Option<Process>,
    waiting: Vec<OwnedFd>,
    pause: Duration,
    not_before: Instant,
}

impl Keeper {
    fn run(mut self) {
        loop {
            self.keep_alive();
            self.wait();
            loop {
                match self.asked.try_recv() {
                    Ok(Asked::Stop) => return self.end(),
                    Ok(asked) => self.take(asked),
                    Err(_) => break,
                }
            }
        }
    }

    fn keep_alive(&mut self) {
        if self.process.is_some() || Instant::now() < self.not_before {
            return;
        }
        match spawn(&self.config, &self.prepared) {
            Ok(process) => self.process = Some(process),
            Err(e) => {
                tracing::error!(vm = %self.config.vm, "starting its process of modules: {e}");
                self.inbox.note(Some(e.to_string()));
                self.delay();
            }
        }
    }

    fn delay(&mut self) {
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        self.not_before = Instant::now() + self.pause;
    }

    fn wait(&mut self) {
        let left = self.not_before.saturating_duration_since(Instant::now());
        let timeout = match &self.process {
            Some(_) => None,
            None => Timespec::try_from(left + Duration::from_millis(1)).ok(),
        };
        let mut fds = vec![PollFd::new(&self.inbox.event, PollFlags::IN)];
        if let Some(process) = &self.process {
            fds.push(PollFd::new(&process.control, PollFlags::IN));
        }
        let _ = poll(&mut fds, timeout.as_ref());
        let heard = fds.get(1).is_some_and(|fd| !fd.revents().is_empty());
        drop(fds);
        let _ = rustix::io::read(&self.inbox.event, &mut [0u8; 8]);
        if heard {
            self.hear();
        }
    }

    fn hear(&mut self) {
        let Some(process) = &mut self.process else { return };
        match control::receive(&process.control) {
            Ok(Some((FromProcess::Ready, _))) => {
                process.ready = true;
                self.inbox.note(None);
                tracing::info!(vm = %self.config.vm, pid = process.child.id(), "modules are ready");
                std::mem::take(&mut self.waiting).into_iter().for_each(|fd| self.connect(fd));
            }
            Ok(Some((FromProcess::Stats(stats), _))) => {
                for asked in process.asked.drain(..) {
                    // Whoever asked may have given up.
                    let _ = asked.try_send(stats.clone());
                }
            }
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

    /// The process has gone, or is of no use.
    fn ended(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        let status = reap(&mut process.child, Duration::ZERO);
        let lived = process.since.elapsed();
        tracing::warn!(vm = %self.config.vm, ?lived, "its process of modules ended: {status}");
        // What it said itself says more.
        if !process.ready && self.inbox.trouble.lock().is_ok_and(|trouble| trouble.is_none()) {
            self.inbox.note(Some(format!("its process ended: {status}")));
        }
        if lived >= LONG_LIFE {
            self.pause = Duration::ZERO;
            self.not_before = Instant::now();
        } else {
            self.delay();
        }
    }

    fn take(&mut self, asked: Asked) {
        match asked {
            Asked::Connection(fd) => self.connect(fd),
            Asked::Stats(to) => self.ask_stats(to),
            Asked::Load(modules, to) => {
                let done = self.load(modules).map_err(|e| e.to_string());
                let _ = to.try_send(done);
            }
            Asked::Stop => {}
        }
    }

    fn connect(&mut self, fd: OwnedFd) {
        let ready = self.process.as_ref().filter(|process| process.ready);
        let Some(process) = ready else {
            if self.waiting.len() < MAX_WAITING {
                self.waiting.push(fd);
            }
            return;
        };
        // It reads at once, whatever its modules do: a full socket means that it hangs.
        let flags = SendFlags::DONTWAIT;
        if let Err(e) =
            control::send(&process.control, &ToProcess::Connection, &[fd.as_fd()], flags)
        {
            tracing::warn!(vm = %self.config.vm, "handing a connection to its modules: {e}");
        }
    }

    fn ask_stats(&mut self, to: SyncSender<Vec<ModuleStats>>) {
        let Some(process) = self.process.as_mut().filter(|process| process.ready) else { return };
        let asked = control::send(&process.control, &ToProcess::Stats, &[], SendFlags::DONTWAIT);
        if asked.is_ok() {
            process.asked.push(to);
        }
    }

    /// The new process waits for the old one's folders, with everything else done.
    fn load(&mut self, modules: Vec<ModuleConfig>) -> Result<(), ModulesError> {
        let prepared = prepare(&self.config, &modules)?;
        let next = spawn(&self.config, &prepared)?;
        (self.config.modules, self.prepared) = (modules, prepared);
        if let Some(mut old) = self.process.replace(next) {
            let told = control::send(&old.control, &ToProcess::End, &[], SendFlags::DONTWAIT);
            let patience = if told.is_ok() { END_TIMEOUT } else { Duration::ZERO };
            let status = reap(&mut old.child, patience);
            tracing::info!(vm = %self.config.vm, "modules replaced; the old process ended: {status}");
        }
        Ok(())
    }

    fn end(mut self) {
        let Some(mut process) = self.process.take() else { return };
        let told = control::send(&process.control, &ToProcess::End, &[], SendFlags::DONTWAIT);
        let patience = if told.is_ok() { END_TIMEOUT } else { Duration::ZERO };
        let status = reap(&mut process.child, patience);
        tracing::debug!(vm = %self.config.vm, "its process of modules ended: {status}");
    }
}

/// Waits for a process to end, and kills it if it does not.
fn reap(child: &mut Child, patience: Duration) -> String {
    use rustix::process::{PidfdFlags, pidfd_open};
    let pid = rustix::process::Pid::from_child(child);
    if let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty())
        && let Ok(timeout) = Timespec::try_from(patience)
    {
        let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout));
    }
    if let Ok(None) = child.try_wait() {
        // Fails only if it has ended meanwhile.
        let _ = child.kill();
    }
    child.wait().map_or_else(|e| e.to_string(), |status| status.to_string())
}

fn spawn(config: &VmModulesConfig, prepared: &[Prepared]) -> Result<Process, ModulesError> {
    let what = "starting a process of modules";
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(ModulesError::io(what))?;
    let mut parts = Vec::new();
    for Prepared { code, folder, .. } in prepared {
        for path in [code, folder] {
            let file = std::fs::File::open(path)
                .map_err(ModulesError::io(format!("opening {}", path.display())))?;
            parts.push(OwnedFd::from(file));
        }
    }
    let (program, arguments) =
        config.command.split_first().ok_or_else(|| ModulesError::Control("no command".into()))?;
    let child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .current_dir("/")
        .spawn()
        .map_err(ModulesError::io(what))?;
    let mut process =
        Process { child, control: ours, since: Instant::now(), ready: false, asked: Vec::new() };
    let modules = prepared.iter().map(|p| p.setup.clone()).collect();
    let setup = ToProcess::Setup { vm: config.vm.clone(), modules };
    let fds: Vec<BorrowedFd<'_>> = parts.iter().map(AsFd::as_fd).collect();
    if let Err(e) = control::send(&process.control, &setup, &fds, SendFlags::empty()) {
        reap(&mut process.child, Duration::ZERO);
        return Err(e);
    }
    Ok(process)
}
