//! Target of the work: a file, or a part of a disk.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, OFlags, fadvise};

use crate::model::Model;
use crate::sys;

/// How bytes go to a file or come from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Through the page cache.
    Buffered,
    /// Past it, with `O_DIRECT`.
    Direct,
    /// Through a mapping.
    Mapped,
}

/// A file or a part of a disk, opened, with what it must hold.
#[derive(Debug)]
pub struct Target {
    /// Path of the file or disk.
    pub path: PathBuf,
    /// Number of the target in patterns.
    pub number: u8,
    /// Model of the content; offsets are from the target's own begin.
    pub model: Model,
    /// Begin of a part of a disk; `None` for a file.
    begin: Option<u64>,
    /// Longest that it may get.
    pub max_len_bytes: u64,
    buffered: File,
    direct: File,
}

fn open(path: &Path, create: bool, flags: OFlags) -> io::Result<File> {
    let flags = i32::try_from(flags.bits()).unwrap_or(0);
    OpenOptions::new().read(true).write(true).create(create).custom_flags(flags).open(path)
}

impl Target {
    /// Opens a file or a part of a disk that holds what a model says.
    ///
    /// # Errors
    /// It cannot be opened, with and without `O_DIRECT`.
    pub fn open(
        path: &Path,
        number: u8,
        begin: Option<u64>,
        max_len_bytes: u64,
        model: Model,
    ) -> io::Result<Self> {
        let buffered = open(path, begin.is_none(), OFlags::empty())?;
        let direct = open(path, false, OFlags::DIRECT)?;
        Ok(Self { path: path.into(), number, model, begin, max_len_bytes, buffered, direct })
    }

    /// Begin of a part of a disk.
    #[must_use]
    pub fn begin(&self) -> Option<u64> {
        self.begin
    }

    /// The open file for a way other than `O_DIRECT`.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.buffered
    }

    /// Position of an offset in the open file.
    #[must_use]
    pub fn offset(&self, at: u64) -> u64 {
        self.begin.unwrap_or(0) + at
    }

    /// Writes bytes; a mapping must lie within the file.
    ///
    /// # Errors
    /// As pwrite(2), mmap(2), msync(2).
    pub fn write(&self, way: Way, at: u64, bytes: &[u8], sync: bool) -> io::Result<()> {
        let at = self.offset(at);
        match way {
            Way::Buffered => self.buffered.write_all_at(bytes, at),
            Way::Direct => self.direct.write_all_at(bytes, at),
            Way::Mapped => sys::write_mapped(&self.buffered, at, bytes, sync),
        }
    }

    /// Reads up to a buffer's length; how many bytes there were before the end. A mapping must lie
    /// within the file.
    ///
    /// # Errors
    /// As pread(2), mmap(2).
    pub fn read(&self, way: Way, at: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let at = self.offset(at);
        let file = match way {
            Way::Buffered => &self.buffered,
            Way::Direct => &self.direct,
            Way::Mapped => {
                return sys::read_mapped(&self.buffered, at, bytes).map(|()| bytes.len());
            }
        };
        let mut done = 0;
        while done < bytes.len() {
            match file.read_at(&mut bytes[done..], at + done as u64) {
                Ok(0) => break,
                // After a short direct read the rest is not aligned any more: it was the end.
                Ok(len) => done += len,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => (),
                Err(e) => return Err(e),
            }
            if way == Way::Direct && done < bytes.len() {
                break;
            }
        }
        Ok(done)
    }

    /// Writes dirty pages of a range back and drops its pages from the cache: the next read comes
    /// from the disk, which was not flushed.
    ///
    /// # Errors
    /// The disk fails.
    pub fn evict(&self, range: Range<u64>) -> io::Result<()> {
        let (at, len) = (self.offset(range.start), range.end - range.start);
        sys::write_back(&self.buffered, at, len)?;
        Ok(fadvise(&self.buffered, at, len.try_into().ok(), Advice::DontNeed)?)
    }

    /// Closes it and opens it again; a file's length must be the model's.
    ///
    /// # Errors
    /// It cannot be opened, or has another length.
    pub fn reopen(&mut self) -> io::Result<()> {
        self.buffered = open(&self.path, false, OFlags::empty())?;
        self.direct = open(&self.path, false, OFlags::DIRECT)?;
        self.check_len()
    }

    /// Removes the file and makes a new one of its name.
    ///
    /// # Errors
    /// The file system fails.
    pub fn recreate(&mut self) -> io::Result<()> {
        fs::remove_file(&self.path)?;
        self.buffered = open(&self.path, true, OFlags::empty())?;
        self.direct = open(&self.path, false, OFlags::DIRECT)?;
        self.model.resize(0);
        self.check_len()
    }

    /// A file's length must be the model's.
    ///
    /// # Errors
    /// It is another, or cannot be asked for.
    pub fn check_len(&self) -> io::Result<()> {
        let len = self.buffered.metadata()?.len();
        let want = self.model.len_bytes();
        if self.begin.is_none() && len != want {
            let text = format!("the file has {len} bytes, written were {want}");
            return Err(io::Error::other(text));
        }
        Ok(())
    }
}
