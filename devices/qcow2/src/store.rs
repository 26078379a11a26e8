//! The seam below an image: one file, as bytes.
//!
//! Everything that an image keeps goes through here, so that a test can record each write and each
//! sync, and replay what a kill or a power cut would have left.

use std::fmt::Debug;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use rustix::fs::FallocateFlags;

/// Zeroes written at once where the file system cannot zero a range.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// A file that holds an image, or the data of one. All calls wait for the disk.
pub trait Store: Send + Sync + Debug {
    /// Reads from `offset`; less than asked only at the end of the file. Returns the bytes read.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Writes all of `buf` at `offset`.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()>;

    /// Makes everything that was written durable, the file's length too.
    fn sync(&self) -> io::Result<()>;

    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;

    /// Whether there are no bytes.
    fn is_empty(&self) -> io::Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// Cuts or extends the file; what is new reads as zeroes and takes no room.
    fn set_len(&self, len_bytes: u64) -> io::Result<()>;

    /// Makes a range within the file read as zeroes. `may_unmap`: its room may be given back.
    fn zero(&self, offset: u64, len_bytes: u64, may_unmap: bool) -> io::Result<()>;

    /// Whether a range may hold anything but zeroes. A guess where the file system does not tell,
    /// so that a table of terabytes which is a hole is not read.
    fn may_have_data(&self, offset: u64, len_bytes: u64) -> bool {
        let _ = (offset, len_bytes);
        true
    }

    /// Whether [`Store::set_len`] can extend it: a regular file, not a device.
    fn can_grow(&self) -> bool;

    /// Reads all of `buf`; what is behind the end of the file reads as zeroes.
    fn read_padded(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut at = 0;
        while at < buf.len() {
            let got = self.read_at(&mut buf[at..], offset + at as u64)?;
            if got == 0 {
                buf[at..].fill(0);
                break;
            }
            at += got;
        }
        Ok(())
    }
}

/// A regular file or a block device.
#[derive(Debug)]
pub struct FileStore {
    file: File,
    is_regular: bool,
}

impl FileStore {
    /// Uses an open file. It must not be in direct mode: entries of 8 bytes are written.
    pub fn new(file: File) -> io::Result<Self> {
        let is_regular = file.metadata()?.file_type().is_file();
        Ok(Self { file, is_regular })
    }

    fn fallocate(&self, mode: FallocateFlags, offset: u64, len: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(&self.file, mode | FallocateFlags::KEEP_SIZE, offset, len)?)
    }

    fn write_zeroes(&self, offset: u64, len: u64) -> io::Result<()> {
        let mut at = 0;
        while at < len {
            let n = (len - at).min(ZEROES.len() as u64);
            self.file.write_all_at(&ZEROES[..n as usize], offset + at)?;
            at += n;
        }
        Ok(())
    }
}

impl Store for FileStore {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        loop {
            match self.file.read_at(buf, offset) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                other => return other,
            }
        }
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(buf, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn len(&self) -> io::Result<u64> {
        if self.is_regular {
            return Ok(self.file.metadata()?.len());
        }
        // Positioned I/O does not use the offset that this moves.
        Ok(rustix::fs::seek(&self.file, rustix::fs::SeekFrom::End(0))?)
    }

    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.file.set_len(len_bytes)
    }

    fn zero(&self, offset: u64, len_bytes: u64, may_unmap: bool) -> io::Result<()> {
        // On block devices both zero what they cannot unmap.
        let (first, second) = (FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE);
        if may_unmap && self.fallocate(first, offset, len_bytes).is_ok() {
            return Ok(());
        }
        match self.fallocate(second, offset, len_bytes) {
            Err(e) if is_missing(&e) => self.write_zeroes(offset, len_bytes),
            other => other,
        }
    }

    fn may_have_data(&self, offset: u64, len_bytes: u64) -> bool {
        if !self.is_regular {
            return true;
        }
        match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(offset)) {
            Ok(data) => data < offset.saturating_add(len_bytes),
            Err(e) => e != rustix::io::Errno::NXIO,
        }
    }

    fn can_grow(&self) -> bool {
        self.is_regular
    }
}

impl AsRawFd for FileStore {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.file.as_raw_fd()
    }
}

/// The file system or device does not know this operation.
pub(crate) fn is_missing(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY | libc::EINVAL | libc::ENODEV)
    )
}
