//! A session that the holder gives back, whatever is in it: it is taken over or refused, it goes
//! through JSON unchanged, and when its front end is gone no queue runs.

#![cfg_attr(fuzzing, no_main)]

#[path = "device/mod.rs"]
mod device;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use base::event::Event;
use base::peer_fd::PeerFd;
use device::{QUEUES, Sink, port_config};
use harness::{Input, fuzz_target};
use queue::Layout;
use queue::testing::{GUEST_BASE, ModelDriver};
use rustix::fs::MemfdFlags;
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use vhost_user::session_store::{SavedAddrs, SavedInflight, SavedRegion, SavedSession, SavedVring};
use vhost_user::{SessionStore, VhostUserError, serve_port};

/// Bytes of files that are no memory of the guest.
const FILE_BYTES: u64 = 64 << 10;

type Saved = (SavedSession, Vec<PeerFd>);

/// Gives back once what it has.
struct Once(Mutex<Option<Saved>>);

impl SessionStore for Once {
    fn is_persistent(&self) -> bool {
        true
    }

    fn save(
        &self,
        _port: &str,
        state: &SavedSession,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(), VhostUserError> {
        assert_eq!(state.fd_count(), fds.len());
        Ok(())
    }

    fn load(&self, _port: &str) -> Result<Option<Saved>, VhostUserError> {
        Ok(self.0.lock().expect("nobody panics").take())
    }

    fn forget(&self, _port: &str) -> Result<(), VhostUserError> {
        Ok(())
    }
}

/// Mostly `near`, at times near it, or anything.
fn number(input: &mut Input<'_>, near: u64) -> u64 {
    match input.u8() {
        0..200 => near,
        200..230 => near.wrapping_add(u64::from(input.u16())).wrapping_sub(256),
        230..250 => input.u16().into(),
        _ => input.u64(),
    }
}

fn vring(input: &mut Input<'_>, setup: [u64; 3]) -> SavedVring {
    let bits = input.u16();
    let has = |bit: u16| bits >> bit & 1 == 0;
    let [desc, used, avail] = setup.map(|at| number(input, at));
    let addrs = SavedAddrs { flags: u32::from(!has(8)), desc, used, avail, log: input.u8().into() };
    SavedVring {
        size: has(0).then(|| number(input, 16) as u16),
        addrs: has(1).then_some(addrs),
        base: number(input, 0) as u32,
        enabled: has(2).then_some(has(3)),
        polled: !has(4),
        has_kick: has(5),
        has_call: has(6),
        has_err: has(7),
        running: has(9),
        has_base: has(10),
    }
}

fn session(input: &mut Input<'_>, driver: &ModelDriver) -> SavedSession {
    let bits = input.u8();
    let has = |bit: u8| bits >> bit & 1 == 0;
    let (region, setup) = (driver.region(), driver.setup().addrs);
    let user = |at: u64| at.wrapping_sub(GUEST_BASE).wrapping_add(region.user_addr);
    let rings = [user(setup.desc), user(setup.device), user(setup.driver)];
    let regions = (0..input.u8() % 4).map(|at| SavedRegion {
        guest_addr: number(input, region.guest_addr + (u64::from(at) << 32)),
        user_addr: number(input, region.user_addr + (u64::from(at) << 32)),
        len_bytes: number(input, region.len_bytes),
        mmap_offset: number(input, region.mmap_offset),
    });
    let regions = regions.collect();
    let inflight = SavedInflight {
        mmap_size: number(input, 4096),
        mmap_offset: number(input, 0),
        num_queues: number(input, QUEUES.into()) as u16,
        queue_size: number(input, 16) as u16,
        packed: input.u8() & 1 == 1,
        private: input.u8() & 1 == 1,
    };
    let queues = if has(7) { QUEUES } else { input.u8().into() };
    SavedSession {
        version: number(input, 1) as u32,
        protocol_features: number(input, 0x1_fa3f),
        features: has(0).then(|| {
            let some = u64::from(input.u8()) << 26;
            number(input, 1 << 30 | 1 << 32 | some)
        }),
        owned: has(1),
        status: input.u8(),
        mtu: (!has(2)).then(|| input.u16()),
        has_slots: !has(3),
        regions,
        log: (!has(4)).then(|| (number(input, 4096), number(input, 0))),
        inflight: (!has(5)).then_some(inflight),
        has_backend: !has(6),
        write_through: input.u8() & 1 == 1,
        vrings: (0..queues).map(|_| vring(input, rings)).collect(),
    }
}

/// Descriptors that belong to the state, but for some that are of the wrong kind.
fn files(input: &mut Input<'_>, saved: &SavedSession, driver: &ModelDriver) -> Vec<OwnedFd> {
    let file = || {
        let file =
            rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = file.expect("memory");
        rustix::fs::ftruncate(&file, FILE_BYTES).expect("memory");
        file
    };
    let event = || {
        let event = Event::new().expect("an eventfd");
        event.as_fd().try_clone_to_owned().expect("a descriptor")
    };
    let mut files: Vec<OwnedFd> = Vec::new();
    files.extend(saved.has_slots.then(file));
    files.extend(saved.regions.iter().map(|_| driver.fd()));
    files.extend(saved.log.map(|_| file()));
    files.extend(saved.inflight.map(|_| file()));
    files.extend(saved.has_backend.then(|| pair().0));
    while files.len() + 1 < saved.fd_count().min(200) {
        files.push(event());
    }
    match input.u8() {
        0..220 => {}
        220..240 => drop(files.pop()),
        at => {
            let last = files.len().saturating_sub(1);
            if let Some(file) = files.get_mut(usize::from(at - 240).min(last)) {
                *file = event();
            }
        }
    }
    files
}

fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC;
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("sockets")
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Input(bytes);
    let first = input.u8();
    let layout = if first & 2 == 0 { Layout::Split } else { Layout::Packed };
    let driver = ModelDriver::new(layout, 16);
    let saved = session(&mut input, &driver);
    let json = serde_json::to_vec(&saved).expect("JSON");
    assert_eq!(serde_json::from_slice::<SavedSession>(&json).ok().as_ref(), Some(&saved));
    let (ours, theirs) = pair();
    // It says nothing more, but is there: a session whose front end is gone is not taken over.
    shutdown(&theirs, Shutdown::Write).expect("a socket");
    let mut fds = vec![PeerFd::from(ours)];
    fds.extend(files(&mut input, &saved, &driver).into_iter().map(PeerFd::from));
    // The port itself has a connection whose other end is gone.
    let device = Arc::new(Sink::new(first & 1 == 1));
    let stats = (0..QUEUES).map(|_| Arc::default()).collect();
    let session_store = Arc::new(Once(Mutex::new(Some((saved, fds)))));
    let server = serve_port(port_config(pair().0), device.clone(), stats, session_store);
    let server = server.expect("a port");
    server.wait();
    assert!(device.is_idle());
});
