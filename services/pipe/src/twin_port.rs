//! The network ports of a VM, each with the namespace of its twins and the journal of its
//! connections.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use base::counter::QueueStats;
use base::sync::lock;
use flow::{FlowWatch, Journal};
use net::NetPort;

use crate::error::PipeError;
use crate::namespace::Namespace;
use crate::port_flows::PortFlows;
use crate::twin::{Twin, TwinState};

/// MTU of a twin's TAP: the largest there is. Segments are as long as the connection's MSS says.
const TWIN_MTU: u16 = 65_521;

/// A network port with the namespace of its twins.
pub(crate) struct TwinPort {
    pub net: Arc<NetPort>,
    namespace: Namespace,
}

impl TwinPort {
    /// Connections of the port.
    pub fn flows(&self) -> PortFlows<'_> {
        PortFlows::new(&self.net)
    }

    /// Makes a twin that has sent `sent` already. The calling thread is in the namespace
    /// afterwards.
    pub fn make_twin(&self, state: &TwinState, sent: &[u8]) -> Result<Twin, PipeError> {
        self.namespace.add_address(state.local.ip())?;
        self.namespace.enter()?;
        Twin::create_with(state, sent)
    }
}

/// All ports of a VM that take pipes.
pub(crate) struct TwinPorts {
    vm: String,
    run_dir: PathBuf,
    /// Receiver of the switch's events about connections.
    watch: Arc<dyn FlowWatch>,
    ports: Mutex<Vec<Arc<TwinPort>>>,
}

impl TwinPorts {
    /// No ports yet. Journals lie in `run_dir`.
    pub fn new(vm: &str, run_dir: &Path, watch: Arc<dyn FlowWatch>) -> Self {
        let ports = Mutex::default();
        Self { vm: vm.to_owned(), run_dir: run_dir.to_owned(), watch, ports }
    }

    /// Ports at the moment.
    pub fn list(&self) -> Vec<Arc<TwinPort>> {
        lock(&self.ports).clone()
    }

    /// Brings the list up to date: `nets` are the VM's ports now.
    pub fn update(&self, nets: Vec<Arc<NetPort>>) {
        let mut ports = lock(&self.ports);
        ports.retain(|port| nets.iter().any(|net| Arc::ptr_eq(net, &port.net)));
        for net in nets {
            if ports.iter().any(|port| Arc::ptr_eq(&net, &port.net)) {
                continue;
            }
            // Packets have passed meanwhile: a journal that was not read before them is of no use.
            forget_journal(&self.run_dir, &net);
            self.add(&mut ports, net);
        }
    }

    /// Adds a port that has just been made, before its first packet, if the last daemon has left a
    /// journal: its connections that were shifted stay so.
    pub fn restore(&self, net: &Arc<NetPort>) {
        if journal_path(&self.run_dir, net).exists() {
            self.add(&mut lock(&self.ports), Arc::clone(net));
        }
    }

    /// Removes a port that will not come back, and the journal of its connections.
    pub fn forget(&self, net: &NetPort) {
        lock(&self.ports).retain(|port| port.net.name() != net.name());
        forget_journal(&self.run_dir, net);
    }

    /// Ends connections that lost their twins with the last daemon.
    pub fn end_broken_connections(&self) {
        for port in lock(&self.ports).iter() {
            let broken = port.flows().end_broken();
            if broken > 0 {
                let port = port.net.name();
                tracing::info!(port, broken, "connections lost their twins with the last daemon");
            }
        }
    }

    /// Removes all ports; their journals stay for the next daemon.
    pub fn clear(&self) {
        lock(&self.ports).clear();
    }

    fn add(&self, ports: &mut Vec<Arc<TwinPort>>, net: Arc<NetPort>) {
        match self.enable(&net) {
            Ok(port) => ports.push(Arc::new(port)),
            Err(error) => tracing::error!(port = net.name(), "no pipes on this port: {error}"),
        }
    }

    fn enable(&self, net: &Arc<NetPort>) -> Result<TwinPort, PipeError> {
        let (namespace, tap) = Namespace::new(&self.vm, TWIN_MTU)?;
        let path = journal_path(&self.run_dir, net);
        let journal = Journal::open(&path).map_err(|source| PipeError::Io {
            vm: self.vm.clone(),
            what: "opening the journal of a port's connections",
            source,
        })?;
        let watch = Arc::clone(&self.watch);
        PortFlows::new(net)
            .enable(watch, Box::new(tap), Arc::<QueueStats>::default(), Some(journal))
            .map_err(|source| PipeError::Port { port: net.name().to_owned(), source })?;
        Ok(TwinPort { net: Arc::clone(net), namespace })
    }
}

/// Removes the journal of a port's connections, if there is one.
pub(crate) fn forget_journal(run_dir: &Path, net: &NetPort) {
    // There is none, most often.
    let _ = std::fs::remove_file(journal_path(run_dir, net));
}

fn journal_path(run_dir: &Path, net: &NetPort) -> PathBuf {
    // Names of VMs and ports are checked to be fit for files.
    run_dir.join(format!("{}.flows", net.name().replace('/', "-")))
}
