//! Channels with QEMU and Linux. No module is in the guests: what one would do is done by hand,
//! through `/dev/mem`.

#![allow(clippy::unwrap_used)]

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use channel::{Ceiling, Channels, ChannelsConfig, MemberConfig, MemberMemory, MemoryRegion};
use guest_abi::channel::{GUEST_MAGIC, GUEST_OFF, HOST_MAGIC, MAILBOX_LEN, TABLE_OFF, VERSION};
use lab::{Guest, GuestBuilder, KernelChoice, Lab};

const BOOT: Duration = Duration::from_secs(90);
/// Linux leaves the first 64 KiB of memory alone.
const MARKER_OFF: u64 = 0x8000;
/// Registers of the doorbell's BAR 0 (QEMU documentation, `specs/ivshmem-spec`).
const IV_POSITION: u64 = 8;
const DOORBELL: u64 = 12;

/// Guests are emulated on two cores.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Mechanism by which devices come and go in the guest.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HotPlug {
    /// QEMU's default for q35, at once.
    Acpi,
    /// The root port itself: Linux waits 5 s before it lets a device go.
    Native,
}

/// A guest with three root ports and a monitor for the daemon.
fn guest(lab: &Lab, name: &str, kernel: KernelChoice, hot_plug: HotPlug) -> GuestBuilder {
    let mut arguments = Vec::new();
    if hot_plug == HotPlug::Native {
        arguments.push("-global".to_owned());
        arguments.push("ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off".to_owned());
    }
    for n in 0..3 {
        let slot = 10 + n;
        arguments.push("-device".to_owned());
        arguments.push(format!(
            "pcie-root-port,id=millrace{n},bus=pcie.0,chassis={slot},slot={slot},pref64-reserve=512M"
        ));
    }
    arguments.push("-qmp".to_owned());
    arguments.push(format!("unix:{},server=on,wait=off", monitor(lab, name).display()));
    Guest::builder(name).kernel(kernel).qemu_args(arguments)
}

fn monitor(lab: &Lab, name: &str) -> std::path::PathBuf {
    lab.path(&format!("{name}.channel"))
}

/// The guest's memory file, from QEMU's descriptors.
fn memory(guest: &Guest) -> File {
    let is_memory = |path: &Path| {
        let link = std::fs::read_link(path).unwrap_or_default();
        link.to_string_lossy().contains("memory-backend-memfd")
    };
    let folder = std::fs::read_dir(format!("/proc/{}/fd", guest.pid())).unwrap();
    let path = folder.map(|entry| entry.unwrap().path()).find(|path| is_memory(path)).unwrap();
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn join(channels: &Channels, lab: &Lab, guest: &Guest) {
    let file: OwnedFd = memory(guest).into();
    let len = rustix::fs::fstat(&file).unwrap().st_size.unsigned_abs();
    let began = Instant::now();
    let joined = channels.join(MemberConfig {
        vm: guest.name().into(),
        domain: "t".into(),
        qmp: monitor(lab, guest.name()),
        root_ports: "millrace".into(),
        memory: MemberMemory {
            file: file.into(),
            regions: vec![MemoryRegion { gpa: 0, len, off: 0 }],
        },
        allow_unsealed: false,
        macs: Vec::new(),
        addresses: Vec::new(),
        excludes: Vec::new(),
        ceiling: Ceiling::default(),
    });
    // A QEMU that has ended says more than its monitor.
    if let Err(error) = joined {
        panic!("{error}; {:?}", guest.check());
    }
    println!("{} joined after {:?}", guest.name(), began.elapsed());
}

/// Waits until the guest has so many of our devices. Returns the addresses of BAR 0 and 2 and the
/// length of BAR 2 of each.
fn devices(guest: &Guest, count: usize) -> Vec<[u64; 3]> {
    let began = Instant::now();
    let script = format!(
        "while [ $(cat /sys/bus/pci/devices/*/device | grep -c 0x1110) != {count} ]; do \
         sleep 0.05; done; \
         for d in /sys/bus/pci/devices/*; do [ $(cat $d/device) = 0x1110 ] || continue; \
         echo 1 > $d/enable; echo $(head -n 1 $d/resource) $(head -n 3 $d/resource | tail -n 1); \
         done"
    );
    let lines = guest.sh(&script).unwrap();
    println!("{} has {count} devices after {:?}", guest.name(), began.elapsed());
    let number = |word: &str| u64::from_str_radix(word.trim_start_matches("0x"), 16).unwrap();
    let device = |line: &str| {
        let words: Vec<u64> = line.split_whitespace().map(number).collect();
        [words[0], words[3], words[4] - words[3] + 1]
    };
    let mut devices: Vec<[u64; 3]> = lines.lines().map(device).collect();
    devices.sort_by_key(|[.., len]| *len);
    devices
}

fn read(guest: &Guest, address: u64, bits: u32) -> u64 {
    let text = guest.sh(&format!("devmem {address:#x} {bits}")).unwrap();
    u64::from_str_radix(text.trim().trim_start_matches("0x"), 16).unwrap()
}

fn write(guest: &Guest, address: u64, bits: u32, value: u64) {
    guest.sh(&format!("devmem {address:#x} {bits} {value:#x}")).unwrap();
}

/// Writes what a module would say first: its version, active, its generation and directory.
fn announce(guest: &Guest, [registers, mailbox, _]: [u64; 3], generation: u64, dir_off: u64) {
    let half = mailbox + GUEST_OFF as u64;
    write(guest, half + 16, 64, generation);
    write(guest, half + 24, 64, dir_off);
    write(guest, half + 8, 64, u64::from(VERSION) | 1 << 32);
    write(guest, half, 64, GUEST_MAGIC);
    // Peer 0, vector 0.
    write(guest, registers + DOORBELL, 32, 0);
}

fn life_of_a_channel(kernel: KernelChoice, hot_plug: HotPlug) {
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = Lab::new().unwrap();
    let guests = ["a", "b"].map(|name| guest(&lab, name, kernel, hot_plug));
    let [a, b] = lab::boot(&lab, guests, BOOT).unwrap();
    let mut config = ChannelsConfig::new(lab.run_folder());
    config.drain_timeout_ms = 120_000;
    let channels = Channels::start(config.clone()).unwrap();
    join(&channels, &lab, &a);
    join(&channels, &lab, &b);
    let window = channels.list()[0].window_len_bytes;

    // Each has its doorbell, with its mailbox, and the other one's memory.
    let (of_a, of_b) = (devices(&a, 2), devices(&b, 2));
    for (guest, found, id) in [(&a, &of_a, 1), (&b, &of_b, 2)] {
        assert_eq!([found[0][2], found[1][2]], [MAILBOX_LEN as u64, window]);
        assert_eq!(read(guest, found[0][0] + IV_POSITION, 32), id);
        assert_eq!(read(guest, found[0][1], 64), HOST_MAGIC);
    }

    // The other one's memory can be read and not written.
    let marker = 0x1122_3344_5566_7788_u64;
    memory(&b).write_all_at(&marker.to_le_bytes(), MARKER_OFF).unwrap();
    assert_eq!(read(&a, of_a[1][1] + MARKER_OFF, 64), marker);
    write(&a, of_a[1][1] + MARKER_OFF, 64, 1);
    let mut bytes = [0; 8];
    memory(&b).read_exact_at(&mut bytes, MARKER_OFF).unwrap();
    assert_eq!(u64::from_le_bytes(bytes), marker);

    // What one says of itself, the other one's table says.
    announce(&a, of_a[0], 77, 0x10_000);
    let entry = of_b[0][1] + TABLE_OFF as u64;
    let script =
        format!("while [ $(devmem {:#x} 32) != 0x00000002 ]; do sleep 0.05; done", entry + 4);
    b.sh(&script).unwrap();
    assert_eq!([read(&b, entry + 8, 64), read(&b, entry + 16, 64)], [77, 0x10_000]);
    let slot = read(&b, entry + 32, 32);
    assert!((10..13).contains(&slot), "{slot}");
    assert_eq!(channels.list()[0].generation, Some(77));

    // One leaves, and comes back.
    let began = Instant::now();
    channels.leave("b").unwrap();
    println!("b left after {:?}", began.elapsed());
    assert_eq!(devices(&a, 1)[0][2], MAILBOX_LEN as u64);
    assert!(devices(&b, 0).is_empty());
    join(&channels, &lab, &b);
    devices(&a, 2);

    // Another daemon begins with what is left.
    channels.stop();
    let channels = Channels::start(config).unwrap();
    join(&channels, &lab, &a);
    assert_eq!(devices(&a, 1).len(), 1);
    join(&channels, &lab, &b);
    assert_eq!((devices(&a, 2).len(), devices(&b, 2).len()), (2, 2));

    // One is killed: its memory goes from the other one.
    b.kill();
    assert_eq!(devices(&a, 1)[0][2], MAILBOX_LEN as u64);
    a.check().unwrap();
    channels.leave("a").unwrap();
    assert!(channels.list().is_empty());
}

#[test]
fn with_linux_6_1() {
    life_of_a_channel(KernelChoice::V6_1, HotPlug::Acpi);
}

#[test]
fn with_linux_6_12() {
    life_of_a_channel(KernelChoice::V6_12, HotPlug::Acpi);
}

#[test]
fn with_native_hot_plug() {
    life_of_a_channel(KernelChoice::V6_1, HotPlug::Native);
}
