//! Descriptors of hostile peers, for tests of several crates.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::fs::OFlags;

/// A socket whose close waits until its peer has read, for ten minutes at most; and the peer.
pub fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ours = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let theirs = listener.accept().unwrap().0;
    ours.set_nonblocking(true).unwrap();
    let chunk = [0u8; 64 << 10];
    while ours.write(&chunk).is_ok() {}
    ours.set_nonblocking(false).unwrap();
    let linger = Some(Duration::from_secs(600));
    rustix::net::sockopt::set_socket_linger(&ours, linger).unwrap();
    (ours.into(), theirs)
}

/// Fills an eventfd and makes it blocking, as its other owner can at any time. What was rung before
/// is taken.
pub fn fill_and_block(event: impl AsFd) {
    let flags = rustix::fs::fcntl_getfl(&event).unwrap();
    rustix::fs::fcntl_setfl(&event, flags | OFlags::NONBLOCK).unwrap();
    let _ = rustix::io::read(&event, &mut [0u8; 8]);
    rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).unwrap();
    rustix::fs::fcntl_setfl(&event, flags - OFlags::NONBLOCK).unwrap();
}
