//! The ports attached at run time, in a file of the run directory, so that a daemon that was killed
//! finds them again. The run directory is emptied by a reboot, and they are gone with their VMs.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::MAX_FILE_LEN_BYTES;
use crate::error::ControlError;

/// One port: its VM, and the body it was attached with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachedPort {
    /// VM.
    pub vm: String,
    /// Name of the port.
    pub port: String,
    /// As [`crate::config::Config::attach`] takes it.
    pub body: Value,
}

/// The file.
#[derive(Debug)]
pub struct AttachedList {
    path: PathBuf,
    ports: Vec<AttachedPort>,
}

impl AttachedList {
    /// Reads `attached.json` in `run_dir`. The error leaves the file as it is, for a person to see.
    pub fn load(run_dir: &Path) -> Result<Self, ControlError> {
        let path = run_dir.join("attached.json");
        let bad = |what: String| ControlError::BadList { path: path.clone(), what };
        let ports = match fs::metadata(&path) {
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
        Ok(Self { path, ports })
    }

    /// An empty list that will replace what is in `run_dir` at the next change.
    pub fn empty(run_dir: &Path) -> Self {
        Self { path: run_dir.join("attached.json"), ports: Vec::new() }
    }

    /// The ports, in the order they came.
    pub fn ports(&self) -> &[AttachedPort] {
        &self.ports
    }

    /// Adds one and writes the file.
    pub fn add(&mut self, port: AttachedPort) -> Result<(), ControlError> {
        self.ports.push(port);
        self.write()
    }

    /// Removes one, if it is there, and writes the file.
    pub fn remove(&mut self, vm: &str, port: &str) -> Result<(), ControlError> {
        let before = self.ports.len();
        self.ports.retain(|p| p.vm != vm || p.port != port);
        if self.ports.len() == before { Ok(()) } else { self.write() }
    }

    /// Written beside and renamed, so that a kill leaves the old file or the new one.
    fn write(&self) -> Result<(), ControlError> {
        let beside = self.path.with_extension("json.new");
        let text = serde_json::to_vec_pretty(&self.ports)
            .map_err(|e| ControlError::io("writing", &beside)(e.into()))?;
        fs::write(&beside, text).map_err(ControlError::io("writing", &beside))?;
        fs::rename(&beside, &self.path).map_err(ControlError::io("replacing", &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str) -> AttachedPort {
        let body = serde_json::json!({ "disk": { "name": name } });
        AttachedPort { vm: "web".into(), port: name.into(), body }
    }

    #[test]
    fn ports_survive_and_go() {
        let dir = tempfile::tempdir().unwrap();
        let mut list = AttachedList::load(dir.path()).unwrap();
        list.add(port("a")).unwrap();
        list.add(port("b")).unwrap();
        list.remove("web", "a").unwrap();
        list.remove("web", "nothing").unwrap();
        assert_eq!(AttachedList::load(dir.path()).unwrap().ports(), [port("b")]);
    }

    #[test]
    fn nonsense_is_named_and_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("attached.json");
        fs::write(&path, "[{\"vm\": 1}]").unwrap();
        let error = AttachedList::load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("attached.json"), "{error}");
        assert!(path.exists());
    }
}
