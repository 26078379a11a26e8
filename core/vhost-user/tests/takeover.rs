//! Daemons that die and are replaced, with the holder between them.
#![allow(missing_docs, non_snake_case, clippy::unwrap_used)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use base::event::Event;
use base::peer_fd::PeerFd;
use queue::testing::ModelDriver;
use queue::{Completion, Layout};
use vhost_user::codec::{self, Request, feature};
use vhost_user::holder::{self, HolderStore};
use vhost_user::session_store::SavedSession;
use vhost_user::testing::*;
use vhost_user::{DeviceKind, Endpoint, SessionStore, VhostUserError};
use zerocopy::IntoBytes;

/// A holder on a thread of this process.
struct Holder {
    dir: tempfile::TempDir,
    stop: Arc<Event>,
    thread: Option<JoinHandle<()>>,
}

impl Holder {
    fn path(&self) -> PathBuf {
        self.dir.path().join("holder.sock")
    }

    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let stop = Arc::new(Event::new().unwrap());
        let mut holder = Self { dir, stop, thread: None };
        holder.run();
        holder
    }

    fn run(&mut self) {
        let (path, stop) = (self.path(), self.stop.clone());
        stop.drain();
        self.thread = Some(std::thread::spawn(move || holder::run_until(&path, &stop).unwrap()));
        // It listens when the first question is answered.
        while self.session_store().list().is_err() {
            std::thread::yield_now();
        }
    }

    fn kill(&mut self) {
        self.stop.signal().unwrap();
        self.thread.take().unwrap().join().unwrap();
    }

    fn session_store(&self) -> Arc<HolderStore> {
        Arc::new(HolderStore::new(self.path()))
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.kill();
        }
    }
}

/// Saves as the holder does, up to a moment: what a daemon killed then would have left.
struct Until {
    inner: Arc<HolderStore>,
    left: Mutex<usize>,
}

impl SessionStore for Until {
    fn is_persistent(&self) -> bool {
        true
    }
    fn save(
        &self,
        port: &str,
        state: &SavedSession,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), VhostUserError> {
        let mut left = self.left.lock().unwrap();
        if *left == 0 {
            return Ok(());
        }
        *left -= 1;
        self.inner.save(port, state, fds)
    }
    fn load(&self, port: &str) -> Result<Option<(SavedSession, Vec<PeerFd>)>, VhostUserError> {
        self.inner.load(port)
    }
    fn forget(&self, _port: &str) -> Result<(), VhostUserError> {
        Ok(())
    }
}

/// A connected socket that ends at once: the new daemon's own endpoint plays no part here.
fn nowhere() -> Endpoint {
    Endpoint::Fd(pair().0)
}

fn offer(driver: &mut ModelDriver) -> u16 {
    let buffer = (driver.alloc(64), 64);
    driver.offer(&[buffer], &[])
}

fn layouts() -> [(Layout, u64); 2] {
    [(Layout::Split, 0), (Layout::Packed, feature::RING_PACKED)]
}

#[test]
fn a_network_port_goes_on_where_the_killed_daemon_was() {
    for (layout, bits) in layouts() {
        let holder = Holder::start();
        let device = FakeDevice::new(DeviceKind::Net, 2);
        let (server, front) = connected_with(&device, holder.session_store());
        let mut driver = ModelDriver::new(layout, 16);
        front.start(BASIC | bits | feature::LOG_ALL, &driver);
        front.ok(Request::NetSetMtu, &1400u64.to_ne_bytes(), &[]);
        assert!(server.status().held);
        for _ in 0..21 {
            offer(&mut driver);
            device.serve(0, 8);
            driver.used().unwrap();
        }
        // Taken, not completed: a killed daemon completes nothing.
        let ids: Vec<u16> = (0..3).map(|_| offer(&mut driver)).collect();
        assert_eq!(device.take(0, 2), ids[..2]);
        device.vanish();
        server.stop();
        driver.interrupted();

        let device = FakeDevice::new(DeviceKind::Net, 2);
        let server = serve(&device, nowhere(), holder.session_store());
        device.wait_for(&Call::Start(0));
        assert!(driver.interrupted(), "the dead daemon may have owed the driver an interrupt");
        assert_eq!(device.take(0, 8), ids);
        let done: Vec<Completion> =
            ids.iter().map(|&id| Completion { id, ndesc: 1, written: 0 }).collect();
        device.with_vring(0, |v| v.push(&done));
        for id in ids {
            assert_eq!(driver.used(), Some((id, 0)));
        }
        let own = feature::PROTOCOL_FEATURES | feature::LOG_ALL;
        device.wait_for(&Call::Activate((BASIC | bits) & !own));
        device.wait_for(&Call::Mtu(1400));

        // The VMM saw nothing: the same socket answers, and still knows what was negotiated.
        assert_eq!(front.get_u64(Request::GetQueueNum), 1);
        assert_eq!((server.status().sessions, server.status().resumed), (1, 1));
        front.get_base(0);
        front.set_doorbells(0, &driver);
        assert_eq!(device.running(), [0]);
        drop(front);
        device.wait_for(&Call::Connected(false));
        server.wait();
        assert!(holder.session_store().list().unwrap().is_empty(), "an ended session is forgotten");
    }
}

/// The front end has no inflight region: the session keeps one of its own with the holder.
#[test]
fn a_disk_without_an_inflight_region_loses_and_doubles_nothing() {
    for (layout, bits) in layouts() {
        let holder = Holder::start();
        let device = FakeDevice::new(DeviceKind::Block, 1);
        let (server, front) = connected_with(&device, holder.session_store());
        let mut driver = ModelDriver::new(layout, 16);
        front.start(BASIC | bits, &driver);
        let ids: Vec<u16> = (0..4).map(|_| offer(&mut driver)).collect();
        assert_eq!(device.take(0, 3), ids[..3]);
        device.with_vring(0, |v| v.push(&[Completion { id: ids[1], ndesc: 1, written: 0 }]));
        assert_eq!(driver.used(), Some((ids[1], 0)));
        device.vanish();
        server.stop();

        // The next daemon may serve more queues than the front end was told of (B1).
        let device = FakeDevice::new(DeviceKind::Block, 4);
        let _server = serve(&device, nowhere(), holder.session_store());
        device.wait_for(&Call::Start(0));
        assert_eq!(device.take(0, 8), [ids[0], ids[2]], "{layout:?}: the unfinished come first");
        assert_eq!(device.take(0, 8), [ids[3]], "{layout:?}: then the new");
        let done = |id| Completion { id, ndesc: 1, written: 0 };
        device.with_vring(0, |v| v.push(&[done(ids[3]), done(ids[0]), done(ids[2])]));
        // A clean stop, as for a pause: nothing is in flight, and the driver goes on.
        let base = front.get_base(0);
        front.start_ring(0, &driver, base);
        for _ in 0..3 {
            driver.used().unwrap();
        }
        let id = offer(&mut driver);
        assert_eq!(device.take(0, 8), [id]);
    }
}

/// The driver switched the write cache off and flushes no more: every later daemon must know.
#[test]
fn abuse_X_a_write_cache_that_is_off_stays_off_in_the_next_daemon() {
    let holder = Holder::start();
    let device = FakeDevice::new(DeviceKind::Block, 1);
    let (server, front) = connected_with(&device, holder.session_store());
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    let set_cache = |value: u8| {
        let header = codec::ConfigHeader { offset: 32, size: 1, flags: 0 };
        front.ok(Request::SetConfig, &[header.as_bytes(), &[value]].concat(), &[]);
    };
    // Saved when it is answered: no other message follows.
    set_cache(0);
    device.vanish();
    server.stop();
    for _ in 0..2 {
        let device = FakeDevice::new(DeviceKind::Block, 1);
        let server = serve(&device, nowhere(), holder.session_store());
        device.wait_for(&Call::Start(0));
        let calls = device.calls();
        let at = |call: &Call| calls.iter().position(|c| c == call);
        let told = at(&Call::KeepWritingThrough).expect("the driver's choice was forgotten");
        assert!(told < at(&Call::Start(0)).unwrap(), "{calls:?}");
        device.vanish();
        server.stop();
    }
    let device = FakeDevice::new(DeviceKind::Block, 1);
    let server = serve(&device, nowhere(), holder.session_store());
    set_cache(1);
    device.vanish();
    server.stop();
    let device = FakeDevice::new(DeviceKind::Block, 1);
    let _server = serve(&device, nowhere(), holder.session_store());
    device.wait_for(&Call::Start(0));
    assert!(!device.calls().contains(&Call::KeepWritingThrough));
}

/// A session that the port cannot go on with: its driver lives, and its VMM connects anew.
#[test]
fn abuse_X_a_write_cache_that_is_off_stays_off_when_the_session_does_not_fit() {
    let holder = Holder::start();
    let device = FakeDevice::new(DeviceKind::Block, 2);
    let (server, front) = connected_with(&device, holder.session_store());
    front.hello(BASIC);
    let header = codec::ConfigHeader { offset: 32, size: 1, flags: 0 };
    front.ok(Request::SetConfig, &[header.as_bytes(), &[0]].concat(), &[]);
    server.stop();
    let device = FakeDevice::new(DeviceKind::Block, 1);
    serve(&device, nowhere(), holder.session_store()).wait();
    assert!(device.calls().contains(&Call::KeepWritingThrough));
}

/// The daemon dies after each of the saves of a whole handshake; the next one sees the message
/// that was not answered, and the handshake goes on as if nothing had happened.
#[test]
fn abuse_P10_a_daemon_killed_within_any_message_of_the_handshake() {
    for kind in [DeviceKind::Net, DeviceKind::Block] {
        for survives in 1..14 {
            let holder = Holder::start();
            let session_store = Until { inner: holder.session_store(), left: Mutex::new(survives) };
            let device = FakeDevice::new(kind, 1);
            let (ours, theirs) = pair();
            // Our own copy of the daemon's end: what the kernel queues there outlives the daemon.
            let front = Arc::new(FrontEnd::on(theirs));
            let mut driver = ModelDriver::new(Layout::Packed, 16);
            let messages = handshake(&driver);
            let server = serve(&device, Endpoint::Fd(ours), Arc::new(session_store));
            // The save before the first message is number 1.
            device.wait_for(&Call::Connected(true));
            for (i, (request, body, fd)) in messages.iter().enumerate() {
                let fds: Vec<BorrowedFd<'_>> = fd.iter().map(AsFd::as_fd).collect();
                if i + 1 == survives {
                    break;
                }
                front.ok(*request, body, &fds);
            }
            device.vanish();
            server.stop();

            let device = FakeDevice::new(kind, 1);
            let _server = serve(&device, nowhere(), holder.session_store());
            // The message in which it died is sent again by nobody: it is in the socket already
            // when it was peeked. Here it was not yet sent, or (last) everything was.
            for (request, body, fd) in messages.iter().skip(survives - 1) {
                let fds: Vec<BorrowedFd<'_>> = fd.iter().map(AsFd::as_fd).collect();
                front.ok(*request, body, &fds);
            }
            device.wait_for(&Call::Start(0));
            let id = offer(&mut driver);
            assert_eq!(device.take(0, 8), [id], "{kind:?}, {survives} saves");
        }
    }
}

type Step = (Request, Vec<u8>, Option<OwnedFd>);

/// The state-changing messages of a start, each acknowledged; REPLY_ACK comes first.
fn handshake(driver: &ModelDriver) -> Vec<Step> {
    let state = |num: u32| codec::VringState { index: 0, num }.as_bytes().to_vec();
    let own = |fd: BorrowedFd<'_>| Some(fd.try_clone_to_owned().unwrap());
    let features = BASIC | feature::RING_PACKED;
    let word = 0u64.to_ne_bytes().to_vec();
    let protocols = codec::protocol::REPLY_ACK | codec::protocol::STATUS;
    vec![
        (Request::SetProtocolFeatures, protocols.to_ne_bytes().to_vec(), None),
        (Request::SetOwner, vec![], None),
        (Request::SetFeatures, features.to_ne_bytes().to_vec(), None),
        (Request::SetVringCall, word.clone(), own(driver.call_event().as_fd())),
        (Request::SetMemTable, table(&[region(driver)]), Some(driver.fd())),
        (Request::SetVringNum, state(16), None),
        (Request::SetVringBase, state(0), None),
        (Request::SetVringAddr, addr(0, driver).as_bytes().to_vec(), None),
        (Request::SetVringErr, word.clone(), own(driver.err_event().as_fd())),
        (Request::SetVringKick, word, own(driver.kick_event().as_fd())),
        (Request::SetVringEnable, state(1), None),
        (Request::SetStatus, 15u64.to_ne_bytes().to_vec(), None),
    ]
}

/// A message that was peeked, obeyed and saved, but neither answered nor consumed, is obeyed
/// again by the next daemon.
#[test]
fn abuse_P10_a_message_left_in_the_socket_is_answered_by_the_next_daemon() {
    let holder = Holder::start();
    let device = FakeDevice::new(DeviceKind::Net, 1);
    let (server, front) = connected_with(&device, holder.session_store());
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    server.stop();
    // Nobody is there; the VMM asks and waits.
    let steps: [Step; 4] = [
        (Request::SetOwner, vec![], None),
        (Request::AddMemReg, single(region(&driver)), Some(driver.fd())),
        (Request::SetFeatures, BASIC.to_ne_bytes().to_vec(), None),
        (Request::SetVringNum, codec::VringState { index: 0, num: 16 }.as_bytes().to_vec(), None),
    ];
    for (request, body, fd) in steps {
        let fds: Vec<BorrowedFd<'_>> = fd.iter().map(AsFd::as_fd).collect();
        front.send_id(request as u32, &body, &fds, true);
        let device = FakeDevice::new(DeviceKind::Net, 1);
        let server = serve(&device, nowhere(), holder.session_store());
        assert_eq!(front.reply().u64(), 0, "{request:?} repeated");
        assert_eq!(device.running(), [0]);
        server.stop();
    }
}

#[test]
fn a_holder_that_is_restarted_gets_the_sessions_again() {
    let mut holder = Holder::start();
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let (server, front) = connected_with(&device, holder.session_store());
    let driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    holder.kill();
    // Without it the session works, and says so.
    front.state(Request::SetVringEnable, 0, 1);
    assert!(!server.status().held);
    assert_eq!(device.running(), [0]);
    holder.run();
    front.state(Request::SetVringEnable, 0, 1);
    assert!(server.status().held);
    assert_eq!(holder.session_store().list().unwrap(), ["vm/port"]);
}

#[test]
fn a_session_that_does_not_fit_the_port_any_more_is_dropped() {
    let holder = Holder::start();
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let (server, front) = connected_with(&device, holder.session_store());
    front.hello(BASIC);
    server.stop();
    let device = FakeDevice::new(DeviceKind::Net, 4);
    let server = serve(&device, nowhere(), holder.session_store());
    assert!(front.try_reply().is_none(), "the VMM must be able to connect anew");
    server.wait();
    assert!(holder.session_store().list().unwrap().is_empty());
}

/// The VMM ended while no daemon was there: nobody owns the memory that the queues would write.
#[test]
fn abuse_X_the_queues_of_a_dead_front_end_do_not_run_again() {
    let holder = Holder::start();
    let device = FakeDevice::new(DeviceKind::Block, 1);
    let (server, front) = connected_with(&device, holder.session_store());
    let mut driver = ModelDriver::new(Layout::Split, 16);
    front.start(BASIC, &driver);
    offer(&mut driver);
    device.take(0, 8);
    device.vanish();
    server.stop();
    // Words that nobody has read do not keep it alive.
    front.send(Request::GetFeatures, &[], &[]);
    drop(front);
    let device = FakeDevice::new(DeviceKind::Block, 1);
    serve(&device, nowhere(), holder.session_store()).wait();
    assert!(!device.calls().contains(&Call::Start(0)), "{:?}", device.calls());
    assert!(holder.session_store().list().unwrap().is_empty());
}

/// Refuses saves from a number on, as a holder that is full does.
struct Full {
    inner: Arc<HolderStore>,
    left: Mutex<usize>,
}

impl SessionStore for Full {
    fn is_persistent(&self) -> bool {
        true
    }
    fn save(
        &self,
        port: &str,
        state: &SavedSession,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), VhostUserError> {
        let mut left = self.left.lock().unwrap();
        *left = left.checked_sub(1).ok_or(VhostUserError::Holder("full".to_owned()))?;
        self.inner.save(port, state, fds)
    }
    fn load(&self, port: &str) -> Result<Option<(SavedSession, Vec<PeerFd>)>, VhostUserError> {
        self.inner.load(port)
    }
    fn forget(&self, port: &str) -> Result<(), VhostUserError> {
        self.inner.forget(port)
    }
}

#[test]
fn abuse_X_a_state_that_cannot_be_saved_takes_the_older_one_with_it() {
    let holder = Holder::start();
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let session_store = Full { inner: holder.session_store(), left: Mutex::new(3) };
    let (server, front) = connected_with(&device, Arc::new(session_store));
    front.hello(BASIC);
    assert_eq!(holder.session_store().list().unwrap(), [] as [&str; 0]);
    assert!(!server.status().held);
    assert_ne!(front.get_u64(Request::GetFeatures), 0);
}

#[test]
fn a_port_that_is_taken_away_is_forgotten() {
    let holder = Holder::start();
    let device = FakeDevice::new(DeviceKind::Net, 2);
    let (server, front) = connected_with(&device, holder.session_store());
    front.hello(BASIC);
    assert_eq!(holder.session_store().list().unwrap(), ["vm/port"]);
    server.stop_and_forget();
    assert!(holder.session_store().list().unwrap().is_empty());
    assert!(front.try_reply().is_none());
}
