use std::path::Path;

use clap::Parser;

use crate::cli::{Cli, Command};

/// A VM with each kind of device and setting, one with nothing, one whose disk QEMU makes a socket
/// for.
const CONFIG: &str = r#"
[[switch]]
name = "lan"
[[vm]]
name = "web"
memory_limit = "2GiB"
trust_domain = "t"
[[vm.net]]
name = "net0"
switch = "lan"
mac = "02:00:00:00:00:01"
queue_pairs = 4
[[vm.net]]
name = "net.1"
switch = "lan"
mtu = 9000
mode = "dial"
socket = "/srv/r&d, <'x'>/net1.sock"
[[vm.disk]]
name = "root"
format = "qcow2"
path = "/var/lib/millrace/web.qcow2"
[[vm.disk]]
name = "log"
format = "memory"
size = "64MiB"
queues = 2
[vm.vsock]
cid = 3
path = "/run/millrace/web.vsock"
socket = "/srv/r&d, <'x'>/vsock.sock"
[vm.channel]
qmp = "/run/millrace/web.qmp"
[[vm]]
name = "db"
[[vm.disk]]
name = "root"
format = "memory"
size = "64MiB"
mode = "dial"
queues = 1
[[vm.disk]]
name = "more"
format = "memory"
size = "64MiB"
[[vm]]
name = "none"
"#;

/// Output of `millrace libvirt` with these arguments, or its error.
fn printed(arguments: &[&str]) -> Result<String, String> {
    let config = config::parse(Path::new("m.toml"), CONFIG).unwrap();
    let all = ["millrace", "libvirt", "-c", "m.toml"].iter().chain(arguments);
    let Command::Libvirt(args) = Cli::try_parse_from(all).map_err(|e| e.to_string())?.command
    else {
        panic!("another command");
    };
    super::text(&args, &config).map_err(|e| e.to_string())
}

#[track_caller]
fn assert_prints(arguments: &[&str], golden: &str) {
    let printed = printed(arguments).unwrap();
    assert_eq!(printed, golden, "{printed}");
}

#[test]
fn a_domain_has_all_devices_of_its_vm() {
    assert_prints(&["web", "--memory", "1GiB", "--vcpus", "4"], include_str!("golden/web.xml"));
}

#[test]
fn an_emulated_domain_boots_a_kernel() {
    let kernel = ["--kernel", "/boot/vmlinuz", "--initrd", "/boot/initrd", "--append", "a='b' & c"];
    let arguments = ["web", "--type", "qemu", "--emulator", "/opt/qemu"];
    let arguments: Vec<&str> = arguments.iter().chain(&kernel).copied().collect();
    assert_prints(&arguments, include_str!("golden/web-kernel.xml"));
}

#[test]
fn a_disk_whose_socket_qemu_makes_is_booted_from() {
    assert_prints(&["db", "--vcpus", "2"], include_str!("golden/db.xml"));
}

#[test]
fn a_vm_without_ports_is_a_domain_too() {
    let xml = printed(&["none"]).unwrap();
    assert!(xml.contains("<!-- The VM has no disk: name a kernel here"), "{xml}");
    assert!(!xml.contains("qemu:arg") && !xml.contains("qemu:override"), "{xml}");
}

#[test]
fn one_device_is_printed_alone() {
    let net = "\
<interface type='vhostuser'>
  <mac address='02:00:00:00:00:01'/>
  <source type='unix' path='/run/millrace/web-net0.sock' mode='client'>
    <reconnect enabled='yes' timeout='1'/>
  </source>
  <model type='virtio'/>
  <driver queues='4'/>
  <alias name='ua-net0'/>
</interface>
";
    assert_prints(&["web", "--device", "net0"], net);
    let disk = "\
<disk type='vhostuser' device='disk'>
  <driver name='qemu' type='raw' queues='2'/>
  <source type='unix' path='/run/millrace/web-log.sock'>
    <reconnect enabled='yes' timeout='1'/>
  </source>
  <target dev='vdb' bus='virtio'/>
  <alias name='ua-log'/>
</disk>
";
    assert_prints(&["web", "--device", "log"], disk);
    // A VM of as many CPUs takes as many queues by itself.
    let driver = "<driver name='qemu' type='raw'/>";
    assert!(printed(&["web", "--device", "log", "--vcpus", "2"]).unwrap().contains(driver));
    // The VM runs already.
    assert!(!printed(&["web", "--device", "root"]).unwrap().contains("<boot"));
}

#[test]
fn errors_name_what_there_is() {
    let told = |arguments: &[&str]| printed(arguments).unwrap_err();
    assert_eq!(told(&["wbe"]), "m.toml has no VM \"wbe\"; it has: web, db, none");
    let port = "VM web has no port \"x\"; it has: net0, net.1, root, log, vsock";
    assert_eq!(told(&["web", "--device", "x"]), port);
    assert!(told(&["web", "--device", "vsock"]).contains("no element for vsock"));
    assert!(told(&["db", "--device", "root"]).contains("take mode = \"dial\" out"));
    let memory = "3072 MiB of memory are more than VM web may share: its memory_limit is 2048 MiB";
    assert_eq!(told(&["web", "--memory", "3GiB"]), memory);
    assert!(told(&["web", "--memory", "1.5GiB"]).contains("write a size such as 512MiB"));
    assert!(told(&["web", "--memory", "1KiB"]).contains("write whole MiB"));
    assert!(told(&["web", "--initrd", "/x"]).contains("--kernel"));
}

#[test]
fn more_devices_than_slots_are_refused() {
    let disk = |n| format!("[[vm.disk]]\nname='d{n}'\nformat='null'\nsize='1MiB'\nmode='dial'\n");
    let text = format!("[[vm]]\nname='v'\n{}", (0..11).map(disk).collect::<String>());
    let config = config::parse(Path::new("m.toml"), &text).unwrap();
    let Command::Libvirt(args) = Cli::parse_from(["millrace", "libvirt", "v"]).command else {
        panic!("another command");
    };
    let told = super::text(&args, &config).unwrap_err().to_string();
    assert!(told.contains("VM v has 11 devices") && told.ends_with("the limit is 10"), "{told}");
}
