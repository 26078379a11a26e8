//! Registry: memberships and plugged devices, which outlive the daemon.
//!
//! # Theory of operation
//! A [`Membership`] says that a VM takes part in channels, how its monitor is reached, and which
//! devices were plugged into it. It is [`Registry::put`] before a device is plugged and again once
//! it is gone, so that the next daemon finds at least what is there, and [`Registry::remove`]d with
//! the VM.
//!
//! [`FileRegistry`] keeps all of it in one JSON file for one host. Each change writes the whole
//! file beside the old one, flushes it and puts it in its place: a reader sees one or the other. A
//! file that is not ours, of another version or larger than the limit is an error, and left alone.
//!
//! # Limits
//! - 1,024 memberships ([`MAX_MEMBERSHIPS`]), 64 devices of each ([`MAX_DEVICES`]).
//! - 1 MiB of file ([`MAX_FILE_LEN_BYTES`]); names of 64 bytes, paths of 107
//!   ([`MAX_PATH_LEN_BYTES`]).
//! - A change waits for the disk, so the file belongs on a `tmpfs` (`/run`): channels do not
//!   outlive their host.

mod error;
mod file;
mod membership;

pub use error::RegistryError;
pub use file::FileRegistry;
pub use membership::{
    MAX_DEVICES, MAX_FILE_LEN_BYTES, MAX_MEMBERSHIPS, MAX_NAME_LEN_BYTES, MAX_PATH_LEN_BYTES,
    Membership, PluggedDevice, Registry,
};
