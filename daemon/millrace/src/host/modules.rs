//! Modules of the VMs that have them: each VM's with its process, the service its guest connects
//! to, and perhaps a Unix socket.
//!
//! They begin behind the ports: compiling takes seconds, and happens again after an upgrade, while
//! guests wait for their disks. Connections that come meanwhile wait, a bounded number of them.

mod copies;
mod drain;
mod listener;
mod show;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use base::sync::lock;
use config::Config;
use control::plane::{ModuleStatus, PlaneError};
use control::sample::Metrics;
use modules::{Charge, ModulesError, RingConfig, RingSetup, VmModules, VmModulesConfig, engine};
use vsock::HostService;

use self::listener::Listener;
use self::show::{ModulesState, STATS_TIMEOUT};

/// Connections of a VM that wait for its modules to begin: as many as they let wait for a process.
const MAX_WAITING: usize = 256;

/// How a VM's process is started: this very program, also when its file was replaced.
const PROGRAM: &str = "/proc/self/exe";

/// The modules of all VMs.
pub struct Modules {
    vms: Vec<Arc<VmEntry>>,
    /// Held while modules begin or are replaced: two would compile into the same file.
    change: Arc<Mutex<Change>>,
    beginner: Mutex<Option<JoinHandle<()>>>,
}

struct Change {
    stopped: bool,
}

/// Modules of one VM.
struct VmEntry {
    /// Config at the daemon's start; its list of modules is replaced by `load`.
    config: VmModulesConfig,
    socket: Option<PathBuf>,
    ring: Option<config::RingConfig>,
    /// Whether only root of the guest, and users who may use low ports, reach them over vsock.
    privileged: bool,
    /// Mode of the ring's file, when it is made.
    mode: u32,
    route: Arc<Mutex<Route>>,
    state: Mutex<ModulesState>,
    /// True while a copy is being taken or put in place.
    copying: Arc<AtomicBool>,
    listener: Mutex<Option<Listener>>,
}

/// Destination of connections.
enum Route {
    /// Queue of those that wait for a start; each with whether it is the guest's.
    Waiting(Vec<(OwnedFd, bool)>),
    /// Modules that take them.
    Open(Arc<VmModules>),
    /// None: they are closed.
    Closed,
}

/// Refusal of the crate `modules`.
fn refused(e: impl std::fmt::Display) -> PlaneError {
    PlaneError::Refused(e.to_string())
}

/// Takes a connection. The lock is only ever held for a moment: a sidecore may wait for it.
fn take(route: &Mutex<Route>, fd: OwnedFd, of_guest: bool) {
    let modules = match &mut *lock(route) {
        Route::Waiting(fds) => {
            // Without room it is closed: its program connects again.
            if fds.len() < MAX_WAITING {
                fds.push((fd, of_guest));
            }
            return;
        }
        Route::Open(modules) => Arc::clone(modules),
        Route::Closed => return,
    };
    modules.connect(fd, of_guest);
}

/// Tells the modules that the guest has gone, or begun anew.
fn guest_gone(route: &Mutex<Route>) {
    let modules = match &mut *lock(route) {
        Route::Waiting(fds) => return fds.retain(|(_, of_guest)| !of_guest),
        Route::Open(modules) => Arc::clone(modules),
        Route::Closed => return,
    };
    modules.guest_gone();
}

/// Modules of a VM, as the crate `modules` takes them.
fn listed(config: &Config, vm: &str) -> Option<Vec<modules::ModuleConfig>> {
    let (used, all) = config.modules_of(vm)?;
    let module = |module: &config::ModuleConfig| modules::ModuleConfig {
        name: module.name.clone(),
        path: module.path.clone(),
        hash: module.sha256,
        deadline_ms: module.deadline_ms,
        memory_bytes: module.memory_bytes,
        disk_bytes: used.disk_bytes,
        cpu_percent: used.cpu_percent,
    };
    Some(all.into_iter().map(module).collect())
}

/// Whether only root of the guest reaches them over vsock. Where requests come by memory alone,
/// whoever may open that may ask.
fn privileged(used: &config::VmModulesConfig) -> bool {
    !used.guest_users && !used.ring.as_ref().is_some_and(|ring| ring.required)
}

impl VmEntry {
    fn new(config: &Config, vm: &str, charge: Charge) -> Option<Self> {
        let (used, _) = config.modules_of(vm)?;
        // Its lines come by a pipe and are logged here: what they say is told apart.
        let words = [PROGRAM, "module-process", vm, "--log", &config.daemon.log, "--log-json"];
        let command = words.map(Into::into).into();
        let list = listed(config, vm)?;
        let state = ModulesState {
            names: used.names.clone(),
            list: list.clone(),
            ..ModulesState::default()
        };
        Some(Self {
            config: VmModulesConfig {
                vm: vm.into(),
                modules: list,
                state_dir: used.dir.clone(),
                code_dir: config.code_dir(),
                command,
                charge,
                ring: None,
                needs_ring: used.ring.as_ref().is_some_and(|ring| ring.required),
                drained: false,
            },
            socket: used.socket.clone(),
            ring: used.ring.clone(),
            privileged: privileged(used),
            mode: config.daemon.socket_mode,
            route: Arc::new(Mutex::new(Route::Waiting(Vec::new()))),
            state: Mutex::new(state),
            copying: Arc::default(),
            listener: Mutex::default(),
        })
    }

    fn sink(&self, of_guest: bool) -> vsock::ServiceSink {
        let route = Arc::clone(&self.route);
        Arc::new(move |fd| take(&route, fd, of_guest))
    }

    /// Service of the VM's vsock port.
    fn service(&self) -> HostService {
        let route = Arc::clone(&self.route);
        let gone: vsock::GuestResetHook = Arc::new(move || guest_gone(&route));
        let (port, sink) = (guest_abi::module::PORT, self.sink(true));
        HostService { port, privileged: self.privileged, sink, on_guest_reset: Some(gone) }
    }

    fn listen(&self) {
        let Some(path) = &self.socket else { return };
        match Listener::start(&self.config.vm, path, self.sink(false)) {
            Ok(listener) => *lock(&self.listener) = Some(listener),
            Err(e) => {
                let why = format!("no socket {}: {e}", path.display());
                tracing::error!(vm = %self.config.vm, "modules: {why}");
                lock(&self.state).no_socket = Some(why);
            }
        }
    }

    /// Opens the memory for rings; without it clients have their sockets, or must do without.
    fn open_ring(&self) -> Option<RingConfig> {
        let ring = self.ring.as_ref()?;
        let setup = RingSetup { bytes: ring.bytes, spin_us: ring.spin_us };
        match modules::ring::open(&ring.path, ring.bytes, self.mode) {
            Ok(file) => Some(RingConfig { file: Arc::new(file), setup }),
            Err(e) => {
                let why = format!("no rings in {}: {e}", ring.path.display());
                tracing::error!(vm = %self.config.vm, "modules: {why}");
                lock(&self.state).no_ring = Some(why);
                None
            }
        }
    }

    /// Starts these modules. On error connections are closed until a later try.
    fn begin(
        &self,
        list: Vec<modules::ModuleConfig>,
        ring: Option<RingConfig>,
    ) -> Result<(), ModulesError> {
        let drained = drain::is_marked(&self.config.state_dir);
        let modules = list.clone();
        let config = VmModulesConfig { modules, ring, drained, ..self.config.clone() };
        let started = VmModules::start(config);
        let route = match &started {
            Ok(modules) => Route::Open(Arc::clone(modules)),
            Err(_) => Route::Closed,
        };
        let mut state = lock(&self.state);
        match &started {
            Ok(modules) => {
                state.modules = Some(Arc::clone(modules));
                state.failed = None;
                (state.list, state.drained) = (list, drained);
            }
            Err(e) => state.failed = Some(e.to_string()),
        }
        drop(state);
        let before = std::mem::replace(&mut *lock(&self.route), route);
        // The lock is free again: each goes by the new route.
        if let Route::Waiting(fds) = before {
            fds.into_iter().for_each(|(fd, of_guest)| take(&self.route, fd, of_guest));
        }
        started.map(drop)
    }

    /// Replaces the modules. On error the old ones stay.
    fn load(&self, list: Vec<modules::ModuleConfig>) -> Result<(), ModulesError> {
        // Here, and not while connections wait for it.
        for module in &list {
            let (wasm, hash) = engine::read_wasm(&module.name, &module.path)?;
            if hash == module.hash {
                engine::compile(&module.name, &wasm, &hash, &self.config.code_dir)?;
            }
        }
        let names = list.iter().map(|module| module.name.clone()).collect();
        let now = lock(&self.state).modules.clone();
        match now {
            Some(modules) => {
                modules.load(list.clone())?;
                lock(&self.state).list = list;
            }
            None => self.begin(list, self.open_ring())?,
        }
        lock(&self.state).names = names;
        Ok(())
    }

    fn stop(&self) {
        drop(lock(&self.listener).take());
        *lock(&self.route) = Route::Closed;
        let modules = lock(&self.state).modules.take();
        modules.into_iter().for_each(|modules| modules.stop());
    }
}

impl Modules {
    /// Makes the modules of a config; none is started. `charge`: how a VM is charged.
    pub fn new(config: &Config, charge: &dyn Fn(&str) -> Charge) -> Self {
        let entry =
            |vm: &config::VmConfig| VmEntry::new(config, &vm.name, charge(&vm.name)).map(Arc::new);
        let change = Arc::new(Mutex::new(Change { stopped: false }));
        let vms = config.vms.iter().filter_map(entry).collect();
        Self { vms, change, beginner: Mutex::default() }
    }

    /// Starts all modules, one VM after the other, and does not wait. A failure is logged, and
    /// harms no other VM.
    pub fn begin(&self) {
        if self.vms.is_empty() {
            return;
        }
        // Before anything is compiled, for a guest that is quicker than that.
        let ready = |vm: &Arc<VmEntry>| {
            vm.listen();
            (Arc::clone(vm), vm.open_ring())
        };
        let vms: Vec<_> = self.vms.iter().map(ready).collect();
        let change = Arc::clone(&self.change);
        let begin = move || {
            for (vm, ring) in vms {
                let change = lock(&change);
                if change.stopped {
                    return;
                }
                if let Err(e) = vm.begin(vm.config.modules.clone(), ring) {
                    tracing::error!(vm = %vm.config.vm, "its modules are not started: {e}");
                }
            }
        };
        match std::thread::Builder::new().name("modules".into()).spawn(begin) {
            Ok(thread) => *lock(&self.beginner) = Some(thread),
            Err(e) => tracing::error!("modules: starting a thread: {e}"),
        }
    }

    fn find(&self, vm: &str) -> Option<&Arc<VmEntry>> {
        self.vms.iter().find(|entry| entry.config.vm == vm)
    }

    /// A VM that has modules.
    fn found(&self, vm: &str) -> Result<&Arc<VmEntry>, PlaneError> {
        let none = || PlaneError::Conflict(format!("VM {vm} has no [vm.modules]"));
        self.find(vm).ok_or_else(none)
    }

    /// Services of a VM's vsock port: the modules' port, when the VM has some.
    pub fn services(&self, vm: &str) -> impl Iterator<Item = HostService> {
        self.find(vm).map(|entry| entry.service()).into_iter()
    }

    /// Replaces a VM's modules by those of `config`, which is newer. On error the old ones stay.
    pub fn load(&self, vm: &str, config: &Config) -> Result<(), PlaneError> {
        let conflict = |what: &str| Err(PlaneError::Conflict(format!("VM {vm} {what}")));
        let Some(entry) = self.find(vm) else {
            return conflict("had no [vm.modules] when the daemon started: restart the daemon");
        };
        let (Some((used, _)), Some(list)) = (config.modules_of(vm), listed(config, vm)) else {
            return conflict("has no [vm.modules] in the config now: restart the daemon");
        };
        let same = used.dir == entry.config.state_dir && used.socket == entry.socket;
        if !same || used.ring != entry.ring || privileged(used) != entry.privileged {
            return conflict(
                "has another `dir`, `socket`, `guest_users` or `ring` in the config now: restart the \
                 daemon",
            );
        }
        let change = lock(&self.change);
        if change.stopped {
            return conflict("is being stopped");
        }
        entry.load(list).map_err(refused)?;
        tracing::info!(%vm, "modules loaded: {}", used.names.join(", "));
        Ok(())
    }

    /// Ends the modules of all VMs, at the same time.
    pub fn stop(&self) {
        // Whoever waits for a start holds the lock.
        for vm in &self.vms {
            lock(&vm.state).modules.iter().for_each(|modules| modules.begin_stop());
        }
        lock(&self.change).stopped = true;
        let beginner = lock(&self.beginner).take();
        if beginner.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread that starts modules panicked");
        }
        std::thread::scope(|scope| {
            for vm in &self.vms {
                scope.spawn(|| vm.stop());
            }
        });
    }

    /// State of all modules, or of those of one VM.
    pub fn status(&self, vm: Option<&str>) -> Vec<ModuleStatus> {
        let wanted = self.vms.iter().filter(|entry| vm.is_none_or(|vm| entry.config.vm == vm));
        // All are asked before any is waited for.
        let asked: Vec<_> = wanted.map(|entry| (entry, lock(&entry.state).ask())).collect();
        let until = Instant::now() + STATS_TIMEOUT;
        let told = |(entry, answer): (&Arc<VmEntry>, Option<show::Answer>)| {
            let told = answer.map(|answer| show::wait(&answer, until));
            lock(&entry.state).show(&entry.config.vm, told)
        };
        asked.into_iter().flat_map(told).collect()
    }

    /// Adds the modules' counters.
    pub fn metrics(&self, all: &mut Metrics) {
        self.status(None).iter().for_each(|module| show::metrics(module, all));
        for entry in &self.vms {
            let labels = vec![("vm", entry.config.vm.clone())];
            let dropped = lock(&entry.state).modules.as_ref().map_or(0, |m| m.dropped_lines());
            let help = "Lines of its process's log that were too many.";
            all.sample("millrace_module_log_lines_dropped_total", help, labels, dropped);
        }
    }
}
