//! Front ends that want to hold up, fill or mislead somebody else.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use base::testing::{fill_and_block, lingering};
use queue::Layout;
use queue::testing::ModelDriver;
use vhost_user::codec::{self, Request, feature};
use vhost_user::testing::*;
use vhost_user::{DeviceKind, Endpoint, NullStore};
use zerocopy::IntoBytes;

/// Descriptors whose close hangs are in messages before the session begins, and nowhere else: the
/// side that closes them there is the last.
#[test]
fn abuse_V4_descriptors_whose_close_hangs_hold_up_no_session() {
    let requests = [
        Request::GetFeatures,
        Request::SetVringKick,
        Request::SetMemTable,
        Request::SetLogFd,
        Request::SetBackendReqFd,
    ];
    for request in requests {
        let (ours, theirs) = pair();
        let front = FrontEnd::on(theirs);
        let (fd, _peer) = lingering();
        front.send_id(request as u32, &legal_body(request), &[fd.as_fd()], false);
        drop(fd);
        let device = FakeDevice::new(DeviceKind::Net, 2);
        let server = serve(&device, Endpoint::Fd(ours), Arc::new(NullStore));
        drop(front);
        device.wait_for(&Call::Connected(false));
        server.stop();
    }
}

/// The same in the queue of what is to be the back-end channel, which nobody reads.
#[test]
fn abuse_V4_sockets_with_such_descriptors_in_their_queues_hold_up_no_session() {
    let (fd, _peer) = lingering();
    let with_fd = || {
        let (ours, theirs) = UnixStream::pair().unwrap();
        FrontEnd::on(theirs.into()).send(Request::GetStatus, &[], &[fd.as_fd()]);
        ours
    };
    let (first, second) = (with_fd(), with_fd());
    drop(fd);
    let (device, server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    for channel in [first, second] {
        // Refused for what lies in it, which is closed with it.
        assert_eq!(front.ack(Request::SetBackendReqFd, &[], &[channel.as_fd()]), Some(1));
        // Should this be the last one, it hangs here.
        std::thread::spawn(move || drop(channel));
        // When this is answered, everything before it is off the socket.
        front.get_u64(Request::GetStatus);
    }
    drop(front);
    device.wait_for(&Call::Connected(false));
    server.stop();
}

/// A queue that does not begin fresh rings its driver when it starts; one that breaks rings err.
#[test]
fn abuse_V2_full_blocking_doorbells_hold_up_no_session() {
    let (device, server, front) = simple(DeviceKind::Net);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    io(&device, &mut driver, 0, 3);
    fill_and_block(driver.call_event());
    fill_and_block(driver.err_event());
    let base = front.get_base(0);
    front.set_ring(0, &driver, base);
    front.set_doorbells(0, &driver);
    front.get_u64(Request::GetFeatures);
    assert_eq!(device.running(), [0]);
    // Beyond the ring's size: it breaks.
    front.get_base(0);
    front.set_ring(0, &driver, base + 1000);
    front.set_doorbells(0, &driver);
    front.get_u64(Request::GetFeatures);
    server.stop();
}

#[test]
fn abuse_V6_refusals_in_a_loop_are_few_lines() {
    let (_device, server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    for _ in 0..2000 {
        assert_eq!(front.ack(Request::RemMemReg, &single(LOW), &[]), Some(1));
    }
    assert!(server.status().log_lines_left_out >= 1980);
}

#[test]
fn abuse_V7_a_session_that_panics_ends_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("port.sock");
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let server = serve(&device, Endpoint::Listen(path.clone()), Arc::new(NullStore));
    let front = FrontEnd::dial(&path);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    let word = [&PANICS[..], &[0, 0]].concat();
    front.send(Request::SendRarp, &word, &[]);
    device.wait_for(&Call::Connected(false));
    assert!(front.try_reply().is_none());
    let status = server.status();
    assert_eq!((status.panics, status.connected), (1, false));
    assert!(status.last_error.unwrap().contains("a fault for tests"));
    // The next front end is served as if nothing had been.
    let front = FrontEnd::dial(&path);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    io(&device, &mut driver, 0, 3);
    assert_eq!(server.status().broken, None);
}

/// A front end that asks for an answer gets one before the session ends.
#[test]
fn abuse_V12_refusals_are_answered() {
    let driver = ModelDriver::new(Layout::Split, 16);
    let word = 0u64.to_ne_bytes();
    let addr = codec::VringAddr { desc: 1 << 60, ..addr(0, &driver) };
    let no_event = memfd(4096);
    let fd = || vec![no_event.as_fd()];
    let log = codec::Log { size: 1 << 40, offset: 0 };
    let cases = [
        (Request::SetVringAddr, addr.as_bytes().to_vec(), vec![]),
        (Request::SetVringKick, word.to_vec(), fd()),
        (Request::SetVringCall, word.to_vec(), fd()),
        (Request::SetVringErr, word.to_vec(), fd()),
        (Request::SetLogBase, log.as_bytes().to_vec(), fd()),
        (Request::SetMemTable, table(&[LOW]), fd()),
    ];
    for (request, body, fds) in cases {
        let (_device, server, front) = simple(DeviceKind::Net);
        front.hello(BASIC);
        front.set_memory(&driver);
        // The one that is always answered names a log of no bytes.
        let refused = if request == Request::SetLogBase { 0 } else { 1 };
        assert_eq!(front.ack(request, &body, &fds), Some(refused), "{request:?}");
        last_words(&server, &front);
    }
}

#[test]
fn abuse_V13_descriptors_on_a_part_of_a_header_are_named() {
    let (_device, server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    let fd = memfd(4096);
    front.send_raw(&[1], &vec![fd.as_fd(); 100]).unwrap();
    let error = last_words(&server, &front);
    assert!(error.contains("more than 64 file descriptors on a part of a header"), "{error}");
}

/// A log that does not tell of all memory loses pages of a migration.
#[test]
fn abuse_B9_a_log_must_tell_of_all_memory() {
    let driver = ModelDriver::new(Layout::Split, 16);
    let region = region(&driver);
    let needed = (region.guest_addr + region.len_bytes).div_ceil(4096 * 8);
    let with_log = |size| {
        let (device, server, front) = simple(DeviceKind::Net);
        front.hello(BASIC);
        front.set_memory(&driver);
        let log = codec::Log { size, offset: 0 };
        let file = memfd(1 << 20);
        assert_eq!(front.ack(Request::SetLogBase, log.as_bytes(), &[file.as_fd()]), Some(size));
        let features = BASIC | feature::LOG_ALL;
        let logged = front.ack(Request::SetFeatures, &features.to_ne_bytes(), &[]);
        (device, server, front, logged)
    };
    let (_device, server, front, logged) = with_log(needed - 1);
    assert_eq!(logged, Some(1));
    let error = last_words(&server, &front);
    assert!(error.contains(&format!("{needed} bytes are needed")), "{error}");
    let (_device, server, front, logged) = with_log(needed);
    assert_eq!(logged, Some(0));
    // More memory than the log tells of.
    let file = memfd(1 << 30);
    let high = codec::Region { guest_addr: 1 << 33, user_addr: 1 << 33, ..LOW };
    let added = front.ack(Request::AddMemReg, &single(high), &[file.as_fd()]);
    assert_eq!(added, Some(1));
    last_words(&server, &front);
}
