//! What can be wrong with a disk port: every text names what, where and the limit.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Why a disk port could not be made or changed.
#[derive(Debug, Error)]
pub enum BlockError {
    /// A value of the config is outside its limits.
    #[error("disk port {port}: {what} is {value}; it must be {rule}")]
    Config {
        /// The port's name.
        port: String,
        /// Which value.
        what: &'static str,
        /// What was given.
        value: String,
        /// The rule it breaks, with the limit.
        rule: String,
    },
    /// The operating system refused something about a file.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Neither a regular file nor a block device.
    #[error("{} is a {found}; a disk image must be a regular file or a block device", path.display())]
    NotAFile {
        /// Which file.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// Someone else serves this image.
    #[error("{} is in use: {obstacle}{holders}", path.display())]
    Locked {
        /// Which file.
        path: PathBuf,
        /// What stands against opening it.
        obstacle: &'static str,
        /// Which processes have it locked, once [`BlockError::naming_holders`] has looked.
        holders: String,
    },
    /// A disk without a sector.
    #[error("{} is empty; a disk has at least one sector of 512 bytes (truncate -s SIZE)", path.display())]
    Empty {
        /// Which file.
        path: PathBuf,
    },
    /// Direct I/O needs larger blocks than the disk has.
    #[error(
        "{}: direct I/O works in units of {align} bytes there, but the disk's block size is \
         {block_size}: set block_size = {align} or \"auto\" for a disk that no guest has been installed on \
         yet, else switch direct off",
        path.display()
    )]
    DirectAlignment {
        /// Which file.
        path: PathBuf,
        /// Unit of the file system, in bytes.
        align: u32,
        /// Block size of the port, in bytes.
        block_size: u32,
    },
    /// The guest's partition table was made for other blocks.
    #[error(
        "{}: its partition table is one of blocks of {table} bytes, and block_size \"auto\" gives {block_size} \
         here: set block_size = {table}, with direct = false if the storage refuses that",
        path.display()
    )]
    ForeignBlockSize {
        /// Which file.
        path: PathBuf,
        /// Block size of the table, in bytes.
        table: u32,
        /// Block size of the port, in bytes.
        block_size: u32,
    },
    /// A qcow2 image that is refused.
    #[error("qcow2 image {}: {reason}", path.display())]
    Image {
        /// Which file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A memory file, an io_uring, an event or a thread could not be made.
    #[error("disk back end: {what}: {source}")]
    Resource {
        /// What was tried.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A flush failed earlier, and what it lost no later one finds.
    #[error(
        "disk port {port}: a flush failed before ({source}), and what was written may be lost; flushes \
         fail until the port is detached and attached again"
    )]
    FlushFailed {
        /// The port's name.
        port: String,
        /// Why the flush failed.
        source: io::Error,
    },
    /// The new size is not possible.
    #[error("cannot resize to {len_bytes} bytes: {reason}")]
    Resize {
        /// The size asked for.
        len_bytes: u64,
        /// Why, with the limit.
        reason: String,
    },
    /// The disk has its new size, of which its guest does not know.
    #[error(
        "disk {port} has {len_bytes} bytes now, but its guest was not told: {source}; the guest sees the size \
         once its VMM reads it again (Firecracker: PATCH /drives/ID), has connected again or was restarted, and \
         another resize tries to tell it again"
    )]
    GuestNotTold {
        /// The port's name.
        port: String,
        /// The size now.
        len_bytes: u64,
        /// Why.
        source: vhost_user::NotTold,
    },
}

impl BlockError {
    /// Has an image that is in use say by which processes, as far as this user may know. Looks at
    /// all descriptors of the host: for an error that is final, not for each try.
    #[must_use]
    pub fn naming_holders(self) -> Self {
        match self {
            Self::Locked { path, obstacle, .. } => {
                let holders = crate::lock::holders(&path);
                Self::Locked { path, obstacle, holders }
            }
            other => other,
        }
    }

    /// The errno behind it; EIO where there is none.
    pub(crate) fn errno(&self) -> i32 {
        match self {
            Self::File { source, .. } | Self::Resource { source, .. } => errno(source),
            _ => libc::EIO,
        }
    }

    /// For `map_err` on file operations.
    pub(crate) fn file(
        what: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(io::Error) -> BlockError {
        let path = path.to_path_buf();
        move |source| BlockError::File { what, path, source }
    }

    /// For `map_err` on everything else the system may refuse.
    pub(crate) fn resource(what: &'static str) -> impl FnOnce(io::Error) -> BlockError {
        move |source| BlockError::Resource { what, source }
    }
}

/// Whether an errno says nothing of the storage: the operation is tried again.
pub(crate) fn is_transient(errno: i32) -> bool {
    matches!(errno, libc::EINTR | libc::EAGAIN)
}

/// The errno of an error, which often wraps one without a number; never 0.
pub(crate) fn errno(e: &io::Error) -> i32 {
    e.raw_os_error().filter(|&errno| errno > 0).unwrap_or(match e.kind() {
        io::ErrorKind::StorageFull => libc::ENOSPC,
        io::ErrorKind::QuotaExceeded => libc::EDQUOT,
        io::ErrorKind::Unsupported => libc::EOPNOTSUPP,
        // What an image contradicts itself in.
        io::ErrorKind::InvalidData => libc::EUCLEAN,
        _ => libc::EIO,
    })
}
