//! Errors of this crate.

use std::io;
use std::path::PathBuf;

/// An error of modules.
#[derive(Debug, thiserror::Error)]
pub enum ModulesError {
    /// The operating system refused.
    ///
    /// Remedy: mend what the cause says: space, permissions, or memory.
    #[error("{what}: {source}")]
    Io {
        /// Action that failed.
        what: String,
        /// Cause.
        source: io::Error,
    },
    /// A module's file is not the one that the config names.
    ///
    /// Remedy: install the file that the config means, or write its `sha256sum` into `sha256`.
    #[error("module {name}: {} has SHA-256 {found}, the config says {wanted}", path.display())]
    Hash {
        /// The module's name.
        name: String,
        /// Path of its file.
        path: PathBuf,
        /// The file's hash.
        found: String,
        /// The config's.
        wanted: String,
    },
    /// A module's file is too long.
    ///
    /// Remedy: check that `path` names a WebAssembly module; the limit stays.
    #[error("module {name}: {} has {len_bytes} bytes, more than {limit_bytes}", path.display())]
    TooLong {
        /// The module's name.
        name: String,
        /// Path of its file.
        path: PathBuf,
        /// Length of the file in bytes.
        len_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// A module cannot be compiled or loaded.
    ///
    /// Remedy: build the module anew with the SDK of this version, as the compiler's text says.
    #[error("module {name}: {why}")]
    Module {
        /// The module's name.
        name: String,
        /// Text of the compiler, or of the loader.
        why: String,
    },
    /// The process cannot be confined.
    ///
    /// Remedy: use Linux 5.13 or later with landlock in `lsm=`, and the unit's drop-in
    /// `packaging/millrace-modules.conf`.
    #[error("sandbox: {0}")]
    Sandbox(String),
    /// Daemon and process do not understand each other.
    ///
    /// Remedy: none by hand: the process is started again. Report it if it repeats.
    #[error("the process of modules: {0}")]
    Control(String),
}

impl ModulesError {
    /// Makes an error of an action, for `map_err`.
    pub(crate) fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        |source| Self::Io { what, source: source.into() }
    }

    /// Makes an error of the WebAssembly runtime's, for `map_err`.
    pub(crate) fn module(name: &str) -> impl FnOnce(wasmtime::Error) -> Self + use<> {
        let name = name.to_owned();
        move |why| Self::Module { name, why: format!("{why:#}") }
    }
}
