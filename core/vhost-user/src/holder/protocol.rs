//! Protocol of daemon and holder: one packet per request and per answer, on a Unix
//! SEQPACKET socket. A packet is a header, the port's name, and a blob; descriptors go beside it.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;

use base::limits::{MAX_MEMORY_REGIONS, MAX_NAME_LEN_BYTES, MAX_QUEUES};
use base::peer_fd::PeerFd;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::error::VhostUserError;
use crate::wire::retry;

/// Magic number "MRHL", by which a packet of another protocol is recognized.
pub const MAGIC: u32 = u32::from_le_bytes(*b"MRHL");
/// Version of this protocol; the holder may be older than the daemon.
pub const VERSION: u16 = 1;
/// Most bytes of a port's name (`vm/port`).
pub const MAX_PORT_LEN_BYTES: usize = 2 * MAX_NAME_LEN_BYTES + 1;
/// Most bytes of a port's state: 64 regions of about 120 bytes and 33 queues of about 400 in JSON
/// are 21 KiB; a packet must also fit into a socket's default send buffer.
pub const MAX_BLOB_LEN_BYTES: usize = 64 << 10;
/// Most descriptors of a port: socket, slots, log, inflight, back-end channel, one per memory
/// region, three per queue. Below the kernel's 253 per packet.
pub const MAX_FDS: usize = 5 + MAX_MEMORY_REGIONS + 3 * MAX_QUEUES as usize;

const HEADER_LEN_BYTES: usize = size_of::<Header>();
/// Room for the largest packet and one byte more, so that a larger one shows.
const PACKET_LEN_BYTES: usize = HEADER_LEN_BYTES + MAX_PORT_LEN_BYTES + MAX_BLOB_LEN_BYTES + 1;
const CONTROL_LEN_BYTES: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// Request to the holder, or kind of its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Op {
    /// Keep this blob and these descriptors for the port, instead of what was kept.
    Put = 1,
    /// Give back what is kept for the port; it stays kept.
    Get = 2,
    /// Drop what is kept for the port.
    Forget = 3,
    /// Name the ports: the answer's blob has one per line.
    List = 4,
    /// Done; with blob and descriptors where they were asked for.
    Done = 100,
    /// Nothing is kept for the port.
    Nothing = 101,
    /// Refused; the blob says why.
    Refused = 102,
}

impl Op {
    fn from_number(number: u16) -> Option<Self> {
        [Self::Put, Self::Get, Self::Forget, Self::List, Self::Done, Self::Nothing, Self::Refused]
            .into_iter()
            .find(|&op| op as u16 == number)
    }
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: u32,
    version: u16,
    op: u16,
    name_len: u32,
    blob_len: u32,
}

/// Request or answer.
#[derive(Debug)]
pub struct Packet {
    /// Request or kind of answer.
    pub op: Op,
    /// Name of the port; empty where the request is about none.
    pub port: String,
    /// State of the session, opaque to the holder.
    pub blob: Vec<u8>,
    /// Descriptors of the session.
    pub fds: Vec<PeerFd>,
}

/// Result of a receive.
#[derive(Debug)]
pub enum Received {
    /// Packet, checked.
    Packet(Packet),
    /// The other side is gone.
    Closed,
    /// Nothing came (yet), or the time is over.
    Nothing,
}

fn nonsense(text: impl Into<String>) -> VhostUserError {
    VhostUserError::Holder(text.into())
}

/// Sends one packet; blocks at most as long as the socket's time limit.
pub fn send(
    socket: BorrowedFd<'_>,
    op: Op,
    port: &str,
    blob: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), VhostUserError> {
    if blob.len() > MAX_BLOB_LEN_BYTES || fds.len() > MAX_FDS || port.len() > MAX_PORT_LEN_BYTES {
        return Err(nonsense(format!(
            "{port}: {} bytes and {} descriptors; the limits are {MAX_BLOB_LEN_BYTES} and {MAX_FDS}",
            blob.len(),
            fds.len()
        )));
    }
    let header = Header {
        magic: MAGIC,
        version: VERSION,
        op: op as u16,
        name_len: port.len() as u32,
        blob_len: blob.len() as u32,
    };
    let parts =
        [IoSlice::new(header.as_bytes()), IoSlice::new(port.as_bytes()), IoSlice::new(blob)];
    let mut room = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(fds.len()))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(nonsense(format!("{} descriptors do not fit in one packet", fds.len())));
    }
    retry(|| sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL))
        .map(drop)
        .map_err(VhostUserError::io("sending to the holder's socket"))
}

/// Receives one packet, checked. An error means that the other side does not speak this protocol:
/// close the connection.
pub fn receive(socket: BorrowedFd<'_>, flags: RecvFlags) -> Result<Received, VhostUserError> {
    let mut bytes = vec![0u8; PACKET_LEN_BYTES];
    let mut room = [MaybeUninit::uninit(); CONTROL_LEN_BYTES];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let got = retry(|| recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags));
    let got = match got {
        Ok(got) => got,
        Err(rustix::io::Errno::AGAIN) => return Ok(Received::Nothing),
        Err(rustix::io::Errno::CONNRESET) => return Ok(Received::Closed),
        Err(e) => return Err(VhostUserError::io("reading the holder's socket")(e)),
    };
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights.map(PeerFd::from));
        }
    }
    if got.bytes == 0 {
        return Ok(Received::Closed);
    }
    if got.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
        return Err(nonsense(format!(
            "packet of more than {} bytes or {MAX_FDS} descriptors (or no descriptors left here)",
            PACKET_LEN_BYTES - 1
        )));
    }
    bytes.truncate(got.bytes);
    parse(&bytes, fds).map(Received::Packet)
}

fn parse(bytes: &[u8], fds: Vec<PeerFd>) -> Result<Packet, VhostUserError> {
    let (header, rest) = Header::read_from_prefix(bytes).map_err(|_| {
        nonsense(format!("packet of {} bytes; a header has {HEADER_LEN_BYTES}", bytes.len()))
    })?;
    if header.magic != MAGIC || header.version != VERSION {
        let (magic, version) = (header.magic, header.version);
        return Err(nonsense(format!(
            "packet with magic {magic:#x}, version {version}; expected {MAGIC:#x}, {VERSION}"
        )));
    }
    let op = Op::from_number(header.op)
        .ok_or_else(|| nonsense(format!("unknown request {}", header.op)))?;
    let (name_len, blob_len) = (header.name_len as usize, header.blob_len as usize);
    let sum = name_len.checked_add(blob_len);
    if name_len > MAX_PORT_LEN_BYTES || blob_len > MAX_BLOB_LEN_BYTES || sum != Some(rest.len()) {
        return Err(nonsense(format!(
            "packet announces {name_len} + {blob_len} bytes and has {}; the limits are \
             {MAX_PORT_LEN_BYTES} and {MAX_BLOB_LEN_BYTES}",
            rest.len()
        )));
    }
    let (name, blob) = rest.split_at(name_len);
    let port = std::str::from_utf8(name).map_err(|_| nonsense("a port's name is not UTF-8"))?;
    Ok(Packet { op, port: port.to_owned(), blob: blob.to_vec(), fds })
}
