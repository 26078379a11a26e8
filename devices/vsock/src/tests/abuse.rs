//! Tests of a hostile guest or host program.

use proptest::prelude::*;

use super::*;
use crate::limits::{MAX_HANDSHAKES, MAX_STRAY_RESETS};
use crate::port::PeerUsage;

/// The tables agree with each other and with the counters.
fn check_books(world: &TestDomain) {
    let e = &world.engine;
    let mut buffers = 0;
    let mut open: HashMap<SlabId, (u32, u32)> = HashMap::new();
    let mut asked: HashMap<(SlabId, u32), PeerUsage> = HashMap::new();
    for id in (0..e.table.endpoints.slots()).filter_map(|i| e.table.endpoints.id_at(i)) {
        let ep = e.table.endpoints.get(id).unwrap();
        assert_eq!(ep.ring.len(), ep.conn.unread() as usize, "buffer and credit agree");
        assert!(!ep.conn.is_half_open() || ep.counted_half_open);
        buffers += ep.ring.capacity() as u64;
        let count = open.entry(ep.port).or_default();
        *count = (count.0 + 1, count.1 + u32::from(ep.counted_half_open));
        if let Some(cid) = ep.requester_cid {
            let asked = asked.entry((ep.port, cid)).or_default();
            asked.open += 1;
            asked.half_open += u32::from(ep.counted_half_open);
        }
        let port = e.table.ports.get(ep.port).unwrap();
        let named = port.keys.get(&ep.conn.key()) == Some(&id);
        assert!(named || ep.is_released, "a connection the guest knows has its name");
    }
    assert_eq!(buffers, e.table.buffers.used_bytes);
    for &id in &world.ids {
        let port = e.table.ports.get(id).unwrap();
        assert_eq!((port.open, port.half_open), open.get(&id).copied().unwrap_or_default());
        assert!(port.open <= port.spec.max_connections);
        assert!(port.keys.len() <= port.open as usize);
        assert!(port.stray_resets.len() <= MAX_STRAY_RESETS);
        let of_port = asked.iter().filter(|((at, _), _)| *at == id);
        let of_port: HashMap<u32, PeerUsage> = of_port.map(|((_, cid), n)| (*cid, *n)).collect();
        assert_eq!(port.peer_usage, of_port);
    }
}

fn resets(world: &mut TestDomain, guest: usize) -> usize {
    world.settle();
    let inbox = std::mem::take(&mut world.guests[guest].inbox);
    inbox.iter().filter(|p| p.op() == 3).count()
}

/// A packet's bytes in one buffer each.
fn send_pieces(guest: &mut Guest, pieces: &[&[u8]]) {
    let pieces: Vec<_> = pieces.iter().map(|p| guest.tx.buffer(p)).collect();
    guest.tx.offer(&pieces, &[]);
}

#[test]
fn abuse_R3_packets_shorter_than_a_header_are_dropped() {
    let mut world = TestDomain::with_guests(2);
    for guest in 0..2 {
        for len in [1, 2, 43] {
            send_pieces(&mut world.guests[guest], &[&vec![0xff; len]]);
        }
        world.no_packet(guest);
        assert_eq!(world.stats[guest].malformed.get(), 3);
        assert!(world.guests[guest].tx.health().is_live());
    }
    check_books(&world);
}

#[test]
fn abuse_R3_a_header_in_many_pieces_is_one_header() {
    let mut world = TestDomain::with_guests(1);
    let key = ConnectionKey { guest_port: 9, peer_cid: HOST_CID, peer_port: 99 };
    let header = world.guests[0].header(key, Op::Request);
    let bytes = header.as_bytes();
    send_pieces(&mut world.guests[0], &[&bytes[..1], &bytes[1..20], &bytes[20..43], &bytes[43..]]);
    let reset = world.packet(0);
    assert_eq!((reset.op(), reset.key()), (3, key));
}

#[test]
fn abuse_D1_a_length_that_changes_is_read_once() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let mut world = TestDomain::with_guests(1);
    let listener = world.listen(0, 52);
    let (sock, mut stream) = world.connect_out(0, &listener, 1, 52);
    let mut header = world.guests[0].header(sock.key, Op::Rw);
    header.len = 10.into();
    let stop = AtomicBool::new(false);
    let addr = world.guests[0].tx.alloc(HEADER + 10);
    world.guests[0].tx.write(addr, header.as_bytes());
    world.guests[0].tx.write(addr + HEADER as u64, b"0123456789");
    let ram = Arc::clone(world.guests[0].tx.ram());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The attack: the length is 10 or huge, depending on when one looks.
            while !stop.load(Ordering::Relaxed) {
                for len in [u32::MAX, 10, 60_000, 10] {
                    ram.write(addr + 24, &len.to_le_bytes());
                }
            }
        });
        let mut got = Vec::new();
        for _ in 0..2000 {
            world.guests[0].tx.offer(&[(addr, HEADER as u32 + 10)], &[]);
            world.turn();
            drain(&mut stream, &mut got);
            check_books(&world);
        }
        stop.store(true, Ordering::Relaxed);
        // Every packet is whole, or refused; nothing behind its chain was ever read.
        assert!(got.chunks(10).all(|c| c == b"0123456789"));
    });
}

#[test]
fn abuse_R10_connections_end_at_their_limit() {
    let mut world = TestDomain::new();
    world.add_guest(Layout::Split, |c| c.max_connections = 20);
    let listener = world.listen(0, 52);
    for guest_port in 0..100 {
        let key = ConnectionKey { guest_port, peer_cid: HOST_CID, peer_port: 52 };
        let header = world.guests[0].header(key, Op::Request);
        world.guests[0].send(&header, &[]);
        world.settle();
    }
    assert_eq!(resets(&mut world, 0), 80);
    assert_eq!((world.stats[0].connections.get(), world.stats[0].refused.get()), (20, 80));
    check_books(&world);
    drop(listener);
}

#[test]
fn abuse_R10_buffers_end_at_the_domains_limit() {
    let mut world = TestDomain::with_guests(1);
    world.engine.table.buffers.max_bytes = 3 * (128 << 10);
    let _listener = world.listen(0, 52);
    for guest_port in 0..5 {
        let key = ConnectionKey { guest_port, peer_cid: HOST_CID, peer_port: 52 };
        let header = world.guests[0].header(key, Op::Request);
        world.guests[0].send(&header, &[]);
    }
    assert_eq!(resets(&mut world, 0), 2);
    check_books(&world);
}

#[test]
fn abuse_R10_unanswered_requests_end_at_their_limit() {
    let mut world = TestDomain::new();
    for layout in [Layout::Split, Layout::Packed] {
        world.add_guest(layout, |c| c.max_half_open = 5);
    }
    for guest_port in 0..20 {
        let header = world.guests[0]
            .header(ConnectionKey { guest_port, peer_cid: 4, peer_port: guest_port }, Op::Request);
        world.guests[0].send(&header, &[]);
    }
    // As many as one guest leaves free of another's five.
    assert_eq!(resets(&mut world, 0), 17);
    assert_eq!(world.stats[1].half_open.get(), 3);
    check_books(&world);
}

/// Guest `from` asks guest `to` for `count` connections, which are accepted; how many it gets.
fn ask_for(world: &mut TestDomain, from: usize, to: usize, count: u32) -> usize {
    for guest_port in 0..count {
        let key = ConnectionKey { guest_port, peer_cid: world.guests[to].cid, peer_port: 80 };
        let header = world.guests[from].header(key, Op::Request);
        world.guests[from].send(&header, &[]);
        world.settle();
        while let Some(p) = world.guests[to].inbox.pop_front() {
            if p.op() == Op::Request as u16 {
                let header = world.guests[to].header(p.key(), Op::Response);
                world.guests[to].send(&header, &[]);
            }
        }
        world.settle();
    }
    world.guests[from].inbox.drain(..).filter(|p| p.op() == Op::Response as u16).count()
}

#[test]
fn abuse_R10_a_guest_leaves_connections_of_another_to_the_others() {
    let mut world = TestDomain::new();
    for layout in [Layout::Split, Layout::Packed, Layout::Split] {
        world.add_guest(layout, |c| c.max_connections = 20);
    }
    assert_eq!(ask_for(&mut world, 0, 1, 20), 10);
    assert_eq!(ask_for(&mut world, 2, 1, 20), 5);
    let (_sock, _stream) = world.connect_in(1, 22);
    check_books(&world);
    // What the first gives back is there for the other.
    let id = world.ids[0];
    world.engine.table.drop_connections(id);
    world.settle();
    world.guests[2].inbox.clear();
    world.guests[1].inbox.clear();
    assert!(world.stats[1].connections.get() <= 6);
    check_books(&world);
    assert_eq!(ask_for(&mut world, 0, 1, 20), 7);
}

#[test]
fn abuse_R10_a_guest_leaves_buffers_to_the_others() {
    let mut world = TestDomain::with_guests(3);
    world.engine.table.buffers.max_bytes = 12 * (128 << 10);
    let listeners = [world.listen(0, 52), world.listen(1, 52)];
    let ask = |world: &mut TestDomain, guest: usize| {
        for guest_port in 0..12 {
            let key = ConnectionKey { guest_port, peer_cid: HOST_CID, peer_port: 52 };
            let header = world.guests[guest].header(key, Op::Request);
            world.guests[guest].send(&header, &[]);
        }
        12 - resets(world, guest)
    };
    // Its own four, and nothing of the other two's.
    assert_eq!(ask(&mut world, 0), 4);
    assert_eq!(ask(&mut world, 1), 4);
    check_books(&world);
    // Nobody is there to leave it for: all is lent.
    let (second, third) = (world.ids[1], world.ids[2]);
    world.engine.remove_port(second);
    world.engine.remove_port(third);
    world.ids.truncate(1);
    world.engine.table.drop_connections(world.ids[0]);
    assert_eq!(ask(&mut world, 0), 12);
    check_books(&world);
    drop(listeners);
}

#[test]
fn abuse_R10_a_guest_that_comes_late_has_its_share_of_the_buffers() {
    let mut world = TestDomain::with_guests(1);
    world.engine.table.buffers.max_bytes = 4 * (128 << 10);
    let listener = world.listen(0, 52);
    let early: Vec<_> = (0..4).map(|from| world.connect_out(0, &listener, from, 52)).collect();
    world.add_guest(Layout::Split, |_| {});
    let listener = world.listen(1, 52);
    let late: Vec<_> = (0..2).map(|from| world.connect_out(1, &listener, from, 52)).collect();
    assert_eq!(world.engine.table.buffers.used_bytes, 6 * (128 << 10));
    check_books(&world);
    drop((early, late));
}

#[test]
fn abuse_R10_handshakes_end_at_their_limit_and_go_on() {
    let mut world = TestDomain::with_guests(1);
    let mut silent: Vec<_> =
        (0..MAX_HANDSHAKES).map(|_| UnixStream::connect(world.base(0)).unwrap()).collect();
    world.settle();
    assert_eq!(world.engine.handshakes.len(), MAX_HANDSHAKES as usize);
    let mut next = UnixStream::connect(world.base(0)).unwrap();
    next.write_all(b"CONNECT 5\n").unwrap();
    world.no_packet(0);
    silent.pop();
    assert_eq!(world.packet(0).op(), 1);
    assert_eq!(world.engine.handshakes.len(), MAX_HANDSHAKES as usize - 1);
}

#[test]
fn abuse_R10_resets_owed_to_a_guest_without_buffers_end_at_their_limit() {
    let mut world = TestDomain::with_guests(1);
    world.guests[0].refill = false;
    for round in 0..(2 * MAX_STRAY_RESETS as u32) {
        let key = ConnectionKey { guest_port: round, peer_cid: HOST_CID, peer_port: 99 };
        let header = world.guests[0].header(key, Op::Rw);
        world.guests[0].send(&header, &[]);
        world.turn();
    }
    let port = world.engine.table.ports.get(world.ids[0]).unwrap();
    assert_eq!(port.stray_resets.len(), MAX_STRAY_RESETS);
    assert_eq!(world.stats[0].resets_dropped.get(), MAX_STRAY_RESETS as u64 - 64);
    assert_eq!(world.stats[0].connections.get(), 0);
}

#[test]
fn abuse_R10_opening_and_closing_without_buffers_piles_nothing_up() {
    let mut world = TestDomain::with_guests(1);
    let listener = world.listen(0, 52);
    world.guests[0].refill = false;
    for _ in 0..1000 {
        let key = ConnectionKey { guest_port: 7, peer_cid: HOST_CID, peer_port: 52 };
        for op in [Op::Request, Op::Rst] {
            let header = world.guests[0].header(key, op);
            world.guests[0].send(&header, &[]);
        }
        world.turn();
        let _ = listener.accept().unwrap();
    }
    assert!(world.engine.table.endpoints.slots() <= 1);
    check_books(&world);
}

#[test]
fn abuse_I_a_reused_buffer_shows_nothing_of_its_last_user() {
    let mut world = TestDomain::with_guests(3);
    world.guests[1].refill = false;
    let secret = vec![b'S'; 300_000];
    let mut a = Sock::new(ConnectionKey { guest_port: 1, peer_cid: 4, peer_port: 80 });
    a.send(&mut world.guests[0], Op::Request, 0, &[]);
    let request = world.packet(1);
    let mut b = Sock::new(request.key());
    b.send(&mut world.guests[1], Op::Response, 0, &[]);
    world.feed(0, &mut a);
    while a.room() > 0 {
        let len = a.room().min(64 << 10) as usize;
        a.send(&mut world.guests[0], Op::Rw, 0, &secret[..len]);
        world.feed(0, &mut a);
    }
    a.send(&mut world.guests[0], Op::Rst, 0, &[]);
    world.settle();
    assert!(
        !world.engine.table.buffers.spare.is_empty(),
        "the buffer is kept for the next connection"
    );
    // The next one is between others, and goes through the buffer as well.
    world.guests[1].refill = true;
    let mut c = Sock::new(ConnectionKey { guest_port: 1, peer_cid: 3, peer_port: 80 });
    c.send(&mut world.guests[2], Op::Request, 0, &[]);
    let request = world.packet(0);
    let mut d = Sock::new(request.key());
    d.buf_alloc = 10;
    d.send(&mut world.guests[0], Op::Response, 0, &[]);
    world.feed(2, &mut c);
    c.send(&mut world.guests[2], Op::Rw, 0, &[b'c'; 5003]);
    for _ in 0..600 {
        world.feed(0, &mut d);
        d.take();
        d.send(&mut world.guests[0], Op::CreditUpdate, 0, &[]);
    }
    assert_eq!(d.received, [b'c'; 5003]);
    assert!(world.stats[2].buffered_bytes.get() > 0);
}

#[test]
fn abuse_I_bytes_behind_the_used_length_are_untouched() {
    let mut world = TestDomain::with_guests(1);
    let id = world.ids[0];
    drop(world.engine.stop_queue(id, RX));
    let mut rx = ModelDriver::new(Layout::Split, 16);
    let addr = rx.alloc(HEADER + 4096);
    rx.write(addr, &[0xaa; HEADER + 4096]);
    rx.offer(&[], &[(addr, HEADER as u32 + 4096)]);
    world.engine.start_queue(id, rx.vring(RX)).unwrap();
    let key = ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 99 };
    let header = world.guests[0].header(key, Op::Request);
    world.guests[0].send(&header, &[]);
    world.settle();
    assert_eq!(rx.used().map(|(_, written)| written), Some(HEADER as u32));
    assert_eq!(rx.read(addr + HEADER as u64, 4096), [0xaa; 4096]);
}

#[test]
fn abuse_C3_a_forged_source_reaches_nobody() {
    let mut world = TestDomain::with_guests(2);
    let key = ConnectionKey { guest_port: 1, peer_cid: 4, peer_port: 80 };
    for cid in [0u64, 2, 4, 99, (1 << 32) | 3] {
        let mut header = world.guests[0].header(key, Op::Request);
        header.src_cid = cid.into();
        world.guests[0].send(&header, &[]);
    }
    world.no_packet(0);
    world.no_packet(1);
    assert_eq!(world.stats[0].malformed.get(), 5);
}

#[test]
fn abuse_R1_a_broken_ring_stops_only_its_port() {
    let mut world = TestDomain::with_guests(2);
    let (mut sock, mut stream) = world.connect_in(1, 1);
    // A chain of a buffer without bytes.
    world.guests[0].tx.offer(&[(0, 0)], &[]);
    world.settle();
    assert!(!world.guests[0].tx.health().is_live());
    stream.write_all(b"fine").unwrap();
    world.feed(1, &mut sock);
    assert_eq!(sock.received, b"fine");
}

#[derive(Debug, Clone)]
struct Wild {
    guest: usize,
    guest_port: u32,
    peer: u32,
    peer_port: u32,
    op: u16,
    len: u32,
    payload: usize,
    kind: u16,
    flags: u32,
    buf_alloc: u32,
    fwd_cnt: u32,
    turn: bool,
}

fn wild() -> impl Strategy<Value = Wild> {
    let small = prop_oneof![6 => 0u32..3000, 1 => any::<u32>()];
    let port = prop_oneof![0u32..3, Just(52u32)];
    (
        (0usize..2, 0u32..3, 2u32..6, port, prop_oneof![30 => 1u16..8, 1 => any::<u16>()]),
        (small.clone(), 0usize..3000, prop_oneof![20 => Just(1u16), 1 => any::<u16>()]),
        (0u32..5, small.clone(), small, any::<bool>()),
    )
        .prop_map(|(a, b, c)| Wild {
            guest: a.0,
            guest_port: a.1,
            peer: a.2,
            peer_port: a.3,
            op: a.4,
            len: b.0,
            payload: b.1,
            kind: b.2,
            flags: c.0,
            buf_alloc: c.1,
            fwd_cnt: c.2,
            turn: c.3,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn abuse_R10_random_packets_of_two_guests_never_spoil_the_books(
        packets in prop::collection::vec(wild(), 1..120),
    ) {
        let mut world = TestDomain::with_guests(2);
        let listener = world.listen(0, 52);
        listener.set_nonblocking(true).unwrap();
        let mut programs = Vec::new();
        for w in packets {
            let (guest_port, peer_cid, peer_port) = (w.guest_port, w.peer, w.peer_port);
            let key = ConnectionKey { guest_port, peer_cid, peer_port };
            let mut header = world.guests[w.guest].header(key, Op::Rw);
            header.op = w.op.into();
            header.kind = w.kind.into();
            header.len = w.len.min(if w.op == 5 { w.payload as u32 } else { u32::MAX }).into();
            header.flags = w.flags.into();
            header.buf_alloc = w.buf_alloc.into();
            header.fwd_cnt = w.fwd_cnt.into();
            if !world.guests[w.guest].can_send() {
                world.turn();
            }
            world.guests[w.guest].send(&header, &vec![w.guest as u8; w.payload]);
            if w.turn {
                world.turn();
                check_books(&world);
            }
            programs.extend(listener.accept());
        }
        world.settle();
        check_books(&world);
        let end_ns = 10 * crate::limits::DRAIN_TIMEOUT_NS;
        drop((programs, listener));
        world.wait_ns(end_ns);
        for id in world.ids.clone() {
            world.engine.reset_port(id);
        }
        prop_assert_eq!(world.engine.table.endpoints.len(), 0);
        prop_assert_eq!(world.engine.table.buffers.used_bytes, 0);
    }
}
