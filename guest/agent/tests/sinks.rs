//! Files as sinks, on a disk that replaces placeholders by bytes, and with daemons of all kinds.
//! Needs root.

#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::{File, Permissions};
use std::io::{Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::sync::atomic::Ordering;

use common::sink_rig::{EXT4, MIB, Rig, XFS, told};
use common::{Daemon, Seen, World, answer, request, send};
use guest_abi::Reason;
use guest_abi::pipe::{MAX_TAKE_BYTES, take};
use guest_abi::program::{OWN_POSITION, op};
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

mod common;

fn no_placeholders(bytes: &[u8]) {
    let magic = b"MLRCHOLD";
    assert!(!bytes.windows(magic.len()).any(|window| window == magic));
}

fn files_are_written(make: &str) {
    let mut rig = Rig::new(make, 9 * MIB + 4321);
    let len = rig.bytes.len() as u64;

    // A new file from its beginning, by its own position.
    let mut sink = rig.sink();
    let asked = rig.pipe(&sink, OWN_POSITION, u64::MAX);
    let places = asked.places;
    assert_eq!((asked.len_bytes, places.skew_bytes.get(), places.disk.get()), (len, 0, 3));
    rig.serve(&asked);
    assert_eq!(rig.answer(), (len, Reason::EndOfFile, 0));
    assert_eq!(sink.stream_position().unwrap(), len);
    assert!(rig.read() == rig.bytes);

    // Behind that, at an odd place; what is before stays.
    let asked = rig.pipe(&sink, OWN_POSITION, 100_000);
    assert_eq!(u64::from(asked.places.skew_bytes), len % 4096);
    rig.serve(&asked);
    assert_eq!(rig.answer(), (100_000, Reason::Complete, 0));
    assert_eq!(sink.stream_position().unwrap(), len + 100_000);
    let want = [&rig.bytes[..], &rig.bytes[..100_000]].concat();
    assert!(rig.read() == want);

    // Over bytes that are in the page cache, and far beyond the end.
    let mut want = want;
    let cached = rig.open(File::options().read(true));
    for offset in [1_000_001, 3 * len + 1] {
        cached.read_at(&mut vec![0; len as usize], 0).unwrap();
        let asked = rig.pipe(&sink, offset, 300_000);
        rig.serve(&asked);
        assert_eq!(rig.answer(), (300_000, Reason::Complete, 0));
        want.resize(want.len().max(offset as usize + 300_000), 0);
        want[offset as usize..][..300_000].copy_from_slice(&rig.bytes[..300_000]);
        let mut got = vec![0; want.len()];
        cached.read_exact_at(&mut got, 0).unwrap();
        assert!(got == want);
        assert!(rig.read() == want);
    }
    assert_eq!(sink.stream_position().unwrap(), len + 100_000);
    let mode = sink.metadata().unwrap().mode();
    assert_eq!(mode & 0o111, 0);
}

#[test]
fn files_are_written_on_ext4() {
    files_are_written(EXT4);
}

#[test]
fn files_are_written_on_ext4_with_small_blocks() {
    files_are_written(&format!("{EXT4} -b 1024"));
}

#[test]
fn files_are_written_on_xfs() {
    files_are_written(XFS);
}

#[test]
fn readers_see_no_placeholders_that_went_through_the_page_cache() {
    // A small file is in its inode: the file system writes it through the page cache.
    let mut rig = Rig::new(&format!("{EXT4} -O inline_data"), 2 * MIB);
    let mut sink = rig.sink();
    sink.write_all(b"small").unwrap();
    let asked = rig.pipe(&sink, 0, u64::MAX);
    let reader = rig.open(File::options().read(true));
    assert_eq!(rig.take(&asked, 0, MIB), 0);
    let mut got = vec![0; MIB as usize];
    reader.read_exact_at(&mut got, 0).unwrap();
    assert!(got == rig.bytes[..MIB as usize]);
    // Now it does not, and what was read before is not what is there.
    assert_eq!(rig.take(&asked, MIB, MIB), 0);
    rig.daemon.done(asked.id, 2 * MIB, Reason::Complete);
    assert_eq!(rig.answer(), (2 * MIB, Reason::EndOfFile, 0));
    assert!(rig.read() == rig.bytes);
}

#[test]
fn what_the_disk_has_not_seen_is_sent_again() {
    let mut rig = Rig::new(EXT4, 2 * MIB + 100);
    let sink = rig.sink();
    let asked = rig.pipe(&sink, 0, u64::MAX);
    rig.daemon.take_places(asked.id, MIB, MIB as u32);
    rig.disk().is_blind.store(true, Ordering::Release);
    assert_eq!(rig.daemon.taken(MIB, MIB as u32), 0);
    // Not in their order, while the next ones are asked for already.
    assert_eq!(rig.take(&asked, 0, MIB), 0);
    rig.disk().is_blind.store(false, Ordering::Release);
    let (mut at, piece) = (0, MAX_TAKE_BYTES as u64);
    assert_eq!(rig.take_bytes(&asked, 2 * MIB, 100), 0);
    while at < 2 * MIB {
        let len = piece.min(2 * MIB - at);
        assert_eq!(rig.take_bytes(&asked, at, len), 0);
        at += len;
    }
    rig.daemon.done(asked.id, asked.len_bytes, Reason::Complete);
    assert_eq!(rig.answer(), (asked.len_bytes, Reason::EndOfFile, 0));
    assert!(rig.read() == rig.bytes);
}

#[test]
fn a_daemon_that_is_lost_leaves_a_shorter_copy() {
    let mut rig = Rig::new(EXT4, 4 * MIB);
    let mut sink = rig.sink();
    let asked = rig.pipe(&sink, OWN_POSITION, u64::MAX);
    assert_eq!(rig.take(&asked, 0, MIB), 0);
    // From here on nobody replaces anything.
    rig.disk().forget(&asked.places.tag);
    assert_eq!(rig.take(&asked, MIB, MIB), 0);
    assert_eq!(rig.take_bytes(&asked, 2 * MIB, 5000), 0);
    // With a gap before it.
    assert_eq!(rig.take(&asked, 3 * MIB, 4096), 0);
    let Rig { served, world, daemon, program, bytes } = rig;
    drop(daemon);
    let moved = 2 * MIB + 5000;
    assert_eq!(told(answer(&program)), (moved, Reason::Lost, 0));
    assert_eq!(sink.stream_position().unwrap(), moved);
    let rig = Rig { daemon: world.daemon(), served, world, program, bytes };
    assert!(rig.read() == rig.bytes[..moved as usize]);
}

#[test]
fn a_pipe_that_ends_early_leaves_nothing_behind_its_bytes() {
    let mut rig = Rig::new(EXT4, 4 * MIB);
    let old: Vec<u8> = vec![9; MIB as usize + MIB as usize / 2];
    for (moved, is_long) in [(MIB, false), (MIB, true), (0, false), (0, true)] {
        let mut sink = rig.sink();
        if is_long {
            sink.write_all(&old).unwrap();
        }
        let asked = rig.pipe(&sink, 0, u64::MAX);
        assert_eq!(rig.take(&asked, 0, MIB), 0);
        rig.disk().forget(&asked.places.tag);
        assert_eq!(rig.take(&asked, MIB, 2 * MIB), 0);
        rig.daemon.done(asked.id, moved, Reason::DiskFailed);
        let errno = if moved > 0 { 0 } else { 5 };
        assert_eq!(rig.answer(), (moved, Reason::DiskFailed, errno));
        let got = rig.read();
        no_placeholders(&got);
        assert!(got[..moved as usize] == rig.bytes[..moved as usize]);
        assert_eq!(got.len() as u64, if is_long { old.len() as u64 } else { moved });
    }
    // Somebody else has gone on behind it: that stays.
    let sink = rig.sink();
    let asked = rig.pipe(&sink, 0, u64::MAX);
    rig.disk().forget(&asked.places.tag);
    assert_eq!(rig.take(&asked, 0, MIB), 0);
    sink.write_all_at(b"tail", MIB).unwrap();
    rig.daemon.done(asked.id, 0, Reason::DiskFailed);
    assert_eq!(rig.answer().0, 0);
    let got = rig.read();
    no_placeholders(&got);
    assert!(got.len() as u64 == MIB + 4 && got.ends_with(b"tail"));
    // More than was asked for is never there.
    let sink = rig.sink();
    let asked = rig.pipe(&sink, 0, u64::MAX);
    assert_eq!(rig.take(&asked, 0, MIB), 0);
    rig.daemon.done(asked.id, u64::MAX, Reason::Complete);
    assert_eq!(rig.answer(), (MIB, Reason::Unknown, 0));
    assert!(rig.read() == rig.bytes[..MIB as usize]);
}

#[test]
fn a_pipe_that_is_cancelled_still_writes_what_is_asked_for() {
    let mut rig = Rig::new(EXT4, 4 * MIB);
    let sink = rig.sink();
    let asked = rig.pipe(&sink, 0, u64::MAX);
    rustix::net::shutdown(&rig.program, rustix::net::Shutdown::Write).unwrap();
    let Some(Seen::Cancel(Reason::Cancelled)) = rig.daemon.next() else { panic!() };
    assert_eq!(rig.take(&asked, 0, MIB), 0);
    rig.daemon.done(asked.id, MIB, Reason::Cancelled);
    assert_eq!(rig.answer(), (MIB, Reason::Cancelled, 0));
    assert!(rig.read() == rig.bytes[..MIB as usize]);
}

#[test]
fn a_full_disk_is_an_errno_and_reserved_blocks_are_roots() {
    let mut rig = Rig::new(EXT4, 64 * MIB);
    let free = |rig: &Rig| {
        let stat = rustix::fs::statvfs(rig.served.0.path("")).unwrap();
        (stat.f_bavail * stat.f_frsize, stat.f_bfree * stat.f_frsize)
    };
    let filler = File::create(rig.served.0.path("filler")).unwrap();
    let mode = rustix::fs::FallocateFlags::empty();
    rustix::fs::fallocate(&filler, mode, 0, free(&rig).0 - 8 * MIB).unwrap();
    let sink = rig.sink();
    sink.set_permissions(Permissions::from_mode(0o6777)).unwrap();
    rig.program = program_of(&rig.world, 65534);
    let asked = rig.pipe(&sink, 0, u64::MAX);
    assert_eq!(rig.take(&asked, 0, 4 * MIB), 0);
    assert_eq!(sink.metadata().unwrap().mode() & 0o7777, 0o777);
    assert_eq!(rig.take(&asked, 4 * MIB, 32 * MIB), 28);
    let (available, reserved) = free(&rig);
    assert!(available < MIB && reserved > 20 * MIB, "{available} {reserved}");
    // Nothing more is tried, whatever else there is room for.
    let filled = filler.metadata().unwrap().len();
    filler.set_len(filled - MIB).unwrap();
    assert_eq!(rig.take_bytes(&asked, 36 * MIB, 1), 28);
    rustix::fs::fallocate(&filler, mode, 0, filled).unwrap();
    rig.daemon.done(asked.id, 4 * MIB, Reason::SinkFailed);
    assert_eq!(rig.answer(), (4 * MIB, Reason::SinkFailed, 0));
    assert!(rig.read() == rig.bytes[..4 * MIB as usize]);

    // Nothing at all: the program is told why.
    rustix::fs::fallocate(&filler, mode, 0, filler.metadata().unwrap().len() + free(&rig).0)
        .unwrap();
    let asked = rig.pipe(&sink, 4 * MIB, u64::MAX);
    assert_eq!(rig.take(&asked, 0, 4 * MIB), 28);
    rig.daemon.done(asked.id, 0, Reason::SinkFailed);
    assert_eq!(rig.answer(), (0, Reason::SinkFailed, 28));

    // Root has the rest.
    rig.program = rig.world.program();
    let asked = rig.pipe(&sink, 4 * MIB, 4 * MIB);
    rig.serve(&asked);
    assert_eq!(rig.answer(), (4 * MIB, Reason::Complete, 0));
}

/// Connects a program of another user.
fn program_of(world: &World, user: u32) -> OwnedFd {
    let folder = world.socket.parent().unwrap().parent().unwrap();
    std::fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
    let connecting = || {
        // Of this thread alone.
        use rustix::process::{Gid, Uid};
        let (gid, uid) = (Gid::from_raw(user), Uid::from_raw(user));
        rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        world.program()
    };
    std::thread::scope(|scope| scope.spawn(connecting).join().unwrap())
}

#[test]
fn daemons_without_sense_lose_their_stream_and_no_byte_is_wrong() {
    let mut rig = Rig::new(EXT4, 2 * MIB + 7);
    type Wrong = fn(&mut Daemon, u64);
    let wrong: [Wrong; 8] = [
        |daemon, id| daemon.take_places(id, 2 * MIB, 8192),
        |daemon, id| daemon.take_places(id, u64::MAX - 4095, 4096),
        |daemon, id| daemon.take_places(id, 512, 4096),
        |daemon, id| daemon.take_places(id, 0, 512),
        |daemon, id| daemon.take(id, 0, 4096, take::BYTES, &[1; 4095]),
        |daemon, id| daemon.take_bytes(id, 2 * MIB + 5, b"abc"),
        |daemon, id| daemon.take_places(id + 1, 0, 4096),
        |daemon, id| daemon.begun(id, 0),
    ];
    for nonsense in wrong {
        let sink = rig.sink();
        let asked = rig.pipe(&sink, 0, u64::MAX);
        rig.disk().forget(&asked.places.tag);
        assert_eq!(rig.take(&asked, 0, MIB), 0);
        nonsense(&mut rig.daemon, asked.id);
        assert_eq!(rig.answer(), (MIB, Reason::Lost, 0));
        assert!(rig.daemon.next().is_none());
        assert!(rig.read() == rig.bytes[..MIB as usize]);
        rig.daemon = rig.world.daemon();
    }
    // Scattered over the file: what it has to remember of them has a limit.
    let sink = rig.sink();
    let asked = rig.pipe(&sink, 0, u64::MAX);
    let mut count = 0;
    for at in (0..).step_by(8) {
        rig.daemon.take_bytes(asked.id, at, &asked.bytes[at as usize..][..1]);
        match rig.daemon.next() {
            Some(Seen::Taken(..)) => count += 1,
            None => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(count, agent::file_sink::MAX_RANGES);
    assert_eq!(rig.answer(), (1, Reason::Lost, 0));
    assert!(rig.read() == rig.bytes[..1]);
}

#[test]
fn a_deadline_and_sync_are_the_programs() {
    let mut rig = Rig::new(EXT4, MIB);
    let sink = rig.open(File::options().create(true).write(true).custom_flags(libc::O_SYNC));
    let asked = rig.pipe(&sink, 0, u64::MAX);
    // What the agent has opened for itself is written through as well.
    let folder = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    let path = rig.served.0.path("sink");
    let flags: Vec<_> = folder
        .filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|target| target == path))
        .map(|entry| {
            let info = entry.path().to_str().unwrap().replace("/fd/", "/fdinfo/");
            let info = std::fs::read_to_string(info).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            i32::from_str_radix(flags.trim(), 8).unwrap()
        })
        .collect();
    assert!(flags.iter().any(|flags| flags & libc::O_DIRECT != 0), "{flags:?}");
    assert!(flags.iter().all(|flags| flags & libc::O_SYNC == libc::O_SYNC), "{flags:?}");
    rig.serve(&asked);
    assert_eq!(rig.answer(), (MIB, Reason::EndOfFile, 0));

    let mut late = request(op::PIPE, 0, MIB);
    late.timeout_ms = U32::new(30);
    late.sink_offset = U64::new(0);
    let source = rig.source();
    let fds: [BorrowedFd<'_>; 2] = [source.as_fd(), sink.as_fd()];
    send(&rig.program, late.as_bytes(), &fds);
    let asked = rig.daemon.pipe();
    let Some(Seen::Cancel(Reason::TimedOut)) = rig.daemon.next() else { panic!() };
    rig.daemon.done(asked.id, 0, Reason::Cancelled);
    assert_eq!(rig.answer(), (0, Reason::TimedOut, 110));
    assert!(rig.read() == rig.bytes);
}
