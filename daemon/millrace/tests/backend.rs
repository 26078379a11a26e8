//! The single back ends, by QEMU's conventions.
#![allow(clippy::unwrap_used)]

mod common;

use std::process::Child;

use common::{BASIC, IN, OUT, Place, driver, inheritable, millrace, sector, terminate};
use queue::Layout;
use vhost_user::testing::{FrontEnd, pair};

fn image(dir: &tempfile::TempDir) -> std::path::PathBuf {
    let path = dir.path().join("disk.img");
    std::fs::write(&path, vec![0u8; 1 << 20]).unwrap();
    path
}

fn with_fd(path: &std::path::Path, more: &[&str]) -> (Child, FrontEnd) {
    let (ours, theirs) = pair();
    let number = inheritable(&theirs);
    let child = millrace()
        .args(["vhost-user-blk", &format!("--fd={number}")])
        .arg(format!("--blk-file={}", path.display()))
        .args(more)
        .spawn()
        .unwrap();
    drop(theirs);
    (child, FrontEnd::on(ours))
}

#[test]
fn a_disk_on_an_inherited_socket_ends_with_its_front_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(&dir);
    let (mut child, front) = with_fd(&path, &[]);
    let mut ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    sector(&mut ring, OUT, 3, 0x33);
    assert_eq!(sector(&mut ring, IN, 3, 0), 0x33);
    assert_eq!(std::fs::read(&path).unwrap()[3 * 512], 0x33);
    drop(front);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_disk_on_an_inherited_socket_ends_on_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let (child, front) = with_fd(&image(&dir), &["--read-only"]);
    let mut ring = driver(Layout::Split);
    front.start(BASIC, &ring);
    assert_eq!(sector(&mut ring, IN, 0, 0xff), 0);
    assert_eq!(terminate(child).code(), Some(0));
    assert!(front.try_reply().is_none());
}

#[test]
fn a_vsock_port_listens_and_ends_on_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vu.sock");
    let place = Place::new("");
    let mut child = millrace()
        .args(["vhost-user-vsock", "--guest-cid=42"])
        .arg(format!("--uds-path={}", dir.path().join("v").display()))
        .arg(format!("--socket-path={}", socket.display()))
        .env("NOTIFY_SOCKET", place.path("notify"))
        .spawn()
        .unwrap();
    place.wait_for("READY=1", &mut child);
    let front = FrontEnd::dial(&socket);
    front.hello(BASIC);
    assert_eq!(terminate(child).code(), Some(0));
    assert!(!socket.exists());
}
