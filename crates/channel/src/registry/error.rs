//! What can be wrong with what is kept.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why the registry could not be read or changed.
#[derive(Debug, Error)]
pub enum RegistryError {
    /// The operating system refused something.
    #[error("registry {path}: {what}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The file is not a registry of this version.
    #[error("registry {path}: {why}", path = path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// More than can be kept.
    #[error("registry {path}: {what} is {value}; the limit is {limit}", path = path.display())]
    TooMuch {
        /// The file.
        path: PathBuf,
        /// What there is too much of.
        what: String,
        /// How much it would be.
        value: u64,
        /// Most of it.
        limit: u64,
    },
}
