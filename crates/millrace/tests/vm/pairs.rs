//! Pipes of the other pairs: what comes over a connection goes to a file or to another connection, and a
//! file to a file, without passing through the guest.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::thread;

use lab_agent::stream::Stream;

use crate::common::{GIB, LONG, MIB, alone, amount};
use crate::pipe_world::{Machine, World, agent, boot, listening, recipe, report, sh, world};

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

/// The file has that content: its hash, of the whole disk's file, is taken in the guest.
fn assert_content(world: &World, path: &str, seed: u64, len_bytes: u64) {
    // Made once more beside it, and compared by the guest.
    let same =
        format!("agent fill /tmp/want {len_bytes} {seed} && cmp /tmp/want {path}; rm /tmp/want");
    let big =
        format!("agent fill /mnt/want {len_bytes} {seed} && cmp /mnt/want {path}; rm /mnt/want");
    let told = sh(&world.guest, if len_bytes > 64 * MIB { &big } else { &same });
    assert_eq!(told.trim(), "", "{path}");
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
    let _alone = alone();
    let world = world(512, file_system);
    let _agent = world.agent();
    let len_bytes = amount(GIB) / 3 + 12_345;
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

/// What was uploaded is there after the guest has lost its power, once `fsync` had returned.
#[test]
fn an_upload_outlives_a_crash_of_the_guest() {
    let _alone = alone();
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
    let _alone = alone();
    let len_bytes = amount(4 * GIB);
    // From one disk to the other, and on the same.
    // No xfs is made on less than 300 MiB.
    let mib = 2 * (len_bytes / MIB) + 320;
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
        if options.is_empty() {
            assert_eq!(sh(&world.guest, &format!("cmp {from} {to}")), "");
        } else {
            let cut = format!(
                "tail -c +778 {from} > /mnt/a; tail -c +8192 {to} > /mnt/b; cmp /mnt/a /mnt/b"
            );
            assert_eq!(sh(&world.guest, &format!("{cut}; rm /mnt/a /mnt/b")), "");
        }
    }
    assert_placed(&world);
    sh(&world.guest, "umount /mnt /mnt2 && e2fsck -fn /dev/vda && xfs_repair -n /dev/vdb");
}

/// Two clients at a time through a proxy in the guest.
#[test]
fn a_proxy_passes_streams_on() {
    let _alone = alone();
    let world = boot(&[Machine::srv(&[64])], recipe(), &[]);
    let _agent = agent(&world.guest);
    let len_bytes = amount(GIB) + 4321;
    let listeners = world
        .lab
        .net()
        .inside(|| [8000, 8001].map(|port| TcpListener::bind(("10.0.0.254", port)).unwrap()))
        .unwrap();
    let proxies: Vec<_> = (0..2)
        .map(|n| {
            let to = format!("10.0.0.254:{}", 8000 + n);
            let proxy = format!("mrpipe -l {} -x {to} -p -z {len_bytes}", 7000 + n);
            listening(&world.guest, &proxy)
        })
        .collect();
    thread::scope(|scope| {
        for (n, listener) in (0u64..).zip(&listeners) {
            let net = world.lab.net();
            scope.spawn(move || {
                let connect = || TcpStream::connect(format!("10.0.0.1:{}", 7000 + n)).unwrap();
                let mut stream = net.inside(connect).unwrap();
                send_bytes(&mut stream, 5 + n, len_bytes);
            });
            scope.spawn(move || receive_bytes(&mut listener.accept().unwrap().0, 5 + n, len_bytes));
        }
    });
    for proxy in proxies {
        assert_eq!(report(proxy, len_bytes).0, len_bytes);
    }
}
