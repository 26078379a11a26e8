//! Errors of a run.

use std::io;
use std::path::PathBuf;

/// An error of a run.
#[derive(Debug, thiserror::Error)]
pub enum FsxError {
    /// Bytes that were read are not those written.
    #[error("{0}")]
    Mismatch(String),
    /// An operation failed.
    #[error("worker {worker} operation {number}: {what}: {source}\n{history}")]
    Operation {
        /// Number of the worker.
        worker: usize,
        /// Number of the operation.
        number: u32,
        /// The operation.
        what: String,
        /// The operating system's answer.
        source: io::Error,
        /// The operations before it on the same range.
        history: String,
    },
    /// A file could not be opened, made or read.
    #[error("{what} {path}: {source}", path = path.display())]
    File {
        /// Operation that failed.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },
    /// A saved model is none.
    #[error("{path}: no saved model: {source}", path = path.display())]
    Model {
        /// The file.
        path: PathBuf,
        /// Fault of it.
        source: serde_json::Error,
    },
    /// Numbers that do not fit together.
    #[error("{0}")]
    Refused(String),
}

impl FsxError {
    /// Wraps an I/O error with what was being done to which file.
    pub fn file(what: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { what, path, source }
    }
}
