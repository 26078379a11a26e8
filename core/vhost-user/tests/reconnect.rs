//! Connections that come and go, in both roles.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use queue::Layout;
use queue::testing::ModelDriver;
use vhost_user::codec::Request;
use vhost_user::testing::*;
use vhost_user::{
    DeviceKind, Endpoint, NullStore, PortConfig, VhostUserError, VmShare, serve_port,
};

fn listening(dir: &tempfile::TempDir) -> std::path::PathBuf {
    dir.path().join("port.sock")
}

#[test]
fn a_listening_port_takes_one_front_end_after_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let path = listening(&dir);
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let server = serve(&device, Endpoint::Listen(path.clone()), Arc::new(NullStore));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    for round in 1..=3 {
        let driver = ModelDriver::new(Layout::Split, 16);
        let front = FrontEnd::dial(&path);
        front.start(BASIC, &driver);
        assert_eq!(device.running(), [0]);
        assert_eq!(server.status().sessions, round);
        drop(front);
        device.wait_for(&Call::Connected(false));
        assert_eq!(device.running(), [] as [u16; 0]);
        device.forget_calls();
    }
    server.stop();
    assert!(!path.exists(), "the socket file is taken away");
}

/// The front end dies and comes again at once: the new connection is not a second one.
#[test]
fn abuse_P10_a_front_end_that_comes_back_at_once_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = listening(&dir);
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let server = serve(&device, Endpoint::Listen(path.clone()), Arc::new(NullStore));
    for _ in 0..100 {
        let front = FrontEnd::dial(&path);
        front.hello(BASIC);
    }
    assert_eq!(server.status().refused, 0);
    assert_eq!(server.status().sessions, 100);
}

#[test]
fn abuse_P10_a_second_front_end_is_sent_away_and_the_first_lives() {
    let dir = tempfile::tempdir().unwrap();
    let path = listening(&dir);
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let server = serve(&device, Endpoint::Listen(path.clone()), Arc::new(NullStore));
    let first = FrontEnd::dial(&path);
    first.hello(BASIC);
    for n in 1..=3 {
        let second = FrontEnd::dial(&path);
        second.send(Request::GetFeatures, &[], &[]);
        assert!(second.try_reply().is_none());
        assert_eq!(server.status().refused, n);
    }
    assert_ne!(first.get_u64(Request::GetFeatures), 0);
}

/// A kick that came before the ring was started is not lost: the descriptor stays readable.
#[test]
fn abuse_P10_a_kick_before_the_start_is_not_lost() {
    let (device, _server, front) = simple(DeviceKind::Net);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    driver.offer(&[(driver.alloc(8), 8)], &[]);
    driver.kick_event().signal().unwrap();
    front.start(BASIC, &driver);
    device.with_vring(0, |v| assert!(v.parts.kick.as_ref().unwrap().drain()));
    assert_eq!(device.serve(0, 8), 1);
}

#[test]
fn a_dialling_port_waits_for_its_front_end_and_dials_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = listening(&dir);
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let server = serve(&device, Endpoint::Dial(path.clone()), Arc::new(NullStore));
    let listener = UnixListener::bind(&path).unwrap();
    for round in 1..=2 {
        let (socket, _) = listener.accept().unwrap();
        let front = FrontEnd::on(socket.into());
        front.hello(BASIC);
        assert_eq!(server.status().sessions, round);
    }
    // Gone for good: the port goes on dialling, and stops when told.
    drop(listener);
    device.wait_for(&Call::Connected(false));
    server.stop();
}

/// A peer accepts and hangs up: that is no reason to dial as fast as the machine can.
#[test]
fn abuse_P10_a_front_end_that_hangs_up_at_once_is_dialled_ever_more_seldom() {
    let dir = tempfile::tempdir().unwrap();
    let path = listening(&dir);
    let listener = UnixListener::bind(&path).unwrap();
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let begin = Instant::now();
    let server = serve(&device, Endpoint::Dial(path.clone()), Arc::new(NullStore));
    for _ in 0..5 {
        drop(listener.accept().unwrap());
    }
    // 0, 50, 100, 200 and 400 ms apart.
    assert!(begin.elapsed() >= Duration::from_millis(700), "{:?}", begin.elapsed());
    // One that says something is worth another try soon, but not a loop.
    let hello = || {
        let front = FrontEnd::on(listener.accept().unwrap().0.into());
        front.get_u64(Request::GetFeatures);
        front
    };
    let first = hello();
    // The first pause begins when it hangs up.
    let begin = Instant::now();
    drop(first);
    for _ in 0..4 {
        drop(hello());
    }
    let took = begin.elapsed();
    assert!(took >= Duration::from_millis(190) && took < Duration::from_secs(2), "{took:?}");
    server.stop();
}

#[test]
fn a_listening_descriptor_may_be_handed_in() {
    let dir = tempfile::tempdir().unwrap();
    let path = listening(&dir);
    let listener = UnixListener::bind(&path).unwrap();
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let _server = serve(&device, Endpoint::Fd(listener.into()), Arc::new(NullStore));
    for _ in 0..2 {
        FrontEnd::dial(&path).hello(BASIC);
    }
}

#[test]
fn a_port_on_a_connected_descriptor_ends_with_it() {
    let (device, server, front) = simple(DeviceKind::Net);
    front.hello(BASIC);
    drop(front);
    server.wait();
    assert!(device.calls().contains(&Call::Connected(false)));
}

fn try_listen(path: &std::path::Path) -> Result<vhost_user::PortServer, VhostUserError> {
    let device = FakeDevice::new(DeviceKind::Net, 1);
    let endpoint = Endpoint::Listen(path.to_owned());
    let config = PortConfig {
        name: "vm/port".to_owned(),
        endpoint,
        socket_mode: 0o660,
        share: VmShare::new(),
    };
    serve_port(config, device, vec![Arc::default()], Arc::new(NullStore))
}

#[test]
fn a_dead_socket_file_is_replaced_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = listening(&dir);
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let server = try_listen(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
    let error = try_listen(&path).unwrap_err().to_string();
    assert!(error.contains("somebody listens"), "{error}");
    drop(server);

    let datagram = UnixDatagram::bind(&path).unwrap();
    assert!(try_listen(&path).is_err());
    assert!(path.exists());
    drop(datagram);
    std::fs::remove_file(&path).unwrap();

    std::fs::write(&path, b"precious").unwrap();
    let error = try_listen(&path).unwrap_err().to_string();
    assert!(error.contains("not a socket"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    std::fs::remove_file(&path).unwrap();

    // A link is not followed.
    let elsewhere = dir.path().join("elsewhere");
    drop(UnixListener::bind(&elsewhere).unwrap());
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    assert!(try_listen(&path).is_err());
    assert!(elsewhere.exists());

    let long = dir.path().join("x".repeat(120));
    assert!(try_listen(&long).unwrap_err().to_string().contains("107"));
}

#[test]
fn a_port_that_makes_no_sense_is_refused() {
    let try_serve = |name: &str, queues, stats| {
        let (ours, _theirs) = pair();
        let config = PortConfig {
            name: name.to_owned(),
            endpoint: Endpoint::Fd(ours),
            socket_mode: 0,
            share: VmShare::new(),
        };
        let device = FakeDevice::new(DeviceKind::Net, queues);
        let stats = (0..stats).map(|_| Arc::default()).collect();
        serve_port(config, device, stats, Arc::new(NullStore)).map(drop)
    };
    assert!(try_serve("vm/port", 2, 2).is_ok());
    assert!(try_serve("vm/port", 2, 1).unwrap_err().to_string().contains("counters"));
    assert!(try_serve("vm/port", 0, 0).unwrap_err().to_string().contains("queues"));
    assert!(try_serve("vm/port", 33, 33).is_ok());
    assert!(try_serve("vm/port", 34, 34).unwrap_err().to_string().contains("33"));
    assert!(try_serve("", 1, 1).is_err());
    assert!(try_serve(&"x".repeat(130), 1, 1).is_err());
}

/// A broken ring stops the port, not the session; letting go of the rings heals it.
#[test]
fn a_broken_ring_is_reported_and_forgiven_after_a_reset() {
    let (device, server, front) = simple(DeviceKind::Net);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    front.start_ring(1, &ModelDriver::new(Layout::Split, 16), 0);
    driver.set_avail_idx(100);
    assert_eq!(device.serve(0, 8), 0);
    assert!(server.status().broken.unwrap().contains("queue 0"));
    assert!(driver.err_event().drain());
    assert_ne!(front.get_u64(Request::GetFeatures), 0);

    front.get_base(0);
    assert!(server.status().broken.is_some(), "the other ring is still held");
    front.get_base(1);
    assert_eq!(server.status().broken, None);
    let mut driver = ModelDriver::new(Layout::Split, 16);
    front.set_memory(&driver);
    front.start_ring(0, &driver, 0);
    driver.offer(&[(driver.alloc(8), 8)], &[]);
    assert_eq!(device.serve(0, 8), 1);
}

/// The driver is told that only a reset helps (virtio 1.2, 2.1.2), and to look.
#[test]
fn abuse_B8_a_broken_ring_sets_needs_reset_until_a_reset() {
    let (device, _server, front) = simple(DeviceKind::Block);
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    let (ours, theirs) = pair();
    front.ok(Request::SetBackendReqFd, &[], &[theirs.as_fd()]);
    front.ok(Request::SetStatus, &15u64.to_ne_bytes(), &[]);
    assert_eq!(front.get_u64(Request::GetStatus), 15);
    let channel = FrontEnd::on(ours);
    for _ in 0..2 {
        driver.set_avail_idx(100);
        assert_eq!(device.serve(0, 8), 0);
        assert_eq!(channel.reply().header.request, 2, "CONFIG_CHANGE");
        assert_eq!(front.get_u64(Request::GetStatus), 0x4f);
        // Writing the bit back, or more of the others, is no reset.
        front.ok(Request::SetStatus, &0x4fu64.to_ne_bytes(), &[]);
        assert_eq!(front.get_u64(Request::GetStatus), 0x4f);
        front.ok(Request::SetStatus, &0u64.to_ne_bytes(), &[]);
        assert_eq!(front.get_u64(Request::GetStatus), 0);
        driver.set_avail_idx(0);
        front.start_ring(0, &driver, 0);
        front.ok(Request::SetStatus, &15u64.to_ne_bytes(), &[]);
        assert_eq!(front.get_u64(Request::GetStatus), 15);
    }
}

/// Half a message, and then silence: the port can still be stopped.
#[test]
fn abuse_P7_half_a_message_holds_nobody_up() {
    for bytes in [&[1u8, 0, 0][..], &[2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1, 2][..]] {
        let (_device, server, front) = simple(DeviceKind::Net);
        front.send_raw(bytes, &[]).unwrap();
        server.stop();
        assert!(front.try_reply().is_none());

        // And a connection that ends there ends the session with a reason.
        let (ours, theirs) = pair();
        let device = FakeDevice::new(DeviceKind::Net, 1);
        let server = serve(&device, Endpoint::Fd(ours), Arc::new(NullStore));
        FrontEnd::on(theirs).send_raw(bytes, &[]).unwrap();
        device.wait_for(&Call::Connected(false));
        let server = Arc::new(server);
        device.wait_for(&Call::Reset);
        drop(server);
    }
}

/// A message may arrive byte by byte.
#[test]
fn a_message_in_pieces_is_put_together() {
    let (ours, theirs) = pair();
    let device = FakeDevice::new(DeviceKind::Net, 1);
    let _server = serve(&device, Endpoint::Fd(ours), Arc::new(NullStore));
    let front = FrontEnd::on(theirs);
    for byte in [1u8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0] {
        front.send_raw(&[byte], &[]).unwrap();
    }
    assert_eq!(front.reply().header.request, 1);
    drop(UnixStream::pair());
}
