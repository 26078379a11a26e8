//! Images beside QEMU and its tools: they and we exclude and admit each other as two QEMUs do.
//!
//! The judge is QEMU: each of our ways to open an image is compared with a QEMU that opens it so,
//! in front of the same peer, in both orders.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::BlockError;
use crate::backend::Backend;
use crate::qcow2::tests::open_as;
use crate::raw::RawBackend;

/// A raw image, and a qcow2 image on top of it, in one folder.
struct Images(tempfile::TempDir);

impl Images {
    fn new() -> Self {
        let images = Self(tempfile::tempdir().unwrap());
        File::create(images.base()).unwrap().set_len(1 << 20).unwrap();
        for name in ["top.qcow2", "other.qcow2"] {
            let args = ["create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", name];
            let run = Command::new("qemu-img").args(args).current_dir(images.0.path()).status();
            assert!(run.unwrap().success());
        }
        images
    }

    fn base(&self) -> PathBuf {
        self.0.path().join("base.raw")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// How a guest's disk is opened.
#[derive(Debug, Clone, Copy)]
struct Role {
    image: &'static str,
    read_only: bool,
}

const ROLES: [Role; 5] = [
    Role { image: "base.raw", read_only: false },
    Role { image: "base.raw", read_only: true },
    // Both have base.raw as their backing file.
    Role { image: "top.qcow2", read_only: false },
    Role { image: "top.qcow2", read_only: true },
    Role { image: "other.qcow2", read_only: false },
];

impl Role {
    fn format(self) -> &'static str {
        self.image.rsplit('.').next().unwrap()
    }

    fn ours(self, images: &Images) -> Result<Box<dyn Backend>, BlockError> {
        let path = images.path(self.image);
        match self.format() {
            "raw" => Ok(Box::new(RawBackend::open(&path, false, self.read_only, 512)?)),
            _ => {
                let dir = Some(images.0.path());
                Ok(Box::new(open_as(&path, dir, self.read_only)?))
            }
        }
    }

    fn node(self, images: &Images) -> String {
        let (format, path) = (self.format(), images.path(self.image));
        let read_only = if self.read_only { "on" } else { "off" };
        format!(
            "driver={format},node-name=disk,read-only={read_only},file.driver=file,\
             file.filename={}",
            path.display()
        )
    }

    /// A QEMU with such a disk; its guest never runs.
    fn guest(self, images: &Images) -> Result<Process, String> {
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-M", "microvm", "-accel", "tcg", "-nodefaults", "-display", "none", "-S"]);
        command.args(["-qmp", "stdio", "-blockdev", &self.node(images)]);
        command.args(["-device", "virtio-blk-device,drive=disk"]);
        Process::start(command)
    }

    fn storage_daemon(self, images: &Images, socket: &str) -> Result<Process, String> {
        let writable = if self.read_only { "off" } else { "on" };
        let path = images.path(socket);
        let export = format!(
            "type=vhost-user-blk,id=export,node-name=disk,writable={writable},addr.type=unix,\
             addr.path={}",
            path.display()
        );
        let mut command = Command::new("qemu-storage-daemon");
        command.args(["--chardev", "stdio,id=monitor", "--monitor", "monitor"]);
        command.args(["--blockdev", &self.node(images), "--export", &export]);
        Process::start(command)
    }
}

/// A process of QEMU's with all its disks open.
struct Process(Child);

impl Process {
    /// Starts a process, which answers its monitor once everything on the command line is there.
    /// The error is its output.
    fn start(mut command: Command) -> Result<Self, String> {
        let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = pipes.spawn().unwrap();
        // Gone already, if it fails.
        let _ = child.stdin.as_mut().unwrap().write_all(b"{\"execute\":\"qmp_capabilities\"}\n");
        let answers = BufReader::new(child.stdout.take().unwrap());
        if answers.lines().any(|line| line.is_ok_and(|line| line.contains("\"return\""))) {
            return Ok(Self(child));
        }
        let mut text = String::new();
        child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        child.wait().unwrap();
        Err(text)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A name, and how it is started.
type Peer<'a> = (String, Box<dyn Fn() -> Result<Process, String> + 'a>);

/// Processes of QEMU's that open an image beside ours, and stay.
fn peers(images: &Images) -> Vec<Peer<'_>> {
    let mut peers: Vec<Peer<'_>> = Vec::new();
    for (n, role) in ROLES.into_iter().enumerate() {
        peers.push((format!("QEMU {role:?}"), Box::new(move || role.guest(images))));
        let start = move || role.storage_daemon(images, &format!("socket-{n}"));
        peers.push((format!("storage daemon {role:?}"), Box::new(start)));
    }
    peers
}

/// Commands that open an image, do something, and end.
const TOOLS: [&str; 12] = [
    "qemu-io -r -f raw -c quit base.raw",
    "qemu-io -f raw -c quit base.raw",
    "qemu-io -r -f qcow2 -c quit top.qcow2",
    "qemu-io -f qcow2 -c quit top.qcow2",
    "qemu-img info -f raw base.raw",
    "qemu-img info -f qcow2 top.qcow2",
    "qemu-img info -U -f qcow2 top.qcow2",
    "qemu-img check -f qcow2 top.qcow2",
    "qemu-img check -U -f qcow2 top.qcow2",
    "qemu-img resize -q -f raw base.raw 1M",
    "qemu-img convert -f raw -O raw base.raw copy.raw",
    "qemu-img convert -f qcow2 -O raw top.qcow2 copy.raw",
];

fn tool(images: &Images, line: &str) -> Result<(), String> {
    let words: Vec<_> = line.split(' ').collect();
    let run = Command::new(words[0]).args(&words[1..]).current_dir(images.0.path()).output();
    let run = run.unwrap();
    // 3: a check that found leaks. An image that is served has reserved clusters.
    let is_admitted = matches!(run.status.code(), Some(0 | 3));
    if is_admitted { Ok(()) } else { Err(String::from_utf8(run.stderr).unwrap()) }
}

/// QEMU's text where it is the last one to come.
fn is_lock_error(text: &str) -> bool {
    text.contains("Failed to get \"write\" lock")
        || text.contains("Failed to get shared \"write\" lock")
}

#[test]
fn abuse_Q6_whoever_comes_beside_us_is_admitted_as_beside_qemu() {
    let images = Images::new();
    let peers = peers(&images);
    let all = |holder: &str| {
        let mut outcomes = Vec::new();
        for (name, start) in &peers {
            let outcome = start().map(drop);
            assert!(outcome.as_ref().err().is_none_or(|e| is_lock_error(e)), "{outcome:?}");
            outcomes.push((name.clone(), outcome.is_ok()));
        }
        for line in TOOLS {
            let outcome = tool(&images, line);
            let told = outcome.as_ref().err().is_none_or(|e| is_lock_error(e));
            assert!(told, "{holder}, {line}: {outcome:?}");
            outcomes.push((line.into(), outcome.is_ok()));
        }
        outcomes
    };
    for role in ROLES {
        let beside_qemu = {
            let _qemu = role.guest(&images).unwrap();
            all("QEMU")
        };
        let _ours = role.ours(&images).unwrap();
        let beside_us = all("ours");
        for (ours, qemus) in beside_us.iter().zip(&beside_qemu) {
            assert_eq!(ours, qemus, "{role:?} comes first");
        }
        // The judge does tell things apart.
        let admitted = beside_us.iter().filter(|(_, ok)| *ok).count();
        assert!((1..beside_us.len()).contains(&admitted), "{role:?}: {admitted}");
    }
}

#[test]
fn abuse_Q6_we_are_admitted_beside_others_as_qemu_is() {
    let images = Images::new();
    let mut admitted = 0;
    for (name, start) in peers(&images) {
        let _peer = start().unwrap();
        for role in ROLES {
            let qemu = role.guest(&images).map(drop);
            let ours = role.ours(&images).map(drop);
            assert_eq!(ours.is_ok(), qemu.is_ok(), "{role:?} beside {name}: {ours:?}, {qemu:?}");
            admitted += usize::from(ours.is_ok());
            let Err(error) = ours else { continue };
            assert!(matches!(error, BlockError::Locked { .. }), "{error}");
        }
    }
    assert!((1..50).contains(&admitted), "{admitted}");
}

#[test]
fn abuse_Q6_two_of_ours_are_admitted_as_two_qemus_are() {
    let images = Images::new();
    for first in ROLES {
        for second in ROLES {
            let qemus = {
                let _first = first.guest(&images).unwrap();
                second.guest(&images).is_ok()
            };
            let _first = first.ours(&images).unwrap();
            assert_eq!(second.ours(&images).is_ok(), qemus, "{first:?}, then {second:?}");
        }
    }
}

#[test]
fn whoever_is_refused_is_told_by_whom_and_leaves_no_lock() {
    let images = Images::new();
    let writer = Role { image: "base.raw", read_only: false };
    let reader = Role { image: "base.raw", read_only: true };
    let qemu = writer.guest(&images).unwrap();
    let error = reader.ours(&images).map(drop).unwrap_err().naming_holders().to_string();
    let process = format!("(process {}, qemu-system-x86)", qemu.0.id());
    assert!(error.contains("base.raw is in use: another process has it open for writing"));
    assert!(error.ends_with(&process), "{error}");
    drop(qemu);
    let qemu = reader.guest(&images).unwrap();
    let error = writer.ours(&images).map(drop).unwrap_err().naming_holders().to_string();
    assert!(error.contains("another process uses it and lets nobody write to it"), "{error}");
    // The refused writer stands against nobody.
    drop(reader.guest(&images).unwrap());
    drop(qemu);
    let ours = writer.ours(&images).unwrap();
    let error = reader.ours(&images).map(drop).unwrap_err().naming_holders().to_string();
    assert!(error.contains(&format!("(this daemon, process {}", std::process::id())), "{error}");
    drop(ours);
    drop(writer.guest(&images).unwrap());
}

/// The lock of daemons before this protocol.
fn lock_whole(path: &Path, read_only: bool) -> std::io::Result<File> {
    let file = File::options().read(true).write(!read_only).open(path)?;
    let kind = if read_only { libc::F_RDLCK } else { libc::F_WRLCK };
    let request = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: an open descriptor and a valid `struct flock`.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) } {
        0 => Ok(file),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[test]
fn older_daemons_are_kept_out_and_keep_out() {
    let images = Images::new();
    let open = |read_only| Role { image: "base.raw", read_only }.ours(&images);
    for (old, new) in [(false, false), (false, true), (true, false), (true, true)] {
        let lock = lock_whole(&images.base(), old).unwrap();
        let error = open(new).map(drop).unwrap_err().to_string();
        assert!(error.contains("locks the whole file, as older versions of millrace"), "{error}");
        drop(lock);
        let _new = open(new).unwrap();
        // Readers of both kinds do no harm to each other.
        assert_eq!(lock_whole(&images.base(), old).is_ok(), old && new, "{old}, {new}");
    }
}

#[test]
fn of_many_writers_at_once_at_most_one_is_admitted() {
    let images = Images::new();
    let open = |read_only| Role { image: "base.raw", read_only }.ours(&images);
    for _ in 0..200 {
        let start = std::sync::Barrier::new(4);
        let contend = |read_only| {
            start.wait();
            open(read_only).ok()
        };
        let (writers, readers) = std::thread::scope(|scope| {
            let all = [false, false, true, true].map(|ro| scope.spawn(move || contend(ro)));
            let [w1, w2, r1, r2] = all.map(|thread| thread.join().unwrap());
            let count = |disks: [&Option<_>; 2]| disks.iter().filter(|d| d.is_some()).count();
            (count([&w1, &w2]), count([&r1, &r2]))
        });
        assert!(writers + usize::from(readers > 0) <= 1, "{writers} writers, {readers} readers");
        // Whoever lost let go.
        open(false).unwrap();
    }
}
