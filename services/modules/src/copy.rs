//! Copies of a module's files: taken while it serves, checked, and put in place.
//!
//! # Theory of operation
//! *What a copy is.* All files of one module of one VM, as they are between two calls of it. All
//! that was answered is in its files then (what promises to be durable was synced before that), so
//! the copy is what a kill of the process at that moment would have left: a module that survives
//! that survives a restore.
//!
//! *Taking one* ([`take`]) is like moving a VM's memory. The process logs which parts of which
//! files are written from now on; all files are copied; then what was written meanwhile is copied,
//! again and again, until that is little. Then the module is held still between two calls, the rest
//! is read into memory, and it goes on. That takes milliseconds; it goes on by itself after
//! [`HOLD_LEASE`], and the copy fails then. The daemon reads the files, through the kernel's page
//! cache as the module wrote them; no byte passes the process. Files are known by inode, so one
//! that is renamed meanwhile is not copied again, and one that could not be opened by its name,
//! being renamed, stays owed until the next round. A file that gets the inode of one that was
//! removed begins with no bytes, and each that it has was logged.
//!
//! *The stream* ([`format`]) has parts of files, later ones above earlier ones, then the names and
//! lengths, then a SHA-256 of all that. So it needs no room beside where it goes to, can be piped
//! anywhere, and one that is cut short is never taken for a whole one. One that fails says why, in
//! its last record.
//!
//! *Putting one in place* ([`put`]) writes a folder beside the module's, checks it all, makes it
//! durable, and only then has the two folders change places, at once.
//!
//! # Limits
//! - A module that writes faster than its copy is taken is not held for longer: beyond
//!   [`HELD_BYTES`] the copy fails. Take it to a file on this host then, and send that.
//! - Each module's copy is of a moment of its own: two modules of a VM that know of each other may
//!   differ by what happened between.
//! - Holes of files are kept where nothing was written since the copy began.

mod format;
mod locked_folder;
mod put;
mod take;

pub use format::{About, FileEntry, MAGIC, Summary, pass};
pub use locked_folder::LockedFolder;
pub use put::{Put, Received, put};
pub use take::{Steps, take};

use std::io;

#[cfg(doc)]
use crate::limits::{HELD_BYTES, HOLD_LEASE};

/// Failure to take a copy, or to put it in place.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// The files cannot be read or written.
    ///
    /// Remedy: mend what the cause says: space, or permissions of the VM's folder.
    #[error("{what}: {source}")]
    Files {
        /// Action that failed.
        what: String,
        /// Cause.
        source: io::Error,
    },
    /// The stream cannot be read.
    ///
    /// Remedy: check the file or the pipe that the copy comes from.
    #[error("reading the copy: {0}")]
    Read(io::Error),
    /// The stream cannot be written.
    ///
    /// Remedy: check space and permissions where the copy goes to.
    #[error("writing the copy: {0}")]
    Write(io::Error),
    /// The stream is not a copy, or not a whole one.
    ///
    /// Remedy: take another copy: this one is cut short or was changed. `millrace module verify
    /// FILE` checks one.
    #[error("this is no whole copy of a module: at byte {at}: {what}")]
    Damaged {
        /// Byte of the stream.
        at: u64,
        /// Fault.
        what: String,
    },
    /// The stream says itself that the copy failed.
    ///
    /// Remedy: look at the text of the `millrace module backup` that made it, and take another
    /// copy.
    #[error("the copy failed when it was taken: {0}")]
    Failed(String),
    /// The module's process does not let itself be copied.
    ///
    /// Remedy: do as the text says; `millrace module ls` shows the module's state.
    #[error("{0}")]
    Module(String),
    /// The files are written faster than they are copied.
    ///
    /// Remedy: write the copy to a faster place, or when the module has less to do.
    #[error(
        "{left_bytes} bytes were written while the last ones were copied, and files are held still for {limit_bytes} \
         at most: copy to a faster place"
    )]
    TooFast {
        /// Bytes that are left.
        left_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// The copy is another module's, or does not fit.
    ///
    /// Remedy: take a copy of this module, made by the same or an earlier version; `millrace module
    /// verify FILE` names its module.
    #[error("{0}")]
    Unfit(String),
}

impl CopyError {
    fn files<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        |source| Self::Files { what, source: source.into() }
    }
}

#[cfg(test)]
mod tests;
