//! Guests that boot by a firmware, whose own drivers use Millrace's devices before Linux does.

use std::time::Duration;

use lab::netboot::BootServer;
use lab::{Daemon, Disk, Firmware, Guest, GuestBuilder, Lab, Net, Vm, firmware};
use serde_json::json;

use crate::common::{LONG, MIB, alone, beside_others, daemon, until};

/// Firmware and boot loader move some 20 MiB by one request or segment at a time.
const BOOT: Duration = Duration::from_secs(600);

/// Least that firmware and boot loader have moved when Linux runs: its kernel and initial files.
const LOADED: f64 = (12 * MIB) as f64;
/// Firmware and boot loader have their copies of what they load.
const MEMORY_MB: u32 = 256;

fn moved_bytes(daemon: &Daemon) -> f64 {
    daemon.metric_sum("millrace_queue_bytes_total", &[]).unwrap()
}

/// Fails unless the guest has been booted by this firmware.
fn check_firmware(guest: &Guest, firmware: Firmware) {
    let uefi = guest.run("test -d /sys/firmware/efi").unwrap().code == 0;
    assert_eq!(uefi, firmware == Firmware::Uefi);
}

/// Firmware and GRUB load Linux from a disk. Then the guest is reset while it writes, and all of
/// them find the same devices again.
fn boots_from_a_disk(firmware: Firmware) {
    let _others = beside_others();
    let lab = Lab::new().unwrap();
    let image = lab.path("disk.img");
    let guest = |socket| -> GuestBuilder {
        let mut disk = Disk::vhost_user(socket);
        disk.properties.push("bootindex=0".into());
        Guest::builder("a").memory_mb(MEMORY_MB).firmware(firmware).disk(disk)
    };
    firmware::boot_disk(&lab, "disk.img", &guest("".into()).boot_files(&lab).unwrap()).unwrap();
    let disk = format!("format = \"raw\"\npath = {image:?}");
    let daemon = daemon("d").vm(Vm::new("a", "").disk("d", &disk)).start(&lab).unwrap();
    let [guest] = lab::boot(&lab, [guest(daemon.socket("a", "d"))], BOOT).unwrap();

    let command_line = guest.sh("cat /proc/cmdline").unwrap();
    assert!(command_line.starts_with("BOOT_IMAGE="), "{command_line}");
    check_firmware(&guest, firmware);
    let first = moved_bytes(&daemon);
    assert!(first > LOADED, "{first}");

    let writer = guest.spawn(
        "mkdir -p /mnt && mount /dev/vda2 /mnt && echo kept > /mnt/kept && sync && echo ready && \
         while :; do dd if=/dev/zero of=/mnt/busy bs=64k count=64 oflag=direct \
         2>/dev/null; done",
    );
    let mut writer = writer.unwrap();
    writer.wait_line("ready", LONG).unwrap();
    let ready = moved_bytes(&daemon);
    until("the guest writes", || moved_bytes(&daemon) > ready + LOADED / 4.0);
    // Otherwise QEMU ends instead.
    guest.qmp("set-action", json!({"reboot": "reset"})).unwrap();
    guest.qmp("system_reset", json!({})).unwrap();
    // The monitor's events come with its answers.
    until("the guest is reset", || {
        guest.qmp("query-status", json!({})).unwrap();
        guest.qmp_events().iter().any(|event| event["event"] == "RESET")
    });
    guest.wait_ready(BOOT).unwrap();
    assert!(moved_bytes(&daemon) > first + LOADED, "it was read once more");
    let kept = guest.sh("mkdir -p /mnt && mount /dev/vda2 /mnt && cat /mnt/kept").unwrap();
    assert_eq!(kept, "kept");
}

#[test]
fn seabios_and_grub_boot_from_a_disk() {
    boots_from_a_disk(Firmware::Bios);
}

#[test]
fn ovmf_and_grub_boot_from_a_disk() {
    boots_from_a_disk(Firmware::Uefi);
}

/// The card's ROM asks by DHCP, TFTP and HTTP; then Linux uses the same card.
fn boots_from_the_network(firmware: Firmware) {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let uplink = "[switch.uplink]\ntap = \"up0\"\n";
    let port = "switch = \"lan\"\nbind = \"mac\"";
    let daemon =
        daemon("d").switch("lan", uplink).vm(Vm::new("a", "").net("n", port)).start(&lab).unwrap();
    lab.net().address("up0", "10.0.0.254/24").unwrap();
    let mut card = Net::vhost_user(daemon.socket("a", "n"));
    card.boot_rom = true;
    card.properties.push("bootindex=0".into());
    let guest = Guest::builder("a").memory_mb(MEMORY_MB).firmware(firmware);
    let guest = guest.net(card).address("10.0.0.9/24");
    let _server = BootServer::start(&lab, "up0", &guest).unwrap();
    let [guest] = lab::boot(&lab, [guest], BOOT).unwrap();
    check_firmware(&guest, firmware);
    let moved = moved_bytes(&daemon);
    assert!(moved > LOADED, "{moved}");
    guest.sh("ping -c 3 10.0.0.254").unwrap();
}

#[test]
fn ipxe_boots_from_the_network() {
    boots_from_the_network(Firmware::Bios);
}
