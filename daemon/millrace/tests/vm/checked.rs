//! Random checked operations on disks whose daemon is killed again and again: no wrong byte, not in
//! the guest and not in the image. `test/lab/fsx` does the operations in the guest.
//! `make soak` runs every format with every file system.

#![allow(non_snake_case)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use base::random::{Random, Seeded};
use lab::{Daemon, Disk, Guest, Image, Lab, Output, Vm};
use serde_json::Value;

use crate::common::{LONG, MIB, READY, beside_others, boot, daemon};

/// Enough for xfs, which takes no less than 300 MiB.
const DISK_BYTES: u64 = 384 * MIB;
/// Longest pause between a kill and the next start.
const AWAY_MS: u32 = 300;
/// Every third kill, on average, is followed by another while the new daemon still takes up its
/// sessions.
const AGAIN_ONE_IN: u32 = 3;
/// Longest time until that second kill.
const AGAIN_MS: u32 = 50;
/// A guest that works so much longer than it should waits for a lost request.
const HANGS: Duration = Duration::from_secs(600);
/// Default of [`MINUTES`].
const DEFAULT_MINUTES: u64 = 20;
/// Environment variable: minutes of each long case.
const MINUTES: &str = "MILLRACE_FSX_MINUTES";

/// Image format, and the format of its backing file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Raw,
    Qcow2,
    Qcow2OnRaw,
    Qcow2OnQcow2,
}

/// Target of the operations: a file system or the bare device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum On {
    Ext4,
    Xfs,
    Device,
}

/// Length of a case, and the distance of kills.
#[derive(Clone, Copy, Debug)]
enum Span {
    /// A number of kills, 4 to 8 seconds apart.
    Short { kills: u32 },
    /// A time with kills 5 to 15 seconds apart.
    Long { time: Duration },
}

#[derive(Clone, Copy, Debug)]
struct Case {
    format: Format,
    on: On,
    vcpus: u16,
    seed: u64,
}

fn host(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    let said = said.concat();
    assert!(output.status.success(), "{program} {arguments:?}: {}: {said}", output.status);
    said
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

impl Case {
    /// Cluster size: small with two CPUs, so that tables fill and new ones are allocated all the
    /// time.
    fn cluster_bytes(self) -> u32 {
        if self.vcpus > 1 { 4096 } else { 65536 }
    }

    /// Makes the image and its backing file in a folder of their own, and returns both.
    fn make(self, lab: &Lab) -> (PathBuf, Option<PathBuf>) {
        let folder = lab.path("images");
        std::fs::create_dir_all(&folder).unwrap();
        if self.format == Format::Raw {
            return (lab.scratch("images/disk.img", DISK_BYTES).unwrap(), None);
        }
        let image = folder.join("disk.qcow2");
        let options = format!("cluster_size={}", self.cluster_bytes());
        let backing = (self.format != Format::Qcow2).then(|| self.make_backing(&folder));
        let len = DISK_BYTES.to_string();
        let mut arguments = vec!["create", "-q", "-f", "qcow2", "-o", &options];
        if let Some(path) = &backing {
            let format = path.extension().unwrap().to_str().unwrap();
            arguments.extend(["-b", text(path), "-F", format]);
        }
        host("qemu-img", &[arguments, vec![text(&image), &len]].concat());
        (image, backing)
    }

    /// Makes the backing file: full of a pattern of its own, below a file system if the case has
    /// one.
    fn make_backing(self, folder: &Path) -> PathBuf {
        let raw = folder.join("base.raw");
        lab_fsx::backing::fill(&raw, DISK_BYTES).unwrap();
        match self.on {
            On::Ext4 => host("mke2fs", &["-q", "-t", "ext4", "-F", "-E", "nodiscard", text(&raw)]),
            On::Xfs => host("mkfs.xfs", &["-q", "-f", "-K", text(&raw)]),
            On::Device => String::new(),
        };
        if self.format == Format::Qcow2OnRaw {
            return raw;
        }
        let image = folder.join("base.qcow2");
        host("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", text(&raw), text(&image)]);
        std::fs::remove_file(raw).unwrap();
        image
    }

    fn start(self, lab: &Lab, image: &Path) -> (Daemon, Guest) {
        let format = if self.format == Format::Raw { "raw" } else { "qcow2" };
        let mut options = format!("format = {format:?}\npath = {image:?}\n");
        if matches!(self.format, Format::Qcow2OnRaw | Format::Qcow2OnQcow2) {
            options.push_str(&format!("backing_dir = {:?}\n", image.parent().unwrap()));
        }
        let vm = Vm::new("a", "").disk("d", &options);
        let daemon = daemon("d").vm(vm).holder().start(lab).unwrap();
        let disk = Disk::vhost_user(daemon.socket("a", "d"));
        let programs: &[&str] = match self.on {
            On::Ext4 => &["mke2fs", "e2fsck"],
            On::Xfs => &["mkfs.xfs", "xfs_repair"],
            On::Device => &[],
        };
        let image =
            programs.iter().fold(Image::builder().fsx(), |image, name| image.program(*name));
        let image = image.module("ext4").module("xfs");
        let builder = Guest::builder("a").memory_mb(192).vcpus(self.vcpus.into());
        let [guest] = boot(lab, [builder.image(image).disk(disk)]);
        // Nobody has said how many queues there are: the daemon offers as many as QEMU asks for by
        // itself.
        assert_eq!(guest.sh("ls /sys/block/vda/mq | wc -l").unwrap(), self.vcpus.to_string());
        (daemon, guest)
    }

    /// Makes the file system, unless the backing file has it, and mounts it. Nothing but a busy
    /// chapter's operations asks for a flush in the first minute: by itself ext4 would every five
    /// seconds.
    fn mount(self, guest: &Guest) {
        let has_backing = matches!(self.format, Format::Qcow2OnRaw | Format::Qcow2OnQcow2);
        let (make, mount) = match self.on {
            On::Ext4 => ("mke2fs -q -t ext4 -F /dev/vda", "mount -t ext4 -o commit=60"),
            On::Xfs => ("mkfs.xfs -q -f /dev/vda", "mount -t xfs"),
            On::Device => return,
        };
        let make = if has_backing { "true" } else { make };
        let script = format!("set -e; {make}; mkdir -p /mnt; {mount} /dev/vda /mnt");
        guest.run_for(&script, LONG).unwrap().ok().unwrap();
    }

    /// The guest's command, which works until SIGTERM.
    fn command(self) -> String {
        let place = match (self.on, self.format) {
            (On::Device, Format::Raw | Format::Qcow2) => "disk /dev/vda",
            (On::Device, _) => "disk /dev/vda backing=true",
            _ => "folder /mnt trim=true",
        };
        format!("exec fsx run {place} seed={} save=/tmp/model", self.seed)
    }

    /// Unmounts, has the file system checked, mounts it again and reads all once more.
    fn check_in_guest(self, guest: &Guest) {
        let check = match self.on {
            On::Ext4 => "e2fsck -fn",
            On::Xfs => "xfs_repair -n",
            On::Device => {
                return guest_runs(
                    guest,
                    "echo 3 > /proc/sys/vm/drop_caches; fsx verify /tmp/model",
                );
            }
        };
        guest_runs(
            guest,
            &format!(
                "set -e; umount /mnt; echo 3 > /proc/sys/vm/drop_caches; {check} /dev/vda 2>&1; \
                 mount /dev/vda /mnt; fsx verify /tmp/model; umount /mnt"
            ),
        );
    }

    /// Kills the daemon while the guest works. Returns the counts that the guest prints.
    fn work(self, daemon: &mut Daemon, guest: &Guest, span: Span) -> Value {
        let running = guest.spawn(&self.command()).unwrap();
        let (pid, begin) = (running.pid(), Instant::now());
        let (ended, end) = channel();
        let mut random = Seeded::new(self.seed);
        let (most, least_ms, range_ms) = match span {
            Span::Short { kills } => (kills, 4000, 4000),
            Span::Long { .. } => (u32::MAX, 5000, 10000),
        };
        let is_in_time = || match span {
            Span::Short { .. } => true,
            Span::Long { time } => begin.elapsed() < time,
        };
        let work_time = if let Span::Long { time } = span { time } else { Duration::ZERO };
        std::thread::scope(|scope| {
            let waiter = scope.spawn(move || {
                let output = running.wait(work_time + HANGS);
                // Nobody listens any more after the last kill.
                let _ = ended.send(());
                output
            });
            for _ in 0..most {
                let pause_ms = u64::from(least_ms + random.below(range_ms));
                // It ends early when it has found something.
                let has_ended = end.recv_timeout(Duration::from_millis(pause_ms)).is_ok();
                if has_ended || !is_in_time() {
                    break;
                }
                println!("{self:?}: killed at {} ms", begin.elapsed().as_millis());
                kill_and_restart(daemon, &mut random);
            }
            // It has ended already when it has found something.
            let _ = guest.run(&format!("kill -TERM {pid}"));
            let said = waiter.join().unwrap().and_then(Output::json);
            said.unwrap_or_else(|error| panic!("{self:?}: {error}"))
        })
    }
}

/// Kills the daemon and starts it again, sometimes twice.
fn kill_and_restart(daemon: &mut Daemon, random: &mut Seeded) {
    // The sleeps wait for no event: a kill is meant to come at any moment.
    let mut sleep = |most_ms| {
        std::thread::sleep(Duration::from_millis(random.below(most_ms).into()));
        random.below(AGAIN_ONE_IN) == 0
    };
    daemon.kill9();
    let is_again = sleep(AWAY_MS);
    daemon.restart().unwrap();
    if is_again {
        println!("killed once more");
        sleep(AGAIN_MS);
        daemon.restart().unwrap();
    }
}

fn guest_runs(guest: &Guest, script: &str) {
    let said = guest.run_for(script, LONG).unwrap().ok();
    said.unwrap_or_else(|error| panic!("{error}"));
}

/// Checks the image and compares its content with what the guest read from its device.
fn check_image(lab: &Lab, case: Case, image: &Path, seen: &Value) {
    let raw = match case.format {
        Format::Raw => image.to_owned(),
        _ => {
            println!("{}", host("qemu-img", &["check", "-f", "qcow2", text(image)]));
            let raw = lab.path("converted.raw");
            host("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", text(image), text(&raw)]);
            raw
        }
    };
    let held = serde_json::to_value(lab_fsx::digest::digest(&raw).unwrap()).unwrap();
    let (held, seen) = (held.as_object().unwrap(), seen.as_object().unwrap());
    let differ = held.keys().chain(seen.keys()).find(|mib| held.get(*mib) != seen.get(*mib));
    assert_eq!(differ, None, "{case:?}: the image's MiB of this number is not the device's");
}

fn no_byte_is_wrong(case: Case, span: Span) {
    let _beside = beside_others();
    let lab = Lab::new().unwrap();
    let (image, backing) = case.make(&lab);
    let sums = |path: &PathBuf| lab_fsx::digest::digest(path).unwrap();
    let before = backing.as_ref().map(sums);
    let (mut daemon, guest) = case.start(&lab, &image);
    case.mount(&guest);
    println!("{case:?}: {}", case.work(&mut daemon, &guest, span));
    case.check_in_guest(&guest);
    let seen = "echo 3 > /proc/sys/vm/drop_caches; fsx digest /dev/vda";
    let seen = guest.run_for(seen, LONG).unwrap().json().unwrap();
    let complaints =
        "dmesg | grep -iE 'I/O error|EXT4-fs (error|warning)|XFS.*(corrupt|error)' || true";
    assert_eq!(guest.sh(complaints).unwrap(), "");
    guest.check().unwrap();
    guest.shutdown(READY).unwrap();
    daemon.stop(READY).unwrap();
    let log = daemon.log_tail(usize::MAX);
    assert!(!log.contains(" ERROR "), "{log}");
    check_image(&lab, case, &image, &seen);
    assert!(backing.as_ref().map(sums) == before, "{case:?}: the backing file has changed");
}

#[test]
fn abuse_D0_raw_with_ext4_keeps_every_byte_over_kills() {
    let case = Case { format: Format::Raw, on: On::Ext4, vcpus: 2, seed: 1 };
    no_byte_is_wrong(case, Span::Short { kills: 4 });
}

#[test]
fn abuse_D0_qcow2_keeps_every_byte_over_kills() {
    let case = Case { format: Format::Qcow2, on: On::Device, vcpus: 1, seed: 2 };
    no_byte_is_wrong(case, Span::Short { kills: 4 });
}

#[test]
fn abuse_D0_qcow2_on_a_backing_file_with_xfs_keeps_every_byte_over_kills() {
    let case = Case { format: Format::Qcow2OnQcow2, on: On::Xfs, vcpus: 2, seed: 3 };
    no_byte_is_wrong(case, Span::Short { kills: 4 });
}

/// The long form of a case.
fn long(format: Format, on: On, vcpus: u16) {
    let minutes = std::env::var(MINUTES).map_or(DEFAULT_MINUTES, |text| text.parse().unwrap());
    // Other choices in each case: there is no use in doing the same on all.
    let seed = 1000 + format as u64 * 100 + on as u64 * 10 + u64::from(vcpus);
    let time = Duration::from_secs(minutes * 60);
    no_byte_is_wrong(Case { format, on, vcpus, seed }, Span::Long { time });
}

macro_rules! long_cases {
    ($($name:ident: $format:ident $on:ident $vcpus:literal;)*) => {$(
        #[test]
        #[ignore = "MILLRACE_FSX_MINUTES, 20 unless set: make soak"]
        fn $name() {
            long(Format::$format, On::$on, $vcpus);
        }
    )*};
}

long_cases! {
    long_raw_ext4_1: Raw Ext4 1;
    long_raw_ext4_2: Raw Ext4 2;
    long_raw_xfs_1: Raw Xfs 1;
    long_raw_xfs_2: Raw Xfs 2;
    long_raw_device_1: Raw Device 1;
    long_raw_device_2: Raw Device 2;
    long_qcow2_ext4_1: Qcow2 Ext4 1;
    long_qcow2_ext4_2: Qcow2 Ext4 2;
    long_qcow2_xfs_1: Qcow2 Xfs 1;
    long_qcow2_xfs_2: Qcow2 Xfs 2;
    long_qcow2_device_1: Qcow2 Device 1;
    long_qcow2_device_2: Qcow2 Device 2;
    long_qcow2_on_raw_ext4_1: Qcow2OnRaw Ext4 1;
    long_qcow2_on_raw_ext4_2: Qcow2OnRaw Ext4 2;
    long_qcow2_on_raw_xfs_1: Qcow2OnRaw Xfs 1;
    long_qcow2_on_raw_xfs_2: Qcow2OnRaw Xfs 2;
    long_qcow2_on_raw_device_1: Qcow2OnRaw Device 1;
    long_qcow2_on_raw_device_2: Qcow2OnRaw Device 2;
    long_qcow2_on_qcow2_ext4_1: Qcow2OnQcow2 Ext4 1;
    long_qcow2_on_qcow2_ext4_2: Qcow2OnQcow2 Ext4 2;
    long_qcow2_on_qcow2_xfs_1: Qcow2OnQcow2 Xfs 1;
    long_qcow2_on_qcow2_xfs_2: Qcow2OnQcow2 Xfs 2;
    long_qcow2_on_qcow2_device_1: Qcow2OnQcow2 Device 1;
    long_qcow2_on_qcow2_device_2: Qcow2OnQcow2 Device 2;
}
