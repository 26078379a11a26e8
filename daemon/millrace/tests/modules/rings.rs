//! Clients that go by memory that they share with their module.

use std::os::unix::fs::FileExt;

use guest_abi::module::{failure, flag, kind};
use guest_abi::module_ring::{SLOT_BYTES, SLOTS_OFF, TO_CLIENT, TO_HOST};
use rustix::process::{Pid, Signal, kill_process};

use crate::client::{Client, frame, hello};
use crate::world::World;

fn rings(world: &World) -> u64 {
    world.modules.stats().iter().map(|stats| stats.rings).sum()
}

/// Writes a word of all slots.
fn lie(world: &World, off: usize, value: u64) {
    let file = std::fs::OpenOptions::new().write(true).open(world.ring_path()).unwrap();
    for slot in 0..3 {
        let at = (SLOTS_OFF + slot * SLOT_BYTES + off) as u64;
        file.write_all_at(&value.to_le_bytes(), at).unwrap();
    }
}

#[test]
fn requests_and_replies_go_by_memory() {
    let world = World::by_ring();
    let mut client = world.client(1, "a");
    assert_eq!(client.ask(1, b"hello"), b"hello");
    client.send(&frame(kind::PING, 0, 9, b"there?"));
    assert_eq!(client.next().unwrap().body, b"there?");
    let frames: Vec<u8> = (2..=65).flat_map(|seq| frame(kind::REQUEST, 0, seq, b"body")).collect();
    client.send(&frames);
    for seq in 2..=65 {
        assert_eq!(client.reply(seq).body, b"body");
    }
    // Many times what a ring has room for.
    let body: Vec<u8> =
        (0..12u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 | 128).collect();
    client.request(66, 0, &body);
    assert!(client.reply(66).body == body);
    let stats = &world.modules.stats()[0];
    assert_eq!((stats.rings, stats.requests), (1, 66));
    drop(client);
    // What is charged to the VM has its bytes.
    let mut charged = 0;
    while charged < 2 * body.len() as u64 {
        charged += world.charged().bytes;
    }
    let mut client = world.client(2, "a");
    assert_eq!(client.ask(1, b"hello"), b"hello");
    assert_eq!(rings(&world), 1);
}

#[test]
fn whoever_looks_is_not_rung() {
    let world = World::by_ring();
    let mut client = world.client(1, "a");
    client.looks = true;
    for seq in 1..=1000 {
        assert_eq!(client.ask(seq, b"hello"), b"hello");
    }
    assert_eq!(world.modules.stats()[0].bells, 0);
    client.looks = false;
    assert_eq!(client.ask(1001, b"a bell"), b"a bell");
}

#[test]
fn whoever_gets_none_goes_on_by_its_socket() {
    let world = World::start();
    let mut client = world.client(1, "a");
    let refused = |client: &mut Client, id| {
        let (code, text) = client.ask_ring(id).failure();
        assert_eq!(code, failure::RING);
        text
    };
    let text = refused(&mut client, [7; 16]);
    assert_eq!(text, "the memory before you is not that of this module's process");
    client.send(&frame(kind::RING, 0, 0, b"short"));
    assert_eq!(client.next().unwrap().failure().0, failure::RING);
    assert_eq!(client.ask(1, b"hello"), b"hello");
    // One request is under way.
    let id = world.region.head().id;
    client.send(&[frame(kind::RING, 0, 0, &id), frame(kind::REQUEST, 0, 2, b"hello")].concat());
    let text = client.next().unwrap().failure().1;
    assert_eq!(text, "a ring is asked for once, and while nothing is on its way");
    assert_eq!(client.reply(2).body, b"hello");
    let mut all: Vec<Client> = (2..=4).map(|id| world.client(id, "b")).collect();
    all.iter_mut().for_each(|client| assert!(client.change_over(&world.region)));
    assert_eq!(refused(&mut client, id), "all rings of this VM are taken");
    assert_eq!(
        refused(&mut all[0], id),
        "a ring is asked for once, and while nothing is on its way"
    );
    assert_eq!(rings(&world), 3);
    for client in all.iter_mut().chain([&mut client]) {
        assert_eq!(client.ask(3, b"hello"), b"hello");
    }
    all.pop();
    while !client.change_over_if(&world.region) {}
    assert_eq!(client.ask(4, b"at last"), b"at last");
}

#[test]
fn whoever_must_have_one_reaches_nothing_without() {
    let world = World::by_ring_alone();
    let without = |id, of_guest| {
        let mut client = world.connect_as(of_guest);
        client.send(&hello([id; 16], "a"));
        client.welcomed().unwrap();
        client
    };
    let mut other = without(1, true);
    assert_eq!(other.ask_ring([7; 16]).failure().0, failure::RING);
    other.send(&frame(kind::PING, 0, 0, b"there?"));
    assert_eq!(other.next().unwrap().body, b"there?");
    // The header of the longest is enough.
    other.send(&frame(kind::REQUEST, 0, 1, &[b'd'; 16 << 20])[..24]);
    let (code, text) = other.next().unwrap().failure();
    assert_eq!((code, other.next()), (failure::RING_ONLY, None));
    assert!(text.starts_with("this VM's modules take requests by shared memory alone"), "{text}");
    // The same request, once it has a ring; a program of the host needs none.
    let mut client = world.client(1, "a");
    assert_eq!(client.ask(1, b"hello"), b"hello");
    assert_eq!(without(2, false).ask(1, b"hello"), b"hello");
    let stats = &world.modules.stats()[0];
    assert_eq!((stats.requests, stats.bad), (2, 1));
}

#[test]
fn abuse_M_a_region_that_a_guest_destroys_harms_nobody_else() {
    let world = World::by_ring();
    for (id, off) in [(1, TO_HOST.tail_off), (2, TO_CLIENT.head_off)] {
        let (mut bad, mut other) = (world.client(id, "a"), world.by_socket(100 + id).unwrap());
        assert_eq!(bad.ask(1, b"hello"), b"hello");
        lie(&world, off, u64::MAX / 2);
        // A bell, and no more.
        bad.bell();
        if off == TO_HOST.tail_off {
            let (code, text) = bad.next().unwrap().failure();
            assert_eq!(code, failure::RING);
            assert!(text.starts_with("a ring of 129024 bytes would have 92"), "{text}");
        } else {
            bad.request(2, 0, b"?");
        }
        // Whatever it may still read.
        while bad.sleep() {}
        assert_eq!(other.ask(1, b"hello"), b"hello");
    }
    // The same client, the same requests: they are executed once.
    let mut client = world.client(3, "a");
    client.request(1, 0, b"dabcde");
    let first = client.reply(1).body;
    client.send(&[0xff; 24]);
    let (code, _) = client.next().unwrap().failure();
    assert_eq!((code, client.next()), (failure::RING, None));
    let mut client = world.client(3, "a");
    client.request(1, flag::AGAIN, b"dabcde");
    assert_eq!(client.reply(1).body, first);
    assert_eq!(world.modules.stats()[0].bad, 3);
}

#[test]
fn a_client_that_takes_nothing_waits_and_others_do_not() {
    let world = World::by_ring();
    let (mut deaf, mut other) = (world.client(1, "a"), world.client(2, "a"));
    // More than a ring has room for, less than the host holds for one client.
    let body = vec![b'z'; 50_000];
    for seq in 1..=20 {
        deaf.request(seq, 0, &body);
        assert_eq!(other.ask(seq, b"a little"), b"a little");
    }
    for seq in 1..=20 {
        assert!(deaf.reply(seq).body == body);
    }
    assert_eq!(deaf.ask(21, b"hello"), b"hello");
}

#[test]
fn a_killed_process_gives_its_clients_other_rings() {
    let world = World::by_ring();
    let mut client = world.client(1, "a");
    let before = world.region.head().id;
    client.ask(1, b"dabcde");
    kill_process(Pid::from_raw(world.pid()).unwrap(), Signal::KILL).unwrap();
    assert_eq!(client.next(), None);
    let mut client = world.client(1, "a");
    assert_ne!(world.region.head().id, before);
    assert_eq!(client.ask(1, b"l"), 6u64.to_le_bytes());
}

/// A client that has not noticed yet that its connection is gone, and a slot that is somebody
/// else's by now.
#[test]
fn what_is_left_of_another_connection_is_never_done() {
    let world = World::by_ring();
    let mut stale = world.client(1, "a");
    for seq in 1..=5 {
        stale.ask(seq, b"dabcde");
    }
    kill_process(Pid::from_raw(world.pid()).unwrap(), Signal::KILL).unwrap();
    // One of them has that slot; what it sent is as long as what lies there.
    let mut others: Vec<Client> = (2..=4).map(|id| world.client(id, "a")).collect();
    for other in &mut others {
        (1..=3).for_each(|seq| drop(other.ask(seq, b"dabcde")));
    }
    stale.request(6, 0, b"dabcde");
    stale.bell();
    let ended = others.iter_mut().filter_map(|other| {
        // Whoever has the slot is told; the others are served.
        other.send(&frame(kind::PING, 0, 9, b"there?"));
        other.bell();
        let got = other.next().unwrap();
        (got.kind != kind::PONG).then(|| got.failure().0)
    });
    assert!(ended.collect::<Vec<_>>().iter().all(|code| *code == failure::RING));
    let mut plain = world.by_socket(9).unwrap();
    assert_eq!(plain.ask(1, b"l"), (14 * 6u64).to_le_bytes());
}

#[test]
fn what_was_written_before_the_end_counts() {
    let world = World::by_ring();
    let mut client = world.client(1, "a");
    client.request(1, 0, b"dabcde");
    client.send(&frame(kind::GOODBYE, 0, 0, b""));
    drop(client);
    let mut other = world.client(2, "a");
    let mut seq = 0;
    let mut len = || {
        seq += 1;
        u64::from_le_bytes(other.ask(seq, b"l").try_into().unwrap())
    };
    while len() == 0 {}
    // It has said goodbye: nothing of it is kept.
    while world.modules.stats()[0].clients != 1 {}
}

#[test]
fn a_hello_is_answered_by_the_socket() {
    let world = World::start();
    let mut client = world.connect();
    let id = world.region.head().id;
    // Behind it at once, as no client should: it is refused, or granted, and nothing hangs.
    client.send(&[hello([1; 16], "a"), frame(kind::RING, 0, 0, &id)].concat());
    client.welcome();
    let got = client.next().unwrap();
    assert_eq!(got.kind, kind::RING);
}
