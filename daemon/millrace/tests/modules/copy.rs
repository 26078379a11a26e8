//! Copies of a real process's files, and processes that are ended for a while.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use modules::copy::{About, LockedFolder, Put, Steps, put, take};
use modules::folder::written::{Extent, Written};
use modules::{CopyStep, VmModules};
use rustix::process::{Pid, Signal, kill_process};

use crate::client::Client;
use crate::world::World;

fn about(module: &str) -> About {
    let hash = "00".repeat(32);
    About { vm: "vm".into(), module: module.into(), hash, begun_s: 7, version: "0".into() }
}

struct Serving<'a>(&'a VmModules);

impl Steps for Serving<'_> {
    fn step(&mut self, step: CopyStep) -> Result<Written, String> {
        self.0.copy_step("a", step).map_err(|e| e.to_string())
    }
}

fn folder(world: &World) -> OwnedFd {
    OwnedFd::from(std::fs::File::open(world.file("a").parent().unwrap()).unwrap())
}

/// The module's log in a copy that is taken now.
fn copied(world: &World) -> Vec<u8> {
    let mut copy = Vec::new();
    take(&folder(world), &mut Serving(&world.modules), &about("a"), &mut copy).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("a")).unwrap();
    let place = Put { state_dir: dir.path(), module: "a", disk_bytes: 1 << 30 };
    let mut received = put(&place, &mut &copy[..]).unwrap();
    received.exchange(&place).unwrap();
    std::fs::read(dir.path().join("a/log")).unwrap()
}

fn durable(client: &mut Client, seq: u64) -> u64 {
    let body = [b"d", &seq.to_le_bytes()[..]].concat();
    u64::from_le_bytes(client.ask(seq, &body).try_into().unwrap())
}

/// Says that it is over, also where a test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn what_was_answered_before_a_copy_is_in_it_and_requests_go_on() {
    let world = World::by_ring();
    let (answered, over) = (AtomicU64::new(0), AtomicBool::new(false));
    let mut copies = Vec::new();
    std::thread::scope(|scope| {
        let mut client = world.client(1, "a");
        durable(&mut client, 1);
        let (answered, over) = (&answered, &over);
        scope.spawn(move || {
            // As many as its disk has room for, at most.
            for seq in 2..100_000 {
                let at = durable(&mut client, seq);
                answered.store(at, Ordering::Release);
                if over.load(Ordering::Acquire) {
                    return;
                }
            }
        });
        let _over = Over(over);
        for _ in 0..20 {
            let before = answered.load(Ordering::Acquire);
            copies.push((before, copied(&world)));
        }
    });
    let log = std::fs::read(world.file("a")).unwrap();
    for (before, copy) in copies {
        assert!(copy.len() as u64 > before, "{} bytes, {before} were answered", copy.len());
        assert_eq!(copy[..], log[..copy.len()]);
    }
    assert!(answered.load(Ordering::Acquire) > 0);
    assert_eq!(world.modules.stats()[0].stopped, 0);
}

/// Holds the files, asks for something meanwhile, and goes on. None: the machine was so busy that
/// the time of a hold was over.
fn held(world: &World, client: &mut Client, seq: u64) -> Option<()> {
    let nothing = Written::Extents(Vec::new());
    let step = |step| world.modules.copy_step("a", step);
    assert_eq!(step(CopyStep::Begin).unwrap(), nothing);
    durable(client, seq);
    let meta = world.file("a").metadata().unwrap();
    let first =
        Extent { inode: std::os::unix::fs::MetadataExt::ino(&meta), at: 0, len_bytes: 4096 };
    assert_eq!(step(CopyStep::Look).unwrap(), Written::Extents(vec![first]));
    assert_eq!(step(CopyStep::Hold).unwrap(), nothing);
    let (len, calls) = (meta.len(), world.modules.stats()[0].calls);
    client.request(seq + 1, 0, b"dmore");
    // Another module has its own.
    assert_eq!(world.client(seq as u8, "b").ask(1, b"hello"), b"hello");
    let (now, called) = (world.file("a").metadata().unwrap().len(), world.modules.stats()[0].calls);
    let ended = step(CopyStep::End);
    assert_eq!(client.reply(seq + 1).body, len.to_le_bytes());
    assert_eq!(ended.ok()?, nothing);
    assert_eq!((now, called), (len, calls));
    Some(())
}

#[test]
fn nothing_is_written_while_files_are_held_and_then_it_goes_on() {
    let world = World::start();
    let mut client = world.client(1, "a");
    let mut tries = (1..100).step_by(2);
    while held(&world, &mut client, tries.next().unwrap()).is_none() {}
    let text = world.modules.copy_step("a", CopyStep::Look).unwrap_err().to_string();
    assert!(text.ends_with("module a: nobody has begun a copy"), "{text}");
}

#[test]
fn who_holds_files_for_too_long_holds_them_no_more() {
    let world = World::start();
    let mut client = world.client(1, "a");
    world.modules.copy_step("a", CopyStep::Begin).unwrap();
    world.modules.copy_step("a", CopyStep::Hold).unwrap();
    // Answered once the time is over.
    durable(&mut client, 1);
    let text = world.modules.copy_step("a", CopyStep::End).unwrap_err().to_string();
    assert!(text.ends_with("its files were held for longer than 2000 ms"), "{text}");
    let text = world.modules.copy_step("c", CopyStep::Begin).unwrap_err().to_string();
    assert!(text.ends_with("there is no module c"), "{text}");
}

#[test]
fn a_process_that_dies_ends_the_copy_and_nothing_else() {
    let world = World::start();
    let mut client = world.client(1, "a");
    durable(&mut client, 1);
    world.modules.copy_step("a", CopyStep::Begin).unwrap();
    world.modules.copy_step("a", CopyStep::Hold).unwrap();
    kill_process(Pid::from_raw(world.pid()).unwrap(), Signal::KILL).unwrap();
    while world.modules.copy_step("a", CopyStep::End).is_ok() {}
    // The next process knows of no copy, and serves.
    let mut client = world.client(1, "a");
    assert_eq!(durable(&mut client, 2), 9);
    let text = world.modules.copy_step("a", CopyStep::Look).unwrap_err().to_string();
    assert!(text.ends_with("nobody has begun a copy"), "{text}");
}

#[test]
fn drained_modules_wait_and_their_folder_is_free() {
    let world = World::start();
    let mut client = world.client(1, "a");
    durable(&mut client, 1);
    world.modules.resume().unwrap();
    world.modules.drain().unwrap();
    world.modules.drain().unwrap();
    assert!(world.modules.stats().is_empty());
    let still = LockedFolder::new(&folder(&world)).unwrap();
    let text = world.modules.copy_step("a", CopyStep::Begin).unwrap_err().to_string();
    assert!(text.ends_with("there is no process, or it has ended"), "{text}");
    let text = world.modules.load(world.configs()).unwrap_err().to_string();
    assert!(text.ends_with("the modules are drained: resume them first"), "{text}");
    // It is welcomed after the pause.
    let mut early = world.connect();
    early.send(&crate::client::hello([1; 16], "a"));
    drop(still);
    world.modules.resume().unwrap();
    assert!(early.welcomed().is_some());
    assert_eq!(durable(&mut early, 2), 9);
    assert_eq!(world.modules.stats().len(), 2);
}

#[test]
fn modules_that_do_not_start_after_a_pause_say_so() {
    let world = World::start();
    let mut client = world.client(1, "a");
    durable(&mut client, 1);
    world.modules.drain().unwrap();
    let folder = world.file("a").with_file_name("");
    let moved = folder.with_file_name("moved");
    std::fs::rename(&folder, &moved).unwrap();
    let text = world.modules.resume().unwrap_err().to_string();
    assert!(!text.is_empty());
    std::fs::rename(&moved, &folder).unwrap();
    assert_eq!(durable(&mut world.client(1, "a"), 2), 9);
}
