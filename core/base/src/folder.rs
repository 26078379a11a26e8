//! Paths in folders of other users: only links that root or this user owns are followed.
//!
//! The owner of a folder may swap its content at any time, for a link to a file of another user,
//! say. So a path is walked name by name. Each name is opened without following it, and a link is
//! followed by hand if its owner is trusted. The file that was found is used by its descriptor,
//! through `/proc/self/fd`, which must be mounted.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;

/// Most links on the way, as in the kernel's own walk.
const MAX_LINKS: usize = 40;

/// An open folder. It stays the same folder when its path leads elsewhere later.
#[derive(Debug)]
pub struct Folder(File);

impl Folder {
    /// Opens the folder that `path` is in; returns it with the last name of `path`.
    ///
    /// # Errors
    /// The path has no last name, leads through a link of another user, or cannot be walked.
    pub fn open_parent(path: &Path) -> io::Result<(Self, OsString)> {
        let name = path.file_name().ok_or_else(|| io::Error::from(Errno::INVAL))?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let folder = walk(start(path)?, parent.unwrap_or(Path::new(".")))?;
        if !folder.metadata()?.is_dir() {
            return Err(Errno::NOTDIR.into());
        }
        Ok((Self(folder), name.to_owned()))
    }

    /// Opens a name in it; a link is opened itself.
    pub(crate) fn look(&self, name: &OsStr) -> io::Result<File> {
        open(self.as_fd(), name)
    }

    /// Opens the file that a name in it leads to.
    pub(crate) fn find(&self, name: &OsStr) -> io::Result<File> {
        walk(self.look(OsStr::new("."))?, Path::new(name))
    }

    /// Path to a name in it, for calls that take no descriptor and do not follow the last name.
    pub(crate) fn path_of(&self, name: &OsStr) -> PathBuf {
        path_of(&self.0).join(name)
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Opens the file that a path leads to.
pub(crate) fn find(path: &Path) -> io::Result<File> {
    walk(start(path)?, path)
}

/// Path to an open file: the kernel does not look the file up again.
pub(crate) fn path_of(open: &File) -> PathBuf {
    format!("/proc/self/fd/{}", open.as_raw_fd()).into()
}

fn start(path: &Path) -> io::Result<File> {
    open(CWD, OsStr::new(if path.is_absolute() { "/" } else { "." }))
}

fn open(at: BorrowedFd<'_>, name: &OsStr) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(at, name, flags, Mode::empty())?.into())
}

/// Names of a path, in reverse order; `/` begins at the root.
fn names(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().rev().map(|name| name.as_os_str().to_owned())
}

fn walk(mut at: File, path: &Path) -> io::Result<File> {
    let mut left: Vec<OsString> = names(path).collect();
    let mut links = 0;
    while let Some(name) = left.pop() {
        let next = open(at.as_fd(), &name)?;
        let meta = next.metadata()?;
        if !meta.is_symlink() {
            at = next;
            continue;
        }
        links += 1;
        if links > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        check_link_owner(&name, meta.uid())?;
        let target = rustix::fs::readlinkat(&next, "", Vec::new())?;
        left.extend(names(Path::new(&OsString::from_vec(target.into_bytes()))));
    }
    Ok(at)
}

/// Fails unless a link of this owner may be followed.
fn check_link_owner(name: &OsStr, owner: u32) -> io::Result<()> {
    if owner == 0 || owner == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let why =
        format!("the link {} on the way belongs to user {owner}, not to root", name.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{lchown, symlink};

    use super::*;

    fn same(found: io::Result<File>, path: &Path) {
        let (found, meta) = (found.unwrap().metadata().unwrap(), path.metadata().unwrap());
        assert_eq!((found.dev(), found.ino()), (meta.dev(), meta.ino()), "{}", path.display());
    }

    #[test]
    fn paths_lead_where_the_kernel_finds_them() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        fs::write(at("a/b/file"), "").unwrap();
        symlink("a/b", at("relative")).unwrap();
        symlink(at("relative"), at("absolute")).unwrap();
        symlink("../file", at("a/b/up")).unwrap();
        fs::write(at("a/file"), "").unwrap();
        for path in ["a/b/file", "absolute/file", "a/./b/../b/file", "relative/up", "absolute/.."] {
            same(find(&at(path)), &at(path));
        }
        same(find(Path::new("Cargo.toml")), Path::new("Cargo.toml"));
        let (folder, name) = Folder::open_parent(&at("absolute/file")).unwrap();
        same(folder.find(&name), &at("a/b/file"));
        assert!(folder.look(OsStr::new("up")).unwrap().metadata().unwrap().is_symlink());
        assert!(folder.path_of(&name).ends_with("file"));
    }

    #[test]
    fn nothing_and_circles_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        symlink("circle", dir.path().join("circle")).unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        let error = |name: &str| find(&dir.path().join(name)).unwrap_err().raw_os_error();
        assert_eq!(error("circle"), Some(Errno::LOOP.raw_os_error()));
        assert_eq!(error("missing"), Some(Errno::NOENT.raw_os_error()));
        assert_eq!(error("file/x"), Some(Errno::NOTDIR.raw_os_error()));
        Folder::open_parent(&dir.path().join("file/x")).unwrap_err();
        Folder::open_parent(Path::new("/")).unwrap_err();
        Folder::open_parent(Path::new("a/..")).unwrap_err();
    }

    #[test]
    #[allow(non_snake_case)]
    fn abuse_V5_links_of_other_users_are_not_followed() {
        if !rustix::process::geteuid().is_root() {
            // Only root makes links of others.
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("there")).unwrap();
        fs::write(at("there/file"), "").unwrap();
        for link in ["folder", "file"] {
            symlink(if link == "file" { "there/file" } else { "there" }, at(link)).unwrap();
            lchown(at(link), Some(65_534), None).unwrap();
        }
        for path in ["folder/file", "file"] {
            let error = find(&at(path)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            assert!(error.to_string().contains("belongs to user 65534, not to root"), "{error}");
        }
        let error = Folder::open_parent(&at("folder/file")).unwrap_err().to_string();
        assert!(error.contains("the link folder on the way"), "{error}");
    }
}
