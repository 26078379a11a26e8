//! Files that cannot be sinks, and file systems that do not take placeholders. Needs root.

#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::Ordering;

use common::sink_rig::{EXT4, MIB, Rig, content, told};
use common::{Mounted, Seen, World, answer, request, send};
use guest_abi::Reason;
use guest_abi::program::{OWN_POSITION, op};
use zerocopy::IntoBytes;

mod common;

#[test]
fn sinks_are_refused_with_their_reasons() {
    let mut rig = Rig::new(EXT4, 2 * MIB);
    // It knows the file system.
    let asked = rig.pipe(&rig.sink(), 0, MIB);
    rig.serve(&asked);
    assert_eq!(rig.answer(), (MIB, Reason::Complete, 0));
    let (source, sink) = (rig.source(), rig.sink());
    drop(sink);
    for (options, want) in [
        (File::options().append(true), Reason::NotPermitted),
        (File::options().read(true), Reason::NotPermitted),
        (File::options().read(true).custom_flags(libc::O_PATH), Reason::NotPermitted),
    ] {
        assert_eq!(rig.refused(&source, rig.open(options)), want);
    }
    let elsewhere = |path: &str| File::options().write(true).open(path).unwrap();
    assert_eq!(rig.refused(&source, elsewhere("/dev/null")), Reason::NotAFile);
    let memory = rustix::fs::memfd_create("sink", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(rig.refused(&source, memory), Reason::FileSystem);
    let end = rig.open(File::options().write(true));
    assert_eq!(rig.refused_at(&source, &end, (0, 1 << 63)), Reason::Malformed);

    // Into itself, where it is read and elsewhere: then nobody must have it open for writing.
    let own = File::options().read(true).write(true).open(rig.served.0.path("source")).unwrap();
    for (offsets, want) in [
        ((0, MIB - 1), Reason::Malformed),
        ((MIB - 1, 0), Reason::Malformed),
        ((0, MIB), Reason::NoLease),
        ((MIB, 0), Reason::NoLease),
        ((2 * MIB - 1, 0), Reason::NoLease),
    ] {
        assert_eq!(rig.refused_at(&source, &own, offsets), want, "{offsets:?}");
    }
    let mut position = &own;
    position.seek(SeekFrom::Start(7)).unwrap();
    assert_eq!(rig.refused_at(&source, &own, (OWN_POSITION, OWN_POSITION)), Reason::Malformed);
}

#[test]
fn contents_that_go_elsewhere_are_refused() {
    let served = Mounted::served(EXT4);
    File::create(served.0.path("source")).unwrap().write_all(&content(MIB)).unwrap();
    File::create(served.0.path("sink")).unwrap();
    // To the journal first.
    served.0.debugfs("set_inode_field sink flags 0x84000");
    let world = World::served(&served);
    let (daemon, program) = (world.daemon(), world.program());
    let rig = Rig { served, world, daemon, program, bytes: Vec::new() };
    let sink = rig.open(File::options().write(true));
    assert_eq!(rig.refused(rig.source(), sink), Reason::Extents);
}

#[test]
fn a_file_system_is_tested_before_it_is_written_to() {
    let mut rig = Rig::new(EXT4, MIB);
    rig.disk().is_blind.store(true, Ordering::Release);
    let (source, sink) = (rig.source(), rig.sink());
    let request = request(op::PIPE, 0, MIB);
    let fds = [source.as_fd(), sink.as_fd()];
    send(&rig.program, request.as_bytes(), &fds);
    assert!(matches!(rig.daemon.next().unwrap(), Seen::Probe));
    assert!(matches!(rig.daemon.next().unwrap(), Seen::ProbePlaces));
    assert_eq!(rig.answer(), (0, Reason::SelfTest, 95));
    // The result is known, also that it can be read.
    send(&rig.program, request.as_bytes(), &fds);
    assert_eq!(rig.answer(), (0, Reason::SelfTest, 95));
    let (server, _client) = common::tcp();
    send(&rig.program, request.as_bytes(), &[source.as_fd(), server.as_fd()]);
    let Some(Seen::Pipe(asked)) = rig.daemon.next() else { panic!() };
    rig.daemon.done(asked.id, MIB, Reason::Complete);
    assert_eq!(rig.answer(), (MIB, Reason::Complete, 0));

    // Each daemon is asked, once, however many ask at a time.
    rig.disk().is_blind.store(false, Ordering::Release);
    let Rig { served, world, daemon, program, bytes } = rig;
    drop(daemon);
    let mut rig = Rig { daemon: world.daemon(), served, world, program, bytes };
    let second = rig.world.program();
    send(&rig.program, request.as_bytes(), &fds);
    send(&second, request.as_bytes(), &[source.as_fd(), rig.sink().as_fd()]);
    let mut probes = 0;
    for _ in 0..2 {
        let asked = loop {
            match rig.daemon.next().unwrap() {
                Seen::Pipe(asked) => break asked,
                Seen::Probe | Seen::ProbePlaces => probes += 1,
                other => panic!("{other:?}"),
            }
        };
        rig.daemon.done(asked.id, 0, Reason::TooMany);
    }
    assert_eq!(probes, 2);
    assert_eq!((rig.answer().1, told(answer(&second)).1), (Reason::TooMany, Reason::TooMany));
}
