//! Errors of disk ports: every text names the value, the place and the limit.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::lock_holders;

/// Error of making or changing a disk port.
#[derive(Debug, Error)]
pub enum BlockError {
    /// A value of the config is outside its limits.
    ///
    /// Remedy: write a value within the rule that the text names.
    #[error("disk port {port}: {what} is {value}; it must be {rule}")]
    Config {
        /// The port's name.
        port: String,
        /// Name of the value.
        what: &'static str,
        /// The value in the config.
        value: String,
        /// The rule it breaks, with the limit.
        rule: String,
    },
    /// The operating system refused something about a file.
    ///
    /// Remedy: mend what the cause says: the path, permissions of the daemon's user, or the
    /// storage.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// The attempt that failed.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Neither a regular file nor a block device.
    ///
    /// Remedy: name a regular file or a block device in `path`.
    #[error(
        "{} is a {found}; a disk image must be a regular file or a block device",
        path.display()
    )]
    NotAFile {
        /// The file.
        path: PathBuf,
        /// Type of the file.
        found: &'static str,
    },
    /// The image is in use by another process.
    ///
    /// Remedy: end the process that the text names, or give this port `read_only = true` where both
    /// only read. Two writers destroy an image.
    #[error("{} is in use: {obstacle}{holders}", path.display())]
    Locked {
        /// The image.
        path: PathBuf,
        /// The lock that stands against opening it.
        obstacle: &'static str,
        /// Processes that have it locked, once [`BlockError::naming_holders`] has looked.
        holders: String,
    },
    /// A disk without a sector.
    ///
    /// Remedy: make the file as large as the disk is to be: `truncate -s 10G FILE`.
    #[error(
        "{} is empty; a disk has at least one sector of 512 bytes (truncate -s SIZE)",
        path.display()
    )]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Direct I/O needs larger blocks than the disk has.
    ///
    /// Remedy: for a new disk set `block_size` to what the text names, or "auto"; for one that a
    /// guest was installed on set `direct = false`.
    #[error(
        "{}: direct I/O works in units of {align} bytes there, but the disk's block size is \
         {block_size}: set block_size = {align} or \"auto\" for a disk that no guest has been installed on \
         yet, else switch direct off",
        path.display()
    )]
    DirectAlignment {
        /// The file.
        path: PathBuf,
        /// Unit of the file system, in bytes.
        align: u32,
        /// Block size of the port, in bytes.
        block_size: u32,
    },
    /// The guest's partition table was made for other blocks.
    ///
    /// Remedy: set `block_size` to what the partition table has; with `direct = false` if the
    /// storage refuses that.
    #[error(
        "{}: its partition table is one of blocks of {table} bytes, and block_size \"auto\" gives {block_size} \
         here: set block_size = {table}, with direct = false if the storage refuses that",
        path.display()
    )]
    ForeignBlockSize {
        /// The file.
        path: PathBuf,
        /// Block size of the table, in bytes.
        table: u32,
        /// Block size of the port, in bytes.
        block_size: u32,
    },
    /// A qcow2 image is refused.
    ///
    /// Remedy: do as the reason says; its text is one of qcow2's below. `qemu-img info` and
    /// `qemu-img check` show more.
    #[error("qcow2 image {}: {reason}", path.display())]
    Image {
        /// The image.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// A memory file, an io_uring, an event or a thread could not be made.
    ///
    /// Remedy: raise the limit that the cause names: memory, open files (LimitNOFILE=), threads
    /// (TasksMax=).
    #[error("disk back end: {what}: {source}")]
    Resource {
        /// The attempt that failed.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A flush failed earlier: no later flush finds the writes that it lost.
    ///
    /// Remedy: mend the storage, stop the VM, check its file systems, then `millrace detach` and
    /// `millrace attach` or `millrace start` the port.
    #[error(
        "disk port {port}: a flush failed before ({source}), and what was written may be lost; flushes \
         fail until the port is detached and attached again"
    )]
    FlushFailed {
        /// The port's name.
        port: String,
        /// The error of that flush.
        source: io::Error,
    },
    /// The new size is not possible.
    ///
    /// Remedy: do as the reason says; the size of a raw disk is that of its file.
    #[error("cannot resize to {len_bytes} bytes: {reason}")]
    Resize {
        /// The size asked for.
        len_bytes: u64,
        /// The reason, with the limit.
        reason: String,
    },
    /// The disk has its new size, but its guest could not be told.
    ///
    /// Remedy: let the VM monitor read the size again as the text says, repeat `millrace resize`,
    /// or restart the VM.
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
        /// The cause.
        source: vhost_user::ConfigNotifyError,
    },
}

impl BlockError {
    /// Adds the processes that use the image to [`BlockError::Locked`], as far as this user may see
    /// them. Looks at all descriptors of the host: for a final error, not for each try.
    #[must_use]
    pub fn naming_holders(self) -> Self {
        match self {
            Self::Locked { path, obstacle, .. } => {
                let holders = lock_holders::describe(&path);
                Self::Locked { path, obstacle, holders }
            }
            other => other,
        }
    }

    /// Errno of the cause; EIO where there is none.
    pub(crate) fn errno(&self) -> i32 {
        match self {
            Self::File { source, .. } | Self::Resource { source, .. } => errno(source),
            _ => libc::EIO,
        }
    }

    /// Closure for `map_err` on file operations.
    pub(crate) fn file(
        what: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(io::Error) -> BlockError {
        let path = path.to_path_buf();
        move |source| BlockError::File { what, path, source }
    }

    /// Closure for `map_err` on other system calls.
    pub(crate) fn resource(what: &'static str) -> impl FnOnce(io::Error) -> BlockError {
        move |source| BlockError::Resource { what, source }
    }
}

/// Whether an errno says nothing of the storage: the operation is tried again.
pub(crate) fn is_transient(errno: i32) -> bool {
    matches!(errno, libc::EINTR | libc::EAGAIN)
}

/// Errno of an I/O error, also of one without a number; never 0.
pub(crate) fn errno(e: &io::Error) -> i32 {
    e.raw_os_error().filter(|&errno| errno > 0).unwrap_or(match e.kind() {
        io::ErrorKind::StorageFull => libc::ENOSPC,
        io::ErrorKind::QuotaExceeded => libc::EDQUOT,
        io::ErrorKind::Unsupported => libc::EOPNOTSUPP,
        // An image that contradicts itself.
        io::ErrorKind::InvalidData => libc::EUCLEAN,
        _ => libc::EIO,
    })
}
