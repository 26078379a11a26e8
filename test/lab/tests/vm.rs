//! Real guests: what runs them, commands, files, network, disks, crashes. Needs root and what `lab
//! setup` prepares.

use std::time::Duration;

use lab::{Accelerator, Disk, Guest, Image, KernelChoice, Lab, LabError, Net};

/// Long, for machines that do other work; nothing waits that long when all is well.
const BOOT: Duration = Duration::from_secs(180);
const LONG: Duration = Duration::from_secs(120);

#[test]
fn guests_run_as_is_told() {
    let lab = Lab::new().unwrap();
    let told = lab::acceleration(&lab).unwrap();
    assert!(!told.reason.is_empty(), "{told:?}");
    let [guest] = lab::boot(&lab, [Guest::builder("a")], BOOT).unwrap();
    let answer = guest.qmp("query-kvm", serde_json::json!({})).unwrap();
    assert_eq!(answer["enabled"], told.accelerator == Accelerator::Kvm, "{told:?}: {answer}");
    assert_eq!(lab::acceleration(&lab).unwrap(), told, "the first answer stays");
}

#[test]
fn a_guest_takes_commands_and_files() {
    let lab = Lab::new().unwrap();
    let [guest] = lab::boot(&lab, [Guest::builder("a")], BOOT).unwrap();
    assert!(guest.release().contains("cloud-amd64"), "{}", guest.release());
    assert_eq!(guest.sh("hostname; uname -r").unwrap(), format!("a\n{}", guest.release()));

    let output = guest.run("echo out; echo err >&2; exit 7").unwrap();
    assert_eq!((output.code, output.text().as_str()), (7, "out\n"));
    assert_eq!(output.stderr, b"err\n");
    let error = guest.sh("echo why >&2; false").unwrap_err().to_string();
    assert!(error.contains("guest a") && error.contains("why"), "{error}");
    let output = guest.run_for("sleep 1000", Duration::from_millis(200)).unwrap();
    assert!(output.timed_out && output.code == 137, "{output:?}");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    let content: Vec<u8> = (0..3_000_001u32).map(|n| (n >> 3) as u8).collect();
    std::fs::write(&file, &content).unwrap();
    guest.put(&file, "/tmp/deep/file").unwrap();
    let hash = |text: &str| text.split_ascii_whitespace().next().map(str::to_owned);
    let here = std::process::Command::new("sha256sum").arg(&file).output().unwrap();
    let there = guest.sh("sha256sum /tmp/deep/file").unwrap();
    assert_eq!(hash(&there), hash(&String::from_utf8(here.stdout).unwrap()));
    assert!(guest.get("/tmp/deep/file").unwrap() == content);
    assert!(guest.get("/no/file").unwrap_err().to_string().contains("/no/file"));

    let status = guest.qmp("query-status", serde_json::json!({})).unwrap();
    assert_eq!(status["status"], "running");
    assert!(guest.qmp("no-such", serde_json::json!({})).is_err());
    assert!(guest.cpu_time().unwrap() > Duration::ZERO);
    guest.check().unwrap();
    guest.shutdown(LONG).unwrap();
}

#[test]
fn two_guests_talk_over_a_bridge() {
    let lab = Lab::new().unwrap();
    lab.net().bridge("br0").unwrap();
    let describe = |name: &str, number: u8| {
        let tap = format!("tap{number}");
        lab.net().tap(&tap, Some("br0")).unwrap();
        Guest::builder(name)
            .net(Net::tap(tap))
            .address(format!("10.0.0.{number}/24"))
            .address(format!("fd00::{number}/64"))
    };
    let [a, b] = lab::boot(&lab, [describe("a", 1), describe("b", 2)], BOOT).unwrap();
    a.sh("ping -c 1 10.0.0.2 && ping -6 -c 1 fd00::2").unwrap();

    let bytes = 16 << 20;
    for (kind, address, bytes) in [
        ("tcp", "10.0.0.2:7002", bytes),
        ("tcp", "[fd00::2]:7002", bytes),
        ("udp", "10.0.0.2:7002", 1 << 20),
    ] {
        let receive = format!("agent xfer recv {kind} listen {address} {bytes} 77");
        let mut receiver = b.spawn(&receive).unwrap();
        receiver.wait_line("listening", LONG).unwrap();
        let send = format!("agent xfer send {kind} connect {address} {bytes} 77");
        let sent = a.run_for(&send, LONG).unwrap().json().unwrap();
        let received = receiver.wait(LONG).unwrap().json().unwrap();
        assert_eq!(sent["bytes"], bytes);
        assert_eq!(sent["hash"], received["hash"], "{kind} {address}");
    }

    let mut servers = b.spawn("agent rr-server & agent sink & wait").unwrap();
    servers.wait_line("7000", LONG).unwrap();
    servers.wait_line("7001", LONG).unwrap();
    for tool in ["rr tcp", "rr udp", "tcp-stream", "udp-small"] {
        let result = a.run(&format!("agent {tool} 10.0.0.2 0.2")).unwrap().json().unwrap();
        let rate = result.get("rate").or(result.get("mbit_s")).and_then(|rate| rate.as_f64());
        assert!(rate.unwrap() > 0.0, "{tool}: {result}");
    }
    servers.kill().unwrap();
}

#[test]
fn all_kernels_mount_all_file_systems_on_a_disk() {
    let lab = Lab::new().unwrap();
    let mut guests = Vec::new();
    for (name, kernel) in [("old", KernelChoice::V6_1), ("new", KernelChoice::V6_12)] {
        match lab.kernel(kernel) {
            Err(LabError::Missing { what, .. }) => eprintln!("left out: {what}"),
            other => {
                other.unwrap();
                let disk = lab.scratch(&format!("{name}.raw"), 512 << 20).unwrap();
                let guest = Guest::builder(name)
                    .kernel(kernel)
                    .image(Image::builder().disk_tools())
                    .disk(Disk::file(disk));
                guests.push(guest);
            }
        }
    }
    for guest in &lab::boot_all(&lab, guests, BOOT).unwrap() {
        for (make, kind, check) in [
            ("mke2fs -q -t ext4 -F", "ext4", "e2fsck -fn"),
            ("mkfs.xfs -q -f", "xfs", "xfs_repair -n"),
            ("mkfs.btrfs -q -f", "btrfs", "btrfs check"),
        ] {
            // Each kind is loaded by the kernel's own call of modprobe at the mount.
            let script = format!(
                "set -e; {make} /dev/vda; mkdir -p /mnt; mount -t {kind} /dev/vda /mnt
                 echo data > /mnt/file; umount /mnt; {check} /dev/vda
                 mount -t {kind} /dev/vda /mnt; cat /mnt/file; umount /mnt"
            );
            let output = guest.run_for(&script, LONG).unwrap().ok().unwrap();
            assert!(output.ends_with("data"), "{kind}: {output}");
        }
    }
}

#[test]
fn a_guest_that_crashes_tells_its_story() {
    let lab = Lab::new().unwrap();
    let [guest] = lab::boot(&lab, [Guest::builder("a")], BOOT).unwrap();
    let error = guest.run("echo c > /proc/sysrq-trigger").unwrap_err();
    let LabError::GuestDied { name, why, console, .. } = &error else { panic!("{error}") };
    assert_eq!(name, "a");
    assert!(why.contains("Kernel panic - not syncing: sysrq triggered crash"), "{why}");
    // The end of the trace: its beginning may lie above the lines that are told.
    assert!(console.contains("RIP: "), "{console}");
    assert!(!guest.is_running());
    assert!(matches!(guest.run("true"), Err(LabError::GuestDied { .. })));
}

#[test]
fn a_guest_that_hangs_tells_where_its_cpus_are() {
    let lab = Lab::new().unwrap();
    let [guest] = lab::boot(&lab, [Guest::builder("a").vcpus(2)], BOOT).unwrap();
    guest.qmp("stop", serde_json::json!({})).unwrap();
    let error = guest.run_for("true", Duration::ZERO).unwrap_err();
    let LabError::GuestTimeout { console, .. } = &error else { panic!("{error}") };
    for told in ["RIP=", "CPU 0 ISR", "CPU 1 ISR", "CPU 1 IRR"] {
        assert!(console.contains(told), "{told}: {console}");
    }
}

#[test]
fn a_qemu_that_does_not_start_tells_why() {
    let lab = Lab::new().unwrap();
    let error = Guest::builder("a").qemu_args(["-no-such-option"]).start(&lab).unwrap_err();
    assert!(error.to_string().contains("no-such-option"), "{error}");
    let error = Guest::builder("much too long a name").start(&lab).unwrap_err();
    assert!(error.to_string().contains("16"), "{error}");
    let error = Guest::builder("a").image(Image::builder().program("no-such")).start(&lab);
    assert!(error.unwrap_err().to_string().contains("no-such"));
}

#[test]
fn a_killed_guest_is_gone() {
    let lab = Lab::new().unwrap();
    let guest = Guest::builder("a").start(&lab).unwrap();
    let process = format!("/proc/{}", guest.pid());
    assert!(std::path::Path::new(&process).exists());
    let run = lab.run_folder().to_owned();
    drop(lab);
    assert!(run.exists(), "a guest keeps its session");
    drop(guest);
    assert!(!std::path::Path::new(&process).exists());
    assert!(!run.exists());
}

#[test]
fn commands_live_on_a_root_disk_made_of_packages() {
    let lab = Lab::new().unwrap();
    let packages = ["busybox-static", "dash", "libc6", "base-files"];
    let root = lab::rootfs::ext4_from_packages(lab.cache(), &packages, 64).unwrap();
    let disk = lab.path("root.raw");
    std::fs::copy(root, &disk).unwrap();
    let guest = Guest::builder("a").disk(Disk::file(disk)).root_on_first_disk();
    let [guest] = lab::boot(&lab, [guest], BOOT).unwrap();
    // The agent and its tools stay reachable; everything else is the disk's own.
    guest.put_bytes("/kept", 0o644, b"kept").unwrap();
    let script = "/bin/busybox cat /kept /etc/debian_version && test -x /lab/agent && \
                  /bin/busybox grep -c '^/dev/vda / ext4' /proc/mounts";
    let output = guest.sh(script).unwrap();
    assert!(output.starts_with("kept") && output.ends_with("\n1"), "{output}");
    guest.shutdown(LONG).unwrap();
}
