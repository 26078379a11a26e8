//! The cache folder: things that take time to make, kept by name, each appearing whole or not at
//! all.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::LabError;

/// Root of the tree that this crate was built in.
pub(crate) fn workspace() -> &'static Path {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here)
}

/// A cache folder. Two processes may use it at once.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// The folder named by `MILLRACE_LAB_CACHE`, or `out/lab-cache` in the workspace.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn open() -> Result<Self, LabError> {
        match std::env::var_os("MILLRACE_LAB_CACHE") {
            Some(path) => Self::at(path),
            None => Self::at(workspace().join("out/lab-cache")),
        }
    }

    /// A folder of the caller's choice.
    ///
    /// # Errors
    /// The folder cannot be created.
    pub fn at(root: impl Into<PathBuf>) -> Result<Self, LabError> {
        let root = root.into();
        fs::create_dir_all(&root)
            .map_err(LabError::io(format!("create cache folder {}", root.display())))?;
        let root = root
            .canonicalize()
            .map_err(LabError::io(format!("find cache folder {}", root.display())))?;
        Ok(Self { root })
    }

    /// The folder itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The file or folder of a name, made by `build` when it is not there. `build` gets the path
    /// to create; it is renamed into place when `build` succeeds. Other processes that want the
    /// same name wait for it.
    ///
    /// # Errors
    /// What `build` fails with; I/O errors.
    pub fn get(
        &self,
        name: &str,
        build: impl FnOnce(&Path) -> Result<(), LabError>,
    ) -> Result<PathBuf, LabError> {
        let target = self.root.join(name);
        if target.exists() {
            return Ok(target);
        }
        let _lock = self.lock(name)?;
        if target.exists() {
            return Ok(target);
        }
        let part = self.root.join(format!(".{name}.part"));
        remove(&part)?;
        if let Err(error) = build(&part) {
            remove(&part)?;
            return Err(error);
        }
        fs::rename(&part, &target)
            .map_err(LabError::io(format!("publish {}", target.display())))?;
        Ok(target)
    }

    /// Holds the lock of a name until the returned file is dropped. The kernel frees it when the
    /// process dies, so a crash leaves nothing locked.
    ///
    /// # Errors
    /// The lock file cannot be opened.
    pub fn lock(&self, name: &str) -> Result<File, LabError> {
        let path = self.root.join(format!(".{name}.lock"));
        let what = format!("lock {}", path.display());
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(LabError::io(&what))?;
        flock(&file, FlockOperation::LockExclusive)
            .map_err(|error| LabError::io(what)(error.into()))?;
        Ok(file)
    }
}

/// Removes a file or folder if it is there.
pub(crate) fn remove(path: &Path) -> Result<(), LabError> {
    let gone = match fs::symlink_metadata(path) {
        Err(_) => return Ok(()),
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
    };
    gone.map_err(LabError::io(format!("remove {}", path.display())))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn many_want_one_builds() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path()).unwrap();
        let builds = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let path = cache
                        .get("thing", |part| {
                            builds.fetch_add(1, Ordering::Relaxed);
                            let lock = File::open(folder.path().join(".thing.lock")).unwrap();
                            let again = flock(&lock, FlockOperation::NonBlockingLockExclusive);
                            assert!(again.is_err(), "a build holds the lock");
                            fs::write(part, "whole").map_err(LabError::io("write"))
                        })
                        .unwrap();
                    assert_eq!(fs::read_to_string(path).unwrap(), "whole");
                });
            }
        });
        assert_eq!(builds.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_failed_build_leaves_nothing_and_can_be_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path()).unwrap();
        let failed = cache.get("thing", |part| {
            fs::create_dir(part).map_err(LabError::io("create"))?;
            Err(LabError::Refused("half way".into()))
        });
        assert!(matches!(failed, Err(LabError::Refused(_))));
        assert!(!folder.path().join("thing").exists());
        assert!(!folder.path().join(".thing.part").exists());
        cache.get("thing", |part| fs::create_dir(part).map_err(LabError::io("create"))).unwrap();
    }
}
