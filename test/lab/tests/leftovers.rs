//! A lab that is killed leaves no process, network or folder behind. Needs root and what `lab
//! setup` prepares.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use lab::{Guest, Lab};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

/// Starts `lab boot --shell`, waits for its prompt, ends it by a signal, and waits for its QEMU's
/// end, which only the kernel can bring about now.
fn end_by(signal: Signal) {
    let mut lab = Command::new(env!("CARGO_BIN_EXE_lab"))
        .args(["boot", "--vms", "1", "--net", "tap", "--shell"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut prompt = [0; 5];
    lab.stdout.take().unwrap().read_exact(&mut prompt).unwrap();
    assert_eq!(&prompt, b"vm1> ");
    let said = BufReader::new(lab.stderr.take().unwrap()).lines();
    let line = said.map_while(Result::ok).find(|line| line.contains("(QEMU ")).unwrap();
    let pid = line.rsplit_once("QEMU ").unwrap().1.trim_end_matches(')').parse().unwrap();
    let qemu = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    let run = std::env::temp_dir().join(format!("millrace-lab-{}-0", lab.id()));
    assert!(run.exists());

    kill_process(Pid::from_child(&lab), signal).unwrap();
    assert!(!lab.wait().unwrap().success());
    // Fails by hanging if QEMU lives on.
    assert_eq!(poll(&mut [PollFd::new(&qemu, PollFlags::IN)], None).unwrap(), 1);
    // The next session removes the folder.
    drop(Lab::new().unwrap());
    assert!(!Path::new(&run).exists());
}

#[test]
fn nothing_outlives_a_killed_lab() {
    end_by(Signal::KILL);
}

#[test]
fn nothing_outlives_an_ended_lab() {
    end_by(Signal::TERM);
}

/// Set for the process that [`a_guest_that_cannot_notice_dies_too`] starts.
const CHILD: &str = "LAB_LEFTOVERS_CHILD";

/// An agent ends its VM when the lab's socket closes. This guest's CPU never runs, so only the
/// parent-death signal can end its QEMU.
#[test]
fn a_guest_that_cannot_notice_dies_too() {
    let mut lab = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", "a_lab_with_a_frozen_guest"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(lab.stdout.take().unwrap()).lines();
    let line = said.map_while(Result::ok).find(|line| line.contains("QEMU ")).unwrap();
    let pid = line.rsplit_once("QEMU ").unwrap().1.parse().unwrap();
    let qemu = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
    lab.kill().unwrap();
    lab.wait().unwrap();
    // Fails by hanging if QEMU lives on.
    assert_eq!(poll(&mut [PollFd::new(&qemu, PollFlags::IN)], None).unwrap(), 1);
}

#[test]
#[ignore = "the child of a_guest_that_cannot_notice_dies_too"]
fn a_lab_with_a_frozen_guest() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let lab = Lab::new().unwrap();
    let guest = Guest::builder("frozen").qemu_args(["-S"]).start(&lab).unwrap();
    println!("QEMU {}", guest.pid());
    // Until it is killed.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}
