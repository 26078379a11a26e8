//! The files of one module of one VM.
//!
//! All are in one folder, opened before the process confines itself, and named by plain names: no slash, no
//! dot in front, so no name leads out of it. They are opened without following links all the same. What is
//! in the folder is bounded: writes beyond end with `ENOSPC`, as on a full disk.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use guest_abi::module_call::{MAX_FILE_NAME_BYTES, MAX_FILES, open};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

/// An open file.
#[derive(Debug)]
struct Open {
    file: File,
    len_bytes: u64,
    /// Something was written that is not durable.
    dirty: bool,
    /// It was there before: whoever wrote it may have ended before it was durable.
    inherited: bool,
}

/// A module's folder.
#[derive(Debug)]
pub struct Folder {
    folder: OwnedFd,
    files: BTreeMap<i32, Open>,
    /// Bytes of all files there, and how many there may be.
    used_bytes: u64,
    limit_bytes: u64,
    /// Files were made, and may not be there after the machine fails.
    names_dirty: bool,
    /// A sync failed: what is on the disk is not known any more.
    failed: bool,
    counts: Counts,
}

/// What was done, since the process began.
#[derive(Debug, Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
pub struct Counts {
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Syncs.
    pub syncs: u64,
}

/// Whether a module may name a file so.
fn checked(name: &[u8]) -> Result<&str, Errno> {
    let plain = |b: &u8| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'-');
    let right = (1..=MAX_FILE_NAME_BYTES).contains(&name.len())
        && name[0] != b'.'
        && name.iter().all(plain);
    if !right {
        return Err(Errno::INVAL);
    }
    std::str::from_utf8(name).map_err(|_| Errno::INVAL)
}

fn errno(error: &io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

impl Folder {
    /// Of an open folder, in which nobody else writes.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn new(folder: OwnedFd, limit_bytes: u64) -> Result<Self, Errno> {
        let mut this = Self {
            folder,
            files: BTreeMap::new(),
            used_bytes: 0,
            limit_bytes,
            // Of an earlier life.
            names_dirty: true,
            failed: false,
            counts: Counts::default(),
        };
        for name in this.list()? {
            this.used_bytes += this.len_of(&name)?;
        }
        Ok(this)
    }

    /// What was done.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes of all files.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// An instance has gone: its handles are closed. What it wrote is read by the next one, which opens the
    /// files and finds them not durable yet.
    pub fn close_all(&mut self) {
        self.files.clear();
    }

    fn len_of(&self, name: &str) -> Result<u64, Errno> {
        let stat = rustix::fs::statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(u64::try_from(stat.st_size).unwrap_or(0))
    }

    fn get(&mut self, handle: i32) -> Result<&mut Open, Errno> {
        self.files.get_mut(&handle).ok_or(Errno::BADF)
    }

    /// Opens a file; its handle.
    pub fn open(&mut self, name: &[u8], flags: u32) -> Result<i32, Errno> {
        let name = checked(name)?;
        if flags & !(open::CREATE | open::TRUNCATE) != 0 {
            return Err(Errno::INVAL);
        }
        let handle = (0..MAX_FILES as i32).find(|h| !self.files.contains_key(h));
        let handle = handle.ok_or(Errno::MFILE)?;
        let inherited = self.len_of(name).is_ok();
        let mut how = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NOCTTY;
        if flags & open::CREATE != 0 {
            how |= OFlags::CREATE;
            self.names_dirty |= !inherited;
        }
        let fd = rustix::fs::openat(&self.folder, name, how, Mode::RUSR | Mode::WUSR)?;
        let stat = rustix::fs::fstat(&fd)?;
        if !rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(Errno::INVAL);
        }
        let len_bytes = u64::try_from(stat.st_size).unwrap_or(0);
        let file = File::from(fd);
        self.files.insert(handle, Open { file, len_bytes, dirty: false, inherited });
        if flags & open::TRUNCATE != 0 {
            self.truncate(handle, 0)?;
        }
        Ok(handle)
    }

    /// Closes it. What was written, in this life or an earlier one, is made durable first: nobody looks after
    /// it later.
    pub fn close(&mut self, handle: i32) -> Result<(), Errno> {
        let open = self.get(handle)?;
        if open.dirty || open.inherited {
            self.sync(handle)?;
        }
        self.files.remove(&handle);
        Ok(())
    }

    /// Its length.
    pub fn len(&mut self, handle: i32) -> Result<u64, Errno> {
        Ok(self.get(handle)?.len_bytes)
    }

    /// Reads.
    pub fn read(&mut self, handle: i32, at: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let open = self.get(handle)?;
        let mut done = 0;
        while done < into.len() {
            match open.file.read_at(&mut into[done..], at + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(errno(&e)),
            }
        }
        self.counts.read_bytes += done as u64;
        Ok(done)
    }

    /// Writes all of it.
    pub fn write(&mut self, handle: i32, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        let end = at.checked_add(bytes.len() as u64).ok_or(Errno::FBIG)?;
        let len = self.get(handle)?.len_bytes;
        self.check_room(end.saturating_sub(len))?;
        let open = self.get(handle)?;
        open.dirty = true;
        let written = open.file.write_all_at(bytes, at);
        // Also after a failure: part of it may be there.
        let now = rustix::fs::fstat(&open.file)?.st_size;
        open.len_bytes = u64::try_from(now).unwrap_or(0);
        let grown = open.len_bytes.saturating_sub(len);
        self.used_bytes += grown;
        self.counts.written_bytes += bytes.len() as u64;
        written.map_err(|e| errno(&e))
    }

    fn check_room(&self, more: u64) -> Result<(), Errno> {
        let fits = self.used_bytes.checked_add(more).is_some_and(|all| all <= self.limit_bytes);
        if fits { Ok(()) } else { Err(Errno::NOSPC) }
    }

    /// Writes all of it at the end, or nothing; where.
    pub fn append(&mut self, handle: i32, bytes: &[u8]) -> Result<u64, Errno> {
        self.check_room(bytes.len() as u64)?;
        let open = self.get(handle)?;
        let at = open.len_bytes;
        open.dirty = true;
        if let Err(e) = open.file.write_all_at(bytes, at) {
            // The part that was written must not stay: what is appended next would be behind it.
            rustix::fs::ftruncate(&open.file, at)?;
            return Err(errno(&e));
        }
        open.len_bytes = at + bytes.len() as u64;
        self.used_bytes += bytes.len() as u64;
        self.counts.written_bytes += bytes.len() as u64;
        Ok(at)
    }

    /// Makes a file durable.
    pub fn sync(&mut self, handle: i32) -> Result<(), Errno> {
        if self.failed {
            return Err(Errno::IO);
        }
        let open = self.files.get_mut(&handle).ok_or(Errno::BADF)?;
        let mut done = rustix::fs::fdatasync(&open.file);
        if done.is_ok() {
            (open.dirty, open.inherited) = (false, false);
            done = self.sync_names();
        }
        self.counts.syncs += 1;
        // The kernel tells of a lost page once. To say later that all is well would be a lie.
        self.failed |= done.is_err();
        done
    }

    fn sync_names(&mut self) -> Result<(), Errno> {
        if self.names_dirty {
            rustix::fs::fsync(&self.folder)?;
            self.names_dirty = false;
        }
        Ok(())
    }

    /// Makes everything durable that was written.
    pub fn sync_all(&mut self) -> Result<(), Errno> {
        let at_risk = |open: &Open| open.dirty || open.inherited;
        let dirty: Vec<i32> =
            self.files.iter().filter(|(_, f)| at_risk(f)).map(|(handle, _)| *handle).collect();
        dirty.into_iter().try_for_each(|handle| self.sync(handle))?;
        let done = if self.failed { Err(Errno::IO) } else { self.sync_names() };
        self.failed |= done.is_err();
        done
    }

    /// Cuts or lengthens it.
    pub fn truncate(&mut self, handle: i32, len_bytes: u64) -> Result<(), Errno> {
        let before = self.get(handle)?.len_bytes;
        self.check_room(len_bytes.saturating_sub(before))?;
        let open = self.get(handle)?;
        rustix::fs::ftruncate(&open.file, len_bytes)?;
        open.dirty = true;
        open.len_bytes = len_bytes;
        self.used_bytes = (self.used_bytes + len_bytes).saturating_sub(before);
        Ok(())
    }

    /// Gives a file another's name, durably.
    pub fn rename(&mut self, from: &[u8], to: &[u8]) -> Result<(), Errno> {
        let (from, to) = (checked(from)?, checked(to)?);
        let replaced = if from == to { 0 } else { self.len_of(to).unwrap_or(0) };
        rustix::fs::renameat(&self.folder, from, &self.folder, to)?;
        self.names_dirty = true;
        self.used_bytes = self.used_bytes.saturating_sub(replaced);
        let done = if self.failed { Err(Errno::IO) } else { self.sync_names() };
        self.failed |= done.is_err();
        done
    }

    /// Removes a file. One that is open keeps its bytes until it is closed, and they are not counted.
    pub fn remove(&mut self, name: &[u8]) -> Result<(), Errno> {
        let name = checked(name)?;
        let len_bytes = self.len_of(name)?;
        rustix::fs::unlinkat(&self.folder, name, AtFlags::empty())?;
        self.names_dirty = true;
        self.used_bytes = self.used_bytes.saturating_sub(len_bytes);
        Ok(())
    }

    /// The names of all files that a module may name, sorted.
    pub fn list(&mut self) -> Result<Vec<String>, Errno> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.folder)? {
            let entry = entry?;
            if let Ok(name) = checked(entry.file_name().to_bytes()) {
                names.push(name.to_owned());
            }
        }
        names.sort_unstable();
        Ok(names)
    }
}

#[cfg(test)]
#[path = "folder_tests.rs"]
mod tests;
