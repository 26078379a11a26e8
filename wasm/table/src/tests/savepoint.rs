//! Additions of version 2 of the protocol beside filters: SYNC, savepoints, counters in
//! transactions.

use guest_abi::table::{self as abi, op, op_flag, status};

use crate::testing::{Batch, BatchReply, TestStore, small};

fn release(number: u64) -> Batch {
    Batch::new(1).op(op::RELEASE, (0, 0), 0, "", "", number)
}

fn auto(ask: Batch, t: u32, count: u64) -> Batch {
    ask.op(op::NEXT_AUTO, (t, 0), 0, "", "", count)
}

fn first(said: &BatchReply, answer: usize) -> u64 {
    u64::from_le_bytes(said.answers[answer].bytes[..8].try_into().unwrap())
}

#[test]
fn a_savepoint_with_a_number_that_is_there_moves() {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    let ask = Batch::begin(1).put(t, "a", "").save(7).put(t, "b", "").save(3).put(t, "c", "");
    world.call(0, &ask.save(7).put(t, "d", "")).ok();
    let keys = |world: &mut TestStore| {
        let rows = world.call(0, &Batch::new(1).scan(t)).ok().rows(0);
        rows.into_iter().map(|r| r.0).collect::<String>()
    };
    assert_eq!(keys(&mut world), "abcd");
    world.call(0, &Batch::new(1).back_to(7)).ok();
    assert_eq!(keys(&mut world), "abc");
    // The other one is where it was, and going back to it forgets the one that moved.
    world.call(0, &Batch::new(1).put(t, "e", "").back_to(3)).ok();
    assert_eq!(keys(&mut world), "ab");
    world.call(0, &Batch::new(1).back_to(7)).is(status::BAD_REQUEST);
    world.call(0, &Batch::new(1).save(1).put(t, "f", "").back_to(1)).ok();
    assert_eq!(keys(&mut world), "ab");
    world.call(0, &Batch::new(1).put(t, "g", "").commit()).ok();
    assert_eq!(world.all(t).len(), 3);
}

#[test]
fn a_savepoint_that_is_released_is_forgotten_with_those_after_it() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    let ask =
        Batch::begin(1).save(5).put(t, "a", "").save(6).put(t, "b", "").save(2).put(t, "c", "");
    world.call(0, &ask).ok();
    world.call(0, &release(6)).ok();
    world.call(0, &release(6)).is(status::BAD_REQUEST);
    world.call(0, &Batch::new(1).back_to(2)).is(status::BAD_REQUEST);
    assert_eq!(world.call(0, &Batch::new(1).scan(t)).ok().rows(0).len(), 3);
    world.call(0, &Batch::new(1).save(6).put(t, "d", "").back_to(6)).ok();
    world.call(0, &Batch::new(1).put(t, "x", "").back_to(5).put(t, "e", "")).ok();
    world.call(0, &release(5)).ok();
    world.call(0, &Batch::new(1).put(t, "f", "").save(1).put(t, "g", "").back_to(1).commit()).ok();
    let keys: String = world.all(t).into_iter().map(|r| r.0).collect();
    assert_eq!(keys, "ef");
    world.crash();
    assert_eq!(world.all(t).len(), 2);
}

#[test]
fn statements_that_each_release_their_savepoint_cost_no_memory() {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    let empty = world.store.db.memory();
    world.call(0, &Batch::begin(1).put(t, "a", "1")).ok();
    let one = world.store.db.memory();
    for i in 0..1000 {
        let number = i % 3 + 1;
        let ask = Batch::new(1).save(number).put(t, "a", format!("{}", i % 10));
        world.call(0, &ask.op(op::RELEASE, (0, 0), 0, "", "", number)).ok();
        assert_eq!(world.store.db.memory(), one);
    }
    // Savepoints that move cost no more than one, and the writes since the first of them.
    world.call(0, &Batch::new(1).save(1).save(2)).ok();
    let two = world.store.db.memory();
    for _ in 0..1000 {
        world.call(0, &Batch::new(1).save(1).save(2)).ok();
        assert_eq!(world.store.db.memory(), two);
    }
    world.call(0, &Batch::new(1).rollback()).ok();
    assert_eq!(world.store.db.memory(), empty);
}

#[test]
fn a_hundred_thousand_savepoints_that_move_stay_within_their_steps() {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    world.call(0, &Batch::begin(1).put(t, "a", "")).ok();
    for group in 0..10 {
        let ask = (1..=10_000).fold(Batch::new(1), |ask, i| ask.save(group * 10_000 + i));
        world.call(0, &ask).ok();
    }
    world.serve(&sdk::testing::EventBytes::new().wake());
    // The first one is looked for among all: that is more than a call may do.
    let seq = world.send(0, &(1..=100).fold(Batch::new(1), |ask, i| ask.save(i)));
    assert!(world.take_reply(0, seq).is_none());
    world.wait(0, seq).ok();
}

#[test]
fn counters_are_taken_beside_other_ops_and_for_good() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    let ask = auto(Batch::begin(1), t, 10).get(t, "a").put(t, "a", "1");
    let said = world.call(0, &auto(ask, t, 1)).ok();
    assert_eq!((first(&said, 0), first(&said, 2)), (1, 11));
    world.call(0, &Batch::new(1).rollback()).ok();
    let said = world.call(0, &auto(Batch::new(0).put(t, "a", "1"), t, 1).commit()).ok();
    assert_eq!(first(&said, 0), 12);
    let raise = Batch::new(0).put(t, "b", "1").op(op::RAISE_AUTO, (t, 0), 0, "", "", 5000);
    world.call(0, &raise.commit()).ok();
    // An op behind it fails: the values are gone.
    let said = world.call(0, &auto(Batch::new(0), t, 1).insert(t, "a", "").commit());
    assert_eq!(first(&said.is(status::EXISTS), 0), 5000);
    let said = world.call(0, &auto(Batch::new(0), t, 1).op(op::GET, (t, 0), 0, "a", "", 0)).ok();
    assert_eq!(first(&said, 0), 5001);
    // Values that a commit used are never given again.
    for round in 0..4 {
        let ask = auto(Batch::new(0), t, 700).put(t, "c", format!("{round}"));
        let said = world.call(0, &ask.commit()).ok();
        world.crash();
        let again = world.call(0, &auto(Batch::new(0), t, 1)).ok();
        assert!(first(&again, 0) >= first(&said, 0) + 700);
    }
    world.call(0, &auto(Batch::new(0), 99, 1)).is(status::NO_TABLE);
}

#[test]
fn sync_waits_for_what_was_relaxed() {
    let sync = Batch::new(0).op(op::SYNC, (0, 0), 0, "", "", 0);
    for seed in 0..20 {
        let mut world = TestStore::with(seed, small());
        let t = world.create("t", 1);
        for i in 0..5 {
            let ask = Batch::new(0).put(t, format!("{i}"), "v");
            world.call(0, &ask.op(op::COMMIT, (0, 0), op_flag::RELAXED, "", "", 0)).ok();
        }
        // From another client: it is held like a commit.
        let seq = world.send(1, &sync);
        assert!(world.take_reply(1, seq).is_none() && world.host.held().len() == 1);
        world.wait(1, seq).ok();
        world.crash();
        assert_eq!(world.all(t).len(), 5, "seed {seed}");
    }
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    world.host.fail(Some(sdk::testing::Call::Append), 0, 1, sdk::Errno::IO);
    world.call(0, &Batch::new(0).put(t, "a", "").commit()).is(status::STORAGE);
    world.call(0, &sync).is(status::STORAGE);
}

#[test]
fn the_store_says_which_version_it_speaks() {
    let mut world = TestStore::new();
    let said = world.call(0, &Batch::new(0).op(op::VERSION, (0, 0), 0, "", "", 0)).ok();
    assert_eq!(said.answers[0].bytes, [2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(abi::VERSION, 2);
}
