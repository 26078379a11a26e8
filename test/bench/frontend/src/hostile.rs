//! A front end that attacks its back end in all ways at once: memory beyond its share, refusals
//! without an end, doorbells that would block, descriptors whose close hangs, second connections,
//! garbage.
//!
//! It waits for nobody for long: a port whose thread is busy with what it was sent takes no
//! connection.

use std::io::{self, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::net::sockopt::{
    set_socket_linger, set_socket_recv_buffer_size, set_socket_send_buffer_size,
};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, sendmsg, socket_with,
};
use vhost_user::codec::{Header, Region, Request, SingleRegion, VringAddr, VringState, feature};
use zerocopy::IntoBytes;

/// How long the back end is waited for where it may have something to say, or to take.
const PATIENCE: Duration = Duration::from_millis(20);
/// Pause of an attacker that nobody takes: a back end that has it wait does so for 100 ms and more.
const PAUSE: Duration = Duration::from_millis(50);
/// Refusals in a row.
const REFUSALS: usize = 3000;
/// Sockets whose close hangs, at the same time.
const MAX_HANGING: usize = 30;
/// Buffers of those sockets, nearly the least that Linux takes.
const SMALL_BUFFER_BYTES: usize = 4096;
/// Descriptors on one byte of a header: more than any message may have.
const MANY_FDS: usize = 100;
/// VIRTIO_F_VERSION_1.
const VERSION_1: u64 = 1 << 32;

/// A hostile VM's own CPU time is for its control group to limit; what it has others do is the
/// question. So it takes what they leave.
const NICE: i32 = 19;

/// Attacks the ports at these sockets, by a thread each, until `wait` is over. Rounds of each.
///
/// # Errors
/// As [`attack`], and of `wait`.
pub fn attack_all(
    sockets: &[PathBuf],
    wait: impl FnOnce() -> io::Result<()>,
) -> io::Result<Vec<u64>> {
    rustix::process::setpriority_process(None, NICE)?;
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let one = |socket: &PathBuf| {
            let rounds = AtomicU64::new(0);
            attack(socket, &ended, &rounds).map(|()| rounds.into_inner())
        };
        let begin = |socket| std::thread::Builder::new().spawn_scoped(scope, move || one(socket));
        let threads: io::Result<Vec<_>> = sockets.iter().map(begin).collect();
        let waited = threads.and_then(|threads| wait().map(|()| threads));
        ended.store(true, Ordering::Relaxed);
        let panicked = || io::Error::other("an attacker panicked");
        let join = |thread: ScopedJoinHandle<'_, _>| thread.join().map_err(|_| panicked())?;
        waited?.into_iter().map(join).collect()
    })
}

/// Attacks the port at `socket` until `ended`; counts the rounds.
///
/// # Errors
/// What this process cannot do itself. That the back end ends a connection is none.
pub fn attack(socket: &Path, ended: &AtomicBool, rounds: &AtomicU64) -> io::Result<()> {
    let mut hanging = Vec::new();
    while !ended.load(Ordering::Relaxed) {
        if Connection::dial(socket)?.is_none() {
            std::thread::sleep(PAUSE);
            continue;
        }
        fill_memory(socket)?;
        be_refused(socket)?;
        block(socket)?;
        linger(socket, &mut hanging)?;
        babble(socket)?;
        rounds.fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

/// A connection that says what it likes.
struct Connection(UnixStream);

impl Connection {
    /// None when nobody takes it.
    fn dial(path: &Path) -> io::Result<Option<Self>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        if connect(&socket, &SocketAddrUnix::new(path)?).is_err() {
            return Ok(None);
        }
        let socket = UnixStream::from(socket);
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Some(Self(socket)))
    }

    /// The same with a hello.
    fn open(path: &Path) -> io::Result<Option<Self>> {
        let connection = Self::dial(path)?;
        if let Some(connection) = &connection {
            let features = feature::PROTOCOL_FEATURES | VERSION_1;
            connection.say(Request::SetOwner, &[], &[]);
            connection.say(Request::SetFeatures, &features.to_ne_bytes(), &[]);
        }
        Ok(connection)
    }

    /// Sends a message; false when nobody takes it.
    fn say(&self, request: Request, body: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let header = Header::request(request as u32, body.len() as u32, false);
        self.send(&[header.as_bytes(), body].concat(), fds)
    }

    fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut room = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        let has_room = fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds));
        let bytes = [IoSlice::new(bytes)];
        has_room && sendmsg(&self.0, &bytes, &mut control, SendFlags::NOSIGNAL).is_ok()
    }

    /// Reads until nothing comes for a while, or the end.
    fn listen(mut self) {
        while self.0.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
    }
}

/// A socket whose close waits until its peer has read, for ten minutes at most; and the peer.
///
/// Small buffers are as full as large ones, and to fill them takes less of the CPU that the good
/// ones use.
fn hanging_socket() -> io::Result<(OwnedFd, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    // Taken over by what it accepts.
    set_socket_recv_buffer_size(&listener, SMALL_BUFFER_BYTES)?;
    let mut ours = TcpStream::connect(listener.local_addr()?)?;
    let theirs = listener.accept()?.0;
    set_socket_send_buffer_size(&ours, SMALL_BUFFER_BYTES)?;
    ours.set_nonblocking(true)?;
    while ours.write(&[0; SMALL_BUFFER_BYTES]).is_ok() {}
    ours.set_nonblocking(false)?;
    set_socket_linger(&ours, Some(Duration::from_secs(600)))?;
    Ok((ours.into(), theirs))
}

/// An eventfd that takes no more and blocks who rings it.
fn full_doorbell() -> io::Result<OwnedFd> {
    let bell = eventfd(0, EventfdFlags::CLOEXEC)?;
    rustix::io::write(&bell, &(u64::MAX - 1).to_ne_bytes())?;
    Ok(bell)
}

fn memory_file(len_bytes: u64) -> io::Result<OwnedFd> {
    let fd = memfd_create("hostile", MemfdFlags::CLOEXEC)?;
    ftruncate(&fd, len_bytes)?;
    Ok(fd)
}

fn memory_table(region: Region) -> Vec<u8> {
    [&1u64.to_ne_bytes()[..], region.as_bytes()].concat()
}

/// All memory that a VM may share, and more.
fn fill_memory(path: &Path) -> io::Result<()> {
    let Some(connection) = Connection::open(path)? else { return Ok(()) };
    let fd = memory_file(16 << 40)?;
    for len_bytes in [1 << 40, 16 << 40] {
        let region = Region { guest_addr: 0, len_bytes, user_addr: 1 << 46, mmap_offset: 0 };
        connection.say(Request::SetMemTable, &memory_table(region), &[fd.as_fd()]);
    }
    connection.listen();
    Ok(())
}

/// Refusals without an end.
fn be_refused(path: &Path) -> io::Result<()> {
    let Some(connection) = Connection::open(path)? else { return Ok(()) };
    let region = Region { guest_addr: 0, len_bytes: 4096, user_addr: 0, mmap_offset: 0 };
    let body = SingleRegion { padding: 0, region };
    // A thread of its own that closes what it was sent takes nothing for a long time.
    let _ = (0..REFUSALS).all(|_| connection.say(Request::RemMemReg, body.as_bytes(), &[]));
    Ok(())
}

/// A ring that is served and then broken, with doorbells that would block.
fn block(path: &Path) -> io::Result<()> {
    let Some(connection) = Connection::open(path)? else { return Ok(()) };
    let fd = memory_file(64 << 10)?;
    let user_addr = 1 << 46;
    let region = Region { guest_addr: 0, len_bytes: 64 << 10, user_addr, mmap_offset: 0 };
    connection.say(Request::SetMemTable, &memory_table(region), &[fd.as_fd()]);
    let state = |num| VringState { index: 0, num };
    connection.say(Request::SetVringNum, state(16).as_bytes(), &[]);
    // Not fresh: it is rung at once. The driver's index is not near it: it breaks at the first
    // look.
    connection.say(Request::SetVringBase, state(500).as_bytes(), &[]);
    let addr = VringAddr {
        index: 0,
        flags: 0,
        desc: user_addr,
        used: user_addr + 0x2000,
        avail: user_addr + 0x1000,
        log: 0,
    };
    connection.say(Request::SetVringAddr, addr.as_bytes(), &[]);
    for request in [Request::SetVringErr, Request::SetVringCall, Request::SetVringKick] {
        connection.say(request, &0u64.to_ne_bytes(), &[full_doorbell()?.as_fd()]);
    }
    connection.say(Request::SetVringEnable, state(1).as_bytes(), &[]);
    connection.listen();
    Ok(())
}

/// Descriptors whose close hangs, on messages that may have one and on others.
fn linger(path: &Path, hanging: &mut Vec<TcpStream>) -> io::Result<()> {
    for request in [Request::SetLogFd, Request::SetBackendReqFd, Request::GetFeatures] {
        let Some(connection) = Connection::dial(path)? else { return Ok(()) };
        let (fd, peer) = hanging_socket()?;
        connection.say(request, &[], &[fd.as_fd()]);
        // Should ours be the last one, it hangs here.
        std::thread::spawn(move || drop(fd));
        connection.listen();
        hanging.push(peer);
    }
    // So that they end, some time.
    if hanging.len() > MAX_HANGING {
        hanging.clear();
    }
    Ok(())
}

/// A second connection, garbage, and descriptors on a part of a header.
fn babble(path: &Path) -> io::Result<()> {
    let both = [Connection::dial(path)?, Connection::dial(path)?];
    let fd = memory_file(4096)?;
    for connection in both.into_iter().flatten() {
        connection.send(&[0xa5], &vec![fd.as_fd(); MANY_FDS]);
        connection.send(&[0xa5; 4096], &[]);
    }
    Ok(())
}
