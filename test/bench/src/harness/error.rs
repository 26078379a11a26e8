//! Errors of a comparison.

use std::path::{Path, PathBuf};

/// An error of this crate. Texts name what failed, where, and the limit where there is one.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// A file of ours could not be read or written.
    #[error("{what} {path}: {source}", path = path.display())]
    File {
        /// Operation that failed, for example "write".
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A result file is not of the published format.
    #[error("{path}: not a result file: {source}", path = path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Place in the file, and reason.
        source: serde_json::Error,
    },
    /// A document has no place for the table.
    #[error(
        "{path}: needs one line `{begin}` and, below it, one line `{end}`",
        path = path.display()
    )]
    Markers {
        /// The document.
        path: PathBuf,
        /// First marker.
        begin: &'static str,
        /// Second marker.
        end: &'static str,
    },
    /// A table has no row of a comparison that the summary shows.
    #[error(
        "{path}: no row `{case}` against {peer} below `{section}`, as `bench table --document` writes it",
        path = path.display()
    )]
    NoTableRow {
        /// The document.
        path: PathBuf,
        /// First marker of the table.
        section: &'static str,
        /// Case name.
        case: &'static str,
        /// The peer's name.
        peer: &'static str,
    },
    /// A round gave a number that no ratio can be made of.
    #[error("{case}, round {round}, {side}: measured {value}, which is no rate above zero")]
    Value {
        /// Case name.
        case: String,
        /// Round, counted from 1; 0 is the one thrown away.
        round: u32,
        /// "ours" or "peer".
        side: &'static str,
        /// The number.
        value: f64,
    },
    /// Fewer rounds than a median needs.
    #[error("{case}: no complete round")]
    NoRounds {
        /// Case name.
        case: String,
    },
    /// The command line asks for a case that does not exist.
    #[error("no case is named {name}; there are: {known}")]
    UnknownCase {
        /// Name that was asked for.
        name: String,
        /// All names, comma separated.
        known: String,
    },
    /// The command line asks for a peer that does not exist.
    #[error("no peer's name begins with {name}; there are: {known}")]
    UnknownPeer {
        /// Name that was asked for.
        name: String,
        /// All names, comma separated.
        known: String,
    },
    /// Results of guests under KVM and of emulated ones in one document.
    #[error(
        "{path}: guests run by KVM in {kvm}, guests emulated (TCG) in {tcg}; their numbers do not \
         compare, so tables of one kind have a document of their own",
        path = path.display()
    )]
    MixedGuests {
        /// Document.
        path: PathBuf,
        /// Markers of the tables of guests under KVM.
        kvm: String,
        /// Markers of the tables of emulated guests.
        tcg: String,
    },
    /// Failure in a guest, QEMU or the daemon.
    #[error("{what}: {why}")]
    Lab {
        /// The step.
        what: String,
        /// The reason, with the tail of the console where there is one.
        why: String,
    },
    /// Accounting of CPU time failed.
    #[error("reading CPU time from {what}: {why}")]
    Accounting {
        /// File or process whose time was read.
        what: String,
        /// Why.
        why: String,
    },
}

impl BenchError {
    /// A failed file operation.
    pub fn file(what: &'static str, path: &Path, source: std::io::Error) -> BenchError {
        BenchError::File { what, path: path.to_owned(), source }
    }

    /// A failed step in the lab.
    pub fn lab(what: impl Into<String>, why: impl std::fmt::Display) -> BenchError {
        BenchError::Lab { what: what.into(), why: why.to_string() }
    }
}
