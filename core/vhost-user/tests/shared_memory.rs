//! View that others in the daemon have of the memory that a front end shares.
#![allow(missing_docs, clippy::unwrap_used)]

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use queue::Layout;
use queue::testing::ModelDriver;
use rustix::fs::fstat;
use vhost_user::codec::Request;
use vhost_user::testing::*;
use vhost_user::{DeviceKind, Endpoint, NullStore, PortServer};

fn watch(server: &PortServer) -> Receiver<()> {
    let (told, changes) = channel();
    server.watch_memory(Arc::new(move || {
        let _ = told.send(());
    }));
    changes
}

fn is_of(file: impl AsFd, other: impl AsFd) -> bool {
    let [a, b] = [fstat(file), fstat(other)].map(Result::unwrap);
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

#[test]
fn the_table_is_seen_with_its_files_for_as_long_as_the_front_end_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("port.sock");
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let server = serve(&device, Endpoint::Listen(path.clone()), Arc::new(NullStore));
    let changes = watch(&server);
    assert!(server.memory().is_none());

    let front = FrontEnd::dial(&path);
    front.hello(BASIC);
    changes.recv_timeout(LIMIT).unwrap();
    assert_eq!(server.memory().unwrap().len(), 0);
    // An answer comes after the change, and messages that change no memory are not told.
    let driver = ModelDriver::new(Layout::Split, 16);
    front.set_memory(&driver);
    let memory = server.memory().unwrap();
    let region = region(&driver);
    assert_eq!((memory[0].guest_addr, memory[0].len_bytes), (region.guest_addr, region.len_bytes));
    assert_eq!((memory[0].mmap_offset, memory.len()), (region.mmap_offset, 1));
    assert!(is_of(&memory[0].file, driver.fd()));
    front.start_ring(0, &driver, 0);
    let low = memfd(1 << 20);
    front.ok(Request::AddMemReg, &single(LOW), &[low.as_fd()]);
    assert!(is_of(&server.memory().unwrap()[1].file, &low));
    front.ok(Request::RemMemReg, &single(LOW), &[]);
    assert_eq!(server.memory().unwrap().len(), 1);
    assert_eq!(changes.try_iter().count(), 3);

    drop(front);
    changes.recv_timeout(LIMIT).unwrap();
    assert!(server.memory().is_none());
    let front = FrontEnd::dial(&path);
    front.hello(BASIC);
    changes.recv_timeout(LIMIT).unwrap();
    assert_eq!(server.memory().unwrap().len(), 0, "another front end has to say it itself");
}

/// A table that is refused is not seen; the next watcher takes the place of the one before.
#[test]
fn a_refused_region_is_no_change() {
    let (_device, server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    let (first, second) = (watch(&server), watch(&server));
    let small = memfd(4096);
    assert_eq!(front.ack(Request::AddMemReg, &single(LOW), &[small.as_fd()]), Some(1));
    assert_eq!(server.memory().unwrap().len(), 0);
    front.ok(Request::AddMemReg, &single(LOW), &[memfd(1 << 20).as_fd()]);
    assert_eq!((first.try_iter().count(), second.try_iter().count()), (0, 1));
}
