//! Guards: nobody gets another user's file, another VM's connection or disk, or the host's network.

use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use guest_abi::Reason;
use guest_abi::frame::Header;
use guest_abi::pipe::{HOLE, MAX_EXTENTS, NO_DISK, SocketEnd, kind};
use lab::Output;
use lab_agent::stream::Stream;
use zerocopy::IntoBytes;
use zerocopy::little_endian::{U16, U32, U64};

use crate::common::{LONG, MIB, USER, alone, beside_others, until};
use crate::hostile::{Hostile, Wish, block_of, hello, name, socket_end};
use crate::pipe_world::{
    Client, Machine, READY, World, agent, boot, listening, recipe, report, reset, sh, world_of,
};
use crate::twins;

const LEN_BYTES: u64 = 300_001;

#[test]
fn a_user_gets_what_it_could_send_itself() {
    let _beside = beside_others();
    let srv = Machine { secret: Some("of root's alone, and the host's"), ..Machine::srv(&[64]) };
    let world = world_of(srv, "ext4", recipe().program("setpriv").module("qemu_fw_cfg"));
    sh(&world.guest, "modprobe qemu_fw_cfg");
    let _agent = world.agent();
    for (file, mode) in [("f", "644"), ("secret", "600"), ("inbox", "622")] {
        world.file(file, LEN_BYTES);
        sh(&world.guest, &format!("chmod {mode} /mnt/{file}"));
    }
    let pipes = || {
        let server = listening(&world.guest, &format!("{USER} mrpipe -l 7000 -p -r /mnt/f"));
        world.fetch("10.0.0.1:7000", 1, LEN_BYTES);
        assert_eq!(report(server, LEN_BYTES), (LEN_BYTES, Reason::Complete));
    };
    pipes();

    // Without a descriptor there is nothing that could be asked for.
    fails(&world, &format!("{USER} mrpipe -l 7001 -p /mnt/secret"), "Permission denied");
    // These can be had by anybody.
    for (path, word) in [("/mnt/secret", "path-only"), ("/mnt/inbox", "write-only")] {
        let command = format!("{USER} agent pipe listen 0.0.0.0:7001 {path} {word}");
        let program = listening(&world.guest, &command);
        let mut client = world.connect("10.0.0.1:7001");
        client.ask();
        client.read_header(0, LEN_BYTES);
        assert!(client.has_ended(), "{word}");
        drop(client);
        let said = program.wait(READY).unwrap().ok().unwrap();
        let want = r#"{"piped":0,"reason":"not_permitted","sent":0}"#;
        assert_eq!(said.lines().next_back(), Some(want), "{word}");
    }
    assert_eq!(world.count("srv", "asked"), 1.0);
    fails(&world, &format!("{USER} rm -f /run/millrace/agent.sock"), "Permission denied");

    unprivileged_ports(&world);
    pipes();
    assert_eq!(world.count("srv", "agents"), 1.0);
}

/// The daemon is for root's programs: the guest's kernel keeps the low ports for them.
fn unprivileged_ports(world: &World) {
    let refused = || {
        let labels = [("vm", "srv")];
        world.daemon.metric_sum("millrace_vsock_unprivileged_total", &labels).unwrap()
    };
    let relay = |port: u32| format!("agent relay 2:{} {port} 10.0.0.254:1", guest_abi::pipe::PORT);
    let low = format!("{USER} {}", relay(1000));
    fails(world, &low, "bind vsock port 1000: Permission denied");
    assert_eq!(refused(), 0.0);
    let reset = "connect to vsock 2:28018: Connection reset";
    fails(world, &format!("{USER} {}", relay(0)), reset);
    fails(world, &relay(1024), reset);
    assert_eq!(refused(), 2.0);
    // V8: root may give a low port to others, and they do not know the VM's secret. The agent
    // stays.
    let unproved = || world.count("srv", "unproved");
    assert_eq!(unproved(), 0.0);
    fails(world, &format!("{USER} cat {}", guest_abi::pipe::SECRET_PATH), "Permission denied");
    for (more, count) in [(&b""[..], 1.0), (b"of another, and of the same len", 2.0)] {
        let (mut hostile, _relay) = Hostile::dial(world, 1000 + count as u32);
        hostile.say(kind::HELLO, 0, &[hello().as_bytes(), more].concat());
        hostile.wait_for_end();
        until("who is no agent is counted", || unproved() == count);
    }
}

#[track_caller]
fn fails(world: &World, script: &str, why: &str) {
    let Output { code, stderr, .. } = world.guest.run_for(script, LONG).unwrap();
    let stderr = String::from_utf8_lossy(&stderr);
    assert!(code != 0 && stderr.contains(why), "{script}: {code}: {stderr}");
}

/// Place of the hostile VM's own secret on its disk, and of the other's on its.
const OWN_AT: u64 = 8 * MIB;
const OTHERS_AT: u64 = 12 * MIB;
const EVIL_DISK_BYTES: u64 = 16 * MIB;
const OWN: [u8; 32] = [0x51; 32];
const OTHERS: [u8; 32] = [0x52; 32];
/// Seed of what is at the beginning of the hostile VM's disk.
const SEED: u64 = 7;

fn two_vms() -> World {
    let evil = Machine {
        name: "evil",
        last: 1,
        disks_mib: &[16],
        pipes: "[vm.pipes]\nmax = 2\n",
        secret: None,
    };
    let good = Machine {
        name: "good",
        last: 2,
        disks_mib: &[64, 16],
        pipes: "[vm.pipes]\n",
        secret: None,
    };
    let mut content = vec![0; MIB as usize];
    Stream::new(SEED).fill(&mut content);
    let (own, others) = (block_of(OWN), block_of(OTHERS));
    let blocks = [
        ("evil-d.img", 0, &content[..]),
        ("evil-d.img", OWN_AT, &own),
        ("good-e.img", OTHERS_AT, &others),
    ];
    let world = boot(&[evil, good], recipe().program("ip"), &blocks);
    let good = &world.others[0];
    sh(good, "mke2fs -q -t ext4 /dev/vda && mkdir -p /mnt && mount -t ext4 /dev/vda /mnt");
    sh(good, &format!("agent fill /mnt/f {LEN_BYTES}"));
    world
}

#[test]
fn a_hostile_agent_gets_nothing_of_others_and_disturbs_nobody() {
    let _alone = alone();
    let world = two_vms();
    let good = &world.others[0];
    let _agent = agent(good);
    // A connection of the other VM's that is there all the time.
    let idle_server = listening(good, "mrpipe -l 7100 -p -r -n 2 /mnt/f");
    let mut idle = world.connect("10.0.0.2:7100");
    idle.ask();
    idle.read_round(0, LEN_BYTES);

    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let others = scope.spawn(|| while_others_pipe(&world, &stop));
        // Also when it fails: the scope waits for the thread.
        let stops = Stops(&stop);
        attack(&world, &idle);
        drop(stops);
        println!("{} pipes of the other VM meanwhile", others.join().unwrap());
    });
    twins::reach_nobody(&world, "10.0.0.2", || {
        idle.ask();
        idle.read_round(1, LEN_BYTES);
    });
    drop(idle);
    assert_eq!(report(idle_server, 2 * LEN_BYTES), (2 * LEN_BYTES, Reason::Complete));
    let panics = world.daemon.metric_sum("millrace_sidecore_panics_total", &[]).unwrap();
    assert_eq!(panics, 0.0);
}

struct Stops<'a>(&'a AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The other VM's pipes go on; how many.
fn while_others_pipe(world: &World, stop: &AtomicBool) -> u64 {
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        // What is not piped is sent: then the report says why.
        let server = listening(&world.others[0], "mrpipe -l 7000 -b -r -n 4 /mnt/f");
        world.fetch("10.0.0.2:7000", 4, LEN_BYTES);
        assert_eq!(report(server, 4 * LEN_BYTES), (4 * LEN_BYTES, Reason::Complete));
        rounds += 4;
    }
    rounds
}

/// All that a hostile VM tries.
fn attack(world: &World, idle: &Client) {
    let _sink = {
        let mut sink = world.guest.spawn("agent sink 7001").unwrap();
        sink.wait_line("listening", READY).unwrap();
        sink
    };
    // The first agent of a VM switches its pipes on, for connections that begin from then on.
    let (mut hostile, welcome, _relay) = Hostile::welcome(world, 1023);
    assert_eq!(welcome.max_pipes.get(), 2);
    let mut own = world.connect("10.0.0.1:7001");
    let right = Wish::new(&[(0, MIB)], socket_end(own.0.get_ref()));

    others_disks(&mut hostile, &right);
    // It is allowed what is its own.
    moves(&mut hostile, &right, &mut own);
    others_connections(world, &mut hostile, &right, idle);
    the_hosts_loopback(world, &mut hostile, &right);
    senseless_wishes(&mut hostile, &right);
    strange_twins(world, &mut hostile);
    too_many(world, hostile, &right);
    senseless_messages(world);

    let (mut hostile, ..) = Hostile::welcome(world, 1010);
    assert_eq!(hostile.probe(OWN_AT, OWN).disk.get(), 0);
    moves(&mut hostile, &right, &mut own);
}

fn moves(hostile: &mut Hostile, right: &Wish, peer: &mut Client) {
    let id = hostile.begin(right);
    peer.read_bytes(&mut Stream::new(SEED), right.len_bytes);
    assert_eq!(hostile.done(id), (right.len_bytes, Reason::Complete));
}

fn others_disks(hostile: &mut Hostile, right: &Wish) {
    assert_eq!(hostile.pipe(right), (0, Reason::NoDisk), "none was told yet");
    for (offset, secret) in [
        (OTHERS_AT, OTHERS),
        (OWN_AT, OTHERS),
        (OWN_AT + 512, OWN),
        (EVIL_DISK_BYTES - 4096 + 512, OWN),
        (EVIL_DISK_BYTES, OWN),
        (u64::MAX, OWN),
    ] {
        assert_eq!(hostile.probe(offset, secret).disk.get(), NO_DISK, "{offset}");
    }
    let probed = hostile.probe(OWN_AT, OWN);
    assert_eq!((probed.disk.get(), probed.len_bytes.get()), (0, EVIL_DISK_BYTES));
    for disk in [1, 2, u32::MAX] {
        assert_eq!(hostile.pipe(&right.but(|wish| wish.disk = disk)), (0, Reason::NoDisk));
    }
    let extents = |extents: &[(u64, u64)]| {
        right.but(|wish| {
            wish.extents = extents.to_vec();
            wish.len_bytes = extents.iter().fold(0, |sum, extent| sum.saturating_add(extent.1));
        })
    };
    for wrong in [
        extents(&[(EVIL_DISK_BYTES - 512, 1024)]),
        extents(&[(EVIL_DISK_BYTES, 512)]),
        extents(&[(0, 512), (1 << 40, 512)]),
        extents(&[(u64::MAX - 512, 1024)]),
        extents(&[(0, 512), (0, 0)]),
        extents(&[(0, 512)]).but(|wish| wish.len_bytes = 1024),
        extents(&[(0, 1024)]).but(|wish| wish.len_bytes = 512),
        right.but(|wish| wish.extents.clear()),
    ] {
        assert_eq!(hostile.pipe(&wrong), (0, Reason::BadExtents), "{:?}", wrong.extents);
    }
}

fn others_connections(world: &World, hostile: &mut Hostile, right: &Wish, idle: &Client) {
    let of = |local: SocketAddr, remote: SocketAddr| {
        right.but(|wish| name(&mut wish.socket, local, remote))
    };
    let [theirs, peer] = {
        let socket = idle.0.get_ref();
        [socket.peer_addr().unwrap(), socket.local_addr().unwrap()]
    };
    let address = |text: &str| text.parse::<SocketAddr>().unwrap();
    for (local, remote) in [
        (theirs, peer),
        (peer, theirs),
        (address("10.0.0.1:7001"), peer),
        (address("127.0.0.1:7001"), address("127.0.0.1:22")),
        (address("10.0.0.1:7001"), address("10.0.0.254:22")),
        (address("[fd00::2]:7100"), address("[fd00::254]:7100")),
    ] {
        assert_eq!(hostile.pipe(&of(local, remote)), (0, Reason::NoFlow), "{local} {remote}");
    }
    // Nor does it help to take the other one's address: what it sends from there goes nowhere.
    let spoofed = || {
        let labels = [("vm", "evil"), ("reason", "spoofed")];
        world.daemon.metric_sum("millrace_queue_drops_total", &labels).unwrap()
    };
    let before = spoofed();
    let route = "10.0.0.254/32 dev eth0 src 10.0.0.2";
    sh(&world.guest, &format!("ip addr add 10.0.0.2/32 dev lo && ip route add {route}"));
    let taken = world.guest.spawn("nc 10.0.0.254 9").unwrap();
    let taken_port = calling_port(world);
    until("no packet was sent from another's address", || spoofed() > before);
    let wish = of(SocketAddr::from(([10, 0, 0, 2], taken_port)), address("10.0.0.254:9"));
    assert_eq!(hostile.pipe(&wish), (0, Reason::NoFlow));
    taken.kill().unwrap();
    sh(&world.guest, &format!("ip route del {route} && ip addr del 10.0.0.2/32 dev lo"));
}

/// The port of the guest's only connection that has no answer yet.
fn calling_port(world: &World) -> u16 {
    let table = "awk '$4 == \"02\" { split($2, at, \":\"); print at[2] }' /proc/net/tcp";
    let port =
        sh(&world.guest, &format!("until port=$({table}); [ $port ]; do :; done; echo $port"));
    u16::from_str_radix(&port, 16).unwrap()
}

/// A connection of its own to the host's loopback, as far as the switch can see.
fn the_hosts_loopback(world: &World, hostile: &mut Hostile, right: &Wish) {
    let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
    let listener = world.lab.net().inside(listen).unwrap();
    let host = listener.local_addr().unwrap();
    sh(
        &world.guest,
        "ip addr del 127.0.0.1/8 dev lo && ip route add 127.0.0.1/32 dev eth0 && \
         ip neigh add 127.0.0.1 lladdr 02:00:00:00:00:fe dev eth0",
    );
    let call = world.guest.spawn(&format!("nc 127.0.0.1 {}", host.port())).unwrap();
    let guest = SocketAddr::from(([10, 0, 0, 1], calling_port(world)));
    let wish = right.but(|wish| name(&mut wish.socket, guest, host));
    // Its SYN has left, and nobody answers there.
    assert_eq!(hostile.pipe(&wish), (0, Reason::NoFlow));
    listener.set_nonblocking(true).unwrap();
    let nobody = listener.accept().err().map(|error| error.kind());
    assert_eq!(nobody, Some(std::io::ErrorKind::WouldBlock));
    call.kill().unwrap();
    sh(&world.guest, "ip route del 127.0.0.1/32 dev eth0 && ip addr add 127.0.0.1/8 dev lo");
}

/// Twins that no connection can have had: whatever becomes of them, it is no harm to others.
fn strange_twins(world: &World, hostile: &mut Hostile) {
    let strange: [fn(&mut SocketEnd); 6] = [
        |end| end.options = 0xff,
        |end| end.options = 0,
        |end| end.mss = U16::new(u16::MAX),
        |end| (end.cwnd, end.rtt_us) = (U32::new(u32::MAX), U32::new(u32::MAX)),
        |end| end.congestion = [0xff; 16],
        |end| (end.received_bytes, end.unread_bytes) = (U64::new(u64::MAX), U32::new(u32::MAX)),
    ];
    for change in strange {
        let client = world.connect("10.0.0.1:7001");
        let mut end = socket_end(client.0.get_ref());
        change(&mut end);
        let begun = || world.count("evil", "started") + world.count("evil", "ended");
        let before = begun();
        let id = hostile.begin(&Wish::new(&[(HOLE, 64 * MIB)], end));
        until("neither twin nor answer", || begun() > before);
        reset(client);
        let (moved, reason) = hostile.done(id);
        println!("{reason:?} {moved}");
        assert!(moved < 64 * MIB && reason != Reason::Complete);
    }
}

fn senseless_wishes(hostile: &mut Hostile, right: &Wish) {
    let many = vec![(0, 512); MAX_EXTENTS as usize + 1];
    for (wrong, reason) in [
        (right.but(|wish| wish.len_bytes = 0), Reason::Malformed),
        (right.but(|wish| wish.len_bytes = (1 << 30) + 1), Reason::Malformed),
        (right.but(|wish| wish.len_bytes = u64::MAX), Reason::Malformed),
        (right.but(|wish| wish.extents = many), Reason::Malformed),
        (right.but(|wish| wish.more.push(0)), Reason::Malformed),
        (right.but(|wish| wish.socket.family = 5), Reason::Malformed),
        (right.but(|wish| wish.socket.local[15] = 1), Reason::Malformed),
        (right.but(|wish| wish.sink = 9), Reason::PairUnsupported),
        (right.but(|wish| wish.socket.send_scale = 15), Reason::FlowOptions),
        (right.but(|wish| wish.socket.receive_scale = 255), Reason::FlowOptions),
        (right.but(|wish| wish.socket.mss = U16::new(1)), Reason::FlowOptions),
        (right.but(|wish| wish.socket.sent_bytes = U64::new(5 + MIB)), Reason::NotSettled),
    ] {
        // What went before was moved once: the guest itself has sent nothing still.
        let got = hostile.pipe(&wrong);
        assert_eq!(got, (0, reason), "{} {:?}", wrong.len_bytes, wrong.socket);
    }
}

/// A hostile VM has as many pipes as it may, none of which ends; then it goes.
fn too_many(world: &World, mut hostile: Hostile, right: &Wish) {
    let stuck: Vec<_> = (0..3).map(|_| world.connect("10.0.0.1:7001")).collect();
    let wishes: Vec<_> = stuck
        .iter()
        .map(|client| Wish::new(&[(HOLE, 512 * MIB)], socket_end(client.0.get_ref())))
        .collect();
    hostile.begin(&wishes[0]);
    assert_eq!(hostile.pipe(&wishes[0]), (0, Reason::FlowBusy));
    hostile.begin(&wishes[1]);
    assert_eq!(hostile.pipe(&wishes[2]), (0, Reason::TooMany));
    assert_eq!(hostile.pipe(right), (0, Reason::TooMany));
    // One that is not there, and not the other VM's: their ids are small numbers.
    for id in 0..64 {
        let other = 1 << 40 | id;
        hostile.say(kind::CANCEL, other, &[0; 8]);
    }
    until("the pipes do not begin", || {
        let pipes = world.daemon.request("GET", "/v1/pipes", None).unwrap();
        let pipes = pipes.as_array().unwrap().iter();
        pipes.filter(|pipe| pipe["vm"] == "evil" && pipe["state"] == "moving").count() == 2
    });
    twins::are_alone(world, &["10.0.0.1", "10.0.0.2"], 2);
    hostile.say_bytes(&[0xa5; 4096]);
    hostile.wait_for_end();
    // Their peers go: nobody waits for them any more.
    drop(stuck);
    until("pipes of an agent that went stay", || {
        world.daemon.metric_sum("millrace_pipe_open", &[("vm", "evil")]).unwrap() == 0.0
    });
}

/// Each ends the stream.
fn senseless_messages(world: &World) {
    let wrong_hello = |change: fn(&mut guest_abi::pipe::Hello)| {
        let mut wrong = hello();
        change(&mut wrong);
        (kind::HELLO, wrong.as_bytes().to_vec())
    };
    let first = [
        (kind::PROBE, vec![0; 40]),
        (kind::HELLO, vec![]),
        wrong_hello(|hello| hello.magic = U64::ZERO),
        wrong_hello(|hello| (hello.lowest, hello.highest) = (U16::new(2), U16::new(9))),
    ];
    let mut ports = (1011..=1022).rev();
    for (kind, body) in first {
        let (mut hostile, _relay) = Hostile::dial(world, ports.next().unwrap());
        hostile.say(kind, 0, &body);
        hostile.wait_for_end();
    }
    let mut too_long = Header::new(kind::PIPE, 1, 0);
    too_long.len_bytes = U32::new((64 << 10) + 1);
    let mut noise = vec![0; 100_000];
    Stream::new(3).fill(&mut noise);
    for bytes in [too_long.as_bytes().to_vec(), noise] {
        let (mut hostile, _, _relay) = Hostile::welcome(world, ports.next().unwrap());
        hostile.say_bytes(&bytes);
        hostile.wait_for_end();
    }
    for (kind, body) in [(kind::DONE, 16), (kind::PROBE, 3), (kind::CANCEL, 9), (999, 0)] {
        let (mut hostile, _, _relay) = Hostile::welcome(world, ports.next().unwrap());
        hostile.say(kind, 1, &vec![0; body]);
        hostile.wait_for_end();
    }
}
