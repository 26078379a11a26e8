//! The files of an image, as disks of one queue.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use base::event::Event;
use base::io::{Disk, DiskDone, DiskOp};

use crate::image_file::{self, ImageFile};
use crate::raw::{RawDisk, RingFile, SpareFiles};
use crate::resident::ResidentDisk;

/// An open file of a chain, and how it is used.
#[derive(Debug, Clone)]
pub(super) struct OpenFile {
    /// Image, with its lock.
    image: Arc<ImageFile>,
    /// Whether it goes through the page cache even where the image goes past it: for entries of a
    /// map.
    is_buffered: bool,
    /// Spare openings of rings that are gone.
    spare: Arc<SpareFiles>,
}

impl OpenFile {
    pub fn new(image: Arc<ImageFile>, is_buffered: bool) -> Self {
        Self { image, is_buffered, spare: Arc::default() }
    }

    /// A disk of one queue.
    fn open(&self, event: &Arc<Event>, depth: u16) -> io::Result<FileDisk> {
        let image = Arc::clone(&self.image);
        if image_file::is_resident(image.get()) {
            return Ok(FileDisk::Resident(ResidentDisk::on_image(image, Arc::default(), depth)));
        }
        let own = match self.is_buffered {
            true => RingFile::take_buffered(&self.spare, &image)?,
            false => RingFile::take(&self.spare, &image),
        };
        let disk = RawDisk::new(image, own, Arc::default(), depth, Arc::clone(event))?;
        Ok(FileDisk::Raw(Box::new(disk)))
    }
}

/// The disk of one file. Not a `dyn Disk`: each operation goes through it.
pub(super) enum FileDisk {
    Raw(Box<RawDisk>),
    Resident(ResidentDisk),
}

impl FileDisk {
    /// Takes one operation: [`Disk::submit`].
    ///
    /// # Safety
    /// The same contract.
    #[inline]
    pub unsafe fn submit(&mut self, token: u32, op: DiskOp) -> io::Result<()> {
        match self {
            // SAFETY: the caller's promise.
            Self::Raw(disk) => unsafe { disk.submit(token, op) },
            // SAFETY: as above.
            Self::Resident(disk) => unsafe { disk.submit(token, op) },
        }
    }

    /// Takes finished operations of a ring: [`Disk::reap`]. Other files: see
    /// [`FileDisk::run_next`].
    #[inline]
    pub fn reap(&mut self, done: &mut Vec<DiskDone>) {
        if let Self::Raw(disk) = self {
            disk.reap(done);
        }
    }

    /// Does the next operation of a file that is always in memory.
    #[inline]
    pub fn run_next(&mut self) -> Option<DiskDone> {
        match self {
            Self::Raw(_) => None,
            Self::Resident(disk) => disk.run_next(),
        }
    }

    /// Starts the operations of a ring: [`Disk::flush_submissions`].
    #[inline]
    fn flush_submissions(&mut self) -> io::Result<()> {
        match self {
            Self::Raw(disk) => disk.flush_submissions(),
            Self::Resident(_) => Ok(()),
        }
    }

    /// The ring, if it has one.
    fn ring(&mut self) -> Option<&mut RawDisk> {
        match self {
            Self::Raw(disk) => Some(disk),
            Self::Resident(_) => None,
        }
    }
}

/// Files of an image, and their uses.
#[derive(Debug, Clone)]
pub(super) struct FileLayout {
    pub files: Vec<OpenFile>,
    /// Index of the file with the data, for each layer.
    pub layers: Vec<usize>,
    /// Index of the file with the map.
    pub map: usize,
    /// Indices of the files that a FLUSH syncs.
    pub synced: Vec<usize>,
    /// Alignment of offsets and lengths of direct I/O; else 1.
    pub align: u64,
}

/// Disks of one queue, one for each file of the image.
pub(super) struct Files {
    disks: Vec<FileDisk>,
    layout: Arc<FileLayout>,
    /// Index of the file with the image's own data.
    data: usize,
    /// Alignment, see [`FileLayout`].
    align: u64,
}

impl Files {
    /// Disks for `depth` operations each, which ring `event`.
    pub fn open(layout: Arc<FileLayout>, event: &Arc<Event>, depth: u16) -> io::Result<Self> {
        let disks = layout.files.iter().map(|file| file.open(event, depth));
        let disks = disks.collect::<io::Result<_>>()?;
        Ok(Self { disks, data: layout.layers[0], align: layout.align, layout })
    }

    pub fn count(&self) -> usize {
        self.disks.len()
    }

    pub fn are_immediate(&self) -> bool {
        self.disks.iter().all(|disk| matches!(disk, FileDisk::Resident(_)))
    }

    #[inline]
    pub fn disk(&mut self, index: usize) -> &mut FileDisk {
        &mut self.disks[index]
    }

    /// Whether data there can be moved as it is.
    #[inline]
    pub fn fits(&self, host: u64, len: u64) -> bool {
        (host | len) & (self.align - 1) == 0
    }

    /// The file with a layer's data.
    #[inline]
    pub fn of_layer(&self, layer: usize) -> usize {
        if layer == 0 { self.data } else { self.layout.layers[layer] }
    }

    /// The file with the image's own data.
    #[inline]
    pub fn data(&self) -> usize {
        self.data
    }

    /// The file with the map.
    #[inline]
    pub fn map(&self) -> usize {
        self.layout.map
    }

    /// The `n`th file that a FLUSH syncs.
    pub fn to_sync(&self, n: usize) -> Option<usize> {
        self.layout.synced.get(n).copied()
    }

    #[inline]
    pub fn flush_submissions(&mut self) -> io::Result<()> {
        // Each of them, whatever became of another.
        let flush = |all: io::Result<()>, disk: &mut FileDisk| all.and(disk.flush_submissions());
        self.disks.iter_mut().fold(Ok(()), flush)
    }

    pub fn set_wakeups(&mut self, on: bool) {
        self.disks.iter_mut().filter_map(FileDisk::ring).for_each(|ring| ring.set_wakeups(on));
    }

    pub fn keep_open(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.disks.iter_mut().filter_map(FileDisk::ring).try_for_each(|ring| ring.keep_open(file))
    }
}
