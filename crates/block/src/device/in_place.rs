//! What others of the daemon may read of a disk without asking its queues, and write for them.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use guest_abi::pipe::SECTOR_BYTES;
use rustix::fs::{Advice, FileType, Mode, OFlags};
use rustix::io::Errno;
use sidecore::{Watcher, WorkerRef};
use thiserror::Error;

use super::BlockPort;
use crate::engine::QueueEngine;
use crate::error::BlockError;
use crate::placeholder::{Answers, PlaceholderConfig, PlaceholderHandler, TargetFile};

/// A disk's bytes, byte by byte as the guest sees them, in a file.
#[derive(Debug)]
pub struct Image {
    /// The file or block device, opened for reading through the page cache whatever the disk's own
    /// way is. What a guest was told is written is seen, but see `may_lag`; what it is writing may be.
    /// Not locked: a holder must not keep it longer than the port, whose lock keeps other daemons out.
    pub file: OwnedFd,
    /// What somebody has read through the page cache may be older than what the guest has written: a
    /// block device that the disk's queues write past it. The kernel drops cached pages before such a
    /// write and not behind it, so one that was read meanwhile stays. Nothing is read ahead of what is asked
    /// for; who knows that nobody writes to some bytes has them dropped before he reads them.
    pub may_lag: bool,
    /// The disk's size as the guest was told it, when this was asked for, but for the padding of a last
    /// block that the file had in part only. The file may be longer, and shorter if its owner cut it off.
    pub len_bytes: u64,
}

/// Why a disk cannot be read, or written, in place.
#[derive(Debug, Error)]
pub enum InPlaceError {
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
    #[error("disk {port}: cannot open its image again: {source}")]
    Open {
        /// The port's name.
        port: String,
        /// The cause.
        source: Errno,
    },
}

/// Why no placeholders can be written to a disk.
#[derive(Debug, Error)]
pub enum PlaceholderError {
    /// Nobody can write the bytes where the guest sees them.
    #[error(transparent)]
    NotInPlace(#[from] InPlaceError),
    /// Nothing is written to it.
    #[error("disk {port}: it is read-only, so no placeholders are written to it")]
    ReadOnly {
        /// The port's name.
        port: String,
    },
    /// No event, or it cannot be watched.
    #[error("disk {port}: {source}")]
    Resource {
        /// The port's name.
        port: String,
        /// The cause.
        source: BlockError,
    },
}

impl BlockPort {
    /// The disk's file, for reading in place; for use outside of sidecores. Each call opens it anew,
    /// by its descriptor: what has come to its path meanwhile does not matter.
    pub fn image(&self) -> Result<Image, InPlaceError> {
        let file = self.open_again(OFlags::RDONLY)?;
        let may_lag = self.may_lag(&file)?;
        let mut len_bytes = self.state.len_bytes.load(Ordering::Relaxed);
        let stat = rustix::fs::fstat(&file)
            .map_err(|source| InPlaceError::Open { port: self.name.clone(), source })?;
        let in_file = stat.st_size as u64;
        let missing = len_bytes.saturating_sub(in_file);
        let is_file = FileType::from_raw_mode(stat.st_mode).is_file();
        if is_file && missing < u64::from(self.state.block_size) {
            len_bytes = len_bytes.min(in_file - in_file % SECTOR_BYTES as u64);
        }
        Ok(Image { file, may_lag, len_bytes })
    }

    /// Whether cached pages of the disk's file may be old: then nothing is read ahead from now on.
    fn may_lag(&self, file: &OwnedFd) -> Result<bool, InPlaceError> {
        let open = |source| InPlaceError::Open { port: self.name.clone(), source };
        let kind = FileType::from_raw_mode(rustix::fs::fstat(file).map_err(open)?.st_mode);
        let may_lag = kind == FileType::BlockDevice && self.is_direct();
        if may_lag {
            rustix::fs::fadvise(file, 0, None, Advice::Random).map_err(open)?;
        }
        Ok(may_lag)
    }

    /// From now on requests of placeholders are offered to who knows what they stand for: see
    /// [`crate::placeholder`]. Holds for queues that run and for those to come, as long as the port;
    /// another call replaces it, but for what was taken. For use outside of sidecores.
    pub fn set_placeholder_handler(
        &self,
        handler: Arc<dyn PlaceholderHandler>,
    ) -> Result<(), PlaceholderError> {
        if self.state.read_only {
            return Err(PlaceholderError::ReadOnly { port: self.name.clone() });
        }
        let file = self.open_again(OFlags::RDWR)?;
        // See "Two ways to one file".
        let align = if self.is_direct() { rustix::param::page_size() } else { SECTOR_BYTES };
        let may_lag = self.may_lag(&file)?;
        let target = TargetFile::new(file.into(), may_lag, Some(Arc::clone(&self.backend)));
        let config = Arc::new(PlaceholderConfig { handler, target, align_bytes: align as u64 });
        // A queue that starts meanwhile does so before, or waits and sees them.
        let queues = self.lock();
        *self.placeholder_config.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Arc::clone(&config));
        for queue in queues.iter() {
            let Some(worker) = &queue.worker else { continue };
            offer_to(worker, &config, queue.depth)
                .map_err(|source| PlaceholderError::Resource { port: self.name.clone(), source })?;
        }
        Ok(())
    }

    /// Has an engine that is about to start offer placed requests, if the port does.
    pub(super) fn give_placeholder_config(
        &self,
        engine: &mut QueueEngine,
        depth: u16,
    ) -> Result<(), BlockError> {
        let config = self.placeholder_config.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(config) = config else { return Ok(()) };
        let resource = BlockError::resource("an event for placed requests");
        let answers = Answers::new(depth).map(Arc::new);
        answers.and_then(|a| engine.set_placeholders(config, a, None)).map(drop).map_err(resource)
    }

    /// Whether its queues go past the page cache. (Where nobody can tell, they do.)
    fn is_direct(&self) -> bool {
        let flags = self.backend.in_place().and_then(|file| rustix::fs::fcntl_getfl(file).ok());
        flags.is_none_or(|flags| flags.contains(OFlags::DIRECT))
    }

    /// The disk's file, opened anew.
    fn open_again(&self, access: OFlags) -> Result<OwnedFd, InPlaceError> {
        let port = || self.name.clone();
        let Some(file) = self.backend.in_place() else {
            return Err(InPlaceError::Format { port: port(), kind: self.backend.kind() });
        };
        if let Some(stage) = &self.changed_by {
            return Err(InPlaceError::Stage { port: port(), stage: stage.clone() });
        }
        let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::fs::open(itself, access | OFlags::CLOEXEC | OFlags::NOCTTY, Mode::empty())
            .map_err(|source| InPlaceError::Open { port: port(), source })
    }
}

/// Has a running queue offer placed requests.
fn offer_to(
    worker: &WorkerRef<QueueEngine>,
    config: &Arc<PlaceholderConfig>,
    depth: u16,
) -> Result<(), BlockError> {
    let resource = BlockError::resource("an event for placed requests");
    let config = Arc::clone(config);
    let answers = Answers::new(depth).map(Arc::new);
    let set = answers.map(|answers| {
        let set = move |engine: &mut QueueEngine, watcher: &Watcher<'_>| {
            engine.set_placeholders(config, answers, Some(watcher))
        };
        // A queue whose sidecore has gone offers nothing. What comes back is dropped here.
        worker.call(set).map_or(Ok(None), |set| set)
    });
    set.and_then(|set| set.map(drop)).map_err(resource)
}
