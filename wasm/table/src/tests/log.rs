//! Logs that no store of ours has written: their records are whole, what is in them is not.

use sdk::testing::{EventBytes, Rng, TestHost};
use sdk::{Host, open};

use crate::Store;
use crate::record::{self, Reader, kind};
use crate::testing::{Batch, TestStore, small};

/// Kind and body.
type Record = (u32, Vec<u8>);

/// The records of a file.
fn records(host: &mut TestHost, name: &str, number: u32) -> Vec<Record> {
    let file = host.open(name, 0).unwrap();
    let mut reader = Reader::new(host, file, number, 0).unwrap();
    let mut all = Vec::new();
    while let Ok((head, _)) = reader.next(host) {
        all.push((head.kind, reader.body().to_vec()));
    }
    all
}

fn write(host: &mut TestHost, name: &str, number: u32, first: u64, records: &[Record]) {
    let file = host.open(name, open::CREATE | open::TRUNCATE).unwrap();
    let mut bytes = Vec::new();
    for (i, (kind, body)) in records.iter().enumerate() {
        let at = record::begin(&mut bytes);
        bytes.extend_from_slice(body);
        record::seal(&mut bytes, at, *kind, number, 0, first + i as u64);
    }
    host.append(file, &bytes).unwrap();
    host.sync_all();
}

/// A log with records of all kinds, and a checkpoint.
fn samples() -> [Vec<Record>; 2] {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 2);
    world.call(
        1,
        &Batch::begin(1).put(t, "p", "q".repeat(90)).named(guest_abi::table::op::PREPARE, "n"),
    );
    let ask = Batch::begin(1).put(t, "s", "s".repeat(600)).save(1).put(t, "s2", "s".repeat(600));
    world.call(2, &ask).ok();
    for i in 0..3 {
        world.call(0, &Batch::new(0).put(t, "k", format!("{i}")).commit()).ok();
    }
    world.call(2, &Batch::new(1).back_to(1).put(t, "u", "u".repeat(600)).commit()).ok();
    let mut log = records(&mut world.host, "log-0000000000000001", 1);
    for i in 0..70 {
        let key = if i % 9 == 0 { format!("{i}") } else { "k".into() };
        world.call(0, &Batch::new(0).put(t, key, "v".repeat(150)).commit()).ok();
        world.idle();
    }
    let host = &mut world.host;
    let mut checkpoint = Vec::new();
    for name in host.names().into_iter().filter(|name| !name.starts_with("reserve")) {
        let number = u32::from_str_radix(&name[name.len() - 16..], 16).unwrap();
        let found = records(host, &name, number);
        assert!(!found.is_empty());
        if name.starts_with("log") { log.extend(found) } else { checkpoint = found }
    }
    for kind in [kind::COMMIT, kind::SPILL, kind::MOVED] {
        assert!(log.iter().any(|(k, _)| *k == kind), "{kind}");
    }
    [log, checkpoint]
}

fn bend(rng: &mut Rng, records: &mut Vec<Record>) {
    let which = rng.below(records.len() as u64) as usize;
    let (kind, body) = &mut records[which];
    let len = body.len() as u64;
    match rng.below(8) {
        0 => body.truncate(rng.below(len + 1) as usize),
        1 => body.extend((0..rng.below(40)).map(|_| rng.any() as u8)),
        2 => *kind = rng.below(24) as u32,
        3 => drop(records.remove(which)),
        4 => {
            let other = records[rng.below(records.len() as u64) as usize].clone();
            records.insert(which, other);
        }
        _ if len > 0 => {
            // The beginning has most of what matters.
            let end = if rng.below(2) == 0 { len.min(80) } else { len };
            body[rng.below(end) as usize] = [0, 1, 0xFF, rng.any() as u8][rng.below(4) as usize];
        }
        _ => {}
    }
}

/// Whether the store started; if it did, it answers every request and works on.
fn start(host: &mut TestHost) -> bool {
    let Ok(mut store) = Store::start_with(host, small()) else { return false };
    let events = EventBytes::new().opened(0, [1; 16]);
    let ask = |table| Batch::new(0).scan(table).put(table, "k", "v".repeat(100)).commit().bytes();
    let events = (1..4).fold(events, |e, t| e.request(0, u64::from(t), 0, &ask(t)));
    host.serve(&mut store, &events).unwrap();
    for _ in 0..100 {
        host.advance(1);
        host.serve(&mut store, &EventBytes::new().wake()).unwrap();
    }
    host.release();
    assert_eq!(host.replies().len(), 3);
    true
}

#[test]
fn no_log_and_no_checkpoint_stops_the_store_in_the_middle() {
    let [log, checkpoint] = samples();
    let mut started = [[0; 2]; 2];
    for seed in 0..2000 {
        let (mut rng, mut host) = (Rng::new(seed), TestHost::new(seed));
        let which = usize::from(rng.below(2) == 0);
        let (mut log, mut checkpoint) = (log.clone(), checkpoint.clone());
        if which == 1 {
            // All of the log's segments are there, empty.
            let head = &mut checkpoint[0].1;
            head[8..12].fill(0);
            head[16..20].fill(0);
            head.copy_within(12..16, 40);
            for segment in 1..60 {
                let name = format!("log-{segment:016x}");
                write(&mut host, &name, segment, u64::from(segment), &log[..1]);
            }
        }
        for _ in 0..rng.below(4) {
            bend(&mut rng, if which == 1 { &mut checkpoint } else { &mut log });
        }
        match which {
            1 => write(&mut host, "checkpoint-0000000000000007", 7, 0, &checkpoint),
            _ => write(&mut host, "log-0000000000000001", 1, 0, &log),
        }
        started[which][usize::from(start(&mut host))] += 1;
    }
    assert!(started.iter().flatten().all(|n| *n > 100), "{started:?}");
}

#[test]
fn a_record_that_does_not_follow_the_checkpoint_is_an_error() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    for i in 0..20 {
        world.call(0, &Batch::new(0).put(t, format!("{i}"), "v".repeat(80)).commit()).ok();
    }
    world.store.upkeep.checkpoints.is_wanted = true;
    world.serve(&EventBytes::new().wake());
    world.idle();
    let (from, number) =
        (world.store.upkeep.checkpoints.replay_from, world.store.db.log.next_number());
    let name = format!("log-{:016x}", from.segment);
    let bytes = world.host.bytes(&name).unwrap()[..from.offset as usize].to_vec();
    for (more, is_fine) in [(0, true), (1, false)] {
        let mut log = bytes.clone();
        let at = record::begin(&mut log);
        record::seal(&mut log, at, kind::SEGMENT, from.segment, 0, number + more);
        world.host.put(&name, &log);
        assert_eq!(world.start().is_ok(), is_fine);
        let line = world.host.lines.last().map(|(_, line)| line.clone()).unwrap_or_default();
        assert!(is_fine || line.contains("instead of"), "{line}");
    }
}
