//! Disks that are read in place, and those that are not.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::stage::{BlockStage, Direction, Verdict};
use queue::Layout;
use rustix::fs::OFlags;
use vhost_user::Device;

use super::port::{Guest, cores, port};
use crate::request::kind;
use crate::testing::model_disk::ModelDisk;
use crate::testing::{BOTH, pattern, range};
use crate::{BackendConfig, BlockError, BlockPort, BlockPortConfig, Image, InPlaceError};

const LEN: u64 = 1 << 20;

fn raw(path: &Path, direct: bool) -> BackendConfig {
    BackendConfig::Raw { path: path.to_path_buf(), direct, registered_memory_bytes: 0 }
}

/// An empty image on a disk, and the folder that it goes with.
fn image() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = dir.path().join("disk.img");
    File::create(&path).unwrap().set_len(LEN).unwrap();
    (dir, path)
}

fn read(image: &Image, offset: u64, len: usize) -> Vec<u8> {
    let file = File::from(image.file.try_clone().unwrap());
    let mut bytes = vec![0xee; len];
    file.read_exact_at(&mut bytes, offset).unwrap();
    bytes
}

fn write_through_the_disk(layout: Layout, direct: bool) {
    let (_dir, path) = image();
    let port = port(raw(&path, direct), |c| c.block_size = 4096);
    port.activate(port.features()).unwrap();
    let mut guest = Guest::new(layout);
    port.start_queue(guest.driver.vring(0)).unwrap();
    let image = port.image().unwrap();
    assert_eq!(image.len_bytes, LEN);
    let flags = rustix::fs::fcntl_getfl(&image.file).unwrap();
    assert_eq!(flags & (OFlags::ACCMODE | OFlags::DIRECT), OFlags::RDONLY);
    // All of it is in the page cache now, where the disk's bytes must not stay hidden.
    assert_eq!(read(&image, 0, LEN as usize), vec![0; LEN as usize]);
    for round in 0..50u64 {
        let at = round % 7 * 8;
        let data = pattern(round, 4096);
        assert_eq!(guest.request(kind::OUT, at, &data, 0).0, 0);
        assert!(read(&image, at * 512, 4096) == data, "round {round}");
    }
    for op in [kind::WRITE_ZEROES, kind::DISCARD] {
        assert_eq!(guest.request(kind::OUT, 0, &pattern(99, 4096), 0).0, 0);
        assert!(read(&image, 0, 4096) == pattern(99, 4096));
        assert_eq!(guest.request(op, 0, &range(0, 8, 0), 0).0, 0);
        if op == kind::WRITE_ZEROES {
            assert_eq!(read(&image, 0, 4096), vec![0; 4096]);
        } else {
            assert_eq!(read(&image, 0, 4096), guest.request(kind::IN, 0, &[], 4096).1);
        }
    }
    assert!(rustix::io::write(&image.file, b"no").is_err(), "only for reading");
}

#[test]
fn what_a_guest_wrote_is_seen_in_place_buffered() {
    BOTH.into_iter().for_each(|layout| write_through_the_disk(layout, false));
}

#[test]
fn what_a_guest_wrote_is_seen_in_place_past_the_page_cache() {
    BOTH.into_iter().for_each(|layout| write_through_the_disk(layout, true));
}

#[test]
fn abuse_F2_a_path_that_was_swapped_does_not_matter() {
    let (dir, path) = image();
    File::options().write(true).open(&path).unwrap().write_all_at(&[7; 512], 0).unwrap();
    let port = port(raw(&path, false), |c| c.read_only = true);
    let other = dir.path().join("other.img");
    std::fs::write(&other, vec![8; LEN as usize]).unwrap();
    std::fs::rename(&other, &path).unwrap();
    assert_eq!(read(&port.image().unwrap(), 0, 512), [7; 512]);
    std::fs::remove_file(&path).unwrap();
    assert_eq!(read(&port.image().unwrap(), 0, 512), [7; 512]);
}

#[test]
fn abuse_F2_a_descriptor_of_the_image_does_not_end_the_lock() {
    let (_dir, path) = image();
    let first = port(raw(&path, false), |_| {});
    drop(first.image().unwrap());
    let again = || {
        let config = BlockPortConfig::new("vm/disk", raw(&path, false));
        BlockPort::new(config, &cores(1, 0), Arc::new(base::clock::MonotonicClock))
    };
    assert!(matches!(again(), Err(BlockError::Locked { .. })));
    // Nor does it hold the lock.
    let image = first.image().unwrap();
    drop(first);
    again().unwrap();
    assert_eq!(image.len_bytes, LEN);
}

#[test]
fn the_length_is_the_one_the_guest_was_told() {
    let (_dir, path) = image();
    let file = File::options().write(true).open(&path).unwrap();
    let port = port(raw(&path, false), |_| {});
    for len in [2 * LEN, LEN / 2] {
        let before = port.len_bytes();
        file.set_len(len).unwrap();
        assert_eq!(port.image().unwrap().len_bytes, before, "not told yet");
        port.resize(None).unwrap();
        assert_eq!(port.image().unwrap().len_bytes, len);
    }
}

#[test]
fn other_formats_are_not_read_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    crate::qcow2::tests::create(&path, None);
    let others = [
        ("memory", BackendConfig::Memory { len_bytes: LEN }),
        ("null", BackendConfig::Null { len_bytes: LEN }),
        (
            "qcow2",
            BackendConfig::Qcow2 {
                path,
                backing_dir: None,
                data_file: None,
                cache_len_bytes: 0,
                direct: false,
            },
        ),
    ];
    for (name, backend) in others {
        let error = port(backend, |_| {}).image().unwrap_err();
        assert!(matches!(error, InPlaceError::Format { kind, .. } if kind == name));
        let expected =
            format!("disk vm/disk: its format is {name}; only raw disks are read in place");
        assert_eq!(error.to_string(), expected);
    }
    // Nor is a disk of another crate that does not say so.
    let config = BlockPortConfig::new("vm/disk", BackendConfig::Null { len_bytes: 0 });
    let held = Arc::new(super::port::Held(ModelDisk::new(LEN as usize)));
    let port = BlockPort::with_backend(config, held, &cores(1, 0)).unwrap();
    assert!(matches!(port.image(), Err(InPlaceError::Format { kind: "held", .. })));
}

struct Marked(&'static str, bool);

impl BlockStage for Marked {
    fn name(&self) -> &str {
        self.0
    }
    fn changes_content(&self) -> bool {
        self.1
    }
    fn push(&mut self, _direction: Direction, _offset: u64, _data: &mut [u8]) -> Verdict {
        Verdict::Pass
    }
}

#[test]
fn a_stage_that_changes_content_forbids_it() {
    let (_dir, path) = image();
    let with = |stages: Vec<Box<dyn BlockStage>>| port(raw(&path, false), |c| c.stages = stages);
    assert!(with(vec![Box::new(Marked("watch", false))]).image().is_ok());
    let port = with(vec![Box::new(Marked("watch", false)), Box::new(Marked("cipher", true))]);
    let error = port.image().unwrap_err();
    assert!(matches!(&error, InPlaceError::Stage { stage, .. } if stage == "cipher"), "{error}");
    assert!(error.to_string().contains("stage cipher changes the content"), "{error}");
}

#[test]
fn a_sector_that_the_file_has_in_part_is_not_read_in_place() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1324).unwrap();
    let port = port(raw(file.path(), false), |_| {});
    assert_eq!(port.len_bytes(), 1536);
    assert_eq!(port.image().unwrap().len_bytes, 1024);
    // The guest has written it.
    file.as_file().set_len(1536).unwrap();
    assert_eq!(port.image().unwrap().len_bytes, 1536);
}
