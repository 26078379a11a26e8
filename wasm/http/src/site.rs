//! The site: the index, and a file for each object.
//!
//! An object's file is written and durable before the index names it, and removed when the index
//! does not name it any more and nobody reads it. What a crash leaves in between is removed at the
//! start.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use sdk::{Errno, File, Host, open};
use xxhash_rust::xxh3::Xxh3;

use crate::index::{Index, Object};

/// Limit of paths.
pub const MAX_PATHS: usize = 65_536;
/// Limit of objects that are being written.
pub const MAX_UPLOADS: usize = 32;
/// Limit of objects that are being read.
pub const MAX_OPEN: usize = 192;
/// Names of objects' files begin so.
const PREFIX: &str = "object-";

/// An object that somebody reads, or has read: files stay open until others need the place.
#[derive(Debug)]
struct Open {
    file: File,
    readers: usize,
    /// The index does not name it any more.
    is_gone: bool,
}

/// An object that is being written.
pub struct Upload {
    id: u64,
    file: File,
    len: u64,
    /// More than half a KiB.
    hash: Box<Xxh3>,
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Upload")
            .field("id", &self.id)
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// Site: objects in files, and the index of their paths.
#[derive(Debug)]
pub struct Site {
    index: Index,
    open: BTreeMap<u64, Open>,
    uploads: usize,
}

impl Site {
    /// Reads the index and removes what it does not name.
    ///
    /// # Errors
    /// The storage failed, or the index is damaged.
    pub fn open(host: &mut dyn Host) -> Result<Self, Errno> {
        let index = Index::open(host)?;
        let named: BTreeSet<String> = index.objects().map(|object| name(object.id)).collect();
        for found in host.list()? {
            if found.starts_with(PREFIX) && !named.contains(&found) {
                host.remove(&found)?;
            }
        }
        Ok(Self { index, open: BTreeMap::new(), uploads: 0 })
    }

    /// A path's object.
    pub fn get(&self, path: &[u8]) -> Option<&Object> {
        self.index.get(path)
    }

    /// Begins to read an object, which stays until [`Site::close`].
    ///
    /// # Errors
    /// Too many are open, or the storage failed.
    pub fn read_from(&mut self, host: &mut dyn Host, id: u64) -> Result<File, Errno> {
        if let Some(open) = self.open.get_mut(&id) {
            open.readers += 1;
            return Ok(open.file);
        }
        if self.open.len() >= MAX_OPEN {
            let idle = self.open.iter().find(|(_, open)| open.readers == 0).map(|(id, _)| *id);
            self.close_file(host, idle.ok_or(Errno::MFILE)?);
        }
        let file = host.open(&name(id), 0)?;
        self.open.insert(id, Open { file, readers: 1, is_gone: false });
        Ok(file)
    }

    /// Ends to read an object.
    pub fn close(&mut self, host: &mut dyn Host, id: u64) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.readers -= 1;
        if open.readers == 0 && open.is_gone {
            self.close_file(host, id);
            // If not now, then at the next start.
            let _ = host.remove(&name(id));
        }
    }

    fn close_file(&mut self, host: &mut dyn Host, id: u64) {
        if let Some(open) = self.open.remove(&id) {
            host.close(open.file);
        }
    }

    /// Begins to write an object.
    ///
    /// # Errors
    /// Too many are being written ([`Errno::MFILE`]), too many paths are there, or the storage
    /// failed.
    pub fn begin(&mut self, host: &mut dyn Host, path: &[u8]) -> Result<Upload, Errno> {
        if self.uploads >= MAX_UPLOADS {
            return Err(Errno::MFILE);
        }
        self.check_room(path)?;
        let mut id = [0; 8];
        host.random(&mut id)?;
        let id = u64::from_le_bytes(id);
        let file = host.open(&name(id), open::CREATE | open::TRUNCATE)?;
        self.uploads += 1;
        Ok(Upload { id, file, len: 0, hash: Box::new(Xxh3::new()) })
    }

    fn check_room(&self, path: &[u8]) -> Result<(), Errno> {
        let has_room = self.index.len() < MAX_PATHS || self.index.get(path).is_some();
        has_room.then_some(()).ok_or(Errno::NOSPC)
    }

    /// Writes on.
    ///
    /// # Errors
    /// The storage failed.
    pub fn write(host: &mut dyn Host, upload: &mut Upload, bytes: &[u8]) -> Result<(), Errno> {
        host.write(upload.file, upload.len, bytes)?;
        upload.len += bytes.len() as u64;
        upload.hash.update(bytes);
        Ok(())
    }

    /// The object is whole: gives it its path, durably. True: the path had none before.
    ///
    /// # Errors
    /// The storage failed; the path has what it had.
    pub fn finish(
        &mut self,
        host: &mut dyn Host,
        upload: Upload,
        path: &[u8],
        modified: u64,
    ) -> Result<(bool, Object), Errno> {
        let (id, len, hash) = (upload.id, upload.len, upload.hash.digest128());
        let object = Object { id, len, hash, modified };
        let written = self
            .check_room(path)
            .and_then(|()| host.sync(upload.file))
            .and_then(|()| self.index.set(host, path, Some(object)));
        let old = match written {
            Ok(old) => old,
            Err(errno) => {
                self.abandon(host, upload);
                return Err(errno);
            }
        };
        host.close(upload.file);
        self.uploads -= 1;
        if let Some(old) = &old {
            self.forget(host, old.id);
        }
        Ok((old.is_none(), object))
    }

    /// The object is not to be.
    pub fn abandon(&mut self, host: &mut dyn Host, upload: Upload) {
        host.close(upload.file);
        let _ = host.remove(&name(upload.id));
        self.uploads -= 1;
    }

    /// Removes a path, durably. False: it had no object.
    ///
    /// # Errors
    /// The storage failed; the path is still there.
    pub fn remove(&mut self, host: &mut dyn Host, path: &[u8]) -> Result<bool, Errno> {
        if self.index.get(path).is_none() {
            return Ok(false);
        }
        if let Some(old) = self.index.set(host, path, None)? {
            self.forget(host, old.id);
        }
        Ok(true)
    }

    fn forget(&mut self, host: &mut dyn Host, id: u64) {
        match self.open.get_mut(&id) {
            Some(open) if open.readers > 0 => open.is_gone = true,
            _ => {
                self.close_file(host, id);
                let _ = host.remove(&name(id));
            }
        }
    }
}

fn name(id: u64) -> String {
    format!("{PREFIX}{id:016x}")
}

/// Reads a part of an object behind what is there already.
///
/// # Errors
/// The storage failed, or the object is shorter than the index says.
pub fn read(
    host: &mut dyn Host,
    file: File,
    at: u64,
    len: usize,
    out: &mut Vec<u8>,
) -> Result<(), Errno> {
    let start = out.len();
    out.resize(start + len, 0);
    let read = host.read(file, at, &mut out[start..]);
    match read {
        Ok(got) if got == len => Ok(()),
        other => {
            out.truncate(start);
            other.and(Err(Errno::BADMSG))
        }
    }
}
