//! Opening a qcow2 image and its backing files, without believing what the image says.
//!
//! The header of an image is guest-made data as soon as a guest had the image as a raw disk, and
//! user-made data when users upload images. So (F1): formats are never probed, not of the image and
//! not of backing files; a backing file must lie in the configured directory, reached without any
//! symbolic link; encrypted images and external data files are refused. The library itself is not
//! believed either: a panic in it is an error.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use imago::FormatAccess;
use imago::file::File;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use rustix::fs::{Mode, OFlags};

use crate::error::BlockError;
use crate::file::{self, Image, OpenMode};

/// Longest chain of images: each is a file held open and a lookup per read; tools that make chains
/// collapse them long before.
const MAX_CHAIN: usize = 8;

/// Bytes of the fixed version 3 header, up to and including the incompatible features.
const HEADER_LEN_BYTES: usize = 80;

/// An open image with everything it stands on.
pub(super) struct Opened {
    pub access: FormatAccess<File>,
    /// Keeps the locks.
    pub images: Vec<Image>,
    pub len_bytes: u64,
}

/// Opens `path` as qcow2. A header that makes the library panic is an image that is refused, not the
/// end of a daemon that serves other VMs.
pub(super) fn open(
    path: &Path,
    backing_dir: Option<&Path>,
    direct: bool,
    read_only: bool,
) -> Result<Opened, BlockError> {
    // Nothing of ours is shared with the closure: what a panic leaves half done is dropped with it.
    let run = AssertUnwindSafe(|| open_chain(path, backing_dir, direct, read_only));
    catch_unwind(run).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no text");
        let reason = format!("it, or a backing file of it, makes the qcow2 library panic: {text}");
        Err(refused(path, reason))
    })
}

fn open_chain(
    path: &Path,
    backing_dir: Option<&Path>,
    direct: bool,
    read_only: bool,
) -> Result<Opened, BlockError> {
    let mode = OpenMode { read_only, direct };
    let image = file::open_image(path, mode)?;
    let rule = BackingRule::new(backing_dir, direct)?;
    let mut images = Vec::new();
    // Relative backing names start at the image, wherever links to it are.
    let real = fs::canonicalize(path).map_err(BlockError::file("cannot resolve", path))?;
    let access = open_qcow2(image, &real, mode, &rule, &mut images)?;
    let len_bytes = access.size();
    Ok(Opened { access, images, len_bytes })
}

/// Where backing files may be.
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
    fn open(&self, image: &Path, name: &str) -> Result<(Image, PathBuf), BlockError> {
        let refuse = |why: String| refused(image, format!("its backing file {name:?} {why}"));
        let Some((dir, fd)) = &self.dir else {
            return Err(refuse("is refused: no backing directory is configured".into()));
        };
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
        Ok((file::open_beneath(fd, relative, mode)?, real))
    }
}

fn refused(image: &Path, reason: String) -> BlockError {
    BlockError::Image { path: image.to_path_buf(), reason }
}

/// Opens one qcow2 layer and, recursively, what is below.
fn open_qcow2(
    image: Image,
    path: &Path,
    mode: OpenMode,
    rule: &BackingRule,
    images: &mut Vec<Image>,
) -> Result<FormatAccess<File>, BlockError> {
    if images.len() >= MAX_CHAIN {
        return Err(refused(path, format!("more than {MAX_CHAIN} images in its backing chain")));
    }
    check_header(image.get(), path, mode.direct)?;
    let storage = storage(&image, path)?;
    images.push(image);
    let mut qcow2: Qcow2<File> = Qcow2::open_image(storage, !mode.read_only)
        .map_err(|e| refused(path, format!("cannot be opened: {e}")))?;
    if qcow2.requires_external_data_file() {
        return Err(refused(path, "external data files are refused".into()));
    }
    qcow2.set_data_file(None);
    let named = qcow2.implicit_backing_file().cloned();
    let format = qcow2.implicit_backing_format().cloned();
    let backing = match named {
        None => None,
        Some(name) => Some(open_backing(path, &name, format.as_deref(), rule, images)?),
    };
    qcow2.set_backing(backing);
    Ok(FormatAccess::new(qcow2))
}

fn open_backing(
    path: &Path,
    name: &str,
    format: Option<&str>,
    rule: &BackingRule,
    images: &mut Vec<Image>,
) -> Result<FormatAccess<File>, BlockError> {
    let (image, real) = rule.open(path, name)?;
    match format {
        Some("qcow2") => {
            let mode = OpenMode { read_only: true, direct: rule.direct };
            open_qcow2(image, &real, mode, rule, images)
        }
        Some("raw") => {
            let storage = storage(&image, &real)?;
            images.push(image);
            let raw = Raw::open_image(storage, false)
                .map_err(|e| refused(&real, format!("cannot be opened: {e}")))?;
            Ok(FormatAccess::new(raw))
        }
        Some(other) => Err(refused(
            path,
            format!("its backing file has format {other:?}; only raw and qcow2 are served"),
        )),
        None => Err(refused(
            path,
            "its header does not say the format of the backing file, and formats are never guessed \
             (qemu-img rebase -u -F sets it)"
                .into(),
        )),
    }
}

/// The library's view of an open image; the lock stays with ours.
fn storage(image: &Image, path: &Path) -> Result<File, BlockError> {
    let file = image.get().try_clone().map_err(BlockError::file("cannot duplicate", path))?;
    File::try_from(file).map_err(BlockError::file("cannot use", path))
}

/// Checks what the library does not: that it is qcow2 at all, and not encrypted.
fn check_header(file: &fs::File, path: &Path, direct: bool) -> Result<(), BlockError> {
    // Direct I/O wants whole, aligned blocks; the header is read again by the library anyway.
    let mut block = Block([0; 4096]);
    let want = if direct { block.0.len() } else { HEADER_LEN_BYTES };
    let got = file
        .read_at(&mut block.0[..want], 0)
        .map_err(BlockError::file("cannot read the header of", path))?;
    let header = &block.0[..got.min(HEADER_LEN_BYTES)];
    let u32_at =
        |at: usize| header.get(at..at + 4).map(|b| u32::from_be_bytes([b[0], b[1], b[2], b[3]]));
    if u32_at(0) != Some(0x5146_49fb) {
        return Err(refused(path, "is not a qcow2 image (formats are never guessed)".into()));
    }
    match u32_at(4) {
        Some(2 | 3) => {}
        version => {
            let version = version.unwrap_or(0);
            return Err(refused(path, format!("has version {version}; served are 2 and 3")));
        }
    }
    if u32_at(32) != Some(0) {
        return Err(refused(path, "is encrypted; encrypted images are refused".into()));
    }
    Ok(())
}

#[repr(C, align(4096))]
struct Block([u8; 4096]);
