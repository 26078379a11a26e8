//! Huge pages below a VM's memory, without settings of the host or of QEMU.

use lab::{Daemon, Disk, Guest, Lab, Net, Vm};
use rustix::process::{Pid, Signal, kill_process};

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

/// A daemon with a network and disks for two VMs.
fn start(lab: &Lab) -> Daemon {
    let disk = "format = \"memory\"\nsize = \"64MiB\"";
    let vm = |name: &str| Vm::new(name, "").net("n", "switch = \"lan\"").disk("d", disk);
    let config = daemon("d").daemon("huge_pages = true").switch("lan", "").holder();
    config.vm(vm("a")).vm(vm("b")).start(lab).unwrap()
}

/// The two VMs.
fn boot_both(lab: &Lab, daemon: &Daemon) -> [Guest; 2] {
    let guest = |name: &str, last: u8| {
        Guest::builder(name)
            .net(Net::vhost_user(daemon.socket(name, "n")))
            .address(format!("10.0.0.{last}/24"))
            .disk(Disk::vhost_user(daemon.socket(name, "d")))
    };
    boot(lab, [guest("a", 1), guest("b", 2)])
}

#[test]
fn memory_moves_into_huge_pages_while_it_is_used() {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let mut daemon = start(&lab);
    let guests = boot_both(&lab, &daemon);
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

/// The kernel may have the process wait, for as long as a CPU has no time for its work.
#[test]
fn nobody_waits_for_the_process_that_moves_memory() {
    let _alone = alone();
    let lab = Lab::new().unwrap();
    let daemon = start(&lab);
    let [mover] = daemon.pids()[1..] else { panic!("{:?}", daemon.pids()) };
    let mover = Pid::from_raw(mover.cast_signed()).unwrap();
    let send = |signal| kill_process(mover, signal).unwrap();
    send(Signal::STOP);
    let guests = boot_both(&lab, &daemon);
    let [a, b] = &guests;
    transfer(a, b, "tcp", "10.0.0.2", 16 * MIB);
    daemon.status().unwrap();
    assert_eq!(huge_bytes(&daemon, "a") + huge_bytes(&daemon, "b"), 0.0);
    send(Signal::CONT);
    until_huge(&daemon, &guests);
    send(Signal::KILL);
    until("it has gone", || daemon.pids().len() == 1);
    transfer(b, a, "tcp", "10.0.0.1", 16 * MIB);
    daemon.status().unwrap();
}
