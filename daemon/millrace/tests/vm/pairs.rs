//! Pipes of the other pairs: what comes over a connection goes to a file or to another connection,
//! and a file to a file, without passing through the guest.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::thread;

use lab::{NetLab, Running};
use lab_agent::stream::Stream;
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::common::{GIB, LONG, MIB, amount, beside_others, until};
use crate::pipe_world::{
    Client, Machine, READY, World, agent, boot, listening, recipe, report, sh, world,
};
use crate::relay::{Faults, Relay};

/// Sends what `mrpipe -g` reads in one round: the seed is the round's number and one.
fn send_round(stream: &mut TcpStream, round: u64, len_bytes: u64) {
    stream.write_all(format!("MRPIPE {round} {len_bytes}\n").as_bytes()).unwrap();
    send_bytes(stream, round + 1, len_bytes);
    stream.write_all(format!("END {round}\n").as_bytes()).unwrap();
}

fn send_bytes(stream: &mut TcpStream, seed: u64, len_bytes: u64) {
    let (mut content, mut left) = (Stream::new(seed), len_bytes as usize);
    let mut bytes = vec![0; 1 << 20];
    while left > 0 {
        let n = left.min(bytes.len());
        content.fill(&mut bytes[..n]);
        stream.write_all(&bytes[..n]).unwrap();
        left -= n;
    }
}

/// All that comes must be the content, to the end of the connection.
fn receive_bytes(stream: &mut impl Read, seed: u64, len_bytes: u64) {
    let mut content = Stream::new(seed);
    let (mut got, mut want) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let mut received = 0;
    loop {
        let n = stream.read(&mut got).unwrap();
        if n == 0 {
            break;
        }
        content.fill(&mut want[..n]);
        let wrong = got[..n].iter().zip(&want[..n]).position(|(g, w)| g != w);
        assert_eq!(wrong, None, "behind {received} bytes");
        received += n as u64;
    }
    assert_eq!(received, len_bytes);
}

/// The file has that content.
fn assert_content(world: &World, path: &str, seed: u64, len_bytes: u64) {
    // Made once more beside it, and compared by the guest.
    let want = if len_bytes > 64 * MIB { "/mnt/want" } else { "/tmp/want" };
    let compare = format!("agent compare {want} {path} && rm {want}");
    sh(&world.guest, &format!("agent fill {want} {len_bytes} {seed} && {compare}"));
}

/// The bytes went by placeholders, not as bytes through the guest.
fn assert_placed(world: &World) {
    let placed = world.daemon.metric_sum("millrace_disk_placed_total", &[("vm", "srv")]);
    let writes = world.daemon.metric_sum("millrace_disk_writes_total", &[("vm", "srv")]);
    println!("{placed:?} of {writes:?} writes");
    assert!(placed.unwrap() > 10.0);
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let told = format!(
        "{program}: {:?}\n{}{}",
        output.status.code(),
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    // 1: e2fsck has done something, such as replaying the journal.
    assert!(matches!(output.status.code(), Some(0 | 1)), "{told}");
    told
}

/// The file is on the disk, as its file system alone knows it.
fn assert_on_disk(image: &Path, name: &str, seed: u64, len_bytes: u64) {
    let image = image.to_str().unwrap();
    run("e2fsck", &["-fy", image]);
    let out = tempfile::NamedTempFile::new().unwrap();
    run("debugfs", &["-R", &format!("dump /{name} {}", out.path().display()), image]);
    receive_bytes(&mut File::open(out.path()).unwrap(), seed, len_bytes);
}

fn upload(file_system: &str, offset: u64) {
    let _beside = beside_others();
    let len_bytes = amount(GIB) / 3 + 12_345;
    // The upload, what is cut from it, and what it should be.
    let world = world(512 + 3 * len_bytes / MIB, file_system);
    let _agent = world.agent();
    let rounds = 3;
    let server = format!("mrpipe -l 7000 -g -p -n {rounds} -o {offset} /mnt/up");
    let server = listening(&world.guest, &server);
    let send = || {
        let mut stream = TcpStream::connect("10.0.0.1:7000").unwrap();
        (0..rounds).for_each(|round| send_round(&mut stream, round, len_bytes));
        // Until the guest has had all of it.
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    };
    world.lab.net().inside(send).unwrap();
    let (piped, _) = report(server, rounds * len_bytes);
    assert_eq!(piped, rounds * len_bytes);
    assert_placed(&world);
    if offset > 0 {
        sh(&world.guest, &format!("tail -c +{} /mnt/up > /mnt/cut", offset + 1));
        assert_content(&world, "/mnt/cut", rounds, len_bytes);
    } else {
        assert_content(&world, "/mnt/up", rounds, len_bytes);
    }
    let check = match file_system {
        "xfs" => "umount /mnt && xfs_repair -n /dev/vda",
        _ => "umount /mnt && e2fsck -fn /dev/vda",
    };
    sh(&world.guest, check);
}

#[test]
fn an_upload_goes_to_a_file() {
    upload("ext4", 0);
}

#[test]
fn an_upload_goes_into_the_middle_of_a_block_on_xfs() {
    upload("xfs", 12_345);
}

/// An uploaded file is there after the guest has lost its power, once `fsync` had returned.
#[test]
fn an_upload_outlives_a_crash_of_the_guest() {
    let _beside = beside_others();
    let world = world(256, "ext4");
    let _agent = world.agent();
    let len_bytes = 20 * MIB + 77;
    let server = listening(&world.guest, "mrpipe -l 7000 -g -p -n 2 /mnt/up");
    let send = || {
        let mut stream = TcpStream::connect("10.0.0.1:7000").unwrap();
        // It asks for nothing before it has synced what came.
        send_round(&mut stream, 0, len_bytes);
        send_round(&mut stream, 1, len_bytes);
        assert_eq!(stream.read(&mut [0]).unwrap(), 0);
    };
    // The name is on the disk before.
    sh(&world.guest, "touch /mnt/up && sync");
    world.lab.net().inside(send).unwrap();
    assert_eq!(report(server, 2 * len_bytes).0, 2 * len_bytes);
    world.guest.kill();
    assert_on_disk(&world.lab.path("srv-d.img"), "up", 2, len_bytes);
}

#[test]
fn a_file_goes_to_a_file() {
    let _beside = beside_others();
    let len_bytes = amount(4 * GIB);
    // From one disk to the other, and on the same.
    // No xfs is made on less than 300 MiB.
    let mib = 4 * (len_bytes / MIB) + 320;
    let disks: &'static [u64] = vec![mib, mib].leak();
    let world = boot(&[Machine::srv(disks)], recipe(), &[]);
    let _agent = world.agent();
    sh(&world.guest, "mke2fs -q -t ext4 /dev/vda && mkdir -p /mnt /mnt2 && mount /dev/vda /mnt");
    sh(&world.guest, "mkfs.xfs -q /dev/vdb && mount -t xfs /dev/vdb /mnt2");
    world.file("f", len_bytes);
    // Holes are zeroes, and the file's end is nowhere in particular.
    let size = len_bytes + 5_000_001;
    let ragged = format!("cp /mnt/f /mnt2/r && truncate -s {size} /mnt2/r && echo end >> /mnt2/r");
    sh(&world.guest, &ragged);
    for (options, from, to) in [
        ("", "/mnt/f", "/mnt2/f"),
        ("", "/mnt2/r", "/mnt/r"),
        ("-o 777 -O 8191 -e", "/mnt/f", "/mnt2/f"),
        ("", "/mnt/f", "/mnt/g"),
    ] {
        let copy = format!("mrpipe -f -p {options} {from} {to}");
        let report = world.guest.run_for(&copy, LONG).unwrap().json().unwrap();
        println!("{copy}: {report}");
        assert_eq!(report["whole"], true, "{report}");
        let offsets = if options.is_empty() { "" } else { "777 8191" };
        sh(&world.guest, &format!("agent compare {from} {to} {offsets}"));
    }
    assert_placed(&world);
    sh(&world.guest, "umount /mnt /mnt2 && e2fsck -fn /dev/vda && xfs_repair -n /dev/vdb");
}

/// Two clients at a time through a proxy in the guest.
#[test]
fn a_proxy_passes_streams_on() {
    let _beside = beside_others();
    let world = boot(&[Machine::srv(&[64])], recipe(), &[]);
    let _agent = agent(&world.guest);
    // A pipe has 1 GiB at most: the second client's stream takes two where there is much to do.
    let lens_bytes = [amount(GIB) - 4321, amount(GIB) + 4321];
    let listeners = world
        .lab
        .net()
        .inside(|| [8000, 8001].map(|port| TcpListener::bind(("10.0.0.254", port)).unwrap()))
        .unwrap();
    let proxies: Vec<_> = (0..2)
        .map(|n| {
            let to = format!("10.0.0.254:{}", 8000 + n);
            let proxy = format!("mrpipe -l {} -x {to} -p -z {}", 7000 + n, lens_bytes[n]);
            listening(&world.guest, &proxy)
        })
        .collect();
    thread::scope(|scope| {
        for ((n, listener), len_bytes) in (0u64..).zip(&listeners).zip(lens_bytes) {
            let net = world.lab.net();
            scope.spawn(move || {
                let connect = || TcpStream::connect(format!("10.0.0.1:{}", 7000 + n)).unwrap();
                let mut stream = net.inside(connect).unwrap();
                send_bytes(&mut stream, 5 + n, len_bytes);
                // The first has closed before its pipe ends. From such a client no other begins.
                if n == 1 {
                    assert_eq!(stream.read(&mut [0]).unwrap(), 0);
                }
            });
            scope.spawn(move || receive_bytes(&mut listener.accept().unwrap().0, 5 + n, len_bytes));
        }
    });
    for (proxy, len_bytes) in proxies.into_iter().zip(lens_bytes) {
        assert_eq!(report(proxy, len_bytes).0, len_bytes);
    }
}

/// Uploads, a few at a time over one connection, through a network that loses, doubles and
/// reorders.
#[test]
fn uploads_hold_through_a_bad_network() {
    let _beside = beside_others();
    let world = world(64, "ext4");
    let _agent = world.agent();
    let far = NetLab::new().unwrap();
    let faults = Faults { lost: 5, doubled: 5, overtaken: 10 };
    let relay = Relay::start(world.lab.net(), "br0", &far, faults, 7);
    far.address("r1", "10.0.0.253/24").unwrap();
    far.address("r1", "fd00::253/64").unwrap();
    let (len_bytes, rounds) = (400_001, 10);
    for (listen, address) in [("7000", "10.0.0.1:7000"), ("[::]:7001", "[fd00::1]:7001")] {
        let server = format!("mrpipe -l {listen} -g -p -n {rounds} /mnt/up");
        let server = listening(&world.guest, &server);
        let send = || {
            let mut stream = TcpStream::connect(address).unwrap();
            (0..rounds).for_each(|round| send_round(&mut stream, round, len_bytes));
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        };
        far.inside(send).unwrap();
        assert_eq!(report(server, rounds * len_bytes).0, rounds * len_bytes);
        assert_content(&world, "/mnt/up", rounds, len_bytes);
    }
    println!("{:?}", relay.tally);
}

/// Until some bytes of a pipe have moved.
fn until_moving(world: &World) {
    until("no pipe moves", || {
        let pipes = world.daemon.request("GET", "/v1/pipes", None).unwrap();
        pipes[0]["moved_bytes"].as_u64().is_some_and(|bytes| bytes > 0)
    });
}

/// No placeholder is left where bytes should be.
fn assert_no_placeholders(world: &World, path: &str) {
    assert_eq!(sh(&world.guest, &format!("grep -c MLRCHOLD {path} || true")).trim(), "0");
}

/// The daemon is killed while the guest copies a file: the copy is whole all the same.
#[test]
fn a_copy_outlives_the_daemon() {
    let _beside = beside_others();
    let mut world = world(512, "ext4");
    let _agent = world.agent();
    let len_bytes = 100 * MIB + 1;
    world.file("f", len_bytes);
    for round in 0..3 {
        world.wait_for_agent();
        let copy = world.guest.spawn("rm -f /mnt/g; mrpipe -f -b /mnt/f /mnt/g").unwrap();
        until_moving(&world);
        world.daemon.restart().unwrap();
        // What the daemon did not get done the agent does.
        let (piped, reason) = report(copy, len_bytes);
        println!("round {round}: {piped} bytes by pipes, then {reason:?}");
        sh(&world.guest, "agent compare /mnt/f /mnt/g");
    }
    sh(&world.guest, "umount /mnt && e2fsck -fn /dev/vda");
}

/// The daemon is killed during an upload: the call fails, the connection ends for both sides, and
/// nothing wrong is in the file.
#[test]
fn an_upload_ends_with_the_daemon() {
    let _beside = beside_others();
    let mut world = world(256, "ext4");
    let _agent = world.agent();
    let len_bytes = 100 * MIB;
    world.wait_for_agent();
    let connect = || TcpStream::connect("10.0.0.1:7000").unwrap();
    let server = listening(&world.guest, "mrpipe -l 7000 -g -p /mnt/up");
    let mut stream = world.lab.net().inside(connect).unwrap();
    let sender = thread::spawn(move || {
        stream.write_all(format!("MRPIPE 0 {len_bytes}\n").as_bytes()).unwrap();
        let (mut content, mut bytes) = (Stream::new(1), vec![0; 1 << 20]);
        // More than is asked for: until the connection ends, which it must.
        loop {
            content.fill(&mut bytes);
            if stream.write_all(&bytes).is_err() {
                return;
            }
        }
    });
    until_moving(&world);
    world.daemon.restart().unwrap();
    let told: Value = server.wait(READY).unwrap().json().unwrap();
    println!("{told}");
    // The call fails, or the one behind its first bytes does: before the connection was reset, or
    // after.
    assert_eq!(told["whole"], false, "{told}");
    let refused = [Errno::IO, Errno::NOTCONN].map(Errno::raw_os_error);
    assert!(refused.iter().any(|errno| told["errno"] == *errno), "{told}");
    sender.join().unwrap();
    assert_no_placeholders(&world, "/mnt/up");
    // What is there is what was sent, or nothing yet.
    let check = format!(
        "agent fill /mnt/want {len_bytes} && cmp -l /mnt/want /mnt/up | head -c 4000000 | awk '$3 != 0' | head -n 3"
    );
    assert_eq!(sh(&world.guest, &check), "");
    sh(&world.guest, "umount /mnt && e2fsck -fn /dev/vda");
}

/// Bytes that the peer has not acknowledged.
fn unacked(stream: &TcpStream) -> i32 {
    let mut len = 0;
    // SAFETY: the call writes one int.
    let result = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut len) };
    assert_eq!(result, 0);
    len
}

/// The agent is killed when the last bytes of an upload have been acknowledged and are not in the
/// file: the client must hear of it, by a reset.
#[test]
fn bytes_that_were_acknowledged_are_not_lost_in_silence() {
    let _beside = beside_others();
    let world = world(256, "ext4");
    let agent = world.agent();
    let server = listening(&world.guest, "mrpipe -l 7000 -g -p /mnt/up");
    let connect = || TcpStream::connect("10.0.0.1:7000").unwrap();
    let mut stream = world.lab.net().inside(connect).unwrap();
    stream.write_all(format!("MRPIPE 0 {}\n", 9 * MIB).as_bytes()).unwrap();
    send_bytes(&mut stream, 1, 8 * MIB);
    until("no pipe moves it", || {
        let pipes = world.daemon.request("GET", "/v1/pipes", None).unwrap();
        pipes[0]["moved_bytes"].as_u64().is_some_and(|bytes| bytes >= 6 * MIB)
    });
    sh(&world.guest, "kill -STOP $(pidof millrace-agent)");
    // What is not written waits in memory.
    send_bytes(&mut stream, 2, MIB);
    until("it is not taken in", || unacked(&stream) == 0);
    // The program does not end the connection itself, before.
    sh(&world.guest, "kill -STOP $(pidof mrpipe); kill -KILL $(pidof millrace-agent)");
    stream.set_read_timeout(Some(READY)).unwrap();
    let ended = stream.read(&mut [0]).unwrap_err();
    assert_eq!(ended.kind(), ErrorKind::ConnectionReset, "{ended}");
    sh(&world.guest, "kill -CONT $(pidof mrpipe)");
    let told: Value = server.wait(READY).unwrap().json().unwrap();
    assert_eq!(told["whole"], false, "{told}");
    drop(agent);
}

/// A file's pipe to a peer that has read a megabyte, and reads no more for now.
fn half_sent(world: &World) -> (Running<'_>, Client, Stream) {
    world.file("f", 64 * MIB);
    let server = listening(&world.guest, "mrpipe -l 7000 -p /mnt/f");
    let mut client = world.connect("10.0.0.1:7000");
    client.ask();
    client.read_header(0, 64 * MIB);
    let mut content = Stream::new(1);
    client.read_bytes(&mut content, MIB);
    until("no pipe moves it", || {
        let pipes = world.daemon.request("GET", "/v1/pipes", None).unwrap();
        pipes[0]["moved_bytes"].as_u64().is_some_and(|bytes| bytes >= 2 * MIB)
    });
    (server, client, content)
}

/// Bytes that left before are right, and then there is a reset.
fn is_cut_off(client: &mut Client, content: &mut Stream) {
    let (mut got, mut want) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    let (mut sum, stream) = (MIB, &mut client.0);
    let ended = loop {
        match stream.read(&mut got) {
            Ok(n) => {
                content.fill(&mut want[..n]);
                assert!(n > 0 && got[..n] == want[..n], "{n} bytes behind {sum}");
                sum += n as u64;
            }
            Err(error) => break error,
        }
    };
    assert_eq!(ended.kind(), ErrorKind::ConnectionReset, "{ended}");
    assert!(sum < 64 * MIB);
}

/// Leases go with their agent, and others may write to its files: what a slow peer has not got by
/// then it does not get from there.
#[test]
fn a_file_is_not_sent_on_without_its_lease() {
    let _beside = beside_others();
    let world = world(256, "ext4");
    let agent = world.agent();
    let (server, mut client, mut content) = half_sent(&world);
    // The program does not end the connection itself, before.
    sh(&world.guest, "kill -STOP $(pidof mrpipe); kill -KILL $(pidof millrace-agent)");
    until("the pipe goes on", || world.ended("no_agent") == 1.0);
    is_cut_off(&mut client, &mut content);
    sh(&world.guest, "kill -CONT $(pidof mrpipe)");
    let told: Value = server.wait(READY).unwrap().json().unwrap();
    assert_eq!(told["whole"], false, "{told}");
    drop(agent);
}

/// A disk's bytes may be another's once it was taken away. The agent still knows its number.
#[test]
fn a_disk_that_was_taken_away_is_neither_read_nor_kept() {
    let _beside = beside_others();
    let world = world(256, "ext4");
    let _agent = world.agent();
    let (_server, mut client, mut content) = half_sent(&world);
    sh(&world.guest, "kill -STOP $(pidof mrpipe)");
    world.daemon.request("DELETE", "/v1/vms/srv/ports/d", None).unwrap();
    until("the pipe goes on", || world.ended("no_disk") == 1.0);
    is_cut_off(&mut client, &mut content);
    // It is not locked any more, and is not the one of that number.
    let path = world.lab.path("srv-d.img");
    let disk = json!({"disk": {"name": "d", "format": "raw", "path": path}});
    world.daemon.request("POST", "/v1/vms/srv/ports", Some(&disk)).unwrap();
    let ports = world.daemon.request("GET", "/v1/ports", None).unwrap();
    let is_it = |port: &&Value| port["port"] == "d" && port["vm"] == "srv";
    assert_eq!(ports.as_array().unwrap().iter().find(is_it).unwrap()["health"], "ok", "{ports}");
}
