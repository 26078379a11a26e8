//! Waits for locks, and how they end.

use guest_abi::table::{batch_flag, limits, op, op_flag, reply_flag, status};
use sdk::testing::EventBytes;

use crate::testing::{Batch, TestStore};

fn world() -> (TestStore, u32) {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    let mut ask = Batch::new(0);
    for key in ["a", "b", "c", "d"] {
        ask = ask.insert(t, key, "0");
    }
    world.call(0, &ask.commit()).ok();
    (world, t)
}

#[test]
fn who_waits_goes_on_when_the_lock_is_free_in_the_order_of_coming() {
    let (mut world, t) = world();
    world.call(0, &Batch::begin(1).update(t, "a", "1")).ok();
    let waiting: Vec<_> = (1..4)
        .map(|c| (c, world.send(c, &Batch::new(0).wait(9000).put(t, "a", format!("{c}")).commit())))
        .collect();
    assert!(waiting.iter().all(|(c, seq)| world.take_reply(*c, *seq).is_none()));
    world.call(0, &Batch::new(1).commit()).ok();
    for (client, seq) in waiting {
        world.wait(client, seq).ok();
    }
    assert_eq!(world.all(t)[0].1, "3");
    assert_eq!(world.store.db.locks.len(), 0);
}

#[test]
fn nobody_gets_a_lock_before_those_who_wait_for_it() {
    let (mut world, t) = world();
    let read = |tx| Batch::begin(tx).get_for(t, "a", op_flag::SHARED);
    world.call(0, &read(1)).ok();
    let write = world.send(1, &Batch::new(0).wait(9000).put(t, "a", "1").commit());
    world.call(2, &read(2)).is(status::TIMEOUT);
    let waits = world.send(2, &Batch::new(2).wait(9000).get_for(t, "a", op_flag::SHARED));
    // Who has it already may have it again, or more of it.
    world.call(0, &Batch::new(1).get_for(t, "a", op_flag::SHARED)).ok();
    world.call(0, &Batch::new(1).get_for(t, "a", op_flag::EXCLUSIVE)).ok();
    assert!(world.take_reply(2, waits).is_none());
    world.call(0, &Batch::new(1).commit()).ok();
    world.wait(1, write).ok();
    assert_eq!(world.wait(2, waits).ok().value(0), Some("1".into()));
}

#[test]
fn a_batch_goes_on_where_it_stopped_and_the_client_s_next_ones_after_it() {
    let (mut world, t) = world();
    world.call(0, &Batch::begin(1).update(t, "b", "1")).ok();
    let ask =
        Batch::begin(2).wait(9000).insert(t, "e", "2").update(t, "b", "2").insert(t, "f", "2");
    let first = world.send(1, &ask);
    let second = world.send(1, &Batch::new(2).insert(t, "g", "2").commit());
    let third = world.send(1, &Batch::new(0).get(t, "g"));
    assert!(world.take_reply(1, second).is_none());
    world.call(0, &Batch::new(1).rollback()).ok();
    assert_eq!(world.wait(1, first).ok().done, 3);
    world.wait(1, second).ok();
    assert_eq!(world.wait(1, third).ok().value(0), Some("2".into()));
    assert_eq!(world.all(t).len(), 7);
}

#[test]
fn waits_end_in_time_and_the_transaction_lives_on() {
    let (mut world, t) = world();
    world.call(0, &Batch::begin(1).update(t, "a", "1")).ok();
    world.call(1, &Batch::begin(2).update(t, "b", "2")).ok();
    let seq = world.send(1, &Batch::new(2).wait(50).update(t, "c", "2").update(t, "a", "2"));
    world.host.advance(49);
    world.serve(&EventBytes::new().wake());
    assert!(world.take_reply(1, seq).is_none());
    assert!(world.host.wake_at_ms().is_some());
    world.host.advance(1);
    world.serve(&EventBytes::new().wake());
    let said = world.take_reply(1, seq).unwrap().is(status::TIMEOUT);
    assert_eq!((said.done, said.flags), (1, 0));
    world.call(1, &Batch::new(2).commit()).ok();
    assert_eq!(world.all(t)[1].1, "2");
    // Without a wait, at once.
    world.call(1, &Batch::new(0).put(t, "a", "").commit()).is(status::TIMEOUT);
    let no_wait = Batch::new(0).wait(9000).op(op::PUT, (t, 0), op_flag::NO_WAIT, "a", "", 0);
    let seq = world.send(1, &no_wait.commit());
    world.take_reply(1, seq).unwrap().is(status::TIMEOUT);
    // All or nothing: the transaction is gone.
    let ask = Batch::begin(3).flags(batch_flag::ALL_OR_NOTHING).put(t, "z", "").put(t, "a", "");
    let said = world.call(1, &ask).is(status::TIMEOUT);
    assert_eq!(said.flags, reply_flag::ENDED);
    assert_eq!(world.all(t).len(), 4);
}

#[test]
fn a_cancelled_wait_ends_at_once() {
    let (mut world, t) = world();
    world.call(0, &Batch::begin(1).update(t, "a", "1")).ok();
    let first = world.send(1, &Batch::begin(2).wait(9000).put(t, "e", "").update(t, "a", "2"));
    let second = world.send(1, &Batch::new(2).wait(9000).update(t, "a", "2"));
    world.serve(&EventBytes::new().cancel(1, second));
    assert!(world.take_reply(1, second).is_none());
    world.serve(&EventBytes::new().cancel(1, first));
    assert_eq!(world.take_reply(1, first).unwrap().is(status::CANCELLED).done, 1);
    world.take_reply(1, second).unwrap().is(status::CANCELLED);
    world.call(1, &Batch::new(2).commit()).ok();
    world.serve(&EventBytes::new().cancel(1, first).cancel(77, 1));
}

#[test]
fn a_deadlock_is_seen_at_once_and_its_last_one_is_rolled_back() {
    let (mut world, t) = world();
    for (client, key) in [(0, "a"), (1, "b"), (2, "c")] {
        world.call(client, &Batch::begin(1).update(t, key, "1")).ok();
    }
    let first = world.send(0, &Batch::new(1).wait(9000).update(t, "b", "2"));
    let second = world.send(1, &Batch::new(1).wait(9000).update(t, "c", "2"));
    let seq = world.send(2, &Batch::new(1).wait(9000).update(t, "a", "2"));
    let said = world.take_reply(2, seq).unwrap().is(status::DEADLOCK);
    assert_eq!(said.flags, reply_flag::ENDED);
    world.take_reply(1, second).unwrap().ok();
    assert!(world.take_reply(0, first).is_none());
    world.call(1, &Batch::new(1).commit()).ok();
    world.take_reply(0, first).unwrap().ok();
    world.call(0, &Batch::new(1).commit()).ok();
    let rows = world.all(t);
    assert_eq!([&rows[0].1, &rows[1].1, &rows[2].1], ["1", "2", "2"]);
    // Two that hold it shared and want it for themselves.
    for client in [0, 1] {
        world.call(client, &Batch::begin(2).get_for(t, "a", op_flag::SHARED)).ok();
    }
    let first = world.send(0, &Batch::new(2).wait(9000).update(t, "a", "3"));
    world.call(1, &Batch::new(2).wait(9000).update(t, "a", "4")).is(status::DEADLOCK);
    world.wait(0, first).ok();
}

#[test]
fn a_client_that_goes_gives_all_back() {
    let (mut world, t) = world();
    world.call(0, &Batch::begin(1).update(t, "a", "1").insert(t, "z", "1")).ok();
    let waits = world.send(1, &Batch::begin(2).wait(9000).update(t, "b", "2").update(t, "a", "2"));
    let behind = world.send(2, &Batch::begin(3).wait(9000).update(t, "a", "3"));
    let other = world.send(3, &Batch::begin(4).wait(9000).update(t, "b", "4"));
    world.serve(&EventBytes::new().closed(1));
    assert!(world.take_reply(1, waits).is_none());
    world.wait(3, other).ok();
    world.serve(&EventBytes::new().closed(0).opened(0, [9; 16]));
    world.wait(2, behind).ok();
    world.call(2, &Batch::new(3).commit()).ok();
    world.call(3, &Batch::new(4).commit()).ok();
    assert_eq!(world.store.db.locks.len(), 0);
    assert!(world.store.db.txs.parked.is_empty());
    assert_eq!(world.all(t).len(), 4);
}

#[test]
fn scans_lock_what_they_read_pass_over_it_or_wait() {
    let (mut world, t) = world();
    world.call(0, &Batch::begin(1).update(t, "b", "1")).ok();
    let scan = |flags, extra| {
        let flags = flags | op_flag::NO_HIGH | op_flag::EXCLUSIVE;
        Batch::new(2).wait(9000).op(op::SCAN, (t, 0), flags, "", "", extra)
    };
    world.call(1, &Batch::begin(2)).ok();
    let keys = |rows: Vec<(String, String)>| rows.into_iter().map(|r| r.0).collect::<String>();
    let said = world.call(1, &scan(op_flag::SKIP_LOCKED, limits(2, 0))).ok();
    assert_eq!((keys(said.rows(0)), said.answers[0].more), ("ac".into(), true));
    world.call(2, &Batch::new(0).update(t, "c", "").commit()).is(status::TIMEOUT);
    world.call(2, &Batch::new(0).update(t, "d", "5").commit()).ok();
    world.call(1, &scan(op_flag::NO_WAIT, 0)).is(status::TIMEOUT);
    let seq = world.send(1, &scan(0, 0).get(t, "a"));
    assert!(world.take_reply(1, seq).is_none());
    world.call(0, &Batch::new(1).delete(t, "b").insert(t, "bb", "1").commit()).ok();
    let said = world.wait(1, seq).ok();
    assert_eq!(keys(said.rows(0)), "abbcd");
    assert_eq!(said.answers.len(), 2);
    let backward = scan(op_flag::BACKWARD, limits(2, 0));
    assert_eq!(keys(world.call(1, &backward).ok().rows(0)), "dc");
}

#[test]
fn locks_of_tables_stand_for_those_of_their_keys() {
    let (mut world, t) = world();
    world.call(0, &Batch::begin(1).lock(t, op_flag::EXCLUSIVE).put(t, "a", "1")).ok();
    assert_eq!(world.store.db.locks.len(), 1);
    world.call(1, &Batch::new(0).get_for(t, "b", op_flag::SHARED)).is(status::TIMEOUT);
    world.call(1, &Batch::new(0).put(t, "b", "").commit()).is(status::TIMEOUT);
    world.call(1, &Batch::new(0).get(t, "b")).ok();
    world.call(0, &Batch::new(1).commit()).ok();
    world.call(0, &Batch::begin(2).lock(t, op_flag::SHARED).get_for(t, "a", op_flag::SHARED)).ok();
    world.call(1, &Batch::begin(3).lock(t, op_flag::SHARED)).ok();
    world.call(2, &Batch::new(0).get_for(t, "b", op_flag::SHARED)).ok();
    let write = world.send(0, &Batch::new(2).wait(9000).put(t, "a", "2"));
    world.call(1, &Batch::new(3).rollback()).ok();
    world.wait(0, write).ok();
    world.call(0, &Batch::new(2).commit()).ok();
    assert_eq!(world.store.db.locks.len(), 0);
}

#[test]
fn long_scans_get_on_however_much_comes() {
    let mut world = TestStore::with(1, crate::Config { steps: 40, ..crate::Config::default() });
    let t = world.create("t", 1);
    for i in 0..200_u32 {
        world.call(0, &Batch::new(0).put(t, i.to_be_bytes(), "v").commit()).ok();
    }
    let scan = world.send(1, &Batch::new(0).scan(t));
    let mut calls = 0;
    while world.take_reply(1, scan).is_none() {
        let events = (0..20).fold(EventBytes::new(), |events, i| {
            events.request(2, 1000 + calls * 20 + i, 0, &Batch::new(0).get(t, [0; 4]).bytes())
        });
        world.serve(&events);
        calls += 1;
        assert!(calls < 100);
    }
    assert!(calls > 5, "{calls}");
}

#[test]
fn keys_of_secondary_indexes_are_locked_unless_they_are_the_client_s_own() {
    let mut world = TestStore::new();
    let t = world.create("t", 2);
    let insert = |tx, flags, key: &str| Batch::begin(tx).op(op::INSERT, (t, 1), flags, key, "p", 0);
    world.call(0, &insert(1, 0, "unique")).ok();
    world.call(1, &insert(2, 0, "unique")).is(status::TIMEOUT);
    world.call(2, &insert(3, op_flag::NO_LOCK, "k1")).ok();
    world.call(3, &insert(4, op_flag::NO_LOCK, "k2")).ok();
    assert_eq!(world.store.db.locks.len(), 2);
    let primary = Batch::new(0).op(op::INSERT, (t, 0), op_flag::NO_LOCK, "k", "", 0).commit();
    world.call(4, &primary).is(status::BAD_REQUEST);
}
