//! Settings of a VM's pipes, and what they ask of the VM.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use block::BlockPort;
use net::NetPort;
use sidecore::Account;

use crate::limits::{DEFAULT_MAX_PIPES, DEFAULT_THREADS};

/// Settings of a VM's pipes; [`PipesConfig::new`] has the defaults.
#[derive(Debug, Clone)]
pub struct PipesConfig {
    /// The VM's name.
    pub vm: String,
    /// Most pipes at a time.
    pub max_pipes: u32,
    /// Threads that move bytes.
    pub threads: u16,
    /// The daemon's own folder for journals of connections, which outlive it when it is killed.
    pub run_dir: PathBuf,
    /// The secret that the VM's agent must have. Empty: any program that connects from a low port
    /// of the guest is taken for the agent.
    pub secret: Secret,
}

/// The secret of a VM's agent. Never shown.
#[derive(Clone, Default)]
pub struct Secret(pub Vec<u8>);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_empty() { "none" } else { "..." })
    }
}

impl PipesConfig {
    /// Settings with the defaults.
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

/// A VM's ports at the moment, and the ways of its packets.
pub trait Devices: Send + Sync {
    /// Network ports of the VM.
    fn nets(&self) -> Vec<Arc<NetPort>>;
    /// Disks of the VM.
    fn disks(&self) -> Vec<Arc<BlockPort>>;
    /// Account of the VM, which pays for its pipes; none: it has no port any more.
    fn account(&self) -> Option<Arc<Account>>;
    /// Whether packets between the VM and that address can go past its network ports, or could at
    /// some time since `since_ns` of [`base::clock::MonotonicClock`].
    fn has_way_past(&self, remote: IpAddr, since_ns: u64) -> bool;
}
