//! The assembly: sidecores, switches, vsock domains and ports, and the control API's plane on top.

mod accounts;
mod channels;
mod checked_start;
mod checks;
mod cores;
mod domains;
pub mod engine;
mod guard;
pub mod huge_pages;
mod modules;
mod pipes;
mod plane;
mod port;
mod renew;
mod renewals;
pub mod runtime_changes;
mod secret;
mod shortcuts;
mod status;
pub mod switches;
#[cfg(test)]
mod tests;
mod turned_away;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::time::{Duration, Instant};

use anyhow::Context;
use base::clock::{Clock, MonotonicClock};
use base::sync::lock;
use block::CheckProgress;
use config::{Config, DiskConfig, DiskFormat, PortConfig};
use control::plane::PlaneError;
use sidecore::{Accounts, Placer, Sidecore, VmId, Watchdog};
use tokio::sync::Notify;
use vhost_user::{SessionStore, VmShare};
use vsock::{Domain, VsockPortConfig};

use self::accounts::VmAccounts;
use self::channels::Channels;
use self::checks::Checks;
use self::cores::Core;
use self::domains::{Domains, Key};
use self::engine::Engine;
use self::guard::guarded;
use self::modules::Modules;
use self::pipes::Pipes;
use self::port::{Live, Port, Ports, full_name};
use self::renewals::Renewals;
use self::runtime_changes::RuntimeChanges;
use self::shortcuts::Shortcuts;
use self::switches::Switches;
use self::turned_away::TurnedAway;
use crate::process::describe;

/// How long the end of the daemon waits for requests in disks; systemd kills it after 30 s. What is
/// not answered then is taken again by the next daemon, once the kernel is done with it.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// State that changes when ports come and go. Its lock is held for the length of a change; listings
/// do not take it.
struct Change {
    config: Config,
    runtime_changes: RuntimeChanges,
    domains: Domains,
}

/// The running daemon.
pub struct Host {
    config_path: PathBuf,
    started: Instant,
    clock: Arc<dyn Clock>,
    cores: Vec<Core>,
    /// Frees sidecores that a doorbell blocks, for as long as the host is there.
    _watchdog: Watchdog,
    /// Accounts, one per VM with ports.
    accounts: VmAccounts,
    /// Moves workers between sidecores; ends with the host's stop.
    placer: Mutex<Option<Placer>>,
    /// Counter by which disks and domains take the sidecores in turn.
    next_core: AtomicUsize,
    switches: Switches,
    session_store: Arc<dyn SessionStore>,
    holder: Option<PathBuf>,
    change: Mutex<Change>,
    ports: Ports,
    pipes: Pipes,
    channels: Channels,
    modules: Modules,
    checks: Checks,
    renewals: Renewals,
    turned_away: TurnedAway,
    stop: Notify,
    forget: AtomicBool,
}

impl Host {
    /// Starts everything in `config`. A port that cannot be started is shown as broken, and does
    /// not keep the others from their VMs; sidecores and switches must start.
    pub fn start(
        config_path: PathBuf,
        config: Config,
        runtime_changes: RuntimeChanges,
        session_store: Arc<dyn SessionStore>,
        holder: Option<PathBuf>,
    ) -> anyhow::Result<Arc<Self>> {
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock);
        let (panicked, panics) = mpsc::channel();
        let (cores, limits) = cores::start(&config.sidecore, &clock, &panicked)?;
        let watchdog = Watchdog::start(cores.iter().map(|c| c.handle.clone()).collect())?;
        let handles: Vec<Sidecore> = cores.iter().map(|c| c.handle.clone()).collect();
        // With the other threads that stay: ports that come and go leave none.
        block::start_dropper();
        base::trim::start().context("starting the thread that gives memory back")?;
        huge_pages::start(config.daemon.huge_pages);
        let placer = Placer::start(handles.clone(), limits, Arc::clone(&clock))?;
        let active: Vec<&Core> = cores.iter().filter(|c| c.handle.is_active()).collect();
        let mut switches = Vec::new();
        for (i, wanted) in config.switches.iter().enumerate() {
            switches.push(switches::start(
                &config,
                wanted,
                &active[i % active.len()].handle,
                &clock,
            )?);
        }
        let next_core = AtomicUsize::new(switches.len());
        let ports = Ports::default();
        let shortcuts = Arc::<Shortcuts>::default();
        let channels = Channels::start(&config, &ports, Arc::clone(&shortcuts))?;
        let accounts = Arc::<Accounts>::default();
        let modules = Modules::new(&config, &|vm| accounts::charge(&accounts, &clock, vm));
        let host = Self {
            config_path,
            started: Instant::now(),
            clock,
            cores,
            _watchdog: watchdog,
            accounts: VmAccounts::new(Arc::clone(&accounts), handles),
            placer: Mutex::new(Some(placer)),
            next_core,
            switches: Switches::new(switches),
            session_store,
            holder,
            change: Mutex::new(Change { config, runtime_changes, domains: Domains::default() }),
            ports,
            pipes: Pipes::new(shortcuts, accounts),
            channels,
            modules,
            checks: Checks::default(),
            renewals: Renewals::default(),
            turned_away: TurnedAway::start()?,
            stop: Notify::new(),
            forget: AtomicBool::new(false),
        };
        let host = Arc::new(host);
        host.watch_workers(panics)?;
        let to_check = host.start_ports();
        host.modules.begin();
        host.begin_checks(to_check);
        Ok(host)
    }

    /// Starts all ports but those whose image must be checked, which it returns.
    fn start_ports(&self) -> Vec<Arc<Port>> {
        let mut to_check = Vec::new();
        let mut change = self.lock();
        let Change { config, runtime_changes, .. } = &mut *change;
        runtime_changes.restore(config);
        let all: Vec<(String, PortConfig)> = change
            .config
            .vms
            .iter()
            .flat_map(|vm| vm.ports().map(|p| (vm.name.clone(), p)))
            .collect();
        for (vm, config) in all {
            if let Some(progress) = checks::needed(&config) {
                to_check.push(self.ports.push(Port::checking(&vm, config, progress)));
                continue;
            }
            let live = self.start_port(&mut change, &vm, &config).map_err(|e| {
                let name = full_name(&vm, config.name());
                let why = describe(&e);
                tracing::error!(port = %name, "not started: {why}");
                why
            });
            let mode = change.config.daemon.socket_mode;
            self.add(Port::new(&vm, config, live).turn_away(&self.turned_away, mode));
        }
        to_check
    }

    /// Adds a port to the list.
    fn add(&self, port: Port) -> Arc<Port> {
        let port = self.ports.push(port);
        self.announce(&port);
        port
    }

    /// Tells the VM's channels of a port that was started.
    fn announce(&self, port: &Port) {
        if let Ok(live) = &port.live {
            self.channels.watch(&port.vm, live);
        }
        self.channels.ports_changed(&port.vm);
    }

    fn lock(&self) -> MutexGuard<'_, Change> {
        lock(&self.change)
    }

    fn placer(&self) -> MutexGuard<'_, Option<Placer>> {
        lock(&self.placer)
    }

    fn list(&self) -> Vec<Arc<Port>> {
        self.ports.list()
    }

    /// Whether there is such a VM. One with channels is for as long as the daemon: not asking the
    /// config leaves a change alone that is under way.
    fn known(&self, vm: &str) -> Result<(), PlaneError> {
        let known = self.channels.has(vm) || self.lock().config.vms.iter().any(|v| v.name == vm);
        known.then_some(()).ok_or(PlaneError::NotFound { what: "VM", name: vm.into() })
    }

    fn find(&self, what: &'static str, vm: &str, port: &str) -> Result<Arc<Port>, PlaneError> {
        let name = full_name(vm, port);
        let ports = self.list();
        ports
            .into_iter()
            .find(|p| p.vm == vm && p.config.name() == port)
            .ok_or(PlaneError::NotFound { what, name })
    }

    /// The active sidecores, beginning with the one whose turn it is.
    fn cores_in_turn(&self) -> Vec<Sidecore> {
        let mut active: Vec<Sidecore> =
            self.cores.iter().map(|c| c.handle.clone()).filter(Sidecore::is_active).collect();
        // There is always one.
        let count = active.len().max(1);
        active.rotate_left(self.next_core.fetch_add(1, Ordering::Relaxed) % count);
        active
    }

    /// Makes the device and serves it. On error, a panic included, nothing is left behind.
    fn start_port(
        &self,
        change: &mut Change,
        vm: &str,
        config: &PortConfig,
    ) -> anyhow::Result<Live> {
        let name = full_name(vm, config.name());
        let engine = guarded(|| self.engine(change, vm, &name, config))
            .inspect_err(|_| self.release_account(vm))?;
        self.serve_engine(change, vm, config, engine)
    }

    /// Serves a device that was made. On error it is dropped, and nothing is left behind.
    fn serve_engine(
        &self,
        change: &mut Change,
        vm: &str,
        config: &PortConfig,
        engine: Engine,
    ) -> anyhow::Result<Live> {
        let name = full_name(vm, config.name());
        let mode = change.config.daemon.socket_mode;
        let share = self.share(&change.config, vm);
        let serve = || {
            Live::serve(&name, engine.clone(), config.endpoint(), mode, share, &self.session_store)
        };
        let live = guarded(serve);
        if live.is_err() {
            self.drop_engine(change, vm, &engine);
            self.release_account(vm);
        }
        live
    }

    /// The share that a VM's ports have in common: that of the running ones, or a new one.
    fn share(&self, config: &Config, vm: &str) -> VmShare {
        let shares = self.ports.each_live(vm, |_, live| Some(live.share.clone()));
        shares.into_iter().next().unwrap_or_else(|| {
            let limit = config.vms.iter().find(|v| v.name == vm).and_then(|v| v.memory_limit_bytes);
            limit.map_or_else(VmShare::new, VmShare::with_memory_limit)
        })
    }

    /// Closes the account of a VM that has no port left.
    fn release_account(&self, vm: &str) {
        let is_used = |p: &Arc<Port>| p.vm == vm && (p.live.is_ok() || p.check.is_some());
        if !self.list().iter().any(is_used) {
            self.accounts.close(vm);
        }
    }

    fn engine(
        &self,
        change: &mut Change,
        vm: &str,
        name: &str,
        config: &PortConfig,
    ) -> anyhow::Result<Engine> {
        let account = self.accounts.open(&change.config, vm)?;
        match config {
            PortConfig::Net(net) => {
                let entry = self.living_switch(&change.config, &net.switch)?;
                entry.fit_uplink(&change.config, net.mtu);
                let engine = engine::net(name, account, net, &entry.switch)?;
                if let Engine::Net(port, _) = &engine {
                    self.pipes.restore(&change.config, vm, &self.ports, port)?;
                }
                Ok(engine)
            }
            PortConfig::Disk(disk) => self.open_disk(name, account, disk, CheckProgress::default()),
            PortConfig::Vsock(vsock) => {
                let key = Key::of(&change.config, vm);
                let mut services = self.pipes.services(&change.config, vm, &self.ports)?;
                services.extend(self.modules.services(vm));
                let port = VsockPortConfig {
                    vm: account,
                    services,
                    ..VsockPortConfig::new(name, vsock.cid, vsock.path.clone())
                };
                let make =
                    |config| Domain::new(&self.cores_in_turn()[0], config, Arc::clone(&self.clock));
                Ok(Engine::Vsock(change.domains.add_port(key, port, make)?))
            }
        }
    }

    fn open_disk(
        &self,
        name: &str,
        account: VmId,
        config: &DiskConfig,
        progress: CheckProgress,
    ) -> anyhow::Result<Engine> {
        let opening = engine::Opening {
            cores: &self.cores_in_turn(),
            clock: &self.clock,
            session_store: &*self.session_store,
            progress,
        };
        engine::disk(name, account, config, opening)
    }

    /// Takes a device off its switch or domain; a domain goes with its last port.
    fn drop_engine(&self, change: &mut Change, vm: &str, engine: &Engine) {
        let dropped = match engine {
            Engine::Net(port, switch) => switch.remove_port(port).map_err(anyhow::Error::from),
            Engine::Disk(_) => Ok(()),
            Engine::Vsock(port) => {
                let key = Key::of(&change.config, vm);
                change.domains.remove_port(&key, port.name()).map_err(anyhow::Error::from)
            }
        };
        if let Err(e) = dropped {
            tracing::error!(%vm, "taking a port off its engine: {}", describe(&e));
        }
    }

    /// How many ports there are, how many of them could not be started, and of how many the image
    /// is still being checked.
    pub fn counts(&self) -> (usize, usize, usize) {
        let ports = self.list();
        let checked = ports.iter().filter(|p| p.check.is_some()).count();
        (ports.len(), ports.iter().filter(|p| p.live.is_err()).count() - checked, checked)
    }

    /// Whether a sidecore hangs, and its VMs with it.
    pub fn is_stalled(&self) -> bool {
        self.cores.iter().any(|c| c.handle.is_stalled())
    }

    /// The names of all that the holder may have of ports: sessions, and memory of disks.
    pub fn names(&self) -> HashSet<String> {
        let ports = self.list();
        let sessions = ports.iter().map(|p| full_name(&p.vm, p.config.name()));
        let files = ports.iter().filter(|p| has_memory(&p.config));
        let files =
            files.map(|p| vhost_user::session_store::file_key(&full_name(&p.vm, p.config.name())));
        sessions.chain(files).collect()
    }

    /// Has the holder drop the memory of a disk that is gone for good.
    fn forget_memory(&self, port: &Port) {
        let name = full_name(&port.vm, port.config.name());
        if has_memory(&port.config)
            && let Err(e) = self.session_store.forget_file(&name)
        {
            tracing::warn!(port = %name, "the holder still has the disk's memory: {e}");
        }
    }

    /// Has the holder drop what an earlier daemon left there for a port that was not started.
    fn forget_session(&self, port: &Port) {
        let name = full_name(&port.vm, port.config.name());
        if let Err(e) = self.session_store.forget(&name) {
            tracing::warn!(port = %name, "the holder still has the session: {e}");
        }
    }

    /// Whether a stop was asked for that drops the sessions in the holder, too.
    pub fn forgets(&self) -> bool {
        self.forget.load(Ordering::Relaxed)
    }

    /// Waits until somebody asked over the API to stop.
    pub async fn stop_asked(&self) {
        self.stop.notified().await;
    }

    /// Ends every session, requests in flight finished, and the sidecores. With a holder the
    /// sessions stay there for the next daemon, unless a stop with `forget` was asked for.
    pub fn stop(&self) {
        let forget = self.forgets();
        // Keeps a late attach out while everything goes.
        let mut change = self.lock();
        self.channels.stop();
        self.pipes.stop();
        // In front of the ports: what modules say at the end still gets to the guests.
        self.modules.stop();
        self.checks.stop();
        // From here on none begins any more whose image is being checked.
        let ports = self.ports.take();
        for port in &ports {
            if let Ok(Live { engine: Engine::Disk(disk), .. }) = &port.live {
                disk.give_up_after(STOP_LIMIT);
            }
        }
        // All at once: one that is slow does not add its time to that of the others.
        for port in &ports {
            port.leave_socket();
            if let Ok(live) = &port.live {
                live.begin_stop(forget);
            }
        }
        for port in &ports {
            if let Ok(live) = &port.live {
                live.stop(forget);
            } else if forget {
                self.forget_session(port);
            }
            if forget {
                self.forget_memory(port);
            }
        }
        change.domains.clear();
        drop(self.placer().take());
        for core in &self.cores {
            core.handle.shutdown();
        }
        // Here, not with the host, which a check may have for long: it closes the images.
        drop(ports);
    }
}

/// Whether the bytes of its disk are in memory.
fn has_memory(config: &PortConfig) -> bool {
    matches!(config, PortConfig::Disk(disk) if matches!(disk.format, DiskFormat::Memory { .. }))
}
