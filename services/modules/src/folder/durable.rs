//! Durability of a folder, and what is done after a disk failed.
//!
//! A sync that fails tells of lost pages once: the kernel takes them for clean from then on, serves
//! them from its memory, and the next sync succeeds. So what is read after a failed sync says
//! nothing about the disk. From that moment nothing is called durable here, and the folder has a
//! mark that outlives the process. The instance ends, since what it believes may not be there;
//! before the next one begins, [`Folder::mend`] copies each file into a new one, syncs that, and
//! gives it the name: what is read then is what is on the disk, whatever became of the old pages.
//! The mark goes last.
//!
//! The mark need not be durable itself: a machine that fails loses the pages with it. Where not
//! even the mark can be made, a process that is killed before it could mend takes the knowledge
//! with it.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::{Folder, errno};
use crate::limits::COPY_BYTES;

/// Says that a sync failed; no module can name it.
const MARK: &str = ".suspect";

/// A copy that is not whole.
const PARTIAL: &str = ".rewrite";

/// Whether a sync failed of files of this folder that were not written anew since.
pub(crate) fn is_suspect(folder: &OwnedFd) -> bool {
    // An error is not an answer: the files are looked at with more suspicion than need be.
    let found = rustix::fs::statat(folder, MARK, AtFlags::SYMLINK_NOFOLLOW);
    !matches!(found, Err(Errno::NOENT))
}

impl Folder {
    pub(super) fn is_marked(&self) -> bool {
        is_suspect(&self.folder)
    }

    /// Whether a sync failed since the files were last mended.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.failed
    }

    /// A sync failed.
    pub(super) fn fail(&mut self, why: Errno) -> Errno {
        if !std::mem::replace(&mut self.failed, true) {
            tracing::error!("a sync failed: {why}; nothing is durable until all is written anew");
            let how = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            if let Err(e) = rustix::fs::openat(&self.folder, MARK, how, Mode::RUSR | Mode::WUSR) {
                tracing::error!("marking the folder of a failed sync with {MARK}: {e}");
            }
        }
        why
    }

    /// Whether a file holds what may not be durable.
    pub(super) fn at_risk(&self, handle: i32) -> bool {
        let inode = self.handles.get(&handle);
        inode.is_some_and(|inode| {
            self.inherited.contains(inode) || self.nodes.get(inode).is_some_and(|n| n.dirty)
        })
    }

    /// Makes a file durable.
    pub fn sync(&mut self, handle: i32) -> Result<(), Errno> {
        if self.failed {
            return Err(Errno::IO);
        }
        let inode = *self.handles.get(&handle).ok_or(Errno::BADF)?;
        self.counts.syncs += 1;
        let node = self.get(handle)?;
        if let Err(e) = rustix::fs::fdatasync(&node.file) {
            return Err(self.fail(e));
        }
        node.dirty = false;
        self.inherited.remove(&inode);
        self.sync_names()
    }

    pub(super) fn sync_names(&mut self) -> Result<(), Errno> {
        if self.failed {
            return Err(Errno::IO);
        }
        if self.names_dirty {
            rustix::fs::fsync(&self.folder).map_err(|e| self.fail(e))?;
            self.names_dirty = false;
        }
        Ok(())
    }

    /// Makes everything durable that was written.
    pub fn sync_all(&mut self) -> Result<(), Errno> {
        let mut wanted: Vec<(u64, i32)> = self
            .handles
            .iter()
            .filter(|(handle, inode)| {
                // Nobody will ever read again what has no name, once its handle is closed.
                self.at_risk(**handle) && self.nodes.get(inode).is_some_and(|n| n.linked)
            })
            .map(|(handle, inode)| (*inode, *handle))
            .collect();
        wanted.sort_unstable();
        wanted.dedup_by_key(|(inode, _)| *inode);
        wanted.into_iter().try_for_each(|(_, handle)| self.sync(handle))?;
        self.sync_names()
    }

    /// Writes all files anew, if a sync failed; none may be open. Until it has succeeded nothing is
    /// durable.
    ///
    /// # Errors
    /// The disk fails still, or has no room for a copy of the longest file.
    pub fn mend(&mut self) -> Result<(), Errno> {
        if !self.failed {
            return Ok(());
        }
        // Other inodes have the names then.
        if let Some(log) = &mut self.written {
            log.mark_all();
        }
        for name in self.list()? {
            if self.regular(&name)?.is_some() {
                self.rewrite(&name)?;
            }
        }
        rustix::fs::fsync(&self.folder)?;
        match rustix::fs::unlinkat(&self.folder, MARK, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => return Err(e),
        }
        self.inherited.clear();
        (self.failed, self.names_dirty) = (false, false);
        tracing::warn!("after a failed sync all files are written anew and durable");
        Ok(())
    }

    fn rewrite(&self, name: &str) -> Result<(), Errno> {
        let how = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let old = rustix::fs::openat(&self.folder, name, how, Mode::empty())?;
        let how = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let new = rustix::fs::openat(&self.folder, PARTIAL, how, Mode::RUSR | Mode::WUSR)?;
        let (old, new) = (std::fs::File::from(old), std::fs::File::from(new));
        rustix::fs::ftruncate(&new, 0)?;
        let (mut piece, mut at) = (vec![0; COPY_BYTES], 0);
        loop {
            let n = rustix::io::retry_on_intr(|| rustix::io::pread(&old, &mut piece[..], at))?;
            if n == 0 {
                break;
            }
            // A hole stays one: there may be no room for more.
            if piece[..n].iter().any(|byte| *byte != 0) {
                new.write_all_at(&piece[..n], at).map_err(|e| errno(&e))?;
            }
            at += n as u64;
        }
        rustix::fs::ftruncate(&new, at)?;
        rustix::fs::fsync(&new)?;
        rustix::fs::renameat(&self.folder, PARTIAL, &self.folder, name)
    }
}
