//! Memberships, their limits, and the interface of their stores.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::error::RegistryError;

/// Most memberships.
pub const MAX_MEMBERSHIPS: usize = 1024;
/// Most devices of a VM: its doorbell, the memory of 31 peers, and room.
pub const MAX_DEVICES: usize = 64;
/// Most bytes of the file.
pub const MAX_FILE_LEN_BYTES: u64 = 1 << 20;
/// Most bytes of a name or an identifier.
pub const MAX_NAME_LEN_BYTES: usize = 64;
/// Most bytes of a monitor's path: what a Unix socket can have.
pub const MAX_PATH_LEN_BYTES: usize = 107;

/// Membership of a VM that takes part in channels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Membership {
    /// Name of the VM.
    pub vm: String,
    /// Trust domain of the VM.
    pub domain: String,
    /// Socket of the VM's monitor.
    pub qmp: PathBuf,
    /// Devices that were plugged into the VM, or were about to be.
    pub devices: Vec<PluggedDevice>,
}

/// Device that was plugged into a VM, by the identifiers of its monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluggedDevice {
    /// Id of the device.
    pub device: String,
    /// Id of the memory object behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// Id of the character device behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chardev: Option<String>,
    /// Id of the root port that it is in, once that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_port: Option<String>,
}

/// Store of memberships that outlives the daemon.
pub trait Registry: Send {
    /// Returns the membership of a VM.
    fn membership(&self, vm: &str) -> Option<Membership>;

    /// Returns all memberships, by VM.
    fn memberships(&self) -> Vec<Membership>;

    /// Replaces the membership of a VM, wholly or not at all.
    ///
    /// # Errors
    /// Over a limit; the store does not take it.
    fn put(&mut self, membership: Membership) -> Result<(), RegistryError>;

    /// Drops the membership of a VM; none is no error.
    ///
    /// # Errors
    /// The store does not take it.
    fn remove(&mut self, vm: &str) -> Result<(), RegistryError>;
}
