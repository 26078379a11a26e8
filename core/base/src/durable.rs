//! Durable replacement of whole files: a power cut leaves the old file or the new one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Failed step of replacing a file. The file is the old one, or, where only flushing its folder
/// failed, the new one, which is perhaps not durable.
///
/// Remedy: mend what the cause says: space, or permissions of the folder.
#[derive(Debug, Error)]
#[error("{what}: {source}")]
pub struct ReplaceError {
    /// Name of the step.
    pub what: &'static str,
    /// The cause.
    pub source: io::Error,
}

/// Replaces the file at `path`, for its owner only. On return the new bytes survive a power cut:
/// they are flushed before the file has its name, and the folder after that. Each file has one
/// writer at a time, who makes the new one as `<path>.new`.
pub fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), ReplaceError> {
    let failed = |what| move |source| ReplaceError { what, source };
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    let new = PathBuf::from(name);
    // A file that a crash left there is of no use, and may be a link to another place.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(failed("removing what an earlier change left")(error));
        }
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&new)
        .map_err(failed("making a new one"))?;
    file.write_all(bytes).map_err(failed("writing the new one"))?;
    file.sync_all().map_err(failed("flushing the new one"))?;
    fs::rename(&new, path).map_err(failed("putting the new one in its place"))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = File::open(folder.unwrap_or(Path::new(".")));
    folder.and_then(|folder| folder.sync_all()).map_err(failed("flushing its folder"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn the_new_bytes_are_there_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("list.json");
        for bytes in ["first", "a second one", ""] {
            replace_file(&path, bytes.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), bytes);
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_a_crash_left_is_no_obstacle_and_no_way_to_somewhere_else() {
        let dir = tempfile::tempdir().unwrap();
        let (path, victim) = (dir.path().join("list.json"), dir.path().join("victim"));
        fs::write(&victim, "mine").unwrap();
        symlink(&victim, dir.path().join("list.json.new")).unwrap();
        replace_file(&path, b"list").unwrap();
        assert_eq!(fs::read_to_string(&victim).unwrap(), "mine");
    }

    #[test]
    fn a_step_that_fails_is_named_and_leaves_the_old_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("list.json");
        replace_file(&path, b"old").unwrap();
        fs::create_dir(dir.path().join("list.json.new")).unwrap();
        let text = replace_file(&path, b"new").unwrap_err().to_string();
        assert!(text.starts_with("removing what an earlier change left: "), "{text}");
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }
}
