//! Modules that serve as they should.

use guest_abi::module::{MAX_BODY_BYTES, flag, kind};
use modules::ModuleConfig;
use modules::limits::{SYNC_CHARGE_BYTES, USED_BYTES};

use crate::client::{Client, frame, hello};
use crate::world::{MODULE, World, write};

#[test]
fn a_client_is_welcomed_and_answered() {
    let world = World::start();
    let mut client = world.connect();
    client.send(&hello([1; 16], "a"));
    let (welcome, list) = client.welcome();
    assert_eq!((welcome.version.get(), welcome.known_seq.get()), (1, 0));
    assert_ne!(welcome.instance.get(), 0);
    let names: Vec<&[u8]> = list.iter().map(|m| &m.name[..2]).collect();
    assert_eq!(names, [b"a\0", b"b\0"]);
    assert_eq!(client.ask(1, b"hello"), b"hello");
    assert_eq!(client.ask(2, b""), b"");
    client.send(&frame(kind::PING, 0, 9, b"there?"));
    let pong = client.next().unwrap();
    assert_eq!((pong.kind, pong.seq, &pong.body[..]), (kind::PONG, 9, &b"there?"[..]));
    let stats = world.modules.stats();
    assert_eq!(
        stats.iter().map(|s| (&s.name[..], s.requests)).collect::<Vec<_>>(),
        [("a", 2), ("b", 0)]
    );
}

#[test]
fn the_list_is_told_without_a_client() {
    let world = World::start();
    let mut client = world.connect();
    client.send(&hello([0; 16], ""));
    let (welcome, list) = client.welcome();
    assert_eq!((welcome.instance.get(), list.len()), (0, 2));
    assert_eq!(client.next(), None);
}

#[test]
fn the_longest_body_passes_both_ways() {
    let world = World::start();
    let mut client = world.client(1, "a");
    // The module's memory has no room for the longest body; this is what it has.
    let body: Vec<u8> =
        (0..12u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8 | 128).collect();
    let sender = body.clone();
    client.request(1, 0, &sender);
    assert!(client.reply(1).body == body);
    // One that it has no room for is its fault, and told.
    let too_long = vec![200; MAX_BODY_BYTES as usize];
    client.request(2, 0, &too_long);
    assert_eq!(client.reply(2).failure().0, guest_abi::module::failure::STOPPED);
    assert_eq!(client.ask(3, b"again"), b"again");
}

#[test]
fn many_requests_in_flight_are_one_batch() {
    let world = World::start();
    let mut client = world.client(1, "a");
    let frames: Vec<u8> = (1..=64).flat_map(|seq| frame(kind::REQUEST, 0, seq, b"body")).collect();
    client.send(&frames);
    for seq in 1..=64 {
        assert_eq!(client.reply(seq).body, b"body");
    }
    let stats = &world.modules.stats()[0];
    assert_eq!(stats.requests, 64);
    assert!(stats.calls < 64, "{stats:?}");
}

#[test]
fn a_broken_connection_doubles_nothing() {
    let world = World::start();
    let appended = |client: &mut Client, seq, flags| {
        client.request(seq, flags, b"d234567");
        u64::from_le_bytes(client.reply(seq).body.try_into().unwrap())
    };
    let mut client = world.client(1, "a");
    assert_eq!(appended(&mut client, 1, 0), 0);
    assert_eq!(appended(&mut client, 2, 0), 7);
    drop(client);
    let mut client = world.connect();
    client.send(&hello([1; 16], "a"));
    assert_eq!(client.welcome().0.known_seq.get(), 2);
    // Told again, and not done again.
    assert_eq!(appended(&mut client, 2, flag::AGAIN), 7);
    assert_eq!(appended(&mut client, 3, flag::AGAIN), 14);
    assert_eq!(std::fs::metadata(world.file("a")).unwrap().len(), 21);
}

#[test]
fn nothing_of_a_guest_that_has_gone_lingers() {
    let world = World::start();
    let mut client = world.client(1, "a");
    client.ask(1, b"dxxx");
    let mut of_host = world.connect_as(false);
    of_host.send(&hello([2; 16], "a"));
    of_host.welcome();
    of_host.ask(1, b"alive");
    world.modules.guest_gone();
    assert_eq!(client.next(), None);
    // The next guest's client is another one, whatever its id.
    let mut client = world.connect();
    client.send(&hello([1; 16], "a"));
    assert_eq!(client.welcome().0.known_seq.get(), 0);
    assert_eq!(client.ask(1, b"l"), 4u64.to_le_bytes());
    assert_eq!(of_host.ask(2, b"unmoved"), b"unmoved");
    assert_eq!(world.modules.stats()[0].clients, 2);
}

#[test]
fn a_client_that_connects_again_ends_its_old_connection() {
    let world = World::start();
    let mut old = world.client(1, "a");
    let mut new = world.client(1, "a");
    let goodbye = old.next().unwrap();
    assert_eq!(goodbye.kind, kind::GOODBYE);
    assert_eq!(goodbye.failure().0, guest_abi::module::failure::REPLACED);
    assert_eq!(old.next(), None);
    assert_eq!(new.ask(1, b"x2"), b"x2");
}

#[test]
fn abuse_M_modules_and_vms_have_folders_of_their_own() {
    let world = World::start();
    let neighbour = world.neighbour();
    for (seq, world) in [&world, &neighbour].into_iter().enumerate() {
        for module in ["a", "b"] {
            let mut client = world.client(1, module);
            client.ask(1, b"dxxx");
            let len = client.ask(2, b"l");
            assert_eq!(u64::from_le_bytes(len.try_into().unwrap()), 4, "{module} of {seq}");
        }
    }
    // What another process has is not locked again.
    assert_ne!(world.pid(), neighbour.pid());
}

#[test]
fn abuse_M_modules_are_replaced_while_they_serve() {
    let world = World::start();
    let before = world.pid();
    let mut client = world.client(1, "a");
    client.ask(1, b"done once");
    world.modules.load(world.configs()).unwrap();
    let goodbye = client.next().unwrap();
    assert_eq!(goodbye.failure().0, guest_abi::module::failure::ENDING);
    let mut client = world.client(1, "a");
    assert_eq!(u64::from_le_bytes(client.ask(2, b"l").try_into().unwrap()), 9);
    assert_ne!(world.pid(), before);
    // One that is not what it should be changes nothing.
    let mut wrong = world.configs();
    wrong[0].hash[0] ^= 1;
    let error = world.modules.load(wrong).unwrap_err().to_string();
    assert!(error.contains("has SHA-256"), "{error}");
    assert_eq!(client.ask(3, b"unmoved"), b"unmoved");
}

#[test]
fn what_the_disk_had_to_do_is_charged() {
    const LEN: u64 = 100_000;
    let folder = tempfile::tempdir().unwrap();
    let module = ModuleConfig { disk_bytes: 16 << 20, ..write(folder.path(), "a", MODULE) };
    let world = World::with(folder, vec![module]);
    let mut client = world.client(1, "a");
    let body = vec![b'd'; LEN as usize + 1];
    for seq in 1..=60 {
        client.request(seq, 0, &body);
        client.reply(seq);
    }
    let files = world.modules.stats()[0].files;
    let all = files.written_bytes + files.read_bytes + SYNC_CHARGE_BYTES * files.syncs;
    assert!(files.written_bytes >= 60 * LEN && files.syncs >= 60, "{files:?}");
    // What is left is told with what comes next.
    let (mut bytes, mut requests) = (0, 0);
    while bytes + USED_BYTES <= all {
        let used = world.charged();
        bytes += used.bytes;
        requests += u64::from(used.requests);
    }
    assert!(bytes <= all && requests <= files.syncs, "{bytes} of {all}, {requests} requests");
}
