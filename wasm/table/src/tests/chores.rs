//! Checkpoints, compaction, large transactions, restarts.

use guest_abi::table::{op, op_flag, status};
use sdk::testing::EventBytes;

use crate::Config;
use crate::testing::{Batch, TestStore, small};

#[test]
fn thousands_of_rows_are_there_after_a_restart_and_the_log_stays_short() {
    let config =
        Config { segment_bytes: 64 << 10, checkpoint_bytes: 128 << 10, ..Config::default() };
    let mut world = TestStore::with(1, config);
    let t = world.create("t", 2);
    let value = |i: u32, round: u32| format!("{i} {round} ").repeat(30);
    for round in 0..6 {
        for group in 0..50_u32 {
            let mut ask = Batch::new(0);
            for i in group * 100..group * 100 + 100 {
                ask = ask.put(t, i.to_be_bytes(), value(i, round));
                ask =
                    ask.op(op::PUT, (t, 1), op_flag::NO_LOCK, format!("s{i}"), i.to_be_bytes(), 0);
            }
            world.call(0, &ask.commit()).ok();
        }
        world.idle();
        if round % 2 == 1 {
            world.crash();
        }
    }
    let live: u64 = 5000 * value(1000, 1).len() as u64;
    // Half of a segment's values may be dead, and some of it is heads, keys and small values.
    assert!(world.host.used_bytes() < 4 * live, "{} {live}", world.host.used_bytes());
    for _ in 0..2 {
        let scan = world.call(0, &Batch::new(0).scan(t)).ok();
        assert_eq!(scan.answers[0].rows.len(), 5000);
        for (i, row) in scan.answers[0].rows.iter().enumerate() {
            assert_eq!(row.2, value(i as u32, 5).as_bytes());
        }
        world.restart();
    }
    // Rows beside each other are read together.
    let before = world.host.calls["read"];
    let flags = op_flag::HIGH_OPEN;
    let (low, high) = (1000_u32.to_be_bytes(), 1100_u32.to_be_bytes());
    let scan = Batch::new(0).op(op::SCAN, (t, 0), flags, low, high, 0);
    assert_eq!(world.call(0, &scan).ok().answers[0].rows.len(), 100);
    let reads = world.host.calls["read"] - before;
    assert!(reads <= 12, "{reads}");
}

#[test]
fn segments_without_wanted_values_are_removed_and_sparse_ones_are_compacted() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    let long = "l".repeat(200);
    for i in 0..200 {
        // One row in ten stays.
        let key = if i % 10 == 0 { format!("stay{i}") } else { "go".into() };
        world.call(0, &Batch::new(0).put(t, key, &long).commit()).ok();
        world.idle();
    }
    for i in 0..200 {
        world.call(0, &Batch::new(0).put(t, "go", format!("{i}{long}")).commit()).ok();
        world.idle();
    }
    assert_eq!(world.all(t).len(), 21);
    assert!(world.host.used_bytes() < 40_000, "{}", world.host.used_bytes());
    let segments = world.host.names().iter().filter(|n| n.starts_with("log")).count();
    assert!(segments <= 6, "{segments}");
    world.crash();
    assert_eq!(world.all(t).len(), 21);
}

#[test]
fn values_that_a_snapshot_reads_outlive_compaction() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    let old: Vec<_> = (0..20).map(|i| format!("{i}").repeat(150)).collect();
    for (i, value) in old.iter().enumerate() {
        world.call(0, &Batch::new(0).put(t, format!("{i:02}"), value).commit()).ok();
    }
    world.call(1, &Batch::begin(1).get(t, "00")).ok();
    for round in 0..20 {
        for i in 0..20 {
            let value = format!("new {round}").repeat(40);
            world.call(0, &Batch::new(0).put(t, format!("{i:02}"), value).commit()).ok();
            world.idle();
        }
    }
    let rows = world.call(1, &Batch::new(1).scan(t)).ok().rows(0);
    assert!(rows.into_iter().map(|r| r.1).eq(old));
    world.call(1, &Batch::new(1).rollback()).ok();
    world.idle();
    assert!(world.host.used_bytes() < 60_000, "{}", world.host.used_bytes());
}

fn fill(world: &mut TestStore, t: u32) {
    for group in 0..50_u32 {
        let put = |ask: Batch, i: u32| ask.put(t, (group * 100 + i).to_be_bytes(), "v");
        world.call(0, &(0..100).fold(Batch::new(1), put)).ok();
    }
}

#[test]
fn a_large_transaction_is_seen_as_a_whole_or_not_at_all() {
    let config = Config { steps: 200, ..Config::default() };
    let mut world = TestStore::with(1, config);
    let t = world.create("t", 1);
    world.call(0, &Batch::begin(1)).ok();
    let old =
        Batch::new(0).put(t, 0_u32.to_be_bytes(), "old").put(t, 4999_u32.to_be_bytes(), "old");
    world.call(1, &old.commit()).ok();
    fill(&mut world, t);
    let commit = world.send(0, &Batch::new(1).commit());
    assert!(world.take_reply(0, commit).is_none());
    let (mut parts, mut waits) = (0, Vec::new());
    while world.host.held().is_empty() {
        let both = Batch::new(0).get(t, 0_u32.to_be_bytes()).get(t, 4999_u32.to_be_bytes());
        let seq = world.send(1, &both);
        waits.push((1, seq));
        // What is committed meanwhile comes after it.
        waits.push((3, world.send(3, &Batch::new(0).put(t, format!("after{parts}"), "").commit())));
        parts += 1;
    }
    assert!(parts > 10, "{parts}");
    world.release();
    let mut seen = [0; 2];
    for (client, seq) in waits {
        let said = world.wait(client, seq).ok();
        if client == 1 {
            assert_eq!(said.value(0), said.value(1));
            seen[usize::from(said.value(0) == Some("v".into()))] += 1;
        }
    }
    assert!(seen[0] > 10, "{seen:?}");
    world.wait(0, commit).ok();
    assert_eq!(world.all(t).len(), 5000 + parts);
    world.idle();
    assert_eq!(world.store.db.locks.len(), 0);
    // One that is rolled back, or whose client goes, gives all back in the end.
    for way in 0..2 {
        world.call(0, &Batch::begin(3 + way)).ok();
        for group in 0..20_u32 {
            let ask = (0..100).fold(Batch::new(3 + way), |ask, i| {
                ask.save(u64::from(group * 100 + i + 1)).put(
                    t,
                    (group * 100 + i).to_be_bytes(),
                    "w",
                )
            });
            world.call(0, &ask).ok();
        }
        if way == 0 {
            let back = Batch::new(3).back_to(1).get(t, 0_u32.to_be_bytes());
            assert_eq!(world.call(0, &back).ok().value(0), Some("v".into()));
            world.call(0, &Batch::new(3).rollback()).ok();
        } else {
            world.serve(&EventBytes::new().closed(0).opened(0, TestStore::id(0)));
        }
        world.idle();
        assert_eq!(world.store.db.locks.len(), 0);
        assert!(world.store.db.txs.parked.is_empty());
    }
}

#[test]
fn a_large_prepared_transaction_that_ends_in_the_middle_of_a_checkpoint_is_whole() {
    for calls in 0..30 {
        let mut world = TestStore::with(calls, Config { steps: 50, ..small() });
        let t = world.create("t", 1);
        world.call(0, &Batch::begin(1)).ok();
        for i in 0..300_u32 {
            world.call(0, &Batch::new(1).put(t, i.to_be_bytes(), [1; 70])).ok();
        }
        world.call(0, &Batch::new(1).named(op::PREPARE, "name")).ok();
        world.idle();
        world.store.upkeep.checkpoints.is_wanted = true;
        for _ in 0..calls {
            world.serve(&EventBytes::new().wake());
        }
        world.call(0, &Batch::new(0).named(op::COMMIT_PREPARED, "name")).ok();
        for _ in 0..calls * 2 {
            world.serve(&EventBytes::new().wake());
        }
        world.crash();
        assert_eq!(world.all(t).len(), 300, "{calls}");
        world.idle();
        world.restart();
        assert_eq!(world.all(t).len(), 300, "{calls}");
    }
}

#[test]
fn a_table_that_is_emptied_or_removed_gives_its_space_back_a_piece_at_a_time() {
    let mut world = TestStore::with(1, Config { steps: 300, ..small() });
    let t = world.create("t", 1);
    for group in 0..20_u32 {
        let ask = (0..100)
            .fold(Batch::new(0), |ask, i| ask.put(t, (group * 100 + i).to_be_bytes(), [7; 100]));
        world.call(0, &ask.commit()).ok();
    }
    world.call(1, &Batch::begin(1).scan(t)).ok();
    let used = world.host.used_bytes();
    world.call(0, &Batch::new(0).op(op::TRUNCATE, (t, 0), 0, "", "", 0)).ok();
    assert_eq!(world.call(1, &Batch::new(1).scan(t)).ok().rows(0).len(), 0);
    world.call(1, &Batch::new(1).rollback()).ok();
    world.call(0, &Batch::new(0).put(t, "x", "y").commit()).ok();
    world.idle();
    assert!(world.store.db.catalog.dropped_indexes.is_empty());
    assert!(world.store.db.memory() < 500, "{}", world.store.db.memory());
    for i in 0..100 {
        world.call(0, &Batch::new(0).put(t, "x", format!("{i}").repeat(80)).commit()).ok();
        world.idle();
    }
    assert!(world.host.used_bytes() < used / 2);
    world.call(0, &Batch::new(0).named(op::DROP, "t")).ok();
    world.crash();
    world.call(0, &Batch::new(0).get(t, "x")).is(status::NO_TABLE);
}

#[test]
fn an_end_in_good_order_leaves_no_gap_in_counters() {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    let next = Batch::new(0).op(op::NEXT_AUTO, (t, 0), 0, "", "", 3);
    world.call(0, &next).ok();
    world.serve(&EventBytes::new().ending());
    world.crash();
    let said = world.call(0, &next).ok();
    assert_eq!(said.answers[0].bytes[..8], 4_u64.to_le_bytes());
}

#[test]
fn commits_of_a_call_share_an_append() {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    let before = world.host.calls["append"];
    let mut events = EventBytes::new();
    for client in 0..6 {
        let ask = Batch::new(0).put(t, format!("{client}"), "v").commit();
        events = events.request(client, 1000, 0, &ask.bytes());
    }
    world.serve(&events);
    assert_eq!(world.host.held().len(), 6);
    assert_eq!(world.host.calls["append"] - before, 1);
    let syncs = world.host.calls.get("sync").copied().unwrap_or(0);
    for i in 0..100 {
        world.call(0, &Batch::new(0).put(t, "x", format!("{i}")).commit()).ok();
    }
    assert_eq!(world.host.calls.get("sync").copied().unwrap_or(0), syncs);
}
