//! A guest that sends any packets to programs of the host and to another guest: nobody gets what is
//! no packet, no more connections are kept than there may be, and the other guest talks to the host
//! as before.

#![cfg_attr(fuzzing, no_main)]

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use harness::{Input, fuzz_target};
use queue::Layout;
use vsock::fuzzing::Domain;
use vsock::packet::{HOST_CID, RawHeader};
use zerocopy::FromBytes;

const HOSTILE: usize = 0;
const FRIEND: usize = 1;
/// The port at which a program of the host listens.
const PORT: u32 = 7;
const ROUND_NS: u64 = 1_000_000;

struct World {
    folder: tempfile::TempDir,
    /// Listeners on the host, one for each guest.
    listeners: [UnixListener; 2],
}

thread_local! {
    static WORLD: World = World::new();
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let listeners = [3, 4].map(|cid| {
            let path = folder.path().join(format!("vm{cid}_{PORT}"));
            let listener = UnixListener::bind(path).expect("a socket");
            listener.set_nonblocking(true).expect("a socket");
            listener
        });
        Self { folder, listeners }
    }
}

/// Mostly a packet of a connection that there may be.
fn packet(domain: &Domain, input: &mut Input<'_>) -> RawHeader {
    if input.u8() == 0 {
        let mut bytes = [0; size_of::<RawHeader>()];
        let said = input.bytes(bytes.len());
        bytes[..said.len()].copy_from_slice(said);
        return RawHeader::read_from_bytes(&bytes).expect("as many bytes");
    }
    let (op, who) = (u16::from(input.u8()) % 9, input.u8());
    let dst_cid = [u64::from(HOST_CID), 4, 3, 99][usize::from(who & 3)];
    let (from, to) =
        (u32::from(who >> 2 & 7), if who & 0x80 == 0 { PORT } else { input.u8().into() });
    let mut header = domain.guests[HOSTILE].header(dst_cid, op, from, to);
    let bits = input.u8();
    if bits & 1 == 1 {
        header.buf_alloc = input.u32().into();
    }
    if bits & 2 == 2 {
        header.fwd_cnt = input.u32().into();
    }
    if bits & 4 == 4 {
        header.flags = u32::from(input.u8()).into();
    }
    if bits & 0x78 == 0x78 {
        header.kind = u16::from(input.u8()).into();
    }
    header
}

/// The other guest takes all connections, and little of what they say.
fn answer(domain: &mut Domain, came: &[(RawHeader, Vec<u8>)]) {
    for (asked, _) in came.iter().filter(|(header, _)| header.op == 1) {
        let (from, to) = (asked.dst_port.get(), asked.src_port.get());
        let mut header = domain.guests[FRIEND].header(asked.src_cid.get(), 2, from, to);
        header.buf_alloc = 256.into();
        if domain.guests[FRIEND].tx.free_descriptors() > 2 {
            domain.guests[FRIEND].send(&header, &[]);
        }
    }
}

/// A program of the host: reads what it gets, says it again, and goes at times.
fn program(world: &World, streams: &mut Vec<UnixStream>, what: u8) {
    if let Ok((stream, _)) = world.listeners[HOSTILE].accept() {
        stream.set_nonblocking(true).expect("a socket");
        streams.push(stream);
    }
    let mut bytes = [0; 4096];
    for mut stream in streams.iter() {
        if let Ok(len) = stream.read(&mut bytes) {
            let _ = stream.write(&bytes[..len]);
        }
    }
    if what & 0x80 == 0x80 {
        streams.pop();
    }
}

/// The other guest connects to the host, and what it says arrives.
fn check_friend(world: &World, domain: &mut Domain) {
    domain.settle();
    let friend = domain.guests[FRIEND].header(HOST_CID.into(), 1, 5000, PORT);
    domain.guests[FRIEND].send(&friend, &[]);
    let turn = |domain: &mut Domain| domain.turn(ROUND_NS, true)[FRIEND].clone();
    let is_ours =
        |header: &RawHeader| header.dst_port == 5000 && header.src_cid == u64::from(HOST_CID);
    let answers: Vec<_> = (0..4).flat_map(|_| turn(domain)).collect();
    let answer = answers.iter().find(|(header, _)| is_ours(header)).expect("an answer");
    assert_eq!(answer.0.op, 2, "the host is not reached");
    let (mut stream, _) = world.listeners[FRIEND].accept().expect("a connection");
    stream.set_nonblocking(true).expect("a socket");
    let mut header = domain.guests[FRIEND].header(HOST_CID.into(), 5, 5000, PORT);
    header.len = 5.into();
    domain.guests[FRIEND].send(&header, b"hello");
    turn(domain);
    let mut bytes = [0; 8];
    assert_eq!(stream.read(&mut bytes).ok(), Some(5), "what it says does not arrive");
}

fuzz_target!(|bytes: &[u8]| {
    WORLD.with(|world| {
        let mut input = Input(bytes);
        let first = input.u8();
        let layout = if first & 1 == 0 { Layout::Split } else { Layout::Packed };
        let mut domain = Domain::new(layout, world.folder.path()).expect("a domain");
        let mut streams = Vec::new();
        for _ in 0..48 {
            if input.is_empty() {
                break;
            }
            let what = input.u8();
            if what % 4 != 0 && domain.guests[HOSTILE].tx.free_descriptors() > 2 {
                let mut header = packet(&domain, &mut input);
                let len = usize::from(input.u8());
                let payload = input.bytes(len);
                if what & 0x40 == 0 {
                    header.len = (payload.len() as u32).into();
                }
                domain.guests[HOSTILE].send(&header, payload);
            } else {
                let ns = ROUND_NS << (what >> 4 & 7) << (what >> 4 & 7);
                let [_, came] = domain.turn(ns, what & 4 == 0);
                answer(&mut domain, &came);
                program(world, &mut streams, what);
            }
        }
        drop(streams);
        check_friend(world, &mut domain);
        drop(domain);
        for listener in &world.listeners {
            while listener.accept().is_ok() {}
        }
    });
});
