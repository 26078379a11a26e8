//! Front ends that attack the daemon in all ways at once, beside others that must not notice: ports come
//! and go, disks answer, no sidecore stands. `MILLRACE_SOAK=1` does it for half an hour.
#![allow(non_snake_case, clippy::unwrap_used)]

mod common;

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Daemon, Place};
use frontend::Reach;
use frontend::disk::{DiskLoad, DiskRun, Op};
use frontend::ring::RingShape;
use queue::Layout;
use queue::testing::ModelDriver;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, sendmsg, socket_with,
};
use serde_json::{Value, json};
use vhost_user::codec::{self, Header, Request, feature};
use zerocopy::IntoBytes;

const CONFIG: &str = "
[sidecore]
count = 1
[[switch]]
name = 'lan'
[[vm]]
name = 'bad'
[[vm.net]]
name = 'n'
switch = 'lan'
[[vm.disk]]
name = 'd'
format = 'memory'
size = '64MiB'
[vm.vsock]
cid = 9
path = '@/guest'
[[vm]]
name = 'good'
[[vm.disk]]
name = 'd'
format = 'memory'
size = '64MiB'
";

/// What a disk of the good VM does in a step.
const STEP_NS: u64 = 50_000_000;

/// A connection that says what it likes.
struct Bad(UnixStream);

impl Bad {
    /// None when nobody takes it: a port whose thread closes what hangs has a full backlog.
    fn dial(path: &Path) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).ok()?;
        let socket = UnixStream::from(socket);
        socket.set_nonblocking(false).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
        socket.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
        Some(Self(socket))
    }

    /// Sends a message; false when nobody takes it.
    fn say(&self, request: Request, body: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let header = Header::request(request as u32, body.len() as u32, false);
        self.raw(&[header.as_bytes(), body].concat(), fds)
    }

    fn raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut room = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
        sendmsg(&self.0, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).is_ok()
    }

    /// Reads until nothing comes for a while, or the end.
    fn listen(mut self) {
        while self.0.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
    }

    fn hello(&self) {
        let features = feature::PROTOCOL_FEATURES | 1 << 32;
        self.say(Request::SetOwner, &[], &[]);
        self.say(Request::SetFeatures, &features.to_ne_bytes(), &[]);
    }
}

/// A socket whose close waits until its peer has read, for ten minutes at most; and the peer.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let theirs = listener.accept().unwrap().0;
    ours.set_nonblocking(true).unwrap();
    while ours.write(&[0; 64 << 10]).is_ok() {}
    ours.set_nonblocking(false).unwrap();
    let linger = Some(Duration::from_secs(600));
    rustix::net::sockopt::set_socket_linger(&ours, linger).unwrap();
    (ours.into(), theirs)
}

/// An eventfd that takes no more and blocks who rings it.
fn full() -> OwnedFd {
    let bell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    bell
}

fn sparse() -> OwnedFd {
    let fd = rustix::fs::memfd_create("sparse", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, 16 << 40).unwrap();
    fd
}

/// All memory that a VM may share, and more.
fn fills_memory(path: &Path) {
    let Some(bad) = Bad::dial(path) else { return };
    bad.hello();
    let fd = sparse();
    let region =
        codec::Region { guest_addr: 0, len_bytes: 16 << 40, user_addr: 1 << 46, mmap_offset: 0 };
    let table = |region: codec::Region| [&1u64.to_ne_bytes()[..], region.as_bytes()].concat();
    bad.say(
        Request::SetMemTable,
        &table(codec::Region { len_bytes: 1 << 40, ..region }),
        &[fd.as_fd()],
    );
    bad.say(Request::SetMemTable, &table(region), &[fd.as_fd()]);
    bad.listen();
}

/// Refusals without an end.
fn is_refused(path: &Path) {
    let Some(bad) = Bad::dial(path) else { return };
    bad.hello();
    let body = codec::SingleRegion {
        padding: 0,
        region: codec::Region { guest_addr: 0, len_bytes: 4096, user_addr: 0, mmap_offset: 0 },
    };
    // A thread of its own that closes what it was sent takes nothing for a long time.
    (0..3000).all(|_| bad.say(Request::RemMemReg, body.as_bytes(), &[]));
}

/// A ring that is served and then broken, with doorbells that would block.
fn blocks(path: &Path) {
    let Some(bad) = Bad::dial(path) else { return };
    bad.hello();
    let driver = ModelDriver::new(Layout::Split, 16);
    let region = driver.region();
    let region = codec::Region {
        guest_addr: region.guest_addr,
        len_bytes: region.len_bytes,
        user_addr: region.user_addr,
        mmap_offset: region.mmap_offset,
    };
    let fd = driver.fd();
    bad.say(
        Request::SetMemTable,
        &[&1u64.to_ne_bytes()[..], region.as_bytes()].concat(),
        &[fd.as_fd()],
    );
    let user = |guest: u64| region.user_addr + (guest - region.guest_addr);
    let (addrs, index) = (driver.setup().addrs, 0u32);
    let state = |num| codec::VringState { index, num };
    bad.say(Request::SetVringNum, state(16).as_bytes(), &[]);
    // Not fresh: it is rung at once. Beyond the ring: it breaks at the first look.
    bad.say(Request::SetVringBase, state(5).as_bytes(), &[]);
    let addr = codec::VringAddr {
        index,
        flags: 0,
        desc: user(addrs.desc),
        used: user(addrs.device),
        avail: user(addrs.driver),
        log: 0,
    };
    bad.say(Request::SetVringAddr, addr.as_bytes(), &[]);
    for request in [Request::SetVringErr, Request::SetVringCall, Request::SetVringKick] {
        bad.say(request, &0u64.to_ne_bytes(), &[full().as_fd()]);
    }
    bad.say(Request::SetVringEnable, state(1).as_bytes(), &[]);
    bad.listen();
}

/// Descriptors whose close hangs, on messages that may have one and on others.
fn lingers(path: &Path, peers: &mut Vec<TcpStream>) {
    for request in [Request::SetLogFd, Request::SetBackendReqFd, Request::GetFeatures] {
        let Some(bad) = Bad::dial(path) else { return };
        let (fd, peer) = lingering();
        // Ours must not be the last one.
        let keep = peer.try_clone().unwrap();
        bad.say(request, &[], &[fd.as_fd()]);
        std::thread::spawn(move || drop(fd));
        bad.listen();
        peers.push(keep);
    }
    // So that they end, some time.
    if peers.len() > 30 {
        peers.clear();
    }
}

/// A second connection, garbage, and descriptors on a part of a header.
fn babbles(path: &Path) {
    let (first, second) = (Bad::dial(path), Bad::dial(path));
    let fd = sparse();
    for bad in [first, second].into_iter().flatten() {
        bad.raw(&[0xa5], &vec![fd.as_fd(); 100]);
        bad.raw(&[0xa5; 4096], &[]);
    }
}

fn attack(path: PathBuf, ended: &AtomicBool, rounds: &AtomicU64) {
    let mut peers = Vec::new();
    while !ended.load(Ordering::Relaxed) {
        if Bad::dial(&path).is_none() {
            std::thread::sleep(Duration::from_millis(10));
        }
        fills_memory(&path);
        is_refused(&path);
        blocks(&path);
        lingers(&path, &mut peers);
        babbles(&path);
        rounds.fetch_add(1, Ordering::Relaxed);
    }
}

/// Attaches a disk, uses it, and detaches it; how long the slower of the two changes took.
fn comes_and_goes(place: &Place, daemon: &Daemon) -> Duration {
    let body = json!({"disk": {"name": "x", "format": "memory", "size": "1MiB",
        "socket": place.socket("x.sock")}});
    let began = Instant::now();
    assert_eq!(daemon.ask("POST", "/v1/vms/new/ports", Some(body)).status, 201);
    let attached = began.elapsed();
    let mut disk = load(&place.socket("x.sock"));
    assert_eq!(disk.run(STEP_NS / 5).unwrap().errors, 0);
    disk.stop().unwrap();
    let began = Instant::now();
    assert!(daemon.ask("DELETE", "/v1/vms/new/ports/x", None).status < 300);
    attached.max(began.elapsed())
}

fn load(socket: &Path) -> DiskLoad {
    let (packed, in_order, event_idx, indirect) = (false, false, true, false);
    let shape = RingShape { size: 64, packed, in_order, event_idx, indirect };
    let (op, depth, block_bytes) = (Op::Write, 8, 4096);
    let (verify, wait, huge, seed) = (true, true, false, 7);
    let run = DiskRun { op, shape, block_bytes, depth, verify, wait, huge, seed };
    DiskLoad::start(Reach::Dial(socket), run).unwrap()
}

fn total(daemon: &Daemon, what: &str) -> u64 {
    let status: Value = daemon.get("/v1/status");
    status["sidecores"].as_array().unwrap().iter().map(|core| core[what].as_u64().unwrap()).sum()
}

#[test]
fn abuse_V_hostile_front_ends_hold_up_nobody() {
    let is_soak = std::env::var_os("MILLRACE_SOAK").is_some();
    let steps = if is_soak { 36_000 } else { 100 };
    let place = Place::new(CONFIG);
    let daemon = place.start();
    let pid = daemon.pid();
    let (ended, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for name in ["bad-n.sock", "bad-d.sock", "bad-vsock.sock"] {
            let (path, ended, rounds) = (place.socket(name), &ended, &rounds);
            assert!(path.exists(), "{}", path.display());
            scope.spawn(move || attack(path, ended, rounds));
        }
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut disk = load(&place.socket("good-d.sock"));
            let mut slowest = Duration::ZERO;
            for step in 0..steps {
                assert_eq!(disk.run(STEP_NS).unwrap().errors, 0);
                if step % 10 == 0 {
                    slowest = slowest.max(comes_and_goes(&place, &daemon));
                }
            }
            disk.stop().unwrap();
            println!("slowest attach or detach {slowest:?}");
        }));
        ended.store(true, Ordering::Relaxed);
        checked.unwrap();
    });
    println!("{rounds:?} rounds of attacks");
    assert!(rounds.load(Ordering::Relaxed) > 0);
    assert_eq!(daemon.pid(), pid);
    assert_eq!((total(&daemon, "stalls"), total(&daemon, "panics")), (0, 0));
    assert_eq!(daemon.port("good", "d")["health"], "ok");
    let log = place.log();
    assert!(log.lines().count() < 3000 + steps, "{} lines", log.lines().count());
    // Threads of the bad ports may hang in a close, which is theirs alone.
    daemon.kill();
}
