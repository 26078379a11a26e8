//! Opening image files: once, without blocking, checked by descriptor, locked.
//!
//! A path is looked at exactly once (`open`); everything after that, type, size, alignment, lock,
//! uses the descriptor, so that nothing can be exchanged in between (F2). Locks are QEMU's: see
//! [`crate::lock`].

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, StatxFlags};

use crate::error::BlockError;
use crate::lock;

/// Mode of opening an image.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpenMode {
    pub read_only: bool,
    pub direct: bool,
}

impl OpenMode {
    /// Non-blocking for the open itself only: a FIFO must not hang the daemon before it is refused.
    fn flags(self) -> OFlags {
        let mut flags = OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
        flags |= if self.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        if self.direct {
            flags |= OFlags::DIRECT;
        }
        flags
    }
}

/// An open, checked and locked image.
#[derive(Debug)]
pub(crate) struct ImageFile(File);

impl ImageFile {
    /// The file.
    pub fn get(&self) -> &File {
        &self.0
    }
}

impl Drop for ImageFile {
    fn drop(&mut self) {
        // Closing would release the lock too, but the kernel takes a ring apart in the background
        // and holds the file until then: the next daemon must not find it locked.
        lock::release(&self.0);
    }
}

/// Opens, checks and locks an image that the administrator named. Symbolic links are followed:
/// volume managers name block devices by them.
pub(crate) fn open_image(path: &Path, mode: OpenMode) -> Result<ImageFile, BlockError> {
    let fd = rustix::fs::open(path, mode.flags(), Mode::empty())
        .map_err(|e| BlockError::file("cannot open", path)(e.into()))?;
    admit(fd, path, mode)
}

/// Opens, checks and locks an image that another image named: below `dir`, with no symbolic link
/// on the way and no way out (F1). `relative` is relative to `dir`.
pub(crate) fn open_beneath(
    dir: &OwnedFd,
    relative: &Path,
    mode: OpenMode,
) -> Result<ImageFile, BlockError> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let fd = rustix::fs::openat2(dir, relative, mode.flags(), Mode::empty(), resolve)
        .map_err(|e| BlockError::file("cannot open the backing file", relative)(e.into()))?;
    admit(fd, relative, mode)
}

/// Type check, lock, and back to blocking: io_uring fails operations on non-blocking files with
/// EAGAIN instead of waiting for the disk.
fn admit(fd: OwnedFd, path: &Path, mode: OpenMode) -> Result<ImageFile, BlockError> {
    let stat =
        rustix::fs::fstat(&fd).map_err(|e| BlockError::file("cannot stat", path)(e.into()))?;
    let found = match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::BlockDevice => None,
        FileType::Directory => Some("directory"),
        FileType::Fifo => Some("FIFO"),
        FileType::Socket => Some("socket"),
        FileType::CharacterDevice => Some("character device"),
        _ => Some("special file"),
    };
    if let Some(found) = found {
        return Err(BlockError::NotAFile { path: path.to_path_buf(), found });
    }
    lock::take(&fd, path, mode.read_only)?;
    let clear = rustix::fs::fcntl_getfl(&fd)
        .and_then(|flags| rustix::fs::fcntl_setfl(&fd, flags & !OFlags::NONBLOCK));
    clear.map_err(|e| BlockError::file("cannot set flags of", path)(e.into()))?;
    Ok(ImageFile(File::from(fd)))
}

/// Opens an image once more, through the page cache and without a lock. The new opening may write
/// where the old one may.
pub(crate) fn open_buffered(image: &ImageFile) -> io::Result<File> {
    let link = format!("/proc/self/fd/{}", image.get().as_raw_fd());
    let writable = rustix::fs::fcntl_getfl(image.get())?.contains(OFlags::RDWR);
    File::options().read(true).write(writable).open(link)
}

/// Size of a regular file or block device (which `stat` gives as 0).
pub(crate) fn len_bytes(file: &File) -> io::Result<u64> {
    let stat = rustix::fs::fstat(file)?;
    if FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice {
        // Seeking moves the offset of the description; positioned I/O does not use it.
        return Ok(rustix::fs::seek(file, rustix::fs::SeekFrom::End(0))?);
    }
    Ok(stat.st_size as u64)
}

/// Whether it is a file and not a block device.
pub(crate) fn is_regular(file: &File) -> bool {
    rustix::fs::fstat(file).is_ok_and(|s| FileType::from_raw_mode(s.st_mode).is_file())
}

/// Whether the file's bytes are always in memory: tmpfs (0x01021994) or ramfs (0x858458f6), whose
/// numbers statfs(2) lists. Memory files are on the former. Not a block device, whose node in /dev
/// is on a tmpfs too: its bytes are elsewhere.
pub(crate) fn is_resident(file: &File) -> bool {
    if !is_regular(file) {
        return false;
    }
    let magic = rustix::fs::fstatfs(file).map(|s| s.f_type as u32);
    matches!(magic, Ok(0x0102_1994 | 0x8584_58f6))
}

/// Alignment of memory and of offsets that direct I/O asks for, as the kernel reports it (Linux
/// 6.1); else 4,096 for memory, which every disk accepts, and 512 for offsets.
pub(crate) fn direct_alignment(file: &File) -> (u32, u32) {
    let unknown = (4096, 512);
    let mask = StatxFlags::from_bits_retain(libc::STATX_DIOALIGN);
    match rustix::fs::statx(file.as_fd(), c"", AtFlags::EMPTY_PATH, mask) {
        Ok(s) if s.stx_mask & libc::STATX_DIOALIGN != 0 && s.stx_dio_offset_align != 0 => {
            (s.stx_dio_mem_align.max(1), s.stx_dio_offset_align)
        }
        _ => unknown,
    }
}

/// Block size of the disk's GPT, whose header is in the second block and names its own place;
/// `None` without a GPT. Guests find it by their block size alone.
pub(crate) fn partition_table_block_size(file: &File) -> io::Result<Option<u32>> {
    #[repr(C, align(4096))]
    struct Blocks([u8; 8192]);
    // Direct I/O wants aligned memory and whole blocks; a short disk gives less.
    let mut blocks = Blocks([0; 8192]);
    let len = std::os::unix::fs::FileExt::read_at(file, &mut blocks.0, 0)?;
    let has_header = |size: &u32| {
        let at = *size as usize;
        let header = blocks.0[..len].get(at..at + 32);
        header.is_some_and(|h| h[..8] == *b"EFI PART" && h[24..32] == 1u64.to_le_bytes())
    };
    Ok([512, 1024, 2048, 4096].into_iter().find(has_header))
}

#[cfg(test)]
#[allow(non_snake_case)]
mod tests {
    use std::fs;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn files_on_tmpfs_are_in_memory_and_block_devices_are_not() {
        let resident = |dir: &str| is_resident(&tempfile::tempfile_in(dir).unwrap());
        assert_eq!((resident("/dev/shm"), resident("/var/tmp")), (true, false));
        let is_device = |path: &Path| {
            let mode = fs::metadata(path).map(|m| std::os::unix::fs::MetadataExt::mode(&m));
            mode.is_ok_and(|mode| FileType::from_raw_mode(mode).is_block_device())
        };
        let devices = fs::read_dir("/dev").unwrap().map(|entry| entry.unwrap().path());
        let mut opened = 0;
        for path in devices.filter(|path| is_device(path)) {
            // Others' devices, and drives without a medium, cannot be opened.
            let Ok(device) = File::open(&path) else { continue };
            assert!(!is_resident(&device), "{}", path.display());
            opened += 1;
        }
        eprintln!("{opened} block devices looked at");
    }

    /// Callers resolve names before they come here; whoever exchanges a part of the path between
    /// the two must still not get out.
    #[test]
    fn abuse_F2_opening_beneath_follows_no_link_and_leads_nowhere_else() {
        let root = tempfile::tempdir().unwrap();
        let images = root.path().join("images");
        fs::create_dir_all(images.join("sub")).unwrap();
        for name in ["secret", "images/base.raw", "images/sub/base.raw"] {
            fs::write(root.path().join(name), [7; 512]).unwrap();
        }
        // Out of the folder, and within it: names that were resolved have no links at all.
        symlink(root.path().join("secret"), images.join("out.raw")).unwrap();
        symlink("base.raw", images.join("in.raw")).unwrap();
        symlink("sub", images.join("dir")).unwrap();
        let dir: OwnedFd = File::open(&images).unwrap().into();
        let mode = OpenMode { read_only: true, direct: false };
        let open = |name: &str| open_beneath(&dir, Path::new(name), mode);
        open("base.raw").unwrap();
        open("sub/base.raw").unwrap();
        let absolute = root.path().join("secret");
        let absolute = absolute.to_str().unwrap();
        let names =
            ["out.raw", "in.raw", "dir/base.raw", "../secret", "sub/../../secret", absolute];
        for name in names {
            let text = open(name).expect_err(name).to_string();
            assert!(text.contains("cannot open the backing file"), "{text}");
        }
        let itself = format!("/proc/self/fd/{}", dir.as_raw_fd());
        assert!(open(&itself).is_err());
    }
}
