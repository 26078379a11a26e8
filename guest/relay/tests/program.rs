//! Tests of the program itself.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

#[allow(dead_code, reason = "shared with the client's tests")]
mod common;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::process::Command;
use std::time::Duration;

use common::{Backwards, Host, Native, wait_until};
use kv_module::Kv;
use rustix::process::{Pid, Signal, kill_process};

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace-relay"));
    command.env_remove("NOTIFY_SOCKET");
    command
}

#[test]
fn modules_are_listed() {
    let host = Host::start(Backwards);
    let listed = program().args(["ls", "--json", "--host", &host.address.to_string()]).output();
    let listed = listed.unwrap();
    assert!(listed.status.success());
    let json: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!(json["modules"][0]["name"], "fake");
    let failed = program().args(["ls", "--host", "unix:/nonexistent/host"]).output().unwrap();
    let told = String::from_utf8(failed.stderr).unwrap();
    assert!(!failed.status.success() && told.contains("no connection to the host"), "{told}");
}

#[test]
fn it_tells_when_it_listens_and_ends_when_it_is_told() {
    let host = Host::start(Native::<Kv>::start());
    let folder = tempfile::tempdir().unwrap();
    let (path, notify) = (folder.path().join("s"), folder.path().join("notify"));
    let manager = UnixDatagram::bind(&notify).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let listen = format!("unix:{}", path.display());
    let mut relay = program()
        .args(["--module", "fake", "--listen", &listen, "--mode", "0640"])
        .args(["--host", &host.address.to_string()])
        .env("NOTIFY_SOCKET", &notify)
        .spawn()
        .unwrap();
    let mut told = [0; 32];
    let len = manager.recv(&mut told).unwrap();
    assert_eq!(&told[..len], b"READY=1");
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o640);
    let mut socket = UnixStream::connect(&path).unwrap();
    socket.write_all(b"verbosity 1\r\n").unwrap();
    let mut answer = [0; 4];
    socket.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"OK\r\n");
    kill_process(Pid::from_child(&relay), Signal::TERM).unwrap();
    assert!(relay.wait().unwrap().success());
    assert_eq!(socket.read(&mut answer).unwrap(), 0);
    wait_until("the goodbye", || host.state().clients() == 0);
}
