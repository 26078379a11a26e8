//! A full disk is got out of by what frees space, wherever it came.

use std::collections::BTreeMap;

use guest_abi::table::{op, status};
use sdk::Errno;
use sdk::testing::{Call, Rng};

use crate::Config;
use crate::testing::{Batch, BatchReply, TestStore, small};

/// A second goes by, and what can be done is done.
fn later(world: &mut TestStore) {
    world.host.advance(1000);
    world.idle();
}

/// Sends a batch that frees space: it may have to wait for a checkpoint, and not for ever.
fn freed(world: &mut TestStore, client: u32, ask: &Batch) -> BatchReply {
    let mut texts = Vec::new();
    for _ in 0..8 {
        let said = world.call(client, ask);
        texts.push(said.text.clone());
        if said.status != status::NO_SPACE {
            return said.ok();
        }
        later(world);
    }
    panic!("no space for what frees some: {texts:?} {:?}", world.host.lines);
}

/// Puts rows in until that fails for more than a second; how many.
fn fill(world: &mut TestStore, t: u32, len: usize) -> u32 {
    let (mut rows, mut failed) = (0, 0);
    while failed < 3 {
        let ask = Batch::new(0).put(t, format!("{rows:04}"), "v".repeat(len)).commit();
        let said = world.call(0, &ask);
        match said.status {
            status::OK => (rows, failed) = (rows + 1, 0),
            _ => failed += 1,
        }
        assert!(failed == 0 || said.is(status::NO_SPACE).text.contains("full"));
        if failed > 0 { later(world) } else { world.idle() }
    }
    rows
}

#[test]
fn deletions_get_a_store_out_of_a_full_disk() {
    for (limit, len) in (24_000..60_000).step_by(1777).flat_map(|limit| [(limit, 300), (limit, 9)])
    {
        let mut world = TestStore::with(limit, small());
        let t = world.create("t", 1);
        world.host.capacity_bytes = limit;
        world.call(1, &Batch::begin(1).put(t, "open", "x")).ok();
        let ask = Batch::begin(1).put(t, "prepared", "x").named(op::PREPARE, "p");
        world.call(2, &ask).ok();
        let rows = fill(&mut world, t, len);
        assert!(rows > 10, "{rows}");
        later(&mut world);
        // Reads go on, and a transaction can be undone.
        assert_eq!(world.all(t).len() as u32, rows);
        world.call(1, &Batch::new(1).rollback()).ok();
        freed(&mut world, 3, &Batch::new(0).named(op::ROLLBACK_PREPARED, "p"));
        for row in 0..rows {
            freed(&mut world, 3, &Batch::new(0).delete(t, format!("{row:04}")).commit());
            world.idle();
        }
        (0..5).for_each(|_| later(&mut world));
        // The space is there again, nearly all of it.
        let again = fill(&mut world, t, len);
        assert!(again + 25 + rows / 4 > rows, "{limit} {len}: {again} of {rows}");
        world.host.capacity_bytes = u64::MAX;
        world.crash();
        assert_eq!(world.all(t).len() as u32, again);
    }
}

#[test]
fn a_table_can_be_emptied_on_a_full_disk() {
    for kind in [op::TRUNCATE, op::DROP] {
        let mut world = TestStore::with(1, small());
        let t = world.create("t", 1);
        world.host.capacity_bytes = 50_000;
        let rows = fill(&mut world, t, 200);
        let ask = match kind {
            op::DROP => Batch::new(0).named(op::DROP, "t"),
            _ => Batch::new(0).op(kind, (t, 0), 0, "", "", 0),
        };
        freed(&mut world, 0, &ask);
        (0..5).for_each(|_| later(&mut world));
        let u = world.create("u", 1);
        let again = fill(&mut world, u, 200);
        assert!(again + 40 > rows, "{again} of {rows}");
    }
}

#[test]
fn while_the_reserve_is_missing_only_what_frees_space_is_written() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    world.call(0, &Batch::new(0).put(t, "a", "1").put(t, "b", "2").put(t, "c", "3").commit()).ok();
    world.idle();
    world.call(1, &Batch::begin(1).put(t, "x", "")).ok();
    world.call(4, &Batch::begin(1).delete(t, "c").save(1).put(t, "y", "").back_to(1)).ok();
    world.idle();
    world.host.capacity_bytes = world.host.used_bytes();
    // One deletion takes the reserve.
    world.call(2, &Batch::new(0).delete(t, "a").commit()).ok();
    // There is room for this, and it is not for this.
    world.host.capacity_bytes += 150;
    let said = world.call(0, &Batch::new(0).put(t, "d", "").commit()).is(status::NO_SPACE);
    assert!(said.text.contains("reads, deletions"), "{}", said.text);
    assert_eq!(said.done, 0);
    world.call(1, &Batch::new(1).commit()).is(status::NO_SPACE);
    world.call(2, &Batch::new(0).op(op::NEXT_AUTO, (t, 0), 0, "", "", 1)).is(status::NO_SPACE);
    world.call(2, &Batch::new(0).op(op::CREATE, (0, 0), 0, "u", "", 1)).is(status::NO_SPACE);
    let rename = Batch::new(0).op(op::RENAME, (0, 0), 0, "t", "w", 0);
    world.call(2, &rename).is(status::NO_SPACE);
    // What was undone does not count.
    world.call(4, &Batch::new(1).commit()).ok();
    assert_eq!(world.all(t), [("b".to_string(), "2".to_string())]);
    assert_eq!(world.host.wake_at_ms(), Some(sdk::Host::now_ms(&mut world.host) + 1000));
    world.host.capacity_bytes = u64::MAX;
    later(&mut world);
    world.call(1, &Batch::new(1).commit()).ok();
    world.call(0, &Batch::new(0).put(t, "d", "").commit()).ok();
    assert!(world.host.lines.iter().any(|(_, line)| line.contains("space on the disk again")));
    world.restart();
    assert_eq!(world.all(t).len(), 3);
}

#[test]
fn a_checkpoint_that_finds_no_room_has_the_reserve() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    for i in 0..40 {
        world.call(0, &Batch::new(0).put(t, format!("{i}"), "v".repeat(40)).commit()).ok();
    }
    world.idle();
    world.host.capacity_bytes = world.host.used_bytes();
    let before = world.store.upkeep.checkpoints.number;
    world.store.upkeep.checkpoints.is_wanted = true;
    world.serve(&sdk::testing::EventBytes::new().wake());
    world.idle();
    assert_eq!(world.store.upkeep.checkpoints.number, before);
    // Until it is there nothing else takes the room.
    world.call(0, &Batch::new(0).put(t, "x", "").commit()).is(status::NO_SPACE);
    world.store.upkeep.checkpoints.is_wanted = true;
    later(&mut world);
    assert!(world.store.upkeep.checkpoints.number > before, "{:?}", world.host.lines);
    world.crash();
    assert_eq!(world.all(t).len(), 40);
}

#[test]
fn a_reserve_whose_files_fail_stops_nothing() {
    for call in [Call::Open, Call::Append, Call::Truncate, Call::Len] {
        let mut world = TestStore::with(1, Config { reserve_bytes: 0, ..small() });
        let t = world.create("t", 1);
        world.store.db.config = small();
        world.store.db.log.reserve = Default::default();
        let files = world.host.names().into_iter().filter(|name| name.starts_with("reserve"));
        files.for_each(|name| sdk::Host::remove(&mut world.host, &name).unwrap());
        world.host.fail(Some(call), 0, 1, Errno::IO);
        world.serve(&sdk::testing::EventBytes::new().wake());
        world.idle();
        world.call(0, &Batch::new(0).put(t, "a", "1").commit()).ok();
        assert!(world.host.lines.iter().any(|(_, line)| line.contains("no reserve")), "{call:?}");
    }
}

/// One of many things; what becomes of the rows if it succeeds.
fn deed(
    rng: &mut Rng,
    t: u32,
    rows: &BTreeMap<String, String>,
) -> (Batch, BTreeMap<String, String>) {
    let (mut ask, mut after) = (Batch::new(0), rows.clone());
    let len = [5, 70, 300, 700][rng.below(4) as usize];
    match rng.below(10) {
        0 => return (Batch::new(0).op(op::TRUNCATE, (t, 0), 0, "", "", 0), BTreeMap::new()),
        1..=3 => {
            for key in rows.keys().take(1 + rng.below(3) as usize) {
                ask = ask.delete(t, key);
                after.remove(key);
            }
        }
        _ => {
            for _ in 0..1 + rng.below(4) {
                let (key, value) = (format!("k{}", rng.below(40)), format!("{}", rng.any()));
                let value = value + &"v".repeat(len);
                ask = ask.put(t, &key, &value);
                after.insert(key, value);
            }
        }
    }
    (ask.commit(), after)
}

#[test]
fn wherever_the_disk_gets_full_nothing_is_lost_and_all_goes_on() {
    let (mut fails, mut frees) = (0, 0);
    // Each limit stops another write first.
    for limit in (1200..30_000).step_by(61) {
        let (mut rng, mut world) = (Rng::new(limit), TestStore::with(limit, small()));
        let t = world.create("t", 1);
        let mut rows = BTreeMap::new();
        world.host.capacity_bytes = limit;
        for _ in 0..60 {
            let (ask, after) = deed(&mut rng, t, &rows);
            let said = world.call(0, &ask);
            if said.status == status::OK {
                frees += u32::from(fails > 0 && after.len() < rows.len());
                rows = after;
            } else {
                fails += 1;
                assert_eq!(said.status, status::NO_SPACE, "{}", said.text);
            }
            world.host.advance(rng.below(400));
            world.idle();
            assert!(world.all(t).into_iter().eq(rows.clone()));
        }
        if limit % 2 == 0 {
            world.host.capacity_bytes = u64::MAX;
            (0..3).for_each(|_| later(&mut world));
            world.call(0, &Batch::new(0).put(t, "last", "1").commit()).ok();
            rows.insert("last".into(), "1".into());
        }
        world.crash();
        assert!(world.all(t).into_iter().eq(rows));
    }
    assert!(fails > 1000 && frees > 1000, "{fails} {frees}");
}
