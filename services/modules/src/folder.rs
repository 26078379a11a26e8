//! The files of one module of one VM.
//!
//! All are in one folder, opened before the process confines itself, and named by plain names: no
//! slash, no dot in front, so no name leads out of it. They are opened without following links all
//! the same. What is in the folder is bounded: writes beyond end with `ENOSPC`, as on a full disk.
//!
//! *Bytes are counted by inode*: a file that is open twice is one file, and one that was removed
//! while it was open counts until its last handle is closed. What is durable, and what happens when
//! a disk fails, is in [`durable`].
//!
//! *What is written is logged* while somebody copies the files ([`written`]).

mod durable;
pub mod written;

pub(crate) use self::durable::is_suspect;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use guest_abi::module_call::{MAX_FILE_NAME_BYTES, MAX_FILES, MAX_FOLDER_FILES, open};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use self::written::{Written, WrittenLog};

/// A file that is open, however many handles it has.
#[derive(Debug)]
struct Node {
    file: File,
    len_bytes: u64,
    handles: usize,
    /// Whether it still has a name.
    linked: bool,
    /// Whether anything was written that is not durable.
    dirty: bool,
}

/// A module's folder.
#[derive(Debug)]
pub struct Folder {
    folder: OwnedFd,
    /// Inode of each handle.
    handles: BTreeMap<i32, u64>,
    nodes: BTreeMap<u64, Node>,
    /// Inodes that may hold what is not durable: whoever wrote it has ended before that.
    inherited: BTreeSet<u64>,
    /// Files that have a name.
    names: usize,
    /// Bytes of all files, also of those that are open and have no name any more.
    used_bytes: u64,
    limit_bytes: u64,
    /// Files were made, and may not be there after the machine fails.
    names_dirty: bool,
    /// A sync failed: what is on the disk is not known, until [`Folder::mend`] has written it anew.
    failed: bool,
    /// Log of what is written, during a copy.
    written: Option<WrittenLog>,
    counts: Counts,
}

/// Counters since the process began.
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
pub(crate) fn checked(name: &[u8]) -> Result<&str, Errno> {
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

fn len_of(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

impl Folder {
    /// Begins with an open folder, in which nobody else writes.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn new(folder: OwnedFd, limit_bytes: u64) -> Result<Self, Errno> {
        let mut this = Self {
            folder,
            handles: BTreeMap::new(),
            nodes: BTreeMap::new(),
            inherited: BTreeSet::new(),
            names: 0,
            used_bytes: 0,
            limit_bytes,
            // Of an earlier life.
            names_dirty: true,
            failed: false,
            written: None,
            counts: Counts::default(),
        };
        this.failed = this.is_marked();
        for name in this.list()? {
            if let Some(stat) = this.regular(&name)? {
                this.names += 1;
                this.used_bytes += len_of(&stat);
                this.inherited.insert(stat.st_ino);
            }
        }
        Ok(this)
    }

    /// Counters.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Bytes of all files.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes
    }

    /// Logs what is written from now on, or no more.
    pub fn log_written(&mut self, on: bool) {
        self.written = on.then(WrittenLog::new);
    }

    /// Takes the log of what was written since it was begun or taken; none: there is no log.
    pub fn take_written(&mut self) -> Option<Written> {
        self.written.as_mut().map(WrittenLog::take)
    }

    /// A part of a file changes.
    fn mark(&mut self, handle: i32, at: u64, len_bytes: u64) {
        if let (Some(log), Some(inode)) = (&mut self.written, self.handles.get(&handle)) {
            log.mark(*inode, at, len_bytes);
        }
    }

    /// An instance has gone: its handles are closed. What it wrote is read by the next one, which
    /// opens the files and finds them not durable yet.
    pub fn close_all(&mut self) {
        self.handles.clear();
        for (inode, node) in std::mem::take(&mut self.nodes) {
            if !node.linked {
                self.forget(inode, node.len_bytes);
            } else if node.dirty {
                self.inherited.insert(inode);
            }
        }
    }

    /// A file has neither name nor handle any more.
    fn forget(&mut self, inode: u64, len_bytes: u64) {
        self.used_bytes = self.used_bytes.saturating_sub(len_bytes);
        self.inherited.remove(&inode);
    }

    /// A file of this name; none: it is something else.
    fn regular(&self, name: &str) -> Result<Option<Stat>, Errno> {
        let stat = rustix::fs::statat(&self.folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok(FileType::from_raw_mode(stat.st_mode).is_file().then_some(stat))
    }

    fn get(&mut self, handle: i32) -> Result<&mut Node, Errno> {
        let inode = self.handles.get(&handle).ok_or(Errno::BADF)?;
        self.nodes.get_mut(inode).ok_or(Errno::BADF)
    }

    /// Opens a file; its handle.
    pub fn open(&mut self, name: &[u8], flags: u32) -> Result<i32, Errno> {
        let name = checked(name)?;
        if flags & !(open::CREATE | open::TRUNCATE) != 0 {
            return Err(Errno::INVAL);
        }
        let handle = (0..MAX_FILES as i32).find(|h| !self.handles.contains_key(h));
        let handle = handle.ok_or(Errno::MFILE)?;
        let mut how = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NOCTTY;
        let mut is_new = false;
        if flags & open::CREATE != 0 {
            how |= OFlags::CREATE;
            is_new = self.regular(name).is_err_and(|e| e == Errno::NOENT);
        }
        if is_new && self.names >= MAX_FOLDER_FILES {
            return Err(Errno::NOSPC);
        }
        let fd = rustix::fs::openat(&self.folder, name, how, Mode::RUSR | Mode::WUSR)?;
        self.names += usize::from(is_new);
        self.names_dirty |= is_new;
        let stat = rustix::fs::fstat(&fd)?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(Errno::INVAL);
        }
        // One descriptor for all handles of a file: lengths and what is not durable are the file's.
        let node = self.nodes.entry(stat.st_ino).or_insert_with(|| Node {
            file: File::from(fd),
            len_bytes: len_of(&stat),
            handles: 0,
            linked: true,
            dirty: false,
        });
        node.handles += 1;
        self.handles.insert(handle, stat.st_ino);
        if flags & open::TRUNCATE != 0
            && let Err(e) = self.truncate(handle, 0)
        {
            self.release(handle);
            return Err(e);
        }
        Ok(handle)
    }

    /// Closes it. What was written, in this life or an earlier one, is made durable first: nobody
    /// looks after it later.
    pub fn close(&mut self, handle: i32) -> Result<(), Errno> {
        let node = self.get(handle)?;
        // Nobody will ever read what has no name.
        if node.linked && node.handles == 1 && self.at_risk(handle) {
            self.sync(handle)?;
        }
        self.release(handle);
        Ok(())
    }

    fn release(&mut self, handle: i32) {
        let Some(inode) = self.handles.remove(&handle) else { return };
        let Some(node) = self.nodes.get_mut(&inode) else { return };
        node.handles -= 1;
        if node.handles > 0 {
            return;
        }
        if let Some(Node { linked: false, len_bytes, .. }) = self.nodes.remove(&inode) {
            self.forget(inode, len_bytes);
        }
    }

    /// Length of a file in bytes.
    pub fn len(&mut self, handle: i32) -> Result<u64, Errno> {
        Ok(self.get(handle)?.len_bytes)
    }

    /// Reads.
    pub fn read(&mut self, handle: i32, at: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let node = self.get(handle)?;
        let mut done = 0;
        while done < into.len() {
            match node.file.read_at(&mut into[done..], at + done as u64) {
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
        // It would lengthen nothing.
        if bytes.is_empty() {
            return Ok(());
        }
        self.check_room(end.saturating_sub(len))?;
        // With what it leaves between them as a hole: other bytes may have been there before.
        let from = at.min(len);
        self.mark(handle, from, end - from);
        let node = self.get(handle)?;
        node.dirty = true;
        let written = node.file.write_all_at(bytes, at);
        self.counts.written_bytes += bytes.len() as u64;
        match written {
            Ok(()) => self.has_len(handle, len.max(end)),
            // Part of it may be there.
            Err(e) => self.measure(handle).and(Err(errno(&e))),
        }
    }

    fn check_room(&self, more: u64) -> Result<(), Errno> {
        let fits = self.used_bytes.checked_add(more).is_some_and(|all| all <= self.limit_bytes);
        if fits || more == 0 { Ok(()) } else { Err(Errno::NOSPC) }
    }

    /// A file has this length now.
    fn has_len(&mut self, handle: i32, len_bytes: u64) -> Result<(), Errno> {
        let before = std::mem::replace(&mut self.get(handle)?.len_bytes, len_bytes);
        self.used_bytes = (self.used_bytes + len_bytes).saturating_sub(before);
        Ok(())
    }

    /// Reads the length of a file anew, after something failed half way.
    fn measure(&mut self, handle: i32) -> Result<(), Errno> {
        let stat = rustix::fs::fstat(&self.get(handle)?.file)?;
        self.has_len(handle, len_of(&stat))
    }

    /// Writes all of it at the end, or nothing; where.
    pub fn append(&mut self, handle: i32, bytes: &[u8]) -> Result<u64, Errno> {
        self.check_room(bytes.len() as u64)?;
        let at = self.get(handle)?.len_bytes;
        self.mark(handle, at, bytes.len() as u64);
        let node = self.get(handle)?;
        node.dirty = true;
        if let Err(e) = node.file.write_all_at(bytes, at) {
            // The part that was written must not stay: what is appended next would be behind it.
            let cut = rustix::fs::ftruncate(&node.file, at);
            self.measure(handle)?;
            return cut.and(Err(errno(&e)));
        }
        self.has_len(handle, at + bytes.len() as u64)?;
        self.counts.written_bytes += bytes.len() as u64;
        Ok(at)
    }

    /// Cuts or lengthens it.
    pub fn truncate(&mut self, handle: i32, len_bytes: u64) -> Result<(), Errno> {
        let before = self.get(handle)?.len_bytes;
        self.check_room(len_bytes.saturating_sub(before))?;
        self.mark(handle, before.min(len_bytes), before.abs_diff(len_bytes));
        let node = self.get(handle)?;
        rustix::fs::ftruncate(&node.file, len_bytes)?;
        node.dirty = true;
        self.has_len(handle, len_bytes)
    }

    /// Gives a file another's name, durably.
    pub fn rename(&mut self, from: &[u8], to: &[u8]) -> Result<(), Errno> {
        let (from, to) = (checked(from)?, checked(to)?);
        let replaced = if from == to { None } else { self.regular(to).ok().flatten() };
        rustix::fs::renameat(&self.folder, from, &self.folder, to)?;
        self.names_dirty = true;
        if let Some(stat) = replaced {
            self.unlinked(&stat);
        }
        self.sync_names()
    }

    /// Removes a file. One that is open keeps its bytes, and they count, until it is closed.
    pub fn remove(&mut self, name: &[u8]) -> Result<(), Errno> {
        let name = checked(name)?;
        let stat = self.regular(name)?.ok_or(Errno::INVAL)?;
        rustix::fs::unlinkat(&self.folder, name, AtFlags::empty())?;
        self.names_dirty = true;
        self.unlinked(&stat);
        Ok(())
    }

    /// A file has lost its name.
    fn unlinked(&mut self, stat: &Stat) {
        self.names = self.names.saturating_sub(1);
        match self.nodes.get_mut(&stat.st_ino) {
            Some(node) => node.linked = false,
            None => self.forget(stat.st_ino, len_of(stat)),
        }
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
mod tests;
