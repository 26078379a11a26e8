//! Copies of modules' files, taken and put in place.

use std::fs::DirEntry;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use base::sync::lock;
use control::plane::{CopyWork, PlaneError, Restored};
use modules::copy::{self, About, LockedFolder, Put, Received, Steps};
use modules::folder::written::Written;
use modules::{CopyStep, ModuleConfig, VmModules, engine};

use super::{Modules, VmEntry, refused};

/// One copy of a VM at a time.
struct Copying(Arc<AtomicBool>);

impl Copying {
    fn begin(entry: &VmEntry) -> Result<Self, PlaneError> {
        let flag = Arc::clone(&entry.copying);
        if flag.swap(true, Ordering::AcqRel) {
            let text = format!("a copy of VM {} is being taken or put in place", entry.config.vm);
            return Err(PlaneError::Conflict(text));
        }
        Ok(Self(flag))
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// A module that serves.
struct Serving {
    modules: Arc<VmModules>,
    name: String,
}

impl Steps for Serving {
    fn step(&mut self, step: CopyStep) -> Result<Written, String> {
        self.modules.copy_step(&self.name, step).map_err(|e| e.to_string())
    }
}

/// Whether a folder has files that a module can name.
fn has_files(folder: &Path) -> io::Result<bool> {
    match std::fs::read_dir(folder) {
        Ok(mut entries) => {
            let named = |e: io::Result<DirEntry>| {
                e.map(|e| !e.file_name().as_encoded_bytes().starts_with(b"."))
            };
            entries.try_fold(false, |any, e| Ok(any | named(e)?))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

impl VmEntry {
    fn module(&self, name: &str) -> Result<ModuleConfig, PlaneError> {
        let found = lock(&self.state).list.iter().find(|module| module.name == name).cloned();
        let missing = || format!("{} of VM {}", name, self.config.vm);
        found.ok_or_else(|| PlaneError::NotFound { what: "module", name: missing() })
    }

    fn about(&self, module: &ModuleConfig) -> About {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        About {
            vm: self.config.vm.clone(),
            module: module.name.clone(),
            hash: engine::hex(&module.hash),
            begun_s: now.map_or(0, |now| now.as_secs()),
            version: env!("CARGO_PKG_VERSION").into(),
        }
    }

    fn steps(&self, name: &str, folder: &OwnedFd) -> Result<Box<dyn Steps + Send>, PlaneError> {
        let state = lock(&self.state);
        match &state.modules {
            _ if state.drained => Ok(Box::new(LockedFolder::new(folder).map_err(refused)?)),
            Some(modules) => {
                Ok(Box::new(Serving { modules: Arc::clone(modules), name: name.into() }))
            }
            None => Err(self.not_begun()),
        }
    }

    fn not_begun(&self) -> PlaneError {
        PlaneError::Conflict(format!("the modules of VM {} have not begun", self.config.vm))
    }

    /// Files are replaced only where somebody says so.
    fn may_replace(&self, module: &str, replace: bool) -> Result<(), PlaneError> {
        let (vm, folder) = (&self.config.vm, self.config.state_dir.join(module));
        match has_files(&folder) {
            Ok(true) if !replace => Err(PlaneError::Conflict(format!(
                "module {module} of VM {vm} has files: say that they may be replaced (--replace, or ?replace=true)"
            ))),
            Ok(_) => Ok(()),
            Err(e) => Err(PlaneError::Refused(format!("looking into {}: {e}", folder.display()))),
        }
    }
}

/// Takes it, and logs how that went.
fn take(folder: &OwnedFd, steps: &mut dyn Steps, about: &About, to: &mut dyn Write) {
    let (vm, module, begin) = (&about.vm, &about.module, Instant::now());
    match copy::take(folder, steps, about, to) {
        Ok(bytes) => tracing::info!(%vm, %module, bytes, took = ?begin.elapsed(), "copied"),
        Err(e) => tracing::error!(%vm, %module, took = ?begin.elapsed(), "not copied: {e}"),
    }
}

impl Modules {
    /// Begins a copy of a module's files.
    pub fn back_up(&self, vm: &str, module: &str) -> Result<CopyWork, PlaneError> {
        let entry = self.found(vm)?;
        let config = entry.module(module)?;
        let copying = Copying::begin(entry)?;
        let path = entry.config.state_dir.join(module);
        let opened = std::fs::File::open(&path);
        let folder = opened
            .map(OwnedFd::from)
            .map_err(|e| PlaneError::Refused(format!("opening {}: {e}", path.display())))?;
        // Not while they are resumed.
        let change = lock(&self.change);
        let (mut steps, about) = (entry.steps(module, &folder)?, entry.about(&config));
        drop(change);
        Ok(Box::new(move |to| {
            take(&folder, &mut *steps, &about, to);
            drop(copying);
        }))
    }

    /// Puts a copy in place.
    pub fn restore(
        &self,
        vm: &str,
        module: &str,
        replace: bool,
        from: &mut dyn Read,
    ) -> Result<Restored, PlaneError> {
        let entry = self.found(vm)?;
        let config = entry.module(module)?;
        let _copying = Copying::begin(entry)?;
        let state_dir = &entry.config.state_dir;
        entry.may_replace(module, replace)?;
        let place = Put { state_dir, module, disk_bytes: config.disk_bytes };
        let received = copy::put(&place, from).map_err(refused)?;
        let change = lock(&self.change);
        if change.stopped {
            return Err(PlaneError::Conflict("the daemon stops".into()));
        }
        let restored = Restored {
            vm: vm.into(),
            module: module.into(),
            of_vm: received.about.vm.clone(),
            sha256: received.about.hash.clone(),
            begun_s: received.about.begun_s,
            files: received.files,
            files_bytes: received.files_bytes,
        };
        entry.put_in_place(received, &place, replace)?;
        drop(change);
        let Restored { of_vm, files_bytes, .. } = &restored;
        tracing::info!(%vm, %module, %of_vm, files_bytes, "a copy was put in place");
        Ok(restored)
    }
}

impl VmEntry {
    /// The process ends for it, and begins with what is in place then; unless there is to be none.
    /// When that fails, all is as it was, or the error says where the files from before are.
    fn put_in_place(
        &self,
        mut received: Received,
        place: &Put<'_>,
        replace: bool,
    ) -> Result<(), PlaneError> {
        let modules = {
            let state = lock(&self.state);
            let modules = state.modules.clone();
            let serving = modules.filter(|_| !state.drained);
            if serving.is_none() && !state.drained {
                return Err(self.not_begun());
            }
            serving
        };
        if let Some(modules) = &modules {
            modules.drain().map_err(refused)?;
        }
        let mut exchange = || {
            // It may have made files since somebody looked.
            self.may_replace(place.module, replace)?;
            exchange(&mut received, place)
        };
        let exchanged = exchange();
        let Some(modules) = modules else {
            return exchanged.map(|()| received.discard_old());
        };
        let resumed = modules.resume();
        let why = match (exchanged, resumed) {
            (Ok(()), Ok(())) => {
                received.discard_old();
                return Ok(());
            }
            (Err(e), _) if !received.has_old() => return Err(e),
            (Err(e), _) => e.to_string(),
            (Ok(()), Err(e)) => format!("with these files the modules do not start: {e}"),
        };
        Err(PlaneError::Refused(format!("{why}; {}", put_back(&mut received, place, &modules))))
    }
}

/// Puts the files from before in place; what became of them.
fn put_back(received: &mut Received, place: &Put<'_>, modules: &VmModules) -> String {
    // Modules that end have no process soon: its lock tells.
    let _ = modules.drain();
    match exchange(received, place) {
        Ok(()) => {}
        Err(e) => {
            let _ = modules.resume();
            return format!("the files from before are in {}: {e}", received.folder().display());
        }
    }
    match modules.resume() {
        Ok(()) => "they are what they were".into(),
        Err(e) => format!("they are what they were; the modules do not start: {e}"),
    }
}

/// Exchanges the files, under the folder's lock. Nobody else serves them: this daemon's process has
/// ended, and that of another one would have them locked.
fn exchange(received: &mut Received, place: &Put<'_>) -> Result<(), PlaneError> {
    let folder = place.state_dir.join(place.module);
    engine::private_folder(&folder).map_err(refused)?;
    let opened = std::fs::File::open(&folder).map(OwnedFd::from);
    let opened =
        opened.map_err(|e| PlaneError::Refused(format!("opening {}: {e}", folder.display())))?;
    let _lock = LockedFolder::lock(&opened).map_err(refused)?;
    received.exchange(place).map_err(refused)
}
