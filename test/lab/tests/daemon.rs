//! Guests on a real `millrace` daemon. Needs root, what `lab setup` prepares, and the program
//! (built before, or named by `MILLRACE_BIN`).

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use lab::{Daemon, Disk, Guest, GuestBuilder, Lab, LabError, Net, Vm, Vsock};
use lab_agent::tools::xfer::{self, Content};

/// Long, for machines that do other work; nothing waits that long when all is well.
const BOOT: Duration = Duration::from_secs(180);
const LONG: Duration = Duration::from_secs(120);

fn guest(daemon: &Daemon, name: &str, number: u8) -> GuestBuilder {
    Guest::builder(name)
        .net(Net::vhost_user(daemon.socket(name, "net0")))
        .address(format!("10.0.0.{number}/24"))
        .disk(Disk::vhost_user(daemon.socket(name, "disk0")))
        .vsock(Vsock::vhost_user(daemon.socket(name, "vsock")))
}

fn vm(name: &str, cid: u32) -> Vm {
    Vm::new(name, "")
        .net("net0", "switch = \"lan\"")
        .disk("disk0", "format = \"memory\"\nsize = \"16MiB\"")
        .vsock(cid)
}

#[test]
fn guests_use_all_devices_of_a_daemon() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::builder("d").switch("lan", "").vm(vm("a", 3)).vm(vm("b", 4));
    let mut daemon = daemon.start(&lab).unwrap();
    let guests = [guest(&daemon, "a", 1), guest(&daemon, "b", 2)];
    let [a, b] = lab::boot(&lab, guests, BOOT).unwrap();
    a.sh("ping -c 1 10.0.0.2").unwrap();

    let random = "dd if=/dev/urandom of=/tmp/r bs=1M count=4 2>/dev/null";
    let disk = "dd if=/tmp/r of=/dev/vda bs=1M conv=fsync 2>/dev/null
                echo 3 > /proc/sys/vm/drop_caches; cmp -n 4194304 /tmp/r /dev/vda";
    a.sh(&format!("{random} && {disk}")).unwrap();

    // The guest listens, the host sends; the daemon joins the host's Unix socket and the guest.
    let content = Content { bytes: 1 << 20, seed: 5 };
    let receive = format!("agent xfer recv vsock listen 4294967295:77 {} 5", content.bytes);
    let mut receiver = a.spawn(&receive).unwrap();
    receiver.wait_line("listening", LONG).unwrap();
    let mut stream = std::os::unix::net::UnixStream::connect(daemon.vsock_path("a")).unwrap();
    std::io::Write::write_all(&mut stream, b"CONNECT 77\n").unwrap();
    let mut answer = Vec::new();
    while answer.last() != Some(&b'\n') {
        let mut byte = [0];
        std::io::Read::read_exact(&mut stream, &mut byte).unwrap();
        answer.extend(byte);
    }
    assert!(answer.starts_with(b"OK "), "{answer:?}");
    let sent = xfer::send(stream, content).unwrap();
    let received = receiver.wait(LONG).unwrap().json().unwrap();
    assert_eq!(sent.json()["hash"], received["hash"]);

    assert!(daemon.metrics().unwrap().contains("millrace_"));
    assert!(daemon.status().unwrap().is_object());
    assert!(daemon.cpu_time().unwrap() > Duration::ZERO);
    let error = daemon.request("GET", "/v1/no-such", None).unwrap_err().to_string();
    assert!(error.contains("404"), "{error}");
    drop((a, b));
    daemon.stop(LONG).unwrap();
    assert!(!daemon.is_running().unwrap());
}

#[test]
fn a_daemon_is_killed_and_comes_back() {
    let lab = Lab::new().unwrap();
    let daemon = Daemon::builder("d").switch("lan", "").vm(vm("a", 3)).holder();
    let mut daemon = daemon.start(&lab).unwrap();
    let (pid, holder) = (daemon.pid(), daemon.holder_pid().unwrap());
    daemon.kill9();
    assert!(daemon.status().is_err());
    daemon.restart().unwrap();
    assert_ne!(daemon.pid(), pid);
    assert_eq!(daemon.holder_pid(), Some(holder));
    assert!(std::path::Path::new(&format!("/proc/{holder}")).exists());
    daemon.status().unwrap();
    drop(daemon);
    assert!(!std::path::Path::new(&format!("/proc/{holder}")).exists());
}

#[test]
fn a_daemon_that_does_not_start_shows_its_log() {
    let lab = Lab::new().unwrap();
    let error = Daemon::builder("d").daemon("no_such_key = 1").start(&lab).unwrap_err();
    let LabError::Daemon { what, log } = &error else { panic!("{error}") };
    assert!(what.contains("before it was ready"), "{what}");
    assert!(log.contains("no_such_key"), "{log}");
}
