//! Connections as sources: the bytes that came to the guest before the pipe go before those that
//! the daemon moves. Needs root for the file system.

#![allow(missing_docs, clippy::unwrap_used)]

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use agent::line::Heartbeat;
use common::{Asked, Daemon, Disk, LONG, Mounted, Seen, World, answer, ask, request, send, tcp};
use guest_abi::Reason;
use guest_abi::program::op;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U32, U64};

mod common;

/// Bytes that overflow a socket's buffers.
const LARGE: u64 = 16 << 20;

fn content(len: u64) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 977) as u8).collect()
}

/// Agent without a file system, and two connections: the source's and the sink's.
struct Rig {
    world: World,
    daemon: Daemon,
    program: OwnedFd,
    source: TcpStream,
    /// Peer that sends to the source.
    sender: TcpStream,
    sink: TcpStream,
    /// Peer that receives from the sink.
    receiver: TcpStream,
}

impl Rig {
    fn new() -> Self {
        Self::with(Heartbeat::default())
    }

    fn with(heartbeat: Heartbeat) -> Self {
        let world = World::with(std::path::Path::new("/dev/null"), true, heartbeat, None);
        let (daemon, program) = (world.daemon(), world.program());
        let ((source, sender), (sink, receiver)) = (tcp(), tcp());
        receiver.set_read_timeout(Some(LONG)).unwrap();
        source.set_read_timeout(Some(LONG)).unwrap();
        Self { world, daemon, program, source, sender, sink, receiver }
    }

    fn pipe(&mut self, len: u64, timeout_ms: u32) -> Asked {
        let mut request = request(op::PIPE, 0, len);
        request.timeout_ms = U32::new(timeout_ms);
        send(&self.program, request.as_bytes(), &[self.source.as_fd(), self.sink.as_fd()]);
        let asked = self.daemon.pipe();
        assert_eq!((asked.len_bytes, asked.socket.unread_bytes.get()), (len, 0));
        assert_eq!(asked.from.local_port.get(), self.source.local_addr().unwrap().port());
        assert_eq!(asked.socket.local_port.get(), self.sink.local_addr().unwrap().port());
        asked
    }

    /// Sends to the source, and waits until the bytes are there.
    fn send(&mut self, bytes: &[u8]) {
        self.sender.write_all(bytes).unwrap();
        let mut peeked = vec![0; 1 << 16];
        while self.source.peek(&mut peeked).unwrap() < bytes.len().min(1 << 16) {}
    }

    fn received(&mut self, want: &[u8]) {
        let mut got = vec![0; want.len()];
        self.receiver.read_exact(&mut got).unwrap();
        assert!(got == want);
    }

    /// Expects the bytes that are left in the program's socket after the pipe.
    fn left(&mut self, want: &[u8]) {
        let mut got = vec![0; want.len()];
        self.source.read_exact(&mut got).unwrap();
        assert!(got == want);
    }

    fn answer(&self) -> (u64, Reason, u32) {
        let answer = answer(&self.program);
        let reason = Reason::from_number(answer.reason.get());
        (answer.moved_bytes.get(), reason, answer.errno.get())
    }

    fn own(&mut self, own_bytes: u64) -> guest_abi::pipe::SocketEnd {
        match self.daemon.next().unwrap() {
            Seen::Own(own, Some(end)) if own == own_bytes => *end,
            other => panic!("{other:?}"),
        }
    }

    fn cancelled(&mut self, want: Reason) {
        match self.daemon.next().unwrap() {
            Seen::Cancel(reason) => assert_eq!(reason, want),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn bytes_of_the_guest_go_before_the_daemons() {
    let mut rig = Rig::new();
    rig.sink.write_all(b"header").unwrap();
    rig.received(b"header");
    let bytes = content(150_000);
    rig.send(&bytes[..1000]);
    rig.left(&bytes[..10]);
    let asked = rig.pipe(1_000_000, 0);
    assert_eq!((asked.from.received_bytes.get(), asked.from.unread_bytes.get()), (1000, 990));
    assert_eq!(asked.socket.sent_bytes.get(), 6);
    // Some are still on their way.
    rig.daemon.begun(asked.id, 140_000);
    rig.received(&bytes[10..1000]);
    rig.sender.write_all(&bytes[1000..]).unwrap();
    rig.received(&bytes[1000..140_010]);
    let end = rig.own(140_000);
    assert_eq!((end.sent_bytes.get(), end.local_port), (140_006, asked.socket.local_port));
    rig.daemon.done(asked.id, 1_000_000 - 140_000, Reason::Complete);
    assert_eq!(rig.answer(), (1_000_000, Reason::Complete, 0));
    // Not one more.
    rig.left(&bytes[140_010..]);

    // None; and the daemon's word for why not all.
    let asked = rig.pipe(500, 0);
    rig.daemon.begun(asked.id, 0);
    assert_eq!(rig.own(0).sent_bytes.get(), 140_006);
    rig.daemon.done(asked.id, 100, Reason::EndOfFile);
    assert_eq!(rig.answer(), (100, Reason::EndOfFile, 0));
}

#[test]
fn a_pipe_can_be_the_guests_alone() {
    let mut rig = Rig::new();
    let bytes = content(5000);
    // The daemon has nothing to wait for.
    let asked = rig.pipe(5000, 0);
    rig.daemon.begun(asked.id, 5000);
    rig.daemon.done(asked.id, 0, Reason::Complete);
    rig.sender.write_all(&bytes[..2000]).unwrap();
    rig.received(&bytes[..2000]);
    rig.sender.write_all(&bytes[2000..]).unwrap();
    rig.received(&bytes[2000..]);
    assert_eq!(rig.answer(), (5000, Reason::Complete, 0));

    // Not even for its going.
    let asked = rig.pipe(5000, 0);
    rig.daemon.begun(asked.id, 5000);
    rig.sender.write_all(&bytes[..1]).unwrap();
    rig.received(&bytes[..1]);
    let Rig { world, daemon, program, source, sender, sink, receiver } = rig;
    drop(daemon);
    let daemon = world.daemon();
    let mut rig = Rig { world, daemon, program, source, sender, sink, receiver };
    rig.sender.write_all(&bytes[1..4000]).unwrap();
    rig.received(&bytes[1..4000]);
    rig.sender.shutdown(Shutdown::Write).unwrap();
    rig.cancelled_or_nothing();
    assert_eq!(rig.answer(), (4000, Reason::EndOfFile, 0));
}

impl Rig {
    /// Accepts a cancel or none: one on a stream that has ended is lost.
    fn cancelled_or_nothing(&self) {
        let query = request(op::QUERY, 0, 0);
        assert_eq!(ask(&self.world.program(), &query, &[]).reason.get(), 0);
    }
}

#[test]
fn own_bytes_that_do_not_come_are_not_counted() {
    let bytes = content(3000);
    type End = fn(&mut Rig);
    let ends: [(u32, Reason, End); 4] = [
        (0, Reason::EndOfFile, |rig| rig.sender.shutdown(Shutdown::Write).unwrap()),
        (0, Reason::FlowReset, |rig| {
            let now = Some(Duration::ZERO);
            socket2::SockRef::from(&rig.sender).set_linger(now).unwrap();
            rig.sender = tcp().0;
        }),
        // Long enough for the bytes to come first.
        (3000, Reason::TimedOut, |_| {}),
        (0, Reason::Cancelled, |rig| {
            rustix::net::shutdown(&rig.program, rustix::net::Shutdown::Write).unwrap();
        }),
    ];
    for (timeout_ms, want, end) in ends {
        let mut rig = Rig::new();
        let asked = rig.pipe(10_000, timeout_ms);
        rig.daemon.begun(asked.id, 5000);
        rig.sender.write_all(&bytes).unwrap();
        rig.received(&bytes);
        end(&mut rig);
        rig.cancelled(want);
        // It cannot have moved anything.
        rig.daemon.done(asked.id, 77, Reason::Cancelled);
        assert_eq!(rig.answer(), (3000, want, 0));
    }
    // The daemon ends it.
    let mut rig = Rig::new();
    let asked = rig.pipe(10_000, 0);
    rig.daemon.begun(asked.id, 5000);
    rig.sender.write_all(&bytes).unwrap();
    rig.received(&bytes);
    rig.daemon.done(asked.id, 0, Reason::FlowReset);
    assert_eq!(rig.answer(), (3000, Reason::FlowReset, 0));
    let asked = rig.pipe(10_000, 0);
    rig.daemon.begun(asked.id, 5000);
    rig.daemon.done(asked.id, 0, Reason::NotSettled);
    assert_eq!(rig.answer(), (0, Reason::NotSettled, 11));
}

#[test]
fn what_the_sink_does_not_take_stays_in_the_source() {
    let mut rig = Rig::new();
    let bytes = Arc::new(content(LARGE));
    let asked = rig.pipe(2 * LARGE, 0);
    rig.daemon.begun(asked.id, LARGE);
    let (mut sender, sent) = (rig.sender.try_clone().unwrap(), bytes.clone());
    let sending = std::thread::spawn(move || sender.write_all(&sent));
    // Its buffers are full when nothing more comes to the receiver's.
    let mut before = 0;
    loop {
        std::thread::sleep(Duration::from_millis(50));
        let there = rustix::io::ioctl_fionread(&rig.receiver).unwrap();
        if there > 0 && there == before {
            break;
        }
        before = there;
    }
    rustix::net::shutdown(&rig.program, rustix::net::Shutdown::Write).unwrap();
    rig.cancelled(Reason::Cancelled);
    rig.daemon.done(asked.id, 0, Reason::Cancelled);
    let (moved, reason, _) = rig.answer();
    assert_eq!(reason, Reason::Cancelled);
    assert!(moved > 0 && moved < LARGE, "{moved}");
    rig.received(&bytes[..moved as usize]);
    rig.left(&bytes[moved as usize..]);
    sending.join().unwrap().unwrap();
    rig.receiver.set_nonblocking(true).unwrap();
    assert_eq!(rig.receiver.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn the_daemon_waits_until_nothing_is_in_front() {
    let mut rig = Rig::new();
    let bytes = content(LARGE);
    let asked = rig.pipe(LARGE + 1, 0);
    rig.daemon.begun(asked.id, LARGE);
    let (mut sender, sent) = (rig.sender.try_clone().unwrap(), bytes.clone());
    let sending = std::thread::spawn(move || sender.write_all(&sent));
    // Its peer takes its time.
    rig.received(&bytes[..1000]);
    rig.received(&bytes[1000..]);
    sending.join().unwrap().unwrap();
    let end = rig.own(LARGE);
    assert_eq!(end.sent_bytes.get(), LARGE);
    // Its connection breaks: nobody knows how much of it arrived.
    rig.daemon.done(asked.id, 0, Reason::FlowReset);
    assert_eq!(rig.answer(), (LARGE, Reason::FlowReset, 0));

    // A sink that is gone.
    let asked = rig.pipe(10, 0);
    rig.receiver = tcp().0;
    rig.daemon.begun(asked.id, 5);
    rig.sender.write_all(b"12345").unwrap();
    let Some(Seen::Cancel(reason)) = rig.daemon.next() else { panic!() };
    assert!(matches!(reason, Reason::FlowReset | Reason::NotEstablished), "{reason:?}");
    rig.daemon.done(asked.id, 0, Reason::Cancelled);
    let (moved, reason, _) = rig.answer();
    assert!(moved <= 5 && reason != Reason::Complete);
}

#[test]
fn a_lost_daemon_is_told_as_what_it_is() {
    // Before its part has begun it is known what was moved.
    let mut rig = Rig::new();
    let asked = rig.pipe(10_000, 0);
    rig.daemon.begun(asked.id, 5000);
    rig.sender.write_all(&content(3000)).unwrap();
    rig.received(&content(3000));
    drop(rig.daemon);
    rig.daemon = rig.world.daemon();
    assert_eq!(rig.answer(), (3000, Reason::Lost, 0));
    // Afterwards nobody knows.
    let asked = rig.pipe(10_000, 0);
    rig.daemon.begun(asked.id, 1000);
    rig.sender.write_all(&content(1000)).unwrap();
    rig.own(1000);
    drop(rig.daemon);
    rig.daemon = rig.world.daemon();
    assert_eq!(rig.answer(), (0, Reason::Lost, 5));
    rig.received(&content(1000));
    // One that makes no sense is none.
    type Wrong = fn(&mut Daemon, u64);
    let wrong: [Wrong; 4] = [
        |daemon, id| daemon.begun(id, 10_001),
        |daemon, id| daemon.take_places(id, 0, 4096),
        |daemon, id| daemon.begun(id + 1, 1),
        |daemon, id| {
            daemon.begun(id, 0);
            daemon.begun(id, 0);
        },
    ];
    for nonsense in wrong {
        let asked = rig.pipe(10_000, 0);
        nonsense(&mut rig.daemon, asked.id);
        assert_eq!(rig.answer(), (0, Reason::Lost, 5));
        while rig.daemon.next().is_some() {}
        rig.daemon = rig.world.daemon();
    }
}

#[test]
fn a_daemon_that_says_nothing_is_lost() {
    // Long enough for a machine that has something else to do.
    let heartbeat = Heartbeat { period: Duration::from_millis(100), misses: 20 };
    let mut rig = Rig::with(heartbeat);
    let asked = rig.pipe(10_000, 0);
    rig.daemon.begun(asked.id, 1000);
    // It waits for the source, the daemon is not idle: it answers.
    for _ in 0..3 {
        let Some(Seen::Ping(id)) = rig.daemon.next() else { panic!() };
        rig.daemon.say(guest_abi::pipe::kind::PONG, id, &[]);
    }
    rig.sender.write_all(&content(1000)).unwrap();
    rig.own(1000);
    let Some(Seen::Ping(_)) = rig.daemon.next() else { panic!() };
    assert_eq!(rig.answer(), (0, Reason::Lost, 5));
    assert!(rig.daemon.next().is_none());
}

/// Connection, and a file on a disk that replaces placeholders.
struct ToFile {
    served: (Mounted, Arc<Disk>),
    rig: Rig,
}

impl ToFile {
    fn new() -> Self {
        let served = Mounted::served("mke2fs -q -F -t ext4");
        let world = World::served(&served);
        let (daemon, program) = (world.daemon(), world.program());
        let ((source, sender), (sink, receiver)) = (tcp(), tcp());
        let rig = Rig { world, daemon, program, source, sender, sink, receiver };
        Self { served, rig }
    }

    fn sink(&self) -> File {
        File::create(self.served.0.path("sink")).unwrap()
    }

    fn pipe(&mut self, sink: &File, offset: u64, bytes: &[u8]) -> Asked {
        let mut request = request(op::PIPE, 0, bytes.len() as u64);
        request.sink_offset = U64::new(offset);
        send(&self.rig.program, request.as_bytes(), &[self.rig.source.as_fd(), sink.as_fd()]);
        let asked = self.rig.daemon.pipe();
        self.served.1.know(asked.places.tag, bytes.to_vec());
        asked
    }

    fn read(&self) -> Vec<u8> {
        let path = self.served.0.path("sink");
        let file = File::open(&path).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        std::fs::read(path).unwrap()
    }
}

#[test]
fn a_connection_goes_into_a_file() {
    let mut to = ToFile::new();
    let (bytes, sink) = (content(3_000_000), to.sink());
    let asked = to.pipe(&sink, 100, &bytes);
    to.rig.daemon.begun(asked.id, 70_000);
    to.rig.sender.write_all(&bytes[..30_000]).unwrap();
    to.rig.sender.write_all(&bytes[30_000..70_000]).unwrap();
    assert!(matches!(to.rig.daemon.next().unwrap(), Seen::Own(70_000, None)));
    // Offsets are the pipe's: from the first block that the daemon has as a whole.
    let first = (70_100_u64).next_multiple_of(4096) - 100;
    let last = first + (3_000_000 - first) / 4096 * 4096;
    let daemon = &mut to.rig.daemon;
    daemon.take_bytes(asked.id, 70_000, &bytes[70_000..first as usize]);
    daemon.take_places(asked.id, first, (last - first) as u32);
    assert_eq!(daemon.taken(70_000, (first - 70_000) as u32), 0);
    assert_eq!(daemon.taken(first, (last - first) as u32), 0);
    daemon.take_bytes(asked.id, last, &bytes[last as usize..]);
    assert_eq!(daemon.taken(last, (3_000_000 - last) as u32), 0);
    daemon.done(asked.id, 3_000_000 - 70_000, Reason::Complete);
    assert_eq!(to.rig.answer(), (3_000_000, Reason::Complete, 0));
    let got = to.read();
    assert!(got[..100] == [0; 100] && got[100..] == bytes);
}

#[test]
fn a_connection_that_is_lost_leaves_what_has_arrived() {
    let mut to = ToFile::new();
    let (bytes, sink) = (content(1 << 20), to.sink());
    let asked = to.pipe(&sink, 0, &bytes);
    to.rig.daemon.begun(asked.id, 4096);
    to.rig.sender.write_all(&bytes[..4096]).unwrap();
    assert!(matches!(to.rig.daemon.next().unwrap(), Seen::Own(4096, None)));
    to.rig.daemon.take_places(asked.id, 4096, 8192);
    assert_eq!(to.rig.daemon.taken(4096, 8192), 0);
    to.served.1.forget(&asked.places.tag);
    to.rig.daemon.take_places(asked.id, 12288, 8192);
    assert_eq!(to.rig.daemon.taken(12288, 8192), 0);
    drop(to.rig.daemon);
    to.rig.daemon = to.rig.world.daemon();
    assert_eq!(to.rig.answer(), (12288, Reason::Lost, 0));
    assert!(to.read() == bytes[..12288]);

    // What is behind the guest's own bytes is not there before them.
    let asked = to.pipe(&sink, 0, &bytes);
    to.rig.daemon.begun(asked.id, 100);
    to.rig.sender.write_all(&bytes[..100]).unwrap();
    assert!(matches!(to.rig.daemon.next().unwrap(), Seen::Own(100, None)));
    to.rig.daemon.take_bytes(asked.id, 99, b"x");
    assert!(to.rig.daemon.next().is_none());
    assert_eq!(to.rig.answer(), (100, Reason::Lost, 0));
}

#[test]
fn own_bytes_that_the_file_does_not_take_stay_in_the_source() {
    let mut to = ToFile::new();
    let bytes = content(1 << 20);
    // Out of the largest file there can be.
    let sink = to.sink();
    let largest = (1_u64 << 44) - 4096;
    let asked = to.pipe(&sink, largest - 10, &bytes);
    to.rig.daemon.begun(asked.id, 1000);
    to.rig.sender.write_all(&bytes[..1000]).unwrap();
    to.rig.cancelled(Reason::SinkFailed);
    to.rig.daemon.done(asked.id, 0, Reason::Cancelled);
    assert_eq!(to.rig.answer(), (0, Reason::SinkFailed, libc::EFBIG as u32));
    to.rig.left(&bytes[..1000]);
    assert_eq!(sink.metadata().unwrap().len(), 0);
}
