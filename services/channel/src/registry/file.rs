//! Registry in one JSON file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::RegistryError;
use super::membership::{
    MAX_DEVICES, MAX_FILE_LEN_BYTES, MAX_MEMBERSHIPS, MAX_NAME_LEN_BYTES, MAX_PATH_LEN_BYTES,
    Membership, Registry,
};

/// Format by which a file is known as ours.
const FORMAT: &str = "millrace-registry";
/// Version of [`Content`].
const VERSION: u32 = 1;

/// Content of the file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    format: String,
    version: u32,
    memberships: Vec<Membership>,
}

/// Registry of one host: a file that is replaced with each change.
#[derive(Debug)]
pub struct FileRegistry {
    path: PathBuf,
    memberships: BTreeMap<String, Membership>,
}

impl FileRegistry {
    /// Reads the file; none is an empty registry.
    ///
    /// # Errors
    /// The file cannot be read, is not a registry of this version, or is over a limit. It is left
    /// as it is.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, RegistryError> {
        let path = path.into();
        let mut memberships = BTreeMap::new();
        if let Some(bytes) = read(&path)? {
            let foreign = |why: String| RegistryError::Foreign { path: path.clone(), why };
            let content: Content = serde_json::from_slice(&bytes)
                .map_err(|error| foreign(format!("not what millrace writes: {error}")))?;
            if content.format != FORMAT || content.version != VERSION {
                return Err(foreign(format!(
                    "format {:?}, version {}; {FORMAT:?}, {VERSION} expected",
                    content.format, content.version
                )));
            }
            for membership in content.memberships {
                check(&path, &membership)?;
                memberships.insert(membership.vm.clone(), membership);
            }
        }
        let registry = Self { path, memberships };
        registry.check_count(registry.memberships.len())?;
        Ok(registry)
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn check_count(&self, count: usize) -> Result<(), RegistryError> {
        limit(&self.path, || "the number of memberships".into(), count, MAX_MEMBERSHIPS)
    }

    /// Writes the new memberships, then takes them over.
    fn replace(&mut self, next: BTreeMap<String, Membership>) -> Result<(), RegistryError> {
        let content = Content {
            format: FORMAT.into(),
            version: VERSION,
            memberships: next.values().cloned().collect(),
        };
        let bytes = serde_json::to_vec_pretty(&content)
            .map_err(io::Error::from)
            .map_err(failed(&self.path, "writing JSON"))?;
        let most = usize::try_from(MAX_FILE_LEN_BYTES).unwrap_or(usize::MAX);
        limit(&self.path, || "its length in bytes".into(), bytes.len(), most)?;
        let replaced = base::durable::replace_file(&self.path, &bytes);
        replaced.map_err(|error| failed(&self.path, error.what)(error.source))?;
        self.memberships = next;
        Ok(())
    }
}

impl Registry for FileRegistry {
    fn membership(&self, vm: &str) -> Option<Membership> {
        self.memberships.get(vm).cloned()
    }

    fn memberships(&self) -> Vec<Membership> {
        self.memberships.values().cloned().collect()
    }

    fn put(&mut self, membership: Membership) -> Result<(), RegistryError> {
        check(&self.path, &membership)?;
        if self.memberships.get(&membership.vm) == Some(&membership) {
            return Ok(());
        }
        let mut next = self.memberships.clone();
        next.insert(membership.vm.clone(), membership);
        self.check_count(next.len())?;
        self.replace(next)
    }

    fn remove(&mut self, vm: &str) -> Result<(), RegistryError> {
        if !self.memberships.contains_key(vm) {
            return Ok(());
        }
        let mut next = self.memberships.clone();
        next.remove(vm);
        self.replace(next)
    }
}

fn failed(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> RegistryError {
    let path = path.to_owned();
    move |source| RegistryError::Io { path, what, source }
}

fn limit(
    path: &Path,
    what: impl FnOnce() -> String,
    value: usize,
    most: usize,
) -> Result<(), RegistryError> {
    if value <= most {
        return Ok(());
    }
    let (value, limit) = (value as u64, most as u64);
    Err(RegistryError::TooMuch { path: path.to_owned(), what: what(), value, limit })
}

/// Checks every part of a membership against its limit.
fn check(path: &Path, membership: &Membership) -> Result<(), RegistryError> {
    let vm = &membership.vm;
    let name = |what: &str, name: &str| {
        let what = || format!("the length of VM {vm:.MAX_NAME_LEN_BYTES$}'s {what}");
        limit(path, what, name.len(), MAX_NAME_LEN_BYTES)
    };
    name("name", vm)?;
    name("domain", &membership.domain)?;
    let of = |what: &str| format!("the {what} of VM {vm}");
    let qmp = membership.qmp.as_os_str().as_bytes().len();
    limit(path, || of("length of the monitor's path"), qmp, MAX_PATH_LEN_BYTES)?;
    limit(path, || of("number of devices"), membership.devices.len(), MAX_DEVICES)?;
    for device in &membership.devices {
        name("device", &device.device)?;
        let others = [&device.object, &device.chardev, &device.root_port];
        for other in others.into_iter().flatten() {
            name("device", other)?;
        }
    }
    Ok(())
}

/// Reads the file's bytes, at most as many as it may have; none if there is no file.
fn read(path: &Path) -> Result<Option<Vec<u8>>, RegistryError> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(path, "opening it")(error)),
    };
    let mut bytes = Vec::new();
    let more = file.take(MAX_FILE_LEN_BYTES + 1).read_to_end(&mut bytes);
    more.map_err(failed(path, "reading it"))?;
    let most = usize::try_from(MAX_FILE_LEN_BYTES).unwrap_or(usize::MAX);
    limit(path, || "its length in bytes, at least,".into(), bytes.len(), most)?;
    Ok(Some(bytes))
}

#[cfg(test)]
mod tests;
