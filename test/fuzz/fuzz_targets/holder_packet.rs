//! A daemon that says anything to the holder: what is no packet ends its connection and no other,
//! and requests are answered as a table of names and blobs says.

#![cfg_attr(fuzzing, no_main)]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;

use base::event::Event;
use harness::{Input, fuzz_target};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect,
    socket_with,
};
use vhost_user::holder::protocol::{MAX_PORT_LEN_BYTES, Op, Received, receive, send};
use vhost_user::holder::{MAX_BLOB_LEN_BYTES, run_until};

struct Holder {
    path: PathBuf,
    stop: Arc<Event>,
    thread: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Holder {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, stop) = (folder.path().join("holder"), Arc::new(Event::new().expect("event")));
        let (socket, stopped) = (path.clone(), stop.clone());
        let serve = move || run_until(&socket, &stopped).expect("a holder");
        let thread = Some(std::thread::spawn(serve));
        Self { path, stop, thread, _folder: folder }
    }

    fn connect(&self) -> OwnedFd {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a socket");
        let address = SocketAddrUnix::new(&self.path).expect("a path");
        // The thread may not have come so far.
        while connect(&socket, &address).is_err() {
            std::thread::yield_now();
        }
        socket
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.stop.signal().expect("an event");
        self.thread.take().map(JoinHandle::join).transpose().expect("the holder");
    }
}

thread_local! {
    static HOLDER: Holder = Holder::new();
}

type Table = BTreeMap<String, (Vec<u8>, usize)>;

/// One request, and what the table says of its answer.
fn ask(socket: &OwnedFd, table: &mut Table, input: &mut Input<'_>) {
    let op = [Op::Put, Op::Get, Op::Forget, Op::List, Op::Done][usize::from(input.u8()) % 5];
    let name = ["a", "b/c", "", "two\nlines", "ä#file"][usize::from(input.u8()) % 5];
    let (len, count) = (usize::from(input.u8()), usize::from(input.u8()) % 4);
    let mut blob = input.bytes(len).to_vec();
    if len == 255 {
        blob.resize(MAX_BLOB_LEN_BYTES, 7);
    }
    let fds: Vec<BorrowedFd<'_>> = (0..count).map(|_| socket.as_fd()).collect();
    send(socket.as_fd(), op, name, &blob, &fds).expect("a holder");
    let Ok(Received::Packet(answer)) = receive(socket.as_fd(), RecvFlags::empty()) else {
        panic!("no answer to {op:?} of {name:?}");
    };
    let refused =
        matches!(op, Op::Done) || (op == Op::Put && (name.is_empty() || name.contains('\n')));
    if refused {
        assert_eq!(answer.op, Op::Refused);
        return;
    }
    match op {
        Op::Put => drop(table.insert(name.to_owned(), (blob, count))),
        Op::Forget => drop(table.remove(name)),
        Op::List => {
            let names = table.keys().map(|name| format!("{name}\n")).collect::<String>();
            assert_eq!(answer.blob, names.as_bytes());
        }
        _ => match table.get(name) {
            Some((blob, count)) => assert_eq!((&answer.blob, answer.fds.len()), (blob, *count)),
            None => assert_eq!(answer.op, Op::Nothing),
        },
    }
}

/// Bytes that may be a packet: with the right beginning, if `is_near`.
fn say(socket: &OwnedFd, bytes: &[u8], is_near: bool) {
    let mut packet = bytes.to_vec();
    if is_near {
        packet.resize(packet.len().max(16), 0);
        packet[..6].copy_from_slice(b"MRHL\x01\x00");
        packet[7] = 0;
        packet[9..12].fill(0);
        packet[13..16].fill(0);
    }
    if packet.is_empty() || rustix::net::send(socket, &packet, SendFlags::NOSIGNAL).is_err() {
        return;
    }
    match receive(socket.as_fd(), RecvFlags::empty()) {
        Ok(Received::Packet(answer)) => {
            assert!(answer.blob.len() <= MAX_BLOB_LEN_BYTES);
            assert!(answer.port.len() <= MAX_PORT_LEN_BYTES);
        }
        Ok(Received::Closed) => {}
        other => panic!("{other:?} for {packet:?}"),
    }
}

fuzz_target!(|bytes: &[u8]| {
    HOLDER.with(|holder| {
        let (mut input, socket) = (Input(bytes), holder.connect());
        let mut table = Table::new();
        for _ in 0..16 {
            if input.is_empty() {
                break;
            }
            ask(&socket, &mut table, &mut input);
        }
        for (at, chunk) in bytes.chunks(64).take(4).enumerate() {
            say(&holder.connect(), chunk, at % 2 == 0);
        }
        // Whoever said what was no packet is gone; this connection is not. What is kept goes.
        send(socket.as_fd(), Op::List, "", b"", &[]).expect("a holder");
        let Ok(Received::Packet(all)) = receive(socket.as_fd(), RecvFlags::empty()) else {
            panic!("no list");
        };
        for name in String::from_utf8(all.blob).expect("names").split_terminator('\n') {
            send(socket.as_fd(), Op::Forget, name, b"", &[]).expect("a holder");
            let answer = receive(socket.as_fd(), RecvFlags::empty());
            assert!(matches!(answer, Ok(Received::Packet(_))));
        }
    });
});
