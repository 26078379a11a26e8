//! A lab that is killed leaves no process, network or folder behind. Needs root and what `lab
//! setup` prepares.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use lab::Lab;
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
