//! The pipes of one VM: its agent, its threads, its twins.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

use base::counter::QueueStats;
use block::BlockPort;
use guest_abi::Reason;
use net::NetPort;
use net::flow::{FlowError, FlowWatch, Journal};

use crate::agent::{Agent, Session};
use crate::error::PipeError;
use crate::file::Source;
use crate::job::{Job, reason_of};
use crate::limits::{DEFAULT_MAX_PIPES, DEFAULT_THREADS, MAX_LEN_BYTES, STOP_TIMEOUT};
use crate::listing::PipeInfo;
use crate::message::{End, Request, Socket};
use crate::metrics::PipeStats;
use crate::namespace::Namespace;
use crate::pool::Pool;
use crate::twin::{Twin, TwinState};

/// Connections of agents that wait to be served: one, and one that takes its place.
const WAITING_AGENTS: usize = 2;

/// MTU of a twin's TAP: the largest there is. Segments are as long as the connection's MSS says.
const TWIN_MTU: u16 = 65_521;

/// How a VM's pipes are set up; [`PipesConfig::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct PipesConfig {
    /// The VM's name.
    pub vm: String,
    /// Most pipes at a time.
    pub max_pipes: u32,
    /// Threads that move bytes.
    pub threads: u16,
    /// A folder of the daemon's own, for what is to be known of connections after it was killed.
    pub run_dir: PathBuf,
}

impl PipesConfig {
    /// With the defaults.
    pub fn new(vm: impl Into<String>, run_dir: impl Into<PathBuf>) -> Self {
        Self {
            vm: vm.into(),
            max_pipes: DEFAULT_MAX_PIPES,
            threads: DEFAULT_THREADS,
            run_dir: run_dir.into(),
        }
    }
}

/// What a VM has at the moment.
pub trait Devices: Send + Sync {
    /// Its network ports.
    fn nets(&self) -> Vec<Arc<NetPort>>;
    /// Its disks.
    fn disks(&self) -> Vec<Arc<BlockPort>>;
}

/// A network port with the namespace of its twins.
pub(crate) struct TwinPort {
    pub net: Arc<NetPort>,
    pub namespace: TwinSpace,
}

/// Where the twins of a port live.
pub(crate) struct TwinSpace(Namespace);

impl TwinSpace {
    /// A twin; the calling thread is in the namespace afterwards.
    pub fn twin(&self, state: &TwinState) -> Result<Twin, PipeError> {
        self.0.add_address(state.local.ip())?;
        self.0.enter()?;
        Twin::create(state)
    }
}

/// See the module's text.
pub struct VmPipes {
    config: PipesConfig,
    devices: Arc<dyn Devices>,
    pool: Arc<Pool>,
    ports: Mutex<Vec<Arc<TwinPort>>>,
    stats: Arc<PipeStats>,
    tokens: AtomicU64,
    arrivals: SyncSender<Option<OwnedFd>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl std::fmt::Debug for VmPipes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VmPipes").field("config", &self.config).finish_non_exhaustive()
    }
}

impl VmPipes {
    /// Starts the threads; agents come through [`VmPipes::sink`].
    pub fn start(config: PipesConfig, devices: Arc<dyn Devices>) -> Result<Arc<Self>, PipeError> {
        let failed = |what| {
            let vm = config.vm.clone();
            move |source| PipeError::Io { vm, what, source }
        };
        let no_pool = failed("starting its threads");
        let no_acceptor = failed("starting the thread for its agents");
        let (pool, threads) = Pool::start(&config.vm, config.threads).map_err(no_pool)?;
        let (arrivals, arriving) = sync_channel(WAITING_AGENTS);
        let pipes = Arc::new(Self {
            config,
            devices,
            pool,
            ports: Mutex::default(),
            stats: Arc::default(),
            tokens: AtomicU64::new(1),
            arrivals,
            threads: Mutex::new(threads),
        });
        let own = Arc::downgrade(&pipes);
        let builder = std::thread::Builder::new().name(format!("agent {}", pipes.config.vm));
        match builder.spawn(move || accept(&own, &arriving)) {
            Ok(acceptor) => pipes.threads().push(acceptor),
            Err(error) => {
                pipes.stop();
                return Err(no_acceptor(error));
            }
        }
        Ok(pipes)
    }

    fn threads(&self) -> MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the agent's connections; never waits. One too many is closed.
    pub fn sink(&self) -> Arc<dyn Fn(OwnedFd) + Send + Sync> {
        let arrivals = self.arrivals.clone();
        Arc::new(move |fd| _ = arrivals.try_send(Some(fd)))
    }

    /// Counters.
    pub fn stats(&self) -> &PipeStats {
        &self.stats
    }

    /// Most pipes at a time.
    pub fn max_pipes(&self) -> u32 {
        self.config.max_pipes
    }

    /// The pipes under way.
    pub fn list(&self) -> Vec<PipeInfo> {
        self.pool.jobs().iter().map(|job| PipeInfo::of(job)).collect()
    }

    pub(crate) fn disks(&self) -> Vec<Arc<BlockPort>> {
        self.devices.disks()
    }

    fn ports(&self) -> MutexGuard<'_, Vec<Arc<TwinPort>>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An agent has come: the VM's network ports get what their connections need. Before the first one
    /// a VM costs nothing.
    pub(crate) fn welcome(&self) {
        self.stats.agents.fetch_add(1, Ordering::Relaxed);
        self.update_ports();
        for port in self.ports().iter() {
            let broken = port.net.flow_end_broken();
            if broken > 0 {
                let port = port.net.name();
                tracing::info!(port, broken, "connections lost their twins with the last daemon");
            }
        }
    }

    /// Ports came or went.
    pub fn ports_changed(&self) {
        if self.stats.agents.load(Ordering::Relaxed) > 0 {
            self.update_ports();
        }
    }

    /// Before the first packet of a port that has just been made: its connections that were shifted
    /// under the last daemon stay so.
    pub fn restore(&self, net: &Arc<NetPort>) {
        if self.journal_path(net).exists() {
            self.add_port(&mut self.ports(), Arc::clone(net));
        }
    }

    /// The port will not come back: nothing is to be known of its connections.
    pub fn forget(&self, net: &NetPort) {
        self.ports().retain(|port| port.net.name() != net.name());
        // There is none if no agent came.
        let _ = std::fs::remove_file(self.journal_path(net));
    }

    fn journal_path(&self, net: &NetPort) -> PathBuf {
        // Names of VMs and ports are checked to be fit for files.
        self.config.run_dir.join(format!("{}.flows", net.name().replace('/', "-")))
    }

    fn update_ports(&self) {
        let nets = self.devices.nets();
        let mut ports = self.ports();
        ports.retain(|port| nets.iter().any(|net| Arc::ptr_eq(net, &port.net)));
        for net in nets {
            if ports.iter().any(|port| Arc::ptr_eq(&net, &port.net)) {
                continue;
            }
            self.add_port(&mut ports, net);
        }
    }

    fn add_port(&self, ports: &mut Vec<Arc<TwinPort>>, net: Arc<NetPort>) {
        match self.enable(&net) {
            Ok(port) => ports.push(Arc::new(port)),
            Err(error) => tracing::error!(port = net.name(), "no pipes on this port: {error}"),
        }
    }

    fn enable(&self, net: &Arc<NetPort>) -> Result<TwinPort, PipeError> {
        let (namespace, tap) = Namespace::new(&self.config.vm, TWIN_MTU)?;
        let watch = Arc::clone(&self.pool) as Arc<dyn FlowWatch>;
        let journal = Journal::open(&self.journal_path(net)).map_err(|source| PipeError::Io {
            vm: self.config.vm.clone(),
            what: "opening the journal of a port's connections",
            source,
        })?;
        net.enable_pipes(watch, Box::new(tap), Arc::<QueueStats>::default(), Some(journal))
            .map_err(|source| PipeError::Port { port: net.name().to_owned(), source })?;
        Ok(TwinPort { net: Arc::clone(net), namespace: TwinSpace(namespace) })
    }

    /// Begins a pipe.
    pub(crate) fn begin(
        &self,
        agent: &Arc<Agent>,
        id: u64,
        request: Request,
        disks: &[Arc<BlockPort>],
    ) -> Result<(), Reason> {
        if self.pool.len() >= self.config.max_pipes as usize {
            return Err(Reason::TooMany);
        }
        let Request { source, sink, len_bytes } = request;
        let (End::File { disk, extents }, End::Socket(socket)) = (source, sink) else {
            return Err(Reason::PairUnsupported);
        };
        if len_bytes > MAX_LEN_BYTES {
            return Err(Reason::Malformed);
        }
        let disk = disks.get(disk as usize).ok_or(Reason::NoDisk)?;
        let image = disk.image().map_err(|_| Reason::DiskFormat)?;
        let source = Source::new(image.file, image.len_bytes, extents, len_bytes)
            .map_err(|_| Reason::BadExtents)?;
        let token = self.tokens.fetch_add(1, Ordering::Relaxed);
        let port = self.port_of(&socket, token)?;
        self.stats.asked.fetch_add(1, Ordering::Relaxed);
        let agent = (id, Arc::clone(agent));
        let stats = Arc::clone(&self.stats);
        self.pool.add(Job::new(token, agent, port, socket, source, len_bytes, stats));
        Ok(())
    }

    /// The port that the connection goes through; it is reserved for the pipe from now on.
    fn port_of(&self, socket: &Socket, token: u64) -> Result<Arc<TwinPort>, Reason> {
        let ports = self.ports().clone();
        for port in ports {
            match port.net.flow_snapshot(socket.key, socket.end.sent_bytes.get(), token) {
                Ok(_) => return Ok(port),
                Err(FlowError::Unknown | FlowError::Off) => {}
                Err(error) => return Err(reason_of(error)),
            }
        }
        Err(Reason::NoFlow)
    }

    /// A pipe that does not begin.
    pub(crate) fn refuse(&self, agent: &Agent, id: u64, reason: Reason) {
        self.stats.end(reason, 0, std::time::Duration::ZERO);
        agent.done(id, 0, reason);
    }

    /// Ends the agent's pipe of that id, or all of its pipes.
    pub(crate) fn cancel(&self, agent: &Agent, id: Option<u64>, reason: Reason) {
        for job in self.pool.jobs() {
            if job.is_of(agent, id) {
                job.cancel(reason);
                self.pool.nudge(job.token);
            }
        }
    }

    /// Ends everything: pipes hand their connections back where they are, and those that cannot in time
    /// lose them. Connections that are shifted stay so under the next daemon.
    pub fn stop(&self) {
        self.pool.drain(Reason::HostGone, STOP_TIMEOUT);
        // Full only with agents that wait: the acceptor takes them first.
        let _ = self.arrivals.send(None);
        self.pool.stop();
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            // One that panicked has told so.
            let _ = thread.join();
        }
        // The switch goes on shifting until the ports' sessions have ended.
        self.ports().clear();
    }
}

/// One agent at a time: a new one takes the place of the last.
fn accept(pipes: &Weak<VmPipes>, arriving: &Receiver<Option<OwnedFd>>) {
    let mut current: Option<(Arc<Agent>, JoinHandle<()>)> = None;
    while let Ok(arrival) = arriving.recv() {
        if let Some((agent, thread)) = current.take() {
            agent.close();
            let _ = thread.join();
        }
        let (Some(fd), Some(pipes)) = (arrival, pipes.upgrade()) else { return };
        let vm = pipes.config.vm.clone();
        let session = match Session::new(fd) {
            Ok(session) => session,
            Err(error) => {
                tracing::warn!(%vm, "the agent's stream: {error}");
                continue;
            }
        };
        let agent = Arc::clone(&session.agent);
        let serve = move || {
            let agent = Arc::clone(&session.agent);
            let end = session.serve(&pipes);
            tracing::info!(vm = %pipes.config.vm, "the agent has gone: {end}");
            pipes.cancel(&agent, None, Reason::Cancelled);
        };
        match std::thread::Builder::new().name("agent".into()).spawn(serve) {
            Ok(thread) => current = Some((agent, thread)),
            Err(error) => tracing::warn!(%vm, "a thread for the agent: {error}"),
        }
    }
}
