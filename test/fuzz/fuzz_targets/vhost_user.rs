//! A front end that says anything: the input is cut into messages, each with the descriptors that
//! its shape asks for (or some others), or goes onto the socket as it is. The session must end
//! without a panic, with its queues stopped.
#![cfg_attr(fuzzing, no_main)]

#[path = "device/mod.rs"]
mod device;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use device::{QUEUES, Sink, port_config};
use harness::fuzz_target;
use queue::Layout;
use queue::testing::ModelDriver;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};
use vhost_user::codec::{Fds, Header, Request};
use vhost_user::{NullStore, serve_port};
use zerocopy::IntoBytes;

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
    let device = Arc::new(Sink::new(first & 1 == 1));
    let config = port_config(ours);
    let stats = (0..QUEUES).map(|_| Arc::default()).collect();
    let server = serve_port(config, device.clone(), stats, Arc::new(NullStore)).unwrap();
    let driver = ModelDriver::new(Layout::Split, 16);
    if first & 2 == 2 {
        send(&theirs, data, &[]);
    } else {
        messages(&theirs, data, driver.fd().as_fd());
    }
    drop(theirs);
    server.wait();
    assert!(device.is_idle());
});
