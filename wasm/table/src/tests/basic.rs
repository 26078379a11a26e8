use guest_abi::table::{limits, op, op_flag, reply_flag, status};

use crate::testing::{Batch, TestStore, small};

fn pairs(of: &[(&str, &str)]) -> Vec<(String, String)> {
    of.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect()
}

#[test]
fn rows_are_inserted_read_updated_and_deleted() {
    let mut world = TestStore::new();
    let t = world.create("a", 1);
    let said =
        world.call(1, &Batch::new(0).insert(t, "k1", "v1").insert(t, "k2", "v2").commit()).ok();
    assert_eq!((said.done, said.flags), (3, reply_flag::ENDED));
    assert_eq!(world.all(t), pairs(&[("k1", "v1"), ("k2", "v2")]));
    let big = "x".repeat(100_000);
    world
        .call(1, &Batch::new(0).update(t, "k1", &big).delete(t, "k2").put(t, "k3", "v3").commit())
        .ok();
    assert_eq!(world.all(t), pairs(&[("k1", &big), ("k3", "v3")]));
    let said = world.call(1, &Batch::new(0).put(t, "k9", "").insert(t, "k1", "").commit());
    assert_eq!((said.status, said.done), (status::EXISTS, 1));
    world.call(1, &Batch::new(0).update(t, "k2", "").commit()).is(status::NOT_FOUND);
    world.call(1, &Batch::new(0).delete(t, "k2").commit()).is(status::NOT_FOUND);
    world.call(1, &Batch::new(0).get(t + 1, "k2")).is(status::NO_TABLE);
    let said = world.call(1, &Batch::new(0).get(t, "k1").get(t, "k2").get(t, "k3")).ok();
    assert_eq!(said.value(0), Some(big.clone()));
    assert_eq!((said.value(1), said.value(2)), (None, Some("v3".into())));
    world.restart();
    assert_eq!(world.all(t), pairs(&[("k1", &big), ("k3", "v3")]));
    world.crash();
    assert_eq!(world.all(t), pairs(&[("k1", &big), ("k3", "v3")]));
}

#[test]
fn a_transaction_sees_its_own_writes_and_undoes_them() {
    let mut world = TestStore::with(1, small());
    let t = world.create("a", 1);
    let long = "w".repeat(300);
    world.call(0, &Batch::new(0).insert(t, "a", "1").insert(t, "b", "2").commit()).ok();
    world.call(1, &Batch::begin(7).put(t, "a", &long).insert(t, "c", "3").delete(t, "b")).ok();
    let said = world.call(1, &Batch::new(7).save(1).scan(t)).ok();
    assert_eq!(said.rows(0), pairs(&[("a", &long), ("c", "3")]));
    assert_eq!(world.all(t), pairs(&[("a", "1"), ("b", "2")]));
    for i in 0..20 {
        world.call(1, &Batch::new(7).put(t, format!("d{i}"), &long).put(t, "c", "4")).ok();
    }
    let said = world.call(1, &Batch::new(7).back_to(1).scan(t)).ok();
    assert_eq!(said.rows(0), pairs(&[("a", &long), ("c", "3")]));
    world.call(1, &Batch::new(7).put(t, "e", "5").save(2).put(t, "f", "6").back_to(2)).ok();
    world.call(1, &Batch::new(7).commit()).ok();
    assert_eq!(world.all(t), pairs(&[("a", &long), ("c", "3"), ("e", "5")]));
    world.restart();
    assert_eq!(world.all(t), pairs(&[("a", &long), ("c", "3"), ("e", "5")]));
    world.call(1, &Batch::begin(8).delete(t, "a").rollback()).ok();
    assert_eq!(world.all(t).len(), 3);
    world.call(1, &Batch::new(8).get(t, "a")).is(status::LOST);
}

#[test]
fn scans_have_bounds_directions_and_limits() {
    let mut world = TestStore::new();
    let t = world.create("a", 1);
    let mut ask = Batch::new(0);
    for key in ["a", "b", "ba", "bb", "c"] {
        ask = ask.insert(t, key, format!("v-{key}"));
    }
    world.call(0, &ask.commit()).ok();
    let mut keys = |flags, low: &str, high: &str, extra| {
        let said = world.call(0, &Batch::new(0).op(op::SCAN, (t, 0), flags, low, high, extra)).ok();
        let keys: Vec<_> = said.rows(0).into_iter().map(|(k, _)| k).collect();
        (keys.join(" "), said.answers[0].more)
    };
    use op_flag::{BACKWARD, HIGH_OPEN, HIGH_PREFIX, LOW_OPEN, NO_HIGH};
    assert_eq!(keys(NO_HIGH, "", "", 0), ("a b ba bb c".into(), false));
    assert_eq!(keys(NO_HIGH | BACKWARD, "b", "", 0), ("c bb ba b".into(), false));
    assert_eq!(keys(0, "b", "bb", 0), ("b ba bb".into(), false));
    assert_eq!(keys(LOW_OPEN | HIGH_OPEN, "b", "bb", 0), ("ba".into(), false));
    assert_eq!(keys(HIGH_PREFIX, "b", "b", 0), ("b ba bb".into(), false));
    assert_eq!(keys(NO_HIGH, "", "", limits(2, 0)), ("a b".into(), true));
    assert_eq!(keys(NO_HIGH, "c", "", limits(1, 0)), ("c".into(), false));
    assert_eq!(keys(NO_HIGH, "", "", limits(0, 1)), ("a".into(), true));
    assert_eq!(keys(NO_HIGH, "", "", limits(0, 9)), ("a b".into(), true));
    assert_eq!(keys(0, "c", "a", 0), (String::new(), false));
    assert_eq!(keys(LOW_OPEN | HIGH_OPEN, "b", "b", 0), (String::new(), false));
}

#[test]
fn rows_are_fetched_through_a_secondary_index() {
    let mut world = TestStore::new();
    let t = world.create("a", 2);
    let mut ask = Batch::new(0);
    for (key, color) in [("1", "red"), ("2", "blue"), ("3", "red")] {
        ask = ask.insert(t, key, format!("row {key}"));
        let entry = format!("{color}{key}");
        ask = ask.op(op::INSERT, (t, 1), op_flag::NO_LOCK, entry, key, 0);
    }
    world.call(0, &ask.commit()).ok();
    let flags = op_flag::FETCH | op_flag::HIGH_PREFIX;
    for flags in [flags, flags | op_flag::SHARED, flags | op_flag::EXCLUSIVE] {
        let said = world.call(0, &Batch::new(0).op(op::SCAN, (t, 1), flags, "red", "red", 0)).ok();
        let row = |k: &str, p: &str, v: &str| (k.into(), p.into(), v.into());
        let rows = vec![row("red1", "1", "row 1"), row("red3", "3", "row 3")];
        assert_eq!(said.answers[0].rows, rows);
    }
}

#[test]
fn tables_are_made_found_renamed_emptied_and_removed() {
    let mut world = TestStore::new();
    let (a, b) = (world.create("a", 1), world.create("b", 3));
    let create = Batch::new(0).op(op::CREATE, (0, 0), 0, "a", "", 1);
    world.call(0, &create).is(status::TABLE_EXISTS);
    world.call(0, &Batch::new(0).insert(a, "k", "v").commit()).ok();
    let open = world.call(0, &Batch::new(0).named(op::OPEN, "b")).ok();
    assert_eq!(&open.answers[0].bytes[16..], b"definition");
    world.call(0, &Batch::new(0).op(op::RENAME, (0, 0), 0, "a", "b", 0)).is(status::TABLE_EXISTS);
    world.call(0, &Batch::new(0).op(op::RENAME, (0, 0), 0, "a", "c", 0)).ok();
    world.call(0, &Batch::new(0).named(op::OPEN, "a")).is(status::NO_TABLE);
    world.call(1, &Batch::begin(1).put(b, "x", "")).ok();
    world.call(0, &Batch::new(0).named(op::DROP, "b")).is(status::BUSY);
    world.call(1, &Batch::new(1).rollback()).ok();
    world.call(0, &Batch::new(0).named(op::DROP, "b")).ok();
    world.call(0, &Batch::new(0).op(op::REDEFINE, (a, 0), 0, "", "new", 0)).ok();
    world.restart();
    let list = world.call(0, &Batch::new(0).named(op::LIST, "")).ok();
    assert_eq!(list.rows(0), pairs(&[("c", "new")]));
    assert_eq!(world.all(a), pairs(&[("k", "v")]));
    world.call(0, &Batch::new(0).op(op::TRUNCATE, (a, 0), 0, "", "", 0)).ok();
    assert_eq!(world.all(a), []);
    world.call(0, &Batch::new(0).insert(a, "k", "2").commit()).ok();
    world.restart();
    assert_eq!(world.all(a), pairs(&[("k", "2")]));
    assert!(world.create("b", 1) > b);
}

#[test]
fn counters_never_give_a_value_twice() {
    let mut world = TestStore::new();
    let t = world.create("a", 1);
    let next = |world: &mut TestStore, n| {
        let said = world.call(1, &Batch::new(0).op(op::NEXT_AUTO, (t, 0), 0, "", "", n)).ok();
        u64::from_le_bytes(said.answers[0].bytes[..8].try_into().unwrap())
    };
    assert_eq!(next(&mut world, 1), 1);
    assert_eq!(next(&mut world, 10), 2);
    assert_eq!(next(&mut world, 1), 12);
    let raise = Batch::new(0).op(op::RAISE_AUTO, (t, 0), 0, "", "", 5000);
    world.call(1, &raise).ok();
    assert_eq!(next(&mut world, 1), 5000);
    world.restart();
    let after = next(&mut world, 1);
    assert!((5001..10_000).contains(&after), "{after}");
    next(&mut world, u64::MAX - 1_000_000);
    let too_many = Batch::new(0).op(op::NEXT_AUTO, (t, 0), 0, "", "", u64::MAX);
    world.call(1, &too_many).is(status::LIMIT);
}

#[test]
fn statistics_and_estimates_say_how_much_there_is() {
    let mut world = TestStore::new();
    let t = world.create("a", 1);
    for group in 0..10_u32 {
        let mut ask = Batch::new(0);
        for i in 0..1000_u32 {
            ask = ask.insert(t, (group * 1000 + i).to_be_bytes(), "value");
        }
        world.call(0, &ask.commit()).ok();
    }
    let stat = world.call(0, &Batch::new(0).op(op::STAT, (t, 0), 0, "", "", 0)).ok();
    let number =
        |i: usize| u64::from_le_bytes(stat.answers[0].bytes[i * 8..][..8].try_into().unwrap());
    assert_eq!([number(0), number(1), number(2)], [10_000, 40_000, 50_000]);
    let mut estimate = |low: u32, high: u32| {
        let (low, high) = (low.to_be_bytes(), high.to_be_bytes());
        let ask = Batch::new(0).op(op::ESTIMATE, (t, 0), op_flag::HIGH_OPEN, low, high, 0);
        let bytes = world.call(0, &ask).ok().answers[0].bytes.clone();
        let number = |i: usize| u64::from_le_bytes(bytes[i * 8..][..8].try_into().unwrap());
        (number(0), number(1))
    };
    assert_eq!(estimate(100, 200), (100, 1));
    assert_eq!(estimate(0, 1000), (1000, 1));
    let (entries, exact) = estimate(1000, 9000);
    assert!(exact == 0 && (7000..9000).contains(&entries), "{entries} {exact}");
    assert_eq!(estimate(9, 3), (0, 1));
}
