//! Pipes: a file of the guest's, moved by the host into the guest's connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use lab::NetLab;
use lab_agent::stream::Stream;
use serde_json::Value;

use crate::common::{GIB, LONG, MIB, amount, beside_others};
use crate::pipe_world::{READY, World, fetch, listening, world};
use crate::relay::{Faults, Relay};

#[test]
fn a_file_goes_to_a_socket_with_header_trailer_and_another_request() {
    let _beside = beside_others();
    let len_bytes = amount(GIB);
    let world = world(256 + len_bytes / MIB, "ext4");
    let mut agent = world.agent();
    world.file("f", len_bytes);
    let rounds = 5;
    let mut server =
        world.guest.spawn(&format!("mrpipe -l 7000 -p -r -n {rounds} /mnt/f")).unwrap();
    server.wait_line("listening", READY).unwrap();
    world.lab.net().inside(|| fetch("10.0.0.1:7000", rounds, len_bytes)).unwrap();
    let report: Value = server.wait(READY).unwrap().json().unwrap();
    println!("{report}");
    assert_eq!(report["piped"], rounds * len_bytes);
    assert_eq!(world.ended("complete"), rounds as f64);
    let moved = world.daemon.metric_sum("millrace_pipe_moved_bytes_total", &[("vm", "srv")]);
    assert_eq!(moved.unwrap(), (rounds * len_bytes) as f64);
    // The first of them had it measured.
    agent.wait_line("pipes pay from", READY).unwrap();
}

/// 10,000 handovers in a soak run, through a network that loses, doubles and reorders.
#[test]
fn handovers_hold_through_a_bad_network() {
    let _beside = beside_others();
    let world = world(64, "ext4");
    let _agent = world.agent();
    let len_bytes = 300_001;
    world.file("f", len_bytes);
    let far = NetLab::new().unwrap();
    let faults = Faults { lost: 5, doubled: 5, overtaken: 10 };
    let relay = Relay::start(world.lab.net(), "br0", &far, faults, 42);
    far.address("r1", "10.0.0.253/24").unwrap();
    far.address("r1", "fd00::253/64").unwrap();
    let soak = std::env::var_os("MILLRACE_SOAK").is_some();
    let rounds = if soak { 10_000 / CLIENTS } else { 5 };
    // At once: most of the time is spent waiting for what was lost.
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (world, far) = (&world, &far);
            scope.spawn(move || handovers(world, far, client, rounds, len_bytes));
        }
    });
    println!("{:?}", relay.tally);
    assert_eq!(world.ended("complete"), (CLIENTS * rounds) as f64);
}

const CLIENTS: u64 = 8;

/// Over one connection: by IPv4, or by IPv6.
fn handovers(world: &World, far: &NetLab, client: u64, rounds: u64, len_bytes: u64) {
    let port = 7000 + client;
    let (listen, address) = match client % 2 {
        0 => (format!("{port}"), format!("10.0.0.1:{port}")),
        _ => (format!("[::]:{port}"), format!("[fd00::1]:{port}")),
    };
    let server = format!("mrpipe -l {listen} -p -r -n {rounds} /mnt/f");
    let server = listening(&world.guest, &server);
    let fetched = far.inside(|| fetch(&address, rounds, len_bytes));
    let ended = server.wait(LONG).unwrap();
    // All that the client can say of a refusal is that the connection has ended.
    assert!(fetched.is_ok(), "{address}: {}", ended.text());
    let report: Value = ended.json().unwrap();
    assert_eq!(report["piped"], rounds * len_bytes, "{report}");
}

/// A connection that was shifted goes on under the next daemon, and takes another pipe.
#[test]
fn a_shifted_connection_survives_the_daemon() {
    let _beside = beside_others();
    let mut world = world(320, "xfs");
    let _agent = world.agent();
    let len_bytes = 1_234_567;
    world.file("f", len_bytes);
    let rounds = 6;
    let mut server =
        world.guest.spawn(&format!("mrpipe -l 7000 -b -r -n {rounds} /mnt/f")).unwrap();
    server.wait_line("listening", READY).unwrap();
    let mut client = world.connect("10.0.0.1:7000");
    for round in 0..rounds {
        client.ask();
        client.read_round(round, len_bytes);
        world.daemon.restart().unwrap();
        world.wait_for_agent();
    }
    drop(client);
    let report: Value = server.wait(READY).unwrap().json().unwrap();
    println!("{report}");
    assert_eq!(report["whole"], true);
    // The daemon hears of its agent a moment before the agent does of it, and then bytes are sent.
    assert!(report["piped"].as_u64().unwrap() >= rounds / 2 * len_bytes, "{report}");
}

/// The daemon is killed in the middle of pipes: each call ends, no wrong byte arrives, and the
/// connection ends for both sides.
#[test]
fn a_daemon_killed_in_mid_pipe_costs_the_connection_and_nothing_else() {
    let _beside = beside_others();
    let mut world = world(128, "ext4");
    let _agent = world.agent();
    let len_bytes = 48 << 20;
    world.file("f", len_bytes);
    let kills = if std::env::var_os("MILLRACE_SOAK").is_some() { 100 } else { 4 };
    for kill in 0..kills {
        killed_in_mid_pipe(&mut world, 7000 + kill, len_bytes);
    }
    // The next one is piped again.
    world.wait_for_agent();
    let mut server = world.guest.spawn("mrpipe -l 6999 -b -r -n 2 /mnt/f").unwrap();
    server.wait_line("listening", READY).unwrap();
    world.lab.net().inside(|| fetch("10.0.0.1:6999", 2, len_bytes)).unwrap();
    assert_eq!(server.wait(READY).unwrap().json().unwrap()["whole"], true);
}

/// The file `f` is on its way to a client when the daemon is killed.
pub fn killed_in_mid_pipe(world: &mut World, port: u64, len_bytes: u64) {
    world.wait_for_agent();
    let server = listening(&world.guest, &format!("mrpipe -l {port} -p -r -n 1 /mnt/f"));
    let connect = || TcpStream::connect(format!("10.0.0.1:{port}")).unwrap();
    let mut stream = world.lab.net().inside(connect).unwrap();
    stream.write_all(b"next\n").unwrap();
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    // Some of the file has come, and much has not: the socket's buffer is smaller.
    let (mut content, mut want) = (Stream::new(1), vec![0; 65536]);
    let mut got = vec![0; 65536];
    let mut received = 0;
    let mut killed = false;
    // Ends with the connection, after the right bytes only.
    while let Ok(n @ 1..) = reader.read(&mut got) {
        content.fill(&mut want[..n]);
        assert!(got[..n] == want[..n], "a wrong byte behind {received}");
        received += n as u64;
        if !std::mem::replace(&mut killed, true) {
            world.daemon.restart().unwrap();
        }
    }
    // What is left of the connection may end.
    drop(reader);
    let report = server.wait(READY).unwrap();
    let report: Value = report.json().unwrap();
    println!("{received} bytes: {report}");
    assert!(killed, "no byte came");
    assert!(received < len_bytes && report["whole"] == false, "{report}");
}
