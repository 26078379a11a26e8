//! Trust domain: one worker on one sidecore that serves all its vsock ports.

use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use base::clock::Clock;
use base::sync::lock;
use sidecore::{Sidecore, WorkerRef};

use crate::device::VsockPort;
use crate::engine::VsockEngine;
use crate::error::VsockError;
use crate::limits::{DEFAULT_DOMAIN_BUFFER_BYTES, MAX_PORTS};
use crate::metrics::VsockStats;
use crate::port::PortSpec;
use crate::port_config::{VsockPortConfig, check, in_range};
use crate::unix_socket::{Listener, ProgramSockets};

/// Configuration of a domain; [`DomainConfig::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct DomainConfig {
    /// Name, for errors and logs.
    pub name: String,
    /// Whether its guests may connect to each other.
    pub guest_to_guest: bool,
    /// Most memory for the buffers of all connections.
    pub max_buffer_bytes: u64,
}

impl DomainConfig {
    /// Makes the configuration of a domain with the default limit.
    pub fn new(name: impl Into<String>, guest_to_guest: bool) -> Self {
        Self { name: name.into(), guest_to_guest, max_buffer_bytes: DEFAULT_DOMAIN_BUFFER_BYTES }
    }
}

/// Trust domain of guests. Dropping it takes the worker off its sidecore and closes all
/// connections.
#[derive(Debug)]
pub struct Domain {
    name: String,
    worker: WorkerRef<VsockEngine>,
    ports: Mutex<Vec<Arc<VsockPort>>>,
}

impl Domain {
    /// Puts a worker for the domain on `core`; `clock` is the sidecore's.
    pub fn new(
        core: &Sidecore,
        config: DomainConfig,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, VsockError> {
        let io = |what| {
            let name = config.name.clone();
            move |source| VsockError::Io { name, what, source }
        };
        let engine =
            VsockEngine::new(config.guest_to_guest, config.max_buffer_bytes, clock.now_ns())
                .map_err(io("making its epoll set"))?;
        let worker = core.add_named(format!("vsock {}", config.name), engine)?;
        worker
            .call(|engine, watcher| watcher.watch(engine.sockets.as_raw_fd()))?
            .map_err(io("watching its epoll set"))?;
        Ok(Self { name: config.name, worker, ports: Mutex::new(Vec::new()) })
    }

    /// Name of the domain.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Adds a guest; its Unix socket listens on return (mode 0600). Fails on a CID or name that is
    /// taken, a number outside its limits, or a path that is in use.
    pub fn add_port(&self, config: VsockPortConfig) -> Result<Arc<VsockPort>, VsockError> {
        check(&config)?;
        let mut ports = lock(&self.ports);
        in_range(&self.name, "number of ports", ports.len() as u64 + 1, 1, MAX_PORTS as u64)?;
        if let Some(other) = ports.iter().find(|p| p.cid() == config.cid || p.name() == config.name)
        {
            return Err(VsockError::CidTaken {
                name: config.name,
                cid: config.cid,
                taken_by: other.name().to_owned(),
            });
        }
        let listener = match config.host_connects {
            true => Some(Listener::bind(&config.name, &config.socket)?),
            false => None,
        };
        let programs = ProgramSockets::at(&config.name, &config.socket)?;
        let stats = Arc::new(VsockStats::default());
        let spec = PortSpec {
            // `check` has seen that it fits.
            vm: config.vm,
            cid: config.cid as u32,
            programs,
            max_connections: config.max_connections,
            max_half_open: config.max_half_open,
            buffer_bytes: config.buffer_bytes,
            host_ports: config.host_ports,
            services: config.services,
            listener,
            stats: Arc::clone(&stats),
        };
        let id = self.worker.call(move |engine, _| engine.add_port(spec))?.map_err(|source| {
            let what = "watching its Unix socket";
            VsockError::Io { name: config.name.clone(), what, source }
        })?;
        let port = VsockPort::new(config.name, config.cid, id, self.worker.clone(), stats);
        let port = Arc::new(port);
        ports.push(Arc::clone(&port));
        Ok(port)
    }

    /// Removes a guest: its connections end, its Unix socket goes. Its session should have been
    /// ended before; a session that is still there finds its device failing.
    pub fn remove_port(&self, name: &str) -> Result<(), VsockError> {
        let mut ports = lock(&self.ports);
        let Some(at) = ports.iter().position(|p| p.name() == name) else {
            return Err(VsockError::NoPort(name.to_owned()));
        };
        let port = ports.remove(at);
        vhost_user::device::Device::reset(&*port);
        let id = port.id();
        self.worker.call(move |engine, _| engine.remove_port(id))?;
        Ok(())
    }

    /// Ports of the domain.
    pub fn ports(&self) -> Vec<Arc<VsockPort>> {
        lock(&self.ports).clone()
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // Already gone with its sidecore is what we want.
        let _ = self.worker.remove();
    }
}
