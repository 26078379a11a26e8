//! Packets between processes of ours: bytes with descriptors, on a socket that keeps their bounds.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Most descriptors of a packet: code and folder of 16 modules, and a region for rings.
pub const MAX_FDS: usize = 33;

/// Sends a packet with up to [`MAX_FDS`] descriptors. A signal does not end it, and an end that has
/// gone raises none.
///
/// # Errors
/// That of `sendmsg(2)`; [`Errno::TOOMANYREFS`]: there are more descriptors.
pub fn send(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOMANYREFS);
    }
    let (pieces, flags) = ([IoSlice::new(bytes)], flags | SendFlags::NOSIGNAL);
    let send = || rustix::net::sendmsg(socket.as_fd(), &pieces, &mut ancillary, flags);
    rustix::io::retry_on_intr(send).map(drop)
}

/// Receives a packet into `bytes`: its length and descriptors. None: the other end has gone.
///
/// # Errors
/// That of `recvmsg(2)`.
pub fn receive(
    socket: impl AsFd,
    bytes: &mut [u8],
) -> Result<Option<(usize, Vec<OwnedFd>)>, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        let (mut pieces, flags) = ([IoSliceMut::new(bytes)], RecvFlags::CMSG_CLOEXEC);
        match rustix::net::recvmsg(socket.as_fd(), &mut pieces, &mut ancillary, flags) {
            Err(Errno::INTR) => {}
            Err(Errno::CONNRESET) => return Ok(None),
            got => break got?,
        }
    };
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(got) = message {
            fds.extend(got);
        }
    }
    Ok(Some((got.bytes, fds)))
}
