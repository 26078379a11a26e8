//! Files of real file systems on loop devices: their extents are read from the image, as the daemon
//! does. Needs root.

#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use common::{Mounted, Seen, World, ask, refusal, request, send, tcp};
use guest_abi::Reason;
use guest_abi::pipe::HOLE;
use guest_abi::program::{OWN_POSITION, op};
use zerocopy::IntoBytes;

mod common;

const EXT4: &str = "mke2fs -q -F -t ext4";
const XFS: &str = "mkfs.xfs -q -f";
const LEN: u64 = 5_000_001;

/// Bytes with a hole, in several extents, most of them dirty.
fn make_file(path: &Path) -> Vec<u8> {
    let file = File::create(path).unwrap();
    let mut want = vec![0; LEN as usize];
    for (part, from) in [(1, 0), (2, 3_000_000), (3, 4_999_000)] {
        for at in from..LEN.min(from + 700_000) {
            want[at as usize] = (at * 31 + at / 977 + part) as u8;
        }
        let end = LEN.min(from + 700_000) as usize;
        file.write_all_at(&want[from as usize..end], from).unwrap();
    }
    file.sync_all().unwrap();
    // Overwritten in place, and not written back yet.
    want[100_000..200_000].fill(0xA5);
    file.write_all_at(&want[100_000..200_000], 100_000).unwrap();
    file.set_len(LEN).unwrap();
    want
}

fn bytes_are_the_files(mounted: &Mounted) {
    let want = make_file(&mounted.path("f"));
    let world = World::new(&mounted.image, true);
    let (asked, program, (server, _client)) = (world.obliging_daemon(), world.program(), tcp());
    let mut file = File::open(mounted.path("f")).unwrap();
    let fds =
        |file: &File| [file.as_fd(), server.as_fd()].map(|fd| fd.try_clone_to_owned().unwrap());
    let pipe = |file: &File, offset, len| {
        let fds = fds(file);
        ask(&program, &request(op::PIPE, offset, len), &[fds[0].as_fd(), fds[1].as_fd()])
    };

    let got = pipe(&file, 0, LEN);
    assert_eq!((got.moved_bytes.get(), got.reason.get(), got.errno.get()), (LEN, 0, 0));
    let whole = asked.recv().unwrap();
    assert!(whole.bytes == want);
    assert!(whole.is_cached);
    assert!(whole.extents.iter().any(|extent| extent.offset.get() == HOLE));
    assert_eq!(file.stream_position().unwrap(), 0);

    // Odd ends, its own position, beyond the end.
    file.seek(SeekFrom::Start(99_999)).unwrap();
    assert_eq!(pipe(&file, OWN_POSITION, 3_333_333).moved_bytes.get(), 3_333_333);
    assert!(asked.recv().unwrap().bytes == want[99_999..][..3_333_333]);
    assert_eq!(file.stream_position().unwrap(), 99_999 + 3_333_333);
    let got = pipe(&file, OWN_POSITION, u64::MAX);
    assert_eq!(got.moved_bytes.get(), LEN - 99_999 - 3_333_333);
    assert_eq!((got.reason.get(), got.errno.get()), (Reason::EndOfFile as u16, 0));
    assert!(asked.recv().unwrap().bytes == want[99_999 + 3_333_333..]);
    let got = pipe(&file, OWN_POSITION, 1);
    assert_eq!((got.moved_bytes.get(), got.reason.get()), (0, Reason::EndOfFile as u16));
    assert_eq!(pipe(&file, LEN + 7, 1).reason.get(), Reason::EndOfFile as u16);
    assert_eq!(pipe(&file, u64::MAX - 1, 1).reason.get(), Reason::Malformed as u16);
    assert_eq!((pipe(&file, 0, 0).reason.get(), asked.try_recv().is_err()), (0, true));
}

#[test]
fn bytes_are_the_files_on_ext4() {
    bytes_are_the_files(&Mounted::new(EXT4, "rw", None));
    bytes_are_the_files(&Mounted::new(&format!("{EXT4} -b 1024"), "rw", None));
}

#[test]
fn bytes_are_the_files_on_xfs() {
    bytes_are_the_files(&Mounted::new(XFS, "rw", None));
}

#[test]
fn bytes_are_the_files_on_a_partition() {
    bytes_are_the_files(&Mounted::new(EXT4, "rw", Some(2056)));
}

#[test]
fn a_writer_ends_the_pipe_and_waits_for_it() {
    let mounted = Mounted::new(EXT4, "rw", None);
    let path = mounted.path("f");
    make_file(&path);
    let world = World::new(&mounted.image, true);
    let (mut daemon, program, (server, _client)) = (world.daemon(), world.program(), tcp());
    let file = File::open(&path).unwrap();
    // The self-test is answered on the way to the pipe.
    send(&program, request(op::PIPE, 0, LEN).as_bytes(), &[file.as_fd(), server.as_fd()]);
    let asked = daemon.pipe();
    // The program may close what it gave away.
    drop(file);
    let mut writing = OpenOptions::new();
    writing.write(true).custom_flags(libc::O_NONBLOCK);
    let blocked = |error: std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
    assert!(blocked(writing.open(&path).unwrap_err()));
    let Some(Seen::Cancel(Reason::LeaseBroken)) = daemon.next() else { panic!() };
    // Until the daemon needs the blocks no more.
    assert!(blocked(writing.open(&path).unwrap_err()));
    daemon.done(asked.id, 4096, Reason::Cancelled);
    let got = common::answer(&program);
    assert_eq!((got.moved_bytes.get(), got.reason.get()), (4096, Reason::LeaseBroken as u16));
    let mut writer = writing.open(&path).unwrap();
    writer.write_all(b"new").unwrap();
    // This disk does not know what is read over placeholders.
    let file = File::open(&path).unwrap();
    send(&program, request(op::PIPE, 0, LEN).as_bytes(), &[file.as_fd(), server.as_fd()]);
    let Some(Seen::ProbePlaces) = daemon.next() else { panic!() };
    let got = common::answer(&program);
    assert_eq!((got.moved_bytes.get(), got.reason.get()), (0, Reason::NoLease as u16));
    // That is remembered.
    assert_eq!(refusal(&program, file, &server), Reason::NoLease);
}

#[test]
fn files_are_refused_with_their_reasons() {
    let mounted = Mounted::new(EXT4, "rw", None);
    make_file(&mounted.path("f"));
    let world = World::new(&mounted.image, true);
    let (_asked, program, (server, _client)) = (world.obliging_daemon(), world.program(), tcp());
    let open = |path: &Path, flags| {
        let mut options = OpenOptions::new();
        options.read(flags & libc::O_WRONLY == 0).write(flags & libc::O_WRONLY != 0);
        options.custom_flags(flags).open(path).unwrap()
    };
    let path = mounted.path("f");
    for (file, want) in [
        (open(&path, libc::O_PATH), Reason::NotPermitted),
        (open(&path, libc::O_WRONLY), Reason::NotPermitted),
        (open(&mounted.path(""), 0), Reason::NotAFile),
        (open(Path::new("/dev/zero"), 0), Reason::NotAFile),
        (open(Path::new("/proc/self/stat"), 0), Reason::FileSystem),
    ] {
        assert_eq!(refusal(&program, &file, &server), want, "{file:?}");
    }
    let file = open(&path, 0);
    assert_eq!(refusal(&program, &server, &file), Reason::NotPermitted);
    let unix = std::os::unix::net::UnixStream::pair().unwrap().0;
    assert_eq!(refusal(&program, &file, &unix), Reason::NotTcp);
    // Its content goes to the journal first.
    drop((file, program));
    drop(world);
    mounted.debugfs("set_inode_field f flags 0x84000");
    let world = World::new(&mounted.image, true);
    let (_asked, program) = (world.obliging_daemon(), world.program());
    assert_eq!(refusal(&program, open(&path, 0), &server), Reason::Extents);
}

#[test]
fn file_systems_are_refused_with_their_reasons() {
    for (make, options, any_device, want) in [
        (EXT4, "data=journal", true, Reason::FileSystem),
        (EXT4, "rw", false, Reason::Stacked),
        ("mkfs.btrfs -q -f", "rw", true, Reason::FileSystem),
    ] {
        let mounted = Mounted::new(make, options, None);
        make_file(&mounted.path("f"));
        let world = World::new(&mounted.image, any_device);
        let (_asked, program, (server, _client)) =
            (world.obliging_daemon(), world.program(), tcp());
        let file = File::open(mounted.path("f")).unwrap();
        assert_eq!(refusal(&program, &file, &server), want, "{make} {options}");
    }
    // The daemon has another disk.
    let mounted = Mounted::new(EXT4, "rw", None);
    make_file(&mounted.path("f"));
    let other = tempfile::NamedTempFile::new().unwrap();
    other.as_file().set_len(512 << 20).unwrap();
    let world = World::new(other.path(), true);
    let (_asked, program, (server, _client)) = (world.obliging_daemon(), world.program(), tcp());
    let file = File::open(mounted.path("f")).unwrap();
    assert_eq!(refusal(&program, &file, &server), Reason::NoDisk);
}
