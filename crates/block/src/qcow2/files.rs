//! The files of an image, as disks of one queue.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use base::event::Event;
use base::io::Disk;

use crate::file::{self, Image};
use crate::raw::{Opening, RawDisk, Spare};
use crate::resident::ResidentDisk;

/// An open file of a chain, and how it is used.
#[derive(Debug, Clone)]
pub(super) struct OpenFile {
    /// Has the lock.
    image: Arc<Image>,
    /// For entries of a map: through the page cache, even where the image passes by it.
    is_buffered: bool,
    /// Openings of rings that are gone.
    spare: Arc<Spare>,
}

impl OpenFile {
    pub fn new(image: Arc<Image>, is_buffered: bool) -> Self {
        Self { image, is_buffered, spare: Arc::default() }
    }

    /// A disk of one queue.
    fn open(&self, event: &Arc<Event>, depth: u16) -> io::Result<Box<dyn Disk>> {
        let image = Arc::clone(&self.image);
        if file::is_resident(image.get()) {
            return Ok(Box::new(ResidentDisk::new(image, Arc::default(), depth)));
        }
        let own = match self.is_buffered {
            true => Opening::take_buffered(&self.spare, &image)?,
            false => Opening::take(&self.spare, &image),
        };
        Ok(Box::new(RawDisk::new(image, own, Arc::default(), depth, Arc::clone(event))?))
    }
}

/// Which file is for what.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub files: Vec<OpenFile>,
    /// Of each layer: the index of the file with its data.
    pub layers: Vec<usize>,
    /// The file with the map.
    pub map: usize,
    /// Those that a FLUSH syncs.
    pub synced: Vec<usize>,
    /// What offsets and lengths of direct I/O must be multiples of; else 1.
    pub align: u64,
}

/// See the module's text.
pub(super) struct Files {
    disks: Vec<Box<dyn Disk>>,
    layout: Arc<Layout>,
}

impl Files {
    /// Disks for `depth` operations each, which ring `event`.
    pub fn open(layout: Arc<Layout>, event: &Arc<Event>, depth: u16) -> io::Result<Self> {
        let disks = layout.files.iter().map(|file| file.open(event, depth));
        Ok(Self { disks: disks.collect::<io::Result<_>>()?, layout })
    }

    pub fn count(&self) -> usize {
        self.disks.len()
    }

    #[inline]
    pub fn disk(&mut self, index: usize) -> &mut dyn Disk {
        &mut *self.disks[index]
    }

    /// Whether data there can be moved as it is.
    #[inline]
    pub fn fits(&self, host: u64, len: u64) -> bool {
        (host | len) & (self.layout.align - 1) == 0
    }

    /// The file with a layer's data.
    #[inline]
    pub fn of_layer(&self, layer: usize) -> usize {
        self.layout.layers[layer]
    }

    /// The file with the image's own data.
    #[inline]
    pub fn data(&self) -> usize {
        self.layout.layers[0]
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

    pub fn flush_submissions(&mut self) -> io::Result<()> {
        // Each of them, whatever became of another.
        let flush =
            |all: io::Result<()>, disk: &mut Box<dyn Disk>| all.and(disk.flush_submissions());
        self.disks.iter_mut().fold(Ok(()), flush)
    }

    pub fn set_wakeups(&mut self, on: bool) {
        self.disks.iter_mut().for_each(|disk| disk.set_wakeups(on));
    }

    pub fn keep_open(&mut self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.disks.iter_mut().try_for_each(|disk| disk.keep_open(file))
    }
}
