//! Streams between guests and host programs.

use super::*;

/// Moves `data` from the guest to the host program; returns what arrived.
fn upload(
    world: &mut TestDomain,
    sock: &mut Sock,
    stream: &mut UnixStream,
    data: &[u8],
) -> Vec<u8> {
    let (mut sent, mut got) = (0, Vec::new());
    for _ in 0..200_000 {
        while sent < data.len() && world.guests[0].can_send() {
            let len = (sock.room() as usize).min(data.len() - sent).min(64 << 10);
            if len == 0 {
                break;
            }
            sock.send(&mut world.guests[0], Op::Rw, 0, &data[sent..sent + len]);
            sent += len;
        }
        world.turn();
        while let Some(p) = world.guests[0].inbox.pop_front() {
            sock.on(&p);
        }
        drain(stream, &mut got);
        if got.len() == data.len() {
            return got;
        }
    }
    panic!("{} of {} bytes arrived, {sent} sent", got.len(), data.len());
}

/// Moves `data` from the host program to the guest, which takes it at once.
fn download(world: &mut TestDomain, sock: &mut Sock, stream: &mut UnixStream, data: &[u8]) {
    let mut sent = 0;
    let have = sock.received.len();
    for _ in 0..200_000 {
        if sent < data.len() {
            match stream.write(&data[sent..]) {
                Ok(n) => sent += n,
                Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock),
            }
        }
        world.turn();
        while let Some(p) = world.guests[0].inbox.pop_front() {
            sock.on(&p);
        }
        if sock.take() && world.guests[0].can_send() {
            sock.send(&mut world.guests[0], Op::CreditUpdate, 0, &[]);
        }
        if sock.received.len() - have == data.len() {
            return;
        }
    }
    panic!("{} of {} bytes arrived, {sent} sent", sock.received.len() - have, data.len());
}

fn stream_both_ways(layout: Layout) {
    let mut world = TestDomain::new();
    world.add_guest(layout, |_| {});
    let listener = world.listen(0, 52);
    let (mut sock, mut stream) = world.connect_out(0, &listener, 1000, 52);
    let up = pattern(5 << 20, 1);
    let down = pattern((5 << 20) + 77, 2);
    assert!(upload(&mut world, &mut sock, &mut stream, &up) == up, "bytes differ");
    download(&mut world, &mut sock, &mut stream, &down);
    assert!(sock.received == down, "bytes differ");
    let stats = &world.stats[0];
    assert_eq!(stats.bytes_from_guest.get(), up.len() as u64);
    assert_eq!(stats.bytes_to_guest.get(), down.len() as u64);
}

#[test]
fn a_guest_streams_to_and_from_the_host_split() {
    stream_both_ways(Layout::Split);
}

#[test]
fn a_guest_streams_to_and_from_the_host_packed() {
    stream_both_ways(Layout::Packed);
}

#[test]
fn a_host_program_streams_to_and_from_a_guest() {
    let mut world = TestDomain::with_guests(1);
    let (mut sock, mut stream) = world.connect_in(0, 7777);
    let data = pattern(3 << 20, 3);
    download(&mut world, &mut sock, &mut stream, &data);
    assert!(sock.received == data, "bytes differ");
    assert!(upload(&mut world, &mut sock, &mut stream, &data) == data, "bytes differ");
}

#[test]
fn bytes_behind_the_connect_line_reach_the_guest() {
    let mut world = TestDomain::with_guests(1);
    let mut stream = UnixStream::connect(world.base(0)).unwrap();
    stream.write_all(b"connect 9\nhello").unwrap();
    let request = world.packet(0);
    let mut sock = Sock::new(request.key());
    sock.send(&mut world.guests[0], Op::Response, 0, &[]);
    world.feed(0, &mut sock);
    assert_eq!(sock.received, b"hello");
}

#[test]
fn a_connect_line_may_come_in_pieces() {
    let mut world = TestDomain::with_guests(1);
    let mut stream = UnixStream::connect(world.base(0)).unwrap();
    for piece in ["CON", "NECT 1", "2"] {
        stream.write_all(piece.as_bytes()).unwrap();
        world.no_packet(0);
    }
    stream.write_all(b"\n").unwrap();
    assert_eq!(world.packet(0).key().guest_port, 12);
}

#[test]
fn a_missing_listener_is_a_reset() {
    let mut world = TestDomain::with_guests(1);
    let mut sock = Sock::new(ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 99 });
    sock.send(&mut world.guests[0], Op::Request, 0, &[]);
    world.feed(0, &mut sock);
    assert!(sock.reset && !sock.open);
    assert_eq!(world.stats[0].refused.get(), 1);
}

#[test]
fn a_listener_with_a_full_backlog_is_a_reset_and_blocks_nobody() {
    let mut world = TestDomain::with_guests(1);
    let listener = world.listen(0, 5);
    // Linux clamps to at least one waiting connection; then the next would have to wait.
    rustix::net::listen(&listener, 0).unwrap();
    let mut outcomes = Vec::new();
    for port in 0..4 {
        let mut sock =
            Sock::new(ConnectionKey { guest_port: port, peer_cid: HOST_CID, peer_port: 5 });
        sock.send(&mut world.guests[0], Op::Request, 0, &[]);
        world.feed(0, &mut sock);
        assert!(sock.open != sock.reset);
        outcomes.push(sock.open);
    }
    assert_eq!(outcomes, [true, false, false, false]);
}

#[test]
fn ports_that_are_not_allowed_are_a_reset() {
    let mut world = TestDomain::new();
    world.add_guest(Layout::Split, |c| c.host_ports = HostPorts::Only(vec![10..=20]));
    let _forbidden = world.listen(0, 52);
    let allowed = world.listen(0, 20);
    let mut sock = Sock::new(ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 52 });
    sock.send(&mut world.guests[0], Op::Request, 0, &[]);
    world.feed(0, &mut sock);
    assert!(sock.reset);
    world.connect_out(0, &allowed, 2, 20);
}

#[test]
fn a_guest_that_refuses_closes_the_host_program() {
    let mut world = TestDomain::with_guests(1);
    let mut stream = UnixStream::connect(world.base(0)).unwrap();
    stream.write_all(b"CONNECT 9\n").unwrap();
    let request = world.packet(0);
    let header = world.guests[0].header(request.key(), Op::Rst);
    world.guests[0].send(&header, &[]);
    world.settle();
    let mut got = Vec::new();
    assert!(drain(&mut stream, &mut got) && got.is_empty());
    assert_eq!(world.stats[0].connections.get(), 0);
}

#[test]
fn halves_close_one_after_the_other() {
    let mut world = TestDomain::with_guests(1);
    let listener = world.listen(0, 52);
    let (mut sock, mut stream) = world.connect_out(0, &listener, 1000, 52);
    // The guest ends its half: the program reads the bytes, then the end.
    sock.send(&mut world.guests[0], Op::Rw, 0, b"question");
    sock.send(&mut world.guests[0], Op::Shutdown, 2, &[]);
    world.settle();
    let mut got = Vec::new();
    assert!(drain(&mut stream, &mut got));
    assert_eq!(got, b"question");
    // The other half still works.
    stream.write_all(b"answer").unwrap();
    world.feed(0, &mut sock);
    assert_eq!((sock.received.as_slice(), sock.peer_shut), (&b"answer"[..], 0));
    // The program goes: the guest hears of both, confirms, and the connection is forgotten.
    drop(stream);
    world.feed(0, &mut sock);
    assert_eq!(sock.peer_shut, 3);
    sock.send(&mut world.guests[0], Op::Rst, 0, &[]);
    world.no_packet(0);
    assert_eq!(world.stats[0].connections.get(), 0);
}

#[test]
fn the_end_of_a_programs_bytes_is_told_after_them() {
    let mut world = TestDomain::with_guests(1);
    let (mut sock, mut stream) = world.connect_in(0, 1);
    stream.write_all(&pattern(100_000, 5)).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    world.feed(0, &mut sock);
    assert_eq!((sock.received.len(), sock.peer_shut), (100_000, 2));
    // Only one half has ended.
    sock.send(&mut world.guests[0], Op::Rw, 0, b"still here");
    world.settle();
    let mut got = Vec::new();
    assert!(!drain(&mut stream, &mut got));
    assert_eq!(got, b"still here");
    // The other half ends later, with nothing to read.
    drop(stream);
    world.feed(0, &mut sock);
    assert_eq!(sock.peer_shut, 3);
}

#[test]
fn bytes_wait_for_credit_and_go_on_with_it() {
    let mut world = TestDomain::with_guests(1);
    let listener = world.listen(0, 52);
    let mut sock = Sock::new(ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 52 });
    sock.buf_alloc = 1000;
    sock.send(&mut world.guests[0], Op::Request, 0, &[]);
    world.feed(0, &mut sock);
    let (mut stream, _) = listener.accept().unwrap();
    let data = pattern(2500, 9);
    stream.write_all(&data).unwrap();
    for expected in [1000, 2000, 2500] {
        world.feed(0, &mut sock);
        assert_eq!(sock.received.len(), expected);
        sock.take();
        sock.send(&mut world.guests[0], Op::CreditUpdate, 0, &[]);
    }
    assert_eq!(sock.received, data);
    assert_eq!(sock.asked, 2, "one credit request each time it ran out");
}

#[test]
fn a_program_that_does_not_read_stops_its_guest_only() {
    let mut world = TestDomain::with_guests(1);
    let listener = world.listen(0, 52);
    let (mut slow, mut slow_stream) = world.connect_out(0, &listener, 1, 52);
    let (mut quick, mut quick_stream) = world.connect_out(0, &listener, 2, 52);
    let mut sent = Vec::new();
    // Fills the socket's buffer, then ours.
    for round in 0..1000 {
        let len = slow.room().min(60_000) as usize;
        if len == 0 {
            break;
        }
        let data = pattern(len, round);
        slow.send(&mut world.guests[0], Op::Rw, 0, &data);
        sent.extend(data);
        world.feed(0, &mut slow);
        assert!(!slow.reset);
    }
    assert_eq!(slow.room(), 0);
    quick.send(&mut world.guests[0], Op::Rw, 0, b"not affected");
    world.settle();
    let mut got = Vec::new();
    drain(&mut quick_stream, &mut got);
    assert_eq!(got, b"not affected");
    // The program reads: everything arrives, and the guest gets its credit back.
    let mut got = Vec::new();
    while got.len() < sent.len() {
        drain(&mut slow_stream, &mut got);
        world.feed(0, &mut slow);
    }
    assert!(got == sent, "bytes differ");
    assert!(slow.room() >= 64 << 10);
    assert!(world.stats[0].buffered_bytes.get() > 0);
}
