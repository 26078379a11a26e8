//! What others of the daemon may read of a disk without asking its queues.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use thiserror::Error;

use super::BlockPort;

/// A disk's bytes, byte by byte as the guest sees them, in a file.
#[derive(Debug)]
pub struct Image {
    /// The file or block device, opened for reading through the page cache whatever the disk's own
    /// way is. What a guest was told is written is seen; what it is writing may be. Not locked: a
    /// holder must not keep it longer than the port, whose lock keeps other daemons out.
    pub file: OwnedFd,
    /// The disk's size as the guest was told it, when this was asked for. The file may be longer,
    /// and shorter if its owner cut it off.
    pub len_bytes: u64,
}

/// Why a disk cannot be read in place.
#[derive(Debug, Error)]
pub enum NotInPlace {
    /// The bytes lie elsewhere in the file, or there is none.
    #[error("disk {port}: its format is {kind}; only raw disks are read in place")]
    Format {
        /// The port's name.
        port: String,
        /// Its back end.
        kind: &'static str,
    },
    /// The file's bytes are not what the guest sees.
    #[error("disk {port}: its stage {stage} changes the content, so the file has other bytes")]
    Stage {
        /// The port's name.
        port: String,
        /// The first such stage.
        stage: String,
    },
    /// The system refused.
    #[error("disk {port}: cannot open its image again for reading: {source}")]
    Open {
        /// The port's name.
        port: String,
        /// The cause.
        source: Errno,
    },
}

impl BlockPort {
    /// The disk's file, for reading in place; for use outside of sidecores. Each call opens it anew,
    /// by its descriptor: what has come to its path meanwhile does not matter.
    pub fn image(&self) -> Result<Image, NotInPlace> {
        let port = || self.name.clone();
        let Some(file) = self.backend.in_place() else {
            return Err(NotInPlace::Format { port: port(), kind: self.backend.kind() });
        };
        if let Some(stage) = &self.changed_by {
            return Err(NotInPlace::Stage { port: port(), stage: stage.clone() });
        }
        let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = rustix::fs::open(itself, flags, Mode::empty())
            .map_err(|source| NotInPlace::Open { port: port(), source })?;
        Ok(Image { file, len_bytes: self.state.len_bytes.load(Ordering::Relaxed) })
    }
}
