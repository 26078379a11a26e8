//! Checkpoints beside large transactions, and copies of the files.

use guest_abi::table::op;
use sdk::testing::{EventBytes, TestHost};

use crate::Config;
use crate::log::Place;
use crate::testing::{Batch, TestStore, small};

fn wake(world: &mut TestStore) {
    world.serve(&EventBytes::new().wake());
}

fn checkpoint(world: &mut TestStore) {
    let before = world.store.upkeep.checkpoints.number;
    world.store.upkeep.checkpoints.is_wanted = true;
    wake(world);
    world.idle();
    assert!(world.store.upkeep.checkpoints.number > before);
}

/// Rows of a transaction that has put ops into the log.
fn large(world: &mut TestStore, client: u32, t: u32, rows: u32) {
    world.call(client, &Batch::begin(1)).ok();
    for row in 0..rows {
        world.call(client, &Batch::new(1).put(t, format!("large{row:03}"), [1; 100])).ok();
    }
}

#[test]
fn a_checkpoint_does_not_begin_while_a_commit_is_half_in_memory() {
    for calls in 0..12 {
        let mut world = TestStore::with(calls, Config { steps: 50, ..small() });
        let t = world.create("t", 1);
        large(&mut world, 0, t, 300);
        world.send(0, &Batch::new(1).commit());
        world.store.upkeep.checkpoints.is_wanted = true;
        assert!(!world.store.endings.applies.is_empty());
        for _ in 0..calls {
            wake(&mut world);
            assert!(
                world.store.upkeep.checkpoints.current.is_none()
                    || world.store.endings.applies.is_empty()
            );
        }
        // The commit is in the log, whatever a checkpoint has of it.
        world.restart();
        assert_eq!(world.all(t).len(), 300, "{calls}");
        world.idle();
        world.restart();
        assert_eq!(world.all(t).len(), 300, "{calls}");
    }
}

#[test]
fn a_large_transaction_that_ends_after_a_checkpoint_is_whole_and_nothing_before_is_done_again() {
    for end in [op::COMMIT, op::ROLLBACK, op::PREPARE] {
        let mut world = TestStore::with(1, small());
        let (t, u) = (world.create("t", 1), world.create("u", 1));
        world.call(1, &Batch::new(0).put(u, "gone", "1").commit()).ok();
        large(&mut world, 0, t, 20);
        // All this is behind the place where replay begins, and in the checkpoint.
        world.call(1, &Batch::new(0).op(op::TRUNCATE, (u, 0), 0, "", "", 0)).ok();
        world
            .call(1, &Batch::new(0).put(u, "stays", "2".repeat(90)).put(u, "x", "y").commit())
            .ok();
        world.call(1, &Batch::new(0).op(op::RENAME, (0, 0), 0, "u", "v", 0)).ok();
        world.call(1, &Batch::new(0).op(op::RENAME, (0, 0), 0, "v", "w", 0)).ok();
        let v = world.create("v", 1);
        world.call(1, &Batch::new(0).put(v, "v", "3").commit()).ok();
        world.call(1, &Batch::new(0).delete(u, "x").commit()).ok();
        world.call(2, &Batch::begin(1).put(u, "p", "4").named(op::PREPARE, "one")).ok();
        world.call(2, &Batch::new(0).named(op::COMMIT_PREPARED, "one")).ok();
        checkpoint(&mut world);
        let begun = world.store.db.txs.parked.values().find_map(|tx| tx.begun).unwrap();
        assert!(world.store.upkeep.checkpoints.replay_from == begun && begun != Place::default());
        world.call(1, &Batch::new(0).put(u, "after", "5").commit()).ok();
        let ask =
            Batch::new(1).op(end, (0, 0), 0, if end == op::PREPARE { "two" } else { "" }, "", 0);
        world.call(0, &ask).ok();
        for round in 0..3 {
            let usage = |world: &TestStore| {
                let segments = world.store.db.log.usage.segments.iter();
                segments.map(|(n, s)| (*n, s.values, s.live, s.pins > 0)).collect::<Vec<_>>()
            };
            let before = usage(&world);
            world.crash();
            assert_eq!(usage(&world), before, "{end} {round}");
            let rows = if end == op::COMMIT { 20 } else { 0 };
            assert_eq!(world.all(t).len(), rows, "{end} {round}");
            let keys: Vec<_> = world.all(u).into_iter().map(|r| r.0).collect();
            assert_eq!(keys, ["after", "p", "stays"]);
            assert_eq!(world.all(v).len(), 1);
            if round == 1 {
                checkpoint(&mut world);
            }
        }
        if end == op::PREPARE {
            world.call(0, &Batch::new(0).named(op::COMMIT_PREPARED, "two")).ok();
            world.crash();
            assert_eq!(world.all(t).len(), 20);
        }
    }
}

#[test]
fn a_large_prepared_transaction_holds_no_log_back_but_its_own_segments() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    large(&mut world, 0, t, 60);
    world.call(0, &Batch::new(1).named(op::PREPARE, "p")).ok();
    let last = world.store.db.log.end().segment;
    for i in 0..200 {
        let ask = Batch::new(0).put(t, "x", format!("{i}").repeat(80));
        world.call(1, &ask.commit()).ok();
        world.idle();
    }
    assert!(world.store.upkeep.checkpoints.replay_from.segment > last + 2);
    let segments = world.store.db.log.usage.segments.keys().copied().collect::<Vec<_>>();
    assert!(segments.len() < last as usize + 8, "{segments:?}");
    world.crash();
    world.call(2, &Batch::new(0).named(op::COMMIT_PREPARED, "p")).ok();
    assert_eq!(world.all(t).len(), 61);
}

#[test]
fn a_copy_of_the_files_between_two_calls_is_the_committed_state() {
    for seed in 0..6 {
        let steps = [500, 20][seed as usize % 2];
        let mut world = TestStore::with(seed, Config { steps, ..small() });
        let t = world.create("t", 1);
        let mut rng = sdk::testing::Rng::new(seed);
        let (mut rows, mut prepared) = (std::collections::BTreeMap::new(), None);
        for i in 0..120_u64 {
            // An open transaction, which is in no copy.
            if i % 10 == 0 {
                large(&mut world, 0, t, 30);
            } else if i % 10 == 9 {
                world.call(0, &Batch::new(1).rollback()).ok();
            }
            let (key, value) = (format!("k{}", rng.below(30)), format!("{i}").repeat(60));
            world.call(1, &Batch::new(0).put(t, &key, &value).commit()).ok();
            rows.insert(key, value);
            if i % 25 == 20 {
                let name = format!("p{i}");
                let ask = Batch::begin(2).put(t, format!("of {name}"), [5; 100]);
                world.call(2, &ask.named(op::PREPARE, &name)).ok();
                prepared = Some(name);
            } else if i % 25 == 24
                && let Some(name) = prepared.take()
            {
                world.call(2, &Batch::new(0).named(op::COMMIT_PREPARED, &name)).ok();
                rows.insert(format!("of {name}"), String::from_utf8(vec![5; 100]).unwrap());
            }
            (0..rng.below(4)).for_each(|_| wake(&mut world));
            let mut copy = TestHost::new(1);
            for name in world.host.names().iter().filter(|name| !name.starts_with("reserve")) {
                copy.put(name, world.host.bytes(name).unwrap());
            }
            let mut other = TestStore::with(1, world.config);
            other.host = copy;
            other.start().unwrap();
            assert!(other.all(t).into_iter().eq(rows.clone()), "{seed} {i}");
            let names = other.call(0, &Batch::new(0).named(op::LIST_PREPARED, "")).ok().rows(0);
            assert_eq!(names.into_iter().map(|n| n.0).next(), prepared);
        }
    }
}

#[test]
fn files_are_appended_to_and_never_written_to() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    let mut before = std::collections::BTreeMap::<String, Vec<u8>>::new();
    for i in 0..300 {
        let ask = Batch::new(0).put(t, format!("{}", i % 30), format!("{i}").repeat(80));
        world.call(0, &ask.commit()).ok();
        wake(&mut world);
        let names = world.host.names().into_iter().filter(|name| !name.starts_with("reserve"));
        let now: std::collections::BTreeMap<_, _> =
            names.map(|name| (name.clone(), world.host.bytes(&name).unwrap().clone())).collect();
        for (name, bytes) in &before {
            let now: Option<&Vec<u8>> = now.get(name);
            assert!(now.is_none_or(|now| now.starts_with(bytes)), "{name}");
        }
        before = now;
    }
    assert!(world.store.upkeep.checkpoints.number > 3 && !world.host.calls.contains_key("write"));
}
