//! The pipes of one VM: its agent, its threads, its twins.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use base::counter::QueueStats;
use block::{BlockPort, Placeholders};
use guest_abi::Reason;
use net::NetPort;
use net::flow::{FlowWatch, Journal};

use crate::agent::Agent;
use crate::arrivals::{self, Arrival};
use crate::disks::{Disks, Known, has_all};
use crate::error::PipeError;
use crate::given::Given;
use crate::job::{Job, TOKEN_STEP, Work};
use crate::limits::{
    DEFAULT_MAX_PIPES, DEFAULT_THREADS, MAX_BUFFERED, MAX_LEN_BYTES, MAX_SAID, STOP_TIMEOUT,
};
use crate::listing::PipeInfo;
use crate::message::{End, MessageError, Request, Said};
use crate::metrics::PipeStats;
use crate::namespace::Namespace;
use crate::places::{PlacedFile, Places, Probe};
use crate::pool::Pool;
use crate::supply::Room;
use crate::to_file::ToFile;
use crate::to_socket::ToSocket;
use crate::twin::{Twin, TwinState};

/// Connections of agents that wait to be heard out, and such that were.
const WAITING_AGENTS: usize = 16;

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
    /// What its agent must know; empty: whoever connects from a low port is the agent.
    pub secret: Secret,
}

/// What a VM's agent must know. Never shown.
#[derive(Clone, Default)]
pub struct Secret(pub Vec<u8>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_empty() { "none" } else { "..." })
    }
}

impl PipesConfig {
    /// With the defaults.
    pub fn new(vm: impl Into<String>, run_dir: impl Into<PathBuf>) -> Self {
        Self {
            vm: vm.into(),
            max_pipes: DEFAULT_MAX_PIPES,
            threads: DEFAULT_THREADS,
            run_dir: run_dir.into(),
            secret: Secret::default(),
        }
    }
}

/// What a VM has at the moment.
pub trait Devices: Send + Sync {
    /// Its network ports.
    fn nets(&self) -> Vec<Arc<NetPort>>;
    /// Its disks.
    fn disks(&self) -> Vec<Arc<BlockPort>>;
    /// Whether packets between the VM and that address can go past its network ports, or could at some
    /// time since `since_ns` of [`base::clock::MonotonicClock`].
    fn has_way_past(&self, remote: IpAddr, since_ns: u64) -> bool;
}

/// A network port with the namespace of its twins.
pub(crate) struct TwinPort {
    pub net: Arc<NetPort>,
    pub namespace: TwinSpace,
}

/// Where the twins of a port live.
pub(crate) struct TwinSpace(Namespace);

impl TwinSpace {
    /// A twin, with what was sent before; the calling thread is in the namespace afterwards.
    pub fn twin(&self, state: &TwinState, sent: &[u8]) -> Result<Twin, PipeError> {
        self.0.add_address(state.local.ip())?;
        self.0.enter()?;
        Twin::create_with(state, sent)
    }
}

/// See the module's text.
pub struct VmPipes {
    config: PipesConfig,
    pub(crate) devices: Arc<dyn Devices>,
    pool: Arc<Pool>,
    ports: Mutex<Vec<Arc<TwinPort>>>,
    stats: Arc<PipeStats>,
    pub(crate) places: Arc<Places>,
    /// Pipes that hold bytes in memory.
    buffered: Arc<AtomicUsize>,
    tokens: AtomicU64,
    arrivals: SyncSender<Arrival>,
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
        Namespace::tell_missing_rights(&config.vm);
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
            places: Arc::new(Places::new(&pool)),
            buffered: Arc::default(),
            pool,
            ports: Mutex::default(),
            stats: Arc::default(),
            tokens: AtomicU64::new(TOKEN_STEP),
            arrivals,
            threads: Mutex::new(threads),
        });
        let own = Arc::downgrade(&pipes);
        let builder = std::thread::Builder::new().name(format!("agent {}", pipes.config.vm));
        match builder.spawn(move || arrivals::accept(&own, arriving)) {
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
        Arc::new(move |fd| _ = arrivals.try_send(Arrival::Stream(fd)))
    }

    /// Counters.
    pub fn stats(&self) -> &PipeStats {
        &self.stats
    }

    pub(crate) fn vm(&self) -> &str {
        &self.config.vm
    }

    pub(crate) fn secret(&self) -> &[u8] {
        &self.config.secret.0
    }

    pub(crate) fn arrivals(&self) -> &SyncSender<Arrival> {
        &self.arrivals
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

    pub(crate) fn ports(&self) -> MutexGuard<'_, Vec<Arc<TwinPort>>> {
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
        self.leave_disks();
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

    /// A port of a VM without pipes was made: what another daemon knew of its connections is not true any
    /// more, should the VM have pipes again.
    pub fn forget_journal(run_dir: &Path, net: &NetPort) {
        // There is none, most often.
        let _ = std::fs::remove_file(journal_path(run_dir, net));
    }

    /// The port will not come back: nothing is to be known of its connections.
    pub fn forget(&self, net: &NetPort) {
        self.ports().retain(|port| port.net.name() != net.name());
        // There is none if no agent came.
        let _ = std::fs::remove_file(self.journal_path(net));
    }

    fn journal_path(&self, net: &NetPort) -> PathBuf {
        journal_path(&self.config.run_dir, net)
    }

    fn update_ports(&self) {
        let nets = self.devices.nets();
        let mut ports = self.ports();
        ports.retain(|port| nets.iter().any(|net| Arc::ptr_eq(net, &port.net)));
        for net in nets {
            if ports.iter().any(|port| Arc::ptr_eq(&net, &port.net)) {
                continue;
            }
            // Packets have passed meanwhile: a journal that was not read before them is of no use.
            Self::forget_journal(&self.config.run_dir, &net);
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
        known: &Known,
    ) -> Result<(), Reason> {
        if self.pool.len() >= self.config.max_pipes as usize {
            return Err(Reason::TooMany);
        }
        if request.len_bytes > MAX_LEN_BYTES {
            return Err(Reason::Malformed);
        }
        let ends = [PipeInfo::name(&request.source), PipeInfo::name(&request.sink)];
        let len_bytes = request.len_bytes;
        let token = self.tokens.fetch_add(TOKEN_STEP, Ordering::Relaxed);
        let mut disks = Disks::new(self, known);
        let work = self.work(token, request, &mut disks)?;
        let disks = disks.used;
        let used = disks.clone();
        self.stats.asked.fetch_add(1, Ordering::Relaxed);
        let (agent, stats) = ((id, Arc::clone(agent)), Arc::clone(&self.stats));
        let job = Job::new(token, agent, (ends, len_bytes), (work, disks), stats);
        if !self.pool.add(job) {
            return Err(Reason::HostGone);
        }
        // One may have been taken away before the pipe was there to be ended.
        if !has_all(&self.disks(), &used) {
            self.leave_disks();
        }
        Ok(())
    }

    /// Ends pipes of disks that the VM does not have any more.
    fn leave_disks(&self) {
        let live = self.disks();
        for job in self.pool.jobs() {
            if !has_all(&live, &job.disks) {
                job.cancel(Reason::NoDisk);
                self.pool.nudge(job.token);
            }
        }
    }

    /// What a pipe has to do, by its ends. A connection that is written is reserved.
    fn work(
        &self,
        token: u64,
        request: Request,
        disks: &mut Disks<'_>,
    ) -> Result<Box<dyn Work>, Reason> {
        let Request { source, sink, len_bytes, is_cached } = request;
        match (source, sink) {
            (End::File { disk, extents }, End::Socket(sink)) => {
                let source = disks.file(disk, extents, len_bytes, is_cached)?;
                let sink = self.sending(sink, token)?;
                Ok(Box::new(ToSocket::from_file(source, sink, len_bytes)))
            }
            (End::File { disk, extents }, End::Places(sink)) => {
                let source = disks.file(disk, extents, len_bytes, is_cached)?;
                let sink = self.placed(&sink, disks, token, PlacedFile::written)?;
                Ok(Box::new(ToFile::from_file(source, sink, len_bytes)))
            }
            (End::Socket(source), End::Socket(sink)) => {
                let mut sink = self.sending(sink, token)?;
                match self.connection(source, token) {
                    Ok(source) => Ok(Box::new(ToSocket::from_socket(source, sink, len_bytes))),
                    Err(reason) => {
                        // It is not reserved any more.
                        let _ = sink.finish();
                        Err(reason)
                    }
                }
            }
            (End::Socket(source), End::Places(sink)) => {
                let room = Room::take(&self.buffered, MAX_BUFFERED).ok_or(Reason::TooMany)?;
                let sink = self.placed(&sink, disks, token, PlacedFile::written)?;
                let source = self.connection(source, token)?;
                Ok(Box::new(ToFile::from_socket(source, sink, len_bytes, room)))
            }
            (End::Places(source), End::Socket(sink)) => {
                let room = Room::take(&self.buffered, MAX_BUFFERED).ok_or(Reason::TooMany)?;
                let file = self.placed(&source, disks, token, PlacedFile::read)?;
                let source = Given::new(file, len_bytes, is_cached);
                let sink = self.sending(sink, token)?;
                Ok(Box::new(ToSocket::from_given(source, sink, len_bytes, room)))
            }
            (End::Places(_), End::Places(_)) | (_, End::File { .. }) => {
                Err(Reason::PairUnsupported)
            }
        }
    }

    /// Placeholders on that disk are known from now on.
    pub(crate) fn serve_places(&self, disk: &BlockPort) -> Result<(), Reason> {
        let places = Arc::clone(&self.places) as Arc<dyn Placeholders>;
        disk.set_placeholders(places).map_err(|_| Reason::DiskFormat)
    }

    /// A self-test with placeholders that is about to come.
    pub(crate) fn expect(&self, probe: Option<Probe>) {
        self.places.expect(probe);
    }

    /// What an agent says of a pipe that is under way; of one that is over, nothing.
    pub(crate) fn hear(&self, agent: &Agent, id: u64, said: Said) -> Result<(), MessageError> {
        let Some(job) = self.pool.find(agent, id) else { return Ok(()) };
        if !job.say(said) {
            return Err(MessageError::TooMany { limit: MAX_SAID });
        }
        self.pool.nudge(job.token);
        Ok(())
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
        let _ = self.arrivals.send(Arrival::Stop);
        self.pool.stop();
        let threads = std::mem::take(&mut *self.threads());
        for thread in threads {
            // One that panicked has told so.
            let _ = thread.join();
        }
        self.pool.clear();
        // The switch goes on shifting until the ports' sessions have ended.
        self.ports().clear();
    }
}

fn journal_path(run_dir: &Path, net: &NetPort) -> PathBuf {
    // Names of VMs and ports are checked to be fit for files.
    run_dir.join(format!("{}.flows", net.name().replace('/', "-")))
}
