//! Appends that fail in the middle, syncs that fail, segments that cannot be made.

use guest_abi::table::{op, status};
use sdk::testing::{Call, EventBytes};
use sdk::{Errno, Events, File, Host, Module};

use crate::testing::{Batch, TestStore, small};
use crate::{Config, Store};

/// A host whose next append leaves a part there, and fails.
struct Half<'a> {
    host: &'a mut dyn Host,
    part: usize,
    can_cut: bool,
}

impl Host for Half<'_> {
    fn append(&mut self, file: File, bytes: &[u8]) -> Result<u64, Errno> {
        self.host.append(file, &bytes[..self.part.min(bytes.len())])?;
        Err(Errno::NOSPC)
    }
    fn truncate(&mut self, file: File, len_bytes: u64) -> Result<(), Errno> {
        if self.can_cut { self.host.truncate(file, len_bytes) } else { Err(Errno::NOMEM) }
    }
    fn reply(&mut self, client: u32, seq: u64, flags: u32, body: &[u8]) -> Result<(), Errno> {
        self.host.reply(client, seq, flags, body)
    }
    fn open(&mut self, name: &str, flags: u32) -> Result<File, Errno> {
        self.host.open(name, flags)
    }
    fn close(&mut self, file: File) {
        self.host.close(file)
    }
    fn len(&mut self, file: File) -> Result<u64, Errno> {
        self.host.len(file)
    }
    fn read(&mut self, file: File, at: u64, into: &mut [u8]) -> Result<usize, Errno> {
        self.host.read(file, at, into)
    }
    fn write(&mut self, file: File, at: u64, bytes: &[u8]) -> Result<(), Errno> {
        self.host.write(file, at, bytes)
    }
    fn sync(&mut self, file: File) -> Result<(), Errno> {
        self.host.sync(file)
    }
    fn rename(&mut self, from: &str, to: &str) -> Result<(), Errno> {
        self.host.rename(from, to)
    }
    fn remove(&mut self, name: &str) -> Result<(), Errno> {
        self.host.remove(name)
    }
    fn list(&mut self) -> Result<Vec<String>, Errno> {
        self.host.list()
    }
    fn now_ms(&mut self) -> u64 {
        self.host.now_ms()
    }
    fn random(&mut self, into: &mut [u8]) -> Result<(), Errno> {
        self.host.random(into)
    }
    fn wake_after(&mut self, ms: u32) {
        self.host.wake_after(ms)
    }
    fn log(&mut self, level: u32, text: &str) {
        self.host.log(level, text)
    }
}

/// A store behind such a host.
struct Behind<'a>(&'a mut Store, usize, bool);

impl Module for Behind<'_> {
    fn start(_: &mut dyn Host) -> Result<Self, Errno> {
        Err(Errno::INVAL)
    }
    fn serve(&mut self, host: &mut dyn Host, events: Events<'_>) -> Result<(), Errno> {
        let (part, can_cut) = (self.1, self.2);
        self.0.serve(&mut Half { host, part, can_cut }, events)
    }
}

/// One request on such a host; its status.
fn half(world: &mut TestStore, ask: &Batch, part: usize, can_cut: bool) -> u16 {
    let seq = world.next_seq(0);
    let events = EventBytes::new().request(0, seq, 0, &ask.bytes());
    world.host.serve(&mut Behind(&mut world.store, part, can_cut), &events).unwrap();
    world.serve(&EventBytes::new());
    world.wait(0, seq).status
}

#[test]
fn a_part_of_an_append_is_cut_off_before_the_next() {
    for part in [0, 1, 20, 44, 70, 100] {
        let mut world = TestStore::with(1, Config { reserve_bytes: 0, ..small() });
        let t = world.create("t", 1);
        world.call(0, &Batch::new(0).put(t, "a", "1").commit()).ok();
        let ask = Batch::new(0).put(t, "b", "2".repeat(90)).commit();
        assert_eq!(half(&mut world, &ask, part, true), status::NO_SPACE);
        // What was cut off stays away, whatever happens before the next sync.
        for i in 0..3 {
            world.call(0, &Batch::new(0).put(t, format!("c{i}"), "3").commit()).ok();
        }
        world.restart();
        assert_eq!(world.all(t).len(), 4, "{part}");
        world.crash();
        assert_eq!(world.all(t).len(), 4, "{part}");
        assert!(world.host.lines.iter().all(|(_, line)| !line.contains("cut off")));
    }
}

#[test]
fn a_part_of_an_append_that_cannot_be_cut_off_ends_all_writing() {
    let mut world = TestStore::with(1, Config { reserve_bytes: 0, ..small() });
    let t = world.create("t", 1);
    world.call(0, &Batch::new(0).put(t, "a", "1").commit()).ok();
    let ask = Batch::new(0).put(t, "b", "2").commit();
    assert_eq!(half(&mut world, &ask, 30, false), status::NO_SPACE);
    let said = world.call(0, &Batch::new(0).put(t, "c", "3").commit()).is(status::STORAGE);
    assert!(said.text.contains("tail"), "{}", said.text);
    assert_eq!(world.all(t).len(), 1);
    world.restart();
    world.call(0, &Batch::new(0).put(t, "c", "3").commit()).ok();
    world.restart();
    assert_eq!(world.all(t).len(), 2);
}

#[test]
fn a_part_of_a_segment_s_head_is_no_segment() {
    let mut world = TestStore::with(1, Config { reserve_bytes: 0, ..small() });
    let create = Batch::new(0).op(op::CREATE, (0, 0), 0, "t", "", 1);
    // The first one cannot be made.
    assert_eq!(half(&mut world, &create, 10, true), status::NO_SPACE);
    let t = world.create("t", 1);
    let long = "l".repeat(3000);
    world.call(0, &Batch::new(0).put(t, "a", &long).commit()).ok();
    world.call(0, &Batch::new(0).put(t, "b", &long).commit()).ok();
    // Another one cannot: it goes on in the one that is full.
    for call in [Call::Open, Call::Append] {
        world.host.fail(Some(call), 0, 1, Errno::NOSPC);
        world.call(0, &Batch::new(0).put(t, format!("{call:?}"), "c").commit()).ok();
    }
    world.restart();
    assert_eq!(world.all(t).len(), 4);
}

#[test]
fn a_sync_that_fails_ends_all_writing() {
    let mut world = TestStore::with(1, Config { reserve_bytes: 0, ..small() });
    let t = world.create("t", 1);
    world.call(0, &Batch::new(0).put(t, "a", "l".repeat(5000)).commit()).ok();
    // The next segment is begun once this one is durable.
    world.host.fail(Some(Call::Sync), 0, 1, Errno::IO);
    world.call(0, &Batch::new(0).put(t, "b", "2").commit()).is(status::STORAGE);
    let said = world.call(0, &Batch::new(0).put(t, "b", "2").commit()).is(status::STORAGE);
    assert!(said.text.contains("sync"), "{}", said.text);
}

#[test]
fn a_log_that_failed_has_no_checkpoint_any_more() {
    let mut world = TestStore::with(1, Config { steps: 20, ..small() });
    let t = world.create("t", 1);
    for i in 0..100 {
        world.call(0, &Batch::new(0).put(t, format!("{i}"), "v").commit()).ok();
    }
    world.idle();
    let before = world.store.upkeep.checkpoints.number;
    world.store.upkeep.checkpoints.is_wanted = true;
    world.serve(&EventBytes::new().wake());
    assert!(world.store.upkeep.checkpoints.current.is_some());
    world.host.fail(Some(Call::Append), 0, 1, Errno::IO);
    world.call(0, &Batch::new(0).put(t, "x", "").commit()).is(status::STORAGE);
    world.host.advance(5000);
    world.idle();
    assert_eq!(world.store.upkeep.checkpoints.number, before);
    world.restart();
    assert_eq!(world.all(t).len(), 100);
}

#[test]
fn hundreds_of_segments_need_no_more_handles_than_there_are() {
    let mut world = TestStore::with(1, small());
    let t = world.create("t", 1);
    for i in 0..700 {
        let ask = Batch::new(0).put(t, format!("{}", i % 300), "v".repeat(4100));
        world.call(0, &ask.commit()).ok();
        if i % 7 == 0 {
            world.idle();
        }
    }
    assert_eq!(world.all(t).len(), 300);
    world.restart();
    assert_eq!(world.all(t).len(), 300);
}

#[test]
fn what_is_read_after_a_start_is_durable() {
    for seed in 0..30 {
        let mut world = TestStore::with(seed, Config::default());
        let t = world.create("t", 1);
        // Nobody is told of it: its reply is held when the process ends.
        let asks = [("a", "1"), ("b", "2")].map(|(k, v)| Batch::new(0).put(t, k, v).commit());
        for ask in &asks {
            world.send(0, ask);
        }
        world.host.kill();
        world.start().unwrap();
        let seq = world.send(1, &Batch::new(0).scan(t));
        assert_eq!(world.take_reply(1, seq).unwrap().ok().rows(0).len(), 2);
        // A power cut now, with something behind it that says what was durable when it was written.
        world.send(2, &Batch::new(0).put(t, "c", "3").commit());
        world.crash();
        assert!(world.all(t).len() >= 2, "seed {seed}");
    }
}

#[test]
fn segments_that_cannot_be_made_leave_no_handle() {
    let mut world = TestStore::with(1, Config { reserve_bytes: 0, ..small() });
    let create = Batch::new(0).op(op::CREATE, (0, 0), 0, "t", "", 1);
    for _ in 0..300 {
        world.host.fail(Some(Call::Append), 0, 1, Errno::NOSPC);
        world.call(0, &create).is(status::NO_SPACE);
    }
    world.call(0, &create).ok();
}
