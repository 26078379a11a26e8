//! Opening image files: types, locks, links, alignment, space.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::Path;
use std::process::Command;

use queue::Layout;

use crate::BlockError;
use crate::backend::Backend;
use crate::raw::RawBackend;
use crate::request::kind;
use crate::test_support::{Rig, pattern};

fn open(path: &Path, read_only: bool) -> Result<RawBackend, BlockError> {
    RawBackend::open(path, false, read_only, 512)
}

#[test]
fn abuse_F2_one_image_has_one_writer_or_many_readers() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    // A second name does not help: the lock is on the file.
    let other = dir.path().join("other.img");
    fs::hard_link(&path, &other).unwrap();
    let writer = open(&path, false).unwrap();
    for second in [open(&other, false), open(&path, true)] {
        let text = second.unwrap_err().to_string();
        assert!(text.contains("in use"), "{text}");
    }
    // A queue keeps the lock although the back end is gone.
    let disk = writer.open_queue(4).unwrap();
    drop(writer);
    assert!(matches!(open(&path, true), Err(BlockError::Locked { .. })));
    drop(disk);
    let readers = (open(&path, true).unwrap(), open(&other, true).unwrap());
    assert!(matches!(open(&path, false), Err(BlockError::Locked { .. })));
    drop(readers);
    open(&path, false).unwrap();
}

#[test]
fn abuse_F2_what_is_no_image_is_refused_without_blocking() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    assert!(fs::metadata(&fifo).unwrap().file_type().is_fifo());
    let link = dir.path().join("link");
    symlink("/dev/null", &link).unwrap();
    // Reading only, so that the FIFO and the directory get as far as the type check.
    for (path, found) in [
        (fifo.as_path(), "FIFO"),
        (dir.path(), "directory"),
        (Path::new("/dev/null"), "character device"),
        (link.as_path(), "character device"),
    ] {
        let text = open(path, true).unwrap_err().to_string();
        assert!(text.contains(found), "{text}");
    }
    let text = open(&dir.path().join("missing"), false).unwrap_err().to_string();
    assert!(text.contains("missing"), "{text}");
}

#[test]
fn a_file_that_direct_io_cannot_serve_in_small_blocks_is_refused() {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk.img");
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    let file = File::open(&path).unwrap();
    let (_, align) = crate::file::direct_alignment(&file);
    match RawBackend::open(&path, true, false, 512) {
        Ok(_) => assert!(align <= 512),
        Err(BlockError::DirectAlignment { align: told, .. }) => assert_eq!(told, align),
        Err(other) => panic!("{other}"),
    }
    assert!(RawBackend::open(&path, true, false, 4096).unwrap().demands().mem_align > 1);
}

#[test]
fn a_raw_disk_follows_its_file_and_does_not_change_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.img");
    let file = File::create(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    let backend = open(&path, false).unwrap();
    file.set_len(2 << 20).unwrap();
    assert_eq!(backend.len_bytes(), 1 << 20);
    assert!(backend.resize(Some(3 << 20)).is_err());
    assert_eq!(backend.len_bytes(), 1 << 20, "a refusal changes nothing");
    assert_eq!(backend.resize(None).unwrap(), 2 << 20);
    assert_eq!(backend.resize(Some(2 << 20)).unwrap(), 2 << 20);
}

/// Mounts a tmpfs of 1 MiB, where this user may.
pub(super) struct SmallDisk(pub(super) tempfile::TempDir);

impl SmallDisk {
    pub(super) fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let done = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1m", "millrace-test"])
            .arg(dir.path())
            .output();
        done.ok().filter(|d| d.status.success()).map(|_| Self(dir))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn abuse_X_a_full_file_system_is_an_error_and_heals() {
    let Some(small) = SmallDisk::mount() else {
        eprintln!("not run: mounting a tmpfs needs root");
        return;
    };
    let path = small.0.path().join("disk.img");
    File::create(&path).unwrap().set_len(8 << 20).unwrap();
    let backend = open(&path, false).unwrap();
    for layout in [Layout::Split, Layout::Packed] {
        let mut rig = Rig::new(layout, &backend);
        let write = rig.send(kind::OUT, 0, &pattern(1, 4 << 20));
        assert_eq!(rig.finish(write), (1, 1));
        assert_eq!(rig.stats.no_space.get(), 1);
        // Give the space back, and go on.
        let discard = rig.send(kind::DISCARD, 0, &crate::test_support::range(0, 16384, 0));
        assert_eq!(rig.finish(discard), (0, 1));
        rig.write(2048, &pattern(2, 65536));
        assert!(rig.read(2048, 65536) == pattern(2, 65536));
        let discard = rig.send(kind::DISCARD, 0, &crate::test_support::range(0, 16384, 0));
        assert_eq!(rig.finish(discard), (0, 1));
    }
}
