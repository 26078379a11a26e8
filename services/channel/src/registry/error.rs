//! Errors of the registry.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Reason why the registry could not be read or changed.
#[derive(Debug, Error)]
pub enum RegistryError {
    /// The operating system refused something.
    ///
    /// Remedy: mend what the cause says: space, or permissions of `run_dir`.
    #[error("registry {path}: {what}: {source}", path = path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// Action that failed.
        what: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// The file is not a registry of this version.
    ///
    /// Remedy: stop the daemon while no VM of the domain runs, and remove the file: it is of
    /// another version, or damaged.
    #[error("registry {path}: {why}", path = path.display())]
    Foreign {
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        why: String,
    },
    /// The registry would be over a limit.
    ///
    /// Remedy: take VMs out of the domain.
    #[error("registry {path}: {what} is {value}; the limit is {limit}", path = path.display())]
    TooMuch {
        /// Path of the file.
        path: PathBuf,
        /// Name of the number.
        what: String,
        /// Value of the number.
        value: u64,
        /// Limit of the number.
        limit: u64,
    },
}
