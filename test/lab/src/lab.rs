//! One session of the lab: cache, run folder, network namespace.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use base::sync::lock;
use rustix::fs::{FlockOperation, flock};

use crate::headers::headers;
use crate::{Cache, Image, ImageBuilder, Kernel, KernelChoice, LabError, NetLab, Qemu, kmod};

/// Start of a run folder's name.
const RUN_PREFIX: &str = "millrace-lab-";
/// The file in a run folder that its process holds locked.
const LOCK: &str = "lock";

/// A session; clones share it. Guests and daemons keep it alive. When the last one goes, the run
/// folder and the namespace go too.
#[derive(Clone, Debug)]
pub struct Lab {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    cache: Cache,
    run: PathBuf,
    net: NetLab,
    qemu: OnceLock<Qemu>,
    kernels: Mutex<HashMap<KernelChoice, Kernel>>,
    images: Mutex<Vec<(ImageBuilder, KernelChoice, Image)>>,
    _lock: File,
}

impl Lab {
    /// Starts a session with the default cache. Needs root (network namespace, TAPs).
    ///
    /// # Errors
    /// Not root; a folder cannot be made.
    pub fn new() -> Result<Self, LabError> {
        Self::with_cache(Cache::open()?)
    }

    /// Starts a session with a cache of the caller's choice.
    ///
    /// # Errors
    /// As [`Lab::new`].
    pub fn with_cache(cache: Cache) -> Result<Self, LabError> {
        remove_stale_runs();
        let (run, lock) = make_run_folder()?;
        let net = NetLab::new()?;
        let (qemu, kernels, images) = Default::default();
        let inner = Inner { cache, run, net, qemu, kernels, images, _lock: lock };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The cache.
    #[must_use]
    pub fn cache(&self) -> &Cache {
        &self.inner.cache
    }

    /// The network namespace.
    #[must_use]
    pub fn net(&self) -> &NetLab {
        &self.inner.net
    }

    /// A short path for sockets, logs and scratch disks of this session; removed at its end.
    #[must_use]
    pub fn run_folder(&self) -> &Path {
        &self.inner.run
    }

    /// A path in the run folder.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.inner.run.join(name)
    }

    /// A scratch file of a size, sparse, in the run folder.
    ///
    /// # Errors
    /// The disk is full.
    pub fn scratch(&self, name: &str, len_bytes: u64) -> Result<PathBuf, LabError> {
        let path = self.path(name);
        let what = format!("make {}", path.display());
        let file = File::create(&path).map_err(LabError::io(&what))?;
        file.set_len(len_bytes).map_err(LabError::io(what))?;
        Ok(path)
    }

    /// The QEMU that `MILLRACE_QEMU` chooses, fetched on first use.
    ///
    /// # Errors
    /// As [`Qemu::chosen`].
    pub fn qemu(&self) -> Result<Qemu, LabError> {
        if let Some(qemu) = self.inner.qemu.get() {
            return Ok(qemu.clone());
        }
        let qemu = Qemu::chosen(&self.inner.cache)?;
        Ok(self.inner.qemu.get_or_init(|| qemu).clone())
    }

    /// A kernel, unpacked on first use.
    ///
    /// # Errors
    /// As [`Kernel::get`].
    pub fn kernel(&self, choice: KernelChoice) -> Result<Kernel, LabError> {
        let mut kernels = lock(&self.inner.kernels);
        if let Some(kernel) = kernels.get(&choice) {
            return Ok(kernel.clone());
        }
        let kernel = Kernel::get(&self.inner.cache, choice)?;
        kernels.insert(choice, kernel.clone());
        Ok(kernel)
    }

    /// The folder of a kernel's headers, for `make -C`; unpacked on first use and not installed.
    ///
    /// # Errors
    /// The package sources do not have the headers of this very kernel (any more).
    pub fn kernel_headers(&self, choice: KernelChoice) -> Result<PathBuf, LabError> {
        headers(&self.inner.cache, &self.kernel(choice)?)
    }

    /// The folder of Millrace's kernel modules for a kernel, built on first use.
    ///
    /// # Errors
    /// As [`kmod::build`].
    pub fn kernel_modules(&self, choice: KernelChoice) -> Result<PathBuf, LabError> {
        kmod::build(&self.inner.cache, &self.kernel(choice)?, &kmod::sources())
    }

    /// An image, built on first use and remembered for the session, so that the second guest does
    /// not hash the recipe again.
    ///
    /// # Errors
    /// As [`ImageBuilder::build`].
    pub fn image(&self, recipe: &ImageBuilder, choice: KernelChoice) -> Result<Image, LabError> {
        let kernel = self.kernel(choice)?;
        let mut images = lock(&self.inner.images);
        if let Some((.., image)) =
            images.iter().find(|(known, of, _)| known == recipe && *of == choice)
        {
            return Ok(image.clone());
        }
        let image = recipe.build(&self.inner.cache, &kernel)?;
        images.push((recipe.clone(), choice, image.clone()));
        Ok(image)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The next session removes what is left, see `remove_stale_runs`.
        let _ = fs::remove_dir_all(&self.run);
    }
}

/// Unix socket paths hold 107 bytes, so the run folder is in the system's temporary folder and
/// not deep in a workspace.
fn make_run_folder() -> Result<(PathBuf, File), LabError> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("{RUN_PREFIX}{}-{number}", std::process::id());
    let run = std::env::temp_dir().join(name);
    let what = format!("make run folder {}", run.display());
    crate::cache::remove(&run)?;
    fs::create_dir_all(&run).map_err(LabError::io(&what))?;
    let lock = File::create(run.join(LOCK)).map_err(LabError::io(&what))?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)
        .map_err(|error| LabError::io(what)(error.into()))?;
    Ok((run, lock))
}

/// Removes run folders whose process is gone: their lock is free.
fn remove_stale_runs() {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or("");
        let Some(rest) = name.strip_prefix(RUN_PREFIX) else { continue };
        // Our own folders are in use even in the moment before they are locked.
        if rest.split('-').next() == Some(std::process::id().to_string().as_str()) {
            continue;
        }
        let Ok(lock) = File::open(path.join(LOCK)) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            // Another session may be removing it at this moment.
            let _ = fs::remove_dir_all(&path);
        }
    }
}
