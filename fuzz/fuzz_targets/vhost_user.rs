//! A front end that says anything: the input is cut into messages, each with the descriptors that
//! its shape asks for (or some others), or goes onto the socket as it is. The session must end
//! without a panic, with its queues stopped.
#![no_main]

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex};

use libfuzzer_sys::fuzz_target;
use queue::testing::ModelDriver;
use queue::{GuestMemory, Layout, Vring};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};
use vhost_user::codec::{Fds, Header, Request};
use vhost_user::{
    ConfigNotifier, Device, DeviceError, DeviceKind, Endpoint, MemoryShare, NullKeeper, PortConfig,
    serve_port,
};
use zerocopy::IntoBytes;

const QUEUES: u16 = 2;

struct Sink {
    block: bool,
    vrings: Mutex<Vec<Vring>>,
}

impl Device for Sink {
    fn kind(&self) -> DeviceKind {
        if self.block { DeviceKind::Block } else { DeviceKind::Net }
    }
    fn features(&self) -> u64 {
        1 << 28 | 1 << 29 | 1 << 32 | 1 << 34
    }
    fn queue_count(&self) -> u16 {
        QUEUES
    }
    fn wants_inflight(&self) -> bool {
        self.block
    }
    fn has_config(&self) -> bool {
        self.block
    }
    fn read_config(&self, _offset: u32, out: &mut [u8]) -> Result<(), DeviceError> {
        out.fill(1);
        Ok(())
    }
    fn write_config(&self, _offset: u32, _data: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }
    fn activate(&self, _features: u64) -> Result<(), DeviceError> {
        Ok(())
    }
    fn start_queue(&self, vring: Vring) -> Result<(), DeviceError> {
        self.vrings.lock().unwrap().push(vring);
        Ok(())
    }
    fn stop_queue(&self, index: u16) -> Result<Option<Vring>, DeviceError> {
        let mut vrings = self.vrings.lock().unwrap();
        let at = vrings.iter().position(|v| v.parts.index == index);
        Ok(at.map(|at| vrings.remove(at)))
    }
    fn update_memory(&self, memory: Arc<GuestMemory>) -> Result<(), DeviceError> {
        for vring in self.vrings.lock().unwrap().iter_mut() {
            vring.queue.set_memory(memory.clone()).expect("rings without memory run");
        }
        Ok(())
    }
    fn set_notifier(&self, _notifier: Option<Arc<dyn ConfigNotifier>>) {}
    fn reset(&self) {
        self.vrings.lock().unwrap().clear();
    }
}

fn send(socket: &OwnedFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut room = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    }
    // The session may have hung up already, or the socket be full: both are fine.
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let _ = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags);
}

fn fd_count(request: Request, body: &[u8]) -> usize {
    match request.shape().fds {
        Fds::Exact(n) => n,
        Fds::Optional => 0,
        Fds::UnlessNoFd => usize::from(body.get(1).is_none_or(|b| b & 1 == 0)),
        Fds::PerRegion => usize::from(body.first().copied().unwrap_or(0)).min(64),
    }
}

/// Message, number of extra descriptors, length of the body, then the body.
fn messages(socket: &OwnedFd, mut data: &[u8], fd: BorrowedFd<'_>) {
    while let [id, how, len, rest @ ..] = data {
        let (body, rest) = rest.split_at((*len as usize).min(rest.len()));
        data = rest;
        let request = Request::ALL[usize::from(*id) % Request::ALL.len()];
        let extra = usize::from(how >> 4 == 0xf);
        let fds = vec![fd; fd_count(request, body) + extra];
        let header = Header::request(request as u32, body.len() as u32, how & 1 == 1);
        send(socket, &[header.as_bytes(), body].concat(), &fds);
    }
    send(socket, data, &[]);
}

fuzz_target!(|data: &[u8]| {
    let Some((&first, data)) = data.split_first() else { return };
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    let device = Arc::new(Sink { block: first & 1 == 1, vrings: Mutex::default() });
    let config = PortConfig {
        name: "fuzz".to_owned(),
        endpoint: Endpoint::Fd(ours),
        socket_mode: 0,
        memory_share: MemoryShare::new(),
    };
    let stats = (0..QUEUES).map(|_| Arc::default()).collect();
    let server = serve_port(config, device.clone(), stats, Arc::new(NullKeeper)).unwrap();
    let driver = ModelDriver::new(Layout::Split, 16);
    if first & 2 == 2 {
        send(&theirs, data, &[]);
    } else {
        messages(&theirs, data, driver.fd().as_fd());
    }
    drop(theirs);
    server.wait();
    assert!(device.vrings.lock().unwrap().is_empty());
});
