//! Access of other parts of the daemon to a disk's image, past the disk's queues.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::sync::lock;
use guest_abi::pipe::SECTOR_BYTES;
use rustix::fs::{Advice, FileType, Mode, OFlags};
use rustix::io::Errno;
use sidecore::{Watcher, WorkerRef};
use thiserror::Error;

use super::{BlockPort, RunningQueue};
use crate::engine::QueueEngine;
use crate::error::BlockError;
use crate::gate::InPlacePass;
use crate::placeholder::{Answers, PlaceholderConfig, PlaceholderHandler, TargetFile};

/// File with a disk's bytes, byte by byte as the guest sees them.
#[derive(Debug)]
pub struct Image {
    /// File or block device, opened for reading through the page cache, also where the disk's own
    /// I/O goes past it. Reads see completed writes of the guest (but see `may_lag`), and may see
    /// writes under way. Not locked: it must be closed before the port, whose lock keeps other
    /// daemons out.
    pub file: OwnedFd,
    /// Whether cached pages may be older than the guest's writes: the case of a block device that
    /// the disk's queues write past the page cache. The kernel drops cached pages before such a
    /// write and not behind it, so a page that was read meanwhile stays. Read-ahead is off. A
    /// reader that knows that nobody writes to some bytes can drop their pages before it reads
    /// them.
    pub may_lag: bool,
    /// Size of the disk that the guest was told, when the image was asked for, without the padding
    /// of a last block that the file has in part. The file may be longer, and shorter if its owner
    /// cut it off.
    pub len_bytes: u64,
    /// Pass for its reads at the gate of the device below. The VM's account is the reader's to
    /// charge.
    pub pass: InPlacePass,
}

/// Reason why a disk cannot be read, or written, in place.
#[derive(Debug, Error)]
pub enum InPlaceError {
    /// The format has the bytes elsewhere in the file, or has no file.
    ///
    /// Remedy: none is needed: the guest moves these bytes itself. Pipes need `format = "raw"`.
    #[error("disk {port}: its format is {kind}; only raw disks are read in place")]
    Format {
        /// The port's name.
        port: String,
        /// Format of its image.
        kind: &'static str,
    },
    /// A stage changes the bytes between the file and the guest.
    ///
    /// Remedy: none is needed: the guest moves these bytes itself.
    #[error("disk {port}: its stage {stage} changes the content, so the file has other bytes")]
    Stage {
        /// The port's name.
        port: String,
        /// The first such stage.
        stage: String,
    },
    /// The system refused.
    ///
    /// Remedy: mend what the cause says; until then the guest moves these bytes itself.
    #[error("disk {port}: cannot open its image again: {source}")]
    Open {
        /// The port's name.
        port: String,
        /// The cause.
        source: Errno,
    },
}

/// Reason why a disk cannot serve placeholder requests.
#[derive(Debug, Error)]
pub enum PlaceholderError {
    /// The bytes cannot be written in place.
    ///
    /// Remedy: see that error.
    #[error(transparent)]
    NotInPlace(#[from] InPlaceError),
    /// The disk is read-only.
    ///
    /// Remedy: none is needed: the guest writes nothing to this disk.
    #[error("disk {port}: it is read-only, so no placeholders are written to it")]
    ReadOnly {
        /// The port's name.
        port: String,
    },
    /// An event could not be made, or not watched.
    ///
    /// Remedy: raise the limit that the cause names; until then the guest writes these bytes
    /// itself.
    #[error("disk {port}: {source}")]
    Resource {
        /// The port's name.
        port: String,
        /// The cause.
        source: BlockError,
    },
}

impl BlockPort {
    /// Opens the disk's file for reading in place; for use outside of sidecores. Each call opens it
    /// anew, by its descriptor: another file at its path does not matter.
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
        let pass = InPlacePass::new(self.state.gate.clone(), self.state.vm);
        Ok(Image { file, may_lag, len_bytes, pass })
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

    /// Offers placeholder requests to `handler` from now on: see [`crate::placeholder`]. This holds
    /// for running queues and for later ones, as long as the port lives. Another call replaces the
    /// handler, but not for requests that it has taken. For use outside of sidecores.
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
        // A queue that starts meanwhile is in the list, or waits for this lock and sees the
        // handler.
        let queues = self.lock();
        *lock(&self.placeholder_config) = Some(Arc::clone(&config));
        for queue in queues.iter() {
            let Some(RunningQueue { worker, depth, .. }) = &queue.running else { continue };
            offer_to(worker, &config, *depth)
                .map_err(|source| PlaceholderError::Resource { port: self.name.clone(), source })?;
        }
        Ok(())
    }

    /// Gives an engine that is about to start the port's handler of placeholder requests, if there
    /// is one.
    pub(super) fn give_placeholder_config(
        &self,
        engine: &mut QueueEngine,
        depth: u16,
    ) -> Result<(), BlockError> {
        let config = lock(&self.placeholder_config).clone();
        let Some(config) = config else { return Ok(()) };
        let resource = BlockError::resource("an event for placed requests");
        let answers = Answers::new(depth).map(Arc::new);
        answers.and_then(|a| engine.set_placeholders(config, a, None)).map(drop).map_err(resource)
    }

    /// Whether its queues go past the page cache; true where that is not known.
    fn is_direct(&self) -> bool {
        let flags = self.backend.in_place().and_then(|file| rustix::fs::fcntl_getfl(file).ok());
        flags.is_none_or(|flags| flags.contains(OFlags::DIRECT))
    }

    /// Opens the disk's file anew.
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

/// Gives a running queue a handler of placeholder requests.
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
