//! How much one guest takes of a round, whatever buffers it posts.

use super::*;
use crate::limits::{ROUND_BYTES, ROUND_PACKETS};

/// Gives a guest another receive ring, with `count` buffers of `len` bytes. Call it before there
/// are connections: a fresh ring ends them.
fn use_rx(world: &mut TestDomain, guest: usize, count: usize, len: usize) {
    let id = world.ids[guest];
    drop(world.engine.stop_queue(id, RX));
    let guest = &mut world.guests[guest];
    let ram = Arc::clone(guest.rx.ram());
    guest.rx = ModelDriver::in_ram(ram, Layout::Split, 1024, ModelOptions::default());
    guest.buffers.clear();
    guest.give_buffers(count, len);
    world.engine.start_queue(id, guest.rx.vring(RX)).unwrap();
}

/// Rounds until all of `socks` together have `want` bytes; the most packets with payload, and
/// bytes, of a round.
fn most_per_round(
    world: &mut TestDomain,
    guest: usize,
    socks: &mut [Sock],
    want: usize,
) -> (u32, u32) {
    let mut most = (0, 0);
    for _ in 0..10_000 {
        world.turn();
        let (mut packets, mut bytes) = (0, 0);
        while let Some(p) = world.guests[guest].inbox.pop_front() {
            (packets, bytes) = (packets + 1, bytes + p.payload.len() as u32);
            let sock = socks.iter_mut().find(|s| s.key == p.key()).expect("a known connection");
            sock.on(&p);
            if sock.unread > 100_000 {
                sock.take();
                sock.send(&mut world.guests[guest], Op::CreditUpdate, 0, &[]);
            }
        }
        most = (packets.max(most.0), bytes.max(most.1));
        if socks.iter().map(|s| s.received.len()).sum::<usize>() == want {
            return most;
        }
    }
    panic!("not all bytes arrive");
}

#[test]
fn abuse_R3_a_receive_buffer_without_room_stops_only_its_port() {
    for len in [1, 43, 44] {
        let mut world = TestDomain::with_guests(2);
        use_rx(&mut world, 0, 4, len);
        let key = ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 99 };
        for guest in &mut world.guests {
            let header = guest.header(key, Op::Request);
            guest.send(&header, &[]);
        }
        assert_eq!(world.packet(1).op(), 3, "the other port goes on");
        world.no_packet(0);
        let rx = &world.guests[0].rx;
        let reason = rx.health().reason().expect("the port has stopped");
        assert!(reason.contains("no room for a header and one byte"), "{reason}");
        let drops = &rx.stats().drops;
        assert_eq!(drops[base::counter::DropReason::Malformed as usize].get(), 1);
        let id = world.ids[0];
        assert!(world.engine.stop_queue(id, RX).is_some(), "it can be taken down");
    }
}

#[test]
fn abuse_R10_tiny_receive_buffers_do_not_make_long_rounds() {
    let mut world = TestDomain::with_guests(1);
    use_rx(&mut world, 0, 1000, HEADER + 1);
    let (mut sock, mut stream) = world.connect_in(0, 80);
    let data = pattern(5_000, 5);
    stream.write_all(&data).unwrap();
    let most = most_per_round(&mut world, 0, std::slice::from_mut(&mut sock), data.len());
    assert!(sock.received == data, "bytes differ");
    assert_eq!(most.0, ROUND_PACKETS);
}

#[test]
fn abuse_R10_tiny_receive_buffers_do_not_hold_up_the_guest_that_sends() {
    let mut world = TestDomain::with_guests(2);
    use_rx(&mut world, 1, 1000, HEADER + 1);
    let mut a = Sock::new(ConnectionKey { guest_port: 1, peer_cid: 4, peer_port: 80 });
    a.send(&mut world.guests[0], Op::Request, 0, &[]);
    let request = world.packet(1);
    let mut b = Sock::new(request.key());
    b.on(&request);
    b.send(&mut world.guests[1], Op::Response, 0, &[]);
    world.feed(0, &mut a);
    let data = pattern(5_000, 6);
    a.send(&mut world.guests[0], Op::Rw, 0, &data);
    let most = most_per_round(&mut world, 1, std::slice::from_mut(&mut b), data.len());
    assert!(b.received == data, "bytes differ");
    // What was left of one round's share, and the next one's.
    assert_eq!(most.0, 2 * ROUND_PACKETS);
}

#[test]
fn abuse_R10_a_guest_with_many_connections_takes_its_share_of_a_round() {
    let mut world = TestDomain::with_guests(1);
    use_rx(&mut world, 0, 200, HEADER + 16_384);
    let (mut socks, streams): (Vec<_>, Vec<_>) =
        (0..8).map(|port| world.connect_in(0, 80 + port)).unzip();
    let data = pattern(100_000, 8);
    for mut stream in &streams {
        stream.write_all(&data).unwrap();
    }
    let most = most_per_round(&mut world, 0, &mut socks, 8 * data.len());
    assert!(socks.iter().all(|s| s.received == data), "bytes differ");
    assert_eq!(most.1, ROUND_BYTES);
}

#[test]
fn with_its_share_used_up_the_engine_does_not_sleep() {
    let mut world = TestDomain::with_guests(1);
    use_rx(&mut world, 0, 1000, HEADER + 1);
    let (_sock, mut stream) = world.connect_in(0, 80);
    stream.write_all(&[7; 1000]).unwrap();
    world.turn();
    world.turn();
    assert!(!world.guests[0].inbox.is_empty());
    assert_eq!(world.engine.arm(world.now_ns, &mut world.ledger), sidecore::Arm::Busy);
    world.engine.disarm();
}

/// The connection of a bad packet is reset, and what another one sent behind it comes.
fn resets_and_goes_on(world: &mut TestDomain, bad: ConnectionKey, good: &mut UnixStream) {
    for _ in 0..4 {
        world.turn();
    }
    let packet = world.packet(0);
    assert_eq!((packet.op(), packet.key()), (Op::Rst as u16, bad));
    let mut got = [0; 11];
    good.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"still there");
}

/// A packet that cannot be read whole would leave a gap in its stream: the connection ends, others
/// go on.
#[test]
fn abuse_D4_a_packet_with_payload_outside_memory_ends_its_connection_only() {
    let mut world = TestDomain::with_guests(1);
    let (bad, _bad_stream) = world.connect_in(0, 80);
    let (mut good, mut stream) = world.connect_in(0, 81);
    let guest = &mut world.guests[0];
    let stray = guest.tx.unmapped_addr();
    let mut header = guest.header(bad.key, Op::Rw);
    header.len = 100.into();
    let head = guest.tx.buffer(header.as_bytes());
    guest.tx.offer(&[head, (stray, 100)], &[]);
    guest.tx.offer(&[(stray, 100)], &[]);
    good.send(guest, Op::Rw, 0, b"still there");
    resets_and_goes_on(&mut world, bad.key, &mut stream);
    let tx = &world.guests[0].tx;
    assert_eq!(tx.stats().drops[base::counter::DropReason::Malformed as usize].get(), 2);
    assert!(tx.health().is_live());
}

#[test]
fn abuse_B2_a_packet_in_too_many_pieces_ends_its_connection_only() {
    let mut world = TestDomain::with_guests(1);
    let (bad, _bad_stream) = world.connect_in(0, 80);
    let (mut good, mut stream) = world.connect_in(0, 81);
    let guest = &mut world.guests[0];
    let mut header = guest.header(bad.key, Op::Rw);
    header.len = (base::limits::MAX_CHAIN_SEGS as u32).into();
    let head = guest.tx.buffer(header.as_bytes());
    let piece = guest.tx.buffer(b"x");
    let pieces = std::iter::repeat_n(piece, base::limits::MAX_CHAIN_SEGS);
    guest.tx.offer_indirect(&std::iter::once(head).chain(pieces).collect::<Vec<_>>(), &[]);
    good.send(guest, Op::Rw, 0, b"still there");
    resets_and_goes_on(&mut world, bad.key, &mut stream);
    assert!(world.guests[0].tx.health().is_live());
}

#[test]
fn abuse_D4_receive_buffers_outside_memory_go_back_empty() {
    let mut world = TestDomain::with_guests(1);
    use_rx(&mut world, 0, 0, HEADER);
    let guest = &mut world.guests[0];
    let stray = (guest.rx.unmapped_addr(), 4096);
    guest.rx.offer(&[], &[stray]);
    guest.rx.offer(&[], &[stray]);
    guest.refill = false;
    guest.give_buffers(1, 4096);
    let header = guest
        .header(ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 99 }, Op::Request);
    guest.send(&header, &[]);
    world.engine.poll(1, &mut world.ledger);
    let rx = &mut world.guests[0].rx;
    let lens: Vec<u32> = std::iter::from_fn(|| rx.used()).map(|(_, len)| len).collect();
    assert_eq!(lens, [0, 0, HEADER as u32]);
    assert_eq!(rx.stats().drops[base::counter::DropReason::Malformed as usize].get(), 2);
    assert!(rx.health().is_live());
}
