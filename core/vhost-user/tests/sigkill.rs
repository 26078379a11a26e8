//! A daemon process killed with SIGKILL under load, again and again, with a holder beside it.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use queue::testing::ModelDriver;
use queue::{Batch, Completion, Layout};
use vhost_user::codec::feature;
use vhost_user::holder::{HolderStore, run};
use vhost_user::testing::*;
use vhost_user::{DeviceKind, Endpoint};

const DIR: &str = "MILLRACE_TEST_DIR";
const KIND: &str = "MILLRACE_TEST_KIND";
const KILLS: usize = 15;
const IN_FLIGHT: usize = 12;

/// The daemon: this test binary, started again with a directory in its environment.
#[test]
#[ignore = "runs as the child of the other tests"]
fn child_daemon() {
    let Some(dir) = std::env::var_os(DIR).map(PathBuf::from) else { return };
    let block = std::env::var(KIND).unwrap() == "block";
    let device = FakeDevice::new(if block { DeviceKind::Block } else { DeviceKind::Net }, 1);
    let session_store = Arc::new(HolderStore::new(dir.join("holder")));
    let _server = serve(&device, Endpoint::Listen(dir.join("port")), session_store);
    println!("serving");
    let mut batch = Batch::new(8, 256);
    loop {
        if device.running().is_empty() {
            std::thread::yield_now();
            continue;
        }
        device.try_with_vring(0, |vring| {
            vring.pop(&mut batch, 5);
            let mut done: Vec<Completion> = (0..batch.len())
                .map(|i| Completion { id: batch.get(i).id, ndesc: 1, written: 0 })
                .collect();
            if block {
                done.reverse();
            }
            // In two parts, so that there is more to be killed between.
            let (first, second) = done.split_at(done.len() / 2);
            vring.push(first);
            vring.push(second);
            vring.notify();
        });
    }
}

#[test]
#[ignore = "runs as the child of the other tests"]
fn child_holder() {
    let Some(dir) = std::env::var_os(DIR).map(PathBuf::from) else { return };
    run(&dir.join("holder")).unwrap();
}

/// A child of ours, killed when the test is over.
struct Process(Child);

impl Process {
    fn start(name: &str, dir: &Path, kind: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", name, "--ignored", "--nocapture"]);
        command.env(DIR, dir).env(KIND, kind).stdout(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    fn wait_for_line(&mut self, line: &str) {
        let out = BufReader::new(self.0.stdout.take().unwrap());
        assert!(out.lines().any(|l| l.unwrap().contains(line)), "child ended early");
    }

    fn kill(&mut self) {
        // SIGKILL.
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

fn daemon(dir: &Path, kind: &str) -> Process {
    let mut daemon = Process::start("child_daemon", dir, kind);
    daemon.wait_for_line("serving");
    daemon
}

fn endure(kind: &str, layout: Layout, bits: u64) {
    let dir = tempfile::tempdir().unwrap();
    let _holder = Process::start("child_holder", dir.path(), kind);
    let session_store = HolderStore::new(dir.path().join("holder"));
    while session_store.list().is_err() {
        std::thread::yield_now();
    }
    let mut child = daemon(dir.path(), kind);
    let front = FrontEnd::dial(&dir.path().join("port"));
    let mut driver = ModelDriver::new(layout, 16);
    front.start(BASIC | bits, &driver);

    let mut outstanding = HashSet::new();
    let begun = std::time::Instant::now();
    for kill in 0..KILLS {
        // Killed after a different number of completions each time.
        let mut left = 50 + 37 * kill;
        while left > 0 || (kill + 1 == KILLS && !outstanding.is_empty()) {
            assert!(begun.elapsed() < 6 * LIMIT, "{kind} {layout:?}: lost {outstanding:?}");
            while left > 0 && outstanding.len() < IN_FLIGHT {
                let id = driver.offer(&[(driver.region().guest_addr, 8)], &[]);
                assert!(outstanding.insert(id));
            }
            while let Some((id, _)) = driver.used() {
                assert!(outstanding.remove(&id), "{kind} {layout:?}: {id} completed twice");
                left = left.saturating_sub(1);
            }
            std::thread::yield_now();
        }
        if kill + 1 < KILLS {
            child.kill();
            child = daemon(dir.path(), kind);
        }
    }
    // Still the first connection, and still the same ring.
    front.get_base(0);
    front.set_doorbells(0, &driver);
}

#[test]
fn abuse_P10_split_network_under_sigkill() {
    endure("net", Layout::Split, 0);
}

#[test]
fn abuse_P10_packed_network_under_sigkill() {
    endure("net", Layout::Packed, feature::RING_PACKED);
}

#[test]
fn abuse_P10_split_disk_under_sigkill() {
    endure("block", Layout::Split, 0);
}

#[test]
fn abuse_P10_packed_disk_under_sigkill() {
    endure("block", Layout::Packed, feature::RING_PACKED);
}
