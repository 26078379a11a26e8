//! World of the tests of pipes: VMs with disks of files and an agent, and a peer on the host that
//! compares every byte.

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use guest_abi::Reason;
use lab::{
    AGENT_SERVICE, Daemon, Disk, Guest, GuestBuilder, Image, ImageBuilder, Lab, Net, Running, Vm,
    Vsock,
};
use lab_agent::stream::Stream;
use serde_json::Value;

use crate::common::{BOOT, LONG, MIB, daemon, until};

pub const READY: Duration = Duration::from_secs(60);
const UPLINK: &str = "[switch.uplink]\ntap = \"up0\"\nbridge = \"br0\"\n";
const DISKS: [&str; 2] = ["d", "e"];

/// Description of a VM.
pub struct Machine {
    pub name: &'static str,
    /// Last byte of its addresses in 10.0.0.0/24 and fd00::/64.
    pub last: u8,
    /// `vda`, `vdb`.
    pub disks_mib: &'static [u64],
    /// Lines on pipes in its configuration.
    pub pipes: &'static str,
    /// Secret that its agent must know, and is told by QEMU.
    pub secret: Option<&'static str>,
}

impl Machine {
    /// The one that most tests are about.
    pub fn srv(disks_mib: &'static [u64]) -> Self {
        Self { name: "srv", last: 1, disks_mib, pipes: "[vm.pipes]\n", secret: None }
    }

    fn cid(&self) -> u32 {
        6 + u32::from(self.last)
    }

    fn secret_file(&self, lab: &Lab) -> PathBuf {
        lab.path(&format!("{}.secret", self.name))
    }

    fn vm(&self, lab: &Lab) -> Vm {
        let vm = Vm::new(self.name, "").net("n", "switch = \"lan\"");
        let disks = self.disks_mib.iter().zip(DISKS);
        let vm = disks.fold(vm, |vm, (mib, disk)| {
            let path = lab.scratch(&format!("{}-{disk}.img", self.name), mib * MIB).unwrap();
            vm.disk(disk, &format!("format = \"raw\"\npath = {path:?}"))
        });
        let secret = self.secret.map_or_else(String::new, |secret| {
            let path = self.secret_file(lab);
            std::fs::write(&path, format!("{secret}\n")).unwrap();
            std::fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
            format!("secret = {path:?}\n")
        });
        vm.vsock(self.cid()).more(&format!("{}{secret}", self.pipes))
    }

    fn guest(&self, lab: &Lab, daemon: &Daemon, recipe: &ImageBuilder) -> GuestBuilder {
        let builder = Guest::builder(self.name)
            .memory_mb(256)
            .image(recipe.clone())
            .net(Net::vhost_user(daemon.socket(self.name, "n")))
            .address(format!("10.0.0.{}/24", self.last))
            .address(format!("fd00::{}/64", self.last));
        let secret = self
            .secret
            .map(|_| format!("name=opt/millrace/secret,file={}", self.secret_file(lab).display()));
        let builder = builder.qemu_args(secret.iter().flat_map(|text| ["-fw_cfg", text]));
        let disks = DISKS.iter().take(self.disks_mib.len());
        let socket = |disk| Disk::vhost_user(daemon.socket(self.name, disk));
        disks
            .fold(builder, |builder, disk| builder.disk(socket(disk)))
            .vsock(Vsock::vhost_user(daemon.socket(self.name, "vsock")))
    }
}

/// VMs on a switch; the peer is on the host.
pub struct World {
    /// The first.
    pub guest: Guest,
    pub others: Vec<Guest>,
    pub daemon: Daemon,
    pub lab: Lab,
}

/// Image of all VMs.
pub fn recipe() -> ImageBuilder {
    Image::builder().guest_pieces().disk_tools().module("ext4")
}

/// Boots them at once. Their disks have some bytes already: image, offset, content.
pub fn boot(machines: &[Machine], recipe: ImageBuilder, blocks: &[(&str, u64, &[u8])]) -> World {
    let lab = Lab::new().unwrap();
    lab.net().bridge("br0").unwrap();
    // Else it takes its ports' addresses, which come and go with the daemon.
    lab.net().ip(&["link", "set", "br0", "address", "02:00:00:00:00:fe"]).unwrap();
    // A holder: vsock does not come back without one.
    let daemon = daemon("d").switch("lan", UPLINK).holder();
    let daemon = machines.iter().fold(daemon, |daemon, machine| daemon.vm(machine.vm(&lab)));
    for (image, offset, bytes) in blocks {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().write(true).open(lab.path(image)).unwrap();
        file.write_all_at(bytes, *offset).unwrap();
    }
    let daemon = daemon.start(&lab).unwrap();
    lab.net().address("br0", "10.0.0.254/24").unwrap();
    lab.net().address("br0", "fd00::254/64").unwrap();
    let guest = |machine: &Machine| machine.guest(&lab, &daemon, &recipe);
    let guests = machines.iter().map(guest).collect();
    let mut guests = lab::boot_all(&lab, guests, BOOT).unwrap();
    World { guest: guests.remove(0), others: guests, daemon, lab }
}

/// One VM with a file system on its disk.
pub fn world(disk_mib: u64, file_system: &str) -> World {
    world_with(disk_mib, file_system, recipe())
}

/// The same with more in its image.
pub fn world_with(disk_mib: u64, file_system: &str, recipe: ImageBuilder) -> World {
    let disks: &'static [u64] = vec![disk_mib].leak();
    world_of(Machine::srv(disks), file_system, recipe)
}

/// The same with a VM of one's choice.
pub fn world_of(machine: Machine, file_system: &str, recipe: ImageBuilder) -> World {
    let world = boot(&[machine], recipe, &[]);
    let make = match file_system {
        "xfs" => "mkfs.xfs -q",
        _ => "mke2fs -q -t ext4",
    };
    let mount = format!("mkdir -p /mnt && mount -t {file_system} /dev/vda /mnt");
    sh(&world.guest, &format!("{make} /dev/vda && {mount}"));
    world
}

/// Runs a script that must succeed.
pub fn sh(guest: &Guest, script: &str) -> String {
    guest.run_for(script, LONG).unwrap().ok().unwrap()
}

/// Starts a VM's agent and waits until it has found its daemon.
pub fn agent(guest: &Guest) -> Running<'_> {
    let mut agent = guest.spawn(&format!("{AGENT_SERVICE} 2>&1")).unwrap();
    agent.wait_line("connected", READY).unwrap();
    agent
}

/// A program that serves one connection, from the moment that it listens.
pub fn listening<'a>(guest: &'a Guest, command: &str) -> Running<'a> {
    let mut server = guest.spawn(command).unwrap();
    server.wait_line("listening", READY).unwrap();
    server
}

impl World {
    pub fn agent(&self) -> Running<'_> {
        agent(&self.guest)
    }

    /// Until the agent has found the daemon of now.
    pub fn wait_for_agent(&self) {
        let agents = || self.daemon.metric_sum("millrace_pipe_agents_total", &[("vm", "srv")]);
        until("the agent does not come back", || agents().unwrap() > 0.0);
    }

    /// A file of pseudo-random bytes.
    pub fn file(&self, name: &str, len_bytes: u64) {
        sh(&self.guest, &format!("agent fill /mnt/{name} {len_bytes}"));
    }

    pub fn ended(&self, reason: &str) -> f64 {
        self.ended_of("srv", reason)
    }

    pub fn ended_of(&self, vm: &str, reason: &str) -> f64 {
        let labels = [("vm", vm), ("reason", reason)];
        self.daemon.metric_sum("millrace_pipe_ended_total", &labels).unwrap()
    }

    /// By the agent, which tells it soon after.
    pub fn refused(&self, reason: &str) -> f64 {
        let labels = [("vm", "srv"), ("reason", reason)];
        self.daemon.metric_sum("millrace_pipe_refused_total", &labels).unwrap()
    }

    /// A counter of a VM's pipes without further labels.
    pub fn count(&self, vm: &str, counter: &str) -> f64 {
        let name = format!("millrace_pipe_{counter}_total");
        self.daemon.metric_sum(&name, &[("vm", vm)]).unwrap()
    }

    /// A connection from the host.
    pub fn connect(&self, address: &str) -> Client {
        let connect = || TcpStream::connect(address).unwrap();
        Client::new(self.lab.net().inside(connect).unwrap())
    }

    pub fn fetch(&self, address: &str, rounds: u64, len_bytes: u64) {
        self.lab.net().inside(|| fetch(address, rounds, len_bytes)).unwrap();
    }
}

/// A peer that asks for files.
pub struct Client(pub BufReader<TcpStream>);

impl Client {
    pub fn new(stream: TcpStream) -> Self {
        Self(BufReader::new(stream))
    }

    pub fn ask(&mut self) {
        self.0.get_mut().write_all(b"next\n").unwrap();
    }

    /// Reads one round of `mrpipe`, and compares it byte by byte.
    pub fn read_round(&mut self, round: u64, len_bytes: u64) {
        self.read_header(round, len_bytes);
        self.read_bytes(&mut Stream::new(1), len_bytes);
        self.read_trailer(round);
    }

    pub fn read_header(&mut self, round: u64, len_bytes: u64) {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert_eq!(line, format!("MRPIPE {round} {len_bytes}\n"));
    }

    /// The next bytes of a content, compared.
    pub fn read_bytes(&mut self, content: &mut Stream, len_bytes: u64) {
        let (mut got, mut want) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        let mut left = len_bytes as usize;
        while left > 0 {
            let n = left.min(got.len());
            self.0.read_exact(&mut got[..n]).unwrap();
            content.fill(&mut want[..n]);
            let wrong = got[..n].iter().zip(&want[..n]).position(|(g, w)| g != w);
            assert_eq!(wrong, None, "{left} bytes before the end");
            left -= n;
        }
    }

    pub fn read_trailer(&mut self, round: u64) {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        assert_eq!(line, format!("END {round}\n"));
    }

    /// True when the guest has ended the connection, and nothing came before.
    pub fn has_ended(&mut self) -> bool {
        matches!(self.0.read(&mut [0; 64]), Ok(0) | Err(_))
    }
}

/// The peer goes without a word but a reset.
pub fn reset(client: Client) {
    let socket = client.0.into_inner();
    let now = Some(Duration::ZERO);
    rustix::net::sockopt::set_socket_linger(&socket, now).unwrap();
}

/// A client that asks for `rounds` over one connection.
pub fn fetch(address: &str, rounds: u64, len_bytes: u64) {
    let mut client = Client::new(TcpStream::connect(address).unwrap());
    for round in 0..rounds {
        client.ask();
        client.read_round(round, len_bytes);
    }
}

/// Report of `mrpipe` in the end: that it moved all of `len_bytes`, how much of it by pipes, and
/// why not more.
pub fn report(server: Running<'_>, len_bytes: u64) -> (u64, Reason) {
    let report: Value = server.wait(READY).unwrap().json().unwrap();
    println!("{report}");
    let (piped, sent) = (report["piped"].as_u64().unwrap(), report["sent"].as_u64().unwrap());
    assert_eq!((piped + sent, &report["whole"]), (len_bytes, &Value::Bool(true)), "{report}");
    (piped, Reason::from_number(report["reason"].as_u64().unwrap() as u16))
}
