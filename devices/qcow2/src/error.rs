//! Errors of images: every text names the fault, and a command that helps.

use std::io;

use thiserror::Error;

/// Reason why an image is not served.
#[derive(Debug, Error)]
pub enum Error {
    /// The file cannot be read or written.
    ///
    /// Remedy: mend what the cause says: permissions, space, or the storage.
    #[error("{what}: {source}")]
    Io {
        /// The attempt that failed.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The file is no qcow2 image, or one of a version that is not served.
    ///
    /// Remedy: do as the text says; `qemu-img convert -O qcow2` makes an image without what is not
    /// served.
    #[error("{0}")]
    NotServed(String),
    /// A number in the header is outside its limits.
    ///
    /// Remedy: check the image with `qemu-img check`; `qemu-img convert -O qcow2` writes it anew.
    #[error("{what} is {value}; it must be {rule}")]
    Header {
        /// Name of the field.
        what: &'static str,
        /// Number in the field.
        value: u64,
        /// The rule that it breaks.
        rule: String,
    },
    /// The tables contradict each other and cannot be mended without loss.
    ///
    /// Remedy: make a copy, then `qemu-img check -r all`. `read_only = true` serves what can be
    /// read.
    #[error(
        "it is damaged: {what} ({count} such); it is left as it is. Make a copy, then \
         `qemu-img check -r all` mends what can be mended"
    )]
    Damaged {
        /// The first contradiction.
        what: String,
        /// Number of contradictions.
        count: u64,
    },
}

impl Error {
    /// Closure for `map_err` on file operations.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io { what, source }
    }

    pub(crate) fn header(what: &'static str, value: u64, rule: impl Into<String>) -> Self {
        Self::Header { what, value, rule: rule.into() }
    }
}

/// An error of a request on a contradiction in the image, with the cause as text.
pub(crate) fn contradiction(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, Contradiction(what.into()))
}

/// Whether an error is a [`contradiction`].
pub(crate) fn is_contradiction(e: &io::Error) -> bool {
    e.get_ref().is_some_and(|cause| cause.is::<Contradiction>())
}

/// An error of a request on data that cannot be read; it says nothing of the image's own tables.
pub(crate) fn unreadable(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.into())
}

/// Cause of an error of [`contradiction`].
///
/// Remedy: detach the port, make a copy of the image, then `qemu-img check -r all`.
#[derive(Debug, Error)]
#[error("the image contradicts itself: {0}")]
pub struct Contradiction(pub String);
