//! Errors that keep the rules from being checked.

use std::io;
use std::path::PathBuf;

/// An error before any rule was checked.
#[derive(Debug, thiserror::Error)]
pub enum TidyError {
    /// A file or folder cannot be read.
    #[error("cannot read {}: {error}", path.display())]
    Read {
        /// File or folder.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// A generated page cannot be written.
    #[error("cannot write {}: {error}", path.display())]
    Write {
        /// Page.
        path: PathBuf,
        /// Cause.
        error: io::Error,
    },
    /// A reference page cannot be made of a source.
    #[error("reference: {path}: {text}")]
    Reference {
        /// Source.
        path: String,
        /// Reason.
        text: String,
    },
    /// `tidy.toml` is wrong.
    #[error("tidy.toml: {0}")]
    Config(#[from] toml::de::Error),
}
