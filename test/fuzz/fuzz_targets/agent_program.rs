//! A program of a guest that says anything to the agent, with any descriptors: each packet has an
//! answer with a reason that there is, and without a daemon nothing is moved.

#![cfg_attr(fuzzing, no_main)]

use std::fs::File;
use std::io::{IoSlice, Result as IoResult};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use agent::line::Heartbeat;
use agent::{Agent, Config};
use guest_abi::Reason;
use guest_abi::program::{Answer, MAGIC, Request, VERSION, op};
use harness::{Input, fuzz_target};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with,
};
use zerocopy::{FromBytes, IntoBytes};

/// Most packets of an input.
const PACKETS: usize = 8;

struct Nobody;

impl agent::host::Dial for Nobody {
    fn dial(&self) -> IoResult<OwnedFd> {
        Err(std::io::ErrorKind::ConnectionRefused.into())
    }
}

struct World {
    _agent: Agent,
    folder: tempfile::TempDir,
    fds: Vec<OwnedFd>,
}

thread_local! {
    static WORLD: World = World::new();
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("agent.sock");
        let heartbeat = Heartbeat::default();
        let config =
            Config { socket, dial: Nobody, any_device: true, heartbeat, secret: Vec::new() };
        let file = File::create_new(folder.path().join("file")).expect("a file");
        file.set_len(64 << 10).expect("a file");
        let (one, other) = UnixStream::pair().expect("sockets");
        let null = File::open("/dev/null").expect("/dev/null");
        let fds = vec![file.into(), one.into(), other.into(), null.into()];
        let _agent = Agent::start(config).expect("an agent");
        Self { _agent, folder, fds }
    }

    fn connect(&self) -> OwnedFd {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a socket");
        let path = self.folder.path().join("agent.sock");
        let address = SocketAddrUnix::new(path).expect("a path");
        connect(&socket, &address).expect("an agent");
        socket
    }
}

/// False when the connection has ended.
fn ask(socket: &OwnedFd, packet: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    assert!(fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds)));
    if sendmsg(socket, &[IoSlice::new(packet)], &mut control, SendFlags::NOSIGNAL).is_err() {
        return false;
    }
    let mut bytes = [0; size_of::<Answer>() + 1];
    match recv(socket, &mut bytes, RecvFlags::empty()) {
        Err(_) | Ok((0, _)) => return false,
        Ok((len, _)) => assert_eq!(len, size_of::<Answer>()),
    }
    let Ok((answer, _)) = Answer::read_from_prefix(&bytes) else { return false };
    assert!(answer.magic == MAGIC && answer.version == VERSION, "{answer:?}");
    let reason = Reason::from_number(answer.reason.get());
    assert!(answer.reason == reason as u16 && answer.moved_bytes == 0, "{answer:?}");
    // No bytes are moved at once, and nothing else is without a daemon.
    let asked = Request::read_from_bytes(packet);
    let is_none = asked.is_ok_and(|asked| asked.op == op::PIPE && asked.len_bytes == 0);
    assert_eq!(reason == Reason::Complete, answer.errno == 0, "{answer:?}");
    assert!(answer.errno != 0 || is_none, "{answer:?} to {packet:?}");
    true
}

fuzz_target!(|bytes: &[u8]| {
    WORLD.with(|world| {
        let (mut input, socket) = (Input(bytes), world.connect());
        for _ in 0..PACKETS {
            if input.is_empty() {
                return;
            }
            let (how, count) = (input.u8(), usize::from(input.u8()) % 4);
            let fds: Vec<_> = (0..count)
                .map(|_| world.fds[usize::from(input.u8()) % world.fds.len()].as_fd())
                .collect();
            let len = if how & 3 == 0 { usize::from(input.u8()) } else { size_of::<Request>() };
            let mut packet = input.bytes(len).to_vec();
            if how & 3 != 0 {
                packet.resize(size_of::<Request>(), 0);
                packet[..8].copy_from_slice([MAGIC, u32::from(VERSION)].as_bytes());
                packet[6] = how >> 2 & 3;
                // A pipe behind a program's back is sent in any case.
                packet[8] &= 0xfe;
            }
            // An empty packet is the end.
            if packet.is_empty() || !ask(&socket, &packet, &fds) {
                return;
            }
        }
    });
});
