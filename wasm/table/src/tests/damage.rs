//! Bytes that were changed, requests that make no sense.

use guest_abi::table::{op, op_flag, status};
use proptest::prelude::*;
use sdk::testing::{EventBytes, TestHost};
use sdk::{Errno, Host};

use crate::testing::{Batch, BatchReply, TestStore, filter, small};
use crate::{Config, Store};

fn filled(config: Config) -> (TestStore, u32) {
    let mut world = TestStore::with(3, config);
    let t = world.create("t", 2);
    for i in 0..6 {
        let value = format!("{i}").repeat(1 + i * 30);
        let ask = Batch::new(0).put(t, format!("key {}", i % 4), value).put(t, "zero", [0; 80]);
        world.call(1, &ask.commit()).ok();
    }
    world.call(2, &Batch::begin(1).put(t, "p", "q").named(op::PREPARE, "name")).ok();
    (world, t)
}

/// All that a store says of itself.
fn observe(world: &mut TestStore, t: u32) -> Vec<BatchReply> {
    let asks = [
        Batch::new(0).scan(t),
        Batch::new(0).named(op::LIST_PREPARED, ""),
        Batch::new(0).named(op::LIST, ""),
        Batch::new(0).op(op::STAT, (t, 0), 0, "", "", 0),
    ];
    asks.iter().map(|ask| world.call(5, ask)).collect()
}

#[test]
fn every_changed_byte_of_the_log_is_an_error() {
    let (mut world, t) = filled(Config::default());
    let whole = observe(&mut world, t);
    let bytes = world.host.bytes("log-0000000000000001").unwrap().clone();
    let mut refused = 0;
    for at in 0..bytes.len() {
        for change in [0x01, 0x80, bytes[at]] {
            let mut changed = bytes.clone();
            changed[at] ^= change;
            if changed == bytes {
                continue;
            }
            let mut host = TestHost::new(1);
            host.put("log-0000000000000001", &changed);
            world.host = host;
            match world.start() {
                Err(errno) => {
                    refused += 1;
                    assert_eq!(errno, Errno::BADMSG);
                    assert!(world.host.lines[0].1.contains("cannot start"));
                    // Nothing is cut off or removed.
                    assert_eq!(world.host.bytes("log-0000000000000001"), Some(&changed));
                }
                // Only what closes a record is not needed.
                Ok(()) => assert_eq!(observe(&mut world, t), whole, "byte {at} ^ {change}"),
            }
        }
    }
    assert!(refused > bytes.len() * 2);
}

#[test]
fn what_was_durable_and_reads_as_zeroes_is_an_error_and_what_was_not_is_cut_off() {
    for synced in [false, true] {
        let (mut world, t) = filled(Config::default());
        if synced {
            world.store.db.log.sync(&mut world.host).unwrap();
        }
        world.call(1, &Batch::new(0).put(t, "last", "one").commit()).ok();
        let mut bytes = world.host.bytes("log-0000000000000001").unwrap().clone();
        bytes[600..1200].fill(0);
        world.host = TestHost::new(1);
        world.host.put("log-0000000000000001", &bytes);
        assert_eq!(world.start().is_err(), synced);
        let text = if synced { "what was durable is gone" } else { "cut off" };
        assert!(world.host.lines[0].1.contains(text), "{:?}", world.host.lines);
    }
}

#[test]
fn a_log_that_ends_early_is_cut_to_whole_records() {
    let (mut world, t) = filled(Config::default());
    let bytes = world.host.bytes("log-0000000000000001").unwrap().clone();
    let mut seen = 0;
    for len in (0..bytes.len()).rev() {
        let mut host = TestHost::new(1);
        host.put("log-0000000000000001", &bytes[..len]);
        world.host = host;
        world.start().unwrap();
        let rows = world.call(5, &Batch::new(0).scan(t));
        seen += usize::from(rows.status == status::OK);
        let create = Batch::new(0).op(op::CREATE, (0, 0), 0, "other", "", 1);
        world.call(5, &create).ok();
        world.restart();
        world.call(5, &Batch::new(0).named(op::OPEN, "other")).ok();
    }
    assert!(seen > bytes.len() / 2);
}

#[test]
fn changed_bytes_of_checkpoints_and_files_that_are_missing_are_errors() {
    let (mut world, t) = filled(small());
    for i in 0..60 {
        let ask = Batch::new(0).put(t, format!("more {i}"), "m".repeat(300));
        world.call(1, &ask.commit()).ok();
    }
    world.idle();
    world.restart();
    let whole = world.host.clone();
    let mut names = whole.names();
    names.retain(|name| !name.starts_with("reserve"));
    let checkpoint = names.iter().find(|n| n.starts_with("checkpoint")).unwrap().clone();
    let bytes = whole.bytes(&checkpoint).unwrap().clone();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 0x10;
        world.host = whole.clone();
        world.host.put(&checkpoint, &changed);
        match world.start() {
            Err(errno) => assert_eq!(errno, Errno::BADMSG),
            Ok(()) => assert_eq!(world.all(t).len(), 65, "byte {at}"),
        }
    }
    let mut errors = 0;
    for name in &names {
        world.host = whole.clone();
        world.host.remove(name).unwrap();
        match world.start() {
            Err(_) => errors += 1,
            // The last segment may be one that a power cut has taken: nothing was in it.
            Ok(()) if Some(name) == names.last() => assert!(world.all(t).len() <= 65),
            // The whole log is as good as a checkpoint.
            Ok(()) => assert!(*name == checkpoint && world.all(t).len() == 65, "{name}"),
        }
    }
    assert!(errors + 2 >= names.len(), "{errors} of {names:?}");
}

#[test]
fn a_value_whose_bytes_were_changed_is_not_given_out() {
    let (mut world, t) = filled(Config::default());
    let log = "log-0000000000000001";
    let mut bytes = world.host.bytes(log).unwrap().clone();
    let at = bytes.windows(9).rposition(|w| w == b"555555555").unwrap();
    bytes[at] ^= 1;
    let file = world.host.open(log, 0).unwrap();
    world.host.write(file, 0, &bytes).unwrap();
    let said = world.call(1, &Batch::new(0).get(t, "key 1")).is(status::STORAGE);
    assert!(said.text.contains("were changed"), "{}", said.text);
    world.call(1, &Batch::new(0).scan(t)).is(status::STORAGE);
    world.call(1, &Batch::new(0).get(t, "key 2")).ok();
    world.call(1, &Batch::new(0).put(t, "key 1", "anew").commit()).ok();
    world.call(1, &Batch::new(0).scan(t)).ok();
}

#[test]
fn requests_that_make_no_sense_are_refused_with_a_reason() {
    let (mut world, t) = filled(Config::default());
    let get = Batch::new(0).get(t, "key 1");
    let mut bad = vec![
        Batch::new(0).flags(0x10),
        Batch::new(0).op(0, (t, 0), 0, "", "", 0),
        Batch::new(0).op(30, (t, 0), 0, "", "", 0),
        Batch::new(0).op(op::SYNC, (0, 0), 0, "", "", 0).commit(),
        Batch::begin(9).op(op::SYNC, (0, 0), 0, "", "", 0),
        Batch::begin(9).op(op::VERSION, (0, 0), 0, "", "", 0),
        Batch::new(0).op(op::GET, (t, 0), op_flag::RELAXED, "", "", 0),
        Batch::new(0).op(op::GET, (t, 0), 0x8000, "", "", 0),
        Batch::new(0).op(op::GET, (t, 0), op_flag::SHARED | op_flag::EXCLUSIVE, "", "", 0),
        Batch::new(0).commit().get(t, "a"),
        Batch::new(0).op(op::LIST, (0, 0), 0, "", "", 0).get(t, "a"),
        Batch::begin(9).op(op::CREATE, (0, 0), 0, "name", "", 1),
        Batch::new(0).op(op::CREATE, (0, 0), 0, "name", "", 0),
        Batch::new(0).op(op::CREATE, (0, 0), 0, "name", "", 66),
        Batch::new(0).op(op::CREATE, (0, 0), 0, "", "", 1),
        Batch::new(0).op(op::LOCK, (t, 0), 0, "", "", 0),
        Batch::new(0).op(op::NEXT_AUTO, (t, 0), 0, "", "", 0),
        Batch::new(0).put(t, "a", "b"),
        Batch::begin(0),
        Batch::begin(8).back_to(5),
    ];
    bad.push(Batch::new(8).save(3).op(op::RELEASE, (0, 0), 0, "", "", 4));
    for ask in bad {
        let said = world.call(1, &ask).is(status::BAD_REQUEST);
        assert!(said.text.len() > 10, "{}", said.text);
    }
    world.call(1, &Batch::begin(9)).is(status::BAD_REQUEST);
    for ask in [
        Batch::new(0).get(t, [0; (16 << 10) + 1]),
        Batch::new(0).op(op::CREATE, (0, 0), 0, [0; 513], "", 1),
        Batch::new(0).op(op::CREATE, (0, 0), 0, "x", [0; (64 << 10) + 1], 1),
        Batch::new(0).named(op::COMMIT_PREPARED, [0; 153]),
    ] {
        let said = world.call(1, &ask).is(status::LIMIT);
        assert!(said.text.contains("limit"), "{}", said.text);
    }
    world.call(1, &Batch::new(0).op(op::GET, (t, 2), 0, "", "", 0)).is(status::NO_TABLE);
    for cut in 0..get.bytes().len() {
        let events = EventBytes::new().request(1, 1000 + cut as u64, 0, &get.bytes()[..cut]);
        world.serve(&events);
        world.take_reply(1, 1000 + cut as u64).unwrap().is(status::BAD_REQUEST);
    }
    world.serve(&EventBytes::new().request(99, 1, 0, &get.bytes()));
    world.take_reply(99, 1).unwrap().is(status::BAD_REQUEST);
}

/// Ops that are almost right.
fn wild_ask() -> impl Strategy<Value = Vec<u8>> {
    let bytes = || prop::collection::vec(prop::sample::select(vec![0_u8, 1, b'a', 0xFF]), 0..6);
    let op = (0_u8..30, 0_u32..4, 0_u8..3, any::<u16>(), bytes(), bytes(), any::<u64>());
    let extra = |x: u64| if x.is_multiple_of(3) { x } else { x % 5 };
    let ops = prop::collection::vec(op, 0..6);
    (0_u64..3, any::<u16>(), ops, any::<bool>(), 0_u32..3).prop_map(
        move |(tx, flags, ops, wild, wait)| {
            let mut ask =
                Batch::new(tx).flags(if wild { flags & 15 } else { flags & 1 }).wait(wait);
            for (kind, table, index, flags, key, value, x) in ops {
                let flags = if wild { flags & 0x3FFF } else { flags & op_flag::NO_HIGH };
                let value = if matches!(kind, op::GET | op::DELETE) { vec![] } else { value };
                let small = |shift: u32, end: u32| (x >> shift) as u32 % end;
                let term = (small(0, 2) as u8, 1 + small(8, 6) as u8, small(16, 4), small(24, 3));
                let value = match kind == op::SCAN && flags & op_flag::FILTER != 0 {
                    true => filter(
                        &value,
                        small(32, 4),
                        &[(term.0, term.1, term.2, term.3, key.clone())],
                    ),
                    false => value,
                };
                ask = ask.op(kind, (table, index), flags, key, value, extra(x));
            }
            ask.bytes()
        },
    )
}

/// `CASES` makes it look longer.
fn cases(usual: u32) -> u32 {
    std::env::var("CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

fn throw(requests: &[(u32, u8, Vec<u8>)]) {
    let mut host = TestHost::new(5);
    let mut store = Store::start_with(&mut host, small()).unwrap();
    for client in 0..3 {
        host.serve(&mut store, &EventBytes::new().opened(client, [client as u8 + 1; 16])).unwrap();
    }
    let mut answered = 0;
    for (seq, (client, what, body)) in requests.iter().enumerate() {
        let seq = seq as u64 + 1;
        let mut events = EventBytes::new().request(*client, seq, u16::from(*what) & 3, body);
        if what & 4 != 0 {
            events = events.cancel(*client, seq.saturating_sub(u64::from(what >> 4)));
        }
        host.advance(1);
        host.serve(&mut store, &events).unwrap();
        host.release();
        answered += host.replies().len();
    }
    for _ in 0..1000 {
        host.advance(1);
        host.serve(&mut store, &EventBytes::new().wake()).unwrap();
        host.release();
        answered += host.replies().len();
    }
    assert_eq!(answered, requests.len(), "each request is answered, once");
    host.kill();
    Store::start_with(&mut host, small()).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: cases(100),
        failure_persistence: None,
        ..Default::default()
    })]

    #[test]
    fn no_request_stops_the_store(
        requests in prop::collection::vec((0_u32..3, any::<u8>(), wild_ask()), 1..60)
    ) {
        throw(&requests);
    }

    #[test]
    fn no_bytes_stop_the_store(
        mut requests in prop::collection::vec((0_u32..3, any::<u8>(), wild_ask()), 1..20),
        changes in prop::collection::vec((any::<usize>(), any::<usize>(), any::<u8>()), 1..40)
    ) {
        for (which, at, byte) in changes {
            let count = requests.len();
            let body = &mut requests[which % count].2;
            let len = body.len();
            body[at % len] = byte;
        }
        throw(&requests);
    }
}
