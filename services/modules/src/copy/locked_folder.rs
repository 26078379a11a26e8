//! Locked folder: one that no process serves.

use std::os::fd::OwnedFd;

use super::CopyError;
use super::take::Steps;
use crate::control::CopyStep;
use crate::folder;
use crate::folder::written::Written;

/// Folder of a module, locked until this is dropped: nobody writes in it.
#[derive(Debug)]
pub struct LockedFolder {
    _lock: OwnedFd,
}

impl LockedFolder {
    /// Locks it, to copy it.
    ///
    /// # Errors
    /// See [`LockedFolder::lock`]; or a sync of its files failed, and what is in it is not to be
    /// believed.
    pub fn new(folder: &OwnedFd) -> Result<Self, CopyError> {
        let locked = Self::lock(folder)?;
        if folder::is_suspect(folder) {
            let text = "a sync of its files failed: resume the module, which writes them anew";
            return Err(CopyError::Module(text.into()));
        }
        Ok(locked)
    }

    /// Locks it.
    ///
    /// # Errors
    /// A process has it.
    pub fn lock(folder: &OwnedFd) -> Result<Self, CopyError> {
        // A description of its own: the lock goes with it.
        let how = rustix::fs::OFlags::RDONLY
            | rustix::fs::OFlags::DIRECTORY
            | rustix::fs::OFlags::CLOEXEC;
        let own = rustix::fs::openat(folder, ".", how, rustix::fs::Mode::empty())
            .map_err(CopyError::files("opening the module's folder"))?;
        if !crate::lock::lock(&own).map_err(|e| CopyError::Module(e.to_string()))? {
            let text = format!("the module's folder is locked by {}", crate::lock::holder(&own));
            return Err(CopyError::Module(text));
        }
        Ok(Self { _lock: own })
    }
}

impl Steps for LockedFolder {
    fn step(&mut self, _: CopyStep) -> Result<Written, String> {
        Ok(Written::Extents(Vec::new()))
    }
}
