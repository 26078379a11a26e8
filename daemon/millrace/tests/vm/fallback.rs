//! Fallback: what cannot be piped goes by the ordinary system call, every byte of it, and the
//! reason is told; and pipes that are disturbed under way.

use std::net::{Shutdown, TcpListener};
use std::time::{Duration, Instant};

use guest_abi::Reason;
use lab::{AGENT_SERVICE, ImageBuilder, Running};
use lab_agent::stream::Stream;

use crate::common::{beside_others, packets, until};
use crate::pipe_world::{
    Client, Machine, READY, World, agent, boot, listening, recipe, report, reset, sh,
};

const LEN_BYTES: u64 = 300_001;
/// More than all sockets between the guest and a peer that does not read can take.
const LONG_BYTES: u64 = 48 << 20;
/// Disks of whole megabytes: what a table of the device mapper counts.
const SECTORS_OF_A_MIB: u64 = 2048;

/// With the packet filter and the device mapper.
fn with_tools() -> ImageBuilder {
    let modules = ["nf_tables", "nft_ct", "nf_conntrack", "dm-mod", "tls"];
    modules
        .into_iter()
        .fold(recipe(), ImageBuilder::module)
        .packaged("nftables", "/usr/sbin/nft")
        .packaged("dmsetup", "/sbin/dmsetup")
        .libraries_of(&["libnftables1", "libnftnl11", "libmnl0", "libjansson4", "libxtables12"])
        .libraries_of(&["libgmp10", "libedit2", "libbsd0", "libdevmapper1.02.1"])
}

fn ext4_at_mnt() -> &'static str {
    "mke2fs -q -t ext4 /dev/vda && mkdir -p /mnt && mount -t ext4 /dev/vda /mnt"
}

/// `mrpipe` sends a file, and not by a pipe.
#[track_caller]
fn falls_back(world: &World, path: &str, reason: Reason) {
    let counted = || world.refused(reason.key()) + world.ended(reason.key());
    let before = counted();
    let server = listening(&world.guest, &format!("mrpipe -l 7000 -b -r {path}"));
    world.fetch("10.0.0.1:7000", 1, LEN_BYTES);
    assert_eq!(report(server, LEN_BYTES), (0, reason), "{path}");
    // Without an agent nobody can tell.
    if reason != Reason::NoAgent {
        until(reason.text(), || counted() > before);
    }
}

/// The end of the lab's own program, which speaks to the agent without the library.
#[track_caller]
fn told(program: Running<'_>, piped: u64, sent: u64, reason: Reason) {
    let report = program.wait(READY).unwrap().json().unwrap();
    println!("{report}");
    let want = serde_json::json!({"piped": piped, "sent": sent, "reason": reason.key()});
    assert_eq!(report, want);
}

#[test]
fn what_cannot_be_piped_is_sent_and_the_reason_is_told() {
    let _beside = beside_others();
    let bare = Machine { name: "bare", last: 2, disks_mib: &[64], pipes: "", secret: None };
    let world = boot(&[Machine::srv(&[256, 256]), bare], with_tools(), &[]);
    sh(&world.guest, ext4_at_mnt());
    world.file("f", LEN_BYTES);

    let _agent = before_and_after_the_agent(&world);
    without_pipes(&world);
    other_file_systems(&world);
    somebody_writes(&world);
    protocols_above_tcp(&world);
    closing_connections(&world);

    in_the_guests_memory(&world);

    assert_eq!((world.count("srv", "started"), world.count("srv", "moved_bytes")), (0.0, 0.0));
    let server = listening(&world.guest, "mrpipe -l 7000 -b -r /mnt/f");
    world.fetch("10.0.0.1:7000", 1, LEN_BYTES);
    assert_eq!(report(server, LEN_BYTES), (LEN_BYTES, Reason::Complete));
}

/// A connection stays unknown that began before the first agent did.
fn before_and_after_the_agent(world: &World) -> Running<'_> {
    falls_back(world, "/mnt/f", Reason::NoAgent);
    let server = listening(&world.guest, "mrpipe -l 7001 -b -r -n 2 /mnt/f");
    let mut client = world.connect("10.0.0.1:7001");
    client.ask();
    client.read_round(0, LEN_BYTES);
    let agent = world.agent();
    client.ask();
    client.read_round(1, LEN_BYTES);
    drop(client);
    assert_eq!(report(server, 2 * LEN_BYTES), (0, Reason::NoFlow));
    assert_eq!(world.ended("no_flow"), 1.0);
    agent
}

/// The agent of a VM whose host has no pipes for it.
fn without_pipes(world: &World) {
    let [bare] = &world.others[..] else { panic!() };
    sh(bare, ext4_at_mnt());
    sh(bare, &format!("agent fill /mnt/f {LEN_BYTES}"));
    let mut agent = bare.spawn(&format!("{AGENT_SERVICE} 2>&1")).unwrap();
    agent.wait_line("no pipes from the host", READY).unwrap();
    let server = listening(bare, "mrpipe -l 7000 -b -r /mnt/f");
    world.fetch("10.0.0.2:7000", 1, LEN_BYTES);
    assert_eq!(report(server, LEN_BYTES), (0, Reason::NotOffered));
}

fn other_file_systems(world: &World) {
    sh(&world.guest, &format!("agent fill /tmp/f {LEN_BYTES}"));
    falls_back(world, "/tmp/f", Reason::FileSystem);

    sh(&world.guest, "mkfs.btrfs -q /dev/vdb && mkdir -p /other && mount -t btrfs /dev/vdb /other");
    sh(&world.guest, &format!("agent fill /other/f {LEN_BYTES}"));
    falls_back(world, "/other/f", Reason::FileSystem);

    let table = format!("0 {} linear /dev/vdb 0", 256 * SECTORS_OF_A_MIB);
    // There is no udev that would name the node.
    let map = format!(
        "modprobe dm-mod && dmsetup --noudevrules --noudevsync create map --table '{table}'"
    );
    sh(&world.guest, &format!("umount /other && {map}"));
    sh(&world.guest, "mke2fs -q -t ext4 /dev/dm-0 && mount -t ext4 /dev/dm-0 /other");
    sh(&world.guest, &format!("agent fill /other/f {LEN_BYTES}"));
    falls_back(world, "/other/f", Reason::Stacked);
}

/// Pages that the guest has in memory are not read from its disk by the host.
fn in_the_guests_memory(world: &World) {
    sh(&world.guest, "cat /mnt/f > /dev/null");
    let image = std::fs::File::open(world.lab.path("srv-d.img")).unwrap();
    image.sync_all().unwrap();
    rustix::fs::fadvise(&image, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    falls_back(world, "/mnt/f", Reason::Cached);
    sh(&world.guest, "echo 3 > /proc/sys/vm/drop_caches");
}

fn somebody_writes(world: &World) {
    let mut writer = world.guest.spawn("exec 3>>/mnt/f; echo open; exec sleep 3600").unwrap();
    writer.wait_line("open", READY).unwrap();
    let before = world.refused("no_lease");
    // To a connection it is piped all the same: see open_files.rs.
    let copy = world.guest.spawn("mrpipe -f -b /mnt/f /mnt/copy").unwrap();
    assert_eq!(report(copy, LEN_BYTES), (0, Reason::NoLease));
    sh(&world.guest, "agent compare /mnt/f /mnt/copy && rm /mnt/copy");
    until("not counted", || world.refused("no_lease") > before);
    writer.kill().unwrap();
}

fn protocols_above_tcp(world: &World) {
    // The guest's is an MPTCP socket also where its peer speaks TCP alone.
    let listen = || TcpListener::bind("10.0.0.254:7100").unwrap();
    let listener = world.lab.net().inside(listen).unwrap();
    let program = world.guest.spawn("agent pipe connect 10.0.0.254:7100 /mnt/f mptcp").unwrap();
    let mut client = Client::new(listener.accept().unwrap().0);
    client.ask();
    client.read_round(0, LEN_BYTES);
    drop(client);
    told(program, 0, LEN_BYTES, Reason::Mptcp);

    let program = listening(&world.guest, "agent pipe listen 0.0.0.0:7101 /mnt/f tls");
    world.fetch("10.0.0.1:7101", 1, LEN_BYTES);
    told(program, 0, LEN_BYTES, Reason::Ulp);
    until("not counted", || world.refused("mptcp") + world.refused("ulp") == 2.0);
}

fn closing_connections(world: &World) {
    // The guest knows it.
    let program = listening(&world.guest, "agent pipe listen 0.0.0.0:7102 /mnt/f end");
    let mut client = world.connect("10.0.0.1:7102");
    client.ask();
    client.0.get_ref().shutdown(Shutdown::Write).unwrap();
    client.read_round(0, LEN_BYTES);
    told(program, 0, LEN_BYTES, Reason::NotEstablished);
    until("not counted", || world.refused("not_established") == 1.0);

    // The switch knows that it was reset, and the guest not yet: its packet filter lets no reset
    // in.
    let filter = "table ip lossy {
        chain in { type filter hook input priority 0;
            tcp dport 7103 tcp flags & rst == rst counter drop
        }
    }";
    world.guest.put_bytes("/tmp/lossy", 0o644, filter.as_bytes()).unwrap();
    sh(&world.guest, "nft -f /tmp/lossy && mkfifo /tmp/go && agent fill /mnt/small 5000");
    let mut program =
        listening(&world.guest, "agent pipe listen 0.0.0.0:7103 /mnt/small wait=/tmp/go");
    let mut client = world.connect("10.0.0.1:7103");
    client.ask();
    program.wait_line("waiting", READY).unwrap();
    reset(client);
    sh(&world.guest, "until nft list table ip lossy | grep -q 'packets [1-9]'; do :; done");
    sh(&world.guest, "echo > /tmp/go");
    // Into a socket whose peer has gone.
    let said = program.wait_line("reason", READY).unwrap();
    assert_eq!(said, r#"{"piped":0,"reason":"flow_closed","sent":5000}"#);
    assert_eq!(world.ended("flow_closed"), 1.0);
    program.kill().unwrap();
}

#[test]
fn disturbed_pipes_deliver_every_byte() {
    let _beside = beside_others();
    let world = boot(&[Machine::srv(&[256])], with_tools(), &[]);
    sh(&world.guest, ext4_at_mnt());
    let _agent = agent(&world.guest);
    world.file("f", 1_234_567);
    world.file("long", LONG_BYTES);
    a_peer_does_not_read(&world);
    somebody_wants_to_write(&world);
    a_writer_does_not_wait_for_a_reader(&world);
    strict_connection_tracking(&world);
}

/// A peer stops in mid-pipe for a while, and others' pipes go on.
fn a_peer_does_not_read(world: &World) {
    let pause = if std::env::var_os("MILLRACE_SOAK").is_some() { 60 } else { 8 };
    let server = listening(&world.guest, "mrpipe -l 7000 -p -r -n 2 /mnt/long");
    let mut client = world.connect("10.0.0.1:7000");
    client.ask();
    client.read_header(0, LONG_BYTES);
    let mut content = Stream::new(1);
    client.read_bytes(&mut content, 100_000);
    let (since, mut others) = (Instant::now(), 0);
    while since.elapsed() < Duration::from_secs(pause) {
        let server = listening(&world.guest, "mrpipe -l 7001 -p -r -n 3 /mnt/f");
        world.fetch("10.0.0.1:7001", 3, 1_234_567);
        assert_eq!(report(server, 3 * 1_234_567), (3 * 1_234_567, Reason::Complete));
        others += 1;
    }
    println!("{others} others meanwhile");
    client.read_bytes(&mut content, LONG_BYTES - 100_000);
    client.read_trailer(0);
    client.ask();
    client.read_round(1, LONG_BYTES);
    drop(client);
    assert_eq!(report(server, 2 * LONG_BYTES), (2 * LONG_BYTES, Reason::Complete));
    assert_eq!(world.ended("complete"), 2.0 + 3.0 * f64::from(others));
}

/// The pipe ends where it is, and the writer gets its turn; the rest is piped without a lease.
fn somebody_wants_to_write(world: &World) {
    let before = world.ended("complete");
    let server = listening(&world.guest, "mrpipe -l 7000 -b -r /mnt/long");
    let mut client = world.connect("10.0.0.1:7000");
    client.ask();
    client.read_header(0, LONG_BYTES);
    let mut content = Stream::new(1);
    client.read_bytes(&mut content, 100_000);
    let write = "exec 3>>/mnt/long; echo more >&3; echo open; exec sleep 3600";
    let mut writer = world.guest.spawn(write).unwrap();
    // The peer has not all of it, so the pipe cannot be over.
    until("the pipe is not given up", || {
        let pipes = world.daemon.request("GET", "/v1/pipes", None).unwrap();
        pipes[0]["state"] == "draining"
    });
    client.read_bytes(&mut content, LONG_BYTES - 100_000);
    client.read_trailer(0);
    writer.wait_line("open", READY).unwrap();
    drop(client);
    assert_eq!(report(server, LONG_BYTES), (LONG_BYTES, Reason::Complete));
    assert_eq!((world.ended("lease_broken"), world.ended("complete")), (1.0, before + 1.0));
    sh(&world.guest, "[ $(tail -c 5 /mnt/long) = more ]");
    writer.kill().unwrap();
}

/// The peer reads nothing, and the writer gets its turn all the same: what is on its way is copied.
/// The connection goes on behind it.
fn a_writer_does_not_wait_for_a_reader(world: &World) {
    sh(&world.guest, &format!("agent fill /mnt/other {LONG_BYTES}"));
    let server = listening(&world.guest, "mrpipe -l 7000 -b -r -n 2 /mnt/other");
    let mut client = world.connect("10.0.0.1:7000");
    client.ask();
    client.read_header(0, LONG_BYTES);
    let mut content = Stream::new(1);
    client.read_bytes(&mut content, 100_000);
    // What it writes is the same that is there.
    let write = "exec 3<>/mnt/other; echo open; head -c 3000000 /mnt/other >&3; echo written";
    let mut writer = world.guest.spawn(write).unwrap();
    writer.wait_line("open", READY).unwrap();
    writer.wait_line("written", READY).unwrap();
    assert_eq!(world.ended("lease_broken"), 2.0);
    client.read_bytes(&mut content, LONG_BYTES - 100_000);
    client.read_trailer(0);
    client.ask();
    client.read_round(1, LONG_BYTES);
    drop(client);
    let (piped, _) = report(server, 2 * LONG_BYTES);
    assert!((100_000..=2 * LONG_BYTES).contains(&piped), "{piped}");
}

/// A guest that drops whatever does not fit its own idea of the connection: nothing does not.
fn strict_connection_tracking(world: &World) {
    let filter = "table inet strict {
        chain in { type filter hook input priority 0;
            ct state invalid counter drop
            ct state established counter
        }
        chain out { type filter hook output priority 0;
            ct state invalid counter drop
            ct state established counter
        }
    }";
    world.guest.put_bytes("/tmp/strict", 0o644, filter.as_bytes()).unwrap();
    let settings = "cd /proc/sys/net/netfilter && echo 0 > nf_conntrack_tcp_be_liberal && \
                    echo 0 > nf_conntrack_tcp_loose";
    sh(&world.guest, &format!("nft -f /tmp/strict && {settings}"));
    for (listen, address) in [("7000", "10.0.0.1:7000"), ("[::]:7001", "[fd00::1]:7001")] {
        let server = listening(&world.guest, &format!("mrpipe -l {listen} -p -r -n 4 /mnt/f"));
        world.fetch(address, 4, 1_234_567);
        assert_eq!(report(server, 4 * 1_234_567), (4 * 1_234_567, Reason::Complete));
    }
    let rules = sh(&world.guest, "nft list table inet strict");
    println!("{rules}");
    let count = |state: &str| {
        let lines = rules.lines().filter(|line| line.contains(&format!("ct state {state}")));
        lines.map(packets).collect::<Vec<_>>()
    };
    assert_eq!(count("invalid"), [0, 0]);
    assert!(count("established").iter().all(|&packets| packets > 0));
}
