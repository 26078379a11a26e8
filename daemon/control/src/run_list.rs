//! Lists that outlive the daemon: JSON files in the run directory, so that a daemon that was killed
//! finds them again. A reboot empties the usual run directory, and the VMs are gone with it; a run
//! directory on a disk keeps them, so each change is durable before it is answered.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use config::MAX_FILE_LEN_BYTES;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::ControlError;

/// Entry of a list that outlives the daemon.
pub trait Kept: Serialize + DeserializeOwned {
    /// Name of the file in the run directory.
    const FILE: &'static str;
    /// Contents of the list, for the error when they are lost.
    const WHAT: &'static str;
}

/// A list that outlives the daemon, with its file.
#[derive(Debug)]
pub struct RunList<T> {
    path: PathBuf,
    entries: Vec<T>,
}

impl<T: Kept> RunList<T> {
    /// Reads the file; one that is not there is an empty list. The error leaves it as it is, for a
    /// person to see.
    pub fn load(run_dir: &Path) -> Result<Self, ControlError> {
        let Self { path, .. } = Self::empty(run_dir);
        let bad = |what: String| ControlError::BadList { path: path.clone(), what, lost: T::WHAT };
        let entries = match fs::metadata(&path) {
            Err(e) if e.kind() == ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(bad(e.to_string())),
            Ok(meta) if meta.len() > MAX_FILE_LEN_BYTES => {
                return Err(bad(format!("larger than {MAX_FILE_LEN_BYTES} bytes")));
            }
            Ok(_) => {
                let text = fs::read(&path).map_err(|e| bad(e.to_string()))?;
                serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?
            }
        };
        Ok(Self { path, entries })
    }

    /// An empty list that will replace what is in `run_dir` at the next change.
    pub fn empty(run_dir: &Path) -> Self {
        Self { path: run_dir.join(T::FILE), entries: Vec::new() }
    }

    /// Entries in the order in which they were added.
    pub fn entries(&self) -> &[T] {
        &self.entries
    }

    /// Changes the list and writes the file.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut Vec<T>)) -> Result<(), ControlError> {
        change(&mut self.entries);
        self.write()
    }

    /// Drops the entries that `keep` refuses, and writes the file if there were any.
    pub(crate) fn retain(&mut self, keep: impl FnMut(&T) -> bool) -> Result<(), ControlError> {
        let before = self.entries.len();
        self.entries.retain(keep);
        if self.entries.len() == before { Ok(()) } else { self.write() }
    }

    /// Writes the file, durable on return: a change that was answered is there after a power cut,
    /// where the run directory outlives one.
    fn write(&self) -> Result<(), ControlError> {
        let text = serde_json::to_vec_pretty(&self.entries)
            .map_err(|e| ControlError::io("writing", &self.path)(e.into()))?;
        let replaced = base::durable::replace_file(&self.path, &text);
        replaced.map_err(|e| ControlError::io(e.what, &self.path)(e.source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attached::AttachedPort;

    #[test]
    fn nonsense_is_named_and_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attached.json");
        fs::write(&path, "[{\"vm\": 1}]").unwrap();
        let error = RunList::<AttachedPort>::load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("attached.json"), "{error}");
        assert!(error.contains("ports attached at run time"), "{error}");
        assert!(path.exists());
    }
}
