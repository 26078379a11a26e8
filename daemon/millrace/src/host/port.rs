//! One port of the daemon: its config, its device, its session.

use std::sync::{Arc, Mutex, RwLock};

use base::counter::QueueStats;
use base::sync::{lock, read, write};
use block::CheckProgress;
use config::{EndpointConfig, PortConfig, SocketMode};
use vhost_user::{Endpoint, PortServer, PortStatus, SessionStore, SharedRegion, VmShare};

use super::engine::Engine;
use super::turned_away::{Closed, TurnedAway};

/// A port that runs.
pub struct Live {
    /// The engine's side.
    pub engine: Engine,
    /// Counters, queue by queue.
    pub stats: Vec<Arc<QueueStats>>,
    /// The session's side; none once stopped.
    server: Mutex<Option<PortServer>>,
    /// Share that all ports of its VM have in common.
    pub share: VmShare,
}

/// A port: running, with the reason why it could not be started, or not yet started.
pub struct Port {
    /// VM of the port.
    pub vm: String,
    /// Config of the port.
    pub config: PortConfig,
    /// The running port, or why it does not run.
    pub live: Result<Live, String>,
    /// Progress of the check of its image; none once that is over, or if there is none.
    pub check: Option<CheckProgress>,
    /// Socket while the port does not run.
    closed: Mutex<Option<Closed>>,
}

impl Port {
    /// Makes a port that was started, or was not.
    pub fn new(vm: &str, config: PortConfig, live: Result<Live, String>) -> Self {
        Self { vm: vm.into(), config, live, check: None, closed: Mutex::default() }
    }

    /// Makes a port that starts when its image has been checked.
    pub fn checking(vm: &str, config: PortConfig, check: CheckProgress) -> Self {
        let why = "its image is being checked".into();
        let (live, check) = (Err(why), Some(check));
        Self { vm: vm.into(), config, live, check, closed: Mutex::default() }
    }

    /// Turns front ends away, if it was not started, at a socket of this mode.
    pub fn turn_away(self, away: &TurnedAway, mode: u32) -> Self {
        if let (Err(why), None) = (&self.live, &self.check) {
            let name = full_name(&self.vm, self.config.name());
            let closed = away.listen(&name, self.config.endpoint(), mode, why);
            *lock(&self.closed) = closed;
        }
        self
    }

    /// Frees the socket of a port that was not started.
    pub fn leave_socket(&self) {
        drop(lock(&self.closed).take());
    }
}

/// The daemon's ports, in the order in which they came. Listings do not wait for changes.
#[derive(Clone, Default)]
pub struct Ports(Arc<RwLock<Vec<Arc<Port>>>>);

impl Ports {
    /// Lists all ports.
    pub fn list(&self) -> Vec<Arc<Port>> {
        read(&self.0).clone()
    }

    /// Collects what `pick` finds at a VM's running ports.
    pub fn each_live<T>(&self, vm: &str, pick: impl Fn(&Port, &Live) -> Option<T>) -> Vec<T> {
        let ports = self.list();
        let own = ports.iter().filter(|port| port.vm == vm);
        own.filter_map(|port| pick(port, port.live.as_ref().ok()?)).collect()
    }

    /// Adds a port.
    pub fn push(&self, port: Port) -> Arc<Port> {
        let port = Arc::new(port);
        let mut ports = write(&self.0);
        ports.push(Arc::clone(&port));
        port
    }

    /// Whether the port is listed.
    pub fn has(&self, port: &Arc<Port>) -> bool {
        self.list().iter().any(|other| Arc::ptr_eq(other, port))
    }

    /// Puts a port in the place of another, if that is listed.
    pub fn replace(&self, old: &Arc<Port>, new: Port) -> Arc<Port> {
        let new = Arc::new(new);
        let mut ports = write(&self.0);
        if let Some(place) = ports.iter_mut().find(|other| Arc::ptr_eq(other, old)) {
            *place = Arc::clone(&new);
        }
        new
    }

    /// Takes all ports off the list.
    pub fn take(&self) -> Vec<Arc<Port>> {
        std::mem::take(&mut write(&self.0))
    }

    /// Takes a port off the list.
    pub fn remove(&self, port: &Arc<Port>) {
        let mut ports = write(&self.0);
        ports.retain(|other| !Arc::ptr_eq(other, port));
    }
}

/// Name that engines, logs and the holder use.
pub fn full_name(vm: &str, port: &str) -> String {
    format!("{vm}/{port}")
}

impl Live {
    /// Serves `engine`'s device on its socket.
    pub fn serve(
        name: &str,
        engine: Engine,
        endpoint: &EndpointConfig,
        socket_mode: u32,
        share: VmShare,
        session_store: &Arc<dyn SessionStore>,
    ) -> anyhow::Result<Self> {
        let socket = endpoint.socket.clone();
        let config = vhost_user::PortConfig {
            name: name.into(),
            endpoint: match endpoint.mode {
                SocketMode::Listen => Endpoint::Listen(socket),
                SocketMode::Dial => Endpoint::Dial(socket),
            },
            socket_mode,
            share: share.clone(),
        };
        let stats = engine.queue_stats();
        let server = vhost_user::serve_port(
            config,
            engine.device(),
            stats.clone(),
            Arc::clone(session_store),
        )?;
        Ok(Self { engine, stats, server: Mutex::new(Some(server)), share })
    }

    /// Status of the session; none once stopped.
    pub fn status(&self) -> Option<PortStatus> {
        let server = lock(&self.server);
        server.as_ref().map(PortServer::status)
    }

    /// The connected front end, if there is one: its session's number, and the memory that it
    /// shares.
    pub fn session(&self) -> Option<(u64, Arc<[SharedRegion]>)> {
        let server = lock(&self.server);
        let server = server.as_ref()?;
        let memory = server.memory()?;
        Some((server.status().sessions, memory))
    }

    /// Calls `watcher`, which must not wait, when a front end comes, goes, or shares other memory.
    pub fn watch_memory(&self, watcher: Arc<dyn Fn() + Send + Sync>) {
        let server = lock(&self.server);
        if let Some(server) = server.as_ref() {
            server.watch_memory(watcher);
        }
    }

    /// Begins the end that [`Live::stop`] waits for.
    pub fn begin_stop(&self, forget: bool) {
        let server = lock(&self.server);
        if let Some(server) = server.as_ref() {
            server.begin_stop(forget);
        }
    }

    /// Ends the session; with a holder it is left there for the next daemon, unless `forget`.
    pub fn stop(&self, forget: bool) {
        let server = lock(&self.server).take();
        match server {
            Some(server) if forget => server.stop_and_forget(),
            Some(server) => server.stop(),
            None => {}
        }
    }
}
