//! Disks that are full or fail, memory that is used up.

use guest_abi::table::{op, status};
use sdk::Errno;
use sdk::testing::{Call, EventBytes};

use crate::Config;
use crate::testing::{Batch, TestStore, small};

#[test]
fn a_full_disk_is_an_error_that_passes() {
    // Without a reserve.
    let mut world = TestStore::with(1, Config { reserve_bytes: 0, ..small() });
    let t = world.create("t", 1);
    world.call(0, &Batch::new(0).put(t, "a", "1").commit()).ok();
    world.call(1, &Batch::begin(1).put(t, "b", "2")).ok();
    world.host.capacity_bytes = world.host.used_bytes() + 20;
    let said = world.call(0, &Batch::new(0).put(t, "a", "3").commit()).is(status::NO_SPACE);
    assert_eq!(said.done, 1);
    // A transaction's commit fails, and it is still there.
    let said = world.call(1, &Batch::new(1).commit()).is(status::NO_SPACE);
    assert_eq!(said.flags, 0);
    world.call(1, &Batch::new(1).get(t, "b")).ok();
    // One that has to put ops into the log before its commit stops, and keeps what it had.
    world.call(2, &Batch::begin(2).put(t, "c", "c".repeat(400))).ok();
    world.call(2, &Batch::new(2).put(t, "d", "d".repeat(400))).is(status::NO_SPACE);
    assert_eq!(world.call(2, &Batch::new(2).scan(t)).ok().rows(0).len(), 2);
    world.call(0, &Batch::new(0).op(op::CREATE, (0, 0), 0, "u", "", 1)).is(status::NO_SPACE);
    world.call(3, &Batch::begin(3).put(t, "e", "").named(op::PREPARE, "p")).is(status::NO_SPACE);
    world.call(3, &Batch::new(3).rollback()).ok();
    // Once there is space again, all goes on within a second.
    world.host.capacity_bytes = u64::MAX;
    world.host.advance(1000);
    world.idle();
    world.call(1, &Batch::new(1).commit()).ok();
    world.call(2, &Batch::new(2).commit()).ok();
    world.call(3, &Batch::begin(4).put(t, "e", "").named(op::PREPARE, "p")).ok();
    assert_eq!(world.all(t).len(), 3);
    world.crash();
    assert_eq!(world.all(t)[0].1, "1");
    assert_eq!(world.all(t).len(), 3);
}

#[test]
fn of_commits_that_do_not_fit_together_those_are_done_that_fit_alone() {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    world.idle();
    world.host.capacity_bytes = world.host.used_bytes() + 600;
    let ask = |len: usize| Batch::new(0).put(t, format!("{len}"), "x".repeat(len)).commit().bytes();
    let events = EventBytes::new()
        .request(3, 10, 0, &ask(901))
        .request(0, 10, 0, &ask(100))
        .request(1, 10, 0, &ask(900))
        .request(2, 10, 0, &ask(101));
    world.serve(&events);
    world.wait(3, 10).is(status::NO_SPACE);
    world.wait(0, 10).ok();
    world.wait(1, 10).is(status::NO_SPACE);
    world.wait(2, 10).ok();
    world.restart();
    assert_eq!(world.all(t).len(), 2);
    assert_eq!(world.store.db.locks.len(), 0);
}

#[test]
fn a_disk_that_fails_ends_all_writing_until_the_next_start() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    world.call(0, &Batch::new(0).put(t, "a", "1").commit()).ok();
    world.call(1, &Batch::begin(1).put(t, "b", "2")).ok();
    world.host.fail(Some(Call::Append), 0, 1, Errno::IO);
    world.call(0, &Batch::new(0).put(t, "a", "3").commit()).is(status::STORAGE);
    let said = world.call(0, &Batch::new(0).put(t, "a", "3").commit()).is(status::STORAGE);
    assert!(said.text.contains("since"), "{}", said.text);
    world.call(1, &Batch::new(1).commit()).is(status::STORAGE);
    world.call(2, &Batch::new(0).op(op::NEXT_AUTO, (t, 0), 0, "", "", 1)).is(status::STORAGE);
    world.call(1, &Batch::new(1).rollback()).ok();
    assert_eq!(world.all(t)[0].1, "1");
    world.crash();
    world.call(0, &Batch::new(0).put(t, "a", "4").commit()).ok();
    assert_eq!(world.all(t), [("a".to_string(), "4".to_string())]);
}

#[test]
fn each_call_of_the_host_may_fail_once() {
    for errno in [Errno::NOSPC, Errno::IO] {
        let mut all = 0;
        for nth in 0.. {
            let mut world = TestStore::with(nth, small());
            let t = world.create("t", 1);
            world.host.fail(None, nth, 1, errno);
            let calls: u64 = world.host.calls.values().sum();
            let mut model = std::collections::BTreeMap::new();
            for i in 0..60 {
                let (key, value) = (format!("k{}", i % 7), format!("{i}").repeat(100));
                let said = world.call(i % 3, &Batch::new(0).put(t, &key, &value).commit());
                if said.status == status::OK {
                    model.insert(key, value);
                } else {
                    assert!([status::NO_SPACE, status::STORAGE].contains(&said.status));
                }
                // A reserve that could not be taken is taken a second later.
                world.host.advance(300);
                world.idle();
            }
            let rows: Vec<_> = model.into_iter().collect();
            let after: u64 = world.host.calls.values().sum();
            world.host.heal();
            if errno == Errno::NOSPC {
                assert_eq!(world.all(t), rows);
            }
            world.crash();
            assert_eq!(world.all(t), rows, "call {nth}");
            all = nth;
            if after - calls <= nth {
                break;
            }
        }
        assert!(all > 80, "{all}");
    }
}

#[test]
fn where_the_host_allows_no_more_memory_writes_fail_and_nothing_stops() {
    static ASKED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let has_room = |_| ASKED.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 2;
    let mut world = TestStore::with(1, Config { has_room, ..Config::default() });
    let t = world.create("t", 1);
    let mut rows = 0_u32;
    let key = |row: u32| [&row.to_be_bytes()[..], &[7; 15_000]].concat();
    while world.call(0, &Batch::new(0).put(t, key(rows), "").commit()).status == status::OK {
        rows += 1;
    }
    assert!((2000..2300).contains(&rows), "{rows}");
    world.call(0, &Batch::new(0).put(t, key(0), "").commit()).is(status::LIMIT);
    world.call(0, &Batch::new(0).delete(t, key(0)).commit()).ok();
    world.call(0, &Batch::new(0).get(t, key(1))).ok();
}

#[test]
fn where_there_is_memory_again_writes_go_on() {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
    static ASKED: AtomicUsize = AtomicUsize::new(0);
    static ROOM: AtomicBool = AtomicBool::new(true);
    let has_room = |_| {
        ASKED.fetch_add(1, Relaxed);
        ROOM.load(Relaxed)
    };
    let mut world = TestStore::with(1, Config { has_room, reserve_bytes: 0, ..Config::default() });
    let t = world.create("t", 1);
    let key = |row: u32| [&row.to_be_bytes()[..], &[7; 15_000]].concat();
    let put =
        |world: &mut TestStore, row| world.call(0, &Batch::new(0).put(t, key(row), "").commit());
    (0..3000).for_each(|row| drop(put(&mut world, row).ok()));
    // 45 MB: it was asked for each 16 MiB, not for each row.
    assert!((3..6).contains(&ASKED.load(Relaxed)), "{ASKED:?}");
    ROOM.store(false, Relaxed);
    let first = (3000..).find(|row| put(&mut world, *row).status != status::OK).unwrap();
    let said = put(&mut world, first).is(status::LIMIT);
    assert!(said.text.contains("kept free"), "{}", said.text);
    // An open transaction goes on with what it has.
    world.call(1, &Batch::begin(1).get(t, key(1)).delete(t, key(2))).ok();
    world.call(1, &Batch::new(1).put(t, key(2), "")).is(status::LIMIT);
    world.call(1, &Batch::new(1).commit()).ok();
    ROOM.store(true, Relaxed);
    put(&mut world, first).ok();
    // A start without memory for what there is says so.
    ROOM.store(false, Relaxed);
    world.host.kill();
    assert_eq!(world.start(), Err(Errno::NOMEM));
    assert!(world.host.lines.last().unwrap().1.contains("memory"), "{:?}", world.host.lines);
    ROOM.store(true, Relaxed);
    world.start().unwrap();
    assert_eq!(world.store.db.catalog.index(t, 0).unwrap().entries, u64::from(first));
}

#[test]
fn locks_are_memory_too() {
    let mut world = TestStore::with(1, Config { reserve_bytes: 0, ..Config::default() });
    let t = world.create("t", 1);
    world.store.db.config.memory_bytes = 0;
    let most = crate::memory::SPARE_BYTES / crate::memory::LOCK_BYTES;
    world.call(0, &Batch::begin(1)).ok();
    let mut locked = 0;
    loop {
        let flags = guest_abi::table::op_flag::EXCLUSIVE;
        let ask = (0..20_000_u64)
            .fold(Batch::new(1), |ask, i| ask.get_for(t, (locked + i).to_be_bytes(), flags));
        let said = world.call(0, &ask);
        locked += u64::from(said.done);
        if said.status != status::OK {
            said.is(status::LIMIT);
            break;
        }
    }
    assert!((most - 100..most).contains(&locked), "{locked} of {most}");
    world.call(0, &Batch::new(1).rollback()).ok();
    world.idle();
    assert_eq!(world.store.db.locks.len(), 0);
    world.call(0, &Batch::begin(2).get_for(t, "x", guest_abi::table::op_flag::EXCLUSIVE)).ok();
}

#[test]
fn memory_has_a_limit_below_which_deletions_still_go() {
    let mut world = TestStore::with(1, Config { memory_bytes: 40_000, ..Config::default() });
    let t = world.create("t", 1);
    let (empty, mut rows) = (world.store.db.memory(), 0);
    loop {
        let said = world.call(0, &Batch::new(0).put(t, format!("{rows:05}"), "v").commit());
        if said.status == status::LIMIT {
            assert!(said.text.contains("memory"), "{}", said.text);
            break;
        }
        rows += 1;
    }
    assert!((100..1000).contains(&rows), "{rows}");
    for i in 0..rows {
        world.call(0, &Batch::new(0).delete(t, format!("{i:05}")).commit()).ok();
    }
    assert_eq!(world.store.db.memory(), empty);
    // A transaction's memory counts, and comes back.
    let mut tx = 1;
    for _ in 0..3 {
        tx += 1;
        world.call(1, &Batch::begin(tx)).ok();
        let status = (0..).map(|i| {
            let ask = Batch::new(tx).save(i + 1).put(t, format!("{:05}", i % 10), "v");
            world.call(1, &ask).status
        });
        assert_eq!(status.into_iter().find(|s| *s != status::OK), Some(status::LIMIT));
        world.call(1, &Batch::new(tx).rollback()).ok();
        assert_eq!(world.store.db.memory(), empty);
    }
}
