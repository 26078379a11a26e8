//! Tests of qcow2 images: those that are served, and those that are refused (F1).

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use super::{Qcow2Backend, Qcow2Options};
use crate::backend::Backend;
use crate::error::BlockError;
use crate::raw::RawBackend;
use crate::request::kind;
use crate::testing::{BOTH, Rig, pattern, range};
use base::io::{Disk, DiskDone, DiskOp, IoSlice};

mod malformed;

const LEN: u64 = 8 << 20;

/// Makes an image, with a backing file named as given, whatever the name.
pub(crate) fn create(path: &Path, backing: Option<(&str, &str)>) {
    let size = LEN.to_string();
    let mut command = Command::new("qemu-img");
    let made = command.args(["create", "-q", "-f", "qcow2"]).arg(path).arg(size).status().unwrap();
    assert!(made.success());
    let Some((name, format)) = backing else { return };
    // Extensions begin at the header's length. First the format, then the end, then the name.
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut header = vec![0; 4096];
    file.read_exact_at(&mut header, 0).unwrap();
    let at = u32::from_be_bytes(header[100..104].try_into().unwrap()) as usize;
    header[at..].fill(0);
    header[at..at + 4].copy_from_slice(&0xe279_2acau32.to_be_bytes());
    header[at + 4..at + 8].copy_from_slice(&(format.len() as u32).to_be_bytes());
    header[at + 8..at + 8 + format.len()].copy_from_slice(format.as_bytes());
    let name_at = at + 8 + format.len().next_multiple_of(8) + 8;
    header[name_at..name_at + name.len()].copy_from_slice(name.as_bytes());
    header[8..16].copy_from_slice(&(name_at as u64).to_be_bytes());
    header[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
    file.write_all_at(&header, 0).unwrap();
}

fn open(path: &Path, dir: Option<&Path>) -> Result<Qcow2Backend, BlockError> {
    open_as(path, dir, false)
}

pub(crate) fn open_as(
    path: &Path,
    dir: Option<&Path>,
    read_only: bool,
) -> Result<Qcow2Backend, BlockError> {
    let options = Qcow2Options { backing_dir: dir, read_only, ..Qcow2Options::default() };
    Qcow2Backend::open(path, &options)
}

fn refusal(path: &Path, dir: Option<&Path>) -> String {
    open(path, dir).err().expect("must be refused").to_string()
}

/// `images/` (where backing files may be) and `private/`, with a secret in the latter.
struct Dirs {
    root: tempfile::TempDir,
    images: PathBuf,
    private: PathBuf,
}

fn dirs() -> Dirs {
    let root = tempfile::tempdir().unwrap();
    let (images, private) = (root.path().join("images"), root.path().join("private"));
    fs::create_dir(&images).unwrap();
    fs::create_dir(&private).unwrap();
    fs::write(images.join("base.raw"), pattern(1, LEN as usize)).unwrap();
    fs::write(private.join("secret"), pattern(2, LEN as usize)).unwrap();
    Dirs { root, images, private }
}

#[test]
fn an_image_has_the_gate_of_the_device_it_is_on() {
    let dirs = dirs();
    let path = dirs.images.join("disk.qcow2");
    create(&path, None);
    let raw = RawBackend::open(&dirs.images.join("base.raw"), false, false, 512).unwrap();
    let gates = [raw.gate(), open(&path, None).unwrap().gate()];
    // A folder on tmpfs is on no device: then neither has one.
    match &gates {
        [Some(raw), Some(qcow2)] => assert!(Arc::ptr_eq(raw, qcow2)),
        _ => assert!(gates.iter().all(Option::is_none), "{gates:?}"),
    }
}

#[test]
fn reads_writes_flushes_zeroes_and_discards() {
    let dirs = dirs();
    for (n, layout) in BOTH.into_iter().enumerate() {
        let path = dirs.images.join(format!("disk{n}.qcow2"));
        create(&path, None);
        let mut rig = Rig::new(layout, &open(&path, None).unwrap());
        let data = pattern(5, 3 << 20);
        assert_eq!(rig.read(0, 4096), vec![0; 4096]);
        rig.write(100, &data);
        assert!(rig.read(100, 3 << 20) == data);
        let flush = rig.send(kind::FLUSH, 0, &[]);
        assert_eq!(rig.finish(flush), (0, 1));
        let zeroes = rig.send(kind::WRITE_ZEROES, 0, &range(100, 8, 0));
        assert_eq!(rig.finish(zeroes), (0, 1));
        assert_eq!(rig.read(100, 4096), vec![0; 4096]);
        let discard = rig.send(kind::DISCARD, 0, &range(1024, 1024, 0));
        assert_eq!(rig.finish(discard), (0, 1));
        assert!(rig.read(108, 4096) == data[4096..8192]);
        drop(rig);
        // A second daemon finds what was written.
        let mut rig = Rig::new(layout, &open(&path, None).unwrap());
        assert!(rig.read(108, 4096) == data[4096..8192]);
    }
}

#[test]
fn many_requests_at_once_finish_with_their_own_data() {
    let dirs = dirs();
    let path = dirs.images.join("disk.qcow2");
    create(&path, None);
    for layout in BOTH {
        let mut rig = Rig::new(layout, &open(&path, None).unwrap());
        for round in 0..20u64 {
            let blocks: Vec<_> = (0..16).map(|i| pattern(round * 16 + i, 4096)).collect();
            let sent: Vec<_> = blocks
                .iter()
                .enumerate()
                .map(|(i, data)| rig.send(kind::OUT, i as u64 * 1000, data))
                .collect();
            assert_eq!(rig.settle().len(), 16);
            assert!(sent.iter().all(|&o| rig.status(o) == 0));
            for (i, data) in blocks.iter().enumerate() {
                assert!(&rig.read(i as u64 * 1000, 4096) == data);
            }
        }
    }
}

/// Clusters that were written in an order of their own: one operation moves them all, and another
/// what is zero between them.
#[test]
fn the_pieces_of_an_operation_are_moved_at_the_same_time() {
    // On tmpfs, and where io_uring is at work; there also past the page cache.
    for (folder, direct) in [("/dev/shm", false), ("/var/tmp", false), ("/var/tmp", true)] {
        let dir = tempfile::tempdir_in(folder).unwrap();
        let path = dir.path().join("disk.qcow2");
        create(&path, None);
        let options = Qcow2Options { direct, ..Qcow2Options::default() };
        // This file system may not do direct I/O.
        let Ok(backend) = Qcow2Backend::open(&path, &options) else { continue };
        let mut rig = Rig::new(BOTH[0], &backend);
        let mut expect = vec![0; 2 << 20];
        for n in [5u64, 3, 14, 0, 9, 1, 12, 7, 15, 2, 11, 4, 8, 13, 10, 6] {
            let data = pattern(n, 65536);
            expect[n as usize * 65536..][..65536].copy_from_slice(&data);
            rig.write(n * 128, &data);
        }
        // Into the second half only each other cluster.
        for n in (16u64..32).step_by(2) {
            let data = pattern(n, 65536);
            expect[n as usize * 65536..][..65536].copy_from_slice(&data);
            rig.write(n * 128, &data);
        }
        let before = (rig.stats.disk_ops.get(), rig.stats.short_ops.get());
        assert!(rig.read(0, 1 << 20) == expect[..1 << 20], "{folder}");
        assert!(rig.read(2048, 1 << 20) == expect[1 << 20..], "{folder}");
        assert!(rig.read(3, 900 << 10) == expect[3 * 512..][..900 << 10], "{folder}");
        let data = pattern(99, (1 << 20) - 4096);
        rig.write(4, &data);
        let ops = (rig.stats.disk_ops.get() - before.0, rig.stats.short_ops.get() - before.1);
        // Past the page cache the driver's buffers are copied, 128 KiB at a time.
        let most = if direct { 32 } else { 4 };
        assert_eq!(ops, (most, 0), "{folder}: operations, and those that came back short");
        expect[2048..][..data.len()].copy_from_slice(&data);
        // All at once, more than there is room for beside each other.
        let asked: Vec<_> = (0..20).map(|_| rig.ask(kind::IN, 0, 1 << 20)).collect();
        rig.settle();
        for offered in asked {
            assert_eq!(rig.status(offered), 0);
            assert!(rig.driver.read(offered.data, 1 << 20) == expect[..1 << 20], "{folder}");
        }
    }
}

#[test]
fn backing_files_in_the_directory_are_served_and_not_written() {
    let dirs = dirs();
    create(&dirs.images.join("middle.qcow2"), Some(("base.raw", "raw")));
    let top = dirs.root.path().join("top.qcow2");
    create(&top, Some(("images/middle.qcow2", "qcow2")));
    for layout in BOTH {
        let mut rig = Rig::new(layout, &open(&top, Some(&dirs.images)).unwrap());
        rig.write(0, &[9; 512]);
        let mut expect = pattern(1, LEN as usize);
        expect[..512].fill(9);
        assert!(rig.read(0, 1 << 20) == expect[..1 << 20]);
    }
    assert!(fs::read(dirs.images.join("base.raw")).unwrap() == pattern(1, LEN as usize));
    // A backing file is locked against writers, and shared with other readers.
    let served = open(&top, Some(&dirs.images)).unwrap();
    let base = dirs.images.join("base.raw");
    assert!(matches!(RawBackend::open(&base, false, false, 512), Err(BlockError::Locked { .. })));
    RawBackend::open(&base, false, true, 512).unwrap();
    drop(served);
    RawBackend::open(&base, false, false, 512).unwrap();
}

#[test]
#[allow(non_snake_case)]
fn abuse_F1_backing_files_outside_their_directory_are_refused() {
    let dirs = dirs();
    let secret = dirs.private.join("secret");
    symlink(&secret, dirs.images.join("link.raw")).unwrap();
    symlink(&dirs.private, dirs.images.join("dir")).unwrap();
    let absolute = secret.to_str().unwrap();
    let names = [
        absolute,
        "../private/secret",
        "../images/../private/secret",
        "link.raw",
        "dir/secret",
        "/proc/self/environ",
        "/etc/passwd",
        "json:{\"driver\":\"file\",\"filename\":\"/etc/passwd\"}",
        "nbd://localhost/secret",
    ];
    for (n, name) in names.into_iter().enumerate() {
        let path = dirs.images.join(format!("evil{n}.qcow2"));
        create(&path, Some((name, "raw")));
        let text = refusal(&path, Some(&dirs.images));
        let reasons = ["outside", "resolved", "is no plain file"];
        assert!(reasons.iter().any(|reason| text.contains(reason)), "{name}: {text}");
        assert!(refusal(&path, None).contains("no backing directory"), "{name}");
    }
    // Without a directory the harmless ones are refused too.
    let path = dirs.images.join("good.qcow2");
    create(&path, Some(("base.raw", "raw")));
    assert!(refusal(&path, None).contains("no backing directory"));
    open(&path, Some(&dirs.images)).unwrap();
}

#[test]
#[allow(non_snake_case)]
fn abuse_F1_formats_are_never_guessed() {
    let dirs = dirs();
    // A guest wrote a qcow2 header, naming a secret, into its raw disk, which became a base.
    let planted = dirs.images.join("planted.raw");
    create(&planted, Some((dirs.private.join("secret").to_str().unwrap(), "raw")));
    File::options().write(true).open(&planted).unwrap().set_len(LEN).unwrap();
    let top = dirs.images.join("top.qcow2");
    create(&top, Some(("planted.raw", "raw")));
    let mut rig = Rig::new(BOTH[0], &open(&top, Some(&dirs.images)).unwrap());
    assert!(rig.read(0, 512) == fs::read(&planted).unwrap()[..512], "served as it is: raw");
    drop(rig);
    // The same bytes as the image itself: raw stays raw, and raw is not taken for qcow2.
    let mut rig = Rig::new(BOTH[0], &RawBackend::open(&planted, false, false, 512).unwrap());
    assert_eq!(rig.read(0, 512)[..4], *b"QFI\xfb");
    let text = refusal(&dirs.images.join("base.raw"), Some(&dirs.images));
    assert!(text.contains("not a qcow2 image"), "{text}");
    // Other formats, and none.
    for format in ["vmdk", "file", "host_device", ""] {
        let path = dirs.images.join(format!("format-{format}.qcow2"));
        create(&path, Some(("base.raw", format)));
        let text = refusal(&path, Some(&dirs.images));
        assert!(text.contains("format"), "{format}: {text}");
    }
}

/// Changes bytes of an image's header.
fn patch(path: &Path, at: u64, bytes: &[u8]) {
    File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}

#[test]
#[allow(non_snake_case)]
fn abuse_F1_encrypted_external_and_broken_images_are_refused() {
    let dirs = dirs();
    let refused = |name: &str, at: u64, bytes: &[u8], expect: &str| {
        let path = dirs.images.join(name);
        create(&path, None);
        patch(&path, at, bytes);
        let text = refusal(&path, Some(&dirs.images));
        assert!(text.contains(expect), "{name}: {text}");
    };
    refused("encrypted", 32, &2u32.to_be_bytes(), "encrypted");
    refused("external", 72, &4u64.to_be_bytes(), "`data_file`");
    refused("version", 4, &9u32.to_be_bytes(), "version 9");
    refused("unknown", 72, &(1u64 << 40).to_be_bytes(), "incompatible features");
    let empty = dirs.images.join("empty");
    File::create(&empty).unwrap();
    assert!(refusal(&empty, None).contains("not a qcow2 image"));
}

#[test]
#[allow(non_snake_case)]
fn abuse_F1_backing_chains_end() {
    let dirs = dirs();
    // Longer than the limit.
    create(&dirs.images.join("0.qcow2"), None);
    for n in 1..=8 {
        let path = dirs.images.join(format!("{n}.qcow2"));
        create(&path, Some((&format!("{}.qcow2", n - 1), "qcow2")));
    }
    open(&dirs.images.join("7.qcow2"), Some(&dirs.images)).unwrap();
    let text = refusal(&dirs.images.join("8.qcow2"), Some(&dirs.images));
    assert!(text.contains("more than 8 images"), "{text}");
    // A loop.
    create(&dirs.images.join("a.qcow2"), Some(("b.qcow2", "qcow2")));
    create(&dirs.images.join("b.qcow2"), Some(("a.qcow2", "qcow2")));
    refusal(&dirs.images.join("a.qcow2"), Some(&dirs.images));
    let read_only = open_as(&dirs.images.join("a.qcow2"), Some(&dirs.images), true);
    assert!(read_only.err().unwrap().to_string().contains("more than 8 images"));
}

#[test]
fn a_read_only_image_cannot_be_written_even_past_the_engine() {
    let dirs = dirs();
    let path = dirs.images.join("disk.qcow2");
    create(&path, None);
    let backend = open_as(&path, None, true).unwrap();
    let mut disk = backend.open_queue(1).unwrap();
    let mut data = [1u8; 512];
    let buf = IoSlice { iov_base: data.as_mut_ptr().cast(), iov_len: 512 };
    let op = DiskOp::Write { offset: 0, bufs: &raw const buf, count: 1, len_bytes: 512 };
    assert!(matches!(run(&mut *disk, op), Err(e) if e > 0));
}

/// Runs one operation to its end.
fn run(disk: &mut dyn Disk, op: DiskOp) -> Result<u32, i32> {
    // SAFETY: the caller's buffers live across this call, which reaps the operation.
    unsafe { disk.submit(1, op) }.unwrap();
    disk.flush_submissions().unwrap();
    let mut done: Vec<DiskDone> = Vec::with_capacity(1);
    while done.is_empty() {
        disk.reap(&mut done);
        std::thread::yield_now();
    }
    done[0].result
}

/// Room that a file takes on the host.
fn room(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).unwrap().blocks() * 512
}

#[test]
#[allow(non_snake_case)]
fn abuse_Q7_discards_and_zeroes_give_the_host_its_room_back() {
    let dirs = dirs();
    for (n, (options, zeroes)) in
        [("compat=1.1", false), ("compat=0.10", false), ("compat=1.1", true)]
            .into_iter()
            .enumerate()
    {
        let path = dirs.images.join(format!("full{n}.qcow2"));
        let mut command = Command::new("qemu-img");
        command
            .args(["create", "-q", "-f", "qcow2", "-o", options])
            .arg(&path)
            .arg(LEN.to_string());
        assert!(command.status().unwrap().success());
        let backend = open(&path, None).unwrap();
        let mut rig = Rig::new(BOTH[0], &backend);
        rig.write(0, &pattern(3, LEN as usize));
        assert!(room(&path) >= LEN);
        let (kind, flags) = if zeroes { (kind::WRITE_ZEROES, 1) } else { (kind::DISCARD, 0) };
        let cleared = rig.send(kind, 0, &range(0, (LEN / 512) as u32, flags));
        assert_eq!(rig.finish(cleared), (0, 1));
        let flush = rig.send(crate::request::kind::FLUSH, 0, &[]);
        assert_eq!(rig.finish(flush), (0, 1));
        // A helper does this by itself; here it is not waited for.
        backend.pool.chain().top().maintain().unwrap();
        assert!(room(&path) < 2 << 20, "{options}: {} bytes", room(&path));
        assert_eq!(rig.read(1024, 4096), vec![0; 4096]);
        drop((rig, backend));
        assert_clean(&path);
        assert!(room(&path) < 1 << 20, "{options}: {} bytes", room(&path));
    }
}

/// QEMU finds nothing wrong with an image, and nothing lost.
pub(crate) fn assert_clean(path: &Path) {
    let out = Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(path).output().unwrap();
    assert!(out.status.success(), "{}{}", text(&out.stdout), text(&out.stderr));
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn an_image_that_was_not_closed_is_mended_and_served() {
    let dirs = dirs();
    let path = dirs.images.join("disk.qcow2");
    create(&path, None);
    let mut rig = Rig::new(BOTH[0], &open(&path, None).unwrap());
    let data = pattern(9, 1 << 20);
    rig.write(0, &data);
    // A copy of the file is what a killed daemon leaves.
    let left = dirs.images.join("left.qcow2");
    fs::copy(&path, &left).unwrap();
    drop(rig);
    let mut rig = Rig::new(BOTH[0], &open(&left, None).unwrap());
    assert!(rig.read(0, 1 << 20) == data);
    drop(rig);
    assert_clean(&left);
    assert_clean(&path);
}

#[test]
fn a_disk_grows_while_it_is_served() {
    let dirs = dirs();
    let path = dirs.images.join("disk.qcow2");
    create(&path, None);
    let backend = open(&path, None).unwrap();
    assert_eq!(backend.resize(None).unwrap(), LEN);
    // Beyond what the L1 table has room for.
    let grown = 8 << 40;
    assert_eq!(backend.resize(Some(grown)).unwrap(), grown);
    assert!(backend.resize(Some(LEN)).unwrap_err().to_string().contains("--shrink"));
    let mut rig = Rig::new(BOTH[0], &backend);
    let data = pattern(2, 4096);
    rig.write(grown / 512 - 8, &data);
    assert!(rig.read(grown / 512 - 8, 4096) == data);
    drop((rig, backend));
    assert_clean(&path);
    assert_eq!(open(&path, None).unwrap().len_bytes(), grown);
}

#[test]
fn data_in_another_file_is_served_where_the_config_names_it() {
    let dirs = dirs();
    let (path, data) = (dirs.images.join("disk.qcow2"), dirs.images.join("disk.data"));
    let option = format!("data_file={},data_file_raw=on", data.display());
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2", "-o", &option]).arg(&path).arg(LEN.to_string());
    assert!(command.status().unwrap().success());
    assert!(refusal(&path, None).contains("data_file"));
    let options = Qcow2Options { data_file: Some(&data), ..Qcow2Options::default() };
    let mut rig = Rig::new(BOTH[0], &Qcow2Backend::open(&path, &options).unwrap());
    let bytes = pattern(7, 1 << 20);
    rig.write(100, &bytes);
    let flush = rig.send(kind::FLUSH, 0, &[]);
    assert_eq!(rig.finish(flush), (0, 1));
    assert!(rig.read(100, 1 << 20) == bytes);
    drop(rig);
    assert!(fs::read(&data).unwrap()[51_200..][..1 << 20] == bytes);
    assert_eq!(fs::metadata(&data).unwrap().len(), LEN);
    assert_clean(&path);
}
