//! Images in qcow2: the crate `qcow2` maps clusters to places, the disks of the files move the
//! data.
//!
//! Mapped clusters are served as a raw disk is, see `disk.rs`; operations that have to wait for the
//! disk below go to a few helper threads of the image, see `pool.rs`.

mod disk;
mod files;
mod open;
mod pieces;
mod pool;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use base::io::Disk;
use base::sync::lock;
use qcow2::{ChainView, Opened};

use self::disk::Qcow2Disk;
use self::files::{FileLayout, Files};
use self::open::OpenChain;
use self::pieces::MAX_SPARE;
use self::pool::{Pool, Results};
use crate::backend::{Backend, Demands, ImageState};
use crate::check_progress::CheckProgress;
use crate::error::BlockError;
use crate::gate::Gate;
use crate::image_file;

/// Options of opening a qcow2 image.
#[derive(Debug, Clone, Default)]
pub struct Qcow2Options<'a> {
    /// The only directory (with those below it) from which backing files may come. `None`: an image
    /// that names a backing file is refused.
    pub backing_dir: Option<&'a Path>,
    /// External data file. The name in the image is not used.
    pub data_file: Option<&'a Path>,
    /// Bytes of mapping entries kept in memory; 0: the default.
    pub cache_len_bytes: u64,
    /// Whether data goes past the host's page cache (O_DIRECT). The map goes through it in any
    /// case.
    pub direct: bool,
    /// Whether operations that would change the image are refused.
    pub read_only: bool,
    /// Progress of the check of the image.
    pub progress: CheckProgress,
}

/// Whether the image's header says that it is checked when it is opened for writing. Only a hint:
/// nothing is locked, and one that cannot be read gets its error when it is opened.
pub fn needs_check(path: &Path) -> bool {
    open::needs_check(path).unwrap_or(false)
}

/// The qcow2 back end of a port: an image with its backing files.
pub struct Qcow2Backend {
    pool: Arc<Pool>,
    layout: Arc<FileLayout>,
    path: PathBuf,
    gate: Option<Arc<Gate>>,
    demands: Demands,
    /// View of the map for changes of the size.
    view: Mutex<ChainView>,
    opened: Opened,
}

impl Qcow2Backend {
    /// Opens the image and, below `backing_dir`, what it stands on; checks an image that was not
    /// closed, and starts the helpers.
    pub fn open(path: &Path, options: &Qcow2Options<'_>) -> Result<Self, BlockError> {
        let OpenChain { chain, opened, layout, images, demands } = open::open(path, options)?;
        // The image's own device: all writes go there, and reads of what was written. As with raw
        // images, a tmpfs is none.
        let own =
            images.first().map(|image| image.get()).filter(|file| !image_file::is_resident(file));
        let gate = own.and_then(|file| Gate::of(file).ok());
        let view = Mutex::new(chain.view(Arc::new(|| {})));
        let pool = Pool::start(chain, images)
            .map_err(BlockError::resource("starting the qcow2 helper threads"))?;
        let (pool, layout, path) = (Arc::new(pool), Arc::new(layout), path.to_path_buf());
        Ok(Self { pool, layout, path, gate, demands, view, opened })
    }
}

impl Backend for Qcow2Backend {
    fn kind(&self) -> &'static str {
        "qcow2"
    }

    fn open_queue(&self, depth: u16) -> Result<Box<dyn Disk>, BlockError> {
        let results = Results::new(depth).map_err(BlockError::resource("making an event"))?;
        let files = Files::open(Arc::clone(&self.layout), &results.event, depth + MAX_SPARE)
            .map_err(BlockError::resource("making an io_uring"))?;
        Ok(Box::new(Qcow2Disk::new(Arc::clone(&self.pool), files, Arc::new(results), depth)))
    }

    fn len_bytes(&self) -> u64 {
        self.pool.chain().top().len_bytes()
    }

    fn demands(&self) -> Demands {
        self.demands
    }

    fn gate(&self) -> Option<Arc<Gate>> {
        self.gate.clone()
    }

    fn image_state(&self) -> Option<ImageState> {
        let image = self.pool.chain().top();
        Some(ImageState {
            was_checked: self.opened.was_checked,
            mended_counts: self.opened.outcome.errors,
            freed_leaks: self.opened.outcome.leaks,
            is_damaged: image.is_damaged(),
            map_len_bytes: image.memory_len(),
        })
    }

    /// Grows the disk.
    fn resize(&self, new_len_bytes: Option<u64>) -> Result<u64, BlockError> {
        if let Some(len_bytes) = new_len_bytes {
            let mut view = lock(&self.view);
            self.pool
                .chain()
                .grow(&mut view, len_bytes)
                .map_err(|e| BlockError::Resize { len_bytes, reason: e.to_string() })?;
        }
        Ok(self.len_bytes())
    }

    fn sync(&self) -> Result<(), BlockError> {
        let synced = self.pool.chain().top().sync();
        synced.map_err(BlockError::file("cannot sync", &self.path))
    }
}

#[cfg(test)]
pub(crate) mod tests;
