//! Messages on the socket: received whole with their descriptors, consumed only when they have
//! been dealt with.
//!
//! A message is first *peeked*: it stays in the socket, so that a daemon killed while it works on
//! it leaves it to the next one. [`Incoming::consume`] takes it off. A message that does not lie in
//! the socket in one piece (never seen from a real front end) is read piece by piece instead; it
//! cannot be seen twice.
//!
//! A quirk of Linux: peeking at a message without descriptors also shows those of the message
//! behind it. So a peek that shows too many is believed only when nothing is behind; else
//! [`Incoming::consume`], which reads for good and is exact, has the last word.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use base::peer_fd::PeerFd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use zerocopy::{FromBytes, IntoBytes};

use crate::codec::{Fds, HEADER_LEN_BYTES, Header, MAX_FDS, Request, check_fds};
use crate::error::VhostUserError;

/// Room for the control data of [`MAX_FDS`] descriptors and one more, so that one too many shows.
const CONTROL_LEN_BYTES: usize = rustix::cmsg_space!(ScmRights(MAX_FDS + 1));

/// Message with its descriptors.
#[derive(Debug)]
pub struct Incoming {
    /// Kind of the message.
    pub request: Request,
    /// Header.
    pub header: Header,
    /// Payload, copied out of the socket once.
    pub payload: Vec<u8>,
    /// Descriptors, closed when dropped.
    pub fds: Vec<PeerFd>,
    /// Number of descriptors that the peek showed.
    fd_count: usize,
    /// Bytes still in the socket.
    pending_len_bytes: usize,
}

impl Incoming {
    /// Takes the message off the socket, closing the second copies of its descriptors. Fails when
    /// it had another number of them than was dealt with.
    pub fn consume(&mut self, socket: BorrowedFd<'_>) -> Result<(), VhostUserError> {
        if self.pending_len_bytes == 0 {
            return Ok(());
        }
        let mut rights = Rights::default();
        while self.pending_len_bytes > 0 {
            let mut waste = vec![0u8; self.pending_len_bytes];
            match recv_into(socket, &mut waste, Some(&mut rights), RecvFlags::DONTWAIT) {
                // Nothing there although we peeked it: the peer cannot take bytes back.
                Ok((0, _)) | Err(Errno::AGAIN) => break,
                Ok((n, _)) => self.pending_len_bytes -= n.min(self.pending_len_bytes),
                Err(e) => return Err(VhostUserError::io("reading a message")(e)),
            }
        }
        let exact = rights.fds.len() == self.fd_count && !rights.truncated;
        if exact || self.request.shape().fds == Fds::Optional {
            return Ok(());
        }
        Err(VhostUserError::BadFds {
            message: self.request.message(),
            got: rights.count(),
            want: self.fd_count.to_string(),
        })
    }
}

/// Result of a look at the socket.
#[derive(Debug)]
pub enum Received {
    /// Message, checked.
    Message(Incoming),
    /// No message yet.
    Nothing,
    /// The front end is gone, between two messages.
    Closed,
    /// The caller's `stop` was rung while we waited for the rest of a message.
    Stopped,
}

/// Receives one message, if there is one. Waits only for the rest of a message that has begun, and
/// then also for `stop`.
pub fn receive(socket: BorrowedFd<'_>, stop: BorrowedFd<'_>) -> Result<Received, VhostUserError> {
    let mut header = [0u8; HEADER_LEN_BYTES];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    let seen = match recv_into(socket, &mut header, None, flags) {
        Ok((0, _)) => return Ok(Received::Closed),
        Ok((n, _)) => n,
        Err(Errno::AGAIN) => return Ok(Received::Nothing),
        // A front end that died with unread replies in its socket.
        Err(Errno::CONNRESET) => return Ok(Received::Closed),
        Err(e) => return Err(VhostUserError::io("reading a message")(e)),
    };
    if seen < HEADER_LEN_BYTES {
        return receive_in_pieces(socket, stop);
    }
    let header = parse_header(&header);
    let request = header.check()?;
    let total = HEADER_LEN_BYTES + header.size as usize;
    let mut bytes = vec![0u8; total];
    let mut rights = Rights::default();
    let (n, _) = recv_into(socket, &mut bytes, Some(&mut rights), flags)
        .map_err(VhostUserError::io("reading a message"))?;
    if n < total {
        // The duplicates are closed here; the pieces bring the real ones.
        drop(rights);
        return receive_in_pieces(socket, stop);
    }
    if wants_no_fds(request, &bytes) && !rights.is_empty() {
        let waiting = rustix::io::ioctl_fionread(socket)
            .map_err(VhostUserError::io("counting bytes in the socket"))?;
        if waiting > total as u64 {
            rights = Rights::default();
        }
    }
    finish(request, header, &bytes, rights, total).map(Received::Message)
}

/// Receives a message piece by piece, which consumes it.
fn receive_in_pieces(
    socket: BorrowedFd<'_>,
    stop: BorrowedFd<'_>,
) -> Result<Received, VhostUserError> {
    let mut rights = Rights::default();
    let mut bytes = vec![0u8; HEADER_LEN_BYTES];
    if !fill(socket, stop, &mut bytes, 0, &mut rights)? {
        return Ok(Received::Stopped);
    }
    if rights.truncated {
        // What was read is not a whole header.
        return Err(VhostUserError::FdsOnPart { got: rights.count(), limit: MAX_FDS });
    }
    let header = parse_header(&bytes);
    let request = header.check()?;
    bytes.resize(HEADER_LEN_BYTES + header.size as usize, 0);
    if !fill(socket, stop, &mut bytes, HEADER_LEN_BYTES, &mut rights)? {
        return Ok(Received::Stopped);
    }
    finish(request, header, &bytes, rights, 0).map(Received::Message)
}

fn finish(
    request: Request,
    header: Header,
    bytes: &[u8],
    rights: Rights,
    pending_len_bytes: usize,
) -> Result<Incoming, VhostUserError> {
    let payload = bytes[HEADER_LEN_BYTES..].to_vec();
    check_fds(request, &payload, rights.fds.len(), rights.truncated)?;
    let fd_count = rights.fds.len();
    Ok(Incoming { request, header, payload, fds: rights.fds, fd_count, pending_len_bytes })
}

fn wants_no_fds(request: Request, bytes: &[u8]) -> bool {
    check_fds(request, &bytes[HEADER_LEN_BYTES..], 0, false).is_ok()
}

fn parse_header(bytes: &[u8]) -> Header {
    // Both callers give 12 bytes; a header of zeroes would be refused for its version.
    Header::read_from_prefix(bytes).map_or(Header { request: 0, flags: 0, size: 0 }, |(h, _)| h)
}

/// Fills `bytes[from..]`; false when `stop` fired first.
fn fill(
    socket: BorrowedFd<'_>,
    stop: BorrowedFd<'_>,
    bytes: &mut [u8],
    mut from: usize,
    rights: &mut Rights,
) -> Result<bool, VhostUserError> {
    while from < bytes.len() {
        let want = bytes.len();
        match recv_into(socket, &mut bytes[from..], Some(rights), RecvFlags::DONTWAIT) {
            Ok((0, _)) | Err(Errno::CONNRESET) => {
                return Err(VhostUserError::Cut { got: from, want });
            }
            Ok((n, _)) => from += n,
            Err(Errno::AGAIN) => {
                if !wait(socket, PollFlags::IN, stop)? {
                    return Ok(false);
                }
            }
            Err(e) => return Err(VhostUserError::io("reading a message")(e)),
        }
        if rights.truncated {
            // No need to wait for the rest: it will be refused.
            break;
        }
    }
    Ok(true)
}

/// Waits for `events` on `fd`; false when `stop` fired.
fn wait(
    fd: BorrowedFd<'_>,
    events: PollFlags,
    stop: BorrowedFd<'_>,
) -> Result<bool, VhostUserError> {
    let mut set =
        [PollFd::from_borrowed_fd(fd, events), PollFd::from_borrowed_fd(stop, PollFlags::IN)];
    retry(|| poll(&mut set, None::<&Timespec>)).map_err(VhostUserError::io("waiting"))?;
    Ok(set[1].revents().is_empty())
}

/// Waits until a descriptor is readable (or hung up), and returns which are.
pub(crate) fn wait_for(
    fds: &[BorrowedFd<'_>],
    limit: Option<Duration>,
) -> Result<Vec<bool>, VhostUserError> {
    let mut set: Vec<PollFd<'_>> =
        fds.iter().map(|&fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let limit = limit
        .map(|d| Timespec { tv_sec: d.as_secs() as i64, tv_nsec: i64::from(d.subsec_nanos()) });
    retry(|| poll(&mut set, limit.as_ref())).map_err(VhostUserError::io("waiting"))?;
    Ok(set.iter().map(|p| !p.revents().is_empty()).collect())
}

/// Descriptors collected over the pieces of one message.
#[derive(Debug, Default)]
pub(crate) struct Rights {
    pub fds: Vec<PeerFd>,
    pub truncated: bool,
}

impl Rights {
    fn is_empty(&self) -> bool {
        self.fds.is_empty() && !self.truncated
    }

    /// Number of descriptors, for errors.
    fn count(&self) -> String {
        let n = self.fds.len();
        if self.truncated { format!("more than {n}") } else { n.to_string() }
    }
}

/// Makes one `recvmsg`. Without `rights` the kernel throws descriptors away (and says so, which is
/// ignored).
pub(crate) fn recv_into(
    socket: BorrowedFd<'_>,
    bytes: &mut [u8],
    rights: Option<&mut Rights>,
    flags: RecvFlags,
) -> Result<(usize, ReturnFlags), Errno> {
    let mut room = [MaybeUninit::uninit(); CONTROL_LEN_BYTES];
    let used = if rights.is_some() { CONTROL_LEN_BYTES } else { 0 };
    let mut control = RecvAncillaryBuffer::new(&mut room[..used]);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = retry(|| recvmsg(socket, &mut [IoSliceMut::new(bytes)], &mut control, flags))?;
    if let Some(rights) = rights {
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                rights.fds.extend(fds.map(PeerFd::from));
            }
        }
        rights.truncated |= got.flags.contains(ReturnFlags::CTRUNC);
        if rights.fds.len() > MAX_FDS {
            rights.truncated = true;
            rights.fds.truncate(MAX_FDS);
        }
    }
    Ok((got.bytes, got.flags))
}

/// Sends one message. A front end that does not read its replies is waited for until `stop`; false
/// when `stop` fired.
pub fn send(
    socket: BorrowedFd<'_>,
    stop: BorrowedFd<'_>,
    header: &Header,
    payload: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<bool, VhostUserError> {
    let mut bytes = Vec::with_capacity(HEADER_LEN_BYTES + payload.len());
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(payload);
    let mut sent = 0;
    while sent < bytes.len() {
        // Descriptors go with the first byte, once.
        let fds = if sent == 0 { fds } else { &[] };
        match send_once(socket, &bytes[sent..], fds) {
            Ok(n) => sent += n,
            Err(Errno::AGAIN) => {
                if !wait(socket, PollFlags::OUT, stop)? {
                    return Ok(false);
                }
            }
            Err(e) => return Err(VhostUserError::io("sending a reply")(e)),
        }
    }
    Ok(true)
}

/// Makes one `sendmsg`, which never blocks and never raises SIGPIPE.
pub(crate) fn send_once(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<usize, Errno> {
    let mut room = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    retry(|| sendmsg(socket.as_fd(), &[IoSlice::new(bytes)], &mut control, flags))
}

/// Runs a system call again when a signal interrupted it.
pub(crate) fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests;
