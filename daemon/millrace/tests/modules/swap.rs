//! Modules that take the place of others, and processes that hang.

use std::time::Instant;

use guest_abi::module::failure;
use rustix::process::{Pid, Signal, kill_process};

use crate::client::Client;
use crate::world::{World, command, write};

/// Module that starts once its folder has a file `gate`.
const GATED: &str = r#"(module
    (import "millrace" "reply" (func $reply (param i32 i64 i32 i32 i32) (result i32)))
    (import "millrace" "file_open" (func $open (param i32 i32 i32) (result i32)))
    (memory (export "memory") 2)
    (data (i32.const 16) "gate")
    (func (export "millrace_abi") (result i32) (i32.const 1))
    (func (export "millrace_start") (result i32)
      (local $file i32)
      (local.set $file (call $open (i32.const 16) (i32.const 4) (i32.const 0)))
      (select (local.get $file) (i32.const 0) (i32.lt_s (local.get $file) (i32.const 0))))
    (func (export "millrace_buffer") (param i32) (result i32) (i32.const 65536))
    (func (export "millrace_serve") (param i32) (result i32)
      (drop (call $reply (i32.load (i32.const 65568)) (i64.const 0) (i32.const 0) (i32.const 16) (i32.const 4)))
      (i32.const 0)))"#;

fn len(client: &mut Client, seq: u64) -> u64 {
    u64::from_le_bytes(client.ask(seq, b"l").try_into().unwrap())
}

#[test]
fn a_module_that_could_not_start_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let module = write(folder.path(), "a", GATED);
    let world = World::with(folder, vec![module]);
    let mut client = world.client(1, "a");
    client.request(1, 0, b"?");
    let told = client.reply(1).failure();
    assert_eq!(told, (failure::BROKEN, "module a cannot be started: it returned -2".into()));
    let stats = &world.modules.stats()[0];
    assert!(stats.state.contains("it returned -2; "), "{stats:?}");
    assert!(stats.state.contains(" starts failed, the next is within "), "{stats:?}");
    assert!(stats.failed_starts >= 3 && stats.requests == 1, "{stats:?}");
    std::fs::write(world.file("a").with_file_name("gate"), "open").unwrap();
    let begin = Instant::now();
    loop {
        let stats = &world.modules.stats()[0];
        if stats.state == "running" {
            // What was counted before is counted still.
            assert_eq!((stats.failed_starts, stats.requests, stats.failed), (0, 1, 1));
            break;
        }
        assert!(begin.elapsed().as_secs() < 60, "{stats:?}");
        std::thread::yield_now();
    }
}

#[test]
fn abuse_M_modules_that_do_not_start_leave_the_old_ones() {
    let world = World::start();
    let mut client = world.client(1, "a");
    client.ask(1, b"done once");
    let (folder, mut modules) = (tempfile::tempdir().unwrap(), world.configs());
    modules[1] = write(folder.path(), "b", GATED);
    let error = world.modules.load(modules).unwrap_err().to_string();
    let why =
        "module b cannot be started: it returned -2; the modules from before are started again";
    assert!(error.contains(why), "{error}");
    assert_eq!(client.next().unwrap().failure().0, failure::ENDING);
    assert_eq!(len(&mut world.client(1, "a"), 2), 9);
    assert_eq!(world.client(2, "b").ask(1, b"alive"), b"alive");
}

#[test]
fn a_process_that_ends_in_front_of_its_folders_leaves_the_old_one_running() {
    let folder = tempfile::tempdir().unwrap();
    let gate = folder.path().join("no-more");
    let script = format!(
        "if test -e {}; then dd bs=64k count=1 of=/dev/null; exit 7; fi; exec \"$@\"",
        gate.display()
    );
    let shell = ["sh", "-c", &script, "sh"].map(String::from).to_vec();
    let world = World::with_command([shell, command()].concat());
    let mut client = world.client(1, "a");
    let pid = world.pid();
    std::fs::write(gate, "").unwrap();
    let error = world.modules.load(world.configs()).unwrap_err().to_string();
    assert!(error.contains("the new process ended; the modules from before go on"), "{error}");
    assert_eq!(client.ask(1, b"unmoved"), b"unmoved");
    assert_eq!(world.pid(), pid);
}

/// Replacing it takes as long as a process is given to end.
#[test]
fn abuse_M_a_process_that_hangs_is_killed_and_replaced() {
    let world = World::start();
    let mut client = world.client(1, "a");
    assert_eq!(client.ask(1, b"d234"), 0u64.to_le_bytes());
    let old = world.pid();
    kill_process(Pid::from_raw(old).unwrap(), Signal::STOP).unwrap();
    world.modules.load(world.configs()).unwrap();
    assert_ne!(world.pid(), old);
    assert_eq!(client.next(), None);
    assert_eq!(len(&mut world.client(1, "a"), 2), 4);
}

#[test]
fn abuse_M_what_a_process_writes_is_bounded() {
    let script =
        "i=0; while [ $i -lt 1000 ]; do echo much to say >&2; i=$((i+1)); done; exec \"$@\"";
    let shell = ["sh", "-c", script, "sh"].map(String::from).to_vec();
    let world = World::with_command([shell, command()].concat());
    assert_eq!(world.client(1, "a").ask(1, b"alive"), b"alive");
    assert!(world.modules.dropped_lines() > 0);
}
