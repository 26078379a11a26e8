//! Daemons that die under real VMs: with a holder the VMM sees nothing; without one it reconnects.

use std::time::Duration;

use lab::Vm;
use lab::{Daemon, DaemonBuilder, Disk, Guest, Image, Lab, Net, Vsock};

use crate::common::{GIB, LONG, MIB, alone, amount, boot, daemon, transfer};

const READY: Duration = Duration::from_secs(60);
const TRUST: &str = "trust_domain = \"t\"";

fn disk_options(lab: &Lab, name: &str) -> String {
    let path = lab.scratch(name, GIB).unwrap();
    format!("format = \"raw\"\npath = {:?}", path.display())
}

fn two_vms(lab: &Lab, net: &str, disk: &str) -> DaemonBuilder {
    let vm = |name: &str, cid| {
        let disk = format!("{}\n{disk}", disk_options(lab, &format!("{name}.img")));
        Vm::new(name, TRUST)
            .net("n", &format!("switch = \"lan\"\n{net}"))
            .disk("d", &disk)
            .vsock(cid)
    };
    daemon("d").switch("lan", "").vm(vm("a", 11)).vm(vm("b", 12))
}

fn guests(lab: &Lab, daemon: &Daemon, dial: bool, packed: bool, vsock: bool) -> [Guest; 2] {
    let guest = |name: &str, last: u8| {
        let mut net = Net::vhost_user(daemon.socket(name, "n"));
        let mut disk = Disk::vhost_user(daemon.socket(name, "d"));
        (net.server, disk.server) = (dial, dial);
        (net.packed, disk.packed) = (packed, packed);
        let guest = Guest::builder(name)
            .image(Image::builder().program("fio"))
            .net(net)
            .address(format!("10.0.0.{last}/24"))
            .disk(disk);
        match vsock {
            true => guest.vsock(Vsock::vhost_user(daemon.socket(name, "vsock"))),
            false => guest,
        }
    };
    boot(lab, [guest("a", 1), guest("b", 2)])
}

fn fio(len_bytes: u64) -> String {
    format!(
        "fio --name=v --filename=/dev/vda --rw=randwrite --bs=4k --size={}m --direct=1 \
         --ioengine=libaio --iodepth=16 --fsync=64 --verify=crc32c --verify_fatal=1 \
         --output-format=terse && echo verified",
        len_bytes / MIB
    )
}

/// Traffic and disk writes run while the daemon is killed and started again, several times.
fn killed_under_load(packed: bool) {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let mut daemon = two_vms(&lab, "", "").holder().start(&lab).unwrap();
    let [a, b] = guests(&lab, &daemon, false, packed, true);
    let len_bytes = amount(4 * GIB);

    let listen = format!("agent xfer recv tcp listen 10.0.0.2 {len_bytes}");
    let mut receiver = b.spawn(&listen).unwrap();
    receiver.wait_line("listening", READY).unwrap();
    let sender = a.spawn(&format!("agent xfer send tcp connect 10.0.0.2 {len_bytes}")).unwrap();
    let writer = a.spawn(&fio(amount(2 * GIB))).unwrap();
    for _ in 0..5 {
        // Not waiting for an event: the kill is meant to come at any moment.
        std::thread::sleep(Duration::from_millis(400));
        daemon.restart().unwrap();
    }
    assert_eq!(writer.wait(LONG).unwrap().ok().unwrap().lines().last(), Some("verified"));
    let sent = sender.wait(LONG).unwrap().json().unwrap();
    let received = receiver.wait(LONG).unwrap().json().unwrap();
    assert_eq!(sent["hash"], received["hash"]);

    transfer(&a, &b, "vsock", "12:9000", 4 * MIB);
    for guest in [&a, &b] {
        assert!(guest.qmp_events().iter().all(|e| e["event"] != "NETDEV_VHOST_USER_DISCONNECTED"));
        guest.check().unwrap();
    }
    daemon.stop(READY).unwrap();
}

#[test]
fn all_three_devices_survive_a_killed_daemon_through_the_holder() {
    killed_under_load(false);
}

#[test]
fn packed_rings_survive_it_too() {
    killed_under_load(true);
}

/// Without a holder the VMM sees the disconnect and connects again (or is dialled again).
fn reconnects(dial: bool) {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let mode = if dial { "mode = \"dial\"" } else { "" };
    let mut daemon = two_vms(&lab, mode, mode).start(&lab).unwrap();
    let [a, b] = guests(&lab, &daemon, dial, false, false);
    transfer(&a, &b, "tcp", "10.0.0.2", 4 * MIB);
    let writer = a.spawn(&fio(64 * MIB)).unwrap();
    daemon.restart().unwrap();
    assert_eq!(writer.wait(LONG).unwrap().ok().unwrap().lines().last(), Some("verified"));
    a.run_for("until ping -c 1 -W 1 10.0.0.2; do :; done", READY).unwrap().ok().unwrap();
    transfer(&a, &b, "tcp", "10.0.0.2", 4 * MIB);
    transfer(&b, &a, "tcp", "10.0.0.1", 4 * MIB);
}

#[test]
fn network_and_disk_reconnect_when_the_daemon_listens() {
    reconnects(false);
}

#[test]
fn network_and_disk_reconnect_when_the_daemon_dials() {
    reconnects(true);
}
