//! Opening image files: types, locks, links, alignment, space.

use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::Path;
use std::process::Command;

use queue::Layout;

use crate::BlockError;
use crate::backend::Backend;
use crate::qcow2::{Qcow2Backend, Qcow2Options};
use crate::raw::RawBackend;
use crate::request::kind;
use crate::testing::{Rig, RigOptions, pattern};

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
    let (_, align) = crate::image_file::direct_alignment(&file);
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
        let discard = rig.send(kind::DISCARD, 0, &crate::testing::range(0, 16384, 0));
        assert_eq!(rig.finish(discard), (0, 1));
        rig.write(2048, &pattern(2, 65536));
        assert!(rig.read(2048, 65536) == pattern(2, 65536));
        let discard = rig.send(kind::DISCARD, 0, &crate::testing::range(0, 16384, 0));
        assert_eq!(rig.finish(discard), (0, 1));
    }
}

/// All ways to serve a file: through the page cache, past it, and from memory.
fn odd_files(len_bytes: usize) -> Vec<(tempfile::NamedTempFile, bool)> {
    let make = |folder: &str| {
        let file = tempfile::NamedTempFile::new_in(folder).unwrap();
        fs::write(file.path(), pattern(7, len_bytes)).unwrap();
        file
    };
    vec![(make("/var/tmp"), false), (make("/var/tmp"), true), (make("/dev/shm"), false)]
}

#[test]
fn abuse_Q8_a_file_that_ends_within_a_block_is_padded() {
    for (len, block_size) in
        [((1_usize << 20) + 300, 512_usize), (300, 512), ((1 << 20) + 300, 4096), (1, 4096)]
    {
        let disk_len = len.next_multiple_of(block_size);
        let last = (disk_len - block_size) as u64 / 512;
        for (file, direct) in odd_files(len) {
            let mut content = pattern(7, len);
            content.resize(disk_len, 0);
            let told = format!("{len} of {}, direct: {direct}", file.path().display());
            let open = |read_only| {
                RawBackend::open(file.path(), direct, read_only, block_size as u32).unwrap()
            };
            let rig = |backend: &RawBackend| {
                let demands = backend.demands();
                let block_size = block_size as u32;
                let options = RigOptions { demands, block_size, ..RigOptions::default() };
                Rig::with_disk(Layout::Split, backend.open_queue(64).unwrap(), options)
            };
            let reader = open(true);
            assert_eq!(reader.len_bytes(), disk_len as u64, "{told}");
            assert!(rig(&reader).read(0, disk_len) == content, "{told}");
            assert!(rig(&reader).read(last, block_size) == content[disk_len - block_size..]);
            drop(reader);
            // Read or not written at its end, the file is as it was.
            let writer = open(false);
            let mut rig = rig(&writer);
            if disk_len > block_size {
                content[..block_size].fill(1);
                rig.write(0, &vec![1; block_size]);
            }
            assert!(rig.read(0, disk_len) == content, "{told}");
            assert_eq!(fs::metadata(file.path()).unwrap().len(), len as u64, "{told}");
            rig.write(last, &vec![9; block_size]);
            content[disk_len - block_size..].fill(9);
            assert!(rig.read(0, disk_len) == content, "{told}");
            assert!(fs::read(file.path()).unwrap() == content, "{told}");
            // Not one block more.
            let beyond = rig.send(kind::OUT, last + block_size as u64 / 512, &vec![1; block_size]);
            assert_eq!(rig.finish(beyond), (1, 1), "{told}");
        }
    }
}

#[test]
fn a_resize_counts_whole_blocks_too() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let set = |len| file.as_file().set_len(len).unwrap();
    set(512);
    let backend = open(file.path(), false).unwrap();
    set(1025);
    assert_eq!(backend.resize(None).unwrap(), 1536);
    // By either of its lengths.
    assert_eq!(backend.resize(Some(1025)).unwrap(), 1536);
    assert_eq!(backend.resize(Some(1536)).unwrap(), 1536);
    let text = backend.resize(Some(1024)).unwrap_err().to_string();
    assert!(text.contains("the file has 1025 bytes"), "{text}");
    set(0);
    let text = backend.resize(None).unwrap_err().to_string();
    assert!(text.contains("is empty"), "{text}");
    assert_eq!(backend.len_bytes(), 1536);
}

#[test]
fn abuse_Q8_an_empty_file_is_refused_by_name() {
    let file = tempfile::NamedTempFile::new().unwrap();
    for read_only in [false, true] {
        let text = open(file.path(), read_only).unwrap_err().to_string();
        assert!(text.contains(&format!("{} is empty", file.path().display())), "{text}");
    }
}

/// A loop device of 4 KiB sectors with an xfs on it, where this user may.
struct LargeSectors {
    dir: tempfile::TempDir,
    device: String,
}

impl LargeSectors {
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let backing = dir.path().join("backing");
        File::create(&backing).unwrap().set_len(300 << 20).unwrap();
        let run = |command: &mut Command| command.output().ok().filter(|o| o.status.success());
        let loop_setup = &["-b", "4096", "-f", "--show"];
        let device = run(Command::new("losetup").args(loop_setup).arg(&backing))?;
        let device = String::from_utf8(device.stdout).unwrap().trim().to_owned();
        let this = Self { dir, device };
        fs::create_dir(this.folder()).unwrap();
        run(Command::new("mkfs.xfs").arg("-q").arg(&this.device))?;
        run(Command::new("mount").arg(&this.device).arg(this.folder()))?;
        Some(this)
    }

    fn folder(&self) -> std::path::PathBuf {
        self.dir.path().join("mounted")
    }
}

impl Drop for LargeSectors {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.folder()).status();
        let _ = Command::new("losetup").arg("-d").arg(&self.device).status();
    }
}

#[test]
fn abuse_B6_auto_takes_the_blocks_that_direct_io_asks_for_and_never_others_than_the_guests() {
    let Some(large) = LargeSectors::mount() else {
        eprintln!("not run: no loop device of 4 KiB sectors to be had");
        return;
    };
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    let (there, here) = (large.folder().join("disk.img"), dir.path().join("disk.img"));
    for path in [&there, &here] {
        File::create(path).unwrap().set_len(1 << 20).unwrap();
    }
    let auto = |path: &Path, direct| RawBackend::open_auto(path, direct, false, 512);
    let text = RawBackend::open(&there, true, false, 512).unwrap_err().to_string();
    assert!(text.contains("block_size = 4096 or \"auto\""), "{text}");
    for (path, direct, block_size) in
        [(&there, true, 4096), (&there, false, 512), (&here, true, 512)]
    {
        let backend = auto(path, direct).unwrap();
        assert_eq!(backend.block_size(), block_size, "{}, {direct}", path.display());
        let demands = backend.demands();
        let options = RigOptions { demands, block_size, ..RigOptions::default() };
        let mut rig = Rig::with_disk(Layout::Split, backend.open_queue(64).unwrap(), options);
        rig.write(8, &pattern(3, 8192));
        assert!(rig.read(8, 8192) == pattern(3, 8192));
    }
    // A guest was installed: its table stands in the second of its blocks.
    for (path, table) in [(&there, 512), (&there, 4096), (&here, 512), (&here, 4096)] {
        let mut header = [0; 512];
        header[..8].copy_from_slice(b"EFI PART");
        header[24] = 1;
        let mut image = vec![0; 1 << 20];
        image[table..table + 512].copy_from_slice(&header);
        fs::write(path, &image).unwrap();
        for direct in [false, true] {
            let size = if direct && path == &there { 4096 } else { 512 };
            match auto(path, direct) {
                Ok(_) => assert_eq!(table, size),
                Err(e) => {
                    assert_ne!(table, size, "{e}");
                    assert!(e.to_string().contains(&format!("blocks of {table} bytes")), "{e}");
                }
            }
        }
    }
}

/// Sectors of 512 bytes are served where direct I/O works in 4 KiB: what does not fit takes a
/// longer way.
#[test]
fn a_qcow2_image_past_the_page_cache_has_its_own_sectors() {
    let Some(large) = LargeSectors::mount() else {
        eprintln!("not run: no loop device of 4 KiB sectors to be had");
        return;
    };
    for options in ["cluster_size=64k", "cluster_size=64k,extended_l2=on", "cluster_size=4k"] {
        let path = large.folder().join(format!("{options}.qcow2"));
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-o", options]).arg(&path).arg("4M");
        assert!(create.status().unwrap().success());
        let direct = Qcow2Options { direct: true, ..Qcow2Options::default() };
        let mut rig = Rig::new(Layout::Split, &Qcow2Backend::open(&path, &direct).unwrap());
        let mut expect = vec![0; 4 << 20];
        let mut write = |rig: &mut Rig, sector: u64, data: &[u8]| {
            rig.write(sector, data);
            expect[sector as usize * 512..][..data.len()].copy_from_slice(data);
            // From odd sectors on, over what is zero and what is not.
            for (sector, len) in [(3, 128 << 10), (0, 1 << 20), (127, 2048), (1, 3 << 20)] {
                let want = &expect[sector as usize * 512..][..len];
                assert!(rig.read(sector, len) == want, "{options}: {len} bytes at {sector}");
            }
        };
        write(&mut rig, 128, &pattern(1, 64 << 10));
        write(&mut rig, 300, &[7; 512]);
        write(&mut rig, 301, &pattern(2, 3 * 512));
        write(&mut rig, 129, &pattern(3, 100 << 10));
        write(&mut rig, 1000, &pattern(4, 1 << 20));
        write(&mut rig, 130, &[8; 512]);
        write(&mut rig, 999, &pattern(5, 512 << 10));
    }
}
