//! Modules that are ended until somebody says otherwise, so that their folder can go to another
//! host.
//!
//! A mark in the folder says so, beside the modules' own: a daemon that finds it starts no process,
//! be it this one after a restart or that of the host where the folder went.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::atomic::Ordering;

use base::sync::lock;
use control::plane::PlaneError;
use modules::ModuleConfig;
use modules::copy::LockedFolder;

use super::{Modules, VmEntry, refused};

/// File that marks a folder as drained; no module has this name.
const MARK: &str = ".drained";

/// Whether the modules of this folder are not to be started.
pub(super) fn is_marked(state_dir: &Path) -> bool {
    // What cannot be looked at is not taken for a folder to serve.
    state_dir
        .join(MARK)
        .symlink_metadata()
        .map_or_else(|e| e.kind() != io::ErrorKind::NotFound, |_| true)
}

fn mark(state_dir: &Path) -> io::Result<()> {
    File::create(state_dir.join(MARK))?.sync_all()?;
    File::open(state_dir)?.sync_all()
}

fn unmark(state_dir: &Path) -> io::Result<()> {
    match std::fs::remove_file(state_dir.join(MARK)) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
        _ => File::open(state_dir)?.sync_all(),
    }
}

impl VmEntry {
    fn drain(&self) -> Result<(), PlaneError> {
        let modules = lock(&self.state).modules.clone();
        // Those that have not begun do not begin any more.
        if let Some(modules) = &modules {
            modules.drain().map_err(refused)?;
        }
        let state_dir = &self.config.state_dir;
        let marked = self.nobody_serves().and_then(|_locks| {
            mark(state_dir).map_err(|e| format!("marking {} as drained: {e}", state_dir.display()))
        });
        if let Err(text) = marked {
            modules.iter().for_each(|modules| modules.begin_resume());
            return Err(PlaneError::Refused(text));
        }
        lock(&self.state).drained = true;
        Ok(())
    }

    /// Locks all folders of the modules. Another daemon's process on this host may hold them.
    fn nobody_serves(&self) -> Result<Vec<LockedFolder>, String> {
        let list = lock(&self.state).list.clone();
        let lock_folder = |module: &ModuleConfig| {
            let path = self.config.state_dir.join(&module.name);
            match File::open(&path) {
                Ok(folder) => {
                    LockedFolder::lock(&folder.into()).map(Some).map_err(|e| e.to_string())
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(e) => Err(format!("opening {}: {e}", path.display())),
            }
        };
        list.iter().filter_map(|module| lock_folder(module).transpose()).collect()
    }

    fn resume(&self) -> Result<(), PlaneError> {
        let state_dir = &self.config.state_dir;
        let modules = lock(&self.state).modules.clone();
        if modules.is_some() && !lock(&self.state).drained && is_marked(state_dir) {
            let text = format!(
                "the modules of VM {} run, and {} was filled with another host's files meanwhile: what they \
                 serve is not what is there. Drain them first, then put the files there, then resume",
                self.config.vm,
                state_dir.display()
            );
            return Err(PlaneError::Conflict(text));
        }
        unmark(state_dir).map_err(|e| {
            PlaneError::Refused(format!("removing the mark in {}: {e}", state_dir.display()))
        })?;
        lock(&self.state).drained = false;
        match modules {
            Some(modules) => modules.resume().map_err(refused),
            None => Ok(()),
        }
    }
}

impl Modules {
    /// Ends a VM's modules until they are resumed.
    pub fn drain(&self, vm: &str) -> Result<(), PlaneError> {
        let entry = self.found(vm)?;
        let _change = lock(&self.change);
        entry.drain()?;
        tracing::info!(%vm, dir = %entry.config.state_dir.display(), "modules drained");
        Ok(())
    }

    /// Has a VM's drained modules serve again.
    pub fn resume(&self, vm: &str) -> Result<(), PlaneError> {
        let entry = self.found(vm)?;
        let _change = lock(&self.change);
        if entry.copying.load(Ordering::Acquire) && lock(&entry.state).drained {
            let text = format!("a copy of VM {vm} is being taken or put in place: resume it then");
            return Err(PlaneError::Conflict(text));
        }
        entry.resume()?;
        tracing::info!(%vm, "modules resumed");
        Ok(())
    }
}
