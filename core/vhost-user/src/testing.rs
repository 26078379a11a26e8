//! Scripted front end, and a device that writes down what it is asked, for tests (feature
//! `testing`).
#![allow(missing_docs, clippy::unwrap_used)]

mod bad_messages;
mod fake_device;

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base::counter::QueueStats;
use queue::testing::ModelDriver;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recvmsg,
    sendmsg, socket_with, socketpair,
};
use zerocopy::{FromBytes, IntoBytes};

pub use self::bad_messages::*;
pub use self::fake_device::{Call, FakeDevice, PANICS, WHOLE_DEVICE};
use crate::codec::{self, Header, Request, feature, protocol};
use crate::{
    Device, DeviceKind, Endpoint, NullStore, PortConfig, PortServer, SessionStore, VmShare,
    serve_port,
};

/// After this a test has failed; nothing waits for it in the good case.
pub const LIMIT: Duration = Duration::from_secs(5);

/// `VIRTIO_F_VERSION_1`.
pub const VERSION_1: u64 = 1 << 32;
/// Features that drivers of these tests negotiate, besides the ring format.
pub const BASIC: u64 = VERSION_1 | feature::PROTOCOL_FEATURES | feature::INDIRECT_DESC;

/// A region of memory below that of model drivers.
pub const LOW: codec::Region =
    codec::Region { guest_addr: 0, len_bytes: 1 << 20, user_addr: 0x5000_0000, mmap_offset: 0 };

pub struct Reply {
    pub header: Header,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Reply {
    pub fn u64(&self) -> u64 {
        u64::from_ne_bytes(self.body[..8].try_into().unwrap())
    }
}

/// The VMM's side of a session.
pub struct FrontEnd {
    pub socket: OwnedFd,
}

impl FrontEnd {
    pub fn on(socket: OwnedFd) -> Self {
        for way in [Timeout::Recv, Timeout::Send] {
            set_socket_timeout(&socket, way, Some(LIMIT)).unwrap();
        }
        Self { socket }
    }

    pub fn dial(path: &Path) -> Self {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
                .unwrap();
        connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        Self::on(socket)
    }

    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
        let mut room = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        }
        sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)
    }

    pub fn send_id(&self, id: u32, body: &[u8], fds: &[BorrowedFd<'_>], need_reply: bool) {
        let header = Header::request(id, body.len() as u32, need_reply);
        let bytes = [header.as_bytes(), body].concat();
        // A back end that has closed already makes this fail; the next read tells.
        let _ = self.send_raw(&bytes, fds);
    }

    pub fn send(&self, request: Request, body: &[u8], fds: &[BorrowedFd<'_>]) {
        self.send_id(request as u32, body, fds, false);
    }

    /// The next reply; none when the back end has closed.
    pub fn try_reply(&self) -> Option<Reply> {
        let mut bytes = [0u8; 12];
        let mut fds = Vec::new();
        if !self.fill(&mut bytes, &mut fds) {
            return None;
        }
        let (header, _) = Header::read_from_prefix(&bytes).unwrap();
        let mut body = vec![0u8; header.size as usize];
        assert!(self.fill(&mut body, &mut fds), "reply cut off");
        Some(Reply { header, body, fds })
    }

    fn fill(&self, bytes: &mut [u8], fds: &mut Vec<OwnedFd>) -> bool {
        let mut at = 0;
        while at < bytes.len() {
            let mut room = [MaybeUninit::uninit(); 256];
            let mut control = RecvAncillaryBuffer::new(&mut room);
            let mut parts = [IoSliceMut::new(&mut bytes[at..])];
            let got = match recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::empty()) {
                Ok(got) => got,
                Err(rustix::io::Errno::CONNRESET) => return false,
                Err(e) => panic!("no answer: {e}"),
            };
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            if got.bytes == 0 {
                return false;
            }
            at += got.bytes;
        }
        true
    }

    pub fn reply(&self) -> Reply {
        self.try_reply().expect("the back end closed the connection")
    }

    /// Sends with `need_reply` and returns the acknowledgement.
    pub fn ack(&self, request: Request, body: &[u8], fds: &[BorrowedFd<'_>]) -> Option<u64> {
        self.send_id(request as u32, body, fds, true);
        self.try_reply().map(|r| r.u64())
    }

    pub fn ok(&self, request: Request, body: &[u8], fds: &[BorrowedFd<'_>]) {
        assert_eq!(self.ack(request, body, fds), Some(0), "{request:?} was refused");
    }

    pub fn ask(&self, request: Request, body: &[u8]) -> Reply {
        self.send(request, body, &[]);
        let reply = self.reply();
        assert_eq!(reply.header.request, request as u32);
        assert_eq!(reply.header.flags, 0x5, "version 1 and the reply bit");
        reply
    }

    pub fn get_u64(&self, request: Request) -> u64 {
        self.ask(request, &[]).u64()
    }

    pub fn state(&self, request: Request, index: u32, num: u32) {
        self.ok(request, codec::VringState { index, num }.as_bytes(), &[]);
    }

    pub fn get_base(&self, index: u32) -> u32 {
        let body = codec::VringState { index, num: 0 };
        let reply = self.ask(Request::GetVringBase, body.as_bytes());
        codec::VringState::read_from_bytes(&reply.body).unwrap().num
    }

    /// Everything before the rings, all protocol features accepted.
    pub fn hello(&self, features: u64) {
        let offered = self.get_u64(Request::GetFeatures);
        assert_eq!(features & !offered, 0, "the port does not offer this");
        let protocols = self.get_u64(Request::GetProtocolFeatures);
        self.send(Request::SetProtocolFeatures, &protocols.to_ne_bytes(), &[]);
        self.ok(Request::SetOwner, &[], &[]);
        self.ok(Request::SetFeatures, &features.to_ne_bytes(), &[]);
    }

    pub fn set_memory(&self, driver: &ModelDriver) {
        self.ok(Request::SetMemTable, &table(&[region(driver)]), &[driver.fd().as_fd()]);
    }

    /// Size, base and addresses of a ring.
    pub fn set_ring(&self, index: u32, driver: &ModelDriver, base: u32) {
        self.state(Request::SetVringNum, index, u32::from(driver.setup().size));
        self.state(Request::SetVringBase, index, base);
        self.ok(Request::SetVringAddr, addr(index, driver).as_bytes(), &[]);
    }

    pub fn set_doorbells(&self, index: u32, driver: &ModelDriver) {
        let word = u64::from(index).to_ne_bytes();
        self.ok(Request::SetVringErr, &word, &[driver.err_event().as_fd()]);
        self.ok(Request::SetVringCall, &word, &[driver.call_event().as_fd()]);
        self.ok(Request::SetVringKick, &word, &[driver.kick_event().as_fd()]);
    }

    /// One queue up and running.
    pub fn start(&self, features: u64, driver: &ModelDriver) {
        self.hello(features);
        self.set_memory(driver);
        self.start_ring(0, driver, 0);
    }

    pub fn start_ring(&self, index: u32, driver: &ModelDriver, base: u32) {
        self.set_ring(index, driver, base);
        self.set_doorbells(index, driver);
        self.state(Request::SetVringEnable, index, 1);
    }
}

pub fn user_addr(driver: &ModelDriver, guest: u64) -> u64 {
    let region = driver.region();
    region.user_addr + (guest - region.guest_addr)
}

pub fn addr(index: u32, driver: &ModelDriver) -> codec::VringAddr {
    let addrs = driver.setup().addrs;
    codec::VringAddr {
        index,
        flags: 0,
        desc: user_addr(driver, addrs.desc),
        used: user_addr(driver, addrs.device),
        avail: user_addr(driver, addrs.driver),
        log: 0,
    }
}

pub fn region(driver: &ModelDriver) -> codec::Region {
    let r = driver.region();
    codec::Region {
        guest_addr: r.guest_addr,
        len_bytes: r.len_bytes,
        user_addr: r.user_addr,
        mmap_offset: r.mmap_offset,
    }
}

pub fn table(regions: &[codec::Region]) -> Vec<u8> {
    let mut body = (regions.len() as u64).to_ne_bytes().to_vec();
    for region in regions {
        body.extend_from_slice(region.as_bytes());
    }
    body
}

pub fn single(region: codec::Region) -> Vec<u8> {
    codec::SingleRegion { padding: 0, region }.as_bytes().to_vec()
}

pub fn memfd(len: u64) -> OwnedFd {
    let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    fd
}

pub fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap()
}

/// A port on a socket pair, and the front end on its other end.
pub fn connected(device: &Arc<FakeDevice>) -> (PortServer, FrontEnd) {
    connected_with(device, Arc::new(NullStore))
}

pub fn connected_with(
    device: &Arc<FakeDevice>,
    session_store: Arc<dyn SessionStore>,
) -> (PortServer, FrontEnd) {
    let (ours, theirs) = pair();
    (serve(device, Endpoint::Fd(ours), session_store), FrontEnd::on(theirs))
}

pub fn serve(
    device: &Arc<FakeDevice>,
    endpoint: Endpoint,
    session_store: Arc<dyn SessionStore>,
) -> PortServer {
    let config = PortConfig {
        name: "vm/port".to_owned(),
        endpoint,
        socket_mode: 0o600,
        share: VmShare::new(),
    };
    let stats = (0..device.queue_count()).map(|_| Arc::new(QueueStats::default())).collect();
    serve_port(config, device.clone(), stats, session_store).unwrap()
}

/// A device and a connected front end in one.
pub fn simple(kind: DeviceKind) -> (Arc<FakeDevice>, PortServer, FrontEnd) {
    let device = FakeDevice::new(kind, 2);
    let (server, front) = connected(&device);
    (device, server, front)
}

/// All protocol features that a device of this kind is offered with.
pub fn protocols(front: &FrontEnd) -> u64 {
    let all = front.get_u64(Request::GetProtocolFeatures);
    assert_ne!(all & protocol::REPLY_ACK, 0);
    all
}

/// `n` requests through a queue that runs.
pub fn io(device: &FakeDevice, driver: &mut ModelDriver, index: u16, n: usize) {
    for _ in 0..n {
        let buffer = (driver.alloc(64), 64);
        let id = driver.offer(&[buffer], &[]);
        assert_eq!(device.serve(index, 8), 1);
        assert_eq!(driver.used(), Some((id, 0)));
    }
}
