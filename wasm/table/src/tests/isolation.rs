//! Isolation of transactions: cases by their names in the literature. `a` and `b` are two clients.

use guest_abi::table::{batch_flag, op_flag, reply_flag, status};

use crate::testing::{Batch, TestStore};

const A: u32 = 1;
const B: u32 = 2;

fn world() -> (TestStore, u32) {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    world.call(0, &Batch::new(0).insert(t, "x", "1").insert(t, "y", "1").commit()).ok();
    (world, t)
}

fn set(world: &mut TestStore, t: u32, key: &str, value: &str) {
    world.call(3, &Batch::new(0).put(t, key, value).commit()).ok();
}

#[test]
fn dirty_read_does_not_happen() {
    let (mut world, t) = world();
    world.call(A, &Batch::begin(1).update(t, "x", "2").insert(t, "z", "9")).ok();
    let said = world.call(B, &Batch::begin(2).get(t, "x").get(t, "z").scan(t)).ok();
    assert_eq!((said.value(0), said.value(1)), (Some("1".into()), None));
    assert_eq!(said.rows(2).len(), 2);
    // A read that locks waits, and does not read what may be undone.
    let read = Batch::new(2).get_for(t, "x", op_flag::SHARED);
    world.call(B, &read.clone()).is(status::TIMEOUT);
    world.call(A, &Batch::new(1).rollback()).ok();
    assert_eq!(world.call(B, &read).ok().value(0), Some("1".into()));
}

#[test]
fn non_repeatable_read_does_not_happen_with_one_snapshot_and_does_with_one_for_each_statement() {
    let (mut world, t) = world();
    world.call(A, &Batch::begin(1).get(t, "x")).ok();
    set(&mut world, t, "x", "2");
    assert_eq!(world.call(A, &Batch::new(1).get(t, "x")).ok().value(0), Some("1".into()));
    let again = Batch::new(1).flags(batch_flag::NEW_SNAPSHOT).get(t, "x");
    assert_eq!(world.call(A, &again).ok().value(0), Some("2".into()));
    set(&mut world, t, "x", "3");
    assert_eq!(world.call(A, &Batch::new(1).get(t, "x")).ok().value(0), Some("2".into()));
    // The snapshot is taken at the first read, not at the beginning.
    world.call(B, &Batch::begin(2)).ok();
    set(&mut world, t, "x", "4");
    assert_eq!(world.call(B, &Batch::new(2).get(t, "x")).ok().value(0), Some("4".into()));
}

#[test]
fn read_skew_does_not_happen_with_one_snapshot() {
    let (mut world, t) = world();
    world.call(A, &Batch::begin(1).get(t, "x")).ok();
    world.call(3, &Batch::new(0).put(t, "x", "0").put(t, "y", "2").delete(t, "x").commit()).ok();
    let said = world.call(A, &Batch::new(1).get(t, "x").get(t, "y").scan(t)).ok();
    assert_eq!((said.value(0), said.value(1)), (Some("1".into()), Some("1".into())));
    assert_eq!(said.rows(2), [("x".into(), "1".into()), ("y".into(), "1".into())]);
}

#[test]
fn lost_update_happens_to_plain_reads_and_not_with_strict_or_locks() {
    // Plain: as with InnoDB, the second write is done on top of one that its reader has not seen.
    let (mut world, t) = world();
    world.call(A, &Batch::begin(1).get(t, "x")).ok();
    set(&mut world, t, "x", "10");
    world.call(A, &Batch::new(1).update(t, "x", "2").commit()).ok();
    assert_eq!(world.all(t)[0].1, "2");
    // STRICT: it fails, and the transaction is gone.
    world.call(A, &Batch::begin(2).get(t, "x")).ok();
    set(&mut world, t, "x", "20");
    let said = world.call(A, &Batch::new(2).flags(batch_flag::STRICT).update(t, "x", "3"));
    let said = said.is(status::CONFLICT);
    assert_eq!(said.flags, reply_flag::ENDED);
    world.call(A, &Batch::new(2).commit()).is(status::LOST);
    assert_eq!(world.all(t)[0].1, "20");
    // A lock: it sees the newest.
    let read = Batch::begin(3).get(t, "x").get_for(t, "x", op_flag::EXCLUSIVE);
    let said = world.call(A, &read).ok();
    assert_eq!(said.value(1), Some("20".into()));
    world.call(B, &Batch::new(0).put(t, "x", "30").commit()).is(status::TIMEOUT);
    world.call(A, &Batch::new(3).update(t, "x", "21").commit()).ok();
    assert_eq!(world.all(t)[0].1, "21");
}

#[test]
fn strict_fails_for_keys_that_were_deleted_or_made_since() {
    let (mut world, t) = world();
    for (tx, key, change) in
        [(1, "y", Batch::new(0).delete(t, "y")), (2, "z", Batch::new(0).put(t, "z", ""))]
    {
        world.call(A, &Batch::begin(tx).get(t, "x")).ok();
        world.call(3, &change.commit()).ok();
        let write = Batch::new(tx).flags(batch_flag::STRICT).put(t, key, "2");
        world.call(A, &write).is(status::CONFLICT);
    }
    // It holds from the batch that begins the transaction on, without a read.
    world.call(A, &Batch::begin(3).flags(batch_flag::STRICT).put(t, "x", "5")).ok();
    set(&mut world, t, "y", "6");
    let write = Batch::new(3).flags(batch_flag::STRICT).put(t, "y", "7");
    world.call(A, &write).is(status::CONFLICT);
}

#[test]
fn write_skew_happens_with_plain_reads_even_with_strict_and_not_with_locks() {
    // Both read x and y, each writes the other one: snapshot isolation allows it.
    let (mut world, t) = world();
    let strict = batch_flag::STRICT;
    for (client, tx) in [(A, 1), (B, 2)] {
        world.call(client, &Batch::begin(tx).flags(strict).get(t, "x").get(t, "y")).ok();
    }
    world.call(A, &Batch::new(1).flags(strict).update(t, "x", "0").commit()).ok();
    world.call(B, &Batch::new(2).flags(strict).update(t, "y", "0").commit()).ok();
    // With reads that lock, the second to write waits for the first.
    for (client, tx) in [(A, 3), (B, 4)] {
        let shared = op_flag::SHARED;
        let ask = Batch::begin(tx).get_for(t, "x", shared).get_for(t, "y", shared);
        world.call(client, &ask).ok();
    }
    let blocked = world.send(A, &Batch::new(3).wait(1000).update(t, "x", "7").commit());
    world.call(B, &Batch::new(4).wait(1000).update(t, "y", "7")).is(status::DEADLOCK);
    world.wait(A, blocked).ok();
}

#[test]
fn phantoms_do_not_happen_in_a_snapshot_and_do_with_locks_of_keys_and_not_with_locks_of_tables() {
    let (mut world, t) = world();
    world.call(A, &Batch::begin(1).scan(t)).ok();
    set(&mut world, t, "xx", "new");
    assert_eq!(world.call(A, &Batch::new(1).scan(t)).ok().rows(0).len(), 2);
    let shared = Batch::new(1).op(
        guest_abi::table::op::SCAN,
        (t, 0),
        op_flag::NO_HIGH | op_flag::SHARED,
        "",
        "",
        0,
    );
    assert_eq!(world.call(A, &shared).ok().rows(0).len(), 3);
    set(&mut world, t, "xxx", "new");
    assert_eq!(world.call(A, &shared).ok().rows(0).len(), 4);
    world.call(A, &Batch::new(1).lock(t, op_flag::SHARED)).ok();
    world.call(B, &Batch::new(0).put(t, "z", "").commit()).is(status::TIMEOUT);
    assert_eq!(world.call(B, &Batch::new(0).get(t, "z")).ok().value(0), None);
}

#[test]
fn versions_that_nobody_reads_any_more_are_forgotten() {
    let (mut world, t) = world();
    world.call(A, &Batch::begin(1).scan(t)).ok();
    for i in 0..100 {
        set(&mut world, t, "x", &format!("{i}"));
    }
    world.call(0, &Batch::new(0).delete(t, "y").commit()).ok();
    assert!(world.store.db.versions.garbage.len() >= 100);
    assert_eq!(world.call(A, &Batch::new(1).scan(t)).ok().rows(0).len(), 2);
    world.call(A, &Batch::new(1).rollback()).ok();
    world.idle();
    assert!(
        world.store.db.versions.garbage.is_empty() && world.store.db.versions.snapshots.is_empty()
    );
    let index = world.store.db.catalog.index(t, 0).unwrap();
    assert_eq!(index.map.len(), 1);
    assert!(index.map.values().all(|chain| matches!(chain, crate::map::Chain::One(_))));
    assert_eq!(world.all(t), [("x".to_string(), "99".to_string())]);
}
