//! Faults: hostile clients, modules that misbehave, processes that are killed.

use std::time::Instant;

use guest_abi::module::{Frame, MAX_BODY_BYTES, failure, flag, kind};
use modules::ModuleConfig;
use rustix::process::{Pid, Signal, kill_process};
use zerocopy::IntoBytes;

use crate::client::{frame, hello};
use crate::world::{MODULE, World, write};

/// Answer to a client that sends this after its hello.
fn goodbye_to(world: &World, bytes: &[u8]) -> (u32, String) {
    let mut client = world.client(9, "a");
    client.send(bytes);
    let got = client.next().unwrap();
    assert_eq!(got.kind, kind::GOODBYE, "{got:?}");
    assert_eq!(client.next(), None);
    got.failure()
}

#[test]
fn abuse_M_broken_frames_end_their_connection_and_say_why() {
    let world = World::start();
    let mut other = world.client(1, "a");
    let mut flipped = frame(kind::REQUEST, 0, 1, b"body");
    flipped[25] ^= 1;
    let long = Frame::new(kind::REQUEST, 0, 1, MAX_BODY_BYTES as usize + 1);
    let cases: [(&[u8], &str); 7] = [
        (&flipped, "the check of frame 1 of kind 3 is wrong"),
        (long.as_bytes(), "a frame of 16777217 bytes, the limit is 16777216"),
        (&frame(99, 0, 1, b""), "a frame of kind 99, which clients do not send"),
        (&frame(kind::REPLY, 0, 1, b""), "a frame of kind 4, which clients do not send"),
        (&frame(kind::REQUEST, 0, 0, b""), "request 0 with flags 0x0"),
        (&frame(kind::REQUEST, 64, 1, b""), "request 1 with flags 0x40"),
        (&frame(kind::PING, 0, 1, &[0; 65]), "a ping of 65 bytes"),
    ];
    for (bytes, text) in cases {
        assert_eq!(goodbye_to(&world, bytes), (failure::BAD_FRAME, text.into()));
    }
    let twice = [frame(kind::REQUEST, 0, 5, b"n"), frame(kind::REQUEST, 0, 5, b"n")].concat();
    assert_eq!(goodbye_to(&world, &twice).1, "request 5 after 5");
    assert_eq!(other.ask(1, b"unmoved"), b"unmoved");
}

#[test]
fn abuse_M_broken_hellos_are_refused() {
    let world = World::start();
    let refused = |bytes: &[u8]| {
        let mut client = world.connect();
        client.send(bytes);
        let got = client.next().unwrap();
        assert_eq!(client.next(), None);
        got.failure()
    };
    assert_eq!(
        refused(&hello([1; 16], "c")),
        (failure::NO_MODULE, "this VM has no module c".into())
    );
    assert_eq!(refused(&hello([1; 16], "../a")).0, failure::NO_MODULE);
    assert_eq!(refused(&hello([0; 16], "a")).0, failure::BAD_FRAME);
    assert_eq!(refused(&frame(kind::REQUEST, 0, 1, &[0; 64])).0, failure::BAD_FRAME);
    assert_eq!(refused(&frame(kind::HELLO, 0, 0, &[0; 63])).0, failure::BAD_FRAME);
    assert_eq!(refused(&frame(kind::HELLO, 0, 0, &[0; 500])).0, failure::BAD_FRAME);
    let mut newer = hello([1; 16], "a");
    newer[24 + 8] = 7;
    newer[24 + 10] = 9;
    let body = newer[24..].to_vec();
    let told = refused(&frame(kind::HELLO, 0, 0, &body));
    assert_eq!(told, (failure::VERSION, "versions 7 to 9, the host has 1".into()));
    // Half of one, and gone.
    let mut client = world.connect();
    client.send(&hello([1; 16], "a")[..50]);
    drop(client);
    assert_eq!(world.client(1, "a").ask(1, b"unmoved"), b"unmoved");
}

/// A request that makes the module misbehave fails; those of others, and the next one, are served.
fn stopped_by(body: &[u8], text: &str) {
    let world = World::start();
    let (mut client, mut other) = (world.client(1, "a"), world.client(2, "b"));
    client.ask(1, b"dkept");
    let begin = Instant::now();
    client.request(2, 0, body);
    assert_eq!(client.reply(2).failure(), (failure::STOPPED, text.into()));
    let stopped = begin.elapsed();
    // Told again, and not run again.
    client.request(2, flag::AGAIN, body);
    assert_eq!(client.reply(2).failure().0, failure::STOPPED);
    assert_eq!(client.ask(3, b"after"), b"after");
    println!("stopped after {stopped:?}, the next request served after {:?}", begin.elapsed());
    assert_eq!(client.ask(4, b"l"), 5u64.to_le_bytes());
    assert_eq!(other.ask(1, b"unmoved"), b"unmoved");
    let stats = world.modules.stats();
    assert_eq!((stats[0].stopped, stats[1].stopped), (1, 0));
}

#[test]
fn abuse_M_a_module_that_spins_is_stopped() {
    stopped_by(b"s", "the module was stopped: it computed for longer than its deadline");
}

#[test]
fn abuse_M_a_module_that_grows_is_stopped() {
    stopped_by(b"g", "the module was stopped: it computed for longer than its deadline");
}

#[test]
fn abuse_M_a_module_that_traps_is_replaced() {
    stopped_by(b"t", "the module was stopped: it trapped");
}

#[test]
fn abuse_M_a_module_that_calls_itself_for_ever_is_replaced() {
    stopped_by(b"r", "the module was stopped: it trapped");
}

#[test]
fn abuse_M_a_module_that_gives_up_is_replaced() {
    stopped_by(b"e", "the module was stopped: it returned -5");
}

#[test]
fn abuse_M_memory_has_a_limit() {
    let world = World::start();
    let mut client = world.client(1, "a");
    let pages = client.ask(1, b"m123");
    assert_eq!(u32::from_le_bytes(pages.try_into().unwrap()), (16 << 20) / 65536);
}

#[test]
fn abuse_M_a_second_reply_is_none() {
    let world = World::start();
    let mut client = world.client(1, "a");
    assert_eq!(client.ask(1, b"x"), b"x");
    assert_eq!(client.ask(2, b"after"), b"after");
}

#[test]
fn abuse_M_files_have_a_limit() {
    let world = World::start();
    let mut client = world.client(1, "a");
    let mut body = vec![b'd'; 400 << 10];
    body[1] = 0;
    for (seq, at) in [(1, 0), (2, 400 << 10), (3, -28)] {
        let told = client.ask(seq, &body);
        assert_eq!(i64::from_le_bytes(told.try_into().unwrap()), at);
    }
    assert_eq!(client.ask(4, b"d").len(), 8);
}

#[test]
fn abuse_X_a_killed_process_is_replaced_and_what_was_durable_is_there() {
    let world = World::start();
    let mut len = 0;
    for round in 1..=5u64 {
        let mut client = world.client(1, "a");
        let told = client.ask(10 * round, b"d234");
        assert_eq!(u64::from_le_bytes(told.try_into().unwrap()), len);
        len += 4;
        let pid = world.pid();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        // The connection ends; nothing is said.
        assert_eq!(client.next(), None);
    }
    let mut client = world.client(1, "a");
    assert_eq!(u64::from_le_bytes(client.ask(1000, b"l").try_into().unwrap()), len);
}

#[test]
fn a_module_that_cannot_start_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let text = "(module (memory (export \"memory\") 1)
        (func (export \"millrace_abi\") (result i32) (i32.const 1))
        (func (export \"millrace_start\") (result i32) (i32.const -5))
        (func (export \"millrace_buffer\") (param i32) (result i32) (i32.const 0))
        (func (export \"millrace_serve\") (param i32) (result i32) (i32.const 0)))";
    let module = crate::world::write(folder.path(), "a", text);
    let world = World::with(folder, vec![module]);
    let mut client = world.client(1, "a");
    client.request(1, 0, b"?");
    let told = client.reply(1).failure();
    let text = "module a cannot be started: it returned -5";
    assert_eq!(told, (failure::BROKEN, text.into()));
}

#[test]
fn abuse_M_a_client_that_does_not_read_holds_up_nobody() {
    let world = World::start();
    let (mut deaf, mut other) = (world.client(1, "a"), world.client(2, "a"));
    let body = vec![b'z'; 1 << 20];
    // It blocks once the host reads no more.
    let mut sender = deaf.twin();
    let sent = body.clone();
    let sending = std::thread::spawn(move || (1..=8).for_each(|seq| sender.request(seq, 0, &sent)));
    for seq in 1..=100 {
        assert_eq!(other.ask(seq, b"unmoved"), b"unmoved");
    }
    for seq in 1..=8 {
        assert!(deaf.reply(seq).body == body);
    }
    sending.join().unwrap();
}

#[test]
fn abuse_M_who_has_computed_more_than_its_share_rests_and_others_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let a = ModuleConfig { cpu_percent: 10, ..write(folder.path(), "a", MODULE) };
    let b = write(folder.path(), "b", MODULE);
    let world = World::with(folder, vec![a, b]);
    let mut client = world.client(1, "a");
    // Nor does a ring get it more.
    assert!(client.change_over(&world.region));
    for seq in 1..=2 {
        // It computes up to its deadline.
        client.request(seq, 0, b"s");
        assert_eq!(client.reply(seq).failure().0, failure::STOPPED);
    }
    let mut other = world.client(1, "b");
    assert_eq!(other.ask(1, b"hello"), b"hello");
    assert_eq!(client.ask(3, b"hello"), b"hello");
    let stats = world.modules.stats();
    assert!(stats[0].rested_ns > 0 && stats[1].rested_ns == 0, "{stats:?}");
}
