//! Streams between guests.

use super::*;

/// The sockets of a connection from guest 0 (port 1000) to guest 1 (port 80), both open.
fn join(world: &mut TestDomain) -> (Sock, Sock) {
    let (mut a, request) = ask(world, 1000, 80);
    let mut b = Sock::new(request.key());
    b.on(&request);
    b.send(&mut world.guests[1], Op::Response, 0, &[]);
    world.feed(0, &mut a);
    assert!(a.open);
    (a, b)
}

/// Guest 0's request, and what guest 1 gets.
fn ask(world: &mut TestDomain, from: u32, to: u32) -> (Sock, Packet) {
    let mut a = Sock::new(ConnectionKey { guest_port: from, peer_cid: 4, peer_port: to });
    a.send(&mut world.guests[0], Op::Request, 0, &[]);
    let request = world.packet(1);
    assert_eq!(request.op(), 1);
    assert_eq!(request.key(), ConnectionKey { guest_port: to, peer_cid: 3, peer_port: from });
    (a, request)
}

fn move_bytes(
    world: &mut TestDomain,
    from: (usize, &mut Sock),
    to: (usize, &mut Sock),
    data: &[u8],
) {
    let (mut sent, have) = (0, to.1.received.len());
    for _ in 0..100_000 {
        while sent < data.len() && world.guests[from.0].can_send() {
            let len = (from.1.room() as usize).min(data.len() - sent).min(64 << 10);
            if len == 0 {
                break;
            }
            from.1.send(&mut world.guests[from.0], Op::Rw, 0, &data[sent..sent + len]);
            sent += len;
        }
        world.turn();
        for (guest, sock) in [(from.0, &mut *from.1), (to.0, &mut *to.1)] {
            while let Some(p) = world.guests[guest].inbox.pop_front() {
                sock.on(&p);
            }
        }
        if to.1.take() && world.guests[to.0].can_send() {
            to.1.send(&mut world.guests[to.0], Op::CreditUpdate, 0, &[]);
        }
        if to.1.received.len() - have == data.len() {
            return;
        }
    }
    panic!("{sent} bytes sent, {} arrived", to.1.received.len() - have);
}

#[test]
fn guests_stream_to_each_other() {
    let mut world = TestDomain::with_guests(2);
    let (mut a, mut b) = join(&mut world);
    let (up, down) = (pattern(4 << 20, 1), pattern((3 << 20) + 5, 2));
    move_bytes(&mut world, (0, &mut a), (1, &mut b), &up);
    assert!(b.received == up, "bytes differ");
    move_bytes(&mut world, (1, &mut b), (0, &mut a), &down);
    assert!(a.received == down, "bytes differ");
}

#[test]
fn with_room_at_the_receiver_there_is_one_copy() {
    let mut world = TestDomain::with_guests(2);
    let (mut a, mut b) = join(&mut world);
    let data = pattern(100_000, 7);
    a.send(&mut world.guests[0], Op::Rw, 0, &data[..60_000]);
    a.send(&mut world.guests[0], Op::Rw, 0, &data[60_000..]);
    world.feed(1, &mut b);
    assert!(b.received == data, "bytes differ");
    assert_eq!(world.stats[0].buffered_bytes.get(), 0);
    let copied = world.guests[0].tx.stats().copied_bytes.get()
        + world.guests[1].rx.stats().copied_bytes.get();
    assert_eq!(copied, data.len() as u64);
}

#[test]
fn a_receiver_without_buffers_or_credit_loses_nothing() {
    let mut world = TestDomain::with_guests(2);
    let (mut a, mut b) = join(&mut world);
    world.guests[1].refill = false;
    let mut sent = Vec::new();
    // Uses up the receive buffers, then our buffer, until the sender has no credit.
    for round in 0..100 {
        let len = a.room().min(64 << 10) as usize;
        if len == 0 {
            break;
        }
        let data = pattern(len, round);
        a.send(&mut world.guests[0], Op::Rw, 0, &data);
        sent.extend(data);
        world.feed(0, &mut a);
        assert!(!a.reset);
    }
    assert_eq!(a.room(), 0);
    // A starved neighbour is no reason for the sender to wait for others.
    let listener = world.listen(0, 52);
    let (mut other, mut stream) = world.connect_out(0, &listener, 5, 52);
    other.send(&mut world.guests[0], Op::Rw, 0, b"goes on");
    world.settle();
    let mut got = Vec::new();
    drain(&mut stream, &mut got);
    assert_eq!(got, b"goes on");
    // Buffers come back; the receiver takes in small steps.
    world.guests[1].refill = true;
    for _ in 0..1000 {
        world.guests[1].give_buffers(1, HEADER + 4096);
        world.feed(1, &mut b);
        if b.take() {
            b.send(&mut world.guests[1], Op::CreditUpdate, 0, &[]);
        }
        if b.received.len() == sent.len() {
            break;
        }
    }
    assert!(b.received == sent, "bytes differ");
    world.feed(0, &mut a);
    assert!(a.room() >= 64 << 10, "the sender has credit again");
}

#[test]
fn new_bytes_never_overtake_those_that_wait() {
    let mut world = TestDomain::with_guests(2);
    let (mut a, mut b) = join(&mut world);
    a.buf_alloc = 10;
    a.send(&mut world.guests[0], Op::CreditUpdate, 0, &[]);
    world.settle();
    b.send(&mut world.guests[1], Op::Rw, 0, b"0123456789wait");
    world.feed(0, &mut a);
    assert_eq!(a.received, b"0123456789");
    // In one round, first the receiver's credit, then more bytes.
    a.take();
    a.buf_alloc = 1000;
    a.send(&mut world.guests[0], Op::CreditUpdate, 0, &[]);
    b.send(&mut world.guests[1], Op::Rw, 0, b"new");
    world.feed(0, &mut a);
    assert_eq!(a.received, b"0123456789waitnew");
}

#[test]
fn a_refusing_guest_is_a_reset_for_the_asking_one() {
    let mut world = TestDomain::with_guests(2);
    let (mut a, request) = ask(&mut world, 1000, 81);
    let header = world.guests[1].header(request.key(), Op::Rst);
    world.guests[1].send(&header, &[]);
    world.feed(0, &mut a);
    assert!(a.reset && !a.open);
    assert_eq!((world.stats[0].connections.get(), world.stats[1].connections.get()), (0, 0));
}

#[test]
fn closing_delivers_what_was_sent_and_forgets_both_sides() {
    let mut world = TestDomain::with_guests(2);
    let (mut a, mut b) = join(&mut world);
    b.buf_alloc = 1000;
    b.send(&mut world.guests[1], Op::CreditUpdate, 0, &[]);
    world.settle();
    let data = pattern(5000, 3);
    a.send(&mut world.guests[0], Op::Rw, 0, &data);
    a.send(&mut world.guests[0], Op::Shutdown, 3, &[]);
    world.feed(0, &mut a);
    assert!(a.reset, "the closing guest is released at once");
    for _ in 0..5 {
        assert_eq!(b.peer_shut & 2, 0, "the end is told after the bytes");
        world.feed(1, &mut b);
        b.take();
        b.send(&mut world.guests[1], Op::CreditUpdate, 0, &[]);
    }
    world.feed(1, &mut b);
    assert!(b.received == data, "bytes differ");
    assert_eq!(b.peer_shut, 3);
    b.send(&mut world.guests[1], Op::Rst, 0, &[]);
    world.no_packet(0);
    assert_eq!((world.stats[0].connections.get(), world.stats[1].connections.get()), (0, 0));
    assert_eq!(world.engine.table.buffers.used_bytes, 0);
}

#[test]
fn halves_close_one_after_the_other() {
    let mut world = TestDomain::with_guests(2);
    let (mut a, mut b) = join(&mut world);
    a.send(&mut world.guests[0], Op::Rw, 0, b"ask");
    a.send(&mut world.guests[0], Op::Shutdown, 2, &[]);
    world.feed(1, &mut b);
    assert_eq!((b.received.as_slice(), b.peer_shut), (&b"ask"[..], 2));
    b.send(&mut world.guests[1], Op::Rw, 0, b"answer");
    b.send(&mut world.guests[1], Op::Shutdown, 3, &[]);
    world.feed(1, &mut b);
    assert!(b.reset);
    world.feed(0, &mut a);
    assert_eq!((a.received.as_slice(), a.peer_shut), (&b"answer"[..], 3));
}

#[test]
fn a_reset_on_one_side_is_a_reset_on_the_other() {
    let mut world = TestDomain::with_guests(2);
    let (mut a, mut b) = join(&mut world);
    b.send(&mut world.guests[1], Op::Rst, 0, &[]);
    world.feed(0, &mut a);
    assert!(a.reset);
    assert_eq!(world.engine.table.endpoints.len(), 0);
}

#[test]
fn guests_that_are_kept_apart_are_a_reset() {
    let mut world = TestDomain::with_guests(2);
    world.engine.directory.guest_to_guest = false;
    let mut a = Sock::new(ConnectionKey { guest_port: 1, peer_cid: 4, peer_port: 80 });
    a.send(&mut world.guests[0], Op::Request, 0, &[]);
    world.feed(0, &mut a);
    assert!(a.reset);
    world.no_packet(1);
}

#[test]
fn unknown_guests_stopped_guests_and_oneself_are_a_reset() {
    let mut world = TestDomain::with_guests(3);
    let stopped = world.ids[2];
    world.engine.stop_queue(stopped, RX).unwrap();
    for peer_cid in [0, 1, 3, 5, 6, u32::MAX] {
        let mut a = Sock::new(ConnectionKey { guest_port: 1, peer_cid, peer_port: 80 });
        a.send(&mut world.guests[0], Op::Request, 0, &[]);
        world.feed(0, &mut a);
        assert!(a.reset, "CID {peer_cid}");
    }
    assert_eq!(world.engine.table.endpoints.len(), 0);
}
