//! Pipes: a file of the guest's, moved by the host into the guest's connection.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use lab::{Daemon, Disk, Guest, Image, Lab, Net, NetLab, Running, Vm, Vsock};
use lab_agent::stream::Stream;
use serde_json::Value;

use crate::common::{LONG, MIB, alone, amount, boot, daemon};
use crate::relay::{Faults, Relay};

const READY: Duration = Duration::from_secs(60);
const UPLINK: &str = "[switch.uplink]\ntap = \"up0\"\nbridge = \"br0\"\n";

/// One VM with a disk, a network card and an agent; the peer is on the host.
struct World {
    guest: Guest,
    daemon: Daemon,
    lab: Lab,
}

fn world(disk_mib: u64, file_system: &str) -> World {
    let lab = Lab::new().unwrap();
    lab.net().bridge("br0").unwrap();
    let image = lab.run_folder().join("disk.img");
    std::fs::File::create(&image).unwrap().set_len(disk_mib * MIB).unwrap();
    let disk = format!("format = \"raw\"\npath = {image:?}");
    let vm = Vm::new("srv", "")
        .net("n", "switch = \"lan\"")
        .disk("d", &disk)
        .vsock(7)
        .more("[vm.pipes]\n");
    let daemon = daemon("d").switch("lan", UPLINK).vm(vm).start(&lab).unwrap();
    lab.net().address("br0", "10.0.0.254/24").unwrap();
    let recipe = Image::builder().guest_pieces().disk_tools().module("ext4");
    let builder = Guest::builder("srv")
        .memory_mb(256)
        .image(recipe)
        .net(Net::vhost_user(daemon.socket("srv", "n")))
        .address("10.0.0.1/24")
        .address("fd00::1/64")
        .disk(Disk::vhost_user(daemon.socket("srv", "d")))
        .vsock(Vsock::vhost_user(daemon.socket("srv", "vsock")));
    let [guest] = boot(&lab, [builder]);
    let make = match file_system {
        "xfs" => "mkfs.xfs -q",
        _ => "mke2fs -q -t ext4",
    };
    guest
        .run_for(&format!("{make} /dev/vda && mkdir -p /mnt && mount /dev/vda /mnt"), LONG)
        .unwrap()
        .ok()
        .unwrap();
    World { guest, daemon, lab }
}

impl World {
    fn agent(&self) -> Running<'_> {
        let mut agent = self.guest.spawn("millrace-agent 2>&1").unwrap();
        agent.wait_line("connected", READY).unwrap();
        agent
    }

    /// A file of pseudo-random bytes.
    fn file(&self, name: &str, len_bytes: u64) {
        let make = format!("agent fill /mnt/{name} {len_bytes}");
        self.guest.run_for(&make, LONG).unwrap().ok().unwrap();
    }

    fn ended(&self, reason: &str) -> f64 {
        let labels = [("vm", "srv"), ("reason", reason)];
        self.daemon.metric_sum("millrace_pipe_ended_total", &labels).unwrap()
    }
}

/// Reads what `mrpipe` sends in one round, compared byte by byte.
fn read_round(stream: &mut BufReader<TcpStream>, round: u64, len_bytes: u64) {
    let mut line = String::new();
    stream.read_line(&mut line).unwrap();
    assert_eq!(line, format!("MRPIPE {round} {len_bytes}\n"));
    let (mut content, mut left) = (Stream::new(1), len_bytes as usize);
    let (mut got, mut want) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    while left > 0 {
        let n = left.min(got.len());
        stream.read_exact(&mut got[..n]).unwrap();
        content.fill(&mut want[..n]);
        let wrong = got[..n].iter().zip(&want[..n]).position(|(g, w)| g != w);
        assert_eq!(wrong, None, "round {round}, {left} bytes before the end");
        left -= n;
    }
    line.clear();
    stream.read_line(&mut line).unwrap();
    assert_eq!(line, format!("END {round}\n"));
}

/// A client that asks for `rounds` over one connection.
fn fetch(address: &str, rounds: u64, len_bytes: u64) {
    let stream = TcpStream::connect(address).unwrap();
    let mut reader = BufReader::new(stream);
    for round in 0..rounds {
        reader.get_mut().write_all(b"next\n").unwrap();
        read_round(&mut reader, round, len_bytes);
    }
}

#[test]
fn a_file_goes_to_a_socket_with_header_trailer_and_another_request() {
    let _alone = alone();
    let world = world(256, "ext4");
    let _agent = world.agent();
    let len_bytes = amount(1 << 30);
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
}

/// 10,000 handovers in a soak run, through a network that loses, doubles and reorders.
#[test]
fn handovers_hold_through_a_bad_network() {
    let _alone = alone();
    let world = world(64, "ext4");
    let _agent = world.agent();
    let len_bytes = 300_001;
    world.file("f", len_bytes);
    let far = NetLab::new().unwrap();
    let faults = Faults { lost: 5, doubled: 5, overtaken: 10 };
    let relay = Relay::start(world.lab.net(), "br0", &far, faults, 42);
    far.address("r1", "10.0.0.253/24").unwrap();
    far.address("r1", "fd00::253/64").unwrap();
    let total = if std::env::var_os("MILLRACE_SOAK").is_some() { 10_000 } else { 40 };
    for (listen, address) in [("7000", "10.0.0.1:7000"), ("[::]:7001", "[fd00::1]:7001")] {
        let rounds = total / 2;
        let server = format!("mrpipe -l {listen} -p -r -n {rounds} /mnt/f");
        let mut server = world.guest.spawn(&server).unwrap();
        server.wait_line("listening", READY).unwrap();
        far.inside(|| fetch(address, rounds, len_bytes)).unwrap();
        let report: Value = server.wait(READY).unwrap().json().unwrap();
        assert_eq!(report["piped"], rounds * len_bytes, "{report}");
    }
    println!("{:?}", relay.tally);
    assert_eq!(world.ended("complete"), total as f64);
}
