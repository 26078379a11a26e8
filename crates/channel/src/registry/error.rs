//! Errors of the registry.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Reason why the registry could not be read or changed.
#[derive(Debug, Error)]
pub enum RegistryError {
    /// The operating system refused something.
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
    #[error("registry {path}: {why}", path = path.display())]
    Foreign {
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        why: String,
    },
    /// The registry would be over a limit.
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
