//! Who is where: what the daemon has to know again after it was started anew.
//!
//! # Theory of operation
//! A [`Membership`] says that a VM takes part in channels, how its monitor is reached, and which
//! devices were plugged into it. It is [`Registry::put`] before a device is plugged and again once it
//! is gone, so that the next daemon finds at least what is there, and [`Registry::remove`]d with the
//! VM.
//!
//! [`FileRegistry`] keeps all of it in one JSON file for one host. Each change writes the whole file
//! beside the old one, flushes it and puts it in its place: a reader sees one or the other. A file
//! that is not ours, of another version or larger than the limit is an error, and left alone.
//!
//! # Limits
//! - 1,024 memberships ([`MAX_MEMBERSHIPS`]), 64 devices of each ([`MAX_DEVICES`]).
//! - 1 MiB of file ([`MAX_FILE_LEN_BYTES`]); names of 64 bytes, paths of 107 ([`MAX_PATH_LEN_BYTES`]).
//! - A change waits for the disk, so the file belongs on a `tmpfs` (`/run`): channels do not outlive
//!   their host.

pub mod error;
mod file;

pub use error::RegistryError;
pub use file::FileRegistry;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

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

/// A VM that takes part in channels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Membership {
    /// The VM's name.
    pub vm: String,
    /// Its trust domain.
    pub domain: String,
    /// The socket of its monitor.
    pub qmp: PathBuf,
    /// What was plugged into it, or was about to be.
    pub devices: Vec<PluggedDevice>,
}

/// A device that was plugged into a VM, by the identifiers of its monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluggedDevice {
    /// The device.
    pub device: String,
    /// The memory object behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object: Option<String>,
    /// The character device behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chardev: Option<String>,
    /// The root port that it is in, once that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_port: Option<String>,
}

/// Keeps memberships beyond the daemon's life.
pub trait Registry: Send {
    /// The membership of a VM.
    fn membership(&self, vm: &str) -> Option<Membership>;

    /// All of them, by VM.
    fn memberships(&self) -> Vec<Membership>;

    /// Replaces the membership of a VM, wholly or not at all.
    ///
    /// # Errors
    /// Over a limit; the place where it is kept does not take it.
    fn put(&mut self, membership: Membership) -> Result<(), RegistryError>;

    /// Drops the membership of a VM; none is no error.
    ///
    /// # Errors
    /// The place where it is kept does not take it.
    fn remove(&mut self, vm: &str) -> Result<(), RegistryError>;
}
