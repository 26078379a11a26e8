//! Filters: what they take, their limits, where they stop.

use guest_abi::table::{limits, op, op_flag, part, status, test};

use crate::Config;
use crate::testing::{Batch, Term, TestStore, filter, small};

const FLAGS: u16 = op_flag::FILTER | op_flag::NO_HIGH;

fn of_value(test: u8, offset: u32, operand: &str) -> Term {
    (part::VALUE, test, offset, operand.len() as u32, operand.into())
}

fn of_key(test: u8, offset: u32, operand: &str) -> Term {
    (part::KEY, test, offset, operand.len() as u32, operand.into())
}

/// Rows 000 to 999 with values of 100 bytes: the last digit of the key, and then others.
fn filled(config: Config) -> (TestStore, u32) {
    let mut world = TestStore::with(1, config);
    let t = world.create("t", 2);
    for group in 0..10 {
        let ask = (group * 100..group * 100 + 100).fold(Batch::new(0), |ask, i| {
            let (key, secondary) = (format!("{i:03}"), format!("s{:03}", 999 - i));
            ask.put(t, &key, format!("{}{}", i % 10, "v".repeat(99))).op(
                op::PUT,
                (t, 1),
                op_flag::NO_LOCK,
                secondary,
                key,
                0,
            )
        });
        world.call(0, &ask.commit()).ok();
    }
    (world, t)
}

fn scan(t: u32, flags: u16, extra: u64, examine: u32, terms: &[Term]) -> Batch {
    Batch::new(0).op(op::SCAN, (t, 0), FLAGS | flags, "", filter("", examine, terms), extra)
}

#[test]
fn only_what_matches_is_sent_and_counts() {
    let (mut world, t) = filled(Config::default());
    let seven = of_value(test::EQUAL, 0, "7");
    let said = world.call(1, &scan(t, 0, 0, 0, std::slice::from_ref(&seven))).ok();
    let rows = said.rows(0);
    assert_eq!(rows.len(), 100);
    assert!(rows.iter().all(|(k, v)| k.ends_with('7') && v.starts_with('7') && v.len() == 100));
    let said = world.call(1, &scan(t, 0, limits(3, 0), 0, std::slice::from_ref(&seven))).ok();
    assert_eq!(said.rows(0).iter().map(|r| &*r.0).collect::<Vec<_>>(), ["007", "017", "027"]);
    assert!(said.answers[0].more);
    let both = [seven.clone(), of_key(test::AT_LEAST, 0, "99"), of_key(test::ABOVE, 1, "8")];
    let said = world.call(1, &scan(t, op_flag::KEYS_ONLY, limits(3, 0), 0, &both)).ok();
    assert_eq!(said.rows(0), [("997".to_string(), String::new())]);
    assert!(!said.answers[0].more);
    // By what the row says, through another index, backward.
    let flags = FLAGS | op_flag::FETCH | op_flag::BACKWARD;
    let terms = [seven, of_key(test::BELOW, 0, "s9")];
    let ask = Batch::new(0).op(op::SCAN, (t, 1), flags, "", filter("", 0, &terms), limits(2, 0));
    let said = world.call(1, &ask).ok();
    let keys = said.answers[0].rows.iter().map(|r| (&r.0[..], &r.1[..])).collect::<Vec<_>>();
    assert_eq!(keys, [(&b"s892"[..], &b"107"[..]), (&b"s882"[..], &b"117"[..])]);
    // Without terms it is a scan.
    assert_eq!(world.call(1, &scan(t, 0, 0, 0, &[])).ok().rows(0).len(), 1000);
    // A piece beyond the end is empty, and so it is below all but the empty one.
    let beyond = [(part::VALUE, test::BELOW, 100, 7, b"x".to_vec())];
    assert_eq!(world.call(1, &scan(t, 0, 0, 0, &beyond)).ok().rows(0).len(), 1000);
    let beyond = [(part::VALUE, test::EQUAL, u32::MAX, u32::MAX, Vec::new())];
    assert_eq!(world.call(1, &scan(t, 0, 0, 0, &beyond)).ok().rows(0).len(), 1000);
}

#[test]
fn a_scan_stops_where_its_filter_may_look_at_no_more_and_goes_on_from_there() {
    for steps in [16_384, 50, 7] {
        for flags in [0, op_flag::BACKWARD, op_flag::SHARED] {
            let (mut world, t) = filled(Config { steps, ..Config::default() });
            let terms = [of_value(test::EQUAL, 0, "7")];
            let (mut keys, mut from, mut asked) = (Vec::new(), String::new(), 0);
            loop {
                asked += 1;
                let mut ask = Batch::new(0);
                let all = flags | FLAGS;
                ask = match (from.is_empty(), flags & op_flag::BACKWARD != 0) {
                    (true, _) => ask.op(op::SCAN, (t, 0), all, "", filter("", 64, &terms), 0),
                    (_, false) => {
                        let all = all | op_flag::LOW_OPEN;
                        ask.op(op::SCAN, (t, 0), all, &from, filter("", 64, &terms), 0)
                    }
                    (_, true) => {
                        let all = (all | op_flag::HIGH_OPEN) & !op_flag::NO_HIGH;
                        ask.op(op::SCAN, (t, 0), all, "", filter(&from, 64, &terms), 0)
                    }
                };
                let said = world.call(1, &ask).ok();
                keys.extend(said.rows(0).into_iter().map(|r| r.0));
                assert!(!said.answers[0].more);
                match &said.answers[0].stopped {
                    Some(key) => from = String::from_utf8(key.clone()).unwrap(),
                    None => break,
                }
            }
            assert_eq!(asked, 1000_usize.div_ceil(64), "{flags}");
            let mut expected: Vec<_> = (0..100).map(|i| format!("{:03}", i * 10 + 7)).collect();
            if flags & op_flag::BACKWARD != 0 {
                expected.reverse();
            }
            assert_eq!(keys, expected);
        }
    }
}

#[test]
fn what_does_not_match_is_not_locked() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    world.call(0, &Batch::new(0).put(t, "a", "1").put(t, "b", "2").put(t, "c", "1").commit()).ok();
    let terms = [of_value(test::EQUAL, 0, "1")];
    let flags = FLAGS | op_flag::EXCLUSIVE;
    let ask = Batch::begin(1).op(op::SCAN, (t, 0), flags, "", filter("", 0, &terms), 0);
    assert_eq!(world.call(1, &ask).ok().rows(0).len(), 2);
    world.call(2, &Batch::new(0).put(t, "b", "3").commit()).ok();
    world.call(2, &Batch::new(0).put(t, "c", "3").commit()).is(status::TIMEOUT);
    // One that waits looks again when it goes on.
    let wait = Batch::new(0).wait(1000).op(op::SCAN, (t, 0), flags, "", filter("", 0, &terms), 0);
    let seq = world.send(2, &wait);
    assert!(world.take_reply(2, seq).is_none());
    world.call(1, &Batch::new(1).put(t, "a", "5").commit()).ok();
    assert_eq!(world.wait(2, seq).ok().rows(0), [("c".to_string(), "1".to_string())]);
}

#[test]
fn filters_that_are_not_as_they_must_be_are_refused() {
    let mut world = TestStore::new();
    let t = world.create("t", 1);
    let whole = filter("high", 5, &[of_key(test::EQUAL, 0, "abc"), of_value(test::EQUAL, 0, "x")]);
    let ask = |value: &[u8]| Batch::new(0).op(op::SCAN, (t, 0), op_flag::FILTER, "", value, 0);
    world.call(0, &ask(&whole)).ok();
    for len in 0..whole.len() {
        world.call(0, &ask(&whole[..len])).is(status::BAD_REQUEST);
    }
    world.call(0, &ask(&[&whole[..], b"x"].concat())).is(status::BAD_REQUEST);
    // Reserved bits of the head and of a term, parts and tests that there are not.
    for (at, byte) in [(12, 1), (20, 2), (21, 0), (21, 7), (22, 1)] {
        let mut bad = whole.clone();
        bad[at] = byte;
        world.call(0, &ask(&bad)).is(status::BAD_REQUEST);
    }
    let many = vec![of_key(test::EQUAL, 0, ""); 17];
    world.call(0, &ask(&filter("", 0, &many[..16]))).ok();
    world.call(0, &ask(&filter("", 0, &many))).is(status::LIMIT);
    let long = [of_key(test::EQUAL, 0, &"x".repeat(65_520))];
    world.call(0, &ask(&filter("", 0, &long))).ok();
    let long = [of_key(test::EQUAL, 0, &"x".repeat(65_521))];
    world.call(0, &ask(&filter("", 0, &long))).is(status::LIMIT);
    world.call(0, &ask(&filter([0; (16 << 10) + 1], 0, &[]))).is(status::LIMIT);
    let plain = Batch::new(0).op(op::SCAN, (t, 0), 0, "", [0; (16 << 10) + 1], 0);
    world.call(0, &plain).is(status::LIMIT);
    world
        .call(0, &Batch::new(0).op(op::ESTIMATE, (t, 0), op_flag::FILTER, "", whole, 0))
        .is(status::BAD_REQUEST);
}

#[test]
fn a_filter_that_takes_little_holds_nobody_up() {
    let (mut world, t) = filled(Config { steps: 20, ..Config::default() });
    let long = world.send(1, &scan(t, 0, 0, 0, &[of_value(test::EQUAL, 0, "x")]));
    assert!(world.take_reply(1, long).is_none());
    world.call(2, &Batch::new(0).get(t, "007")).ok();
    assert!(world.take_reply(1, long).is_none());
    // It can be cancelled, and what it has read is no answer.
    world.serve(&sdk::testing::EventBytes::new().cancel(1, long));
    let said = world.wait(1, long).is(status::CANCELLED);
    assert!(said.answers.is_empty());
}
