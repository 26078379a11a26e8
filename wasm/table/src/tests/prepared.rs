//! Prepared transactions, and requests that come twice.

use guest_abi::table::{op, reply_flag, status};
use sdk::testing::EventBytes;

use crate::testing::{Batch, TestStore, small};

#[test]
fn prepared_transactions_outlive_client_process_and_checkpoints() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 2);
    world.call(0, &Batch::new(0).insert(t, "a", "0").insert(t, "b", "0").commit()).ok();
    let long = "l".repeat(700);
    for (client, name, key) in [(0, "one", "a"), (1, "two", "b")] {
        let ask = Batch::begin(1).update(t, key, &long).insert(t, format!("new {name}"), name);
        world.call(client, &ask.named(op::PREPARE, name)).ok();
    }
    world.call(2, &Batch::begin(1).named(op::PREPARE, "one")).is(status::EXISTS);
    world.call(0, &Batch::new(1).get(t, "a")).is(status::LOST);
    world.serve(&EventBytes::new().closed(0).opened(0, TestStore::id(0)));
    for round in 0..4 {
        let names = world.call(2, &Batch::new(0).named(op::LIST_PREPARED, "")).ok().rows(0);
        assert_eq!(names.len(), 2, "round {round}");
        world.call(2, &Batch::new(0).update(t, "a", "").commit()).is(status::TIMEOUT);
        world.call(2, &Batch::new(0).insert(t, "new two", "").commit()).is(status::TIMEOUT);
        world.call(2, &Batch::new(0).named(op::DROP, "t")).is(status::BUSY);
        assert_eq!(world.all(t).len(), 2 + round);
        for i in 0..60 {
            let ask = Batch::new(0).put(t, format!("x{round}"), format!("{i}{long}"));
            world.call(3, &ask.commit()).ok();
        }
        world.idle();
        if round % 2 == 0 { world.restart() } else { world.crash() }
    }
    assert!(world.store.upkeep.checkpoints.number > 3);
    world.call(2, &Batch::new(0).named(op::COMMIT_PREPARED, "one")).ok();
    world.call(2, &Batch::new(0).named(op::ROLLBACK_PREPARED, "two")).ok();
    world.call(2, &Batch::new(0).named(op::COMMIT_PREPARED, "two")).is(status::NOT_FOUND);
    assert_eq!(world.store.db.locks.len(), 0);
    for _ in 0..2 {
        let rows = world.all(t);
        assert_eq!(rows.len(), 7);
        assert_eq!((&rows[0].1, &rows[1].1, &rows[2].1), (&long, &"0".into(), &"one".into()));
        world.restart();
    }
    let usage = &world.store.db.log.usage;
    assert!(usage.segments.values().all(|s| s.pins == 0));
}

#[test]
fn what_was_done_is_not_done_again() {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    let insert = Batch::new(0).insert(t, "a", "1").commit();
    let seq = world.send(1, &insert);
    world.wait(1, seq).ok();
    let create = Batch::new(0).op(op::CREATE, (0, 0), 0, "u", "", 1);
    let made = world.send(1, &create);
    world.wait(1, made).ok();
    world.call(1, &Batch::begin(5).insert(t, "b", "1")).ok();
    let commit = Batch::new(5).commit();
    let committed = world.send(1, &commit);
    for _ in 0..3 {
        world.restart();
        for (seq, ask) in [(seq, &insert), (made, &create), (committed, &commit)] {
            let said = world.again(1, seq, ask).ok();
            assert_eq!(said.flags, reply_flag::REPLAYED | reply_flag::ENDED);
            assert!(said.answers.is_empty());
        }
    }
    // Another client's number is another number.
    world.again(2, seq, &insert).is(status::EXISTS);
    // What was not done is done, if it begins its transaction itself.
    let said = world.again(1, 50, &Batch::new(0).insert(t, "c", "1").commit()).ok();
    assert_eq!(said.flags, reply_flag::ENDED);
    world.again(1, 51, &Batch::begin(9).insert(t, "d", "1").commit()).ok();
    world.again(1, 52, &Batch::new(10).insert(t, "e", "1").commit()).is(status::LOST);
    assert_eq!(world.all(t).len(), 4);
}

#[test]
fn replayed_replies_wait_until_what_they_say_is_durable() {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    let ask = Batch::new(0).insert(t, "a", "1").commit();
    let seq = world.send(1, &ask);
    world.host.kill();
    world.start().unwrap();
    world.send_as(1, seq, guest_abi::module_call::event_flag::AGAIN, &ask);
    assert!(world.take_reply(1, seq).is_none() && world.host.held().len() == 1);
    world.wait(1, seq).ok();
}

#[test]
fn thousands_of_clients_are_remembered() {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    let mut id = [7; 16];
    let ask = |n: u32| Batch::new(0).insert(t, n.to_be_bytes(), "").commit();
    for n in 0..6000_u32 {
        id[..4].copy_from_slice(&n.to_le_bytes());
        world.serve(&EventBytes::new().closed(9).opened(9, id));
        world.send_as(9, 1, 0, &ask(n));
        world.wait(9, 1).ok();
    }
    world.restart();
    for n in (6000 - 4096)..6000_u32 {
        id[..4].copy_from_slice(&n.to_le_bytes());
        world.serve(&EventBytes::new().closed(9).opened(9, id));
        assert!(world.again(9, 1, &ask(n)).ok().flags & reply_flag::REPLAYED != 0, "{n}");
    }
    assert!(world.store.db.remembered.clients.len() < 4500);
}
