//! Domains of Debian's libvirt, from what `millrace libvirt` prints.

use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use lab::libvirt::{AgentSocket, Libvirt, Shell, USER};
use lab::{Daemon, DaemonBuilder, Guest, Lab, Vm, qemu72};
use lab_agent::tools::xfer;

use crate::common::{BOOT, MIB, READY, alone, daemon, until};

/// Network ports: the second one's socket is QEMU's.
const NETS: [&str; 2] = ["net0", "net1"];
/// Disks: the third one's socket is QEMU's.
const DISKS: [&str; 3] = ["root", "more", "last"];
/// Sectors written at the disks' begin.
const SECTOR: usize = 512;

/// A domain `web`, and a daemon with its ports.
struct World {
    daemon: Daemon,
    libvirt: Libvirt,
    agent: AgentSocket,
    lab: Lab,
}

/// Makes a folder that belongs to a user and a group. New sockets in it get the group, as those of
/// a daemon have it under its unit.
fn folder(path: &Path, owner: &str, group: &str) {
    let made = Command::new("install")
        .args(["-d", "-m", "2755", "-o", owner, "-g", group])
        .arg(path)
        .status();
    assert!(made.unwrap().success());
}

/// Checks a domain against libvirt's schema.
fn validate(path: &Path) {
    let valid = Command::new("virt-xml-validate").arg(path).output().unwrap();
    let text = std::fs::read_to_string(path).unwrap();
    assert!(valid.status.success(), "{text}\n{}", String::from_utf8_lossy(&valid.stderr));
}

impl World {
    fn new(configure: impl FnOnce(&Lab, DaemonBuilder) -> DaemonBuilder) -> Self {
        let lab = Lab::new().unwrap();
        let (user, group) = USER;
        folder(&lab.path("d"), "root", group);
        folder(&lab.path("qemu"), user, group);
        lab.net().tap("up0", None).unwrap();
        for slot in 0..NETS.len() {
            lab.net().address("up0", &format!("10.0.{slot}.254/24")).unwrap();
        }
        let dial = |name: &str| {
            let socket = lab.path("qemu").join(name);
            format!("mode = \"dial\"\nsocket = {:?}", socket.display())
        };
        let net = |slot: u8, more: &str| {
            format!("switch = \"lan\"\nmac = \"02:00:00:00:00:0{slot}\"\n{more}")
        };
        let disk = |name: &str, more: &str| {
            let path = lab.scratch(&format!("{name}.img"), 16 * MIB).unwrap();
            let path = path.display();
            format!("format = \"raw\"\nserial = {name:?}\npath = \"{path}\"\n{more}")
        };
        let vm = Vm::new("web", "")
            .net(NETS[0], &net(0, ""))
            .net(NETS[1], &net(1, &dial("net")))
            .disk(DISKS[0], &disk(DISKS[0], ""))
            .disk(DISKS[1], &disk(DISKS[1], "queues = 1"))
            .disk(DISKS[2], &disk(DISKS[2], &dial("disk")))
            .vsock(42);
        let daemon = daemon("d")
            .daemon("socket_mode = \"0660\"")
            .switch("lan", "[switch.uplink]\ntap = \"up0\"\n")
            .vm(vm);
        let daemon = configure(&lab, daemon).start(&lab).unwrap();
        let libvirt = Libvirt::start(&lab).unwrap();
        let agent = AgentSocket::bind(&lab, "agent").unwrap();
        Self { daemon, libvirt, agent, lab }
    }

    /// Output of `millrace libvirt` with these arguments, in a file.
    fn printed(&self, name: &str, arguments: &[&str]) -> PathBuf {
        let config = self.lab.path("d").join("millrace.toml");
        let printed = Command::new(env!("CARGO_BIN_EXE_millrace"))
            .args(["libvirt", "-c"])
            .arg(config)
            .args(arguments)
            .output()
            .unwrap();
        assert!(printed.status.success(), "{}", String::from_utf8_lossy(&printed.stderr));
        let path = self.lab.path(name);
        std::fs::write(&path, printed.stdout).unwrap();
        path
    }

    /// Kernel, initial file system, command line and MiB of memory of a guest with the lab's agent.
    fn boot_files(&self) -> (String, String, String, u64) {
        let modules = ["virtio_net", "virtio_blk", "vmw_vsock_virtio_transport"];
        let guest = modules.iter().fold(Guest::builder("web"), |guest, m| guest.load_module(*m));
        let files = guest.boot_files(&self.lab).unwrap();
        // Where QEMU's user may read them, whatever the cache's folder is.
        let near = |file: &Path, name: &str| {
            let path = self.lab.path(name);
            std::fs::copy(file, &path).unwrap();
            path.display().to_string()
        };
        let (kernel, initrd) = (near(&files.kernel, "kernel"), near(&files.initrd, "initrd"));
        (kernel, initrd, files.append, files.memory_mb)
    }

    /// Defines the domain: as it is printed, with the lab's agent and a console in a file.
    fn define(&self) {
        let (kernel, initrd, append, memory_mb) = self.boot_files();
        let memory = format!("{memory_mb}MiB");
        let arguments = ["web", "--type", "qemu", "--memory", &memory, "--vcpus", "2"];
        let boot = ["--kernel", &kernel, "--initrd", &initrd, "--append", &append];
        let path = self.printed("domain.xml", &[&arguments[..], &boot].concat());
        let text = std::fs::read_to_string(&path).unwrap();
        validate(&path);
        let pty = "<serial type='pty'>";
        assert!(text.contains(pty));
        self.define_text(&text.replace(pty, "<serial type='file'><source path='CONSOLE'/>"));
    }

    /// Defines a domain, with the lab's agent, and the path of the file for its console.
    fn define_text(&self, text: &str) {
        let agent = format!(
            "<channel type='unix'><source mode='connect' path='{}'/>\
             <target type='virtio' name='agent'/></channel>\n  </devices>",
            self.agent.path().display()
        );
        let console = self.lab.path("console").display().to_string();
        let path = self.lab.path("defined.xml");
        std::fs::write(&path, text.replace("</devices>", &agent).replace("CONSOLE", &console))
            .unwrap();
        self.virsh(&["define", path.to_str().unwrap()]);
    }

    fn virsh(&self, arguments: &[&str]) -> String {
        self.libvirt.virsh(arguments).unwrap()
    }

    fn start(&self) -> Shell {
        self.start_domain("web")
    }

    fn start_domain(&self, name: &str) -> Shell {
        self.libvirt.boot(&self.lab, name, &self.agent, BOOT).unwrap_or_else(|e| {
            let console = std::fs::read_to_string(self.lab.path("console")).unwrap_or_default();
            panic!("{e}\n{console}")
        })
    }

    /// Waits until a VMM is at a port, or is not.
    fn wait_connected(&self, port: &str, connected: bool) {
        until(&format!("{port} connected: {connected}"), || {
            let ports = self.daemon.request("GET", "/v1/ports", None).unwrap();
            let mut ports = ports.as_array().unwrap().iter();
            ports.any(|it| it["port"] == port && it["connected"] == connected)
        });
    }
}

fn sh(guest: &Shell, script: &str) -> String {
    guest.sh(script, READY).unwrap()
}

/// Gives the card of a slot its address and reaches the host over it.
fn check_net(guest: &Shell, slot: usize) {
    let mac = format!("02:00:00:00:00:0{slot}");
    let card = format!("card=$(cd /sys/class/net; grep -l {mac} */address | cut -d/ -f1)");
    let address = format!("10.0.{slot}.1/24");
    sh(
        guest,
        &format!(
            "{card}; [ -n \"$card\" ] && ip link set $card up && ip addr replace {address} dev $card \
             && until ping -c 1 -W 1 10.0.{slot}.254; do :; done"
        ),
    );
}

/// Script that leaves the name of a disk in `disk`.
fn find_disk(name: &str) -> String {
    format!("disk=$(cd /sys/block; grep -lx {name} vd*/serial | cut -d/ -f1)")
}

/// Writes text to a disk, past the guest's cache.
fn write_disk(guest: &Shell, name: &str, text: &str) {
    let find = find_disk(name);
    sh(
        guest,
        &format!("{find}; printf '%-{SECTOR}s' {text} | dd of=/dev/$disk bs={SECTOR} oflag=direct"),
    );
}

fn read_disk(guest: &Shell, name: &str) -> String {
    let find = find_disk(name);
    sh(guest, &format!("{find}; dd if=/dev/$disk bs={SECTOR} count=1 iflag=direct"))
        .trim_end()
        .into()
}

/// The guest sends to a program of the host.
fn check_vsock(world: &World, guest: &Shell) {
    let path = format!("{}_9001", world.daemon.vsock_path("web").display());
    // The socket of an earlier check.
    let _ = std::fs::remove_file(&path);
    let listener = UnixListener::bind(&path).unwrap();
    let content = xfer::Content { bytes: MIB, seed: 1 };
    std::thread::scope(|scope| {
        let receive = || xfer::receive(listener.accept().unwrap().0, content).unwrap();
        let receiver = scope.spawn(receive);
        sh(guest, &format!("agent xfer send vsock connect 2:9001 {MIB}"));
        receiver.join().unwrap();
    });
}

fn check_all(world: &World, guest: &Shell) {
    (0..NETS.len()).for_each(|slot| check_net(guest, slot));
    check_vsock(world, guest);
    // One queue for each CPU, or as many as the port has.
    let queues =
        |name: &str| sh(guest, &format!("{}; ls /sys/block/$disk/mq | wc -l", find_disk(name)));
    assert_eq!(DISKS.map(queues), ["2", "1", "2"]);
}

/// Takes a port's device out of the running domain, and puts it in again.
fn replug(world: &World, guest: &Shell, port: &str, is_there: &str) {
    let path = world.printed("device.xml", &["web", "--device", port, "--vcpus", "2"]);
    let path = path.to_str().unwrap();
    world.virsh(&["detach-device", "web", path]);
    world.wait_connected(port, false);
    sh(guest, &format!("while {is_there}; do sleep 0.05; done"));
    let alias = format!("<alias name='ua-{port}'/>");
    until("the device is gone", || !world.virsh(&["dumpxml", "web"]).contains(&alias));
    world.virsh(&["attach-device", "web", path]);
    world.wait_connected(port, true);
    sh(guest, &format!("until {is_there}; do sleep 0.05; done"));
}

/// Compares what the disks hold.
fn check_disks(guest: &Shell, word: &str) {
    DISKS.iter().for_each(|name| assert_eq!(read_disk(guest, name), format!("{word}-{name}")));
}

fn write_disks(guest: &Shell, word: &str) {
    DISKS.iter().for_each(|name| write_disk(guest, name, &format!("{word}-{name}")));
}

/// Without a holder QEMU connects again; but for vsock, which it does not.
#[test]
fn domains_start_again_and_find_a_new_daemon() {
    let _alone = alone();
    let mut world = World::new(|_, daemon| daemon);
    world.define();
    let guest = world.start();
    check_all(&world, &guest);
    write_disks(&guest, "first");
    world.virsh(&["destroy", "web"]);
    NETS.iter().chain(&DISKS).for_each(|port| world.wait_connected(port, false));

    let guest = world.start();
    check_all(&world, &guest);
    check_disks(&guest, "first");
    world.daemon.restart().unwrap();
    NETS.iter().chain(&DISKS).for_each(|port| world.wait_connected(port, true));
    (0..NETS.len()).for_each(|slot| check_net(&guest, slot));
    check_disks(&guest, "first");
    write_disks(&guest, "second");
    assert_eq!(world.virsh(&["domstate", "web"]).trim(), "running");

    world.virsh(&["destroy", "web"]);
    let guest = world.start();
    check_all(&world, &guest);
    check_disks(&guest, "second");
    world.virsh(&["destroy", "web"]);
}

/// A holder keeps what came later: libvirt 9.0 has QEMU connect such devices only once.
#[test]
fn devices_come_and_go_while_a_domain_runs() {
    let _alone = alone();
    let mut world = World::new(|_, daemon| daemon.holder());
    world.define();
    let guest = world.start();
    write_disks(&guest, "first");
    for _ in 0..2 {
        replug(&world, &guest, DISKS[1], &format!("grep -qx {} /sys/block/vd*/serial", DISKS[1]));
        check_disks(&guest, "first");
        // Under emulation 7.2 ends at a card without its setting, which only a domain can have.
        if !qemu72::has_faults(&world.lab.qemu().unwrap()) {
            replug(&world, &guest, NETS[0], "grep -q 02:00:00:00:00:00 /sys/class/net/*/address");
            check_net(&guest, 0);
        }
    }
    world.daemon.restart().unwrap();
    check_all(&world, &guest);
    check_disks(&guest, "first");
    world.virsh(&["destroy", "web"]);
    NETS.iter().chain(&DISKS).for_each(|port| world.wait_connected(port, false));
}

/// PCI addresses of a domain's cards and disks, as they are defined.
fn places(world: &World, name: &str) -> Vec<String> {
    let text = world.virsh(&["dumpxml", "--inactive", name]);
    let mut is_device = false;
    let line = |line: &str| {
        let line = line.trim();
        is_device = match line {
            _ if line.starts_with("<interface ") || line.starts_with("<disk ") => true,
            "</interface>" | "</disk>" => false,
            _ => is_device,
        };
        (is_device && line.starts_with("<address type='pci'")).then(|| line.to_owned())
    };
    text.lines().filter_map(line).collect()
}

/// A domain that was there before Millrace, with an image and a card of QEMU's.
#[test]
fn a_domain_that_is_there_goes_over_to_ports() {
    const SLOT: usize = 7;
    let _alone = alone();
    let mut image = PathBuf::new();
    let world = World::new(|lab, daemon| {
        image = lab.scratch("own.img", 16 * MIB).unwrap();
        let disk = format!("format = \"raw\"\nserial = \"root\"\npath = {:?}", image.display());
        daemon.vm(Vm::new("own", "").net("net0", "switch = \"lan\"").disk("root", &disk))
    });
    world.lab.net().address("up0", &format!("10.0.{SLOT}.254/24")).unwrap();
    let (kernel, initrd, append, memory_mb) = world.boot_files();
    world.define_text(&format!(
        "<domain type='qemu'>
          <name>own</name>
          <memory unit='MiB'>{memory_mb}</memory>
          <vcpu>2</vcpu>
          <os>
            <type arch='x86_64' machine='q35'>hvm</type>
            <kernel>{kernel}</kernel><initrd>{initrd}</initrd><cmdline>{append}</cmdline>
          </os>
          <features><acpi/><apic/></features>
          <cpu mode='maximum'/>
          <devices>
            <disk type='file' device='disk'>
              <driver name='qemu' type='raw'/>
              <source file='{}'/>
              <target dev='vda' bus='virtio'/>
            </disk>
            <interface type='user'>
              <mac address='02:00:00:00:00:0{SLOT}'/>
              <model type='virtio'/>
            </interface>
            <serial type='file'><source path='CONSOLE'/></serial>
          </devices>
        </domain>",
        image.display()
    ));
    let before = world.lab.path("before.xml");
    std::fs::write(&before, world.virsh(&["dumpxml", "--inactive", "own"])).unwrap();
    let places_before = places(&world, "own");
    assert_eq!(places_before.len(), 2, "a card and a disk");
    let after = world.printed("after.xml", &["own", "--domain", before.to_str().unwrap()]);
    validate(&after);
    world.virsh(&["define", after.to_str().unwrap()]);
    assert_eq!(places(&world, "own"), places_before);

    let guest = world.start_domain("own");
    check_net(&guest, SLOT);
    write_disk(&guest, "root", "mine");
    assert_eq!(read_disk(&guest, "root"), "mine");
    world.virsh(&["destroy", "own"]);
    // As libvirt writes it, too, with all that it adds.
    let defined = world.lab.path("defined.xml");
    std::fs::write(&defined, world.virsh(&["dumpxml", "--inactive", "own"])).unwrap();
    for text in [after, defined] {
        let again = world.printed("again.xml", &["own", "--domain", text.to_str().unwrap()]);
        assert_eq!(std::fs::read(again).unwrap(), std::fs::read(text).unwrap());
    }
}
