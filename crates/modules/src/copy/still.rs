//! A folder that no process serves.

use std::os::fd::OwnedFd;

use super::CopyError;
use super::take::Steps;
use crate::control::Step;
use crate::folder;
use crate::folder::written::Written;

/// A folder that is locked for us, until this is dropped: nobody writes in it.
#[derive(Debug)]
pub struct Still {
    _lock: OwnedFd,
}

impl Still {
    /// Locks it, to copy it.
    ///
    /// # Errors
    /// As of [`Still::lock`]; a sync of its files failed, and what is in it is not to be believed.
    pub fn new(folder: &OwnedFd) -> Result<Self, CopyError> {
        let still = Self::lock(folder)?;
        if folder::is_suspect(folder) {
            let text = "a sync of its files failed: resume the module, which writes them anew";
            return Err(CopyError::Module(text.into()));
        }
        Ok(still)
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

impl Steps for Still {
    fn step(&mut self, _: Step) -> Result<Written, String> {
        Ok(Written::Extents(Vec::new()))
    }
}
