//! Opening a qcow2 image and its backing files, without believing what the image says.
//!
//! The header of an image is guest-made data as soon as a guest had the image as a raw disk, and
//! user-made data when users upload images. So (F1): formats are never probed, not of the image and
//! not of backing files; a backing file must lie in the configured directory, wherever links to it
//! are, and is opened there without following any; a data file is the one that the config names,
//! whatever the image says.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use qcow2::limits::DEFAULT_CACHE_LEN_BYTES;
use qcow2::{Chain, FileStore, Header, Image as Qcow2, Layer, Opened, Options, Store};
use rustix::fs::{Mode, OFlags};

use super::Qcow2Options;
use super::files::{FileLayout, OpenFile};
use crate::backend::Demands;
use crate::error::BlockError;
use crate::image_file::{self, ImageFile, OpenMode};

/// Longest chain of images: each is a file held open and a lookup per read; tools that make chains
/// collapse them long before.
const MAX_CHAIN: usize = 8;

/// Interval of log lines about the check of an image that was not closed.
const REPORT: Duration = Duration::from_secs(5);

/// An open image with everything it stands on.
pub(super) struct OpenChain {
    pub chain: Chain,
    pub opened: Opened,
    pub layout: FileLayout,
    /// Open files with their locks.
    pub images: Vec<Arc<ImageFile>>,
    pub demands: Demands,
}

/// Opens `path` as qcow2.
pub(super) fn open(path: &Path, options: &Qcow2Options<'_>) -> Result<OpenChain, BlockError> {
    let mode = OpenMode { read_only: options.read_only, direct: options.direct };
    let image = Arc::new(image_file::open_image(path, mode)?);
    let rule = BackingRule::new(options.backing_dir, options.direct)?;
    // Relative backing names start at the image, wherever links to it are.
    let real = fs::canonicalize(path).map_err(BlockError::file("cannot resolve", path))?;
    let mut builder = ChainBuilder { rule, images: Vec::new(), data: Vec::new() };
    let store = builder.add(image, &real)?;
    let header = qcow2::read_header(&*store).map_err(|e| refused(path, e.to_string()))?;
    let data = options.data_file.map(|data| open_data_file(data, mode)).transpose()?;
    let below = builder.open_below(&header, &real)?;
    let data_path = options.data_file.unwrap_or(path);
    let data_store = data.as_ref().map(|data| store_of(data, data_path)).transpose()?;
    let cache_len_bytes = match options.cache_len_bytes {
        0 => DEFAULT_CACHE_LEN_BYTES,
        len_bytes => len_bytes,
    };
    let settings =
        Options { name: path.display().to_string(), writable: !options.read_only, cache_len_bytes };
    let begin = Instant::now();
    let mut told = begin;
    let mut progress = |share: f64| {
        options.progress.set(share);
        if told.elapsed() > REPORT {
            told = Instant::now();
            let percent = options.progress.percent();
            let image = path.display();
            tracing::info!(%image, percent, "checking an image that was not closed");
        }
    };
    let cluster_len = header.geometry.cluster_len();
    let (layout, demands) =
        builder.layout(data, options.direct, cluster_len).map_err(|why| refused(path, why))?;
    // The last step: it marks the image as open.
    let (top, opened) = Qcow2::open(store, data_store, &settings, &mut progress)
        .map_err(|e| refused(path, e.to_string()))?;
    tell(path, &opened, begin.elapsed());
    Ok(OpenChain { chain: Chain::new(top, below), opened, layout, images: builder.images, demands })
}

/// Reads the header of an image: see [`super::needs_check`]. `None` where it cannot be read.
pub(super) fn needs_check(path: &Path) -> Option<bool> {
    // Opening a FIFO without a writer would block.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let fd = rustix::fs::open(path, flags, Mode::empty()).ok()?;
    let store = FileStore::new(fd.into()).ok()?;
    Some(qcow2::read_header(&store).ok()?.needs_check())
}

fn tell(path: &Path, opened: &Opened, took: Duration) {
    let outcome = &opened.outcome;
    if opened.was_checked || outcome.errors + outcome.leaks + outcome.marks > 0 {
        tracing::warn!(
            image = %path.display(),
            refcounts_raised = outcome.errors,
            leaks_freed = outcome.leaks,
            marks_set = outcome.marks,
            took_ms = took.as_millis() as u64,
            "qcow2 image was not closed: checked and mended"
        );
    }
}

fn open_data_file(path: &Path, mode: OpenMode) -> Result<Arc<ImageFile>, BlockError> {
    image_file::open_image(path, mode).map(Arc::new)
}

/// Opens an image once more, for its map; the lock stays with the first opening.
fn store_of(image: &ImageFile, path: &Path) -> Result<Arc<dyn Store>, BlockError> {
    let again = image_file::open_buffered(image)
        .map_err(BlockError::file("cannot open again, by the page cache,", path))?;
    Ok(Arc::new(FileStore::new(again).map_err(BlockError::file("cannot use", path))?))
}

/// Rule for the places of backing files.
struct BackingRule {
    dir: Option<(PathBuf, OwnedFd)>,
    direct: bool,
}

impl BackingRule {
    fn new(dir: Option<&Path>, direct: bool) -> Result<Self, BlockError> {
        let Some(dir) = dir else { return Ok(Self { dir: None, direct }) };
        let real = fs::canonicalize(dir).map_err(BlockError::file("no backing directory", dir))?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = rustix::fs::open(&real, flags, Mode::empty())
            .map_err(|e| BlockError::file("cannot open the backing directory", &real)(e.into()))?;
        Ok(Self { dir: Some((real, fd)), direct })
    }

    /// Opens the backing file that `image` names; gives its path too.
    fn open(&self, image: &Path, name: &str) -> Result<(ImageFile, PathBuf), BlockError> {
        let refuse = |why: String| refused(image, format!("its backing file {name:?} {why}"));
        let Some((dir, fd)) = &self.dir else {
            return Err(refuse("is refused: no backing directory is configured".into()));
        };
        if has_protocol(name) {
            let why = "is no plain file, and nothing else is served (qemu-img convert makes an \
                       image without a backing file, qemu-img rebase -b FILE -F FORMAT puts it on \
                       one)";
            return Err(refuse(why.into()));
        }
        let parent = image.parent().unwrap_or(Path::new("/"));
        let real = fs::canonicalize(parent.join(name))
            .map_err(|e| refuse(format!("cannot be resolved: {e}")))?;
        let relative = real
            .strip_prefix(dir)
            .map_err(|_| refuse(format!("is outside the backing directory {}", dir.display())))?;
        if relative.as_os_str().is_empty() {
            return Err(refuse("is the backing directory itself".into()));
        }
        let mode = OpenMode { read_only: true, direct: self.direct };
        Ok((image_file::open_beneath(fd, relative, mode)?, real))
    }
}

/// Whether QEMU would not take the name for a file's: `json:{...}`, `nbd://...`.
fn has_protocol(name: &str) -> bool {
    name.split('/').next().is_some_and(|first| first.contains(':'))
}

fn refused(image: &Path, reason: String) -> BlockError {
    BlockError::Image { path: image.to_path_buf(), reason }
}

/// Builder of a chain of images, with their files.
struct ChainBuilder {
    rule: BackingRule,
    /// Files with locks, the image's first.
    images: Vec<Arc<ImageFile>>,
    /// File with the data, for each layer.
    data: Vec<Arc<ImageFile>>,
}

impl ChainBuilder {
    /// Adds a layer's file.
    fn add(&mut self, image: Arc<ImageFile>, path: &Path) -> Result<Arc<dyn Store>, BlockError> {
        if self.images.len() >= MAX_CHAIN {
            let text = format!("more than {MAX_CHAIN} images in its backing chain");
            return Err(refused(path, text));
        }
        let store = store_of(&image, path)?;
        self.images.push(Arc::clone(&image));
        self.data.push(image);
        Ok(store)
    }

    /// Opens the backing files of an image, down to the last.
    fn open_below(&mut self, header: &Header, path: &Path) -> Result<Vec<Layer>, BlockError> {
        let mut layers = Vec::new();
        let (mut header, mut path) = (header.clone(), path.to_path_buf());
        while let Some(name) = header.backing_name.take() {
            let (image, real) = self.rule.open(&path, &name)?;
            let image = Arc::new(image);
            let format = header.backing_format.take();
            match format.as_deref() {
                Some("raw") => {
                    let store = self.add(image, &real)?;
                    let len = store.len().map_err(BlockError::file("cannot use", &real))?;
                    layers.push(Layer::Raw { store, len_bytes: len });
                    break;
                }
                Some("qcow2") => {
                    let store = self.add(image, &real)?;
                    refuse_data_file(&*store).map_err(|why| refused(&real, why))?;
                    let options = Options::new(real.display().to_string(), false);
                    let (below, _) = Qcow2::open(store, None, &options, &mut |_| {})
                        .map_err(|e| refused(&real, e.to_string()))?;
                    header = below.header().clone();
                    layers.push(Layer::Qcow2(Box::new(below)));
                    path = real;
                }
                other => return Err(refused(&path, unserved_format(other))),
            }
        }
        Ok(layers)
    }

    /// Lays out the files with their uses and demands, or says why they cannot be served so.
    fn layout(
        &self,
        data: Option<Arc<ImageFile>>,
        direct: bool,
        cluster_len: u64,
    ) -> Result<(FileLayout, Demands), String> {
        let mut demands = Demands::NONE;
        let mut offset_align = 1;
        let mut files: Vec<OpenFile> = Vec::new();
        let mut layers = Vec::new();
        for (n, own) in self.data.iter().enumerate() {
            let image = if n == 0 { data.as_ref().unwrap_or(own) } else { own };
            // Files in memory have no direct I/O.
            if direct && !image_file::is_resident(image.get()) {
                let (mem, offset) = image_file::direct_alignment(image.get());
                demands.mem_align = demands.mem_align.max(mem);
                // Not a demand on the guest: operations that do not fit go through the page cache.
                // So the least alignment is a page: one that is written both ways loses one of the
                // two.
                offset_align = offset_align.max(offset).max(rustix::param::page_size() as u32);
            }
            layers.push(files.len());
            files.push(OpenFile::new(Arc::clone(image), false));
        }
        let mut map = 0;
        if direct || data.is_some() {
            map = files.len();
            files.push(OpenFile::new(Arc::clone(&self.images[0]), true));
        }
        let synced = if data.is_some() { vec![0, map] } else { vec![0] };
        let align = u64::from(demands.mem_align.max(offset_align));
        if align > cluster_len {
            return Err(format!(
                "direct I/O works in units of {align} bytes there, but its clusters have \
                 {cluster_len}: switch direct off"
            ));
        }
        Ok((FileLayout { files, layers, map, synced, align }, demands))
    }
}

/// A data file is the one that the config names, and it names none for backing images.
fn refuse_data_file(store: &dyn Store) -> Result<(), String> {
    let header = qcow2::read_header(store).map_err(|e| e.to_string())?;
    match header.geometry.data_file {
        true => Err("its data is in another file, which is not served below other images \
                     (qemu-img convert makes an image without one)"
            .into()),
        false => Ok(()),
    }
}

fn unserved_format(format: Option<&str>) -> String {
    match format {
        Some(other) => {
            format!("its backing file has format {other:?}; only raw and qcow2 are served")
        }
        None => "its header does not say the format of the backing file, and formats are never \
                 guessed (qemu-img rebase -u -b NAME -F FORMAT sets it)"
            .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_have_no_protocol() {
        for name in ["json:{\"driver\": \"qcow2\"}", "nbd://host/x", "https://host/a:b", "fat:/x"] {
            assert!(has_protocol(name), "{name}");
        }
        for name in ["base.raw", "/srv/a:b/base.raw", "./a:b", "../x"] {
            assert!(!has_protocol(name), "{name}");
        }
    }
}
