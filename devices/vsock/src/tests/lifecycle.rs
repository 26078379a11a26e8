//! Time-outs, restarts, leaks, starvation.

use super::*;
use crate::limits::{
    CLOSE_TIMEOUT_NS, CONNECT_TIMEOUT_NS, DRAIN_TIMEOUT_NS, HANDSHAKE_TIMEOUT_NS, SCAN_INTERVAL_NS,
};

fn open_descriptors() -> usize {
    // The first ring of a doorbell would open a file.
    base::doorbell::prepare_thread();
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// True when the other end has closed and sent nothing.
fn is_closed(stream: &mut UnixStream) -> bool {
    let mut got = Vec::new();
    drain(stream, &mut got) && got.is_empty()
}

/// Runs one ignored test of this binary alone in a process of its own, where nobody else opens
/// descriptors.
fn run_alone(name: &str) {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--test-threads=1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn a_thousand_connections_leave_nothing_behind() {
    run_alone("tests::lifecycle::alone_a_thousand_connections");
}

#[test]
#[ignore = "run by a_thousand_connections_leave_nothing_behind, in a process of its own"]
fn alone_a_thousand_connections() {
    let mut world = TestDomain::with_guests(1);
    let listener = world.listen(0, 52);
    let before = open_descriptors();
    for port in 0..500 {
        let (mut out, mut program) = world.connect_out(0, &listener, port, 52);
        out.send(&mut world.guests[0], Op::Rw, 0, b"bye");
        out.send(&mut world.guests[0], Op::Shutdown, 3, &[]);
        world.feed(0, &mut out);
        assert!(out.reset);
        let mut got = Vec::new();
        assert!(drain(&mut program, &mut got));
        assert_eq!(got, b"bye");
        let (mut inward, program) = world.connect_in(0, 1000 + port);
        drop(program);
        world.feed(0, &mut inward);
        assert_eq!(inward.peer_shut, 3);
        inward.send(&mut world.guests[0], Op::Rst, 0, &[]);
        world.settle();
    }
    assert_eq!(open_descriptors(), before);
    let stats = &world.stats[0];
    assert_eq!((stats.opened_by_guest.get(), stats.opened_to_guest.get()), (500, 500));
    assert_eq!((stats.connections.get(), stats.half_open.get()), (0, 0));
    assert_eq!((world.engine.table.endpoints.len(), world.engine.table.buffers.used_bytes), (0, 0));
    assert_eq!(world.engine.handshakes.len(), 0);
    assert!(world.engine.table.ports.get(world.ids[0]).unwrap().keys.is_empty());
    // One at a time: the tables never grew.
    assert_eq!(world.engine.table.endpoints.slots(), 1);
}

#[test]
fn many_connections_at_a_time_give_their_descriptors_back() {
    run_alone("tests::lifecycle::alone_many_connections");
}

#[test]
#[ignore = "run by many_connections_at_a_time_give_their_descriptors_back, as above"]
fn alone_many_connections() {
    let mut world = TestDomain::with_guests(1);
    let before = open_descriptors();
    let mut programs: Vec<_> = (0..200).map(|port| world.connect_in(0, port)).collect();
    assert_eq!(world.stats[0].connections.get(), 200);
    assert_eq!(open_descriptors(), before + 400);
    let id = world.ids[0];
    world.engine.reset_port(id);
    for (_, stream) in &mut programs {
        assert!(is_closed(stream), "our end is closed");
    }
    assert_eq!(world.engine.table.endpoints.len(), 0);
    drop(programs);
    // The two queues went as well, with their kick, call and error events.
    assert_eq!(open_descriptors(), before - 6);
}

#[test]
fn a_silent_handshake_ends_after_its_time() {
    let mut world = TestDomain::with_guests(1);
    let mut stream = UnixStream::connect(world.base(0)).unwrap();
    stream.set_nonblocking(true).unwrap();
    stream.write_all(b"CONN").unwrap();
    world.settle();
    world.wait_ns(HANDSHAKE_TIMEOUT_NS - SCAN_INTERVAL_NS);
    assert_eq!(world.engine.handshakes.len(), 1);
    world.wait_ns(2 * SCAN_INTERVAL_NS);
    assert_eq!(world.engine.handshakes.len(), 0);
    let mut byte = [0];
    assert!(matches!(stream.read(&mut byte), Ok(0) | Err(_)));
    assert_eq!(world.stats[0].handshakes_dropped.get(), 1);
}

#[test]
fn a_guest_that_never_answers_ends_after_its_time() {
    let mut world = TestDomain::with_guests(2);
    let mut stream = UnixStream::connect(world.base(0)).unwrap();
    stream.set_nonblocking(true).unwrap();
    stream.write_all(b"CONNECT 9\n").unwrap();
    assert_eq!(world.packet(0).op(), 1);
    // The same between guests.
    let mut a = Sock::new(ConnectionKey { guest_port: 1, peer_cid: 4, peer_port: 80 });
    a.send(&mut world.guests[0], Op::Request, 0, &[]);
    assert_eq!(world.packet(1).op(), 1);
    assert_eq!(world.stats[0].half_open.get(), 2);
    world.wait_ns(CONNECT_TIMEOUT_NS + SCAN_INTERVAL_NS);
    assert!(is_closed(&mut stream));
    assert_eq!(world.packet(1).op(), 3);
    let ops: Vec<u16> = world.guests[0].inbox.iter().map(Packet::op).collect();
    assert_eq!(ops, [3, 3]);
    assert_eq!((world.stats[0].half_open.get(), world.stats[0].connections.get()), (0, 0));
    assert_eq!(world.engine.table.endpoints.len(), 0);
    assert_eq!(
        world.engine.arm(world.now_ns, &mut world.ledger),
        sidecore::Arm::Idle,
        "no deadline is left"
    );
}

#[test]
fn a_guest_that_does_not_confirm_the_end_is_reset() {
    let mut world = TestDomain::with_guests(1);
    let (mut sock, stream) = world.connect_in(0, 1);
    drop(stream);
    world.feed(0, &mut sock);
    assert_eq!((sock.peer_shut, sock.reset), (3, false));
    world.wait_ns(CLOSE_TIMEOUT_NS + SCAN_INTERVAL_NS);
    world.feed(0, &mut sock);
    assert!(sock.reset);
    assert_eq!(world.engine.table.endpoints.len(), 0);
}

/// A closed guest connection whose bytes a program has not taken.
fn closed_with_bytes(world: &mut TestDomain, listener: &UnixListener) -> (UnixStream, usize) {
    let (mut sock, stream) = world.connect_out(0, listener, 1, 52);
    let mut sent = 0;
    while sock.room() > 0 {
        let data = pattern(sock.room().min(60_000) as usize, 1);
        sock.send(&mut world.guests[0], Op::Rw, 0, &data);
        sent += data.len();
        world.feed(0, &mut sock);
    }
    sock.send(&mut world.guests[0], Op::Shutdown, 3, &[]);
    world.feed(0, &mut sock);
    assert!(sock.reset, "the guest does not wait for the program");
    (stream, sent)
}

#[test]
fn bytes_of_a_guest_that_closed_reach_a_slow_program() {
    let mut world = TestDomain::with_guests(1);
    let listener = world.listen(0, 52);
    let (mut stream, sent) = closed_with_bytes(&mut world, &listener);
    assert_eq!(world.engine.table.endpoints.len(), 1);
    // The guest may use the name again meanwhile.
    world.connect_out(0, &listener, 1, 52);
    let mut got = Vec::new();
    while !drain(&mut stream, &mut got) {
        world.settle();
    }
    assert_eq!(got.len(), sent);
    assert_eq!(world.engine.table.endpoints.len(), 1, "only the new one is left");
}

#[test]
fn a_program_that_never_reads_is_given_up() {
    let mut world = TestDomain::with_guests(1);
    let listener = world.listen(0, 52);
    let (_stream, _) = closed_with_bytes(&mut world, &listener);
    world.wait_ns(DRAIN_TIMEOUT_NS + SCAN_INTERVAL_NS);
    assert_eq!((world.engine.table.endpoints.len(), world.engine.table.buffers.used_bytes), (0, 0));
    assert_eq!(world.stats[0].timeouts.get(), 1);
}

#[test]
fn nothing_is_lost_or_piled_up_while_a_guest_gives_no_buffers() {
    let mut world = TestDomain::with_guests(1);
    let (mut sock, mut stream) = world.connect_in(0, 1);
    world.guests[0].refill = false;
    let data = pattern(400_000, 4);
    let mut sent = 0;
    for _ in 0..50 {
        if let Ok(n) = stream.write(&data[sent..]) {
            sent += n;
        }
        world.feed(0, &mut sock);
    }
    let have = sock.received.len();
    assert!(have <= 64 * 4096);
    // The handshake's deadline is noted until it is looked at.
    world.wait_ns(HANDSHAKE_TIMEOUT_NS);
    world.wait_ns(CONNECT_TIMEOUT_NS);
    // Asleep, it waits for the guest's kick and for nothing else.
    assert_eq!(world.engine.arm(world.now_ns, &mut world.ledger), sidecore::Arm::Idle);
    world.engine.disarm();
    world.guests[0].refill = true;
    world.guests[0].give_buffers(32, HEADER + 4096);
    assert_eq!(world.engine.arm(world.now_ns, &mut world.ledger), sidecore::Arm::Busy);
    world.engine.disarm();
    for _ in 0..1000 {
        if let Ok(n) = stream.write(&data[sent..]) {
            sent += n;
        }
        world.feed(0, &mut sock);
        if sock.take() {
            sock.send(&mut world.guests[0], Op::CreditUpdate, 0, &[]);
        }
        if sock.received.len() == data.len() {
            break;
        }
    }
    assert!(sock.received == data, "bytes differ");
}

#[test]
fn a_paused_guest_keeps_its_connections_and_a_restarted_one_does_not() {
    let mut world = TestDomain::with_guests(1);
    let (mut sock, mut stream) = world.connect_in(0, 1);
    let id = world.ids[0];
    let (rx, tx) = (world.engine.stop_queue(id, RX), world.engine.stop_queue(id, TX));
    stream.write_all(b"while paused").unwrap();
    world.settle();
    world.engine.start_queue(id, rx.unwrap()).unwrap();
    world.engine.start_queue(id, tx.unwrap()).unwrap();
    world.feed(0, &mut sock);
    assert_eq!(sock.received, b"while paused");
    // A new driver: fresh rings.
    drop((world.engine.stop_queue(id, RX), world.engine.stop_queue(id, TX)));
    let mut guest = Guest::new(3, Layout::Split);
    guest.give_buffers(8, HEADER + 4096);
    world.engine.start_queue(id, guest.rx.vring(RX)).unwrap();
    world.engine.start_queue(id, guest.tx.vring(TX)).unwrap();
    world.guests[0] = guest;
    assert!(is_closed(&mut stream));
    world.no_packet(0);
    // Packets of connections from before (a resumed daemon) are answered with resets.
    sock.send(&mut world.guests[0], Op::Rw, 0, b"anybody there?");
    world.feed(0, &mut sock);
    assert!(sock.reset);
}

/// A VMM gives a running queue another doorbell when its guest unmasks the interrupt, just after
/// the driver's start: the queue is taken and starts again, wherever it is.
#[test]
fn a_queue_with_another_doorbell_ends_no_connections() {
    let mut world = TestDomain::with_guests(1);
    let listener = world.listen(0, 52);
    let mut sock = Sock::new(ConnectionKey { guest_port: 1, peer_cid: HOST_CID, peer_port: 52 });
    sock.send(&mut world.guests[0], Op::Request, 0, &[]);
    // The request is taken while the receive queue changes, which is still at its very start.
    let id = world.ids[0];
    let rx = world.engine.stop_queue(id, RX).unwrap();
    world.turn();
    let (mut program, _) = listener.accept().unwrap();
    world.engine.start_queue(id, rx).unwrap();
    world.feed(0, &mut sock);
    assert!(sock.open && !sock.reset);
    let tx = world.engine.stop_queue(id, TX).unwrap();
    world.engine.start_queue(id, tx).unwrap();
    program.write_all(b"still there").unwrap();
    world.feed(0, &mut sock);
    assert_eq!(sock.received, b"still there");
}

#[test]
fn abuse_D3_held_receive_buffers_move_to_a_changed_memory_table() {
    let mut world = TestDomain::with_guests(1);
    let (mut sock, mut stream) = world.connect_in(0, 1);
    let id = world.ids[0];
    let old = world.guests[0].rx.memory();
    let new = old.with_log(None);
    // The batch of a turn keeps the table until the next one, which may never come.
    sock.send(&mut world.guests[0], Op::Rw, 0, b"before");
    world.feed(0, &mut sock);
    let mut got = [0; 6];
    stream.read_exact(&mut got).unwrap();
    let rx = world.engine.table.ports.get_mut(id).unwrap().rx.as_mut().unwrap();
    assert!(rx.peek(1).is_some(), "buffers are held");
    world.engine.set_memory(id, &new).unwrap();
    let rx = world.engine.table.ports.get_mut(id).unwrap().rx.as_mut().unwrap();
    assert!(rx.peek(0).is_none(), "none is held by an address of the old table");
    assert_eq!(Arc::strong_count(&old), 2, "ours and the guest's");
    stream.write_all(b"after").unwrap();
    world.feed(0, &mut sock);
    assert_eq!(sock.received, b"after");
}

#[test]
#[allow(non_snake_case)]
fn abuse_V17_a_second_request_under_a_living_name_resets_the_connection() {
    let mut world = TestDomain::with_guests(1);
    let listener = world.listen(0, 52);
    let (mut sock, mut old) = world.connect_out(0, &listener, 1, 52);
    sock.send(&mut world.guests[0], Op::Request, 0, &[]);
    world.feed(0, &mut sock);
    assert!(sock.reset && is_closed(&mut old));
    // Nobody else was connected for it.
    listener.set_nonblocking(true).unwrap();
    assert!(listener.accept().is_err());
    listener.set_nonblocking(false).unwrap();
    assert_eq!(world.stats[0].violations.get(), 1);
    assert_eq!(world.engine.table.endpoints.len(), 0);
    // The name is free.
    world.connect_out(0, &listener, 1, 52);
}

#[test]
fn a_program_that_leaves_before_the_answer_resets_the_guest() {
    let mut world = TestDomain::with_guests(1);
    let mut stream = UnixStream::connect(world.base(0)).unwrap();
    stream.write_all(b"CONNECT 9\n").unwrap();
    assert_eq!(world.packet(0).op(), 1);
    drop(stream);
    assert_eq!(world.packet(0).op(), 3);
    assert_eq!(world.engine.table.endpoints.len(), 0);
}

#[test]
fn a_host_program_finds_no_guest_while_no_driver_runs() {
    let mut world = TestDomain::with_guests(1);
    let id = world.ids[0];
    world.engine.reset_port(id);
    let mut stream = UnixStream::connect(world.base(0)).unwrap();
    world.settle();
    let mut byte = [0];
    assert_eq!(stream.read(&mut byte).unwrap(), 0);
}
