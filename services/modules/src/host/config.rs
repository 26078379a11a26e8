//! Modules of a VM, as the config has them.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use crate::control::{DiskUse, RingSetup};
use crate::engine::Hash;

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
    /// Whether no process is started before [`crate::VmModules::resume`].
    pub drained: bool,
}
