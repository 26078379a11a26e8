//! Huge pages below a VM's memory, without settings of the host or of QEMU.

use lab::{Daemon, Disk, Guest, Lab, Net, Vm};

use crate::common::{MIB, alone, boot, daemon, transfer, until};

/// Memory of a VM that must come to be in huge pages: what its boot image alone takes.
const LEAST_BYTES: f64 = 32.0 * MIB as f64;

fn huge_bytes(daemon: &Daemon, vm: &str) -> f64 {
    daemon.metric_sum("millrace_vm_huge_bytes", &[("vm", vm)]).unwrap()
}

/// Shared memory that a process maps by huge pages, in KiB.
fn mapped_huge_kib(pid: u32) -> u64 {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let line = maps.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn until_huge(daemon: &Daemon, guests: &[Guest; 2]) {
    for guest in guests {
        until("the VM's memory is in huge pages", || {
            huge_bytes(daemon, guest.name()) >= LEAST_BYTES
        });
    }
}

#[test]
fn memory_moves_into_huge_pages_while_it_is_used() {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let disk = "format = \"memory\"\nsize = \"64MiB\"";
    let vm = |name: &str| Vm::new(name, "").net("n", "switch = \"lan\"").disk("d", disk);
    let config = daemon("d").daemon("huge_pages = true").switch("lan", "").holder();
    let mut daemon = config.vm(vm("a")).vm(vm("b")).start(&lab).unwrap();
    let guest = |name: &str, last: u8| {
        Guest::builder(name)
            .net(Net::vhost_user(daemon.socket(name, "n")))
            .address(format!("10.0.0.{last}/24"))
            .disk(Disk::vhost_user(daemon.socket(name, "d")))
    };
    let guests = boot(&lab, [guest("a", 1), guest("b", 2)]);
    let [a, b] = &guests;
    // Beside the moves, or most of it: both ends compare the bytes.
    transfer(a, b, "tcp", "10.0.0.2", 16 * MIB);
    until_huge(&daemon, &guests);
    transfer(b, a, "tcp", "10.0.0.1", 16 * MIB);
    // Of the two the daemon alone: QEMU maps a memfd where no huge page fits.
    assert!(mapped_huge_kib(daemon.pid()) > 0);
    // The next daemon finds it so.
    daemon.restart().unwrap();
    until_huge(&daemon, &guests);
    transfer(a, b, "tcp", "10.0.0.2", 16 * MIB);
}

#[test]
fn a_daemon_that_is_told_not_to_leaves_memory_alone() {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let vm = Vm::new("a", "").net("n", "switch = \"lan\"");
    let config = daemon("d").daemon("huge_pages = false").switch("lan", "").vm(vm);
    let daemon = config.start(&lab).unwrap();
    let guest = Guest::builder("a").net(Net::vhost_user(daemon.socket("a", "n")));
    let [guest] = boot(&lab, [guest]);
    let threads = std::fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default()
    };
    assert!(!threads.map(name).any(|name| name.trim() == "huge-pages"));
    drop(guest);
    assert_eq!((huge_bytes(&daemon, "a"), mapped_huge_kib(daemon.pid())), (0.0, 0));
}
